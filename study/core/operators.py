"""DeepSpeed's operators: C++ code that is compiled once, in some minutes, on the machine where it runs.

DeepSpeed compiles an operator when it first needs it, without a message. PyTorch guards that with a file named `lock`.
If its owner is killed, the file stays, and everybody else waits forever. So `study doctor --fix` compiles them
beforehand, and the trainer loads them through `study/training/loading.py` before DeepSpeed does.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from study.core.arms import PACKAGE, Arm, all_paths, read
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.tables import say

GET_COMPILER = "install one (apt-get install g++), or name yours in the environment variable CXX"
GET_NINJA = "pip install ninja, in the Python environment that you use for this study"
GET_LIBAIO = "apt-get install libaio-dev (or your system's package of that name)"
GET_CUDA = "install the CUDA toolkit of PyTorch's version, and name its folder in CUDA_HOME"
REPORT_EVERY_S = 30
LIBAIO = Path(__file__).with_name("libaio")
USES_LIBAIO = b"#include <libaio.h>\nint main(void) { io_context_t context = 0; return io_setup(1, &context); }\n"


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
NOT_ON_CPU = "This op had not been implemented on CPU backend."  # DeepSpeed's words


# --- what is needed, what is compiled ------------------------------------------------------------------------------


def needed_by(arm: Arm, gpus: int) -> list[str]:
    """Return the operators that an arm loads."""
    names = [] if arm.deepspeed is None or gpus else ["deepspeed_shm_comm"]
    names += [] if arm.offload_optimizer == "none" else ["cpu_adam"]
    zero = (arm.deepspeed or {}).get("zero_optimization", {})
    names += ["quantizer"] if any(zero.get(key) for key in QUANTIZES) else []
    return names + (["pin_memory", "async_io"] if arm.uses_nvme else [])


def missing(gpus: int) -> list[str]:
    """Return the operators that arms need here and that are not compiled, without those that only variants need."""
    not_needed = {"quantizer"} | ({"deepspeed_shm_comm"} if gpus else set())
    return [name for name in OPERATORS if not (compiled(name) or name in not_needed)]


def compiled(name: str) -> bool:
    """Return whether an operator is where PyTorch looks for it, compiled for this PyTorch."""
    torch = importlib.util.find_spec("torch")
    if not (torch and torch.submodule_search_locations):
        return False
    build = folder(name) / "build.ninja"
    headers = f"{torch.submodule_search_locations[0]}/include"
    return (folder(name) / f"{name}.so").exists() and build.exists() and headers in build.read_text()


def folder(name: str) -> Path:
    """Return the folder in which PyTorch compiles an operator and looks for it.

    Without links, because the path is in the build: by another path to the same folder, all would be compiled again.
    """
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], name).resolve()


def why_not(name: str, gpus: int) -> Stop | None:
    """Return why this machine cannot load an operator. None if nothing is known against it."""
    purpose = OPERATORS[name].purpose
    if name == "quantizer" and not gpus:
        return _unavailable(f"{purpose}, need a GPU: {NOT_ON_CPU!r} says DeepSpeed", "use a machine with a GPU")
    if not shutil.which("ninja"):  # DeepSpeed asks for it before it loads even what is compiled
        return _unavailable(f"DeepSpeed's operators (here: {purpose}) need ninja, which is not on the PATH", GET_NINJA)
    if name in ("async_io", "quantizer") and gpus and not nvcc():  # those here that are built against CUDA
        return _unavailable(f"{purpose} on a GPU needs the CUDA toolkit, which is missing", GET_CUDA)
    # DeepSpeed links a test program against libaio each time it loads the operator for the disk.
    if not compiler() and (name == "async_io" or not compiled(name)):
        return _unavailable(f"DeepSpeed needs a C++ compiler for {purpose}, and there is none", GET_COMPILER)
    return None


def _unavailable(what: str, remedy: str) -> Stop:
    return Stop(what, remedy, "unavailable")


def compiler() -> str | None:
    """Return the C++ compiler that PyTorch will call."""
    return shutil.which((os.environ.get("CXX") or "c++").split()[0])


def nvcc() -> str | None:
    """Return the compiler of the CUDA toolkit, where PyTorch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    return shutil.which("nvcc", path=path)


# --- study doctor --fix --------------------------------------------------------------------------------------------


def compile_missing(arms: tuple[str, ...] = ()) -> int:
    """Compile the missing operators that this machine can compile, or only those that some arms need.

    Returns 1 if a compilation fails.
    """
    gpus = num_gpus()
    wanted = {name for arm in arms for name in needed_by(read(all_paths()[arm]), gpus)}
    lacking = [name for name in missing(gpus) if not arms or name in wanted]
    possible = []
    for name in lacking:
        if stop := why_not(name, gpus):
            what = f"{stop.what}. What to do: {stop.remedy}; then run this again."
            say(f"Not compiled: DeepSpeed's {name} operator ({OPERATORS[name].purpose}), because {what}")
        else:
            possible.append(name)
    if possible:
        return compile_all(possible)
    say(f"DeepSpeed's {'other ' if lacking else ''}operators are compiled, in {folder('.')}.")
    return 0


def compile_all(names: list[str]) -> int:
    """Compile operators in parallel, each in its own process, and report progress."""
    say(f"Compiling DeepSpeed's operators into {folder('.')}.")
    started = reported = time.monotonic()
    children = {
        name: subprocess.Popen(
            [sys.executable, "-m", "study.training.loading", name],
            cwd=PACKAGE.parent,  # so that a checkout that is not installed is found
        )
        for name in names
    }
    while running := [name for name, child in children.items() if child.poll() is None]:
        time.sleep(0.2)
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            say(f"  still compiling after {reported - started:.0f} s: {', '.join(running)}")
    return int(any(child.returncode for child in children.values()))


# --- libaio --------------------------------------------------------------------------------------------------------


def provide_libaio() -> None:
    """Let the compilers that this process starts find libaio: the system's, or our own where the system has none.

    async_io needs a header and a library. DeepSpeed looks for them each time that it loads the operator. Our own
    library is static, so nothing has to find it afterwards.
    """
    own = folder("libaio")
    if not (own / "libaio.a").exists():
        if _compile("-x", "c", "-", "-x", "none", "-laio", "-o", os.devnull, input=USES_LIBAIO) is None:
            return
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(LIBAIO / "libaio.h", own)
        if error := _compile("-x", "c", "-O2", "-fPIC", "-c", str(LIBAIO / "libaio.c"), "-o", str(own / "libaio.o")):
            raise _unavailable(f"libaio, which offloading to disk needs, cannot be compiled ({error})", GET_LIBAIO)
        subprocess.run(["ar", "rcs", "libaio.a", "libaio.o"], cwd=own, check=True)
    for variable in ("CPATH", "LIBRARY_PATH"):
        folders = os.environ.get(variable, "").split(os.pathsep)
        os.environ[variable] = os.pathsep.join(dict.fromkeys([str(own), *filter(None, folders)]))


def _compile(*words: str, input: bytes | None = None) -> str | None:
    """Return the first line of the compiler's errors; None if there are none."""
    command = [compiler() or "c++", *words]
    done = subprocess.run(command, input=input, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.decode(errors="replace").splitlines()), f"exit code {done.returncode}")
