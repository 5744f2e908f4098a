"""Seal kept records: a manifest beside them lists the SHA-256 of each, so that a later change is noticed.

A seal shows that a record is as `study keep` wrote it. It does not show who wrote it: a change of both a record and its
manifest is visible only in the history of the repository.
"""

import contextlib
import functools
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from study.errors import Stop
from study.io import files
from study.machine import linux
from study.machine.gpus import gpus_here
from study.records import store
from study.records.schema import Record

MAX_BYTES = 64 * 2**20  # of a manifest: 200 bytes a record
MANIFEST = "manifest.jsonl"  # a line for each record
INPUTS = "inputs.jsonl"  # in reports/: a line for each file that decides verdicts beside the records
SEALED_INPUTS = (
    "study/ledger/claims/*.toml",
    "reports/outside/*",
    "reports/verdicts.json",
    "reports/*/trials.json",
    "reports/*/runs/manifest.jsonl",
)


class Line(BaseModel):
    file: str
    sha256: str
    commit: str | None = None
    machine: str | None = None


@dataclass(frozen=True)
class Seals:
    """The SHA-256 of sealed files by their path, and a sentence for each manifest that cannot be read."""

    sums: dict[Path, str]
    unreadable: tuple[str, ...] = ()

    def changed(self, path: Path) -> bool:
        return path in self.sums and self.sums[path] != _sum(path)

    def gone(self, folders: Iterable[Path]) -> list[Path]:
        """Return the sealed files below these folders that no longer exist."""
        tops = {folder.resolve() for folder in folders}
        return [path for path in self.sums if tops & set(path.parents) and not path.is_file()]


def find(folders: Iterable[Path]) -> Seals:
    """Return the seals of all manifests in these folders or above them."""
    sums: dict[Path, str] = {}
    unreadable = []
    resolved = {folder.resolve() for folder in folders}
    for folder in sorted(resolved.union(*(folder.parents for folder in resolved))):
        try:
            sums |= {path: line.sha256 for path, line in _read(folder).items()}
        except Stop as stop:
            unreadable.append(f"{stop.what}, so what it sealed counts as not sealed")
    return Seals(sums, tuple(unreadable))


def add(top: Path, folders: Iterable[Path]) -> None:
    """Add the records of these run folders to the manifest of `top`, or renew their lines."""
    lines = {line.file: line for line in _read(top).values()}
    for folder in folders:
        path = folder / store.RECORD
        record = store.load(folder)
        name = path.relative_to(top).as_posix()
        lines[name] = Line(file=name, sha256=_sum(path), commit=record.commit, machine=record.machine_line)
    text = "".join(f"{json.dumps(lines[name].model_dump())}\n" for name in sorted(lines))
    files.write_below(top, MANIFEST, text.encode())


def _read(top: Path) -> dict[Path, Line]:
    """Return the lines of a folder's manifest by path. It may be a stranger's: no name leads out of the folder."""
    try:
        content = files.read(top / MANIFEST, MAX_BYTES).decode()
        lines = [Line.model_validate_json(line) for line in content.splitlines()]
        return {files.safe_join(top, *line.file.split("/")): line for line in lines}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, Stop):
        what = f"{top / MANIFEST} is not a manifest of sealed records"
        raise Stop(what, "restore it from the repository's history") from None


def add_inputs(root: Path = store.ROOT) -> list[str]:
    """Seal what people wrote and libraries answered. Return the names of the files that have changed since."""
    changed = [sentence.partition(" ")[0] for sentence in changed_inputs(root) if not sentence.startswith("NO SEAL")]
    sums = _inputs(root)
    text = "".join(f"{json.dumps(Line(file=name, sha256=sums[name]).model_dump(exclude_none=True))}\n" for name in sums)
    files.write_below(root / "reports", INPUTS, text.encode())
    return changed


def changed_inputs(root: Path = store.ROOT) -> list[str]:
    """Return a sentence for each file of claims, answers or measurements of others that is not as it was sealed."""
    try:
        lines = files.read(root / "reports" / INPUTS, MAX_BYTES).decode().splitlines()
        sealed = {line.file: line.sha256 for line in map(Line.model_validate_json, lines)}
    except (OSError, ValueError):
        return [f"NO SEAL of claims and answers: reports/{INPUTS} cannot be read. Restore it from the history"]
    now = _inputs(root)
    words = {
        name: "changed after it was" if name in now else "removed after it was"
        for name in sealed
        if now.get(name) != sealed[name]
    }
    words |= {name: "added after the others were" for name in now if name not in sealed}
    return [f"{name} was {how} sealed. The history shows what changed" for name, how in sorted(words.items())]


def _inputs(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that decides verdicts beside the records, by its name."""
    paths = sorted(path for pattern in SEALED_INPUTS for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): _sum(path) for path in paths if path.is_file() and path.name != INPUTS}


def _sum(path: Path) -> str:
    return hashlib.sha256(files.read(path, store.MAX_BYTES)).hexdigest()


def is_of_this_machine(record: Record) -> bool:
    """Return whether a record names this machine's processor, memory and GPUs. Such a record counts without a seal."""
    hardware = record.hardware
    processor, memory_gib, gpus = _machine()
    same = (hardware.cpu, _gib(hardware.host_memory_bytes)) == (processor, memory_gib)
    return same and Counter(device.name for device in hardware.devices) <= gpus


def _gib(size_bytes: int | None) -> int | None:
    return size_bytes and round(size_bytes / 2**30)


@functools.cache
def _machine() -> tuple[str | None, int | None, Counter[str]]:
    """Return this machine's processor, memory in GiB and GPUs. GPUs whose driver fails are not seen."""
    processor = linux.fields("/proc/cpuinfo").get("model name") or platform.processor() or None
    memory_kib = linux.fields("/proc/meminfo").get("MemTotal", "0").partition(" ")[0]
    gpus: Counter[str] = Counter()
    with contextlib.suppress(Stop):
        gpus = Counter(gpu.name for gpu in gpus_here())
    return processor, _gib(int(memory_kib) * 1024) or None, gpus
