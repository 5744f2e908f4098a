"""The faults that the study is tested with: of what kind, when, what it does, and what has to come of it.

A fault strikes the first cell of a small sweep. `when` is a moment in a rank of its training (MOMENTS), or `before` the
sweep. What `how` does is in STRIKES and PREPARATIONS. The runner (`fault_runner.py`) asserts the same four things each
time: FAULTS, at the end, says which status and words the first of them expects.

What is emulated says so in `how`: a clock that jumps is a replaced `time.time`, and memory that is refused is a limit
of this process's.
"""

import contextlib
import ctypes
import datetime
import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
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
    "summary": ("study.training.finish", "print_summary"),
}
ANY = ""


@dataclass(frozen=True)
class Place:
    """Where a fault strikes: a rank of a launch of a sweep, and its folders."""

    runs: Path
    cache: Path
    turn: str
    sweep: int = 0  # process ids
    launcher: int = 0
    rank: int = 0

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
    real: bool = False  # not forked: `accelerate launch` itself

    @property
    def name(self) -> str:
        extra = f", {self.arm}" if self.arm != "ddp" else ""
        whose = "" if self.when == "before" else f", rank {self.rank}"
        cells = f", {self.cells} cells" if self.cells > 1 else ""
        real = ", a real launch" if self.real else ""
        return f"{self.kind}: {self.how}, {self.when}{whose}{extra}{cells}{real}"


# --- what strikes in a rank ----------------------------------------------------------------------------------------


def signalled(name: str, whom: Callable[[Place], int] = lambda place: os.getpid()) -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        os.kill(whom(place), getattr(signal, name))
        if whom(place) != os.getpid():
            time.sleep(60)  # it is ended from outside meanwhile

    return strike


def to_launcher(name: str) -> Callable[[Place], None]:
    return signalled(name, lambda place: place.launcher)


def to_sweep(name: str) -> Callable[[Place], None]:
    return signalled(name, lambda place: place.sweep)


def raising(error: BaseException) -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        raise error

    return strike


def sleep(place: Place) -> None:
    time.sleep(600)


def sleep_with_the_lock(place: Place) -> None:
    """In C, and without letting any other thread of this process run."""
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # no signal ends this wait


def another_collective(place: Place) -> None:
    torch.distributed.broadcast(torch.ones(3), src=1)


def leave(code: int) -> Callable[[Place], None]:
    return lambda place: os._exit(code)


def stop_both(place: Place) -> None:
    for child in Path(f"/proc/{place.launcher}/task/{place.launcher}/children").read_text().split():
        if int(child) != os.getpid():
            os.kill(int(child), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_all(place: Place) -> None:
    family = Path(f"/proc/{place.launcher}/task/{place.launcher}/children").read_text().split()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # that of the kernel, when the launcher is gone
    for child in family:
        if int(child) != os.getpid():
            os.kill(int(child), signal.SIGKILL)
    os.kill(place.launcher, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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


def file_size_limit(place: Place) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def no_files(place: Place) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def folder_gone(place: Place) -> None:
    shutil.rmtree(place.folder)


def folder_moved(place: Place) -> None:
    place.folder.rename(place.runs / "moved-away")


def runs_gone(place: Place) -> None:
    place.runs.rename(place.runs.with_name("moved"))


def writes(name: str, content: bytes | None) -> Callable[[Place], None]:
    """Replace a file of the run folder; None removes it."""

    def strike(place: Place) -> None:
        path = place.folder / name
        path.unlink(missing_ok=True) if content is None else path.write_bytes(content)

    return strike


def is_folder(name: str) -> Callable[[Place], None]:
    def strike(place: Place) -> None:
        (place.folder / name).unlink(missing_ok=True)
        (place.folder / name).mkdir()

    return strike


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


def protocol_changes(place: Place) -> None:
    (place.runs.parent / "faulty.toml").write_bytes(b"\x00{[")


SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGSTOP")
SIGNALS = (*SIGNALS, "SIGFPE", "SIGILL", "SIGUSR2", "SIGQUIT")
FULL = OSError(errno.ENOSPC, "No space left on device", "/a/file")
OVER_QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded", "/a/file")
TORCH_OOM = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 9")

STRIKES: dict[str, Callable[[Place], None]] = {
    "nothing": lambda place: None,
    **{
        f"{name} to itself": signalled(name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSEGV", "SIGBUS")
    },
    **{
        f"{name} to itself": signalled(name)
        for name in ("SIGABRT", "SIGSTOP", "SIGFPE", "SIGILL", "SIGUSR2", "SIGQUIT")
    },
    **{f"{name} to the launcher": to_launcher(name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "SIGSEGV")},
    **{f"{name} to the sweep": to_sweep(name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")},
    "SIGSTOP to both ranks": stop_both,
    "SIGKILL to the launcher and both ranks": kill_all,
    "Ctrl-C twice": interrupt_twice,
    "it sleeps": sleep,
    "it sleeps with Python's lock": sleep_with_the_lock,
    "it makes another collective": another_collective,
    "it leaves with code 0": leave(0),
    "it leaves with code 7": leave(7),
    "its connections are cut": sockets_closed,
    "memory is refused (RLIMIT_AS)": no_memory,
    "the kernel kills it for memory (cgroup)": killed_for_memory,
    "MemoryError": raising(MemoryError()),
    "PyTorch's allocator is refused memory (raised)": raising(TORCH_OOM),
    "std::bad_alloc (raised)": raising(RuntimeError("std::bad_alloc")),
    "the disk is full (tmpfs)": disk_full,
    "the disk is full, nothing reserved (tmpfs)": disk_full_without_reserve,
    "the disk is full (raised)": raising(FULL),
    "over quota (raised)": raising(OVER_QUOTA),
    "a file may have 100 bytes (RLIMIT_FSIZE)": file_size_limit,
    "no file can be opened (RLIMIT_NOFILE)": no_files,
    "its run folder is removed": folder_gone,
    "its run folder is moved": folder_moved,
    "the folder of all runs is moved": runs_gone,
    "record.json is removed": writes("record.json", None),
    "record.json is empty": writes("record.json", b""),
    "record.json is garbled": writes("record.json", b"\xff{[" * 99),
    "record.json is a folder": is_folder("record.json"),
    "steps.jsonl is removed": writes("steps.jsonl", None),
    "steps.jsonl is garbled": writes("steps.jsonl", b"\xff\x00[" * 99),
    "steps.jsonl is a folder": is_folder("steps.jsonl"),
    "log.txt is removed": writes("log.txt", None),
    "output.txt is removed": writes("output.txt", None),
    "the clock jumps a day ahead (emulated)": clock_jumps(86400),
    "the clock jumps a day back (emulated)": clock_jumps(-86400),
    "losses are not finite": not_a_number,
    "ValueError": raising(ValueError("no such row")),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "ImportError": raising(ImportError("libfoo.so.1: cannot open shared object file")),
    "RecursionError": raising(RecursionError("maximum recursion depth exceeded")),
    "SystemExit(0)": raising(SystemExit(0)),
    "UnicodeDecodeError": raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
    "the protocol is garbled meanwhile": protocol_changes,
}


# --- what is wrong in the sweep's folders --------------------------------------------------------------------------


def earlier(content: bytes | None) -> Callable[[Place], None]:
    """An earlier try of the same turn left this as its record; None: no record."""

    def prepare(place: Place) -> None:
        place.folder.mkdir(parents=True)
        (place.folder / "output.txt").write_text("an earlier try\n")
        if content is not None:
            (place.folder / "record.json").write_bytes(content)

    return prepare


def earlier_is_a_file(place: Place) -> None:
    place.folder.write_text("somebody's notes")


def earlier_is_a_link(place: Place) -> None:
    (place.runs / "elsewhere").mkdir()
    place.folder.symlink_to("elsewhere")


def names_that_look_alike(place: Place) -> None:
    for end in ("old", "1.tar.gz", "one", "01x"):
        (place.runs / f"{place.turn}.{end}").mkdir(exist_ok=True)
        (place.runs / f"{place.turn}.{end}" / "thesis.txt").write_text("a user's")


def stale_lock(place: Place) -> None:
    (place.runs / ".sweep").write_text("process 999999 since yesterday")


def live_lock(place: Place) -> None:
    """Another sweep holds the folder, until the runner lets it go."""
    locked, holder = place.runs.parent / "locked", place.runs.parent / "holder"
    script = f"echo $$ > {holder}; touch {locked}; exec sleep 600"
    subprocess.Popen(["flock", "--no-fork", str(place.runs / ".sweep"), "sh", "-c", script], start_new_session=True)
    while not locked.exists():
        time.sleep(0.02)


def lock_is_a_folder(place: Place) -> None:
    (place.runs / ".sweep").mkdir()


def runs_is_a_file(place: Place) -> None:
    shutil.rmtree(place.runs)
    place.runs.write_text("not a folder")


def entries(place: Place) -> list[Path]:
    found = [path for path in (place.cache / "zero-study").glob("*/*") if path.is_dir()]
    assert found, "the cache has entries to break"
    return found


def cache_files(damage: Callable[[Path], object], pattern: str = "*") -> Callable[[Place], None]:
    """Damage files of the cache's entries."""

    def prepare(place: Place) -> None:
        chosen = [path for entry in entries(place) for path in entry.rglob(pattern) if path.is_file()]
        assert chosen
        for path in chosen:
            damage(path)

    return prepare


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cache_entry_is_a_file(place: Place) -> None:
    for entry in entries(place):
        shutil.rmtree(entry)
        entry.write_text("")


def cache_scraps(place: Place) -> None:
    for entry in entries(place):
        scrap = entry.with_name("part-of-a-killed-run")
        scrap.mkdir(exist_ok=True)
        (scrap / "model.safetensors").write_bytes(b"half")


def cache_is_a_file(place: Place) -> None:
    (place.cache / "zero-study").write_text("")


def environment(**values: str) -> Callable[[Place], None]:
    return lambda place: os.environ.update(values)


def python_path(place: Place) -> None:
    """A folder of the user's with a module named like one of the standard library."""
    folder = place.runs.parent / "users-modules"
    folder.mkdir(exist_ok=True)
    (folder / "dataclasses.py").write_text("raise SystemError('the wrong dataclasses')\n")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def port_in_use(place: Place) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    os.set_inheritable(listener.fileno(), True)
    os.environ |= {"MASTER_PORT": str(listener.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}
    listener.detach()


def few_files(place: Place) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def read_only(place: Place) -> None:
    subprocess.run(["mount", "--bind", str(place.runs), str(place.runs)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(place.runs)], check=True)


def protocol_broken(content: bytes) -> Callable[[Place], None]:
    return lambda place: (place.runs.parent / "faulty.toml").write_bytes(content)


def disk_nearly_full(place: Place) -> None:
    """Room for half of what the sweep reserves."""
    free = shutil.disk_usage(place.runs).free
    with (place.runs / "users-own-large-file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - store.RESERVED_BYTES // 2))


def half_a_record() -> bytes:
    return store.new("x", []).model_dump_json().encode()[:200]


def done_record(**changes) -> bytes:
    content = json.loads(store.new("x", []).model_dump_json())
    return json.dumps(content | {"status": "done"} | changes).encode()


PREPARATIONS: dict[str, Callable[[Place], None]] = {
    "an earlier try has no record": earlier(None),
    "an earlier try has an empty record": earlier(b""),
    "an earlier try has half a record": earlier(half_a_record()),
    "an earlier try has a record nested 100,000 deep": earlier(b"[" * 100_000),
    "an earlier try is said to be done by other software": earlier(done_record(software={"torch": "1.0"})),
    "an earlier try is done with software that is no table": earlier(done_record(software=[1])),
    "an earlier try has a record of a later schema": earlier(done_record(schema=99)),
    "an earlier try still says running": earlier(done_record(status="running")),
    "a file has the name of a try": earlier_is_a_file,
    "a link has the name of a try": earlier_is_a_link,
    "names that look like tries": names_that_look_alike,
    "a stale lock file": stale_lock,
    "another sweep holds the folder": live_lock,
    "the lock file is a folder": lock_is_a_folder,
    "--runs is a file": runs_is_a_file,
    "the runs' disk is read-only (bind mount)": read_only,
    "the runs' disk is nearly full (tmpfs)": disk_nearly_full,
    "cached files are cut off": cache_files(cut_off, "*.safetensors"),
    "cached files are empty": cache_files(lambda path: path.write_bytes(b""), "*.safetensors"),
    "a bit of cached files is flipped": cache_files(flip, "*.safetensors"),
    "cached files are gone": cache_files(Path.unlink, "*.safetensors"),
    "cached checksums are garbled": cache_files(lambda path: path.write_bytes(b"{["), "checksums.json"),
    "cached configs are garbled": cache_files(lambda path: path.write_bytes(b"{["), "config.json"),
    "cached entries are files": cache_entry_is_a_file,
    "scraps of a killed run in the cache": cache_scraps,
    "the cache is a file": cache_is_a_file,
    "RANK, WORLD_SIZE and LOCAL_RANK in the environment": environment(RANK="3", WORLD_SIZE="8", LOCAL_RANK="3"),
    "MASTER_PORT in use": port_in_use,
    "OMP_NUM_THREADS=0": environment(OMP_NUM_THREADS="0"),
    "TORCHELASTIC_ERROR_FILE in the environment": environment(TORCHELASTIC_ERROR_FILE="/nonexistent/error.json"),
    "ACCELERATE_* of another launch": environment(
        ACCELERATE_MIXED_PRECISION="fp16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"
    ),
    "a module of the user's shadows Python's": python_path,
    "40 open files at most (RLIMIT_NOFILE)": few_files,
    "the protocol is garbled": protocol_broken(b"\xff\x00[[["),
    "the protocol ends in the middle": protocol_broken(b'about = "x"\n[[part]]\nname = "p'),
}


# --- the table -----------------------------------------------------------------------------------------------------

# fmt: off
S, M, D, F, L, C, T, H, X, E = (
    "signal", "memory", "disk", "files", "locks", "caches", "training", "hang", "exception", "environment",
)
INSTRUMENTS = {"instruments": True}
HANG = {"timeout_s": 12}


def at_each(moments: str, **same) -> list[Fault]:
    return [Fault(when=moment, **same) for moment in moments.split(", ")]


WHILE_TRAINING = "warm-up, timed window, backward pass, between windows"
KILLED = {"status": "failed", "words": "was killed (SIGKILL; not for lack of memory)"}
INTERRUPTED = {"status": "interrupted", "words": "interrupted"}
FAULTS = [
    Fault("control", "warm-up", "nothing", "done"),
    Fault("control", "warm-up", "nothing", "done", arm="single", rank=0),
    # signals to a rank
    *at_each(
        "set-up, model, warm-up, timed window, evaluation, record",
        kind=S,
        how="SIGKILL to itself",
        rank=1,
        where="rank 1",
        **KILLED,
    ),
    *at_each(
        "imports, set-up, timed window, between windows, record",
        kind=S,
        how="SIGKILL to itself",
        rank=0,
        where="rank 0",
        **KILLED,
    ),
    Fault(S, "imports", "SIGKILL to itself", "failed", "was killed (SIGKILL", where="rank 1"),
    Fault(S, "instruments", "SIGKILL to itself", "done", settings=INSTRUMENTS),
    Fault(S, "instruments", "SIGKILL to itself", "done", rank=0, settings=INSTRUMENTS),
    Fault(S, "timed window", "SIGKILL to itself", **KILLED, arm="zero2", where="rank 1"),
    Fault(S, "timed window", "SIGKILL to itself", **KILLED, arm="zero3", rank=0, where="rank 0"),
    Fault(S, "timed window", "SIGKILL to itself", "failed", "was killed (SIGKILL", arm="single", rank=0),
    Fault(S, "timed window", "SIGSEGV to itself", "failed", "was killed (SIGSEGV; a crash", where="rank 1"),
    Fault(S, "evaluation", "SIGSEGV to itself", "failed", "was killed (SIGSEGV; a crash", rank=0, where="rank 0"),
    Fault(S, "timed window", "SIGSEGV to itself", "failed", "was killed (SIGSEGV; a crash", arm="single", rank=0),
    Fault(S, "backward pass", "SIGBUS to itself", "failed", "was killed (SIGBUS; a file", where="rank 1"),
    Fault(S, "model", "SIGABRT to itself", "failed", "was killed (SIGABRT; native", where="rank 1"),
    Fault(S, "timed window", "SIGFPE to itself", "failed", "was killed (SIGFPE", where="rank 1"),
    Fault(S, "warm-up", "SIGILL to itself", "failed", "was killed (SIGILL", rank=0, where="rank 0"),
    Fault(S, "warm-up", "SIGQUIT to itself", "failed", "was killed (SIGQUIT", where="rank 1"),
    Fault(S, "timed window", "SIGUSR2 to itself", "done"),
    *at_each(
        "set-up, model, warm-up, timed window, record",
        kind=S,
        how="SIGTERM to itself",
        status="interrupted",
        words="interrupted",
        where="rank 1",
    ),
    *at_each("set-up, model", kind=S, how="SIGTERM to itself", rank=0, where="rank 0", **INTERRUPTED),
    *at_each("imports", kind=S, how="SIGTERM to itself", where="rank 1", **INTERRUPTED),
    *at_each("imports", kind=S, how="SIGTERM to itself", rank=0, where="rank 0", **INTERRUPTED),
    *at_each("imports", kind=S, how="SIGINT to itself", where="rank 1", **INTERRUPTED),
    *at_each("imports", kind=S, how="SIGHUP to itself", where="rank 1", **INTERRUPTED),
    *at_each("imports", kind=S, how="SIGTERM to itself", arm="single", rank=0, **INTERRUPTED),
    *at_each("set-up", kind=S, how="SIGINT to itself", where="rank 1", **INTERRUPTED),
    *at_each("set-up", kind=S, how="SIGHUP to itself", where="rank 1", **INTERRUPTED),
    Fault(S, "timed window", "SIGINT to itself", "interrupted", "interrupted"),
    Fault(S, "evaluation", "SIGHUP to itself", "interrupted", "interrupted", rank=0),
    # signals to the launcher and to the sweep
    *at_each("model, timed window, evaluation", kind=S, how="SIGKILL to the launcher", status="interrupted"),
    Fault(S, "timed window", "SIGKILL to the launcher", "interrupted", arm="single", rank=0),
    *at_each("imports, set-up, model, timed window", kind=S, how="SIGTERM to the launcher", status="interrupted"),
    Fault(S, "imports", "SIGINT to the launcher", "interrupted"),
    Fault(S, "timed window", "SIGINT to the launcher", "interrupted"),
    Fault(S, "timed window", "SIGSEGV to the launcher", "interrupted"),
    # At set-up from rank 0: it has made the record by then, which rank 1 may be too early for.
    Fault(S, "set-up", "SIGKILL to the sweep", "interrupted", code=-9, rank=0),
    *at_each("timed window, evaluation, record", kind=S, how="SIGKILL to the sweep", status="interrupted", code=-9),
    Fault(S, "imports", "SIGKILL to the sweep", None, code=-9),
    Fault(S, "instruments", "SIGKILL to the sweep", "done", code=-9, settings=INSTRUMENTS),
    Fault(S, "timed window", "SIGKILL to the sweep", "interrupted", code=-9, cells=2),
    *at_each(
        "set-up, timed window, between windows", kind=S, how="SIGINT to the sweep", status="interrupted",
        rank=0, code=130,
    ),
    Fault(S, "timed window", "SIGINT to the sweep", "interrupted", rank=0, code=130, arm="zero3_nvme"),
    Fault(S, "evaluation", "SIGTERM to the sweep", "interrupted", code=130),
    Fault(S, "model", "SIGHUP to the sweep", "interrupted", code=130),
    Fault(S, "timed window", "Ctrl-C twice", "interrupted", code=130),
    Fault(S, "timed window", "SIGKILL to the launcher and both ranks", "failed", "SIGKILL"),
    Fault(S, "training", "SIGKILL to itself", **KILLED, where="rank 1", real=True, settings={"steps": 300}),
    Fault(S, "training", "SIGKILL to itself", **KILLED, where="rank 0", rank=0, real=True, settings={"steps": 300}),
    Fault(
        S,
        "training",
        "SIGSEGV to itself",
        "failed",
        "SIGSEGV",
        arm="single",
        rank=0,
        real=True,
        settings={"steps": 300},
    ),
    Fault(S, "training", "SIGKILL to the launcher", "interrupted", real=True, settings={"steps": 300}),
    Fault(S, "training", "SIGKILL to the sweep", "interrupted", code=-9, real=True, settings={"steps": 300}),
    # hangs
    Fault(H, "timed window", "SIGSTOP to itself", "timeout", "rank 1 is stopped (SIGSTOP)", **HANG),
    Fault(H, "evaluation", "SIGSTOP to itself", "timeout", "rank 0 is stopped (SIGSTOP)", rank=0, **HANG),
    Fault(H, "timed window", "SIGSTOP to both ranks", "timeout", "rank 0 and rank 1 are stopped (SIGSTOP)", **HANG),
    Fault(H, "timed window", "SIGSTOP to the launcher", "timeout", **HANG),
    Fault(H, "timed window", "it sleeps", "timeout", "Rank 1 has not begun all_reduce", **HANG),
    Fault(H, "evaluation", "it sleeps", "timeout", "Rank 1 has not begun", **HANG),
    Fault(H, "backward pass", "it sleeps", "timeout", "Rank 0 has not begun", rank=0, **HANG),
    Fault(H, "timed window", "it sleeps", "timeout", "Rank 1 has not begun", arm="zero3", **HANG),
    Fault(
        H, "timed window", "it sleeps with Python's lock", "timeout", "rank 1 was at work when last heard of", **HANG
    ),
    Fault(H, "timed window", "it makes another collective", "timeout", "different branches", **HANG),
    Fault(H, "set-up", "it sleeps", "timeout", "rank 0 at", **HANG),
    # memory
    Fault(M, "timed window", "memory is refused (RLIMIT_AS)", "host_oom", "refused more memory"),
    Fault(M, "timed window", "memory is refused (RLIMIT_AS)", "host_oom", "refused more memory", arm="single", rank=0),
    Fault(
        M,
        "timed window",
        "the kernel kills it for memory (cgroup)",
        "host_oom",
        "the kernel killed rank 1",
        where="rank 1",
    ),
    Fault(
        M,
        "model",
        "the kernel kills it for memory (cgroup)",
        "host_oom",
        "the kernel killed rank 0",
        rank=0,
        where="rank 0",
    ),
    Fault(
        M,
        "timed window",
        "the kernel kills it for memory (cgroup)",
        "host_oom",
        "the kernel killed",
        arm="single",
        rank=0,
    ),
    Fault(M, "model", "MemoryError", "host_oom", "refused more memory", where="rank 1"),
    Fault(M, "evaluation", "PyTorch's allocator is refused memory (raised)", "host_oom", "refused more memory"),
    Fault(M, "backward pass", "std::bad_alloc (raised)", "host_oom", "refused more memory"),
    Fault(M, "instruments", "MemoryError", "done", settings=INSTRUMENTS),
    # disk
    Fault(D, "model", "the disk is full, nothing reserved (tmpfs)", "failed", "No space left on device", rank=0),
    *at_each("model, between windows, evaluation, record", kind=D, how="the disk is full (tmpfs)", rank=0, status="done"
             ),
    Fault(D, "model", "the disk is full, nothing reserved (tmpfs)", "failed", "No space", rank=0, cells=2),
    Fault(D, "timed window", "the disk is full (tmpfs)", "done", rank=0, cells=2, code=1),
    Fault(D, "before", "the runs' disk is nearly full (tmpfs)", None, "No space left"),
    Fault(D, "before", "the runs' disk is read-only (bind mount)", None, "cannot be used (Read-only file system)"),
    Fault(D, "record", "the disk is full (raised)", "failed", "/a/file cannot be written", rank=0),
    Fault(D, "set-up", "over quota (raised)", "failed", "Disk quota exceeded"),
    Fault(D, "between windows", "a file may have 100 bytes (RLIMIT_FSIZE)", "failed", ANY, rank=0),
    Fault(D, "timed window", "no file can be opened (RLIMIT_NOFILE)", "failed", ANY, rank=0),
    # files and folders
    Fault(F, "timed window", "its run folder is removed", None, "its folder could not be used", rank=0, code=1),
    Fault(F, "evaluation", "its run folder is moved", None, "its folder could not be used", rank=0, code=1),
    Fault(
        F, "timed window", "its run folder is removed", None, "its folder could not be used", rank=0, code=1, cells=2
    ),
    Fault(F, "timed window", "the folder of all runs is moved", None, "cannot write to"),
    *at_each("timed window, record", kind=F, how="record.json is removed", status="failed", rank=0),
    Fault(F, "timed window", "record.json is empty", "failed", rank=0),
    Fault(F, "timed window", "record.json is garbled", "failed", rank=0),
    Fault(F, "timed window", "record.json is a folder", None, code=1, rank=0),
    Fault(F, "timed window", "steps.jsonl is removed", "done", rank=0),
    Fault(F, "evaluation", "steps.jsonl is garbled", "done", rank=0),
    Fault(F, "warm-up", "steps.jsonl is a folder", "failed", ANY, rank=0),
    Fault(F, "timed window", "log.txt is removed", "done", rank=0),
    Fault(F, "timed window", "output.txt is removed", "done", rank=0),
    Fault(F, "timed window", "the protocol is garbled meanwhile", "done", rank=0),
    *[Fault(F, "before", how, "done") for how in PREPARATIONS if how.startswith("an earlier try")],
    Fault(F, "before", "a file has the name of a try", "done"),
    Fault(F, "before", "a link has the name of a try", "done"),
    Fault(F, "before", "names that look like tries", "done"),
    Fault(F, "before", "--runs is a file", None, "cannot be used"),
    Fault(F, "before", "the protocol is garbled", None),
    Fault(F, "before", "the protocol ends in the middle", None),
    # locks
    Fault(L, "before", "a stale lock file", "done"),
    Fault(L, "before", "another sweep holds the folder", None, "another sweep holds"),
    Fault(L, "before", "the lock file is a folder", None, "cannot be used (Is a directory)"),
    # caches
    *[Fault(C, "before", how, "done") for how in PREPARATIONS if "cache" in how and how != "the cache is a file"],
    Fault(C, "before", "a bit of cached files is flipped", "done", cells=2),
    Fault(C, "before", "the cache is a file", "failed", "the cache cannot be used"),
    # training
    Fault(T, "warm-up", "losses are not finite", "diverged", "no longer finite"),
    Fault(T, "evaluation", "losses are not finite", "diverged", "evaluation loss is not finite"),
    Fault(T, "timed window", "losses are not finite", "diverged", "no longer finite", arm="zero2"),
    Fault(T, "timed window", "losses are not finite", "diverged", "no longer finite", cells=2),
    Fault(T, "set-up", "the clock jumps a day ahead (emulated)", "done"),
    Fault(T, "timed window", "the clock jumps a day back (emulated)", "done", rank=0),
    Fault(T, "timed window", "its connections are cut", "failed", ANY),
    # exceptions
    *at_each(
        "set-up, model, timed window, evaluation, record",
        kind=X,
        how="ValueError",
        status="failed",
        words="no such row",
    ),
    *at_each("imports", kind=X, how="ValueError", status="failed", words="no such row", where="rank 1"),
    *at_each("imports", kind=X, how="ValueError", status="failed", words="no such row", rank=0, where="rank 0"),
    *at_each("imports", kind=X, how="ImportError", status="failed", words="libfoo", where="rank 1", arm="zero3"),
    *at_each("imports", kind=X, how="ValueError", status="failed", words="no such row", rank=0, arm="single"),
    Fault(X, "imports", "MemoryError", "failed", "MemoryError", where="rank 1"),
    Fault(X, "imports", "it leaves with code 7", "failed", "rank 1 ended with exit code 7", where="rank 1"),
    Fault(X, "set-up", "ValueError", "failed", "no such row", rank=0, where="rank 0"),
    Fault(X, "instruments", "ValueError", "done", settings=INSTRUMENTS),
    Fault(X, "instruments", "ValueError", "done", rank=0, settings=INSTRUMENTS),
    Fault(X, "summary", "ValueError", "done", rank=0),
    Fault(X, "timed window", "ValueError", "failed", "no such row", arm="zero3", rank=0, where="rank 0"),
    Fault(X, "timed window", "ValueError", "failed", "no such row", cells=2),
    Fault(X, "model", "ImportError", "failed", "libfoo"),
    Fault(X, "evaluation", "RecursionError", "failed", "recursion"),
    Fault(X, "timed window", "UnicodeDecodeError", "failed", "invalid start byte", arm="single", rank=0),
    Fault(X, "timed window", "KeyboardInterrupt", "interrupted"),
    Fault(X, "model", "SystemExit(0)", "failed", ANY),
    *at_each("timed window, evaluation", kind=X, how="it leaves with code 0", status="failed",
             words="rank 1 ended without an error message", where="rank 1"),
    Fault(X, "imports", "it leaves with code 0", "timeout", "rank 0 at", **HANG),
    Fault(X, "timed window", "it leaves with code 7", "failed", ANY),
    Fault(X, "timed window", "it leaves with code 0", "failed", ANY, arm="single", rank=0),
    # environment
    Fault(E, "before", "RANK, WORLD_SIZE and LOCAL_RANK in the environment", "done"),
    Fault(E, "before", "RANK, WORLD_SIZE and LOCAL_RANK in the environment", "done", arm="single"),
    Fault(E, "before", "MASTER_PORT in use", "done"),
    Fault(E, "before", "OMP_NUM_THREADS=0", "done"),
    Fault(E, "before", "TORCHELASTIC_ERROR_FILE in the environment", "done"),
    Fault(E, "before", "ACCELERATE_* of another launch", "done"),
    Fault(E, "before", "40 open files at most (RLIMIT_NOFILE)", "done"),
    Fault(E, "before", "a module of the user's shadows Python's", "failed", "SystemError", real=True),
]
