"""What others ran: the form that stands beside their records, what a contribution must keep, and its rows on a page."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from study.core import files
from study.core.arms import ROOT
from study.core.files import why
from study.records import metrics
from study.records.keeping import redact
from study.records.runs import Run, Runs, load
from study.records.sections import HardwareOfRun

FOLDER = ROOT / "reports" / "contributed"  # a wheel has none
FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9-]+_[A-Za-z0-9-]+")
POINTS = ("entity", "model", "hardware", "configuration", "versions", "notes")
FORM = """# An hour on {hardware}

| point | |
|---|---|
| entity | {entity} |
| model | {model} |
| hardware | {hardware}. Interconnect: {links} |
| configuration | protocol `{protocol}`, scale {scale}, commit {commit}; `predicted.csv` stood before the first cell |
| versions | {versions} |
| notes | |

{ended}

To contribute: correct the table, put this folder into `reports/contributed/` as DATE_GPU_NAME, and open a pull request.
"""
FIRST_LOSSES = 3  # steps whose losses all arms share: later ones drift apart in 16 bits
LOSSES_APART = 0.02  # of the loss: of bf16 weights and autocast, and of gradients in 4 bits
SHOWN = ["contributor", "machine", "part", "arm", "rows", "passes", "step s", "predicted s", "with machine.json s"]


def form(runs: Path, entity: str) -> str:
    """Return the text of the folder's README: torchtitan's six points, as far as the records say them."""
    runs_of_hour = load([runs])
    records = [run.record for run in runs_of_hour]
    first = next((record for record in records if record.status == "done"), records[0] if records else None)
    links = "unknown"
    if (runs / "links.json").exists():
        speeds = files.from_json(files.read_below(runs, "links.json", 10_000))["all_reduce_bytes_per_s"]
        links = f"{max(speeds.values()) / 1e9:.3g} GB/s in an all-reduce of all"
    software = {name: version for name, version in first.software.items() if version} if first else {}
    ended = pd.Series([record.status for record in records], dtype=str).value_counts()
    values = {
        "entity": entity or "(your name, or your group's)",
        "model": ", ".join(dict.fromkeys(str(record.requested.model) for record in records)),
        "hardware": machine_of(first.hardware) if first else "",
        "links": links,
        "protocol": first.cell.protocol if first else "",
        "scale": first.cell.scale if first else "",
        "commit": first.commit if first else "",
        "versions": ", ".join(f"{name} {version}" for name, version in software.items()),
        "ended": f"Cells: {', '.join(f'{count} {status}' for status, count in ended.items()) or 'none has ended'}.",
    }
    return redact(FORM.format(**values))


def machine_of(hardware: HardwareOfRun) -> str:
    return hardware.gpus_line if hardware.devices else f"{hardware.cores} cores of {hardware.cpu}"


# --- what a contribution must keep


def problems(folder: Path) -> list[str]:
    """Return a sentence for each rule that a contribution does not keep."""
    broken = []
    if not FOLDER_NAME.fullmatch(folder.name):
        broken.append(f"{folder.name} is not DATE_GPU_NAME, such as 2026-12-01_H100x8_somebody")
    try:
        text = (folder / "README.md").read_text()
    except OSError:
        text = ""
    missing = [point for point in POINTS if f"| {point} |" not in text]
    if missing or "(your name" in text:
        broken.append(
            f"README.md does not have {', '.join(missing) or 'the name'}: the archive of `study hour` has the form"
        )
    try:
        table([folder])
    except (OSError, ValueError, KeyError) as error:
        broken.append(f"predicted.csv or predicted-here.csv cannot be read ({why(error)})")
    if redact(text) != text:
        broken.append("README.md has a path, a name of a machine or a secret")
    runs = load([folder / "runs"])
    broken += runs.set_aside
    if not runs.done:
        broken.append("no run is done")
    for run in runs:
        broken += [f"{run.folder.name}: {problem}" for problem in _of_run(run)]
    return broken + list(_losses_apart(runs))


def _of_run(run: Run) -> Iterator[str]:
    record = run.record
    written = record.model_dump(mode="json", by_alias=True)
    if redact(written) != written:
        yield "it has a path, a name of a machine or a secret"
    if record.commit is None or record.dirty:
        yield "it does not say which commit ran, or the tree was changed"
    elif not is_known(record.commit):
        yield f"its commit {record.commit[:12]} is not in this history"
    card_bytes = max((device.memory_bytes or 0 for device in record.hardware.devices), default=0)
    for rank in record.memory.per_rank:
        peaks = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_used_bytes)
        known = [peak for peak in peaks if peak]
        if card_bytes and known and (sorted(known) != known or known[-1] > card_bytes):
            yield f"its peaks {known} do not grow from allocated to the driver's, or exceed the card"
            break
    if (reached := metrics.value(record, "mfu")) and reached > 1:
        yield f"it reached {reached:.2f} of the GPU's peak"


def is_known(commit: str) -> bool:
    """Return whether a commit is in this history. True where there is none to ask: an installed copy."""
    if not (ROOT / ".git").exists():
        return True
    words = ["git", "-c", "safe.directory=*", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 0


def _losses_apart(runs: Runs) -> Iterator[str]:
    """Say of which cells the first losses differ between arms that begin with the same weights."""
    same = sorted((run for run in runs.done if run.record.requested.init == "random"), key=_cell_of)
    for _, members in itertools.groupby(same, _cell_of):
        losses = {run.folder.name: run.record.loss.train[:FIRST_LOSSES] for run in members}
        for step in zip(*losses.values(), strict=False):
            if max(step) - min(step) > LOSSES_APART * min(step):
                yield f"the losses of {', '.join(losses)} are {', '.join(f'{loss:.4g}' for loss in step)}"
                break


def _cell_of(run: Run) -> str:
    return run.key(without=("arm", "config_file", "allocator"))


# --- the page


def contributor(folder: Path) -> str:
    """Return the name in a contribution's form."""
    try:
        line = re.search(r"(?m)^\| entity \| (.*?) *\|$", (folder / "README.md").read_text())
    except OSError:
        return "you"
    return line[1] if line else "unknown"


def table(folders: list[Path]) -> pd.DataFrame:
    """Return a row for each run of contributions: what it measured beside what was predicted of it before."""
    rows = []
    for folder in folders:
        before, here = (_predictions(folder / name) for name in ("predicted.csv", "predicted-here.csv"))
        who = contributor(folder)
        for run in load([folder]).done:
            record = run.record
            cell = run.folder.name.rpartition("-r")[0]
            row: dict[str, Any] = {"contributor": who, "machine": machine_of(record.hardware)}
            row |= {"part": record.cell.part, "arm": record.arm, "rows": run.facts["micro_batch"]}
            row |= {"passes": run.facts["accumulation"], "step s": metrics.value(record, "step_s")}
            row |= {"predicted s": before.get((cell, "step_s")), "with machine.json s": here.get((cell, "step_s"))}
            row["peak_bytes"] = metrics.value(record, "tracked_peak_bytes")
            row["predicted_bytes"] = before.get((cell, "allocated_bytes"))
            rows.append(row)
    return pd.DataFrame(rows, columns=[*SHOWN, "peak_bytes", "predicted_bytes"])


def _predictions(path: Path) -> dict[tuple[str, str], float]:
    if not path.exists():
        return {}
    wide = pd.read_csv(path, index_col="cell")[["step_s", "allocated_bytes"]]
    return {
        (str(cell), str(name)): value for cell, row in wide.iterrows() for name, value in row.items() if value == value
    }


def all_folders() -> list[Path]:
    """Return the contributions that this repository keeps."""
    return sorted(path for path in FOLDER.glob("*") if path.is_dir()) if FOLDER.exists() else []
