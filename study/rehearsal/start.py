"""Starts a rehearsal in its own process: of rank 0, of rank 1 beside it, of the same script under other arms."""

import contextlib
import importlib.util
import linecache
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from study.core.arms import PACKAGE, Arm
from study.core.errors import FULL_INSTALL, Stop
from study.core.gpus import GPUS
from study.core.machine import packages_first
from study.core.text import TICK_S, during, number_of, say_aside
from study.records import store
from study.rehearsal.alternatives import check_is, under
from study.rehearsal.files import remove_made
from study.rehearsal.on_gpu import on_gpu
from study.rehearsal.request import ANSWER, PROGRESS, REQUEST, Answer, Failure, Request


def run_apart(folder: Path, log: Path, environment: dict[str, str], timeout_s: int) -> int | None:
    """Run the request of a folder in a process of its own. Return its exit code, or None after so many seconds."""
    command = [sys.executable, "-m", "study.rehearsal.run", str(folder)]
    progress = ProgressOfSteps(folder)
    ends = time.monotonic() + timeout_s
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while time.monotonic() < ends:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(TICK_S, max(0, ends - time.monotonic())))
                progress.say()
        finally:
            process.kill()
    return None


class ProgressOfSteps:
    """Says where a rehearsal is that takes long."""

    def __init__(self, folder: Path):
        self.path = folder / PROGRESS
        self.begun = time.monotonic()
        self.where = "importing and building"

    def say(self) -> None:
        if self.path.exists():
            self.where = self.path.read_text() or self.where  # it may be written at this moment
        say_aside(f"{self.where} ({time.monotonic() - self.begun:.0f} s so far) ...")


def run_request(request: Request, folder: Path, timeout_s: int) -> Answer:
    """Run the rehearsal, and return its answer."""
    if importlib.util.find_spec("torch") is None:
        raise Stop(
            "this environment has no PyTorch",
            f"install study where you train: {FULL_INSTALL}",
        )
    request.write(folder / REQUEST)
    log = folder / "log.txt"
    log.touch()
    # The folder of this package, which may be a checkout that is not installed.
    code = run_apart(folder, log, os.environ | packages_first(PACKAGE.parent), timeout_s)
    remove_made(folder)
    output = log.read_text(errors="replace")[-20_000:]
    last = (output.strip().splitlines() or ["it printed nothing"])[-1]
    if not (folder / ANSWER).exists():
        name = Path(request.script).name
        if code is None:
            what = f"{name} did not end in {timeout_s} s; the last it printed: {last:.200}"
            raise Stop(what, "give a longer --timeout, or fewer --steps")
        raise Stop(f"{name} ended with {code} and no answer ({last:.200})", "report it with the script")
    answer = Answer.read(folder / ANSWER)
    if answer.failure and answer.failure.message.startswith("SystemExit"):  # of words that a parser does not know
        answer.failure.message += f" ({last:.200})"
    return answer


def parts_from_rank_1(request: Request, answer: Answer, folder: Path, timeout_s: int) -> Failure | None:
    """Rehearse rank 1 as well, where ranks usually part: as one of them evaluates or saves. Return where they do."""
    if not request.compares_ranks:
        return None
    during("running it as rank 1, which must call the same collectives")
    other = folder / "rank-1"
    other.mkdir()
    second = replace(request, rank=1, most_collectives=len(answer.collectives) + 1)
    return apart(answer, run_request(second, other, timeout_s), Path(request.script))


def apart(first: Answer, second: Answer, script: Path) -> Failure | None:
    """Return where rank 0 and rank 1 part. None if they do not, as far as rank 1 could be followed.

    Where they call other collectives, a real rank waits for ever.
    """
    second_is_cut = second.is_cut or second.failure is not None
    pairs = list(zip(first.collectives, second.collectives, strict=False))
    # An `if` on the rank may call one collective in two lines. Its tensors have one size.
    calls_differ = any(mine[0] != other[0] or (mine[1] != other[1] and mine[2] != other[2]) for mine, other in pairs)
    rank_0_lacks = len(first.collectives) < len(second.collectives) and not first.is_cut
    rank_1_lacks = len(second.collectives) < len(first.collectives) and not second_is_cut
    if not (calls_differ or rank_0_lacks or rank_1_lacks):
        return None
    place = next((place for place, (mine, other) in enumerate(pairs) if mine[:2] != other[:2]), len(pairs))
    mine, other = _at(first, place), _at(second, place)
    calls = mine or other or ("", None, None)  # of the rank that still calls something
    if mine and other:
        what = f"rank 0 calls {_named(mine)} there, and rank 1 comes to {_named(other)} at {other[1]}"
    else:
        what = f"rank {0 if mine else 1} calls {_named(calls)} there, and the other rank has ended"
    code = None
    where = calls[1]
    if where is not None:
        code = linecache.getline(str(script.parent / where.partition(":")[0]), int(where.partition(":")[2])).strip()
    return Failure("hang", what, where, code)


def _at(answer: Answer, place: int) -> tuple[str, str | None, int | None] | None:
    return answer.collectives[place] if place < len(answer.collectives) else None


def _named(call: tuple[str, str | None, int | None]) -> str:
    return call[0] + (f" of {number_of(call[2], 'elements')}" if call[2] is not None else "")


@dataclass(frozen=True)
class Tried:
    """What a script holds under another arm, or why it does not train so."""

    arm: str
    peak_bytes: int | None = None
    driver_bytes: int | None = None
    fits: str | None = None
    error: str | None = None


def try_arm(arm: Arm, request: Request, folder: Path, timeout_s: int) -> Tried:
    """Rehearse the same script under another arm."""
    during(f"running it under {arm.name}")
    folder.mkdir()
    try:
        answer = run_request(under(arm, request, folder), folder, timeout_s)
        if answer.failure:
            return Tried(arm.name, error=answer.failure.message)
        seen = store.read(folder / store.RECORD).observed
        check_is(arm, seen)
    except Stop as stop:
        return Tried(arm.name, error=stop.sentence)
    device = on_gpu(answer, request.ranks, seen.stage, GPUS[request.gpu] if request.gpu else None)
    return Tried(arm.name, device.peak, device.driver, device.fits)
