"""Writes an output folder as a whole: beside the old one, which it then replaces.

A manifest in the folder lists every file that was written, with its checksum. Nothing else is ever removed: a folder
without a manifest, or with a file that differs from the manifest, belongs to somebody else and is refused.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from study.core.errors import Stop

MANIFEST = "study-manifest.json"


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. It replaces `out` if the block succeeds; otherwise it is removed."""
    try:
        out = out.resolve()
        refuse_foreign(out)
        old = out.with_name(f".{out.name}.replaced")
        new = out.with_name(f".{out.name}.being-made")
        if not out.exists() and old.exists():  # a build was killed between two renames
            old.rename(out)
        new.mkdir(parents=True, exist_ok=True)
        with _locked(new, out):
            try:
                yield new
                files = {str(path.relative_to(new)): _checksum(path) for path in _contents(new) if path.is_file()}
                (new / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
                refuse_foreign(out)  # again: the build took its time
                _remove(old)
                _swap(new, out, old)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            _remove(old)
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise Stop(f"{out} cannot be written ({reason})", "give another --out") from None


def refuse_foreign(out: Path) -> None:
    """Raise Stop if the folder contains anything that no earlier build has written."""
    if not out.exists():
        return
    if not out.is_dir():
        raise Stop(f"{out} is a file", "give a folder as --out")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise Stop(f"{out} is not empty and was not made by this command", "give another --out, or remove it yourself")
    if foreign := _foreign(out):
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        what = f"{out} holds files that this command did not write, or that were changed since ({names})"
        raise Stop(what, "move them away, or give another --out")


def _foreign(folder: Path) -> list[str]:
    """Return the files in a folder that differ from its manifest or are not in it. A link is never ours."""
    try:
        known = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    files = [path for path in _contents(folder) if path.is_symlink() or not path.is_dir()]
    names = {str(path.relative_to(folder)): path for path in files}
    return [name for name, path in names.items() if path.is_symlink() or known.get(name) != _checksum(path)]


def _contents(folder: Path) -> list[Path]:
    """Return everything below a folder except its manifest; the content of a folder comes before the folder."""
    return [path for path in sorted(folder.rglob("*"), reverse=True) if path != folder / MANIFEST]


def _checksum(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@contextlib.contextmanager
def _locked(new: Path, out: Path) -> Iterator[None]:
    """Lock a folder, and remove what a killed build left in it. The kernel unlocks it when this process ends."""
    lock = os.open(new, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock), new.stat())  # another build may have put it in its place
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise Stop(f"{out} is being written by another process", "wait until it has ended, or give another --out")
        if any(new.iterdir()) and not (new / MANIFEST).is_file():
            raise Stop(f"{new} is in the way and was not made by this command", "move it away")
        for path in new.iterdir():
            if path.name != MANIFEST:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (new / MANIFEST).write_text('{"files": {}}')  # from now on the folder is known as ours
        yield
    finally:
        os.close(lock)


def _swap(new: Path, out: Path, old: Path) -> None:
    """Replace the old folder by the new one. If that fails, the old one is restored."""
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise


def _remove(folder: Path) -> None:
    """Remove a folder with only our files, the manifest last: what a killed removal leaves is still known as ours."""
    if not folder.exists():
        return
    refuse_foreign(folder)
    for path in _contents(folder):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmdir()
