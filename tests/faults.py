"""The faults that the study is tested with: of what kind, when, what it does, and what has to come of it.

A fault strikes the first cell of a small sweep, at a moment in a rank of its training (MOMENTS). STRIKES says what it
does. The runner (`fault_runner.py`) asserts the same four things each time: FAULTS, at the end, says which status and
words the first of them expects.

What is emulated says so in `how`: a clock that jumps is a replaced `time.time`, and memory that is refused is a limit
of this process's.
"""

import contextlib
import ctypes
import datetime
import errno
import itertools
import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from study.records import store

# A moment in a rank: what is called then, and how many calls before it.
MOMENTS = {
    "imports": None,  # before the trainer has looked at its command line
    "set-up": ("study.training.setup", "open_accelerator"),
    "model": ("study.training.main", "prepare"),
    "warm-up": ("study.train", "train_window"),
    "timed window": ("study.train", "optimizer_step", 2),
    "backward pass": ("accelerate.accelerator", "Accelerator.backward", 2),
    "between windows": ("study.training.run", "write_step", 1),
    "evaluation": ("study.train", "evaluate"),
    "record": ("study.training.finish", "finish"),
    "after the record": ("study.training.finish", "after_training"),
    "instruments": ("study.training.finish", "inspect"),
    "summary": ("study.training.main", "print_summary"),
}
ANY = ""


@dataclass(frozen=True)
class Place:
    """Where a fault strikes: a rank of a launch of a sweep, and its folders."""

    runs: Path
    turn: str
    sweep: int = 0  # process ids
    launcher: int = 0

    @property
    def folder(self) -> Path:
        return self.runs / f"{self.turn}.1"


@dataclass(frozen=True)
class Fault:
    kind: str
    when: str
    how: str
    status: str | None  # of the struck try's record; None: it has none that can be read, or there was no try
    words: str = ANY  # in its error, or else in what the sweep prints
    rank: int = 1
    where: str | None = None  # in its error
    code: int | None = None  # of the sweep; None: what its outcome asks for
    arm: str = "ddp"
    settings: dict = field(default_factory=dict)
    timeout_s: float = 60
    cells: int = 1

    @property
    def name(self) -> str:
        words = [f"{self.kind}: {self.how}", self.when, f"rank {self.rank}"]
        words += [] if self.arm == "ddp" else [self.arm]
        return ", ".join(words + ([f"{self.cells} cells"] if self.cells > 1 else []))


# --- what strikes in a rank ----------------------------------------------------------------------------------------


def signalled(name: str, whom: str = "itself") -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        target = {"itself": os.getpid(), "launcher": place.launcher, "sweep": place.sweep}[whom]
        os.kill(target, getattr(signal, name))
        if target != os.getpid():
            time.sleep(60)  # it is ended from outside meanwhile

    return strike


def signal_ranks(place: Place, number: int) -> None:
    """Signal the other ranks of this launch."""
    for child in Path(f"/proc/{place.launcher}/task/{place.launcher}/children").read_text().split():
        if int(child) != os.getpid():
            os.kill(int(child), number)


def stop_both(place: Place) -> None:
    signal_ranks(place, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_all(place: Place) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # that of the kernel, when the launcher is gone
    signal_ranks(place, signal.SIGKILL)
    os.kill(place.launcher, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def limited(limit: int, soft: int) -> Callable[[Place], None]:
    return lambda place: resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))


def writes(name: str, content: bytes | str | None) -> Callable[[Place], None]:
    """Replace a file of the run folder: None removes it, and "folder" puts a folder there."""

    def strike(place: Place) -> None:
        path = place.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
            return
        path.unlink(missing_ok=True)
        if content == "folder":
            path.mkdir()

    return strike


def protocol_broken(content: bytes) -> Callable[[Place], object]:
    return lambda place: (place.runs.parent / "faulty.toml").write_bytes(content)


def raising(error: BaseException) -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        raise error

    return strike


def sleep_with_the_lock(place: Place) -> None:
    """In C, and without letting any other thread of this process run."""
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # no signal ends this wait


def interrupt_twice(place: Place) -> None:
    os.kill(place.sweep, signal.SIGINT)
    time.sleep(0.15)
    os.kill(place.sweep, signal.SIGINT)
    time.sleep(60)


def no_memory(place: Place) -> None:
    """RLIMIT_AS, just above what this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, resource.RLIM_INFINITY))
    torch.empty(2**30)


def killed_for_memory(place: Place) -> None:
    """A control group of 100 MB above what this rank has, in which it takes more: the kernel kills it."""
    group = Path("/sys/fs/cgroup/memory") / f"zero-study-{place.sweep}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(300 * 2**20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hog = [torch.ones(2**22) for _ in range(200)]
    raise AssertionError(f"it still lives, with {len(hog)} blocks")


def disk_full(place: Place) -> None:
    with contextlib.suppress(OSError), (place.runs / "users-own-large-file").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


def disk_full_without_reserve(place: Place) -> None:
    """The trainer's own; the sweep has some for the record as well."""
    store.release_reserved_space(place.folder)
    disk_full(place)


def clock_jumps(seconds: float) -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        real, shift = time.time, datetime.timedelta(seconds=seconds)
        time.time = lambda: real() + seconds
        store.now_utc = lambda: (datetime.datetime.now(datetime.UTC) + shift).isoformat(timespec="milliseconds")

    return strike


def not_a_number(place: Place) -> None:
    from study.training import tasks

    real = tasks.row_losses
    tasks.row_losses = lambda *words: tuple(part * float("nan") for part in real(*words)[:1]) + tuple(real(*words)[1:])


def sockets_closed(place: Place) -> None:
    """Every connection of this rank, as when a network goes."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "socket:" in str(link.readlink()):
                with socket.socket(fileno=os.dup(int(link.name))) as each:
                    each.shutdown(socket.SHUT_RDWR)


STRIKES: dict[str, Callable[[Place], object]] = {
    "nothing": lambda place: None,
    "SIGSTOP to both ranks": stop_both,
    "SIGKILL to the launcher and both ranks": kill_all,
    "Ctrl-C twice": interrupt_twice,
    "it sleeps": lambda place: time.sleep(600),
    "it sleeps with Python's lock": sleep_with_the_lock,
    "it makes another collective": lambda place: torch.distributed.broadcast(torch.ones(3), src=1),
    "it leaves with code 0": lambda place: os._exit(0),
    "it leaves with code 7": lambda place: os._exit(7),
    "its connections are cut": sockets_closed,
    "memory is refused (RLIMIT_AS)": no_memory,
    "the kernel kills it for memory (cgroup)": killed_for_memory,
    "the disk is full (tmpfs)": disk_full,
    "the disk is full, nothing reserved (tmpfs)": disk_full_without_reserve,
    "a file may have 100 bytes (RLIMIT_FSIZE)": limited(resource.RLIMIT_FSIZE, 100),
    "no file can be opened (RLIMIT_NOFILE)": limited(resource.RLIMIT_NOFILE, 3),
    "its run folder is removed": lambda place: shutil.rmtree(place.folder),
    "its run folder is moved": lambda place: place.folder.rename(place.runs / "moved-away"),
    "the folder of all runs is moved": lambda place: place.runs.rename(place.runs.with_name("moved")),
    "the clock jumps a day ahead (emulated)": clock_jumps(86400),
    "the clock jumps a day back (emulated)": clock_jumps(-86400),
    "losses are not finite": not_a_number,
    "the protocol is garbled meanwhile": protocol_broken(b"\x00{["),
}
TO_ITSELF = "SIGKILL SIGTERM SIGINT SIGHUP SIGSEGV SIGBUS SIGABRT SIGSTOP SIGFPE SIGILL SIGUSR2 SIGQUIT"
TO_OTHERS = {"launcher": "SIGKILL SIGTERM SIGINT SIGSTOP SIGSEGV", "sweep": "SIGKILL SIGTERM SIGINT SIGHUP"}
STRIKES |= {f"{name} to itself": signalled(name) for name in TO_ITSELF.split()}
STRIKES |= {f"{name} to the {whom}": signalled(name, whom) for whom in TO_OTHERS for name in TO_OTHERS[whom].split()}
DAMAGES = {"is removed": None, "is empty": b"", "is garbled": b"\xff\x00{[" * 99, "is a folder": "folder"}
FILES = ("record.json", "steps.jsonl", "log.txt", "output.txt")
STRIKES |= {f"{name} {how}": writes(name, content) for name in FILES for how, content in DAMAGES.items()}
TORCH_OOM = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 9"
ERRORS: dict[str, BaseException] = {
    "MemoryError": MemoryError(),
    "PyTorch's allocator is refused memory (raised)": RuntimeError(TORCH_OOM),
    "std::bad_alloc (raised)": RuntimeError("std::bad_alloc"),
    "the disk is full (raised)": OSError(errno.ENOSPC, "No space left on device", "/a/file"),
    "over quota (raised)": OSError(errno.EDQUOT, "Disk quota exceeded", "/a/file"),
    "ValueError": ValueError("no such row"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "ImportError": ImportError("libfoo.so.1: cannot open shared object file"),
    "RecursionError": RecursionError("maximum recursion depth exceeded"),
    "SystemExit(0)": SystemExit(0),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}
STRIKES |= {how: raising(error) for how, error in ERRORS.items()}


# --- the table -----------------------------------------------------------------------------------------------------


def rows(kind: str, moments: str, hows: str, status: str | None, words: str = ANY, named=False, **same) -> list[Fault]:
    """Return a fault for each moment and each `how`. `@0` strikes rank 0, else rank 1; `named`: the record names it."""
    faults = []
    for moment, how in itertools.product(moments.split(", "), hows.split("; ")):
        when, _, number = moment.partition("@")
        rank = 0 if same.get("arm") == "single" else int(number or 1)
        about = dict(same)
        if named:
            about["where"] = f"rank {rank}"
        if when == "instruments":
            about["settings"] = {"instruments": True}
        if status == "timeout":
            about["timeout_s"] = 12
        faults.append(Fault(kind, when, how, status, words, rank, **about))
    return faults


KILLED = "was killed (SIGKILL; not for lack of memory)"
CRASHED = "was killed (SIGSEGV; a crash"
ENDED = "interrupted"
NO_MEMORY = "refused more memory"
NO_FOLDER = "its folder could not be used"
NO_ROW = "no such row"
REFUSED, CGROUP = "memory is refused (RLIMIT_AS)", "the kernel kills it for memory (cgroup)"
FULL, UNRESERVED = "the disk is full (tmpfs)", "the disk is full, nothing reserved (tmpfs)"
NAN, CUT = "losses are not finite", "its run folder is removed"
CODE_0, CODE_7 = "it leaves with code 0", "it leaves with code 7"

# fmt: off
FAULTS = [
    *rows("control", "warm-up", "nothing", "done"),
    *rows("control", "warm-up", "nothing", "done", arm="single"),
    # signals to a rank
    *rows("signal", "set-up, model, warm-up, timed window, evaluation, record, "
          "imports@0, set-up@0, timed window@0, between windows@0, record@0",
          "SIGKILL to itself", "failed", KILLED, named=True),
    *rows("signal", "imports", "SIGKILL to itself", "failed", "was killed (SIGKILL", named=True),
    *rows("signal", "instruments, instruments@0", "SIGKILL to itself", "done"),
    *rows("signal", "timed window", "SIGKILL to itself", "failed", KILLED, named=True, arm="zero2"),
    *rows("signal", "timed window@0", "SIGKILL to itself", "failed", KILLED, named=True, arm="zero3"),
    *rows("signal", "timed window", "SIGKILL to itself", "failed", "was killed (SIGKILL", arm="single"),
    *rows("signal", "timed window, evaluation@0", "SIGSEGV to itself", "failed", CRASHED, named=True),
    *rows("signal", "timed window", "SIGSEGV to itself", "failed", CRASHED, arm="single"),
    *rows("signal", "backward pass", "SIGBUS to itself", "failed", "was killed (SIGBUS; a file", named=True),
    *rows("signal", "model", "SIGABRT to itself", "failed", "was killed (SIGABRT; native", named=True),
    *rows("signal", "timed window", "SIGFPE to itself", "failed", "was killed (SIGFPE", named=True),
    *rows("signal", "warm-up@0", "SIGILL to itself", "failed", "was killed (SIGILL", named=True),
    *rows("signal", "warm-up", "SIGQUIT to itself", "failed", "was killed (SIGQUIT", named=True),
    *rows("signal", "timed window", "SIGUSR2 to itself", "done"),
    *rows("signal", "imports, set-up, model, warm-up, timed window, record, imports@0, set-up@0, model@0",
          "SIGTERM to itself", "interrupted", ENDED, named=True),
    *rows("signal", "imports, set-up", "SIGINT to itself; SIGHUP to itself", "interrupted", ENDED, named=True),
    *rows("signal", "imports", "SIGTERM to itself", "interrupted", ENDED, arm="single"),
    *rows("signal", "timed window", "SIGINT to itself", "interrupted", ENDED),
    *rows("signal", "evaluation@0", "SIGHUP to itself", "interrupted", ENDED),
    # signals to the launcher and to the sweep
    *rows("signal", "model, timed window, evaluation", "SIGKILL to the launcher", "interrupted"),
    *rows("signal", "timed window", "SIGKILL to the launcher", "interrupted", arm="single"),
    *rows("signal", "imports, set-up, model, timed window", "SIGTERM to the launcher", "interrupted"),
    *rows("signal", "imports, timed window", "SIGINT to the launcher", "interrupted"),
    *rows("signal", "timed window", "SIGSEGV to the launcher", "interrupted"),
    # At set-up from rank 0: it has made the record by then, which rank 1 may be too early for.
    *rows("signal", "set-up@0, timed window, evaluation, record", "SIGKILL to the sweep", "interrupted", code=-9),
    *rows("signal", "imports", "SIGKILL to the sweep", None, code=-9),
    *rows("signal", "instruments", "SIGKILL to the sweep", "done", code=-9),
    *rows("signal", "timed window", "SIGKILL to the sweep", "interrupted", code=-9, cells=2),
    *rows("signal", "set-up@0, timed window@0, between windows@0", "SIGINT to the sweep", "interrupted", code=130),
    *rows("signal", "timed window@0", "SIGINT to the sweep", "interrupted", code=130, arm="zero3_nvme"),
    *rows("signal", "evaluation", "SIGTERM to the sweep", "interrupted", code=130),
    *rows("signal", "model", "SIGHUP to the sweep", "interrupted", code=130),
    *rows("signal", "timed window", "Ctrl-C twice", "interrupted", code=130),
    *rows("signal", "timed window", "SIGKILL to the launcher and both ranks", "failed", "SIGKILL"),
    # hangs
    *rows("hang", "timed window", "SIGSTOP to itself", "timeout", "rank 1 is stopped (SIGSTOP)"),
    *rows("hang", "evaluation@0", "SIGSTOP to itself", "timeout", "rank 0 is stopped (SIGSTOP)"),
    *rows("hang", "timed window", "SIGSTOP to both ranks", "timeout", "rank 0 and rank 1 are stopped (SIGSTOP)"),
    *rows("hang", "timed window", "SIGSTOP to the launcher", "timeout"),
    *rows("hang", "timed window", "it sleeps", "timeout", "Rank 1 has not begun all_reduce"),
    *rows("hang", "evaluation", "it sleeps", "timeout", "Rank 1 has not begun"),
    *rows("hang", "backward pass@0", "it sleeps", "timeout", "Rank 0 has not begun"),
    *rows("hang", "timed window", "it sleeps", "timeout", "Rank 1 has not begun", arm="zero3"),
    *rows("hang", "timed window", "it sleeps with Python's lock", "timeout", "rank 1 was at work when last heard of"),
    *rows("hang", "timed window", "it makes another collective", "timeout", "different branches"),
    *rows("hang", "set-up", "it sleeps", "timeout", "rank 0 at"),
    # memory
    *rows("memory", "timed window", REFUSED, "host_oom", NO_MEMORY),
    *rows("memory", "timed window", REFUSED, "host_oom", NO_MEMORY, arm="single"),
    *rows("memory", "timed window", CGROUP, "host_oom", "the kernel killed rank 1", named=True),
    *rows("memory", "model@0", CGROUP, "host_oom", "the kernel killed rank 0", named=True),
    *rows("memory", "timed window", CGROUP, "host_oom", "the kernel killed", arm="single"),
    *rows("memory", "model", "MemoryError", "host_oom", NO_MEMORY, named=True),
    *rows("memory", "evaluation", "PyTorch's allocator is refused memory (raised)", "host_oom", NO_MEMORY),
    *rows("memory", "backward pass", "std::bad_alloc (raised)", "host_oom", NO_MEMORY),
    *rows("memory", "instruments", "MemoryError", "done"),
    # disk
    *rows("disk", "model@0", UNRESERVED, "failed", "No space left on device"),
    *rows("disk", "model@0, between windows@0, evaluation@0, record@0", FULL, "done"),
    *rows("disk", "model@0", UNRESERVED, "failed", "No space", cells=2),
    *rows("disk", "timed window@0", FULL, "done", cells=2, code=1),
    *rows("disk", "record@0", "the disk is full (raised)", "failed", "/a/file cannot be written"),
    *rows("disk", "set-up", "over quota (raised)", "failed", "Disk quota exceeded"),
    *rows("disk", "between windows@0", "a file may have 100 bytes (RLIMIT_FSIZE)", "failed"),
    *rows("disk", "timed window@0", "no file can be opened (RLIMIT_NOFILE)", "failed"),
    # files and folders
    *rows("files", "timed window@0", CUT, None, NO_FOLDER, code=1),
    *rows("files", "evaluation@0", "its run folder is moved", None, NO_FOLDER, code=1),
    *rows("files", "timed window@0", CUT, None, NO_FOLDER, code=1, cells=2),
    *rows("files", "timed window", "the folder of all runs is moved", None, "cannot write to"),
    *rows("files", "record@0", "record.json is removed", "failed"),
    *rows("files", "timed window@0", "record.json is removed; record.json is empty; record.json is garbled", "failed"),
    *rows("files", "timed window@0", "record.json is a folder", None, code=1),
    *rows("files", "timed window@0", "steps.jsonl is removed; log.txt is removed; output.txt is removed", "done"),
    *rows("files", "evaluation@0", "steps.jsonl is garbled", "done"),
    *rows("files", "warm-up@0", "steps.jsonl is a folder", "failed"),
    *rows("files", "timed window@0", "the protocol is garbled meanwhile", "done"),
    # training
    *rows("training", "warm-up", NAN, "diverged", "no longer finite"),
    *rows("training", "evaluation", NAN, "diverged", "evaluation loss is not finite"),
    *rows("training", "timed window", NAN, "diverged", "no longer finite", arm="zero2"),
    *rows("training", "timed window", NAN, "diverged", "no longer finite", cells=2),
    *rows("training", "set-up", "the clock jumps a day ahead (emulated)", "done"),
    *rows("training", "timed window@0", "the clock jumps a day back (emulated)", "done"),
    *rows("training", "timed window", "its connections are cut", "failed"),
    # exceptions
    *rows("exception", "set-up, model, timed window, evaluation, record", "ValueError", "failed", NO_ROW),
    *rows("exception", "imports, imports@0, set-up@0", "ValueError", "failed", NO_ROW, named=True),
    *rows("exception", "imports", "ImportError", "failed", "libfoo", named=True, arm="zero3"),
    *rows("exception", "imports", "ValueError", "failed", NO_ROW, arm="single"),
    *rows("exception", "imports", "MemoryError", "failed", "MemoryError", named=True),
    *rows("exception", "imports", CODE_7, "failed", "rank 1 ended with exit code 7", named=True),
    *rows("exception", "instruments, instruments@0, summary@0", "ValueError", "done"),
    *rows("exception", "timed window@0", "ValueError", "failed", NO_ROW, named=True, arm="zero3"),
    *rows("exception", "timed window", "ValueError", "failed", NO_ROW, cells=2),
    *rows("exception", "model", "ImportError", "failed", "libfoo"),
    *rows("exception", "evaluation", "RecursionError", "failed", "recursion"),
    *rows("exception", "timed window", "UnicodeDecodeError", "failed", "invalid start byte", arm="single"),
    *rows("exception", "timed window", "KeyboardInterrupt", "interrupted"),
    *rows("exception", "model", "SystemExit(0)", "failed"),
    *rows("exception", "timed window, evaluation", CODE_0, "failed", "rank 1 ended without an error message",
          named=True),
    *rows("exception", "imports", CODE_0, "timeout", "rank 0 at"),
    *rows("exception", "timed window", CODE_7, "failed"),
    *rows("exception", "timed window", CODE_0, "failed", arm="single"),
]
