"""Runs one cell in one launch: starts it, watches it, ends it with all its processes, and completes its record."""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from study.core import arms
from study.core.errors import FULL_INSTALL, Stop
from study.core.machine import DEVICE_LOCK, die_with_parent, oom_kills, packages_first, version
from study.core.settings import cache_home, flag
from study.records import store
from study.records.schema import Record
from study.sweeps import outcomes
from study.sweeps.protocol import SCRIPTS, Cell

POLL_S = 2.0  # rarely, because work of the sweep disturbs timed steps
GRACE_S = 20  # how long a launch may take to end after SIGTERM
OF_A_LAUNCHER = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$|TORCHELASTIC_|ACCELERATE_")
ANSWERS_WITHIN_S = 2.0  # how long ranks may take to write where they are
Watch = Callable[[Path, float], None]  # gets the folder of a run, and the seconds since its launch
INTERRUPTED = Stop("the sweep was ended while this cell ran", "start the sweep again", "killed")


def lacking() -> Stop | None:
    """Return why nothing can be launched from this Python environment. None if it has the launcher."""
    if version("accelerate"):
        return None
    return Stop("this needs accelerate, which the light install does not have", FULL_INSTALL, "unavailable")


def command(cell: Cell, folder: Path, nvme_dir: Path | None) -> list[str]:
    """Return the command that launches a cell."""
    words = arms.launcher(arms.load_arm(cell.arm).path)
    if cell.ranks:
        words += ["--num_processes", str(cell.ranks)]
    words += [str(SCRIPTS[cell.script]), *options(cell.settings), "--run-dir", str(folder)]
    if nvme_dir:
        words += ["--nvme-dir", str(nvme_dir)]
    return words


def release_folder(release: str) -> Path:
    return cache_home() / "releases" / f"deepspeed-{release}"


def of_release(release: str | None) -> dict[str, str]:
    """Return the variables with which a launch finds another release of DeepSpeed before the installed one."""
    return packages_first(release_folder(release)) if release else {}


def get_release(release: str) -> None:
    """Install a release of DeepSpeed beside the installed one, once. Raise Stop if no package index gives it."""
    folder = release_folder(release)
    if folder.exists():
        return
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    words = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(partial)]
    done = subprocess.run(
        [sys.executable, "-m", *words, f"deepspeed=={release}"],
        env=os.environ | {"DS_BUILD_OPS": "0"},  # its operators are compiled when they are first needed
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        remedy = f"install deepspeed=={release} into {folder} by hand"
        raise Stop(f"deepspeed {release} cannot be installed ({said})", remedy, "unavailable")
    partial.rename(folder)


def options(values: dict) -> list[str]:
    """Return the words of a command line for some settings."""
    words = []
    for name, value in values.items():
        if value is True:
            words.append(flag(name))
        elif value is False:
            words.append(flag(f"no_{name}"))
        else:
            words += [flag(name), str(value)]
    return words


def run(
    cell: Cell,
    folder: Path,
    timeout_s: float = math.inf,
    over: float = math.inf,
    nvme_dir: Path | None = None,
    watch: Watch = lambda *_: None,
) -> Record:
    """Run one cell in a fresh launch, and return its record, however it ended. `over` is when the sweep's time ends."""
    folder.mkdir()
    kills_before = oom_kills()
    try:
        with (folder / "output.txt").open("w") as output:
            launcher = subprocess.Popen(
                command(cell, folder.resolve(), nvme_dir),
                cwd=arms.ROOT,
                # Variables of another launcher, such as srun or torchrun around the sweep, do not count: without
                # torchrun, Accelerate passes them on, and the only process would take itself for another rank.
                # From ACCELERATE_* it takes values that are in no arm's file, such as accumulation.
                env={name: value for name, value in os.environ.items() if not OF_A_LAUNCHER.match(name)}
                | {store.CELL: cell.declared.model_dump_json()}
                | of_release(cell.deepspeed),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends the ranks in its order
                preexec_fn=die_with_parent,
            )
        stop = _watched(launcher, folder, timeout_s, over, watch)
        kills = None  # the kernel may not say; if it does, it counts other people's processes as well
        if kills_before is not None:
            kills = (oom_kills() or kills_before) - kills_before
        return outcomes.outcome(cell, folder, launcher.returncode, stop, kills)
    except KeyboardInterrupt:
        # The interrupt goes on, whether or not a record can still be written.
        with contextlib.suppress(OSError):
            outcomes.outcome(cell, folder, -signal.SIGINT, INTERRUPTED, 0)
        raise


def _watched(launcher: subprocess.Popen, folder: Path, timeout_s: float, over: float, watch: Watch) -> Stop | None:
    """Wait for a launch, or end it. Return why it was ended, or None if its run had ended before."""
    started = time.monotonic()
    stop = None
    try:
        while stop is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(POLL_S)
                return None
            # With a device lock, a launch without a record may still wait for its turn: that is not its time.
            if DEVICE_LOCK in os.environ and not (folder / store.RECORD).exists():
                started = time.monotonic()
            seconds = time.monotonic() - started
            # Steps, log and output. Other files are replaced while they are looked at.
            written = max((path.stat().st_mtime for path in folder.glob("[slo]*")), default=0)
            stop = out_of_time(min(seconds, time.time() - written), timeout_s, over)
            watch(folder, seconds)
        # Read before the ranks are ended, because a rank that is ended may write that it was.
        record = outcomes.read(folder)
        hang = ask_where(launcher, folder)
    finally:
        end(launcher, folder)
    if record and record.status != "running":
        return None  # the launch was only slow to exit
    if hang:
        return Stop(f"{stop.what}: {hang}", stop.remedy, stop.status)
    return stop


def out_of_time(silent_s: float, timeout_s: float, over: float) -> Stop | None:
    """Return why to end a launch that has written nothing for so many seconds; None to let it run."""
    if silent_s > timeout_s:
        remedy = "see the stacks of the ranks in its output.txt, or give a larger --timeout-s"
        return Stop(f"it wrote nothing for {timeout_s:.0f} s", remedy, "timeout")
    if time.monotonic() >= over:
        return Stop("the window ended while it ran", "start the sweep again", "killed")
    return None


def ask_where(launcher: subprocess.Popen, folder: Path) -> str:
    """Have the ranks print their stacks. Return a sentence on where they wait for each other."""
    for process in family(launcher, folder):
        # One rank after the other: they print into one file, and lines would be mixed.
        _signal(process, signal.SIGUSR2)
        time.sleep(0.5)
    time.sleep(ANSWERS_WITHIN_S)
    return outcomes.hang(folder)


def end(launcher: subprocess.Popen, folder: Path) -> None:
    """End a launch and all its processes with SIGTERM, and finally with SIGKILL."""
    ranks = family(launcher, folder)
    try:
        for process in ranks:
            _signal(process, signal.SIGTERM, signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
        launcher.send_signal(signal.SIGCONT)
        for process in psutil.wait_procs(ranks, timeout=GRACE_S)[1]:
            _signal(process, signal.SIGKILL)
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(GRACE_S)
    finally:  # also if the user presses Ctrl-C again
        for process in ranks:
            _signal(process, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def family(launcher: subprocess.Popen, folder: Path) -> list[psutil.Process]:
    """Return the processes of a launch that still run, without the launcher."""
    ranks = set()
    with contextlib.suppress(psutil.Error):
        ranks.update(psutil.Process(launcher.pid).children(recursive=True))
    # A rank whose launcher is gone is no longer its child, but its command line names the run folder.
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if {"--run-dir", str(folder.resolve())} <= {*words} and process.pid != launcher.pid:
            ranks.add(process)
    return list(ranks)


def _signal(process: psutil.Process, *numbers: int) -> None:
    with contextlib.suppress(psutil.Error):
        for number in numbers:
            process.send_signal(number)


def last_step(folder: Path) -> dict:
    """Return the newest training step of a run in progress. {} before the first."""
    trained = [line for line in store.read_steps(folder) if "loss" in line]  # others are evaluations
    return trained[-1] if trained else {}
