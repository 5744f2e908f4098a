"""What machine this is. Peaks are looked up by exact device name; what is not in the table is None, never a guess."""

import os
import platform
import shutil
from pathlib import Path

import psutil
import torch

from study import record

# Dense peaks in FLOP/s from the vendors' datasheets, without sparsity. V100 and T4 have no bf16 units and no TF32.
_A100 = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
_H100_SXM = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_V100_SXM = {"fp16": 125e12, "fp32": 15.7e12}
_V100_PCIE = {"fp16": 112e12, "fp32": 14e12}
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12},
    "NVIDIA H200": _H100_SXM,
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "NVIDIA L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "Tesla T4": {"fp16": 65e12, "fp32": 8.1e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12},
}


def peak_flops(device_name: str | None, precision: str, tf32: bool) -> float | None:
    """The peak that a precision recipe is measured against, or None where it is not known."""
    peaks = PEAK_FLOPS.get(device_name or "", {})
    if precision != "fp32":
        return peaks.get("bf16")
    return peaks.get("tf32", peaks.get("fp32")) if tf32 else peaks.get("fp32")


def device_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def describe(disk: Path) -> dict:
    """The machine, without its name or address. `disk` is a folder on the disk that offloading may use."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({"name": properties.name, "memory_bytes": properties.total_memory})
    usage = shutil.disk_usage(disk)
    return {
        "devices": gpus,
        "driver": _first_line("/proc/driver/nvidia/version"),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "disk_total_bytes": usage.total,
        "disk_free_bytes": usage.free,
        "system": f"{platform.system()} {platform.machine()}",
    }


def software() -> dict:
    """Versions of everything that can change a number."""
    return record.versions() | {"cuda": torch.version.cuda}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str | None:
    line = _first_line("/proc/cpuinfo", "model name")
    return line.partition(":")[2].strip() if line else platform.processor() or None


def _first_line(path: str, starting: str = "") -> str | None:
    try:
        with Path(path).open() as file:
            return next((line.strip() for line in file if line.startswith(starting)), None)
    except OSError:
        return None
