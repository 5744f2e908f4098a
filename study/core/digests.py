"""Digests that a folder keeps of its files, so that damage is seen. `sha256sum --check` reads them as well."""

import hashlib
from pathlib import Path

from study.core import files

FILE = "SHA256SUMS"
MAX_BYTES = 32 * 2**20  # a line has some 150 bytes, and a checkpoint a few files of each rank


def write(folder: Path) -> None:
    """Write the digest of each file below a folder into the folder."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(_digests(folder).items())]
    files.write_below(folder, FILE, "".join(lines).encode())


def damaged(folder: Path) -> list[str]:
    """Return the files below a folder that are not as they were written: they changed, are missing, or are new.

    A folder without readable digests is damaged itself.
    """
    try:
        lines = files.read_below(folder, FILE, MAX_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return [FILE]
    now = _digests(folder)
    then = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        then[name] = digest
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / FILE:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
