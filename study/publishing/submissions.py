"""`study submit`: the records of anybody's machine, checked, without private information.

A submission is a folder: runs/, system.json with the fields of MLPerf's, and a README. It is data:
`--check` reads it as a stranger's, follows no link and runs nothing of it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import tyro

from study.errors import Stop
from study.io import files
from study.io.numbers import number_of
from study.io.parsing import from_json
from study.io.tables import say
from study.records import evidence, runs, store
from study.records.keeping import keep
from study.records.privacy import redact
from study.records.runs import Run, Runs

SYSTEM, README = "system.json", "README.md"
MOST_FILES = 10_000
TEXT = """\
# {name}

{count} records of {machine}, by `study submit`.

    study submit --check submissions/{name}
"""


def submit(
    folders: tyro.conf.Positional[tuple[Path, ...]] = (), /, *, into: Path | None = None, check: Path | None = None
) -> None:
    """Prepare records of your machine for a pull request, or check such a submission.

    Args:
        folders: Folders that contain runs.
        into: The folder to write, such as submissions/NAME. It must not exist.
        check: A submission. It is read only; what is wrong with it is said, and the exit status is 1.
    """
    if check is not None:
        return _report(check)
    if into is None or not folders:
        raise Stop("no runs or no --into is given", "study submit RUNS --into submissions/NAME")
    if into.exists():
        raise Stop(f"{into} exists already", "give another name as --into")
    if wrong := _refused(runs.load(folders, every_folder_has_runs=True)):
        raise Stop(
            f"these records do not pass: {'; '.join(wrong)}", "run these cells again, or leave their folders out"
        )
    count, left_out = keep(list(folders), into)
    if not count:
        raise Stop(f"no record can be submitted: {'; '.join(left_out)}", "run a cell to its end")
    kept = runs.load([into / "runs"])
    files.write_below(into, SYSTEM, (json.dumps(system(kept), indent=1) + "\n").encode())
    machine = "; ".join(sorted({run.record.machine_line for run in kept}))
    files.write_below(into, README, TEXT.format(name=into.name, count=count, machine=machine).encode())
    say(*(f"left out: {sentence}" for sentence in left_out))
    return _report(into)


def _report(folder: Path) -> None:
    """Print the table of a submission, for a comment on a pull request. Raise Stop if it is refused."""
    loaded = runs.load([folder / "runs"], every_folder_has_runs=True)
    wrong = [*_refused(loaded), *_odd(folder, loaded)]
    counts = f"{number_of(len(loaded), 'records')}, {number_of(len(wrong), 'reasons')} to refuse."
    say(counts, *(f"- {_quoted(each)}" for each in wrong), "")
    say("| run | arm | model | ranks | kind | status | s per step | peak |", "|---|---|---|---|---|---|---|---|")
    say(*(_line(run) for run in loaded))
    if wrong:
        raise Stop(f"the submission {folder.name} is refused: {wrong[0]}", "correct it, and submit it again")


def _refused(loaded: Runs) -> list[str]:
    """Return why records are not evidence: unreadable or impossible."""
    return list(evidence.gather(loaded).set_aside)


def _odd(folder: Path, loaded: Runs) -> Iterator[str]:
    """Yield what a submission may not have, or lacks."""
    wanted = {folder / SYSTEM, folder / README}
    records = {run.folder / store.RECORD for run in loaded}
    allowed = {path.resolve() for path in wanted} | records
    paths = [Path(top, name) for top, below, names in os.walk(folder) for name in [*below, *names]][: MOST_FILES + 1]
    if len(paths) > MOST_FILES:
        yield f"it has more than {MOST_FILES} files"
    for path in paths:
        if path.is_symlink():
            yield f"{path.relative_to(folder)} is a link"
        elif path.is_file() and path.resolve() not in allowed:
            yield f"{path.relative_to(folder)} is not part of a submission"
    yield from (f"{path.name} is missing" for path in sorted(wanted) if not path.is_file())
    yield from _odd_records(loaded)
    if (folder / SYSTEM).is_file() and from_json(files.read_below(folder, SYSTEM, store.MAX_BYTES)) != system(loaded):
        yield f"{SYSTEM} is not what the records say"


def _odd_records(loaded: Runs) -> Iterator[str]:
    for run in loaded:
        content = run.record.model_dump(mode="json", by_alias=True)
        if redact(content) != content:
            yield f"{run.name} has private information: paths, names of machines, addresses or secrets"


def _line(run: Run) -> str:
    peak = f"{run.peak_bytes / 1e6:.1f} MB" if run.peak_bytes else "unknown"
    seconds = f"{run.median_step_s:.3g}" if run.median_step_s else "unknown"
    values = (run.name, run.arm, run.model, run.ranks, run.kind, run.status, seconds, peak)
    return f"| {' | '.join(_quoted(str(value)) for value in values)} |"


def _quoted(text: str) -> str:
    """Return a stranger's words without what Markdown or GitHub would act on."""
    return "".join(letter if letter.isalnum() or letter in " .,;:_-+=()'/" else "?" for letter in text)[:300]


def system(loaded: Runs) -> dict:
    """Return the machine in the fields of MLPerf's descriptions of systems. Unknown is None."""
    done = [run.record for run in loaded]
    first = done[0]
    hardware = first.hardware
    if len({record.machine_line for record in done}) > 1:
        raise Stop("the records are of several machines", "submit the records of each machine by themselves")
    devices = hardware.devices
    libraries = ("torch", "deepspeed", "accelerate", "transformers")
    return {
        "system_name": first.machine_line,
        "number_of_nodes": len(first.machines) or 1,
        "host_processor_model_name": hardware.cpu,
        "host_processor_core_count": hardware.cores,
        "host_memory_capacity_bytes": hardware.host_memory_bytes,
        "host_storage_capacity_bytes": hardware.disk_total_bytes,
        "accelerator_model_name": devices[0].name if devices else None,
        "accelerators_per_node": len(devices),
        "accelerator_memory_capacity_bytes": devices[0].memory_bytes if devices else None,
        "accelerator_driver": hardware.driver,
        "operating_system": hardware.system,
        "framework": sorted({f"{name} {record.software.get(name)}" for record in done for name in libraries}),
    }
