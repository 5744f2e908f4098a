"""Loads DeepSpeed's operators into a process. One process compiles a missing operator while the others wait.

python -m study.training.loading cpu_adam       # compile one; `study doctor --fix` starts this for each that is missing
"""

import contextlib
import fcntl
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from study.core import machine
from study.core.doctor import OPERATORS, compiled, operator_folder, provide_libaio, why_not_operator
from study.core.errors import Stop
from study.core.gpus import num_gpus


def load(names: list[str], gpus: int, tell: Callable[[str], None]) -> None:
    """Load operators into this process, where DeepSpeed will find them. A missing one is compiled, by one process."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _import_module_from_library as import_library

    for name in names:
        if name == "async_io":
            load(["pin_memory"], gpus, tell)  # async_io's builder loads it too, but would compile it without the guard
        if stop := why_not_operator(name, gpus):
            raise stop
        builder = get_accelerator().create_op_builder(OPERATORS[name].builder)
        with _guarded(name, tell):
            if not compiled(name):
                tell(f"compiling DeepSpeed's {name} operator ({OPERATORS[name].purpose}): some minutes, once")
                _compile(name, builder)
        # DeepSpeed would load it through PyTorch's JIT. That takes turns by a lock file, which stays when its owner is
        # killed, and describes the CPU and links a test program first: seconds in every rank (deepspeed 0.19.8).
        if name not in builder._loaded_ops:
            builder._loaded_ops[name] = import_library(name, str(operator_folder(name)), is_python_module=True)
        builder.load(verbose=False)  # from there; that of pin_memory also makes its symbols global


def _compile(name: str, builder) -> None:
    # It may name what DeepSpeed cannot read, such as 9.0a, or other GPUs. Without it, DeepSpeed asks the ones here.
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    try:
        if name == "async_io":
            provide_libaio()
        builder.load(verbose=False)
    except (RuntimeError, ImportError) as error:
        log = operator_folder(name) / "compiler.log"
        log.write_text(str(error))
        errors = [line.strip() for line in str(error).splitlines() if "error:" in line]
        reason = errors[0] if errors else error
        what = f"DeepSpeed's {name} operator cannot be compiled ({reason})"
        raise Stop(what, f"read {log}; if that does not help, remove its folder and run study doctor --fix") from error


@contextlib.contextmanager
def _guarded(name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Let one process of this study at a time compile the operator. The kernel releases this lock when its owner dies.

    PyTorch's own lock is a file, which stays; only this study compiles here, so whoever holds the guard may remove it.
    """
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


def main(name: str) -> int:
    """Load an operator as the trainer does, in a separate process. The exit code says whether it worked."""
    os.setpgid(0, 0)  # a process group of its own, which the compilers join
    machine.die_with_parent()

    def end_all(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_all)
    machine.put_programs_on_path()
    say = functools.partial(print, " ", file=sys.__stdout__, flush=True)
    try:
        with contextlib.redirect_stdout(Path(os.devnull).open("w")):  # DeepSpeed logs there
            load([name], num_gpus(), say)
    except Stop as stop:
        say(stop.sentence)
        return 1
    say(f"{name}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
