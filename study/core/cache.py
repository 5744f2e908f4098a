"""The cache: prepared data, drawn weights, looks at models, answers of the libraries. Broken entries are made again.

An entry is a folder with the checksums of its files; an answer is a JSON file. Several users and machines may share a
cache: a user without write access reads it, and nothing is seen half-written. Whoever can write to a cache decides what
is in it, so share it only with people you trust.
"""

import contextlib
import errno
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from study.core import files
from study.core.errors import Stop

CHECKSUMS = "checksums.json"  # in each entry: size, modification time and SHA-256 of each file
MAX_ANSWER_BYTES = 64 * 2**20  # a look at GPT-2 has 0.4 MB


def entry(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return the entry `folder`, whole and readable. If it is not there or broken, `write` fills a new folder.

    Several processes may do this at once, on several machines: each writes a folder of its own, and the first to finish
    renames it.
    """
    try:
        if folder.exists():
            problem = _problem(folder)
            if problem is None:
                return folder
            sys.stdout.write(f"The cache entry {folder} is broken ({problem}). It is made again.\n")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder is private; the folder in it gets the permissions of the umask.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as scratch:
            new = files.safe_join(Path(scratch), folder.name)
            new.mkdir()
            write(new)
            _add_checksums(new)
            _replace(folder, new)
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise  # out of memory, which has its own status
        path = getattr(error, "filename", None) or folder
        reason = getattr(error, "strerror", None) or error
        remedy = "give a --cache-dir that you may read and write, on a disk with room"
        raise Stop(f"the cache cannot be used: {path} ({reason})", remedy) from error
    return folder


def answer(folder: Path, name: str) -> Any:
    """Return the cached answer with this name. None if there is none, or if it cannot be read."""
    try:
        return json.loads(files.read_below(folder, f"{name}.json", MAX_ANSWER_BYTES))["answer"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(folder: Path, name: str, answer: Any) -> None:
    """Cache an answer for every user. If that fails, the answer is computed each time."""
    with contextlib.suppress(OSError):
        files.write_below(folder, f"{name}.json", json.dumps({"answer": answer}).encode())


def fingerprint(key) -> str:
    """Return a short name for a key, which JSON must be able to hold."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _problem(folder: Path) -> str | None:
    """Return why an entry is broken, or None. A PermissionError if this user may not read it."""
    try:
        entries = files.from_json(files.read(folder / CHECKSUMS, MAX_ANSWER_BYTES))
        for name, (size_bytes, changed_ns, checksum) in entries.items():
            file = folder / name
            file.open("rb").close()
            status = file.lstat()
            # A file with this size and time was not changed, so it is not read again. In a copied cache times differ.
            unchanged = (status.st_size, status.st_mtime_ns) == (size_bytes, changed_ns)
            if not unchanged and _sha256(file) != checksum:
                return f"the checksum of {name} does not match"
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return files.why(error)
    return None


def _add_checksums(folder: Path) -> None:
    lines = {}
    checksums = folder / CHECKSUMS
    checksums.touch()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path != checksums):
        status = file.stat()
        lines[file.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns, _sha256(file)]
        file.chmod(checksums.stat().st_mode)  # safetensors writes files that only their owner may read
    checksums.write_text(json.dumps(lines, indent=1) + "\n")


def _replace(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`, in place of a broken entry. Another process may do the same at this moment."""
    if folder.exists() and _problem(folder) is not None:
        folder.rename(new.with_name("broken"))  # it goes with the scratch folder
    try:
        new.rename(folder)
    except OSError:
        if _problem(folder) is not None:
            raise  # otherwise another process was first, with the same content


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
