"""`study hour`: an hour on a machine with GPUs: its checks, a protocol in the order of what it decides, and a page."""

import csv
import io
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import psutil

from study.cli import preparing
from study.cli.progress import Progress, counted, exit_code, stoppable
from study.core import files
from study.core.arms import ROOT
from study.core.errors import FULL_INSTALL, Stop
from study.core.gpus import GPUS, Gpu, gpu_named, gpus_here
from study.core.machine import DEVICE_LOCK
from study.core.text import number_of, say, say_wrapped, show
from study.predict.front import Pace
from study.report import plan as planning
from study.report.plan import Planned
from study.sweeps import archive, launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.protocol import Cell, Scale
from study.sweeps.sweep import Outcome

NAME = "STUDY_NAME"  # the environment variable with the contributor's name
SCALES = ("tiny", "one_gpu", "paper")  # without a GPU, with one, with several
TIMEOUT_S = 600  # of silence: a rank that hangs may not take the whole hour
LOOK_S = 5.0  # how often the records of other lanes are looked for


@dataclass(frozen=True, kw_only=True)
class HourFlags:
    """Where its cells run, and what they take and leave."""

    scale: Scale | None = None
    """As of `study sweep`. Default: paper with several GPUs, one_gpu with one, tiny without."""
    runs: Path | None = None
    """The folder for the run folders. Default: runs/NAME."""
    upload: str | None = None
    """A folder, or a bucket such as hf://datasets/NAME/DATASET/FOLDER or s3://BUCKET/FOLDER, for the archive. Default:
    the environment variable STUDY_UPLOAD. Records that it holds of an earlier start are fetched."""
    pack: Path | None = None
    """A folder with data/ and models/ for cells that take real data, on a machine without a network."""
    nvme_dir: Path | None = None
    """The folder for arms that offload to disk."""
    lane: tuple[int, int] = (1, 1)
    """Used by the command itself: the cells for one GPU that this process runs, as one of several."""


def hour(name: str = "eight", /, *, minutes: float = 55, place: HourFlags) -> None:
    """Spend an hour of a machine on a protocol. Run the same command again to continue, also on another machine.

    It checks the machine, compiles, predicts, runs the cells in the order of what they decide, and writes one archive
    of records after each. The exit code is that of `study sweep`. Example: `study hour --minutes 55`

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file.
        minutes: How long cells may run. Checks and compiling come before.
        place: The machine and the records.
    """
    if not 0 < minutes <= 1e6:
        raise Stop(f"--minutes must be above 0 (got {minutes:g})", "give the minutes that cells may run")
    declared = protocol.read(name)
    work = Hour(name, declared, place, [gpu.name for gpu in gpus_here()])
    cells = [packed(cell, place.pack) for cell in protocol.cells(declared, work.scale)]
    with stoppable():
        if place.lane == (1, 1):
            work.whole(declared, cells, minutes)
        else:
            work.lane(cells, minutes, place.lane)
    say(f"{counted(work.outcomes)}: {work.runs}")
    sys.exit(exit_code(work.outcomes))


def known_gpu(name: str) -> Gpu | None:
    """Return a GPU by PyTorch's name. None for one whose speed is not known, of which nothing is predicted."""
    try:
        return GPUS[gpu_named(name)]
    except Stop as stop:
        say(f"Nothing is predicted: {stop.what}.")
        return None


PACKED_DATA = {"imdb": "imdb", "wikitext": "wikitext-2"}  # the folders of a pack, by task


def packed(cell: Cell, pack: Path | None) -> Cell:
    """Return a cell with data and vocabulary from a pack, if it asks for the hub's."""
    if pack is None or cell.settings.get("data") != "hub":
        return cell
    # Relative to the folder in which launches run, so that a cell has the same name on another machine.
    folder = Path(os.path.relpath(pack, ROOT))
    data, tokenizer = folder / "data" / PACKED_DATA[cell.value("task")], folder / "models" / cell.value("model")
    return replace(cell, settings=cell.settings | {"data": str(data), "tokenizer": str(tokenizer)})


def chosen(plan: list[Planned]) -> list[Cell]:
    """Return the cells that are not left, with their seconds."""
    return [replace(each.cell, reserve_s=each.seconds) for each in plan if not each.left]


class Hour:
    """The work of an hour: a folder of runs, where its archive goes, and how its cells ended."""

    def __init__(self, name: str, declared: dict, flags: HourFlags, cards: list[str]):
        self.gpus = len(cards)
        self.gpu = known_gpu(cards[0]) if cards else None
        self.scale = flags.scale or SCALES[min(self.gpus, 2)]
        self.runs = flags.runs or Path("runs", declared["name"])
        self.upload = flags.upload or os.environ.get(archive.UPLOAD)
        self.nvme_dir = flags.nvme_dir
        self.words = [name, "--scale", self.scale, "--runs", str(self.runs)]  # of the processes that it starts
        if flags.pack:
            self.words += ["--pack", str(flags.pack)]
        if flags.nvme_dir:
            self.words += ["--nvme-dir", str(flags.nvme_dir)]
        self.outcomes: list[Outcome] = []
        self.host_bytes = psutil.virtual_memory().total
        self.at_once = max(1, self.gpus)  # cells for one GPU that may run side by side

    def whole(self, declared: dict, cells: list[Cell], minutes: float) -> None:
        """Prepare the machine, run the cells in the order of what they decide, and write the page."""
        self.open()
        try:
            preparing.prepare(self.runs, declared, cells, self.gpus)
            turns = self.planned(cells, minutes, declared.get("script", []))
            over = time.monotonic() + 60 * minutes
            for is_alone, group in groupby(turns, self.is_alone):
                left = max(0.01, (over - time.monotonic()) / 60)
                if is_alone and self.gpus:
                    self.side_by_side([*group], left)
                else:
                    self.run([*group], left)
            self.page()
        finally:
            self.keep()

    def open(self) -> None:
        """Fetch what another machine did. A bucket that refuses stops the hour before it costs anything."""
        if stop := launches.lacking():
            raise stop
        self.runs.mkdir(parents=True, exist_ok=True)
        if count := archive.bring_back(self.runs, self.upload):
            say(f"Back from an earlier start: {number_of(count, 'records')}.")

    # --- the plan

    def is_alone(self, cell: Cell) -> bool:
        """Whether a cell takes one GPU, so that others may run beside it."""
        return self.scale == "one_gpu" or cell.ranks == 1

    def planned(self, cells: list[Cell], minutes: float, scripts: list[dict]) -> list[Cell]:
        """Show the plan, keep what is predicted, and return the cells that are not left, with their seconds."""
        if self.gpu is None:
            return cells
        self.register("predicted", cells, self.gpu, None)
        if here := preparing.pace(self.runs):
            self.register("predicted-here", cells, self.gpu, here)
        plan = planning.plan(cells, self.gpu, self.gpus, self.host_bytes)
        say_wrapped(*planning.in_words(plan, minutes, scripts), "")
        show([each.row(minutes) for each in plan if not each.left])
        self.at_once = planning.lanes(plan, self.gpus, self.host_bytes)
        return chosen(plan)

    def lane(self, cells: list[Cell], minutes: float, lane: tuple[int, int]) -> None:
        """Run the part of a process that the hour started: of the cells for one GPU, those of its lane."""
        alone = [cell for cell in cells if self.is_alone(cell)]
        if self.gpu:
            alone = chosen(planning.plan(alone, self.gpu, self.gpus, self.host_bytes))
        self.run(sweeping.plan(alone, 1, lane), minutes, lane)

    def register(self, name: str, cells: list[Cell], gpu: Gpu, of: Pace | None) -> None:
        """Keep what is predicted, once: before the first cell."""
        if not (path := self.runs / f"{name}.csv").exists():
            rows = planning.registered(cells, gpu, self.gpus, of)
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([planning.COLUMNS, *rows])
            files.write_below(self.runs, path.name, text.getvalue().encode())

    # --- cells

    def run(self, turns: list[Cell], minutes: float, lane: tuple[int, int] = (1, 1)) -> None:
        """Run cells one after the other, and write the archive after each: of several lanes, who started them does."""
        progress = Progress(len(turns), self.keep) if lane == (1, 1) else Progress(len(turns))
        self.outcomes += sweeping.sweep(turns, self.runs, TIMEOUT_S, self.nvme_dir, progress, minutes, lane)
        progress.say_done_before()

    def side_by_side(self, turns: list[Cell], minutes: float) -> None:
        """Run cells for one GPU at once, a process for each card. Each has the same turns, and takes its part.

        Of a single card there are two processes: one trains while the other starts Python and waits for the card.
        """
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.gpus)))).split(",")
        shared = {}
        if len(cards) == 1:
            cards *= 2
            shared = {DEVICE_LOCK: str((self.runs / ".device").resolve())}
        lanes = min(len(turns), len(cards), max(self.at_once, len(shared) + 1))
        if lanes == 1:
            return self.run(turns, minutes)
        words = [sys.executable, "-m", "study.cli", "hour", *self.words, "--minutes", f"{minutes:.2f}"]
        children = []
        try:
            for number, card in enumerate(cards[:lanes], 1):
                environment = os.environ | shared | {"CUDA_VISIBLE_DEVICES": card, archive.UPLOAD: ""}
                children.append(subprocess.Popen([*words, "--lane", str(number), str(lanes)], env=environment))
            self.keep_while(children)
        finally:
            for child in children:
                child.terminate()  # it ends its launch
                child.wait()
        for turn in turns:
            tries = [*sweeping.tries_of_today(self.runs, turn).values()]
            self.outcomes.append(Outcome.of(tries[-1]) if tries else Outcome("left", "no time was left"))

    def keep_while(self, children: list[subprocess.Popen]) -> None:
        """Write the archive after each cell that one of these processes has ended."""
        seen = 0
        while any(child.poll() is None for child in children):
            time.sleep(LOOK_S)
            if (count := len(archive.records(self.runs))) != seen:
                seen = count
                self.keep()

    # --- what is kept

    def keep(self) -> None:
        from study.report import contributed

        form = contributed.form(self.runs, os.environ.get(NAME, ""))
        for problem in archive.keep(self.runs, self.upload, {"README.md": form.encode()}):
            say(f"not kept: {problem}")

    def page(self) -> None:
        """Write the page that has these measurements beside predictions and everybody's."""
        try:
            from study.report import site

            say(f"the page: {site.write_contributed(self.runs / 'page', [self.runs])}")
        except ModuleNotFoundError as error:
            say(f"no page is written without {error.name}: {FULL_INSTALL}, and run this again")
