"""The folder that an arm may offload to: checked before the run, given to it alone, and emptied when it ends."""

import ctypes.util
import mmap
import os
import shutil
from pathlib import Path

import psutil

from study.record import Stop

BYTES_PER_PARAMETER = 16  # fp32 master copy and two moments, and gradients on their way


def check_libaio() -> None:
    """DeepSpeed's disk operator is compiled against libaio; without it the run would die late and darkly."""
    named = os.environ.get("CPATH", "").split(os.pathsep)  # where the compiler looks besides
    folders = ("/usr/include", "/usr/local/include", *filter(None, named))
    header = any(Path(folder, "libaio.h").exists() for folder in folders)
    if not (header and ctypes.util.find_library("aio")):
        raise Stop(
            "offloading to disk needs libaio, which this machine lacks",
            "apt-get install libaio-dev (or your system's package of that name)",
            status="unavailable",
        )


def give(base: Path, run: str, needed_bytes: int) -> Path:
    """A folder under `base` for this run, once it is sure that it takes direct I/O and has room. All ranks may call."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep_up(base)
        _try_direct_io(base / f"probe-{os.getpid()}")
        free = shutil.disk_usage(base).free
        if free < needed_bytes:
            raise Stop(
                f"--nvme-dir {base} has {free / 1e9:.1f} GB free, and this run needs {needed_bytes / 1e9:.1f} GB",
                "give --nvme-dir a folder on a larger disk, or a smaller --model",
                status="unavailable",
            )
        (base / run).mkdir(exist_ok=True)
    except OSError as error:
        raise Stop(
            f"--nvme-dir {base} cannot be used for offloading ({error.strerror or error})",
            "give a folder on a local disk that you may write to; memory-backed and network file systems often refuse",
        ) from None
    return base / run


def empty(folder: Path | None) -> None:
    """Remove what a run put on the disk. The folder it was given in stays: it may be the user's own."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep_up(base: Path) -> None:
    """Remove what a run left behind that was killed: folders here are named by the process id of their launcher."""
    for folder in base.glob("run-*"):
        pid = folder.name.removeprefix("run-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _try_direct_io(path: Path) -> None:
    """Write one aligned block past the page cache, as DeepSpeed will."""
    block = mmap.mmap(-1, 4096)  # anonymous maps are page-aligned, which direct I/O demands
    try:
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        try:
            os.write(file, block)
        finally:
            os.close(file)
    finally:
        path.unlink(missing_ok=True)
        block.close()
