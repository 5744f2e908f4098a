"""What `study hour` does before its clock starts: checks, operators, releases, scripts, the speed of the machine."""

import os
import subprocess
import sys
from pathlib import Path

from study.core import doctor, files, operators
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.settings import MACHINE
from study.core.text import say, say_wrapped
from study.predict.front import Pace, calibration
from study.sweeps import archive, launches
from study.sweeps.protocol import Cell

SCRIPT_S = 300
CALIBRATE_S = 240


def prepare(runs: Path, declared: dict, cells: list[Cell], gpus: int) -> None:
    """Check the machine, and do what belongs to no cell's time."""
    for finding in doctor.examine(runs):
        if not finding.fine:
            say_wrapped(f"This machine needs: {finding.what} ({finding.found}). What to do: {finding.remedy}.")
    operators.compile_missing(tuple(dict.fromkeys(cell.arm for cell in cells)))
    get_releases(cells)
    ask_scripts(runs, declared.get("script", []), gpus)
    calibrate(runs)


def get_releases(cells: list[Cell]) -> None:
    for release in dict.fromkeys(cell.deepspeed for cell in cells if cell.deepspeed):
        try:
            launches.get_release(release)
        except Stop as stop:  # its cells get a record that says so
            say(stop.sentence)


def ask_scripts(runs: Path, scripts: list[dict], gpus: int) -> None:
    """Keep the answers of a protocol's scripts, and how fast the links between several GPUs are."""
    for script in scripts:
        words = script.get("words", []) if gpus else []
        answer(runs, script["name"], [script["file"], *words], SCRIPT_S)
    if gpus != 1:
        ranks = ["--standalone", "--nproc-per-node", str(gpus or 2)]
        answer(runs, "links", ["-m", "torch.distributed.run", *ranks, "benchmarks/links.py"], SCRIPT_S)


def answer(runs: Path, name: str, words: list[str], most_s: float) -> None:
    """Keep the last line that a script of the checkout prints, once. One that fails says so and stops nothing."""
    kept = runs / f"{name}.json"
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
        files.write_below(runs, kept.name, lines[-1])


def calibrate(runs: Path) -> None:
    """Let the machine predict itself: its file travels with the records."""
    file = runs / archive.MACHINE
    if not file.exists():
        words = [sys.executable, "-m", "study.cli", "calibrate", "--out", str(file)]
        try:
            subprocess.run(words, timeout=CALIBRATE_S)
        except subprocess.TimeoutExpired:
            say(f"calibrate took longer than {CALIBRATE_S} s, and is left")
    if file.exists():
        os.environ[MACHINE] = str(file.resolve())


def pace(runs: Path) -> Pace | None:
    """Return this machine's own constants. None without its file."""
    file = runs / archive.MACHINE
    return calibration.known(calibration.read(file)).pace if file.exists() else None
