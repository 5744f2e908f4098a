"""`study sweep`: runs experiments, and shows how far it is."""

import math
import sys
from pathlib import Path
from typing import Literal, NoReturn

import tyro

from study.cli.progress import Progress, counted, exit_code, interruptible
from study.core.errors import Stop, refuse_beyond
from study.core.gpus import GPUS, gpu_named, num_gpus
from study.core.text import number_of, say, say_wrapped, show
from study.records.groups import differing
from study.sweeps import launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.protocol import Cell

MOST_GPUS = 64  # of one machine


def sweep(
    name: tyro.conf.Positional[str] = "",
    /,
    *,
    scale: Literal["paper", "one_gpu", "tiny"] | None = None,
    runs: Path = Path("runs"),
    only: tuple[str, ...] = (),
    repeat: int = 1,
    timeout_s: float = 3600,
    minutes: float | None = None,
    nvme_dir: Path | None = None,
    lane: tuple[int, int] = (1, 1),
    dry_run: bool = False,
    plan: bool = False,
    gpu: str | None = None,
    gpus: int = 8,
    machine: Path | None = None,
) -> list[dict] | None:
    """Run an experiment: a protocol, whose cells are run one after the other. Run the same command again to continue.

    Each cell is a fresh launch, and leaves a record however it ends. The exit code is 0 if every cell has an answer
    (out of memory is one), 1 if one failed, 2 if the sweep was refused, and 3 if cells are left for the same command.

    With --dry-run or --plan and --json: the cells. Example: `study sweep smoke --dry-run`

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file. Without a name, the protocols are listed.
        scale: paper: as published. one_gpu: the most that one GPU can do. tiny: takes minutes on two CPU cores.
            Default: tiny; with --plan that of --gpus, or the largest that the protocol has.
        runs: The folder for the run folders. Cells that are done there are not run again.
        only: Run only the cells that match all these filters, such as 'arm=zero3*' 'seed=42'.
        repeat: Number of runs of each cell. The repeats are interleaved.
        timeout_s: End a run that has written nothing, and so no step, for so many seconds. Loading is silent as well.
        minutes: Start only cells that are expected to end within so many minutes from now. Default: no limit.
        nvme_dir: The folder for arms that offload to disk.
        lane: Run every n-th cell only, as one of n sweeps over the same --runs: 1 2 and 2 2. Where the variable
            STUDY_DEVICE_LOCK names a file for both, one trains while the other starts Python and waits.
        dry_run: List the cells and whether this machine can run them. Run nothing.
        plan: List the cells with predicted seconds and memory, the claims that they decide, and where --minutes end.
            Run nothing.
        gpu: With --plan: the kind of GPU, such as H100.
        gpus: With --plan: their number.
        machine: With --plan: the machine.json of `study calibrate` there. Default: the one that ZERO_STUDY_MACHINE
            names.
    """
    for flag, value, most in ("repeat", repeat, 1000), ("timeout-s", timeout_s, 1e9), ("minutes", minutes, 1e9):
        _refuse_beyond(flag, value, most)
    if runs.exists() and not runs.is_dir():
        raise Stop(f"--runs {runs} is no folder", "give a folder that you may write to")
    if not name:
        protocols = [{"protocol": each, "about": protocol.read(each)["about"]} for each in protocol.names()]
        show(protocols)
        return protocols
    declared = protocol.read(name)
    cells = sweeping.chosen(protocol.cells(declared, scale or _usual_scale(declared, plan, gpus)), only)
    if plan:
        return _show_plan(cells, gpu, gpus, minutes, declared.get("script", []), machine)
    turns = sweeping.plan(cells, repeat, lane)
    if dry_run:  # this needs neither a GPU nor the packages of the trainer
        return _show_cells(cells)
    run(turns, runs, timeout_s, minutes, nvme_dir, lane)


def _usual_scale(declared: dict, plan: bool, gpus: int) -> str:
    """Runs begin small. A plan is for the GPUs that are asked about, if the protocol has their scale."""
    of_gpus = "paper" if gpus > 1 else "one_gpu"
    known = protocol.scales(declared)
    if not plan or not known:
        return "tiny"
    return of_gpus if of_gpus in known else known[0]


def _refuse_beyond(flag: str, value: float | None, most: float) -> None:
    if value is not None and not 0 < value <= most:
        raise Stop(f"--{flag} must be above 0 and at most {most} (got {value})", "correct the value")


def run(
    turns: list[Cell],
    runs: Path,
    timeout_s: float,
    minutes: float | None,
    nvme_dir: Path | None,
    lane: tuple[int, int],
) -> NoReturn:
    """Run cells one after the other, say how each ended, and exit with the code that `sweep` explains."""
    if stop := launches.lacking():
        raise stop
    interruptible()
    progress = Progress(len(turns))
    try:
        outcomes = sweeping.sweep(turns, runs, timeout_s, nvme_dir, progress, minutes, lane)
    except KeyboardInterrupt:  # the cell that ran has its record already: status killed
        progress.say("stopped; run the same command again to continue")
        sys.exit(130)
    progress.say_done_before()
    progress.say(f"{counted(outcomes)}; study runs {runs} shows them")
    sys.exit(exit_code(outcomes))


def _show_plan(
    cells: list[Cell], gpu: str | None, gpus: int, minutes: float | None, scripts: list[dict], machine: Path | None
) -> list[dict]:
    from study.predict.front import calibration
    from study.report import plan as planning  # the predictor, which other sweeps do not need

    of = None
    if path := machine or calibration.from_environment():
        here = calibration.read(path)
        if here.gpu is None:
            raise Stop("this machine.json is of a CPU", "run study calibrate where the GPUs are")
        gpu, of = gpu or here.gpu, calibration.known(here).pace

    if gpu is None:
        raise Stop("--plan needs the kind of GPU", "give --gpu, such as H100, and their number as --gpus")
    refuse_beyond("--gpus", gpus, MOST_GPUS)
    planned = planning.plan(cells, GPUS[gpu_named(gpu)], gpus, of=of)
    minutes = minutes or math.inf
    rows = [each.row(minutes) for each in planned if not each.left]
    say_wrapped(*planning.in_words(planned, minutes, scripts), "")
    show(rows)
    return rows


def _show_cells(cells: list[Cell]) -> list[dict]:
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
