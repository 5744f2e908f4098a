"""Reads the Flight Recorder dumps of ranks that were not watched, pickled or as JSON. Nothing of theirs is run."""

import io
import pickle
import re
from pathlib import Path
from typing import Any

from study.core import files
from study.core.errors import Stop
from study.records.collectives import RankLog, collective_of

MAX_BYTES = 64 * 2**20
MOST_RANKS = 4096
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
# What a damaged dump raises wherever a value has another type than the tool writes.
FAULTS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
ODD = (OSError, EOFError, pickle.UnpicklingError, *FAULTS)
LONGEST = 200  # characters of a place in the code
PACKAGES = re.compile(r"site-packages|dist-packages|<frozen|/lib/python3|\.cpp$|\?\?")
KEPT = 500  # collectives of a rank


def rank_of(path: Path) -> int | None:
    """Return the rank of a dump by its name: nccl_trace_rank_3, comm_lib_trace_rank_3.json, dump_3."""
    match = re.search(r"(\d{1,6})(?:\.(?:json|pickle|pkl|pt))?$", path.name)
    return int(match[1]) if match else None


def dumps_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and rank_of(path) is not None)


def log_of(dump: dict[str, Any], rank: int) -> RankLog:
    """Return the log of a rank. Its place is the script's line that began the first collective that has not ended."""
    entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")][-KEPT:]
    recent = [collective_of(entry) for entry in entries]
    groups = {
        str(each.get("name") or name or "0"): [int(number) for number in re.findall(r"\d{1,6}", str(each["ranks"]))]
        for name, each in (dump.get("pg_config") or {}).items()
    }
    waits = [entry for entry, each in zip(entries, recent, strict=True) if not each.ended]
    frames = [frame for entry in waits[:1] for frame in entry.get("frames") or []]
    places = [
        f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"[:LONGEST]
        for frame in frames
        if not PACKAGES.search(frame["filename"])
    ]
    return RankLog(
        rank=rank,
        ranks=1,
        written_unix_s=max((entry["time_created_ns"] for entry in entries), default=0) / 1e9,
        still_s=0.0,
        recorded=True,
        place=next(iter(places), None),
        groups=groups,
        recent=recent,
    )


def dumps(path: Path) -> list[RankLog]:
    """Return the logs of the ranks in a dump, or in a folder with one of each rank."""
    logs = [_read(each) for each in (dumps_in(path) if path.is_dir() else [path])[:MOST_RANKS]]
    last = max((rank for log in logs for ranks in [*log.groups.values(), [log.rank]] for rank in ranks), default=0)
    return [log.model_copy(update={"ranks": last + 1}) for log in logs]


class _Plain(pickle.Unpickler):
    """Loads plain values. A pickle that names a function or a class is refused before anything is made of it."""

    def find_class(self, module: str, name: str):
        raise ValueError(f"it is not plain: it names {module}.{name}")

    def persistent_load(self, pid):
        raise ValueError("it is not plain: it names something outside of it")


def _read(path: Path) -> RankLog:
    try:
        content = files.read(path, MAX_BYTES)
        dump = _Plain(io.BytesIO(content)).load() if content[:1] == PICKLE else files.from_json(content)
        return log_of(dump, rank_of(path) or 0)
    except ODD as error:
        what = f"{str(path)!r:.300} is no Flight Recorder dump ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "name a run, or dumps of Flight Recorder") from None
