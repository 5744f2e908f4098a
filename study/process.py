"""This process: its launcher, its log, its threads, and how it ends."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers

from study import hardware, record
from study.arms import Arm
from study.kernel import cap_private_memory, die_with_parent, private_memory_is_capped
from study.record import Stop


@dataclass(frozen=True)
class Launch:
    """The `accelerate launch` that started this process: its process id, config file and explicit process count."""

    pid: int
    started: float
    config_file: str | None
    num_processes: int | None


def find_launch() -> Launch | None:
    """The launcher above this process, read from its command line; None when there is none.

    Accelerate tells a script neither which config file nor which process count it was given. A mistake in either would
    make a record that says one arm and holds another, so it is read from the source.
    """
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any("accelerate" in Path(word).name for word in words[:3]) and "launch" in words[:4]:
            count = _option(words, "num_processes")
            return Launch(
                process.pid,
                process.create_time(),
                _option(words, "config_file"),
                int(count) if count and count.isdigit() else None,
            )
    return None


def _option(words: list[str], name: str) -> str | None:
    """The value of --name or --na-me in a command line, as `--name value` or `--name=value`."""
    for i, word in enumerate(words):
        option, _, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") == name:
            return value or (words[i + 1] if i + 1 < len(words) else None)
    return None


def is_surplus_rank(arm: Arm, launch: Launch) -> bool:
    """Whether this process is one too many.

    `num_processes: auto` means one process per GPU, and on a machine without one torchrun takes one per core. The study
    wants two there, as many cores as there may be: the others leave at once, and the two that stay share the work.
    """
    if torch.cuda.is_available() or arm.num_processes != "auto" or launch.num_processes is not None:
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) <= 2:
        return False
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    return int(os.environ["RANK"]) >= 2


def set_threads(threads: int | None) -> None:
    """As many threads per rank in every arm, `single` included: a fair share of the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    ranks = local if torch.cuda.is_available() else max(2, local)
    threads = threads or max(1, hardware.usable_cores() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are loaded later
    torch.set_num_threads(threads)


def cap_memory(gib: float | None) -> dict | None:
    """Emulate a device with so much memory. Gives what was really set, and by what."""
    if gib is None:
        return None
    cap_bytes = int(gib * 2**30)
    if not torch.cuda.is_available():
        cap_private_memory(cap_bytes)
        return {"bytes": cap_bytes, "emulated_by": "RLIMIT_DATA"}
    has_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if cap_bytes > has_bytes:
        raise Stop(
            f"--memory-cap-gib {gib:g} is more than the device's {has_bytes / 2**30:.1f} GiB", "give a smaller cap"
        )
    torch.cuda.set_per_process_memory_fraction(cap_bytes / has_bytes)
    return {"bytes": cap_bytes, "emulated_by": "PyTorch's allocator"}


PINNING = "CUDA error: out of memory"  # so it ends where host memory is pinned, and where a device has none left


def device_is_full(error: BaseException) -> bool:
    """Whether the device had no more memory to give: to PyTorch's allocator, or to a library that takes its own."""
    told = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "_STATUS_ALLOC_FAILED" in told:
        return True
    # NCCL, Triton and whoever pins host memory have words of their own for it.
    return "out of memory" in told and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2**30


def out_of_memory(error: BaseException) -> bool:
    """Whether the host had no more memory to give: Python and PyTorch's CPU allocator say so each in its own way."""
    told = str(error)
    return isinstance(error, MemoryError) or any(
        words in told
        for words in ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "Cannot allocate", PINNING)
    )


# --- log -----------------------------------------------------------------------------------------------------------

NOISY = ("DeepSpeed", "huggingface_hub", "transformers", "datasets", "accelerate", "torch")


def say(folder: Path | None, text: str) -> None:
    """Tell the user, and the run's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if folder is not None:
        with contextlib.suppress(OSError), (folder / "log.txt").open("a") as log:
            log.write(text + "\n")


def log_to(folder: Path | None) -> None:
    """Send what the libraries log and warn of to this folder's log.txt, or nowhere, instead of the screen."""
    handler = logging.FileHandler(folder / "log.txt") if folder else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    # DeepSpeed 0.19 calls what torch 2.13 has deprecated, at every step: a line each, written in the timed window.
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    hush()


def hush() -> None:
    """Take the libraries' own handlers away. DeepSpeed sets its up on import, so this is called after it as well."""
    for name in NOISY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


@contextlib.contextmanager
def quiet():
    """Keep what DeepSpeed prints while it starts off the screen."""
    with contextlib.redirect_stdout(_NOWHERE):
        yield
    hush()


_NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115  stays open: DeepSpeed keeps the stream it meets on import


# --- end -----------------------------------------------------------------------------------------------------------


def interrupt_when_told() -> None:
    """Let a SIGTERM, a closed terminal or the launcher's death end the run as Ctrl-C should: through the clean-up.

    Once: launchers like to say it twice, and the second word must not disturb the clean-up.
    """
    told = False

    def stop(*_) -> None:
        nonlocal told
        if not told:
            told = True
            raise KeyboardInterrupt

    faulthandler.register(signal.SIGUSR2)  # a rank that hangs can be asked where it stands
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, stop)
    die_with_parent()


def fail(folder: Path | None, rank: int, error: BaseException) -> None:
    """Say what went wrong in one sentence and put it in the record. Only a fault of ours comes with a traceback."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it is ending already, and says so undisturbed
    trace = ""
    if isinstance(error, Stop):
        stop = error
    elif device_is_full(error):
        stop = Stop(
            f"the device ran out of memory ({str(error).partition(chr(10))[0].split('. ')[0]})",
            "give a smaller --micro-batch, --checkpointing, or an arm that offloads",
            "oom",
        )
    elif out_of_memory(error):
        stop = Stop(
            f"the host refused more memory ({str(error).rpartition('err == 0. ')[2] or 'MemoryError'})",
            "give a smaller --micro-batch, a smaller model, or a higher --memory-cap-gib",
            "oom" if private_memory_is_capped() else "host_oom",  # under a cap the host stands for a device
        )
    elif isinstance(error, KeyboardInterrupt):
        stop = Stop("interrupted", "start it again", "interrupted")
    else:
        stop = Stop(f"{type(error).__name__}: {error}", "report this, with the run's log.txt")
        trace = "\n" + "".join(traceback.format_exception(error))
    stop.where = stop.where or f"rank {rank}"
    ours_to_tell = record.end_badly(folder, stop, type(error).__name__) if folder else rank == 0
    if ours_to_tell:
        say(folder, f"{stop.status}: {stop.what}. What to do: {stop.remedy}.{trace}")


def leave(code: int, launch: Launch) -> None:
    """End this process, with the exit code that is true and nothing left running.

    Gloo's threads sometimes abort a process that exits in the ordinary way (torch 2.13, about 3 in 20), hence os._exit.
    When the run failed, its one sentence has been said. The launcher would bury it under a traceback of its own that
    says only that a child has failed, so it is ended by a signal, whose exit code is not 0 either.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(psutil.Error):
        if code != 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            launcher = psutil.Process(launch.pid)
            others = [child for child in launcher.children(recursive=True) if child.pid != os.getpid()]
            launcher.send_signal(signal.SIGUSR1)
            for child in psutil.wait_procs(others, timeout=5)[1]:
                child.kill()
        elif code != 0:
            psutil.Process(launch.pid).wait(timeout=20)  # let rank 0 speak before the launcher sees us gone
    os._exit(code)
