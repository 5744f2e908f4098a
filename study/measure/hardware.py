"""Describes this machine for a record."""

import platform
import shutil
from pathlib import Path

import psutil
import torch

from study.machine import linux, software
from study.records.schema import Device, Hardware

CUDA = torch.cuda.is_available()


def device_name() -> str | None:
    return torch.cuda.get_device_name() if CUDA else None


def describe(disk: Path) -> Hardware:
    """The machine, without its name or address. `disk` is a folder on the disk that offloading may use."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    usage = shutil.disk_usage(disk)
    return Hardware(
        devices=[Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in properties],
        driver=linux.text("/proc/driver/nvidia/version").partition("\n")[0].strip() or None,
        cpu=linux.fields("/proc/cpuinfo").get("model name") or platform.processor() or None,
        cores=linux.usable_cores(),
        host_memory_bytes=psutil.virtual_memory().total,
        disk_total_bytes=usage.total,
        disk_free_bytes=usage.free,
        system=f"{platform.system()} {platform.machine()}",
    )


def versions() -> dict:
    """Versions of everything that can change a number."""
    return software.versions() | {"cuda": torch.version.cuda}
