"""Ends this process: on a signal or an error, with the reason in one sentence and an exit code.

A run ends done, failed, out of memory (oom), killed, diverged, or by a sweep's timeout. The first rank that writes a
reason into the record also prints it, and the others are silent. Where there is no record yet, rank 0 prints.
"""

import errno
import functools
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from study.core.errors import Stop
from study.core.machine import MORE_MEMORY, die_with_parent, lift_memory_cap, oom_kills
from study.measure.collectives import print_stacks_when_asked
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records import store
from study.training.display import say
from study.training.launch import NO_LAUNCH, Launch, number_of, rank_name, ranks_that_died

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Refusals of the system that a user can mend. Behind any other there may be a mistake of ours.
OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO)
UNRESPONSIVE_S = 5  # how long the main thread may take to handle a signal
SPARE_BYTES = 16 * 2**20
LINGER_S = 20  # how long a rank waits for rank 0 to give the reason
MARGIN_S = 60  # clocks of one cluster differ by less, and the kernel rounds its boot time to seconds
FULL = (  # whose memory it was, and what to do
    (
        device_is_full,
        "the device ran out of memory",
        "give a smaller --micro-batch, --checkpointing, or an arm that offloads",
    ),
    (
        host_is_full,
        "the host refused more memory",
        "give a smaller --micro-batch or --model, or a higher --memory-cap-gib",
    ),
)
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
    "only supports NVIDIA CUDA GPUs": ("DeepSpeed", "use one; study estimate predicts the arm"),
    "`fp8` precision requires": ("Accelerate", "give bf16, or install it on a machine with a GPU that has fp8"),
    "Invalid sp_attn_implementation": ("Accelerate", "give --attention sdpa, or another model"),
}
NO_FOLDER = Path("/proc/no run folder yet")
_spare: list[bytearray] = []  # freed at the end, for a process that gets no more memory; it is never written to
_heard = threading.Event()  # set once the main thread has handled a signal


def interrupt_on_signals(parent: int) -> None:
    """Let SIGTERM, a closed terminal or the launcher's death end the run like Ctrl-C: through the clean-up.

    Only the first signal counts: launchers send it twice, and the second must not disturb the clean-up.
    """

    def stop(number: int, _) -> None:
        if not _heard.is_set():
            _heard.set()
            raise KeyboardInterrupt(signal.Signals(number).name)

    print_stacks_when_asked()
    _spare.append(bytearray(SPARE_BYTES))
    for number in SIGNALS:  # SIGINT too: in the background it starts ignored
        signal.signal(number, stop)
    die_with_parent(parent)


def end_if_unresponsive(folder: Path, rank: int, launch: Launch, number: int) -> None:
    """In a thread: end this process if its main thread does not handle a signal, and record the reason.

    Python's handlers do not run while the main thread waits in C++, for example for a rank that never comes. Torchrun
    would then wait 30 s.
    """
    if _heard.wait(UNRESPONSIVE_S):
        return
    stop = reason(KeyboardInterrupt(signal.Signals(number).name), launch, folder)
    stop.where = stop.where or rank_name(rank)
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
    if stop := _lost_rank(error, launch, folder):
        return stop
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "killed")
    if isinstance(error, OSError) and error.errno in OF_THE_SYSTEM:
        remedy = "make room, give another folder, or raise the limit of open files (ulimit -n)"
        return Stop(f"{error.filename or 'a file'} cannot be written or opened ({error.strerror})", remedy)
    if "Timed out waiting" in message:  # gloo
        what = f"a collective waited too long for another rank ({message.rpartition('] ')[2]})"
        return Stop(what, "look at what the other ranks do: one is stopped, or takes another way through the code")
    for words, (library, remedy) in REFUSALS.items():
        if words in message:
            return Stop(f"{library} refuses: {message.removesuffix('.')}", remedy)
    return Stop(f"{type(error).__name__}: {message}", "report this, with the run's log.txt")


def _lost_rank(error: BaseException, launch: Launch, folder: Path) -> Stop | None:
    """Return the Stop for a rank that died: it breaks the others' connections, or torchrun ends them with SIGTERM."""
    lost = lost_connection(error) and number_of("WORLD_SIZE") > 1
    dead = ranks_that_died(folder) if lost or str(error) == signal.SIGTERM.name else []
    if not (lost or dead):
        return None
    victim = f"rank {dead[0]}" if dead else "another rank"
    if launch.oom_kills is not None and oom_kills() != launch.oom_kills:
        return Stop(f"the kernel killed {victim} because the host ran out of memory", MORE_MEMORY, "oom", victim)
    remedy = "look for the signal in the launcher's message"
    return Stop(f"{victim} ended without an error message", remedy, where=victim)


def fail(folder: Path, rank: int, error: BaseException, launch: Launch = NO_LAUNCH) -> None:
    """Print in one sentence what went wrong, and put it into the record. Only an unknown error prints a traceback."""
    _heard.set()
    ended_by_others = threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: ended_by_others.set())  # this process is ending already
    lift_memory_cap()
    _spare.clear()
    stop = reason(error, launch, folder)
    stop.where = stop.where or rank_name(rank)
    if stop.status == "killed" and rank != 0:
        return  # rank 0 was interrupted as well, or torchrun ends this rank because another one gave its reason
    # A record in the folder that is older than the launch belongs to an earlier one.
    ending = functools.partial(store.end_badly, folder, stop, type(error).__name__, launch.started - MARGIN_S)
    is_ours = ending()  # None: there is no record
    give_up_s = time.monotonic() + LINGER_S
    while is_ours is None and rank != 0 and time.monotonic() < give_up_s:
        if ended_by_others.wait(0.1):  # rank 0 has failed as well, and gave the reason
            return
        is_ours = ending()
    if is_ours is False:
        return  # another rank gave its reason
    text = f"{stop.status}: {stop.what}. What to do: {stop.remedy}."
    if stop.remedy.startswith("report this"):
        text = "\n".join([text, *traceback.format_exception(error)])
    say(folder if is_ours else None, text)


def leave(code: int) -> NoReturn:
    """End this process with this exit code.

    Gloo's threads sometimes abort a process that exits normally (torch 2.13, about 3 in 20), hence os._exit. After a
    failure the launcher prints its own traceback below our sentence, and also ends with exit code 1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
