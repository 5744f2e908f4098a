"""`study hour`: an hour on a machine with GPUs: its checks, a protocol in the order of what it decides, and a page."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import psutil
import tyro

from study.cli.experiments import EXIT_CODES, Progress
from study.core import doctor, files, operators
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.gpus import GPUS, Gpu, gpu_named, gpus_here
from study.core.machine import DEVICE_LOCK
from study.core.settings import MACHINE
from study.core.text import number_of, say, say_wrapped, show
from study.predict.front import Pace, calibration
from study.report import plan as planning
from study.sweeps import archive, launches, protocol
from study.sweeps import sweep as sweeping
from study.sweeps.protocol import Cell
from study.sweeps.sweep import Outcome

NAME = "STUDY_NAME"  # the environment variable with the contributor's name
TIMEOUT_S = 600  # of silence: a rank that hangs may not take the whole hour
SCRIPT_S = 300
CALIBRATE_S = 240
LOOK_S = 5.0  # how often the records of other lanes are looked for


def hour(
    name: tyro.conf.Positional[str] = "eight",
    /,
    *,
    minutes: float = 55,
    scale: Literal["paper", "one_gpu", "tiny"] | None = None,
    runs: Path | None = None,
    upload: str | None = None,
    pack: Path | None = None,
    nvme_dir: Path | None = None,
    lane: tuple[int, int] = (1, 1),
) -> None:
    """Spend an hour of a machine on a protocol. Run the same command again to continue, also on another machine.

    It checks the machine, compiles, predicts, runs the cells in the order of what they decide, and writes one archive
    of records after each. The exit code is that of `study sweep`. Example: `study hour --minutes 55`

    Args:
        name: A protocol in study/sweeps/protocols/, or a .toml file.
        minutes: How long cells may run. Checks and compiling come before.
        scale: As of `study sweep`. Default: paper with several GPUs, one_gpu with one, tiny without.
        runs: The folder for the run folders. Default: runs/NAME.
        upload: A folder, or a bucket such as hf://datasets/NAME/DATASET/FOLDER or s3://BUCKET/FOLDER, for the archive.
            Default: the environment variable STUDY_UPLOAD. Records that it holds of an earlier start are fetched.
        pack: A folder with data/ and models/ for cells that take real data, on a machine without a network.
        nvme_dir: The folder for arms that offload to disk.
        lane: Used by the command itself: the cells for one GPU that this process runs, as one of several.
    """
    if not 0 < minutes <= 1e6:
        raise Stop(f"--minutes must be above 0 (got {minutes:g})", "give the minutes that cells may run")
    here = gpus_here()
    scale = scale or ("paper" if len(here) > 1 else "one_gpu" if here else "tiny")
    declared = protocol.read(name)
    cells = [packed(cell, pack) for cell in protocol.cells(declared, scale)]
    work = Hour(runs or Path("runs") / declared["name"], upload or os.environ.get(archive.UPLOAD), nvme_dir, len(here))
    apart = lambda cell: scale == "one_gpu" or cell.ranks == 1  # noqa: E731
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    gpu = known_gpu(here[0].name) if here else None
    if lane == (1, 1):
        work.open()
    try:
        if lane != (1, 1):
            alone = work.chosen([cell for cell in cells if apart(cell)], gpu)
            work.run(sweeping.plan(alone, 1, lane), minutes, lane)
        else:
            work.prepare(declared, cells)
            turns = work.planned(cells, gpu, minutes, declared.get("script", []))
            over = time.monotonic() + 60 * minutes
            for is_apart, group in groupby(turns, apart):
                left = max(0.01, (over - time.monotonic()) / 60)
                if is_apart and here:
                    words = [name, "--scale", scale, *(["--pack", str(pack)] if pack else [])]
                    work.side_by_side([*group], left, words)
                else:
                    work.run([*group], left)
            work.page()
    except KeyboardInterrupt:
        say("stopped; run the same command again to continue")
        sys.exit(130)
    finally:
        if lane == (1, 1):
            work.keep()
    counts = Counter(outcome.status for outcome in work.outcomes)
    say(f"{', '.join(f'{count} {status}' for status, count in counts.items()) or 'nothing to do'}: {work.runs}")
    sys.exit(max((EXIT_CODES.get(status, 0) for status in counts), default=0))


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


class Hour:
    """The work of an hour: a folder of runs, where its archive goes, and how its cells ended."""

    def __init__(self, runs: Path, upload: str | None, nvme_dir: Path | None, gpus: int):
        self.runs, self.upload, self.nvme_dir, self.gpus = runs, upload, nvme_dir, gpus
        self.outcomes: list[Outcome] = []
        self.host_bytes = psutil.virtual_memory().total
        self.at_once = max(1, gpus)  # cells for one GPU that may run side by side

    # --- before the clock starts

    def open(self) -> None:
        """Fetch what another machine did. A bucket that refuses stops the hour before it costs anything."""
        if stop := launches.lacking():
            raise stop
        self.runs.mkdir(parents=True, exist_ok=True)
        if count := archive.bring_back(self.runs, self.upload):
            say(f"Back from an earlier start: {number_of(count, 'records')}.")

    def prepare(self, declared: dict, cells: list[Cell]) -> None:
        """Check the machine, and do what belongs to no cell's time."""
        for finding in doctor.examine(self.runs):
            if not finding.fine:
                say_wrapped(f"This machine needs: {finding.what} ({finding.found}). What to do: {finding.remedy}.")
        operators.compile_missing(tuple(dict.fromkeys(cell.arm for cell in cells)))
        for release in dict.fromkeys(cell.deepspeed for cell in cells if cell.deepspeed):
            try:
                launches.get_release(release)
            except Stop as stop:  # its cells get a record that says so
                say(stop.sentence)
        for script in declared.get("script", []):
            words = script.get("words", []) if self.gpus else []
            self.answer(script["name"], [script["file"], *words], SCRIPT_S)
        if self.gpus != 1:
            ranks = ["--standalone", "--nproc-per-node", str(self.gpus or 2)]
            self.answer("links", ["-m", "torch.distributed.run", *ranks, "benchmarks/links.py"], SCRIPT_S)
        self.calibrate()

    def answer(self, name: str, words: list[str], most_s: float) -> None:
        """Keep the last line that a script of the checkout prints, once. One that fails says so and stops nothing."""
        kept = self.runs / f"{name}.json"
        if kept.exists():
            return
        say(f"running {name}")
        try:
            done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, timeout=most_s)
        except subprocess.TimeoutExpired as late:
            say(f"{name} took longer than {most_s} s, and is left")
            lines = (late.stdout or b"").splitlines()
        else:
            if done.returncode:
                return say(f"{name} failed: {done.stderr.decode().strip()[-300:]}")
            lines = done.stdout.splitlines()
        if lines:
            files.write_below(self.runs, kept.name, lines[-1])

    def calibrate(self) -> None:
        """Let the machine predict itself: its file travels with the records."""
        file = self.runs / archive.MACHINE
        if not file.exists():
            words = [sys.executable, "-m", "study.cli", "calibrate", "--out", str(file)]
            try:
                subprocess.run(words, timeout=CALIBRATE_S)
            except subprocess.TimeoutExpired:
                say(f"calibrate took longer than {CALIBRATE_S} s, and is left")
        if file.exists():
            os.environ[MACHINE] = str(file.resolve())

    def pace(self) -> Pace | None:
        """Return this machine's own constants. None without its file."""
        file = self.runs / archive.MACHINE
        return calibration.known(calibration.read(file)).pace if file.exists() else None

    # --- the plan

    def planned(self, cells: list[Cell], gpu: Gpu | None, minutes: float, scripts: list[dict]) -> list[Cell]:
        """Show the plan, keep what is predicted, and return the cells that are not left, with their seconds."""
        if gpu is None:
            return cells
        before = planning.plan(cells, gpu, self.gpus, self.host_bytes)
        self.register("predicted", cells, gpu, None)
        if here := self.pace():
            self.register("predicted-here", cells, gpu, here)
        say_wrapped(*planning.in_words(before, minutes, scripts), "")
        show([each.row(minutes) for each in before if not each.left])
        self.at_once = planning.lanes(before, self.gpus, self.host_bytes)
        return self.chosen(cells, gpu)

    def chosen(self, cells: list[Cell], gpu: Gpu | None) -> list[Cell]:
        """Return the cells that are not left, with their seconds."""
        if gpu is None:
            return cells
        planned = planning.plan(cells, gpu, self.gpus, self.host_bytes)
        return [replace(each.cell, reserve_s=each.seconds) for each in planned if not each.left]

    def register(self, name: str, cells: list[Cell], gpu: Gpu, of: Pace | None) -> None:
        """Keep what is predicted, once: before the first cell."""
        if not (path := self.runs / f"{name}.csv").exists():
            rows = planning.registered(cells, gpu, self.gpus, of)
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([planning.COLUMNS, *rows])
            files.write_below(self.runs, path.name, text.getvalue().encode())

    # --- cells

    def run(self, turns: list[Cell], minutes: float, lane: tuple[int, int] = (1, 1)) -> None:
        """Run cells one after the other, and write the archive after each."""
        progress = Keeping(len(turns), self if lane == (1, 1) else None)
        self.outcomes += sweeping.sweep(turns, self.runs, TIMEOUT_S, self.nvme_dir, progress, minutes, lane)
        progress.say_done_before()

    def side_by_side(self, turns: list[Cell], minutes: float, words: list[str]) -> None:
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
        words = [*words, "--runs", str(self.runs), "--minutes", f"{minutes:.2f}"]
        if self.nvme_dir:
            words += ["--nvme-dir", str(self.nvme_dir)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "study.cli", "hour", *words, "--lane", str(number), str(lanes)],
                env=os.environ | shared | {"CUDA_VISIBLE_DEVICES": card, archive.UPLOAD: ""},
            )
            for number, card in enumerate(cards[:lanes], 1)
        ]
        try:
            seen = 0
            while any(child.poll() is None for child in children):
                time.sleep(LOOK_S)
                if (count := len(archive.records(self.runs))) != seen:
                    seen = count
                    self.keep()
        finally:
            for child in children:
                child.terminate()  # it ends its launch
                child.wait()
        for turn in turns:
            tries = [*sweeping.tries_of_today(self.runs, turn).values()]
            self.outcomes.append(Outcome.of(tries[-1]) if tries else Outcome("left", "no time was left"))

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
            say(f"no page is written without {error.name}: pip install './zero-study[report]', and run this again")


class Keeping(Progress):
    """The progress of an hour: after each cell the archive is written."""

    def __init__(self, turns: int, work: Hour | None):
        super().__init__(turns)
        self.work = work

    def end(self, turn: Cell, outcome: Outcome) -> None:
        super().end(turn, outcome)
        if self.work and outcome.ran:
            self.work.keep()
