"""Examines what this machine has and lacks for the study, with remedies. It needs no torch, so it is fast."""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.core import machine
from study.core.arms import Arm
from study.core.errors import FULL_INSTALL, Stop
from study.core.gpus import gpus_here
from study.core.machine import check_direct_io, usable_cores
from study.core.operators import GET_COMPILER, GET_CUDA, GET_NINJA, compiler, missing, needed_by, nvcc, why_not_operator
from study.core.text import size

SHARED_BYTES = 2 * 66 * 2**20  # what DeepSpeed 0.19 takes for two ranks without a GPU (csrc/cpu/comm/shm.cpp)
RANK_BYTES = 300_000_000  # the least that a rank takes for itself: Python, PyTorch and a tiny model had 367 MB
GET_SHARED = "start the container with --shm-size=1g; outside a container: mount -o remount,size=1g /dev/shm, as root"


@dataclass(frozen=True)
class Examined:
    """The state of one thing that was examined, and what to do if it is not fine."""

    what: str
    found: str
    remedy: str | None = None
    id: str = ""  # in known/findings.toml, if it is not fine

    @property
    def fine(self) -> bool:
        return self.remedy is None


def why_not(arm: Arm, gpus: int, ranks: int = 1) -> Stop | None:
    """Return why this machine cannot run an arm with so many ranks. None if nothing is known against it."""
    least_bytes = ranks * RANK_BYTES
    here_bytes = psutil.virtual_memory().total
    if least_bytes > here_bytes:
        what = f"{ranks} ranks take {size(least_bytes)} of host memory, and there are {size(here_bytes)}"
        return Stop(what, "give fewer ranks", "unavailable")
    for name in needed_by(arm, gpus):
        if stop := why_not_operator(name, gpus):
            return stop
    return None


def examine(folder: Path) -> list[Examined]:
    """Examine everything that the study depends on. `folder` is the folder for offloading."""
    gpus, devices = _devices()
    memory = psutil.virtual_memory()
    cuda_toolkit = [_needed("CUDA toolkit", nvcc(), GET_CUDA, "no_cuda_toolkit")] if gpus else []
    operators = None if missing(gpus) else "compiled"
    return [
        Examined("system", platform.platform()),
        Examined("cores", str(usable_cores())),
        Examined("host memory", f"{size(memory.total)}, of which {size(memory.available)} available"),
        _shared_memory(shutil.disk_usage("/dev/shm").free),
        devices,
        _disk(folder),
        _needed("C++ compiler", compiler(), GET_COMPILER, "no_compiler"),
        _needed("ninja", shutil.which("ninja"), GET_NINJA, "no_ninja"),
        *cuda_toolkit,
        _needed("operators", operators, "study doctor --fix", "operators_not_compiled"),
        *(_needed(name, found, FULL_INSTALL, "package_missing") for name, found in machine.versions().items()),
    ]


def _needed(what: str, found: str | None, remedy: str, id: str) -> Examined:
    return Examined(what, found) if found else Examined(what, "not found", remedy, id)


def _shared_memory(free_bytes: int) -> Examined:
    free = f"{size(free_bytes)} free"
    if free_bytes < SHARED_BYTES:
        return Examined("shared memory", free, GET_SHARED, "little_shared_memory")
    return Examined("shared memory", free)


def _disk(folder: Path) -> Examined:
    # The folder may be made only by a run: then the nearest one above it tells.
    folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = f"{size(shutil.disk_usage(folder).free)} free in {folder}"
    try:
        check_direct_io(folder)
    except OSError as error:
        remedy = "give another --nvme-dir, on a local disk that you may write to"
        return Examined("disk", f"{free}, which refuses direct I/O ({error.strerror})", remedy, "no_direct_io")
    return Examined("disk", free)


def _devices() -> tuple[int, Examined]:
    """Return the number of GPUs that a launch may use, and their names."""
    try:
        devices = [f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in gpus_here()]
    except Stop as stop:
        return 0, Examined("devices", f"unknown ({stop.what})", stop.remedy, "devices_unknown")
    none = "no GPU, or hidden by CUDA_VISIBLE_DEVICES: the arms run as gloo ranks on the CPU"
    return len(devices), Examined("devices", ", ".join(devices) or none)
