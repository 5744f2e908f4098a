"""What others ran: the form that stands beside their records, and its rows on a page."""

import re
from collections import Counter
from pathlib import Path

import pandas as pd

from study.core import files
from study.core.arms import ROOT
from study.core.text import rounded
from study.records import metrics
from study.records.keeping import redact
from study.records.runs import load
from study.records.sections import HardwareOfRun

FOLDER = ROOT / "reports" / "contributed"  # a wheel has none
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
SHOWN = ["contributor", "machine", "part", "arm", "rows", "passes", "step s", "predicted s", "with machine.json s"]


def form(runs: Path, entity: str) -> str:
    """Return the text of the folder's README: torchtitan's six points, as far as the records say them."""
    runs_of_hour = load([runs])
    records = [run.record for run in runs_of_hour]
    first = next((record for record in records if record.status == "done"), records[0] if records else None)
    links = "unknown"
    if (runs / "links.json").exists():
        speeds = files.from_json(files.read_below(runs, "links.json", 10_000))["all_reduce_bytes_per_s"]
        links = f"{rounded(max(speeds.values()) / 1e9, '.3g')} GB/s in an all-reduce of all"
    software = {name: version for name, version in first.software.items() if version} if first else {}
    ended = Counter(record.status for record in records).most_common()
    values = {
        "entity": entity or "(your name, or your group's)",
        "model": ", ".join(dict.fromkeys(str(record.requested.model) for record in records)),
        "hardware": machine_of(first.hardware) if first else "",
        "links": links,
        "protocol": first.cell.protocol if first else "",
        "scale": first.cell.scale if first else "",
        "commit": first.commit if first else "",
        "versions": ", ".join(f"{name} {version}" for name, version in software.items()),
        "ended": f"Cells: {', '.join(f'{count} {status}' for status, count in ended) or 'none has ended'}.",
    }
    return redact(FORM.format(**values))


def machine_of(hardware: HardwareOfRun) -> str:
    return hardware.gpus_line if hardware.devices else f"{hardware.cores} cores of {hardware.cpu}"


# --- the page


def contributor(folder: Path) -> str:
    """Return the name in a contribution's form."""
    try:
        line = re.search(r"(?m)^\| entity \| (.*?) *\|$", (folder / "README.md").read_text(encoding="utf-8"))
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
            rows.append(
                {
                    "contributor": who,
                    "machine": machine_of(record.hardware),
                    "part": record.cell.part,
                    "arm": record.arm,
                    "rows": run.facts["micro_batch"],
                    "passes": run.facts["accumulation"],
                    "step s": metrics.value(record, "step_s"),
                    "predicted s": before["step_s"].get(cell),
                    "with machine.json s": here["step_s"].get(cell),
                    "peak_bytes": metrics.value(record, "tracked_peak_bytes"),
                    "predicted_bytes": before["allocated_bytes"].get(cell),
                }
            )
    return pd.DataFrame(rows, columns=[*SHOWN, "peak_bytes", "predicted_bytes"])


def _predictions(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, index_col="cell") if path.exists() else pd.DataFrame(columns=["step_s", "allocated_bytes"])


def all_folders() -> list[Path]:
    """Return the contributions that this repository keeps."""
    return sorted(path for path in FOLDER.glob("*") if path.is_dir()) if FOLDER.exists() else []
