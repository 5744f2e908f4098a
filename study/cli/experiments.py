"""`study sweep`: runs experiments."""

import dataclasses
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.cli.progress import Progress
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.text import part_of, say, show
from study.sweeps import launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.protocol import Cell

NO_ANSWER = {"failed", "timeout"}  # out of memory is an answer: it shows how much is too much
UNFINISHED = {"left", "killed"}  # the same command continues with these


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What to run of an experiment, where, and for how long."""

    scale: Literal["paper", "one_gpu", "tiny"] = "tiny"
    """paper: as published. one_gpu: the most that one GPU can do. tiny: takes minutes on two CPU cores."""
    runs: Path = Path("runs")
    """The folder for the run folders. Cells that are done there are not run again."""
    only: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Run only the cells that match all these filters, such as 'arm=zero3*' 'seed=42'."""
    repeat: int = 1
    """Number of runs of each cell. The repeats are interleaved."""
    timeout_s: float = 3600
    """End a run after so many seconds."""
    minutes: float | None = None
    """Start only cells that are expected to end within so many minutes from now. Default: no limit."""
    nvme_dir: Path | None = None
    """The folder for arms that offload to disk."""
    pack: Path | None = None
    """A folder that `examples/gpu_windows.py pack` wrote. Data and vocabularies come from it instead of the hub."""
    dry_run: bool = False
    """List the cells and whether this machine can run them. Run nothing."""


def sweep(
    name: tyro.conf.Positional[str], /, *, options: Annotated[SweepOptions, tyro.conf.arg(name="")] = SweepOptions()
) -> None:
    """Run an experiment: a protocol, whose cells are run one after the other. Run the same command again to continue.

    Each cell is a fresh launch, and leaves a record however it ends. The exit code is 0 if every cell has an answer
    (running out of memory is one), 1 if a cell failed, 2 if the sweep was refused or could not continue, and 3 if cells
    are left for the same command.

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file.
        options: What to run of it.
    """
    _refuse_impossible(options)
    cells = _chosen_cells(name, options)
    turns = sweeping.plan(cells, options.repeat)
    if options.dry_run:
        _show_plan(cells)
    elif stop := launches.lacking():
        raise stop
    else:
        _run(turns, options)


def _refuse_impossible(options: SweepOptions) -> None:
    """Raise Stop for a value that no sweep can have."""
    if not options.timeout_s > 0:
        raise Stop(f"--timeout-s must be above 0 (got {options.timeout_s:g})", "give a number of seconds")
    if options.minutes is not None and not options.minutes >= 0:
        raise Stop(f"--minutes must be 0 or more (got {options.minutes:g})", "give a number of minutes")


def _chosen_cells(name: str, options: SweepOptions) -> list[Cell]:
    """Return the cells that match the filters, with their data."""
    filters = tuple(each for several in options.only for each in several)
    cells = sweeping.chosen(protocol.cells(protocol.read(name), options.scale), filters)
    if options.pack is not None:
        if not (options.pack / "pack.json").exists():
            raise Stop(f"--pack {options.pack} holds no pack.json", "give the folder that gpu_windows.py wrote")
        # Relative to the folder in which launches run, so that a cell has the same name on another machine.
        cells = [cell.from_pack(Path(os.path.relpath(options.pack, ROOT))) for cell in cells]
    return cells


def _run(turns: list[sweeping.Turn], options: SweepOptions) -> None:
    """Run the turns, count the outcomes, and end with the exit code for them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, signal.default_int_handler)
    with Progress(len(turns)) as progress:
        try:
            outcomes = sweeping.sweep(
                turns,
                options.runs,
                options.timeout_s,
                options.nvme_dir,
                progress,
                options.minutes,
            )
        except KeyboardInterrupt:
            progress.say("stopped; run the same command again to continue")
            sys.exit(130)
        counts = Counter(outcome.status for outcome in outcomes)
        counted = ", ".join(f"{count} {status}" for status, count in counts.items())
        progress.say(f"{counted or 'nothing to do'}; study runs {options.runs} shows them")
    if counts.keys() & UNFINISHED:
        sys.exit(3)
    sys.exit(1 if counts.keys() & NO_ANSWER else 0)


def _show_plan(cells: list[Cell]) -> None:
    """List the cells: their ranks, their settings, and whether this machine can run them."""
    gpus = num_gpus()
    keys = dict.fromkeys(key for cell in cells for key in cell.settings)
    axes = [key for key in keys if len({str(cell.settings.get(key)) for cell in cells}) > 1]
    rows = []
    for cell in cells:
        stop = sweeping.why_not(cell, gpus)
        virtual = cell.value("virtual_ranks")
        ranks = f"{virtual} virtual" if virtual else cell.ranks or (1 if cell.arm == "single" else gpus or 2)
        values = {key: cell.value(key) for key in axes if key != "virtual_ranks"}
        rows.append({"cell": cell.name, "ranks": ranks, **values, "here": f"no: {stop.what}" if stop else "yes"})
    say(f"{part_of(sum(row['here'] == 'yes' for row in rows), len(rows), 'cells')} possible on this machine.", "")
    show(rows)
