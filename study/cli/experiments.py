"""`study sweep`: runs experiments, and shows how far it is."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from study.cli.progress import Progress, counted, exit_code, stoppable
from study.core.errors import Stop, refuse_beyond
from study.core.gpus import GPUS, Gpu, gpu_named, num_gpus
from study.core.settings import flag
from study.core.text import number_of, say, say_wrapped, show
from study.records.groups import differing
from study.sweeps import launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.protocol import Cell, Scale

if TYPE_CHECKING:
    from study.predict.front import Pace  # the predictor, which other sweeps do not need

MOST_GPUS = 64  # of one machine


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How cells are run."""

    runs: Path = Path("runs")
    """The folder for the run folders. Cells that are done there are not run again."""
    repeat: int = 1
    """Number of runs of each cell. The repeats are interleaved."""
    timeout_s: float = 3600
    """End a run that has written nothing, and so no step, for so many seconds. Loading is silent as well."""
    minutes: float | None = None
    """Start only cells that are expected to end within so many minutes from now. Default: no limit."""
    nvme_dir: Path | None = None
    """The folder for arms that offload to disk."""
    lane: tuple[int, int] = (1, 1)
    """Run every n-th cell only, as one of n sweeps over the same --runs: 1 2 and 2 2. Where the variable
    STUDY_DEVICE_LOCK names a file for both, one trains while the other starts Python and waits."""

    def __post_init__(self) -> None:
        for name, most in {"repeat": 1000, "timeout_s": 1e9, "minutes": 1e9}.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise Stop(f"{flag(name)} must be above 0 and at most {most} (got {value})", "correct the value")
        if self.runs.exists() and not self.runs.is_dir():
            raise Stop(f"--runs {self.runs} is no folder", "give a folder that you may write to")


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """A plan, for which nothing is run."""

    plan: bool = False
    """List the cells with predicted seconds and memory, the claims that they decide, and where --minutes end."""
    gpu: str | None = None
    """With --plan: the kind of GPU, such as H100."""
    gpus: int = 8
    """With --plan: their number."""
    machine: Path | None = None
    """With --plan: the machine.json of `study calibrate` there. Default: the one that ZERO_STUDY_MACHINE names."""


def sweep(
    name: str = "",
    /,
    *,
    scale: Scale | None = None,
    only: tuple[str, ...] = (),
    dry_run: bool = False,
    running: RunFlags,
    planning: PlanFlags,
) -> list[dict] | None:
    """Run an experiment: a protocol, whose cells are run one after the other. Run the same command again to continue.

    Each cell is a fresh launch, and leaves a record however it ends. The exit code is 0 if every cell has an answer
    (out of memory is one), 1 if one failed, 2 if the sweep was refused, and 3 if cells are left for the same command.

    With --dry-run or --plan and --json: the cells. Example: `study sweep smoke --dry-run`

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file. Without a name, the protocols are listed.
        scale: paper: as published. one_gpu: the most that one GPU can do. tiny: takes minutes on two CPU cores.
            Default: tiny; with --plan that of --gpus, or the largest that the protocol has.
        only: Run only the cells that match all these filters, such as 'arm=zero3*' 'seed=42'.
        dry_run: List the cells and whether this machine can run them. Run nothing.
        running: How cells are run.
        planning: The plan.
    """
    if not name:
        return show_protocols()
    declared = protocol.read(name)
    usual = protocol.scale_of(declared, planning.gpus) if planning.plan else "tiny"
    cells = sweeping.chosen(protocol.cells(declared, scale or usual), only)
    if planning.plan:
        return show_plan(cells, planning, running.minutes or math.inf, declared.get("script", []))
    turns = sweeping.plan(cells, running.repeat, running.lane)
    if dry_run:  # this needs neither a GPU nor the packages of the trainer
        return show_cells(cells)
    run(turns, running)


def show_protocols() -> list[dict]:
    protocols = [{"protocol": each, "about": protocol.read(each)["about"]} for each in protocol.names()]
    show(protocols)
    return protocols


def run(turns: list[Cell], how: RunFlags) -> NoReturn:
    """Run cells one after the other, say how each ended, and exit with the code that `sweep` explains."""
    if stop := launches.lacking():
        raise stop
    progress = Progress(len(turns))
    with stoppable(progress.say):
        outcomes = sweeping.sweep(turns, how.runs, how.timeout_s, how.nvme_dir, progress, how.minutes, how.lane)
    progress.say_done_before()
    progress.say(f"{counted(outcomes)}; study runs {how.runs} shows them")
    sys.exit(exit_code(outcomes))


def show_plan(cells: list[Cell], flags: PlanFlags, minutes: float, scripts: list[dict]) -> list[dict]:
    from study.report import plan as planning  # the predictor, which other sweeps do not need

    gpu, pace = planned_for(flags)
    refuse_beyond("--gpus", flags.gpus, MOST_GPUS)
    planned = planning.plan(cells, gpu, flags.gpus, of=pace)
    rows = [each.row(minutes) for each in planned if not each.left]
    say_wrapped(*planning.in_words(planned, minutes, scripts), "")
    show(rows)
    return rows


def planned_for(flags: PlanFlags) -> tuple[Gpu, "Pace | None"]:
    """Return the kind of GPU that a flag or the machine.json names, and the pace of that machine."""
    from study.predict.front import calibration

    gpu, pace = flags.gpu, None
    if path := flags.machine or calibration.from_environment():
        here = calibration.read(path)
        if here.gpu is None:
            raise Stop("this machine.json is of a CPU", "run study calibrate where the GPUs are")
        gpu, pace = gpu or here.gpu, calibration.known(here).pace
    if gpu is None:
        raise Stop("--plan needs the kind of GPU", "give --gpu, such as H100, and their number as --gpus")
    return GPUS[gpu_named(gpu)], pace


def show_cells(cells: list[Cell]) -> list[dict]:
    gpus = num_gpus()
    # Most protocols vary two or three of many settings: only these are columns.
    differ = differing([cell.settings for cell in cells])
    rows = []
    for cell in cells:
        row = {"cell": cell.name, "ranks": cell.ranks} | {name: cell.value(name) for name in differ}
        stop = sweeping.why_not(cell, gpus)
        rows.append(row | {"here": f"no: {stop.what}" if stop else "yes"})
    possible = sum(row["here"] == "yes" for row in rows)
    say(f"{possible} of {number_of(len(rows), 'cells')} are possible on this machine.", "")
    show(rows)
    return rows
