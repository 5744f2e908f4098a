"""Flight Recorder dumps (torch.distributed's, one for each rank) as the logs of a watched run."""

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

from study.records.collectives import Collective, RankLog

LONGEST = 60  # characters of a name
LONGEST_PLACE = 200  # characters of a place in the code
MOST_FRAMES = 200
PACKAGES = re.compile(r"site-packages|dist-packages|<frozen|/lib/python3|\.cpp$|\?\?")
KEPT = 500  # collectives of a rank


def rank_of(path: Path) -> int | None:
    """Return the rank of a dump by its name: nccl_trace_rank_3, comm_lib_trace_rank_3.json, dump_3."""
    match = re.search(r"(\d{1,6})(?:\.(?:json|pickle|pkl|pt))?$", path.name)
    return int(match[1]) if match else None


def dumps_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and rank_of(path) is not None)


def log_of(dump: dict, rank: int) -> RankLog:
    entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")][-KEPT:]
    groups = {
        str(each.get("name") or name or "0"): [int(number) for number in re.findall(r"\d{1,6}", str(each["ranks"]))]
        for name, each in (dump.get("pg_config") or {}).items()
    }
    waits = [entry for entry in entries if not _has_ended(entry)]
    at_work = [f"work after {place}" for place in _places(entries[-1:])]
    return RankLog(
        rank=rank,
        ranks=1,
        written_unix_s=max((entry["time_created_ns"] for entry in entries), default=0) / 1e9,
        still_s=0.0,
        recorded=True,
        place=next(iter(_places(waits) or at_work), None),
        groups=groups,
        recent=[_collective(entry) for entry in entries],
    )


def _places(entries: list[dict]) -> list[str]:
    """Return the lines of the script that called them."""
    places = [place_of(entry.get("frames") or []) for entry in entries]
    return [place for place in places if place]


def place_of(frames: Iterable[dict]) -> str | None:
    """Return the first line of a stack that is not in an installed package; the first of all if there is none."""
    places = []
    for frame in itertools.islice(frames, MOST_FRAMES):
        place = f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"[:LONGEST_PLACE]
        if not PACKAGES.search(frame["filename"]):
            return place
        places.append(place)
    return places[0] if places else None


def _has_ended(entry: dict) -> bool:
    return bool(entry.get("retired")) or entry["state"] == "completed"


def _collective(entry: dict) -> Collective:
    name = entry["profiling_name"]
    return Collective(
        group=str(entry["process_group"][0]),
        index=entry["collective_seq_id"],
        kind=(name.partition(":")[2] or name)[:LONGEST],
        elements=sum(math.prod(shape) for shape in entry.get("input_sizes") or []),
        ended=_has_ended(entry),
    )
