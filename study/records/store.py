"""Reads and writes run folders.

A run is a folder with `record.json` (everything about it), `steps.jsonl` (a line for each step and evaluation) and
`log.txt`. `record.json` is first written with status "running" and replaced at the end, so a run that died is
recognisable.
"""

import contextlib
import datetime
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from study.core import files
from study.core.arms import ROOT
from study.core.errors import Stop
from study.records.schema import Record
from study.records.sections import CellOfRun, Error, Loss

RECORD = "record.json"
LEFTOVERS = ("steps.jsonl", "log.txt", "output.txt")  # a folder with one of these but no record was a run
MAX_BYTES = 32 * 2**20  # some 500,000 steps; the largest record in reports/ has 13 kB, some 2 kB a rank
CELL = "ZERO_STUDY_CELL"  # the environment variable in which a sweep names the cell it launches, as JSON
LONGEST_MESSAGE = 100_000  # the last lines of a launch may include a progress bar
END = ("status", "finished_utc", "error")
UNFINISHED = "the process ended before it was done"  # why a part after the training has no result yet


def now_utc() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def new(run_id: str, argv: list[str]) -> Record:
    """Return the record of a run that has just begun."""
    commit, dirty = commit_of_this_tree()
    cell = CellOfRun()
    with contextlib.suppress(ValidationError):
        cell = CellOfRun.model_validate_json(os.environ.get(CELL, "{}"))
    return Record(run_id=run_id, started_utc=now_utc(), commit=commit, dirty=dirty, argv=argv, cell=cell)


def write(folder: Path, record: Record) -> None:
    """Replace `record.json` in one step: a reader sees the old record or the new one, never half of one.

    A number that is not finite is a ValueError: JSON has none, and pydantic would write null, which means unknown.
    """
    text = json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False) + "\n"
    files.write_below(folder, RECORD, text.encode())


def load(folder: Path) -> Record:
    """Return the record of a run folder. Raise Stop if it is missing or broken.

    Of a run that did not come to its end, the losses are those that it wrote step by step.
    """
    record = read(folder / RECORD)
    if record.status != "done" and record.loss == Loss():
        lines = read_steps(folder)
        train = [line["loss"] for line in lines if line.get("loss") is not None]  # None: virtual, or not finite
        evals = [line for line in lines if "eval_loss" in line]
        with contextlib.suppress(ValidationError):  # the lines may be anybody's
            record.loss = Loss.model_validate({"train": train, "eval": evals})
    return record


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the last one last."""
    return sorted(folder.glob(f"checkpoints/step-{'[0-9]' * 8}"))


def run_folders(folder: Path) -> list[Path]:
    """Return every run folder below a folder. Folders inside a run folder are not runs."""
    holders = {path.parent for path in folder.rglob("*") if path.name in (RECORD, *LEFTOVERS)}
    return sorted(path for path in holders if holders.isdisjoint(path.parents))


def read(path: Path) -> Record:
    """Return the record in a file. Raise Stop if it cannot be read."""
    return files.load(
        path,
        Record,
        what="a valid record",
        remedy="run that cell again",
        most_bytes=MAX_BYTES,
        missing="name the folder of a run",
    )


def keep(folder: Path, record: Record) -> None:
    """Write a record, but keep an end that another rank has written meanwhile."""
    with locked(folder):
        refuse_removed(folder)
        written = load(folder)
        if written.status not in ("running", record.status):
            record = record.model_copy(update={name: getattr(written, name) for name in END})
        write(folder, record)


def refuse_removed(folder: Path) -> None:
    """Raise Stop if the folder of a run that goes on has lost its record, also if a heartbeat made the folder again."""
    if not (folder / RECORD).exists():
        raise Stop(f"{folder} was removed, or its {RECORD}", "start it again, and leave its folder until it ends")


def append_step(folder: Path, line: dict) -> None:
    refuse_removed(folder)
    with (folder / "steps.jsonl").open("a") as file:
        print(json.dumps(line, allow_nan=False), file=file)


def read_steps(folder: Path) -> list[dict]:
    """Return the lines of steps.jsonl. The last line may be incomplete, and there may be none."""
    lines: list[dict] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        # Up to a line that is broken. The checks of files.from_json take 10 s for 200,000 lines.
        lines += map(
            json.loads, files.read_below(folder, "steps.jsonl", MAX_BYTES).decode(errors="replace").splitlines()
        )
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def end_badly(folder: Path, stop: Stop, kind: str, launched_s: float = 0.0) -> bool | None:
    """Write the reason into the record, unless the record has ended already. Return whether this call wrote it.

    None: there is no record to write to, or its status is done and stays so. A record that began before `launched_s`
    (seconds since 1970) belongs to an earlier launch into the same folder.
    """
    try:
        with locked(folder):
            record = load(folder)
            if datetime.datetime.fromisoformat(record.started_utc).timestamp() < launched_s:
                return None
            if record.status != "running":
                return None if record.status == "done" else False
            _write_end(folder, ended(record, stop, kind))
    except (OSError, Stop):
        return None  # the folder or its record is what went wrong
    return True


def _write_end(folder: Path, record: Record) -> None:
    """Write a record; on a full disk over the old one, if that is longer, and without losses: steps.jsonl has them."""
    try:
        write(folder, record)
    except OSError as error:
        text = record.model_copy(update={"loss": Loss()}).model_dump_json(by_alias=True).encode()
        with (folder / RECORD).open("r+b") as file:
            room = os.fstat(file.fileno()).st_size
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(text) > room:
                raise
            file.write(text.ljust(room))  # in one call, and as long as before: no block is needed or freed


def ended(record: Record, stop: Stop, kind: str) -> Record:
    error = Error(kind=kind, message=stop.what[:LONGEST_MESSAGE], where=stop.where, what_to_do=stop.remedy)
    # This machine cannot run it: another word for the exit code, and a failure in the record.
    status = "failed" if stop.status == "unavailable" else stop.status
    return record.model_copy(update={"status": status, "finished_utc": now_utc(), "error": error})


def explain_what_failed(folder: Path, name: str, reason: str) -> str:
    """Record why a part after the training failed. Return the reason of the rank that failed first."""
    with locked(folder):
        record = load(folder)
        if getattr(record.observed, name) in (None, UNFINISHED):
            setattr(record.observed, name, reason)
            write(folder, record)
        return getattr(record.observed, name)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against the other ranks."""
    import fcntl

    # The folder, because each write puts another file in the place of record.json: a lock on that would be of the old
    # one.
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def commit_of_this_tree() -> tuple[str | None, bool | None]:
    """Return the commit of this source tree and whether it has changed since; None outside a checkout of it."""
    # Without it this is an installed copy, perhaps inside a checkout of something else, whose commit is not ours.
    if not (ROOT / ".git").exists():
        return None, None
    # Whoever owns the tree: its code is running here.
    # Git refuses a tree of another owner otherwise, as in a container that runs as root.
    command = ["git", "-c", "safe.directory=*", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    first, *others = status.splitlines()
    return first.removeprefix("# branch.oid "), any(not line.startswith("#") for line in others)
