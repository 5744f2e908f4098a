"""Gives a run its own folder for offloading: checked before the run, and emptied when the run ends."""

import fcntl
import json
import mmap
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from study.core.errors import Stop
from study.core.linux import start_ticks, text
from study.core.numbers import size

PREFIX = "zero-study-swap-"
MARKER = "zero-study-swap.json"
BYTES_PER_PARAMETER = 16  # fp32 master copy and two moments, and gradients in transit
REQUEST_BYTES = 2**20  # DeepSpeed's default
LEAST_SWAPPED_BYTES = 2**20  # DeepSpeed swaps no smaller partition; a rank's heartbeat files are a few kB


def give(base: Path, launcher: int, needed_bytes: int) -> Path:
    """Return a folder below `base` for this launcher's run, if the disk has room and direct I/O. Any rank may call."""
    folder = base / f"{PREFIX}{socket.gethostname()}-{launcher}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        _remove_what_dead_runs_left(base)
        direct_speed(base, REQUEST_BYTES)
        free_bytes = shutil.disk_usage(base).free
        if free_bytes < needed_bytes:
            raise Stop(
                f"--nvme-dir {base} has {size(free_bytes)} free, and this run needs {size(needed_bytes)}",
                "give --nvme-dir a folder on a larger disk, or a smaller --model",
                status="unavailable",
            )
        _make(folder, _owner(launcher))
    except OSError as error:
        raise Stop(
            f"--nvme-dir {base} cannot be used for offloading ({error.strerror or error})",
            "give a folder on a local disk that you may write to; memory-backed and network file systems often refuse",
        ) from None
    return folder


def empty(folder: Path | None) -> None:
    """Remove a run's folder. The folder above it stays, as it may be the user's own."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def direct_speed(folder: Path, total_bytes: int) -> tuple[float, float]:
    """Return bytes per second of writing and reading a file with direct I/O, as DeepSpeed does, request by request."""
    request = mmap.mmap(-1, REQUEST_BYTES)  # anonymous maps are page-aligned, which direct I/O demands
    request.write(os.urandom(REQUEST_BYTES))  # zeros are too easy for some disks
    starts = range(0, total_bytes, REQUEST_BYTES)
    with tempfile.TemporaryFile(dir=folder) as open_file:  # without a name, so nothing is left behind
        file = open_file.fileno()
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        started = time.perf_counter()
        written_bytes = sum(os.pwrite(file, request, start) for start in starts)
        os.fsync(file)
        between = time.perf_counter()
        read_bytes = sum(os.preadv(file, [request], start) for start in starts)
        return written_bytes / (between - started), read_bytes / (time.perf_counter() - between)


def _owner(launcher: int) -> dict:
    """Return the owner of a folder. Process ids are reused, and two containers may share a name and a disk."""
    return {
        "host": socket.gethostname(),
        "machine": text("/etc/machine-id"),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "boot": text("/proc/sys/kernel/random/boot_id"),
        "pid": launcher,
        "start_ticks": start_ticks(launcher),
    }


def _make(folder: Path, owner: dict) -> None:
    """Make the folder and its marker in one step, so that no other rank sees the folder without the marker."""
    part = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder.parent))
    (part / MARKER).write_text(json.dumps(owner))
    try:
        part.rename(folder)
    except OSError:  # it exists: another rank of this run was first, or the folder is not ours
        shutil.rmtree(part)
        if _marker(folder) != owner:
            raise Stop(f"{folder} exists and is not from this run", "remove it, or give another --nvme-dir") from None


def _marker(folder: Path) -> dict:
    """Return the owner of a folder; {} if the study did not make it."""
    try:
        owner = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and type(owner.get("pid")) is int else {}


def _remove_what_dead_runs_left(base: Path) -> None:
    """Remove the folders of runs that were killed: those with our marker, from this machine, whose launcher is gone."""
    this_process = _owner(os.getpid())
    for folder in base.glob(f"{PREFIX}*"):
        owner = _marker(folder)
        is_ours = owner.keys() == this_process.keys() and all(
            owner[name] == this_process[name] for name in ("host", "machine", "pid_namespace")
        )
        if is_ours and _owner(owner["pid"]) != owner:  # its process has ended, even if the id is used again
            shutil.rmtree(folder, ignore_errors=True)
