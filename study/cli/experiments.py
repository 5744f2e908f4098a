"""`study sweep`: runs experiments."""

import itertools
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import tyro

from study.cli.progress import Progress
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.text import part_of, say, show
from study.sweeps import launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.launches import Turn
from study.sweeps.protocol import Cell

# Of a sweep with a cell that ended so; the largest wins. The same command continues with those that are left or killed.
# Out of memory is an answer: it shows how much is too much.
EXIT_CODES = {"failed": 1, "timeout": 1, "left": 3, "killed": 3}


def sweep(
    name: tyro.conf.Positional[str],
    /,
    *,
    scale: Literal["paper", "one_gpu", "tiny"] = "tiny",
    runs: Path = Path("runs"),
    only: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = (),
    repeat: int = 1,
    timeout_s: float = 3600,
    minutes: float | None = None,
    nvme_dir: Path | None = None,
    pack: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Run an experiment: a protocol, whose cells are run one after the other. Run the same command again to continue.

    Each cell is a fresh launch, and leaves a record however it ends. The exit code is 0 if every cell has an answer
    (running out of memory is one), 1 if a cell failed, 2 if the sweep was refused or could not continue, and 3 if cells
    are left for the same command.

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file.
        scale: paper: as published. one_gpu: the most that one GPU can do. tiny: takes minutes on two CPU cores.
        runs: The folder for the run folders. Cells that are done there are not run again.
        only: Run only the cells that match all these filters, such as 'arm=zero3*' 'seed=42'.
        repeat: Number of runs of each cell. The repeats are interleaved.
        timeout_s: End a run after so many seconds.
        minutes: Start only cells that are expected to end within so many minutes from now. Default: no limit.
        nvme_dir: The folder for arms that offload to disk.
        pack: A folder that `examples/gpu_windows.py pack` wrote. Data and vocabularies come from it instead of the hub.
        dry_run: List the cells and whether this machine can run them. Run nothing.
    """
    if not timeout_s > 0:  # nor nan
        raise Stop(f"--timeout-s must be above 0 (got {timeout_s:g})", "give a number of seconds")
    if minutes is not None and not minutes >= 0:
        raise Stop(f"--minutes must be 0 or more (got {minutes:g})", "give a number of minutes")
    cells = sweeping.chosen(protocol.cells(protocol.read(name), scale), tuple(itertools.chain(*only)))
    if pack is not None:
        if not (pack / "pack.json").exists():
            raise Stop(f"--pack {pack} holds no pack.json", "give the folder that gpu_windows.py wrote")
        # Relative to the folder in which launches run, so that a cell has the same name on another machine.
        cells = [cell.from_pack(Path(os.path.relpath(pack, ROOT))) for cell in cells]
    turns = sweeping.plan(cells, repeat)
    if dry_run:
        return _show_plan(cells)
    if stop := launches.lacking():
        raise stop
    _run(turns, runs, timeout_s, nvme_dir, minutes)
    return None


def _run(turns: list[Turn], runs: Path, timeout_s: float, nvme_dir: Path | None, minutes: float | None) -> None:
    """Run the turns, and end with the exit code for how they ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, signal.default_int_handler)
    with Progress(len(turns)) as progress:
        try:
            outcomes = sweeping.sweep(turns, runs, timeout_s, nvme_dir, progress, minutes)
        except KeyboardInterrupt:
            progress.say("stopped; run the same command again to continue")
            sys.exit(130)
        counts = Counter(outcome.status for outcome in outcomes)
        counted = ", ".join(f"{count} {status}" for status, count in counts.items())
        progress.say(f"{counted or 'nothing to do'}; study runs {runs} shows them")
    sys.exit(max((EXIT_CODES.get(status, 0) for status in counts), default=0))


def _show_plan(cells: list[Cell]) -> None:
    """List the cells: their ranks, the settings in which they differ, and whether this machine can run them."""
    gpus = num_gpus()
    names = dict.fromkeys(itertools.chain(*(cell.settings for cell in cells)))
    differ = [name for name in names if len({str(cell.settings.get(name)) for cell in cells}) > 1]
    rows = []
    for cell in cells:
        row = {"cell": cell.name, "ranks": cell.ranks or gpus or 2}  # two on a CPU, as the arms' files have it
        row |= {name: cell.value(name) for name in differ}
        if cell.arm == "single":
            row["ranks"] = 1
        if number := row.pop("virtual_ranks", cell.value("virtual_ranks")):
            row["ranks"] = f"{number} virtual"
        row["here"] = "yes"
        if stop := sweeping.why_not(cell, gpus):
            row["here"] = f"no: {stop.what}"
        rows.append(row)
    possible = sum(row["here"] == "yes" for row in rows)
    say(f"{part_of(possible, len(rows), 'cells')} possible on this machine.", "")
    show(rows)
