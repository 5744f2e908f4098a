"""Runs the cells of a protocol unattended, each as one `accelerate launch`. A failed cell never ends a sweep.

The same command continues an interrupted sweep. A sweep with a time limit starts no run that would not end in time.
"""

import contextlib
import errno
import fnmatch
import glob
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from study.core import arms, doctor, machine, operators
from study.core.errors import Stop, nearest
from study.core.gpus import num_gpus
from study.core.optimizers import refusal
from study.records import schema, store
from study.records.schema import Record
from study.sweeps import launches, outcomes, protocol
from study.sweeps.protocol import Cell

FILTERS = ("arm", "offload", "ranks", "part", "repair", *protocol.SETTINGS)
SETTLED = ("done", "oom")  # a second try would end in the same way
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no later cell could be written either
BEFORE_THE_RECORD_S = 20  # for starting Python and the libraries, before the record's first time
GROWTH = 1.25  # a try that was cut off needs more time than it had, and another may take a little longer


class Outcome(NamedTuple):
    """How a cell ended: the status and reason in its record, or "left" if it was not started."""

    status: str
    reason: str | None = None
    ran: bool = False  # now, and not in an earlier sweep

    @classmethod
    def of(cls, record: Record, ran: bool = False) -> "Outcome":
        reason = None
        if record.error:
            reason = f"{record.error.message}. What to do: {record.error.what_to_do}"
        return cls(record.status, reason, ran)


def plan(cells: list[Cell], repeats: int, lane: tuple[int, int] = (1, 1)) -> list[Cell]:
    """Return a lane's cells by repeat, every other repeat backwards: a drift of the machine affects all arms."""
    if not 1 <= lane[0] <= lane[1]:
        what = f"--lane {lane[0]} {lane[1]} is none"
        raise Stop(what, "give the number of this sweep and of all, such as 1 2 and 2 2")
    planned: list[Cell] = []
    for repeat in range(1, repeats + 1):
        planned += [replace(cell, repeat=repeat) for cell in cells]
        cells = cells[::-1]
    return planned[lane[0] - 1 :: lane[1]]


def chosen(cells: list[Cell], only: tuple[str, ...]) -> list[Cell]:
    """Return the cells that match all filters. A filter is key=pattern, such as arm=zero3*."""
    for rule in only:
        key, _, pattern = rule.partition("=")
        if key not in FILTERS:
            raise Stop(f"--only must be a name and a pattern, such as 'arm=zero3*' (got {rule})", nearest(key, FILTERS))
        values = {str(cell.value(key)): None for cell in cells}
        cells = [cell for cell in cells if fnmatch.fnmatch(str(cell.value(key)), pattern)]
        if not cells:
            raise Stop(f"--only {rule} matches no cell", f"the values of {key} here are {', '.join(values)}")
    return cells


def why_not(cell: Cell, gpus: int) -> Stop | None:
    """Return why this machine cannot run a cell, or None if nothing is known against it."""
    if not gpus and cell.scale != "tiny":
        return Stop(f"scale {cell.scale} needs a GPU", "use such a machine, or --scale tiny", "unavailable")
    if 0 < gpus < (cell.ranks or 1):
        what = f"{cell.ranks} ranks need as many GPUs, and there are {gpus}"
        return Stop(what, "use such a machine, or give fewer ranks", "unavailable")
    arm = arms.load_arm(cell.arm)
    optimizer, precision, init, saves = map(cell.value, ("optimizer", "precision", "init", "save_every"))
    return (
        launches.lacking()
        or doctor.why_not(arm, gpus, cell.ranks or 1)
        or refusal(arm, optimizer, precision, init != "none", saves)
    )


def sweep(
    cells: list[Cell],
    runs: Path,
    timeout_s: float,
    nvme_dir: Path | None,
    progress: Any,
    minutes: float | None = None,
    lane: tuple[int, int] = (1, 1),
) -> list[Outcome]:
    """Run the cells that are not done, one after the other. `progress` is that of study.cli.progress."""
    over = math.inf  # when the sweep's time ends
    ended: list[Outcome] = []

    def launch(cell: Cell) -> Record:
        progress.start(cell)
        folder = runs / f"{cell.run_name}.{max(attempts(runs, cell), default=0) + 1}"
        if saved := [path for path in tries_of_today(runs, cell) if store.checkpoints(path)]:
            cell = replace(cell, settings=cell.settings | {"resume": str(saved[-1].resolve())})
        return launches.run(cell, folder, timeout_s, over, nvme_dir, progress.step)

    with lock_runs_folder(runs, lane):
        if minutes is not None:
            over = time.monotonic() + 60 * minutes
            # Those that were never tried come first: a failing cell does not use up each sweep's time.
            cells = sorted(cells, key=lambda cell: bool(attempts(runs, cell)))
        for cell in cells:
            outcome = outcome_of(cell, runs, over, launch)
            ended.append(outcome)
            progress.end(cell, outcome)
    return ended


def outcome_of(cell: Cell, runs: Path, over: float, launch: Callable[[Cell], Record]) -> Outcome:
    """Launch a cell unless it is done, cannot run here, or has no time left."""
    try:
        if record := done_before(runs, cell):
            return Outcome.of(record)
        if stop := why_not(cell, num_gpus()):
            return refused(cell, runs, stop)
        left_s = over - time.monotonic()
        needed_s = expected_s(cell, runs)
        if left_s <= needed_s:
            return Outcome("left", f"it needs about {needed_s:.0f} s, and {max(left_s, 0):.0f} s are left")
        if cell.deepspeed:
            try:
                launches.get_release(cell.deepspeed)
            except Stop as stop:
                return refused(cell, runs, stop)
        if operators.missing(num_gpus(), (cell.arm,)):  # compiled here, so that it is no part of a run's time
            operators.compile_missing((cell.arm,))
        return Outcome.of(launch(cell), ran=True)
    except OSError as error:
        # --- its folder is gone or full: this cell is lost, or no other could be kept either
        if error.errno in FULL or not runs.is_dir():
            what = f"the sweep cannot write to {runs} ({error.strerror})"
            raise Stop(what, "make room, and start the sweep again") from error
        return Outcome("failed", f"its folder could not be used ({error}). What to do: start the sweep again")


def refused(cell: Cell, runs: Path, stop: Stop) -> Outcome:
    """Write a record of a cell that this machine cannot run, so that it is a row in every table."""
    folder = runs / f"{cell.run_name}.0"
    folder.mkdir(exist_ok=True)
    return Outcome.of(outcomes.write_end(folder, cell.new_record(folder), stop))


@contextlib.contextmanager
def lock_runs_folder(runs: Path, lane: tuple[int, int] = (1, 1)) -> Iterator[None]:
    """Lock a folder for one sweep, or for that of a lane. The kernel releases the lock when its holder dies."""
    import fcntl

    number, lanes = lane
    try:
        runs.mkdir(parents=True, exist_ok=True)
        file = (runs / (".sweep" if lanes == 1 else f".sweep-{number}-of-{lanes}")).open("a")
    except OSError as error:
        raise Stop(f"--runs {runs} cannot be used ({error.strerror})", "give a folder that you may write to") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stop(f"another sweep holds {runs}", "wait for it, or give other --runs") from None
        yield  # the file stays after a sweep, because another may be waiting to open it


def attempts(runs: Path, cell: Cell) -> dict[int, Path]:
    """Return the folders of a cell's tries by number."""
    numbered = [(path.suffix[1:], path) for path in runs.glob(f"{glob.escape(cell.run_name)}.*")]
    return {int(number): path for number, path in numbered if number.isdecimal()}


def tries_of_today(runs: Path, cell: Cell) -> dict[Path, Record]:
    """Return the tries of a cell with the present software and measure version, the oldest first."""
    tries = {}
    for _, path in sorted(attempts(runs, cell).items()):
        record = outcomes.read(path)
        if record is None or record.measure_version != schema.MEASURE_VERSION:
            continue
        wanted = machine.versions() | ({"deepspeed": cell.deepspeed} if cell.deepspeed else {})
        if wanted.items() <= record.software.items():
            tries[path] = record
    return tries


def done_before(runs: Path, cell: Cell) -> Record | None:
    """Return the record of a settled run of this cell with the present software and measure version, or None."""
    for record in tries_of_today(runs, cell).values():
        if record.status in SETTLED:
            return record
    return None


def expected_s(cell: Cell, runs: Path) -> float:
    """Return the seconds that a cell may take: by its longest try so far, or else its protocol's `reserve_s`."""
    records = filter(None, map(outcomes.read, runs.glob(f"{glob.escape(cell.name)}-r*.*")))
    # A run that failed may have ended at once, and would have taken longer. One that got no turn knows no machine.
    known = (record for record in records if record.status not in ("running", "failed") and record.hardware.cores)
    tries = [*filter(None, (record.wall_s for record in known))]
    if tries:
        return GROWTH * max(tries) + BEFORE_THE_RECORD_S
    return cell.reserve_s
