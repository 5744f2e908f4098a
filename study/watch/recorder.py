"""Flight Recorder dumps (torch.distributed's, one for each rank) as the logs of a watched run."""

import re
from pathlib import Path
from typing import Any

from study.records.collectives import RankLog, collective_of

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
