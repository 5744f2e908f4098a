"""The user's files stay as they are: what a script would change is a copy, and what it makes is removed afterwards.

It is no wall: a script runs with its user's rights, and libraries in C++ write what they like. Their caches are kept.
"""

import builtins
import io
import os
import shutil
import sys
from pathlib import Path

MADE = "made.txt"  # the paths that a script made, one a line
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT
CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")


class Files:
    """What a script may change: what it made itself, and caches."""

    def __init__(self, folder: Path):
        self.folder = str(folder)
        homes = ["~/.cache", "~/.triton", *(os.environ[name] for name in CACHES if name in os.environ)]
        homes += [self.folder, "/dev", "/proc"]
        self._free = tuple(os.path.realpath(os.path.expanduser(each)) for each in homes)
        self._made: set[str] = set()
        self._copies: dict[str, str] = {}
        self._list = (folder / MADE).open("a")

    def guard(self) -> None:
        """From now on keep what exists."""
        sys.addaudithook(self._heard)
        for owner, name in ((builtins, "open"), (io, "open"), (os, "open")):
            setattr(owner, name, self._opening(getattr(owner, name)))
        for owner, name in (
            (os, "remove"), (os, "unlink"), (os, "rmdir"), (os, "rename"), (os, "replace"), (os, "truncate"),
            (shutil, "rmtree"),
        ):  # fmt: skip
            setattr(owner, name, self._changing(getattr(owner, name)))

    def _heard(self, event: str, arguments: tuple) -> None:
        """Note what is about to be made."""
        is_open = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        made = arguments[1] if event == "os.rename" else arguments[0] if is_open or event == "os.mkdir" else None
        if made is None or isinstance(made, int):
            return
        path = os.path.abspath(os.fsdecode(made))
        if not os.path.lexists(path) and not self._is_free(path):
            self._made.add(path)
            self._list.write(f"{path}\n")
            self._list.flush()

    def _is_free(self, path: str) -> bool:
        """Whether a path is in a cache, or in what the script made."""
        real = os.path.realpath(path)
        if real.endswith((".pyc", ".lock")) or "__pycache__" in real:
            return True
        parents = {path, *map(str, Path(path).parents)}
        return any(real == home or real.startswith(f"{home}/") for home in self._free) or bool(parents & self._made)

    def _opening(self, function):
        def open(file, mode="r", *args, **kwargs):
            writes = mode & WRITES if isinstance(mode, int) else set(mode) & set("wax+")
            if isinstance(file, int) or not (writes or self._copies):
                return function(file, mode, *args, **kwargs)
            path = os.path.abspath(os.fsdecode(file))
            if writes and path not in self._copies and os.path.isfile(path) and not self._is_free(path):
                copy = os.path.join(self.folder, f"copy-{len(self._copies)}")
                shutil.copyfile(path, copy)
                self._copies[path] = copy
            return function(self._copies.get(path, file), mode, *args, **kwargs)

        return open

    def _changing(self, function):
        def change(path, *args, **kwargs):
            named = [each for each in (path, *args[:1]) if isinstance(each, str | os.PathLike)]
            if kwargs.get("dir_fd") is None and any(
                os.path.lexists(each) and not self._is_free(os.path.abspath(each)) for each in named
            ):
                return None
            return function(path, *args, **kwargs)

        return change


def remove_made(folder: Path) -> None:
    """Remove what a rehearsal's script made."""
    for line in reversed((folder / MADE).read_text().splitlines() if (folder / MADE).exists() else []):
        if os.path.isdir(line) and not os.path.islink(line):
            shutil.rmtree(line, ignore_errors=True)
        elif os.path.lexists(line):
            os.unlink(line)
