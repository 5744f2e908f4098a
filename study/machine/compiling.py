"""A `c++` for `study operators` that compiles DeepSpeed's operators faster, to the same machine code.

It comes first on the PATH while operators compile. The commands in build.ninja stay DeepSpeed's own, so nothing is
compiled again later. A compiler named in CXX is used without this wrapper.

python -IS compiling.py /usr/bin/c++ -MMD -MF a.o.d -O0 -c a.cpp -o a.o      # what this `c++` runs
"""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOGETHER = 6  # files in a compilation: the twelve files of async_io make two groups, for two cores


def write_compiler(folder: Path) -> Path:
    """Write the `c++` into a folder. It omits debug information, and compiles some files together.

    Debug information (-g) is not machine code. Without it cpu_adam takes 47 s of CPU time instead of 61 s, and 0.4 MB
    instead of 17 MB.

    The files of async_io and pin_memory take nearly all of their time for PyTorch's headers, which each of them
    includes: several files in one compilation take little longer than one. This is done only without optimization
    (-O0), as for those two: then each function is compiled independently of the others. With g++ 12 and DeepSpeed
    0.19.8 the 12,906 functions of the two were the same, byte by byte, as if compiled separately: 12,868 of them
    entirely, the others except for the distance to a function or constant that they refer to. Each group has a single
    static initializer.
    """
    if real := shutil.which("c++"):
        script = folder / "c++"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{real}" "$@"\n')
        script.chmod(0o755)
    return folder


def main(real: str, words: list[str]) -> int:
    """Run a command of ninja. For a group of files, the first file compiles all, and the others leave empty objects."""
    words = [*words, "-g0"]
    if not (group := files_together(words)):
        os.execv(real, [real, *words])
    headers = [path for word in words if word.startswith("-I") for path in sorted(Path(word[2:]).glob("*.h"))]
    source, output = words[words.index("-c") + 1], words[words.index("-o") + 1]
    if source != group[0]:
        status = run([real, "-x", "c++", "-c", "/dev/null", "-o", output])
    else:
        status = compile_together(real, words, group, headers) and compile_in_turn(real, words, group)
    if "-MF" in words:  # the same for the whole group: when a file changes, ninja compiles all of them again
        paths = (str(path).replace(" ", "\\ ") for path in [*group, *headers])
        Path(words[words.index("-MF") + 1]).write_text(f"{output}: {' '.join(paths)}\n")
    return status


def files_together(words: list[str]) -> list[str]:
    """The group of a command's source file, from build.ninja. Empty if the file is compiled alone."""
    optimization = [word for word in words if word.startswith("-O")][-1:]
    if "-c" not in words or optimization not in ([], ["-O0"]) or not Path("build.ninja").exists():
        return []
    sources = sorted(re.findall(r"^build \S+: compile (\S+)$", Path("build.ninja").read_text(), re.MULTILINE))
    count = math.ceil(len(sources) / TOGETHER)
    # Neighbours go to different groups: in DeepSpeed 0.19.8 they define the same static names.
    groups = [sources[first::count] for first in range(count)]
    return next((group for group in groups if words[words.index("-c") + 1] in group and len(group) > 1), [])


def compile_together(real: str, words: list[str], group: list[str], headers: list[Path]) -> int:
    """Compile a group at once. #import reads a header only once: three of DeepSpeed's headers have no guard."""
    beside = {Path(source).parent for source in group}  # other headers, such as CUDA's, have guards
    text = "".join(f'#import "{path}"\n' for path in headers if path.parent in beside)
    text += "".join(f'#include "{source}"\n' for source in group)
    at = words.index("-c") + 1
    command = [real, *words[:at], "-x", "c++", "-", *words[at + 1 :]]
    return subprocess.run(command, input=text, text=True, stderr=subprocess.DEVNULL, check=False).returncode


def compile_in_turn(real: str, words: list[str], group: list[str]) -> int:
    """If a group cannot be compiled at once, as in another version: compile each file, and link them to one object."""
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
