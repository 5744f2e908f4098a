"""A `c++` for `study operators`: it has less to do than DeepSpeed asks for, and leaves the same machine code.

It stands first on the PATH while operators compile. The commands in build.ninja stay DeepSpeed's own, so nothing is
compiled again later. A compiler named in CXX is used as it is.

python -IS compiling.py /usr/bin/c++ -MMD -MF a.o.d -O0 -c a.cpp -o a.o      # what this `c++` runs
"""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOGETHER = 6  # files: the twelve of async_io make two groups, for two cores


def write_compiler(place: Path) -> Path:
    """Write the `c++` into a folder. It leaves out debug information, and compiles some files together.

    Debug information (-g) is not machine code. Without it cpu_adam takes 47 s of CPU time for 61 s, and 0.4 MB for 17.

    Files of async_io and pin_memory take nearly all of their time for PyTorch's headers, which each of them includes:
    several in one compilation take little longer than one. This is done only without optimization (-O0), as those two
    are compiled: then each function is compiled by itself, whatever stands beside it. With g++ 12 and DeepSpeed 0.19.8
    the 12,906 functions of the two were the same, byte by byte, as compiled apart: 12,868 of them entirely, the others
    up to the distance of a function or constant that they refer to. Static initializers become one for each group.
    """
    if real := shutil.which("c++"):
        script = place / "c++"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{real}" "$@"\n')
        script.chmod(0o755)
    return place


def main(real: str, words: list[str]) -> int:
    """Do what the command says. Of a group of files the first compiles all, the others leave empty objects."""
    words = [*words, "-g0"]
    if not (group := files_together(words)):
        os.execv(real, [real, *words])
    headers = [path for word in words if word.startswith("-I") for path in sorted(Path(word[2:]).glob("*.h"))]
    source, output = words[words.index("-c") + 1], words[words.index("-o") + 1]
    if source != group[0]:
        status = run([real, "-x", "c++", "-c", "/dev/null", "-o", output])
    else:
        status = compile_together(real, words, group, headers) and compile_in_turn(real, words, group)
    if "-MF" in words:  # the same for the whole group: when a file changes, ninja compiles all of them again, apart
        paths = (str(path).replace(" ", "\\ ") for path in [*group, *headers])
        Path(words[words.index("-MF") + 1]).write_text(f"{output}: {' '.join(paths)}\n")
    return status


def files_together(words: list[str]) -> list[str]:
    """The group of a command's source file, by the build.ninja beside it; empty if the file is compiled by itself."""
    optimization = [word for word in words if word.startswith("-O")][-1:]
    if "-c" not in words or optimization not in ([], ["-O0"]) or not Path("build.ninja").exists():
        return []
    sources = sorted(re.findall(r"^build \S+: compile (\S+)$", Path("build.ninja").read_text(), re.MULTILINE))
    count = math.ceil(len(sources) / TOGETHER)
    # Neighbours go to different groups: in DeepSpeed 0.19.8 they define static names alike.
    groups = [sources[first::count] for first in range(count)]
    return next((group for group in groups if words[words.index("-c") + 1] in group and len(group) > 1), [])


def compile_together(real: str, words: list[str], group: list[str], headers: list[Path]) -> int:
    """#import, unlike #include, reads a header once: three of DeepSpeed's have no guard of their own."""
    beside = {Path(source).parent for source in group}  # others, such as CUDA's, have a guard, and may not all compile
    text = "".join(f'#import "{path}"\n' for path in headers if path.parent in beside)
    text += "".join(f'#include "{source}"\n' for source in group)
    at = words.index("-c") + 1
    command = [real, *words[:at], "-x", "c++", "-", *words[at + 1 :]]
    return subprocess.run(command, input=text, text=True, stderr=subprocess.DEVNULL, check=False).returncode


def compile_in_turn(real: str, words: list[str], group: list[str]) -> int:
    """Where files do not go together, as in another version: each by itself, and then into one object."""
    at, to = words.index("-c") + 1, words.index("-o") + 1
    parts = []
    for number, source in enumerate(group):
        parts.append(f"{words[to]}.{number}")
        command = [real, *words]
        command[at + 1], command[to + 1] = source, parts[-1]
        if status := run(command):
            return status
    return run([real, "-r", "-nostdlib", *parts, "-o", words[to]])


def run(command: list[str]) -> int:
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
