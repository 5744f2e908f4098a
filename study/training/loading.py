"""Loads DeepSpeed's operators into a process. One process compiles a missing operator while the others wait.

python -m study.training.loading cpu_adam       # compile one; `study doctor --fix` starts this for each that is missing
"""

import contextlib
import fcntl
import functools
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from study.core import machine
from study.core.doctor import OPERATORS, compiled, operator_folder, provide_libaio, why_not_operator
from study.core.errors import Stop
from study.core.gpus import num_gpus

GROUPED_RELEASE = "0.19.8"  # of DeepSpeed; the sources of others were not tried as one file
MANY_CORES = 8  # compile all sources at once, which is faster than one file
PRIVATE = re.compile(r"^(?:static|const)\b[^(){};=]*?(\w+)\s*[=;]", re.MULTILINE)  # a name of one source alone


def load(names: list[str], gpus: int, tell: Callable[[str], None]) -> None:
    """Load operators into this process, where DeepSpeed will find them. A missing one is compiled, by one process."""
    for name in names:
        if name == "async_io":
            load(["pin_memory"], gpus, tell)  # the builder of async_io would load it without the guard
        if stop := why_not_operator(name, gpus):
            raise stop
        with _guarded(name, tell):
            if name == "async_io":
                provide_libaio()
            if not compiled(name):
                tell(f"compiling DeepSpeed's {name} operator ({OPERATORS[name].purpose}): some minutes, once")
                _load(name)
        _load(name)  # outside the guard: DeepSpeed probes the CPU for seconds, and ranks need not take turns


def _load(name: str) -> None:
    from deepspeed.accelerator import get_accelerator

    try:
        builder = get_accelerator().create_op_builder(OPERATORS[name].builder)
        if compiled(name):
            paths = _compiled_sources(name)
            builder.sources = lambda: paths
        elif machine.version("deepspeed") == GROUPED_RELEASE and len(os.sched_getaffinity(0)) < MANY_CORES:
            _group_sources(builder, operator_folder(name))
        _probe_cpu_once()
        builder.load(verbose=False)
    except (RuntimeError, ImportError) as error:
        log = operator_folder(name) / "compiler.log"
        log.write_text(str(error))
        lines = str(error).splitlines() or [""]
        reason = next((line for line in lines if "error:" in line), lines[0]).strip()
        what = f"DeepSpeed's {name} operator cannot be compiled or loaded ({reason})"
        remedy = f"read {log}; if that does not help, remove its folder and run study doctor --fix"
        raise Stop(what, remedy, "unavailable") from error


def _group_sources(builder, into: Path) -> None:
    """Let a builder compile its C++ sources as one file: nearly all of the time is for PyTorch's headers, once a file.

    #import reads a header once: some of DeepSpeed's have no guard. What several sources call by the same name, each
    for itself, gets another name in each (DeepSpeed 0.19.8).
    """
    sources = [builder.deepspeed_src_path(path) for path in builder.sources()]
    grouped = sorted(path for path in sources if path.endswith(".cpp"))
    if len(grouped) < 2:
        return
    headers = sorted({header for source in grouped for header in Path(source).parent.glob("*.h")})
    private = {source: set(PRIVATE.findall(Path(source).read_text())) for source in grouped}
    count = Counter(name for names in private.values() for name in names)
    lines = ["#import <torch/extension.h>", *(f'#import "{header}"' for header in headers)]
    for number, source in enumerate(grouped):
        shared = sorted(name for name in private[source] if count[name] > 1)
        lines += [f"#define {name} {name}_{number}" for name in shared]
        lines += [f'#include "{source}"', *(f"#undef {name}" for name in shared)]
    into.mkdir(parents=True, exist_ok=True)
    (into / "group.cpp").write_text("\n".join(lines) + "\n")
    others = [path for path in sources if not path.endswith(".cpp")]
    builder.sources = lambda: [str(into / "group.cpp"), *others]


def _compiled_sources(name: str) -> list[str]:
    """Return what an operator was compiled from. With other sources PyTorch would compile it again."""
    ninja = (operator_folder(name) / "build.ninja").read_text()
    found = re.findall(r"^build \S+: (?:cuda_)?compile (.+)$", ninja, re.MULTILINE)
    return [path.replace("$ ", " ") for path in found]


@functools.cache
def _probe_cpu_once() -> None:
    """Let py-cpuinfo keep its answer. It takes over a second, and the builder of cpu_adam asks twice."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


@contextlib.contextmanager
def _guarded(name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes of this study from compiling or loading the operator.

    The kernel releases this lock when its owner dies. PyTorch's own lock is a file that stays when its owner is killed,
    so it is removed here if no process has it open.
    """
    build = operator_folder(name)
    try:
        build.mkdir(parents=True, exist_ok=True)
        guard = (build / "guard").open("w")
    except OSError as error:
        what = f"the folder for compiled operators {build} cannot be written ({error.strerror})"
        remedy = "name another folder in the environment variable TORCH_EXTENSIONS_DIR"
        raise Stop(what, remedy, "unavailable") from None
    waiting = f"waiting for another process that compiles DeepSpeed's {name} operator: some minutes, once"
    with guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not compiled(name):
                tell(waiting)
            fcntl.flock(guard, fcntl.LOCK_EX)
        lock = build / "lock"
        if lock.exists() and _is_open(lock):  # by a program without this guard
            tell(waiting)
            while _is_open(lock):
                time.sleep(0.2)
        if lock.exists():
            time.sleep(0.1)  # a live owner closes its lock a moment before it removes it
            if not _is_open(lock):
                lock.unlink(missing_ok=True)
        yield


def _is_open(path: Path) -> bool:
    """Return whether a process on this machine has a file open, as far as this user can see."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if descriptor.readlink() == path.resolve():
                return True
    return False


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
    os.setpgid(0, 0)

    def end(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    machine.die_with_parent()


def say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
