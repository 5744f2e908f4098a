"""Describes this machine for a record, and recognises the errors of a machine: full memory, a lost rank."""

import contextlib
import os
import platform
import re
from pathlib import Path

import psutil
import torch

from study.core import files, machine
from study.core.settings import MACHINE
from study.records.sections import Device, HardwareOfRun

CUDA = torch.cuda.is_available()
MOST_BYTES = 2**20  # of a machine.json: ours have 2 kB


def describe() -> HardwareOfRun:
    """Return the machine, without its name or address."""
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return HardwareOfRun(
        devices=[Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in properties],
        driver=machine.text("/proc/driver/nvidia/version").partition("\n")[0].strip() or None,
        cpu=machine.fields("/proc/cpuinfo").get("model name") or platform.processor() or None,
        cores=machine.usable_cores(),
        host_memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        calibration=_calibration(),
    )


def _calibration() -> dict | None:
    """Return the machine.json that the variable names; None without one. One that is damaged ends no training."""
    found = None
    if path := os.environ.get(MACHINE):
        with contextlib.suppress(OSError, ValueError):
            found = files.from_json(files.read(Path(path), MOST_BYTES))
    return found if isinstance(found, dict) else None


def versions() -> dict:
    return machine.versions() | {"cuda": torch.version.cuda}


# How gloo, NCCL and torch's store report a connection that another rank has closed (torch 2.13; NCCL's are from its
# source and were never seen here).
LOST_CONNECTION = re.compile(
    "Connection (closed by peer|reset by peer|was likely closed)|Read error|Write error|Broken pipe|failed to recv|"
    "remote process exited|ncclRemoteError"
)


def device_is_full(error: BaseException) -> bool:
    """Return whether the device refused memory to PyTorch's allocator, or to a library with its own."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "_STATUS_ALLOC_FAILED" in message:
        return True
    # NCCL, Triton and the pinning of host memory do not say whose memory it was: the device's without 1 GiB free.
    return "out of memory" in message and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2**30


def host_is_full(error: BaseException) -> bool:
    """Return whether the host refused memory, by the messages of Python and PyTorch's CPU allocator."""
    # The last one is for pinning host memory; a full device has the same message.
    messages = ("DefaultCPUAllocator: can't allocate", "std::bad_alloc", "Cannot allocate", "CUDA error: out of memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in messages)


def lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has closed its connection."""
    return isinstance(error, RuntimeError) and bool(LOST_CONNECTION.search(str(error)))
