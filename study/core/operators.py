"""DeepSpeed's operators: C++ code that is compiled once, in some minutes, on the machine where it runs.

python -m study.core.operators cpu_adam       # compile one; `study doctor --fix` starts this for each that is missing
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from study.core import machine
from study.core.arms import NAMES, PACKAGE, Arm, load_arm
from study.core.errors import Stop, exit_on_stop
from study.core.gpus import num_gpus
from study.core.text import say

GET_COMPILER = "install one (apt-get install g++), or name yours in the environment variable CXX"
GET_NINJA = "pip install ninja, in the Python environment that you use for this study"
GET_CUDA = "install the CUDA toolkit of PyTorch's version, and name its folder in CUDA_HOME"
LIBAIO = Path(__file__).with_name("libaio")
HEADERS = Path(__file__).with_name("headers")


# By the name of an operator, its folder and its library: DeepSpeed's class, and what it is for.
OPERATORS = {
    "cpu_adam": ("CPUAdamBuilder", "the optimizer step in host memory"),
    "deepspeed_shm_comm": ("ShareMemCommBuilder", "collectives without a GPU"),
    "pin_memory": ("PinMemoryBuilder", "pinned host memory"),
    "async_io": ("AsyncIOBuilder", "offloading to disk"),
    "quantizer": ("QuantizerBuilder", "collectives in 8 and 4 bits, of ZeRO++"),
}
APART = ("deepspeed_aio_common.cpp", "deepspeed_aio_types.cpp", "shm.cpp")  # whose variables another source has too
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
    _, purpose = OPERATORS[name]
    if name == "quantizer" and not gpus:
        what = f"{purpose}, need a GPU: 'This op had not been implemented on CPU backend.' says DeepSpeed"
        return Stop(what, "use a machine with a GPU", "unavailable")
    if not shutil.which("ninja"):  # DeepSpeed asks for it before it loads even what is compiled
        what = f"DeepSpeed's operators (here: {purpose}) need ninja, which is not on the PATH"
        return Stop(what, GET_NINJA, "unavailable")
    if gpus and name in ("async_io", "quantizer") and not nvcc():  # those here that are built against CUDA
        return Stop(f"{purpose} on a GPU needs the CUDA toolkit, which is missing", GET_CUDA, "unavailable")
    if not compiled(name) and not compiler():
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
    command = [sys.executable, "-m", "study.core.operators"]
    # In the folder above the package, so that a checkout that is not installed is found.
    children = [subprocess.Popen([*command, name], cwd=PACKAGE.parent) for name in names]
    return int(any([child.wait() for child in children]))  # a list: all are waited for


# --- loaded by a training, or compiled by the first process that lacks it ---------------------------------------------


def load(names: list[str], gpus: int, tell: Callable[[str], None]) -> None:
    """Load operators into this process, where DeepSpeed will find them. A missing one is compiled, by one process."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _import_module_from_library as import_library

    for name in names:
        if name == "async_io":
            load(["pin_memory"], gpus, tell)  # async_io's builder loads it too, but would compile it without the guard
        if stop := why_not_operator(name, gpus):
            raise stop
        class_name, purpose = OPERATORS[name]
        builder = get_accelerator().create_op_builder(class_name)
        with _guarded(name, tell):
            if not compiled(name):
                tell(f"compiling DeepSpeed's {name} operator ({purpose}): some minutes, once")
                _compile(name, builder, gpus)
        # DeepSpeed would load it through PyTorch's JIT. That takes turns by a lock file, which stays when its owner is
        # killed, and describes the CPU and links a test program first: seconds in every rank (deepspeed 0.19.8).
        if name not in builder._loaded_ops:
            builder._loaded_ops[name] = import_library(name, str(operator_folder(name)), is_python_module=True)
        builder.load(verbose=False)  # from there; that of pin_memory also makes its symbols global


def _compile(name: str, builder, gpus: int) -> None:
    # It may name what DeepSpeed cannot read, such as 9.0a, or other GPUs. Without it, DeepSpeed asks the ones here.
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if not gpus:  # less to compile
        arguments = [*builder.cxx_args(), "-g0"]
        builder.cxx_args = lambda: arguments
        _join(operator_folder(name), builder)
    if name == "async_io":
        _bring_libaio(builder)
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        log = operator_folder(name) / "compiler.log"
        log.write_text(str(error))
        reason = next((line.strip() for line in str(error).splitlines() if "error:" in line), error)
        what = f"DeepSpeed's {name} operator cannot be compiled ({reason})"
        raise Stop(what, f"read {log}; if that does not help, remove its folder and run study doctor --fix") from error


def _join(folder: Path, builder) -> None:
    """Let copies of an operator's sources be compiled as one. To read PyTorch's headers is nearly all of the work."""
    sources = [Path(builder.deepspeed_src_path(source)) for source in builder.sources()]
    for source in sources:
        for path in source.parent.glob("*.[ch]*"):
            (folder / path.name).write_text(
                f"#pragma once\n{path.read_text(encoding='utf-8')}"
            )  # not every header says it
    whole = folder / "joined.cpp"
    whole.write_text("".join(f'#include "{source.name}"\n' for source in sources if source.name not in APART))
    files = [str(whole), *(str(source) for source in sources if source.name in APART)]
    folders = [str(folder), str(HEADERS), *builder.include_paths()]
    builder.sources, builder.include_paths = lambda: files, lambda: folders


def _bring_libaio(builder) -> None:
    """Let async_io be compiled with our libaio, and not with one that a machine may lack."""
    files, folders = [*builder.sources(), str(LIBAIO / "libaio.cpp")], [str(LIBAIO), *builder.include_paths()]
    flags = [flag for flag in builder.extra_ldflags() if flag != "-laio"]
    builder.sources, builder.include_paths, builder.extra_ldflags = lambda: files, lambda: folders, lambda: flags
    builder.is_compatible = lambda verbose: True  # it links a test program with libaio


@contextlib.contextmanager
def _guarded(name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Let one process of this study at a time compile the operator. The kernel releases this lock when its owner dies.

    PyTorch's own lock is a file, which stays; only this study compiles here, so whoever holds the guard may remove it.
    """
    import fcntl

    build = operator_folder(name)
    try:
        build.mkdir(parents=True, exist_ok=True)
        guard = (build / "guard").open("w")
    except OSError as error:
        what = f"the folder for compiled operators {build} cannot be written ({error.strerror})"
        raise Stop(what, "name another folder in the environment variable TORCH_EXTENSIONS_DIR") from None
    with guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not compiled(name):  # why nothing seems to happen
                tell(f"waiting for another process that compiles DeepSpeed's {name} operator: some minutes, once")
            fcntl.flock(guard, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)
        yield


def main(name: str) -> None:
    """Load an operator as the trainer does, in a separate process. The exit code says whether it worked."""
    start_s = time.monotonic()
    machine.die_with_parent()
    machine.put_programs_on_path()
    say = functools.partial(print, " ", file=sys.__stdout__, flush=True)
    with exit_on_stop(), contextlib.redirect_stdout(Path(os.devnull).open("w")):  # DeepSpeed logs there
        load([name], num_gpus(), say)
    say(f"{name}: ready, after {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
