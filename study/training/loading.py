"""Loads DeepSpeed's operators into a process. One process compiles a missing operator while the others wait.

python -m study.training.loading cpu_adam       # compile one; `study doctor --fix` starts this for each that is missing
"""

import contextlib
import fcntl
import os
import signal
import sys
import time
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
    try:
        if name == "async_io":
            provide_libaio()
        builder.load(verbose=False)
    except (RuntimeError, ImportError) as error:
        log = operator_folder(name) / "compiler.log"
        log.write_text(str(error))
        lines = str(error).splitlines() or [""]
        reason = next((line for line in lines if "error:" in line), lines[0]).strip()
        what = f"DeepSpeed's {name} operator cannot be compiled ({reason})"
        raise Stop(what, f"read {log}; if that does not help, remove its folder and run study doctor --fix") from error


@contextlib.contextmanager
def _guarded(name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Let one process of this study at a time compile the operator. The kernel releases this lock when its owner dies.

    PyTorch's own lock is a file that stays when its owner is killed, and everybody would wait for it. Only this study
    compiles in this folder, so whoever holds the guard may remove it.
    """
    build = operator_folder(name)
    try:
        build.mkdir(parents=True, exist_ok=True)
        guard = (build / "guard").open("w")
    except OSError as error:
        what = f"the folder for compiled operators {build} cannot be written ({error.strerror})"
        raise Stop(what, "name another folder in the environment variable TORCH_EXTENSIONS_DIR") from None
    with guard:
        # First without waiting, to say why nothing seems to happen.
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not compiled(name):
                tell(f"waiting for another process that compiles DeepSpeed's {name} operator: some minutes, once")
            fcntl.flock(guard, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)
        yield


def main(names: list[str]) -> int:
    """Load operators as the trainer does, in a separate process. The exit code says whether it worked."""
    started = time.monotonic()
    _end_compilers_with_this_process()
    machine.put_programs_on_path()
    try:
        with contextlib.redirect_stdout(Path(os.devnull).open("w")):  # DeepSpeed logs there
            load(names, num_gpus(), lambda text: say(f"  {text}"))
    except Stop as stop:
        say(f"  {stop.what}. What to do: {stop.remedy}.")
        return 1
    say(f"  {' and '.join(names)}: ready after {time.monotonic() - started:.0f} s")
    return 0


def _end_compilers_with_this_process() -> None:
    """End ninja and the compilers when this process gets SIGTERM or its parent dies."""
    os.setpgid(0, 0)  # a process group of its own, which its children join

    def end(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    machine.die_with_parent()


def say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
