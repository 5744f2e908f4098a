"""Ends this process: on a signal or an error, with the reason in one sentence and an exit code.

The first rank that writes a reason into the record also prints it. Where there is no record yet, rank 0 prints.
"""

import errno
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from study.core.errors import Stop
from study.core.files import beside
from study.core.machine import MORE_MEMORY, die_with_parent, lift_memory_cap, oom_kills
from study.core.text import size
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.measure.heartbeat import ASK
from study.records import store
from study.training.display import say
from study.training.launch import NO_LAUNCH, Launch, from_torchrun, ranks_that_died

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Refusals of the system that a user can mend. Behind any other there may be a mistake of ours.
OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO)
# How writers that raise no OSError say that the system took only a part: torch's two, and safetensors'.
CUT_SHORT = ("unexpected pos", "PytorchStreamWriter failed", "No space left on device", "Disk quota exceeded")
UNRESPONSIVE_S = 5  # how long the main thread may take to handle a signal
LINGER_S = 20  # how long a rank waits for rank 0 to give the reason
MARGIN_S = 60  # clocks of one cluster differ by less, and the kernel rounds its boot time to seconds
FULL = (  # whose memory it was, and what to do
    (device_is_full, "the device ran out of memory", "give a smaller --micro-batch, or an arm that offloads"),
    (host_is_full, "the host refused more memory", "give a smaller --micro-batch, or a higher --memory-cap-gib"),
)
REFUSALS = beside(__file__, "refusals.toml")
NO_FOLDER = Path("/proc/no run folder yet")
_heard = threading.Event()  # set once the main thread has handled a signal


def interrupt_on_signals(parent: int) -> None:
    """Let SIGTERM, a closed terminal or the launcher's death end the run like Ctrl-C: through the clean-up."""

    def stop(number: int, _) -> None:
        if not _heard.is_set():  # launchers send a signal twice, and the second must not disturb the clean-up
            _heard.set()
            raise KeyboardInterrupt(signal.Signals(number).name)

    faulthandler.register(ASK)  # prints the stacks of all threads, also before there is a run folder
    for number in SIGNALS:  # SIGINT too: in the background it starts ignored
        signal.signal(number, stop)
    die_with_parent(parent)


def end_if_unresponsive(folder: Path, rank: int, launch: Launch, number: int) -> None:
    """In a thread: end this process, with a reason, if its main thread waits in C++, where it handles no signal."""
    if _heard.wait(UNRESPONSIVE_S):
        return
    stop = reason(KeyboardInterrupt(signal.Signals(number).name), launch, folder)
    stop.where = stop.where or f"rank {rank}"
    if store.end_badly(folder, stop, "KeyboardInterrupt", launch.started - MARGIN_S):
        say(folder, f"{stop.status}: {stop.sentence}")
    leave(1)


def reason(error: BaseException, launch: Launch = NO_LAUNCH, folder: Path = NO_FOLDER) -> Stop:
    """Return why a run ends, as one sentence with a remedy. An unknown error is to be reported."""
    message = str(error)
    if isinstance(error, Stop):
        return error
    for is_full, what, remedy in FULL:
        if is_full(error):
            detail = message.rpartition("err == 0. ")[2].partition("\n")[0].split(". ")[0]
            return Stop(f"{what} ({detail or 'MemoryError'})", remedy, "oom")
    if stop := _from_outside(error, launch, folder):
        return stop
    if stop := _of_this_process(error, folder):
        return stop
    for words, (who, remedy) in REFUSALS.items():
        if words in message:
            return Stop(f"{who}: {message.removesuffix('.')}", remedy)
    return Stop(f"{type(error).__name__}: {message}", "report this, with the run's log.txt")


def _from_outside(error: BaseException, launch: Launch, folder: Path) -> Stop | None:
    """Return the Stop for a signal, or for another rank that died: its connections break, or torchrun sends SIGTERM."""
    lost = lost_connection(error) and from_torchrun("WORLD_SIZE") > 1
    dead = {}
    if lost or str(error) == signal.SIGTERM.name:
        dead = ranks_that_died(folder)
    if lost or dead:
        victim, killed_by = "another rank", None
        if dead:
            rank, killed_by = next(iter(dead.items()))
            victim = f"rank {rank}"
        if oom_kills() != launch.oom_kills:
            return Stop(f"the kernel killed {victim} because the host ran out of memory", MORE_MEMORY, "oom", victim)
        if killed_by:
            what = f"{victim} was killed by {killed_by}"
            return Stop(what, "see what it printed last, and start it again", where=victim)
        what = f"{victim} ended without an error message"
        return Stop(what, "look for the signal in the launcher's message", where=victim)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "killed")
    return None


def _of_this_process(error: BaseException, folder: Path) -> Stop | None:
    """Return the Stop for what the system refuses, such as a full disk, and for a call of sys.exit."""
    if isinstance(error, OSError) and error.errno in OF_THE_SYSTEM:
        remedy = "make room, give another folder, or raise the limit of open files (ulimit -n)"
        return Stop(f"{error.filename or 'a file'} cannot be written or opened ({error.strerror})", remedy)
    if any(words in str(error) for words in CUT_SHORT):
        what = "a file could not be written whole"
        if folder.is_dir():
            what += f": the disk of {folder} has {size(shutil.disk_usage(folder).free)} free"
        return Stop(what, "make room, such as by removing checkpoints that end in .part, and start it again")
    if isinstance(error, SystemExit):
        call = traceback.extract_tb(error.__traceback__)[-1]
        what = f"sys.exit({error.code}) ended the process at {Path(call.filename).name}:{call.lineno}"
        return Stop(what, "see why it is called there")
    return None


def fail(folder: Path, rank: int, error: BaseException, launch: Launch = NO_LAUNCH) -> None:
    """Print in one sentence what went wrong, and put it into the record. Only an unknown error prints a traceback."""
    _heard.set()
    ended_by_others = threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: ended_by_others.set())  # this process is ending already
    lift_memory_cap()
    stop = reason(error, launch, folder)
    stop.where = stop.where or f"rank {rank}"
    if stop.status == "killed" and rank != 0:
        return  # rank 0 was interrupted as well, or torchrun ends this rank because another one gave its reason
    kind = type(error).__name__
    begun_s = launch.started - MARGIN_S  # an older record in the folder belongs to an earlier launch
    give_up_s = time.monotonic() + LINGER_S
    # None: there is no record
    while (is_ours := store.end_badly(folder, stop, kind, begun_s)) is None and rank and time.monotonic() < give_up_s:
        if ended_by_others.wait(0.1):  # rank 0 has failed as well, and gave the reason
            return
    if is_ours is False:
        return  # another rank gave its reason
    text = f"{stop.status}: {stop.sentence}"
    if stop.remedy.startswith("report this"):
        text = "\n".join([text, *traceback.format_exception(error)])
    say(folder if is_ours else None, text)


def leave(code: int) -> NoReturn:
    """End this process. Gloo's threads sometimes abort one that exits normally (torch 2.13, about 3 in 20)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
