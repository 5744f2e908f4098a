"""Checkpoints on the disk: seals complete ones, removes old ones, and finds the last good one. It needs no torch.

`checkpoints/step-00000040/` contains the libraries' files, `progress.json` (how far the training was) and
`manifest.json`, which lists every file with its size and SHA-256. The folder is written as `step-00000040.part` and
renamed when all of it is on the disk. So an incomplete checkpoint has another name and never replaces a good one.
"""

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from study.core import files
from study.core.errors import Stop
from study.core.files import load, safe_join
from study.records import store
from study.records.schema import Evaluation, Requested, Resume, Section

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
PART = ".part"
NAME = re.compile(r"step-([0-9]{8})(\.part)?")
KEPT = 2  # the last checkpoint, and the one before in case the last one is damaged
MAX_BYTES = 2**30  # of progress.json: a loss and a rate for each step, at most ten million


class Progress(Section):
    """How far a training was, and the part of its record that a resumed run continues."""

    run_id: str
    arm: str
    ranks: int
    requested: Requested
    rows_per_step: int
    data_checksum: str
    step: int  # optimizer steps taken
    steps: int  # of the whole training: the learning rate depends on it
    losses: list[float]
    rates: list[float]
    evals: list[Evaluation]
    random_states: list[str]  # a digest for each rank: Accelerate fails to restore them without an error
    weights_checksum: str | None  # of all weights, however they are divided: a library may load none without an error
    resumes: list[Resume]  # the interruptions so far


class File(Section):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(BaseModel):
    files: dict[str, File]


def part_of(run_folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of a step is written."""
    return safe_join(run_folder, FOLDER, f"step-{step:08}{PART}")


def seal(part: Path) -> tuple[Path, int]:
    """List all files in a manifest, sync them to the disk, and rename the folder. Returns the folder and its bytes."""
    for path in part.rglob("*"):
        _to_disk(path)
    named = _files(part)
    files.write_below(part, MANIFEST, Manifest(files=named).model_dump_json(indent=1).encode())
    _to_disk(part)
    whole = part.with_name(part.name.removesuffix(PART))
    part.rename(whole)
    _to_disk(whole.parent)
    return whole, sum(file.bytes for file in named.values())


def _files(folder: Path) -> dict[str, File]:
    named = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            named[path.relative_to(folder).as_posix()] = File(bytes=path.stat().st_size, sha256=digest)
    return named


def forget_old(run_folder: Path) -> None:
    """Remove all complete checkpoints of a run except the last ones."""
    whole = [path for path, is_part in _all(run_folder) if not is_part]
    for path in whole[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def last_good(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and why each newer one was passed over."""
    passed_over: list[str] = []
    for path, is_part in _all(run_folder):
        reason = "it was cut off while it was written" if is_part else why_not_whole(path)
        if reason is None:
            return path, passed_over
        passed_over.append(f"{path.name.removesuffix(PART)}: {reason}")
    return None, passed_over


def why_not_whole(folder: Path) -> str | None:
    """Return why a checkpoint is not as it was sealed; None if it is, byte for byte."""
    try:
        manifest = load(folder / MANIFEST, Manifest, what="a manifest", remedy="", most_bytes=MAX_BYTES)
    except Stop as stop:
        return stop.what
    present = _files(folder)
    for name, sealed in manifest.files.items():
        if present.get(name) != sealed:
            return f"{name} is gone, or not as it was sealed"
    return None


def read_progress(checkpoint: Path) -> Progress:
    """Return how far the training of a checkpoint was. Raise Stop if that cannot be read."""
    remedy = "resume with the version of this study that wrote it"
    path = checkpoint / PROGRESS
    return load(path, Progress, what="the progress of a training", remedy=remedy, most_bytes=MAX_BYTES)


def how_it_ended(run_folder: Path) -> tuple[str | None, int | None]:
    """The status in an interrupted run's record, and the last step in its steps.jsonl. Unknown is None."""
    status = None
    with contextlib.suppress(Stop):
        status = store.load(run_folder).status
    steps = [line["step"] for line in store.read_steps(run_folder) if "loss" in line]
    return status, max(steps, default=None)


def _all(run_folder: Path) -> list[tuple[Path, bool]]:
    """A run's checkpoints, the newest first, and whether each is only a part. Other names are not ours."""
    with contextlib.suppress(OSError):
        matches = [(path, NAME.fullmatch(path.name)) for path in (run_folder / FOLDER).iterdir()]
        ours = [(int(match[1]), path, match[2] is not None) for path, match in matches if match]
        return [(path, is_part) for _, path, is_part in sorted(ours, reverse=True)]
    return []


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Else a rename may get there before the content."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
