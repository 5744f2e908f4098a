"""Protocol to cells to fresh launches to records: unattended, resumable, and one bad cell never ends it.

Every cell is one `accelerate launch` in a session of its own. The sweep talks to the trainer by its command line and
reads back the record: process isolation and the public interface are the same thing.
"""

import contextlib
import fcntl
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from study import arms, doctor, frontier, protocol, record
from study.advise import HOST_PROCESS_BYTES
from study.architecture import named
from study.estimate import of_arm
from study.gpus import num_gpus
from study.kernel import die_with_parent, oom_kills
from study.protocol import Cell
from study.record import Stop
from study.shapes import SHAPES
from study.window import Window, not_started

POLL_S = 0.2
FILTERS = ("arm", "ranks", "part", "scale", "script", "repair")  # beside the settings
GRACE_S = 20  # how long a launch may take to end when told to
LAST_LINES = 15
SETTLED = ("done", "oom")  # under a device's limit, a second try would find what the first one did


@dataclass(frozen=True)
class Turn:
    """A cell with the number of its repeat: what one run folder is for."""

    cell: Cell
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}-r{self.repeat}"


def plan(cells: list[Cell], repeats: int) -> list[Turn]:
    """All turns, repeats outermost and every other one backwards: a machine that drifts does so in all arms alike."""
    turns = []
    for repeat in range(1, repeats + 1):
        turns += [Turn(cell, repeat) for cell in (cells if repeat % 2 else reversed(cells))]
    return turns


def chosen(cells: list[Cell], only: tuple[str, ...]) -> list[Cell]:
    """The cells that every filter lets pass. A filter is key=pattern, as in arm=zero3*."""
    for rule in only:
        key, sign, pattern = rule.partition("=")
        if not sign or (not hasattr(protocol.Settings, key) and key not in FILTERS):
            raise Stop(f"--only {rule} is no filter", "give a key of the protocol and a pattern, as in 'arm=zero3*'")
        cells = [cell for cell in cells if fnmatch.fnmatch(str(cell.value(key)), pattern)]
    return cells


def why_not(cell: Cell, gpus: int) -> Stop | None:
    """Why this machine cannot run a cell, None if it can as far as one can tell beforehand."""
    arm = arms.read(arms.all_paths()[cell.arm])
    if gpus and (cell.ranks or 1) > gpus:
        return Stop(f"{cell.ranks} ranks need as many GPUs, and there are {gpus}", "use such a machine", "unavailable")
    if not gpus and cell.scale != "tiny":
        return Stop(f"scale {cell.scale} needs a GPU", "give --scale tiny, or use such a machine", "unavailable")
    return doctor.why_not(arm, gpus) or (host_is_too_small(cell, arm, psutil.virtual_memory().total) if gpus else None)


def host_is_too_small(cell: Cell, arm: arms.Arm, has_bytes: int) -> Stop | None:
    """Why the host cannot take what the ranks of an arm keep on it: they would not end in words, but be killed."""
    model, alone = str(cell.value("model")), cell.value("virtual_ranks")
    if model not in SHAPES:
        return None
    ranks = alone or cell.ranks or 1
    made = of_arm(named(model), arm.name, ranks, cell.value("precision"), 1, 1, 128, "sdpa", False)
    if not made["host_bytes"]:
        return None
    needed_bytes = (made["host_bytes"] + HOST_PROCESS_BYTES) * (1 if alone else ranks)
    if needed_bytes <= has_bytes:
        return None
    what = f"{cell.arm} would take {needed_bytes / 1e9:.0f} GB of the host for {model}; it has {has_bytes / 1e9:.0f}"
    return Stop(what, "use a host with more memory, or a smaller model", "unavailable")


def sweep(
    turns: list[Turn], runs: Path, timeout_s: float, nvme_dir: Path | None, tell, minutes: float | None = None
) -> list[dict]:
    """Run what has not been done, one turn after the other. `tell` hears of each start, step and end.

    With `minutes`, what was never tried comes first: a cell that fails must not take up the start of every window.
    """
    gpus, window = num_gpus(), Window(minutes)
    if minutes is not None:
        turns = sorted(turns, key=lambda turn: bool(attempts(runs, turn)))

    def attempt(turn: Turn) -> dict:
        if folder := done_before(runs, turn):
            made, ran = record.load(folder), False
        elif stop := why_not(turn.cell, gpus):
            made, ran = not_run(turn, runs, stop), False
        elif why := window.too_short_for(turn.cell, runs):
            made, ran = not_started(why), False
        else:
            tell.start(turn)
            made, ran = run(turn, runs, timeout_s, nvme_dir, tell.step, window), True
        tell.end(turn, made, ran)
        return made

    made = []
    with held(runs):
        for turn in turns:
            if turn.cell.rungs:
                found, words = frontier.search(turn.cell, lambda cell, repeat=turn.repeat: attempt(Turn(cell, repeat)))
                made += found
                tell.say(words)
            else:
                made.append(attempt(turn))
            tell.next()
    return made


# --- resume --------------------------------------------------------------------------------------------------------


def done_before(runs: Path, turn: Turn) -> Path | None:
    """The folder of a valid, settled run of this turn with the software and the meters of now, or None."""
    for folder in attempts(runs, turn):
        try:
            made = record.load(folder)
        except Stop:
            continue
        measured_alike = made["measure_version"] == record.MEASURE_VERSION
        if made["status"] in SETTLED and measured_alike and same_software(made["software"] or {}):
            return folder
    return None


def attempts(runs: Path, turn: Turn) -> list[Path]:
    """The folders of a turn, oldest first: its name, and for tries after the first a number."""
    return sorted(runs.glob(f"{turn.name}.*"), key=lambda path: int(path.suffix[1:]))


def same_software(versions: dict) -> bool:
    now = record.versions()
    return all(versions.get(name) == version for name, version in now.items())


@contextlib.contextmanager
def held(runs: Path) -> Iterator[None]:
    """Hold a folder for one sweep. The kernel lets go of the lock when its holder dies, so none is ever left behind."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / ".sweep").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise Stop(
                f"another sweep holds {runs} ({file.read().strip()})", "wait for it, or give other --runs"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} since {record.now_utc()}")
        file.flush()
        yield


# --- one run -------------------------------------------------------------------------------------------------------


def command(cell: Cell, folder: Path, nvme_dir: Path | None) -> list[str]:
    """What one would type: the launch of a cell."""
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    words += ["--config_file", str(arms.all_paths()[cell.arm])]
    words += ["--num_processes", str(cell.ranks)] if cell.ranks else []
    words += [str(arms.ROOT / "study" / f"{cell.script}.py"), "--run-dir", str(folder)]
    words += ["--nvme-dir", str(nvme_dir)] if nvme_dir else []
    for name, value in cell.asked.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, str(value)]
    return words


def run(
    turn: Turn, runs: Path, timeout_s: float, nvme_dir: Path | None, watch: Callable[[Path, float], None],
    window: Window,
) -> dict:  # fmt: skip
    """Run one cell in a fresh launch, and give its record, whatever became of it."""
    tries = attempts(runs, turn)
    folder = runs / f"{turn.name}.{int(tries[-1].suffix[1:]) + 1 if tries else 1}"
    folder.mkdir()
    killed_before, started = oom_kills(), time.monotonic()
    stop, family = None, {}
    with (folder / "output.txt").open("w") as output:
        launcher = subprocess.Popen(
            command(turn.cell, folder.resolve(), nvme_dir), cwd=arms.ROOT, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            while launcher.poll() is None and stop is None:
                time.sleep(POLL_S)
                with contextlib.suppress(psutil.Error):  # while the launcher lives; its orphans are known by then
                    family |= {child.pid: child for child in psutil.Process(launcher.pid).children(recursive=True)}
                seconds = time.monotonic() - started
                stop = out_of_time(seconds, timeout_s, window)
                watch(folder, seconds)
        finally:
            end(launcher, list(family.values()), stacks=stop is not None)
    return outcome(folder, launcher.returncode, stop, oom_kills() - killed_before)


def out_of_time(seconds: float, timeout_s: float, window: Window) -> Stop | None:
    """Why a launch is ended that has run for so long, None if it goes on."""
    if seconds > timeout_s:
        remedy = "its output.txt has the stacks of the ranks; --timeout-s gives it longer"
        return Stop(f"it took longer than {timeout_s:.0f} s", remedy, "timeout")
    if window.left_s <= 0:
        return Stop(f"the window ended {seconds:.0f} s after its start", "start the sweep again", "interrupted")
    return None


def end(launcher: subprocess.Popen, family: list[psutil.Process], stacks: bool) -> None:
    """See to it that a launch and all it started are gone: asked first, stacks told if it hung, and then made to."""
    alive = [process for process in family if process.is_running()]
    if stacks:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR2)  # the trainer writes where each of its threads stands
            time.sleep(0.5)  # one after the other: they write into one file, and lines would be mixed
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(alive, timeout=GRACE_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def outcome(folder: Path, code: int, stop: Stop | None, kills: int) -> dict:
    """The record of a launch that has ended, or was ended by `stop`. What the trainer could not put in is put in."""
    try:
        made = record.load_running(folder)
    except (OSError, ValueError):
        made = record.new(folder.name, [])
    if stop is not None:
        return _write_end(folder, made, stop)
    if made["status"] != "running":
        return made
    if kills:
        remedy = "give fewer ranks, a smaller model, or a machine with more memory"
        stop = Stop("the kernel killed a rank because the host ran out of memory", remedy, "host_oom")
    else:
        lines = (folder / "output.txt").read_text(errors="replace").splitlines()[-LAST_LINES:]
        stop = Stop(f"the launch ended with exit code {code} and no word: {' | '.join(lines)}", "see its output.txt")
    return _write_end(folder, made, stop)


def not_run(turn: Turn, runs: Path, stop: Stop) -> dict:
    """The record of a cell that this machine cannot run: a row, never a gap."""
    folder = runs / f"{turn.name}.0"
    folder.mkdir(exist_ok=True)
    asked = turn.cell.asked | {"arm": turn.cell.arm}
    return _write_end(folder, record.new(folder.name, []) | {"requested": asked}, stop)


def _write_end(folder: Path, made: dict, stop: Stop) -> dict:
    error = {"kind": "Sweep", "message": stop.what, "where": stop.where, "what_to_do": stop.remedy}
    made = made | {"status": stop.status, "finished_utc": record.now_utc(), "error": error}
    record.write(folder, made)
    return made


def last_step(folder: Path) -> dict:
    """The newest training step of a run in progress: {} before the first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (folder / "steps.jsonl").read_text().splitlines()
        return next(step for line in reversed(lines) if "loss" in (step := json.loads(line)))
    return {}
