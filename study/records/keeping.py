"""Copies records of runs into a folder, without private information."""

from pathlib import Path

from study.core.errors import Stop
from study.records import store
from study.records.impossible import impossible
from study.records.privacy import redact
from study.records.runs import run_folders
from study.records.schema import Record


def keep(folders: list[Path], into: Path) -> tuple[int, list[str]]:
    """Copy the record of every run below the folders. Return their number and why others were left out.

    A run keeps its path relative to the given folder, under that folder's name. An earlier copy is replaced. If two
    runs would get the same path, the second is left out.
    """
    left_out: list[str] = []
    kept: list[Path] = []
    for top in folders:
        paths = [path.resolve() for path in run_folders(top)]
        if not paths:
            raise Stop(f"there is no run below {top}", "give folders with runs")
        for folder in paths:
            relative = folder.relative_to(top.resolve())
            target = into / "runs" / top.resolve().name / (relative if relative.parts else folder.name)
            try:
                record = _record_to_keep(folder)
                if target in kept:
                    raise Stop(f"{folder} would be kept as {target}, where another run is: rename a folder", "")
            except Stop as stop:
                left_out.append(stop.what)
                continue
            kept.append(target)
            if target.resolve() != folder:
                store.write(target, Record.model_validate(redact(record.model_dump(by_alias=True))))
    return len(kept), left_out


def _record_to_keep(folder: Path) -> Record:
    """Return the record of a run that has ended. Raise Stop if it has not."""
    record = store.load(folder)
    if record.status == "running":
        raise Stop(f"{folder} is still running, or was cut off", "wait for its end")
    if faults := impossible(record):
        raise Stop(f"{folder} has impossible values: {'; '.join(faults)}", "run that cell again")
    return record
