"""Compiles DeepSpeed's operators before they are needed, in parallel, and says what it is doing.

DeepSpeed compiles them on first use, without a word and for minutes, which looks exactly like a hang.

    python -m study.operators
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from study.nvme import check_libaio
from study.record import Stop

OPERATORS = {
    "CPUAdamBuilder": "the optimizer step in host memory",
    "AsyncIOBuilder": "offloading to disk",
    "ShareMemCommBuilder": "collectives without a GPU",
    "PinMemoryBuilder": "pinned host memory",
}

# What each child does. Its last line is "cached", "compiled", "not needed", or an error.
BUILD = """
import os, sys, time
from pathlib import Path
from torch.utils import cpp_extension
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder(sys.argv[1])
if builder is None or type(builder).__name__ == "NotImplementedBuilder":
    sys.exit(print("not needed"))
root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
for lock in root.glob(f"**/{builder.name}/lock"):
    if time.time() - lock.stat().st_mtime > 1800:  # a compilation that was cut off left it: PyTorch waits for ever
        lock.unlink()
def built():
    return {path: path.stat().st_mtime for path in root.glob(f"**/{builder.name}.so")}
before = built()
builder.load(verbose=False)  # compiles if it must: also when PyTorch lies in another folder than last time
print("cached" if before and built() == before else "compiled")
"""


def main() -> int:
    """Build what this machine can have. The exit code says whether all of it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        return build(os.environ | {"PATH": f"{without_debug_information(Path(folder))}:{os.environ['PATH']}"})


def without_debug_information(folder: Path) -> Path:
    """A compiler that leaves out what only a debugger reads: a third of the time of what DeepSpeed compiles with -g.

    It is a `c++` in a folder for the front of PATH. To ninja the command is the one that DeepSpeed gives later, so that
    nothing is compiled again. Where CXX names a compiler, this one is not asked.
    """
    if real := shutil.which("c++"):
        (folder / "c++").write_text(f'#!/bin/sh\nexec "{real}" "$@" -g0\n')
        (folder / "c++").chmod(0o755)
    return folder


def build(environment: dict[str, str]) -> int:
    say("DeepSpeed's operators: compiling what is not cached, which takes some minutes, once")
    started = time.monotonic()
    children = {}
    for name, purpose in OPERATORS.items():
        if name == "AsyncIOBuilder":
            try:
                check_libaio()
            except Stop as stop:
                say(f"  skipped       {purpose}: {stop.what}. What to do: {stop.remedy}, and run this again")
                continue
        children[name] = subprocess.Popen(
            [sys.executable, "-c", BUILD, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment,
        )  # fmt: skip
    failed, told = [], started
    while children:
        time.sleep(0.2)
        for name in [name for name, child in children.items() if child.poll() is not None]:
            child = children.pop(name)
            output = child.stdout.read()
            outcome = output.strip().splitlines()[-1] if output.strip() else "no word"
            if child.returncode:
                failed.append(name)
                outcome = f"failed ({outcome})"
            say(f"  {outcome:<13} {OPERATORS[name]} ({time.monotonic() - started:.0f} s)")
        if children and time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"  still compiling after {told - started:.0f} s: {', '.join(OPERATORS[name] for name in children)}")
    return 1 if failed else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
