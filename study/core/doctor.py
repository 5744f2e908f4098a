"""Examines what this machine has and lacks for the study, with remedies. It needs no torch, so it is fast."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.core import machine
from study.core.arms import NAMES, PACKAGE, Arm, load_arm
from study.core.errors import Stop
from study.core.gpus import gpus_here, num_gpus
from study.core.machine import disk_speed, usable_cores
from study.core.text import say, size

SHARED_BYTES = 2 * 66 * 2**20  # what DeepSpeed 0.19 takes for two ranks without a GPU (csrc/cpu/comm/shm.cpp)
RANK_BYTES = 300_000_000  # the least that a rank takes for itself: Python, PyTorch and a tiny model had 367 MB
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


def why_not(arm: Arm, gpus: int, ranks: int = 1) -> Stop | None:
    """Return why this machine cannot run an arm with so many ranks. None if nothing is known against it."""
    least_bytes = ranks * RANK_BYTES
    here_bytes = psutil.virtual_memory().total
    if least_bytes > here_bytes:
        what = f"{ranks} ranks take {size(least_bytes)} of host memory, and there are {size(here_bytes)}"
        return Stop(what, "give fewer ranks", "unavailable")
    if gpus and isinstance(arm.num_processes, int) and arm.num_processes > gpus:
        what = f"{arm.name} asks for {arm.num_processes} processes, one for each GPU, and there are {gpus} GPUs"
        return Stop(what, f"launch it with --num_processes {gpus}, or use a machine with more GPUs", "unavailable")
    for name in needed_by(arm, gpus):
        if stop := why_not_operator(name, gpus):
            return stop
    return None


def examine(folder: Path, speed_bytes: int = 128 * 2**20) -> list[Finding]:
    """Examine everything that the study depends on. `folder` is the folder for offloading."""
    gpus, devices = _devices()
    memory = psutil.virtual_memory()
    shared_bytes = shutil.disk_usage("/dev/shm").free
    needed = {"C++ compiler": (compiler(), GET_COMPILER), "ninja": (shutil.which("ninja"), GET_NINJA)}
    if gpus:
        needed["CUDA toolkit"] = (nvcc(), GET_CUDA)
    needed["operators"] = (None if missing(gpus) else "compiled", "study doctor --fix")
    needed |= {name: (version, GET_PACKAGES) for name, version in machine.versions().items()}
    outside = "; ".join(machine.outside())
    return [
        Finding("system", platform.platform()),
        Finding("cores", str(usable_cores())),
        Finding("host memory", f"{size(memory.total)}, of which {size(memory.available)} available"),
        Finding("shared memory", f"{size(shared_bytes)} free", None if shared_bytes >= SHARED_BYTES else GET_SHARED),
        devices,
        _disk(folder, speed_bytes),
        Finding("ranges", outside or "all versions are in the ranges that were run", GET_PACKAGES if outside else None),
        *(Finding(what, found or "not found", None if found else remedy) for what, (found, remedy) in needed.items()),
    ]


def _disk(folder: Path, speed_bytes: int) -> Finding:
    # The folder may be made only by a run: then the nearest one above it tells.
    folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = f"{size(shutil.disk_usage(folder).free)} free in {folder}"
    try:
        written, read = disk_speed(folder, speed_bytes)
    except OSError as error:
        remedy = "give another --nvme-dir, on a local disk that you may write to"
        return Finding("disk", f"{free}, which refuses direct I/O ({error.strerror})", remedy)
    return Finding("disk", f"{free}; direct I/O: {size(written)}/s written, {size(read)}/s read")


def _devices() -> tuple[int, Finding]:
    """Return the number of GPUs that a launch may use, and their names."""
    try:
        devices = [f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in gpus_here()]
    except Stop as stop:
        return 0, Finding("devices", f"unknown ({stop.what})", stop.remedy)
    none = "no GPU, or hidden by CUDA_VISIBLE_DEVICES: the arms run as gloo ranks on the CPU"
    return len(devices), Finding("devices", ", ".join(devices) or none)


# --- DeepSpeed's operators: C++ code that is compiled once, in some minutes, on the machine where it runs

GET_COMPILER = "install one (apt-get install g++), or name yours in the environment variable CXX"
GET_NINJA = "pip install ninja, in the Python environment that you use for this study"
GET_PACKAGES = "make setup, or pip install './zero-study[train,report]'"
GET_CUDA = "install the CUDA toolkit of PyTorch's version, and name its folder in CUDA_HOME"
LIBAIO = Path(__file__).with_name("libaio")


@dataclass(frozen=True)
class Operator:
    """One of DeepSpeed's operators. Its folder and its library have its name."""

    builder: str  # DeepSpeed's class
    purpose: str


OPERATORS = {
    "cpu_adam": Operator("CPUAdamBuilder", "the optimizer step in host memory"),
    "deepspeed_shm_comm": Operator("ShareMemCommBuilder", "collectives without a GPU"),
    "pin_memory": Operator("PinMemoryBuilder", "pinned host memory"),
    "async_io": Operator("AsyncIOBuilder", "offloading to disk"),
    "quantizer": Operator("QuantizerBuilder", "collectives in 8 and 4 bits, of ZeRO++"),
}
QUANTIZES = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def needed_by(arm: Arm, gpus: int) -> list[str]:
    """Return the operators that an arm loads."""
    if arm.deepspeed is None:
        return []
    zero = arm.deepspeed.get("zero_optimization", {})
    needed = {
        "deepspeed_shm_comm": not gpus,  # its CPU ranks reduce through shared memory
        "cpu_adam": arm.offload_optimizer != "none",
        "quantizer": any(map(zero.get, QUANTIZES)),
        "pin_memory": arm.uses_nvme,  # before async_io, whose builder loads it
        "async_io": arm.uses_nvme,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def missing(gpus: int, arms: Iterable[str] = NAMES) -> list[str]:
    """Return the operators that arms need here and that are not compiled. Some variants need quantizer as well."""
    # Each once, in the order in which they are loaded.
    needed = dict.fromkeys(name for arm in arms for name in needed_by(load_arm(arm), gpus))
    return [name for name in needed if not compiled(name)]


def compiled(name: str) -> bool:
    """Return whether an operator is where PyTorch looks for it."""
    return (operator_folder(name) / f"{name}.so").exists()


def operator_folder(name: str) -> Path:
    """Return the folder in which PyTorch compiles an operator and looks for it."""
    # Without links, because the path is in the build: by another path to the folder, all would be compiled again.
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], name).resolve()


def why_not_operator(name: str, gpus: int) -> Stop | None:
    """Return why this machine cannot load an operator. None if nothing is known against it."""
    purpose = OPERATORS[name].purpose
    if name == "quantizer" and not gpus:
        what = f"{purpose}, need a GPU: 'This op had not been implemented on CPU backend.' says DeepSpeed"
        return Stop(what, "use a machine with a GPU", "unavailable")
    if not shutil.which("ninja"):  # DeepSpeed asks for it before it loads even what is compiled
        what = f"DeepSpeed's operators (here: {purpose}) need ninja, which is not on the PATH"
        return Stop(what, GET_NINJA, "unavailable")
    if gpus and name in ("async_io", "quantizer") and not nvcc():  # those here that are built against CUDA
        return Stop(f"{purpose} on a GPU needs the CUDA toolkit, which is missing", GET_CUDA, "unavailable")
    # DeepSpeed links a test program against libaio each time it loads the operator for the disk.
    if (name == "async_io" or not compiled(name)) and not compiler():
        return Stop(f"DeepSpeed needs a C++ compiler for {purpose}, and there is none", GET_COMPILER, "unavailable")
    return None


def compiler() -> str | None:
    """Return the C++ compiler that PyTorch will call."""
    return shutil.which((os.environ.get("CXX") or "c++").split()[0])


def nvcc() -> str | None:
    """Return the compiler of the CUDA toolkit, where PyTorch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    return shutil.which("nvcc", path=path)


def compile_missing(arms: tuple[str, ...] = ()) -> int:
    """Compile what the arms lack, or only what some of them lack. Return 1 if a compilation fails."""
    gpus = num_gpus()
    possible = []  # the others are named with what they lack, and do not fail the command
    for name in missing(gpus, arms or NAMES):
        if stop := why_not_operator(name, gpus):
            say(f"Not compiled: DeepSpeed's {name} operator, because {stop.sentence}")
        else:
            possible.append(name)
    say(f"DeepSpeed's operators in {operator_folder('.')}: {len(possible)} to compile.")
    return compile_all(possible)


def compile_all(names: Iterable[str]) -> int:
    """Compile operators in parallel, each in its own process, which says when it is ready."""
    command = [sys.executable, "-m", "study.training.loading"]
    # In the folder above the package, so that a checkout that is not installed is found.
    children = [subprocess.Popen([*command, name], cwd=PACKAGE.parent) for name in names]
    return int(any([child.wait() for child in children]))  # a list: all are waited for


def provide_libaio() -> None:
    """Let the compilers that this process starts find our libaio, also on a machine that has none."""
    # async_io needs a header and a library, and DeepSpeed looks for them each time that it loads the operator. Our
    # library is static, so nothing has to find it afterwards.
    own = operator_folder("libaio")
    if not (own / "libaio.a").exists():
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(LIBAIO / "libaio.h", own)
        source = str(LIBAIO / "libaio.c")
        # -x c: the compiler is for C++, which has no _Static_assert.
        command = [compiler() or "c++", "-x", "c", "-O2", "-fPIC", "-c", source, "-o", "libaio.o"]
        done = subprocess.run(command, cwd=own, capture_output=True, text=True, check=False)
        if done.returncode:
            error = done.stderr.partition("\n")[0]
            what = f"libaio, which offloading to disk needs, cannot be compiled ({error})"
            raise Stop(what, GET_COMPILER, "unavailable")
        subprocess.run(["ar", "rcs", "libaio.a", "libaio.o"], cwd=own, check=True)
    # gcc and clang read both, in DeepSpeed's test program and under ninja.
    for variable in ("CPATH", "LIBRARY_PATH"):
        folders = filter(None, os.environ.get(variable, "").split(os.pathsep))
        os.environ[variable] = os.pathsep.join(dict.fromkeys([str(own), *folders]))
