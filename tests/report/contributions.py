"""What a contribution must keep: the rules by which CI takes a folder of somebody else's records."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from study.core.arms import ROOT
from study.core.files import why
from study.records import metrics
from study.records.keeping import redact
from study.records.runs import Run, Runs, load
from study.report import contributed

FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9-]+_[A-Za-z0-9-]+")
POINTS = ("entity", "model", "hardware", "configuration", "versions", "notes")
FIRST_LOSSES = 3  # steps whose losses all arms share: later ones drift apart in 16 bits
LOSSES_APART = 0.02  # of the loss: of bf16 weights and autocast, and of gradients in 4 bits


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
        contributed.table([folder])
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
