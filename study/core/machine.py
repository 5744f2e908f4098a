"""The machine: services of the Linux kernel, versions of software, the launcher, the disk for offloading."""

import argparse
import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from study.core.errors import Stop
from study.core.text import size

if TYPE_CHECKING:
    import psutil

# psutil, resource and fcntl are imported where they are used: a browser lacks the first two, and Windows the last two.
PR_SET_PDEATHSIG = 1
MORE_MEMORY = "give fewer ranks, a smaller model, or a machine with more memory"  # what a user can do after a kill


def text(path: str) -> str:
    """Return the content of a file of the kernel; empty if it does not exist or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """Return the lines `name: value` of a file of the kernel."""
    return dict(re.findall(r"(?m)^(.+?)[ \t]*:[ \t]*(.*)$", text(path)))


def usable_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # 0: the kernel chooses. Another process may take it before the caller does
        return probe.getsockname()[1]


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel send this process a SIGTERM when its parent dies, so that nothing outlives its launcher."""
    # The kernel does not report a parent that died before this call: the caller may say who it was.
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def cap_private_memory(more_bytes: int) -> None:
    """Limit this process to its present private memory plus so many bytes. Beyond that allocations fail."""
    import resource

    # Since Linux 4.7 this limit counts private writable maps, too, which is where PyTorch's tensors are (setrlimit(2)).
    now_kib = int(fields("/proc/self/status")["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now_kib * 1024 + more_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def lift_memory_cap() -> None:
    """Remove the limit of `cap_private_memory`, as far as allowed: a process that is ending has to record why."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A process that has ended is a zombie until its parent waits for it."""
    # The name is in brackets, and may itself have brackets and spaces.
    return text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def killed_by(pid: int) -> str | None:
    """Return the signal that killed a process, such as SIGSEGV. None if none did, or its parent has already asked."""
    fields = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    number = int(fields[49]) & 0x7F if fields else 0  # the 52nd of all, as waitpid(2) gives it
    return signal.Signals(number).name if number in list(signal.Signals) else None


def oom_kills() -> int | None:
    """Return how many processes of this machine ran out of memory, also of a control group. None if unknown."""
    for line in text("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


# --- Several trainings on one device, one after the other

DEVICE_LOCK = "STUDY_DEVICE_LOCK"  # names a file: trainings that name the same one have the device in turn


def take_device(lock: str) -> None:
    """Wait until no other training has the device. Then this process has it until it ends."""
    import fcntl

    # The file is never closed: the kernel releases the lock when the process, and what it held of the device, is gone.
    fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


# --- Versions of the software that can change a number, and the folder for operators compiled for them

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "tokenizers", "numpy")
COMPILED_FOR = ("torch", "deepspeed")


def version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def packages_first(folder: Path) -> dict[str, str]:
    """Return the variable by which another Python finds the packages of a folder before those that are installed."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def put_programs_on_path() -> None:
    """Let this process and its children find the environment's own programs, such as ninja, if nobody activated it."""
    # Not resolved: in a virtual environment python is a link, and its programs are beside the link.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"


def operators_folder() -> Path:
    """Return the folder for DeepSpeed's compiled operators: in the Python environment of their PyTorch."""
    # PyTorch's default is one folder for all environments of a user, which would overwrite each other's operators. The
    # versions are in the name because ninja does not know that the build depends on PyTorch's headers.
    name = "-".join(f"{package}-{version(package) or 'none'}" for package in COMPILED_FOR)
    return Path(sys.prefix, "torch_extensions", name)


# --- Finds the `accelerate launch` above this process, and reads its command line

OPTIONS = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # the launcher's options that matter here
OPTIONS.add_argument("--config_file", "--config-file", nargs="?")
OPTIONS.add_argument("--num_processes", "--num-processes", nargs="?")


def find_launcher() -> "tuple[psutil.Process, argparse.Namespace] | None":
    """Return the nearest process above this one with a --config_file before this script, in either spelling."""
    import psutil

    # Words before the script are the launcher's, those after it are ours. Or: accelerate launch --module study.train
    script = Path(sys.argv[0])
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            words = process.cmdline()
            at_script = [i for i, text in enumerate(words) if Path(text).name in (script.name, f"study.{script.stem}")]
            if not at_script:
                continue
            options, _ = OPTIONS.parse_known_args(words[: at_script[0]])
            if options.config_file:
                return process, options
    return None


def launcher_config() -> Path | None:
    """Return the launcher's yaml; None if no launcher with one is found."""
    launch = find_launcher()
    return Path(launch[1].config_file) if launch else None


# --- The folder for offloading, checked before a run

BYTES_PER_PARAMETER = 16  # fp32 master copy and two moments, and gradients in transit
LEAST_SWAPPED_BYTES = 2**20  # DeepSpeed swaps no smaller partition; a rank's heartbeat files are a few kB


def make_swap_folder(folder: Path, needed_bytes: int) -> None:
    """Make a folder for offloading, if the disk has room and direct I/O. Any rank may call."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_direct_io(folder)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "give --nvme-dir a folder on a local disk that you may write to; others often refuse"
        raise Stop(f"{folder} cannot be used for offloading ({error.strerror or error})", remedy) from None
    if free_bytes < needed_bytes:
        what = f"{folder} has {size(free_bytes)} free, and this run needs {size(needed_bytes)}"
        remedy = "remove what killed runs have left there, or give a folder on a larger disk, or a smaller --model"
        raise Stop(what, remedy, "unavailable")


def check_direct_io(folder: Path) -> None:
    """Raise OSError for a folder whose files refuse direct I/O, as on tmpfs before Linux 6.6."""
    with _direct_file(folder) as file:
        os.pwrite(file, mmap.mmap(-1, mmap.PAGESIZE), 0)  # direct I/O demands whole pages


@contextlib.contextmanager
def _direct_file(folder: Path) -> Iterator[int]:
    """Yield an open file with direct I/O. It has no name, so nothing is left behind."""
    import fcntl

    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        yield file.fileno()


REQUEST_BYTES = 2**20  # of direct I/O, DeepSpeed's default
MEASURED_BYTES = 2**30


def disk_bytes_per_s(folder: Path) -> float:
    """Return bytes per second of the slower of writing and reading a file, request by request, as DeepSpeed does it."""

    request = mmap.mmap(-1, REQUEST_BYTES)
    request.write(os.urandom(REQUEST_BYTES))
    starts = range(0, MEASURED_BYTES, REQUEST_BYTES)
    try:
        with _direct_file(folder) as file:
            started = time.perf_counter()
            for start in starts:
                os.pwrite(file, request, start)
            os.fsync(file)
            between = time.perf_counter()
            for start in starts:
                os.preadv(file, [request], start)
            return MEASURED_BYTES / max(between - started, time.perf_counter() - between)
    except OSError as error:
        remedy = "give a folder on a local disk that you may write to"
        raise Stop(f"the disk of {folder} cannot be measured ({error.strerror})", remedy) from None
