"""What a machine without a network sends back: records, and little else, in small archives.

With Python's own library only: it runs before anything is installed.
"""

import contextlib
import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from study.errors import Stop
from study.inputs.names import safe_name
from study.records.privacy import without_paths

PART_BYTES = 14 * 2**20
LAST_LINES = 200  # of the logs of a run that is not done
LOGS = ("log.txt", "output.txt")
MAX_BYTES, MAX_FILES = 256 * 2**20, 20_000  # in all parts together; nine minutes of runs give a few megabytes
COPY_AGAIN = "copy the parts from that machine again; nothing was unpacked"


def take_up(reports: Path, results: Path) -> set[Path]:
    """Copy the results of earlier windows to where this one looks for them. Returns their names."""
    results.mkdir(parents=True, exist_ok=True)
    if reports.is_dir():
        shutil.copytree(reports, results, dirs_exist_ok=True)
        return {path.relative_to(reports) for path in reports.rglob("*") if path.is_file()}
    return set()


def pack_back(results: Path, out: Path, brought: set[Path]) -> list[Path]:
    """Put new files into archives that are small enough to send."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("records-*.tar.gz"):
        old.unlink()
    files = {path.relative_to(results): path for path in sorted(results.rglob("*")) if path.is_file()}
    new = {name: path for name, path in files.items() if name not in brought or changes(name)}
    names = [name for name, path in new.items() if may_travel(name) and not _log_of_done_run(path)]
    parts: list[Path] = []
    while names:
        parts.append(out / f"records-{len(parts) + 1}.tar.gz")
        with tarfile.open(parts[-1], "w:gz") as archive:
            while names and parts[-1].stat().st_size < PART_BYTES:
                name = names.pop(0)
                lines = files[name].read_bytes().splitlines(keepends=True)
                content = b"".join(lines if name.suffix == ".json" else lines[-LAST_LINES:])
                header = tarfile.TarInfo(str(name))
                header.size, header.mtime = len(content), int(files[name].stat().st_mtime)
                archive.addfile(header, io.BytesIO(content))
    return parts


def may_travel(name: Path) -> bool:
    """Whether a file of this name in a machine's folder is a record, a log of a run or a table."""
    folder = name.parts[:-1]
    if not folder:
        return name.name in ("peaks.json", "summary.txt") or name.match("tests-*.txt")
    if folder == ("speed",):
        return name.suffix in (".json", ".part")
    return folder[0] == "runs" and len(folder) > 1 and name.name in ("record.json", *LOGS)


def changes(name: Path) -> bool:
    """Whether a file changes with each window."""
    return name.name == "summary.txt" or name.suffix == ".part"


def _log_of_done_run(path: Path) -> bool:
    try:
        return path.name in LOGS and json.loads((path.parent / "record.json").read_text())["status"] == "done"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def unpack(out: Path, reports: Path) -> int:
    """Unpack the parts into a machine's folder, and count the new records. Files that exist stay, except tables.

    All parts are checked before anything is written: a Stop leaves the folder as it was.
    """
    parts = sorted(out.glob("records-*.tar.gz"))
    if not parts:
        raise Stop(f"there is nothing to unpack in {out}", "name the folder that study offline run wrote to")
    contents: dict[Path, bytes] = {}
    for part in parts:
        for name, content in _members(part, MAX_BYTES - sum(map(len, contents.values()))):
            if name in contents:
                raise Stop(f"{part} contains {name}, which is in an earlier part", COPY_AGAIN)
            contents[name] = content
        if len(contents) > MAX_FILES:
            raise Stop(f"{out} contains more than {MAX_FILES} files", "unpack them in several steps")
    try:
        return sum(_put(reports, name, content) for name, content in contents.items())
    except OSError as error:
        raise Stop(f"{reports} cannot be written ({error})", "free some space there, and unpack again") from None


def _members(part: Path, max_bytes: int) -> Iterator[tuple[Path, bytes]]:
    """Name and content of every file in a part, checked: it comes from another machine."""
    try:
        with gzip.open(part) as packed:
            whole = packed.read(max_bytes + 1)
        if len(whole) > max_bytes:
            raise Stop(f"{part} unpacks to more than {MAX_BYTES >> 20} MiB", COPY_AGAIN)
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            for member in archive:
                name = Path(member.name)
                if not member.isfile() or not may_travel(name) or member.name != str(name):
                    raise Stop(f"{part} contains {member.name!r:.80}, which is not a record, log or table", COPY_AGAIN)
                for each in name.parts:
                    safe_name(each)
                yield name, archive.extractfile(member).read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise Stop(f"{part} is incomplete or not an archive ({error})", COPY_AGAIN) from None


def _put(reports: Path, name: Path, content: bytes) -> bool:
    """Write one file, unless it exists and is complete. Whether it is a new record."""
    path = reports / name
    if path.exists() and not changes(name) and not _is_broken(path):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        partial.write_text(_without_paths(name, content.decode(errors="replace")))
        partial.replace(path)  # a reader never sees half a file
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if name.suffix == ".json" and name.parts[0] == "speed":  # this bench is complete now
        path.with_suffix(".part").unlink(missing_ok=True)
    return name.name == "record.json"


def _is_broken(path: Path) -> bool:
    """Whether a file is half-written, as when a disk was full."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
    except (ValueError, RecursionError):
        return True
    return path.stat().st_size == 0


def _without_paths(name: Path, text: str) -> str:
    """Reports are published, so they do not tell the paths of that machine."""
    if name.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):  # incomplete JSON is treated as text
            return json.dumps(without_paths(json.loads(text)), indent=1) + "\n"
    return without_paths(text)
