"""What travels from a machine without a network and back to it: records in small parts, and little else."""

import contextlib
import io
import json
import shutil
import tarfile
from pathlib import Path

from study import record
from study.record import Stop

PART_BYTES = 14 * 2**20
LAST_LINES = 200  # of what a run that is not done has said


def take_up(reports: Path, results: Path) -> set[Path]:
    """Put what earlier windows brought back where this one looks for it. Gives the files that are there already."""
    results.mkdir(parents=True, exist_ok=True)
    if reports.is_dir():
        shutil.copytree(reports, results, dirs_exist_ok=True)
        return {path.relative_to(reports) for path in reports.rglob("*") if path.is_file()}
    return set()


def pack_back(results: Path, out: Path, brought: set[Path]) -> list[Path]:
    """What was not there before, in parts that are small enough to travel: whole records, and little else."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("records-*.tar.gz"):
        old.unlink()
    found = [path for path in sorted(results.rglob("*")) if path.is_file() and travels(path)]
    changes = {path for path in found if path.name == "summary.txt" or path.suffix == ".part"}  # with each window
    names = [(path, name) for path in found if (name := path.relative_to(results)) not in brought or path in changes]
    parts: list[Path] = []
    while names:
        parts.append(out / f"records-{len(parts) + 1}.tar.gz")
        with tarfile.open(parts[-1], "w:gz") as archive:
            while names and parts[-1].stat().st_size < PART_BYTES:
                path, name = names.pop(0)
                lines = path.read_bytes().splitlines(keepends=True)
                content = b"".join(lines if path.suffix == ".json" else lines[-LAST_LINES:])
                header = tarfile.TarInfo(str(name))
                header.size, header.mtime = len(content), int(path.stat().st_mtime)
                archive.addfile(header, io.BytesIO(content))
    return parts


def travels(path: Path) -> bool:
    """Records and tables do; of what a run has said, only where it is not done."""
    if path.name in ("record.json", "peaks.json", "summary.txt") or path.parent.name == "speed":
        return True
    if path.name.startswith("tests-"):
        return True
    if path.name not in ("log.txt", "output.txt"):
        return False
    try:
        return json.loads((path.parent / "record.json").read_text())["status"] != "done"
    except (OSError, ValueError, KeyError):
        return True


def unpack(out: Path, reports: Path) -> int:
    """Put the parts into a machine's folder, and count the new records. What is there stays, but for the tables."""
    parts = sorted(out.glob("records-*.tar.gz"))
    if not parts:
        raise Stop(f"there is nothing to unpack in {out}", "name the folder that study.offline run wrote to")
    count = 0
    for part in parts:
        with tarfile.open(part) as archive:
            for member in archive.getmembers():
                if (reports / member.name).exists() and member.name.endswith(".json"):
                    continue
                archive.extract(member, reports, filter="data")
                if member.isfile():
                    _drop_paths(reports / member.name)
                if member.name.endswith(".json"):  # a bench that is whole now
                    (reports / member.name).with_suffix(".part").unlink(missing_ok=True)
                count += member.name.endswith("record.json")
    return count


def _drop_paths(path: Path) -> None:
    """Reports are published, and where that machine kept its things is nobody's affair."""
    text = path.read_text(errors="replace")
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):  # cut off in the middle: as text, then
            made = json.loads(text)
            path.write_text(json.dumps(record.without_paths(made), indent=1) + "\n")
            return
    path.write_text(record.without_paths(text))
