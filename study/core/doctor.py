"""Examines what this machine has and lacks for the study, with remedies. It needs no torch, so it is fast."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.core import disk, operators, software
from study.core.arms import ROOT, Arm
from study.core.errors import Stop
from study.core.gpus import HIDES_ALL, gpus_here
from study.core.linux import usable_cores
from study.core.numbers import size
from study.core.operators import GET_COMPILER, GET_CUDA, GET_NINJA, OPERATORS, compiler, nvcc

SHARED_BYTES = 2 * 66 * 2**20  # what DeepSpeed 0.19 takes for two ranks without a GPU (csrc/cpu/comm/shm.cpp)
GET_SHARED = "start the container with --shm-size=1g; outside a container: mount -o remount,size=1g /dev/shm, as root"


@dataclass(frozen=True)
class Finding:
    """The state of one thing that was examined, and what to do if it is not fine."""

    what: str
    found: str
    remedy: str | None = None

    @property
    def fine(self) -> bool:
        return self.remedy is None


def why_not(arm: Arm, gpus: int) -> Stop | None:
    """Return why this machine cannot run an arm. None if nothing is known against it."""
    if gpus and isinstance(arm.num_processes, int) and arm.num_processes > gpus:
        what = f"{arm.name} asks for {arm.num_processes} processes, one for each GPU, and there are {gpus} GPUs"
        return Stop(what, f"launch it with --num_processes {gpus}, or use a machine with more GPUs", "unavailable")
    stops = (operators.why_not(name, gpus) for name in operators.needed_by(arm, gpus))
    return next(filter(None, stops), None)


def examine(folder: Path, speed_bytes: int = 128 * 2**20) -> list[Finding]:
    """Examine everything that the study depends on. `folder` is the folder for offloading."""
    gpus, devices = _devices()
    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")
    ninja = shutil.which("ninja")
    shared_bytes = shutil.disk_usage(shared).free if shared.exists() else 0
    return [
        _finding("Python", platform.python_version(), sys.version_info >= (3, 11), "use Python 3.11 or later"),
        _finding("system", platform.platform(), platform.system() == "Linux", "use Linux"),
        Finding("cores", str(usable_cores())),
        Finding("host memory", f"{size(memory.total)}, of which {size(memory.available)} available"),
        _finding("shared memory", f"{size(shared_bytes)} free", shared_bytes >= SHARED_BYTES, GET_SHARED),
        devices,
        _finding("C++ compiler", _version(compiler()), compiler(), GET_COMPILER),
        _finding("ninja", _version(ninja), ninja, GET_NINJA),
        *([_finding("CUDA toolkit", _version(nvcc()), nvcc(), GET_CUDA)] if gpus else []),
        _operators(gpus),
        _disk(folder, speed_bytes),
        *packages(ROOT / "constraints.txt"),
    ]


def packages(constraints: Path) -> list[Finding]:
    """Compare the packages that can change a number with the versions that the study's own numbers come from."""
    installed = {name: software.version(name) for name in software.PACKAGES}
    if not constraints.exists():
        remedy = "run this in a checkout of the repository, which has the file"
        missing = Finding("packages", f"no {constraints.name} to compare with", remedy)
        return [missing, *(Finding(name, version or "not installed") for name, version in installed.items())]
    pins = software.pins(constraints)
    findings = []
    for name, version in installed.items():
        if version and version.partition("+")[0] == pins.get(name):  # 2.13.0+cpu is a build of 2.13.0
            findings.append(Finding(name, version))
        else:
            text = f"{version or 'not installed'}, and {constraints.name} has {pins.get(name) or 'none'}"
            findings.append(Finding(name, text, f"pip install -c {constraints.name} {name}"))
    return findings


def _finding(what: str, state: str, fine: object, remedy: str) -> Finding:
    return Finding(what, state, None if fine else remedy)


def _operators(gpus: int) -> Finding:
    """Return the DeepSpeed operators that are not compiled, and the steps to compile them."""
    lacking = operators.missing(gpus)
    if not lacking:
        return Finding("operators", "compiled")
    stops = filter(None, (operators.why_not(name, gpus) for name in lacking))
    steps = [*dict.fromkeys(stop.remedy for stop in stops), "study doctor --fix"]
    purposes = ", ".join(OPERATORS[name].purpose for name in lacking)
    return Finding("operators", f"not compiled: {purposes}", "; then ".join(steps))


def _disk(folder: Path, speed_bytes: int) -> Finding:
    folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = f"{size(shutil.disk_usage(folder).free)} free in {folder}"
    try:
        written, read = disk.direct_speed(folder, speed_bytes)
    except (OSError, AttributeError) as error:  # a system without direct I/O has no name for it either
        reason = getattr(error, "strerror", None) or error
        remedy = "give another --nvme-dir, on a local disk that you may write to"
        return Finding("disk", f"{free}, which refuses direct I/O ({reason})", remedy)
    return Finding("disk", f"{free}; direct I/O: {size(written)}/s written, {size(read)}/s read")


def _devices() -> tuple[int, Finding]:
    """Return the number of GPUs that a launch may use, and their names."""
    try:
        devices = [f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in gpus_here()]
    except Stop as stop:
        return 0, Finding("devices", f"unknown ({stop.what})", stop.remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in HIDES_ALL
    none = "GPUs are hidden by CUDA_VISIBLE_DEVICES" if hidden else "no GPU"
    return len(devices), Finding("devices", ", ".join(devices) or f"{none}: the arms run as gloo ranks on the CPU")


def _version(program: str | None) -> str:
    if program is None:
        return "not found"
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    number = re.search(r"\d+(\.\d+)+", answer.stdout)
    return f"{program} {number[0] if number else 'of unknown version'}"
