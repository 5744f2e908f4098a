"""What a machine without a network sends back: records, and little else, in small archives.

A manifest beside them has the size and the checksum of every file, and is checked before anything is written. With
Python's own library only: it runs before anything is installed.
"""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path

from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.io.files import safe_name
from study.records.privacy import redact

PART_BYTES = 14 * 2**20
LAST_LINES = 200  # of the logs of a run that is not done
LOGS = ("log.txt", "output.txt")
MANIFEST = "records-manifest.json"  # {"files": {name: [bytes, SHA-256]}}
# in all parts together; nine minutes of runs give a few megabytes
MAX_BYTES = 256 * 2**20
MAX_FILES = 20_000
MAX_RATIO = 200  # of what a part unpacks to and what it takes: records give 10, logs of equal lines 100
MIN_RATIO_BYTES = 2**20  # of a part so small any ratio is harmless
COPY_AGAIN = "copy the parts from that machine again; nothing was unpacked"


def _seal(content: bytes) -> list[int | str]:
    """Return the entry of a file in the manifest."""
    return [len(content), hashlib.sha256(content).hexdigest()]


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
    paths = {path.relative_to(results): path for path in sorted(results.rglob("*")) if path.is_file()}
    new = {name: path for name, path in paths.items() if name not in brought or changes(name)}
    names = [name for name, path in new.items() if may_travel(name) and not _log_of_done_run(path)]
    parts: list[Path] = []
    written = {}
    while names:
        parts.append(out / f"records-{len(parts) + 1}.tar.gz")
        with tarfile.open(parts[-1], "w:gz") as archive:
            while names and parts[-1].stat().st_size < PART_BYTES:
                name = names.pop(0)
                lines = paths[name].read_bytes().splitlines(keepends=True)
                content = b"".join(lines if name.suffix == ".json" else lines[-LAST_LINES:])
                header = tarfile.TarInfo(str(name))
                header.size = len(content)
                header.mtime = int(paths[name].stat().st_mtime)
                archive.addfile(header, io.BytesIO(content))
                written[name.as_posix()] = _seal(content)
    (out / MANIFEST).write_text(json.dumps({"files": written}, indent=1) + "\n")
    return parts


def may_travel(name: Path) -> bool:
    """Return whether a file of this name in a machine's folder is a record, a log of a run or a table."""
    folder = name.parts[:-1]
    if not folder:
        return name.name in ("peaks.json", "summary.txt") or name.match("tests-*.txt")
    if folder == ("speed",):
        return name.suffix in (".json", ".part")
    return folder[0] == "runs" and len(folder) > 1 and name.name in ("record.json", *LOGS)


def changes(name: Path) -> bool:
    """Return whether a file changes with each window."""
    return name.name == "summary.txt" or name.suffix == ".part"


def _log_of_done_run(path: Path) -> bool:
    try:
        return path.name in LOGS and json.loads((path.parent / "record.json").read_text())["status"] == "done"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def unpack(out: Path, reports: Path) -> int:
    """Unpack the parts into a machine's folder, and count the new records. Files that exist stay, except tables.

    The manifest and all parts are checked before anything is written: a Stop leaves the folder as it was.
    """
    parts = sorted(out.glob("records-*.tar.gz"))
    if not parts:
        raise Stop(f"there is nothing to unpack in {out}", "name the folder that study offline run wrote to")
    listed = _manifest(out)
    contents = {}
    for part in parts:
        for name, content in _members(part, listed):
            if name in contents:
                raise Stop(f"{part} contains {name}, which is there already", COPY_AGAIN)
            contents[name] = content
    if missing := next((name for name in listed if name not in contents), None):
        raise Stop(f"{missing} is in {MANIFEST} and in no part", COPY_AGAIN)
    try:
        return sum(_put(reports, name, content) for name, content in contents.items())
    except OSError as error:
        what = f"{reports} cannot be written ({files.why(error)}: {error.filename})"
        raise Stop(what, "make room there, take links out of it, and unpack again") from None


def _manifest(out: Path) -> dict[Path, list]:
    """Return the size and the checksum of each file in the parts.

    They are checked: names that may travel, that no file system takes for the same, within limits.
    """
    path = out / MANIFEST
    try:
        content = texts.from_json(files.read_below(out, MANIFEST, MAX_FILES * 400))
        listed = {Path(name): entry for name, entry in content["files"].items()}
        sizes = [size_bytes for size_bytes, _ in listed.values()]
        if not all(type(size_bytes) is int and size_bytes >= 0 for size_bytes in sizes):
            raise ValueError("a size is no whole number")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Stop(f"{path} is no manifest of what was packed ({files.why(error)})", COPY_AGAIN) from None
    if len(listed) > MAX_FILES or sum(sizes) > MAX_BYTES:
        what = f"{path} names {len(listed)} files with {sum(sizes) >> 20} MiB"
        raise Stop(what, f"unpack at most {MAX_FILES} files with {MAX_BYTES >> 20} MiB at a time")
    for name, text in zip(listed, content["files"], strict=True):
        _refuse_name(path, name, text)
    same = {unicodedata.normalize("NFC", name.as_posix()).casefold() for name in listed}
    above = {unicodedata.normalize("NFC", each.as_posix()).casefold() for name in listed for each in name.parents}
    if len(same) < len(content["files"]) or same & above:
        raise Stop(f"{path} has two names that a file system may take for the same", COPY_AGAIN)
    return listed


def _refuse_name(where: Path, name: Path, text: str) -> None:
    if not may_travel(name) or text != str(name):
        raise Stop(f"{where} contains {text!r:.80}, which is not a record, log or table", COPY_AGAIN)
    for each in name.parts:
        safe_name(each)


def _members(part: Path, listed: dict[Path, list]) -> Iterator[tuple[Path, bytes]]:
    """Yield name and content of every file in a part, each as in the manifest. A part comes from another machine."""
    most_bytes = max(MIN_RATIO_BYTES, min(MAX_BYTES, MAX_RATIO * part.stat().st_size))
    try:
        with gzip.open(part) as packed:
            whole = packed.read(most_bytes + 1)
        if len(whole) > most_bytes:
            raise Stop(f"{part} unpacks to more than {most_bytes >> 20} MiB", COPY_AGAIN)
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            for member in archive:
                name = Path(member.name)
                is_file = member.isfile() and not member.issparse()  # a sparse one is as large as it says
                _refuse_name(part, name, member.name if is_file else f"{member.name} (no file)")
                if name not in listed:
                    raise Stop(f"{part} contains {name}, which is not in {MANIFEST}", COPY_AGAIN)
                file = archive.extractfile(member)
                content = file.read(listed[name][0] + 1) if file else b""
                if listed[name] != _seal(content):
                    raise Stop(f"{name} in {part} is not as {MANIFEST} has it", COPY_AGAIN)
                yield name, content
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise Stop(f"{part} is incomplete or not an archive ({files.why(error)})", COPY_AGAIN) from None


def _put(reports: Path, name: Path, content: bytes) -> bool:
    """Write one file, unless it exists and is complete. Return True if it is a new record.

    Reports are published, so they do not tell the paths of that machine.
    """
    if not changes(name) and _is_whole(reports, name):
        return False
    text = content.decode(errors="replace")
    redacted = redact(text)
    if name.suffix == ".json":
        with contextlib.suppress(ValueError):  # incomplete JSON is treated as text
            redacted = json.dumps(redact(texts.from_json(text)), indent=1) + "\n"
    files.write_below(reports, name.as_posix(), redacted.encode(errors="replace"))
    if name.suffix == ".json" and name.parts[0] == "speed":  # this bench is complete now
        (reports / name).with_suffix(".part").unlink(missing_ok=True)
    return name.name == "record.json"


def _is_whole(reports: Path, name: Path) -> bool:
    """Return whether a file is there, and not half-written, as when a disk was full."""
    try:
        content = files.read_below(reports, name.as_posix(), MAX_BYTES)
        if name.suffix == ".json":
            json.loads(content)
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return content != b""
