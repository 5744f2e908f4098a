"""The cache: prepared data, drawn weights, looks at models, answers of the libraries.

An entry is a folder that is renamed when it is whole; an answer is a JSON file. Nothing is seen half-written, so
several processes may share a cache. To make an entry again, remove its folder.
"""

import contextlib
import errno
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from study.core import digests, files
from study.core.errors import Stop

MAX_ANSWER_BYTES = 64 * 2**20  # a look at GPT-2 has 0.4 MB


def entry(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return the entry `folder`. If it is not there, or damaged, `write` fills a new folder, which is then renamed."""
    # Several processes may do this at once: the first to finish renames its folder, and the others take that one.
    try:
        if _whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder is private; the folder in it gets the permissions of the umask.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as scratch:
            new = Path(scratch, folder.name)
            new.mkdir()
            write(new)
            digests.write(new)
            if not _whole(folder):
                if folder.exists():  # who reads it goes on reading it: it is removed with the scratch folder
                    folder.rename(Path(scratch, "old"))
                new.rename(folder)
    except (OSError, SafetensorError) as error:
        # safetensors wraps the kernel's error in its own, which has no errno.
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise  # out of memory, which has its own status
        what = f"the cache cannot be used: {getattr(error, 'filename', None) or folder} ({files.why(error)})"
        raise Stop(what, "give a --cache-dir that you may read and write, on a disk with room") from error
    return folder


def _whole(folder: Path) -> bool:
    """Return whether an entry is there and undamaged. One that an older release wrote has no digests."""
    if not folder.exists():
        return False
    if damaged := digests.damaged(folder):
        logging.getLogger("study").warning("%s in the cache is damaged (%s), and is made again", folder, damaged[0])
    return not damaged


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
