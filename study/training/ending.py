"""Ends this process: on a signal or an error, with the reason in one sentence and an exit code."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from study.core import machine
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.machine import MORE_MEMORY, die_with_parent, lift_memory_cap, oom_kills
from study.measure.collectives import print_stacks_when_asked
from study.measure.hardware import CUDA, device_is_full, host_is_full, lost_connection
from study.records import store
from study.training.display import print_summary, say
from study.training.launch import (
    CLOCKS_DIFFER_S,
    Launch,
    earlier_reason,
    on_several_machines,
    rank_name,
    ranks_alive,
    ranks_that_died,
    store_reason,
)

if TYPE_CHECKING:
    from study.training.run import Run

SYSTEM = {  # what to do when the system refuses a file
    errno.ENOSPC: "make room, and start it again",
    errno.EDQUOT: "make room within your quota, and start it again",
    errno.EROFS: "give a folder that you may write to",
    errno.EMFILE: "raise the limit of open files (ulimit -n), and start it again",
    errno.ENFILE: "raise the system's limit of open files, and start it again",
    errno.EIO: "look at the disk",
}
GLOO_TIMEOUT = "Timed out waiting"
UNRESPONSIVE_S = 5  # how long the main thread may take to handle a signal
SPARE_BYTES = 16 * 2**20
PARTS = ("save", "instruments")  # after the training, in this order, because the instruments change the weights
NOTICES_WITHIN_S = 10  # how long a rank may take to notice that another rank has failed
LINGER_S = 20  # how long a rank waits for rank 0 to give the reason
REFUSALS = {  # by the message of a library that cannot train a combination: the library, and what to do
    # T5: Accelerate 1.15 shards weights that encoder and decoder share with one of them.
    "already managed by another FSDP group": (
        "PyTorch",
        "take zero3: Accelerate divides this model into units that FSDP2 cannot shard",
    ),
    # Ulysses in DeepSpeed 0.19.8 reads this field of the config, which BERT and GPT-2 lack.
    "no attribute 'num_key_value_heads'": ("DeepSpeed", "take a decoder that has it, such as --model llama-micro"),
    "is not divisible by SP size": ("DeepSpeed", "take fewer ranks for a row, or a model with more heads"),
    "Ulysses SP requires position_ids": ("DeepSpeed", "take a model that gives its attention positions, such as Llama"),
    "AutoTP not supported for model": ("DeepSpeed", "take a model that AutoTP divides, such as a Llama"),
    "`fp8` precision requires": ("Accelerate", "give bf16, or install it on a machine with a GPU that has fp8"),
    "Invalid sp_attn_implementation": ("Accelerate", "give --attention sdpa, or another model"),
}
_spare: list[bytearray] = []  # freed at the end, for a process that gets no more memory; it is never written to
_parents: list[int] = []  # the launcher's process id
_heard = threading.Event()  # set once the main thread has handled a signal


def interrupt_on_signals(parent: int) -> None:
    """Let SIGTERM, a closed terminal or the launcher's death end the run like Ctrl-C: through the clean-up.

    Only the first signal counts: launchers send it twice, and the second must not disturb the clean-up.
    """

    def stop(number: int, _) -> None:
        if not _heard.is_set():
            _heard.set()
            raise KeyboardInterrupt(signal.Signals(number).name)

    _parents[:] = [parent]
    print_stacks_when_asked()
    _spare.append(bytearray(SPARE_BYTES))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, stop)
    die_with_parent(parent)


def end_if_unresponsive(folder: Path, rank: int, launch: Launch, number: int) -> None:
    """In a thread: end this process if its main thread does not handle a signal, and record the reason.

    Python's handlers do not run while the main thread waits in C++, for example for a rank that never comes. Torchrun
    would then wait 30 s.
    """
    if _heard.wait(UNRESPONSIVE_S):
        return
    stop = reason(KeyboardInterrupt(signal.Signals(number).name), launch, folder=folder)
    stop.where = stop.where or rank_name(rank)
    if store.end_badly(folder, stop, "KeyboardInterrupt", launch.started - 2):
        say(folder, f"{stop.status}: {stop.sentence}")
    sys.stdout.flush()
    os._exit(1)


def launcher_is_gone() -> bool:
    """Return whether the launcher has died. Then the kernel ends all ranks, and no rank caused the others to end."""
    return _parents != [] and os.getppid() != _parents[0]


def some_rank_is_gone() -> bool:
    """Return whether fewer ranks run on this machine than were started."""
    return ranks_alive() < int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def lost_another_rank(error: BaseException) -> bool:
    """Return whether this rank stopped only because another rank is gone.

    Either the connection breaks, or torchrun sees the other rank die and sends this one SIGTERM. If somebody else sends
    SIGTERM, all ranks of this machine are alive.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    if isinstance(error, KeyboardInterrupt) and error.args == (signal.SIGTERM.name,):
        return some_rank_is_gone()
    return lost_connection(error)


def refused_by_the_system(error: OSError, folder: Path | None) -> Stop | None:
    """Return the Stop for an error that the user can fix on the machine; None if the code may be wrong."""
    what = error.filename or "a file"
    if error.errno in SYSTEM:
        return Stop(f"{what} cannot be written or opened ({error.strerror})", SYSTEM[error.errno])
    if folder is not None and not folder.is_dir():
        gone = f"the run folder {folder} is gone ({error.strerror}: {what})"
        return Stop(gone, "start it again, and do not remove the folder")
    return None


def death_of_another_rank(launch: Launch | None, folder: Path | None) -> Stop:
    """The Stop for another rank's death. It names the rank if its heartbeat file is left: other endings remove it."""
    dead = [] if folder is None or on_several_machines() else ranks_that_died(folder, within_s=0.5)
    victim = f"rank {dead[0]}" if dead else "another rank"
    if launch is not None and (oom_kills() or 0) > (launch.oom_kills or 0):
        what = f"the kernel killed {victim} because the host ran out of memory"
        return Stop(what, MORE_MEMORY, "oom", victim)
    if not dead and not on_several_machines() and not some_rank_is_gone():
        what = "the connection to another rank broke, and all ranks are alive"
        return Stop(what, "check the network between them", where="another rank")
    remedy = "look for the signal in the launcher's message"
    return Stop(f"{victim} ended without an error message", remedy, where=victim)


def reason(error: BaseException, launch: Launch | None = None, folder: Path | None = None) -> Stop:
    """Return why a run ends, as one sentence with a remedy. An unknown error is to be reported."""
    if isinstance(error, Stop):
        return error
    if device_is_full(error):
        detail = str(error).partition("\n")[0].split(". ")[0]
        remedy = "give a smaller --micro-batch, --checkpointing, or an arm that offloads"
        return Stop(f"the device ran out of memory ({detail})", remedy, "oom")
    if host_is_full(error):
        detail = str(error).rpartition("err == 0. ")[2] or "MemoryError"
        remedy = "give a smaller --micro-batch, a smaller model, or a higher --memory-cap-gib"
        return Stop(f"the host refused more memory ({detail})", remedy, "oom")
    lost = lost_another_rank(error)
    gone = launcher_is_gone()
    if lost and not gone:
        return earlier_reason() or death_of_another_rank(launch, folder)
    if isinstance(error, KeyboardInterrupt) and (earlier := earlier_reason()):
        return earlier
    if isinstance(error, KeyboardInterrupt) or lost:
        return Stop("interrupted", "start it again", "killed")
    if isinstance(error, OSError) and (stop := refused_by_the_system(error, folder)):
        return stop
    return _by_its_words(str(error)) or Stop(f"{type(error).__name__}: {error}", "report this, with the run's log.txt")


def _by_its_words(message: str) -> Stop | None:
    """Return the Stop for a message of a library that is known here."""
    if GLOO_TIMEOUT in message:
        what = f"a collective waited too long for another rank ({message.rpartition('] ')[2]})"
        return Stop(what, "look at what the other ranks do: one is stopped, or takes another way through the code")
    for words, (library, remedy) in REFUSALS.items():
        if words in message:
            return Stop(f"{library} refuses: {message.removesuffix('.')}", remedy, "unavailable")
    return None


def without_cuda(arm: Arm, error: Exception) -> Stop | None:
    """The Stop for an arm that needs an NVIDIA GPU and has none. It quotes the library. None for any other error."""
    if CUDA or arm.for_cuda_alone is None or lost_another_rank(error):
        return None
    cause = error.__cause__ if isinstance(error, Stop) and error.__cause__ else error
    if isinstance(cause, Stop):
        return None
    line = str(cause).strip().partition("\n")[0]
    what = f"{arm.for_cuda_alone} of {arm.name} needs an NVIDIA GPU ({type(cause).__name__}: {line})"
    return Stop(what, f"use one; study estimate --arm {arm.name} predicts it", "unavailable", "prepare")


def fail(folder: Path | None, rank: int, error: BaseException, launch: Launch | None = None) -> None:
    """Print in one sentence what went wrong, and put it into the record. Only an unknown error prints a traceback.

    Only the rank whose error is in the record prints. Without a record, rank 0 prints, or another rank if rank 0 has
    not ended this launch within LINGER_S. On another machine, which may lack the record, the first rank that stores a
    reason prints.
    """
    _heard.set()
    ended_by_others = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: ended_by_others.set())  # this process is ending already
    lift_memory_cap()
    _spare.clear()
    stop = reason(error, launch, folder)
    stop.where = stop.where or rank_name(rank)
    trace = "\n" + "".join(traceback.format_exception(error)) if stop.remedy.startswith("report this") else ""
    # An older record belongs to an earlier launch. The kernel rounds the boot time to seconds, hence the margin.
    since_s = launch.started - (CLOCKS_DIFFER_S if on_several_machines() else 2) if launch else 0.0
    was_first = None if stop.where == "another rank" else store_reason(stop)

    def recorded() -> bool | None:
        return store.end_badly(folder, stop, type(error).__name__, since_s) if folder is not None else None

    is_ours = recorded()
    waited_since = time.monotonic()
    interrupted = isinstance(error, KeyboardInterrupt)
    while is_ours is None and was_first is None and rank != 0 and time.monotonic() < waited_since + LINGER_S:
        # Rank 0 ends too, and gives the reason. If only this rank was interrupted, wait for rank 0 to make a record.
        if ended_by_others.wait(0.1) or (interrupted and (folder is None or some_rank_is_gone())):
            return
        is_ours = recorded()
    if is_ours or (is_ours is None and was_first is not False):
        say(folder if is_ours else None, f"{stop.status}: {stop.what}. What to do: {stop.remedy}.{trace}")


def give_up(run: "Run", part: str, why: str) -> None:
    """Record why a part failed: the reason of the first rank that failed, not that of ranks which failed after it."""
    observed = run.record.observed
    with contextlib.suppress(OSError, Stop):  # the disk is full, or on another machine
        why = store.explain_what_failed(run.folder, f"{part}_failed", why)
    setattr(observed, f"{part}_failed", why)
    for later in PARTS:
        if getattr(observed, f"{later}_failed") == store.UNFINISHED:
            setattr(observed, f"{later}_failed", f"not begun, because of: {part}")
    run.record.finished_utc = store.now_utc()
    run.keep()


def end_with_the_others(run: "Run", over: threading.Event) -> None:
    """In a thread of each rank: end this process if another rank has given up and this one does not notice.

    With gloo the connection breaks. With NCCL a collective may wait for the other rank until the process group's
    timeout, and Python handles no signal meanwhile.
    """
    while not over.wait(1):
        with contextlib.suppress(OSError, Stop):
            observed = store.load(run.folder).observed
            whys = {part: getattr(observed, f"{part}_failed") for part in PARTS}
            failed = [part for part, why in whys.items() if why not in (None, store.UNFINISHED)]
            if failed and not over.wait(NOTICES_WITHIN_S):
                give_up(run, failed[0], whys[failed[0]])
                print_summary(run)
                machine.remove_swap_folder(run.disk)
                if run.heartbeat is not None:
                    run.heartbeat.close()
                leave(0)


def leave(code: int) -> NoReturn:
    """End this process with this exit code.

    Gloo's threads sometimes abort a process that exits normally (torch 2.13, about 3 in 20), hence os._exit. After a
    failure the launcher prints its own traceback below our sentence, and also ends with exit code 1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
