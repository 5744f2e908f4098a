"""Explain a run that hangs: which rank waits in which collective for which rank, and why.

It goes by the log files of watched ranks, or by Flight Recorder dumps of others, pickled or as JSON. Nothing of theirs
is run. The causes are in hangs.toml, the surest first. They go by the functions in which the ranks are.
"""

import io
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from study.core import files
from study.core.errors import Stop
from study.records.collectives import Collective, RankLog, collective_of
from study.watch.findings import Finding, finding, texts

MOST = 8  # ranks in a sentence
DEFAULT = "0"  # the name of the group of all ranks
FAILED = re.compile("ended with (?!KeyboardInterrupt)")  # Ctrl-C ends what already hangs
Calls = dict[int, dict[int, Collective]]  # the last collectives of a group, by rank and index


def state(logs: list[RankLog]) -> str:
    """Return a sentence on when the ranks last wrote their logs.

    Ranks on other machines without a common folder have none here.
    """
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    age_s = time.time() - max(log.written_unix_s for log in logs)
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago"


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    # Only ranks that stand still have written their functions, and of one rank alone nothing can be told.
    stacks = {str(log.rank): "\n".join(log.calls) for log in logs if log.calls}
    if len(stacks) < 2 or not hangs(logs):
        return []
    has_failed = any(FAILED.match(log.place or "") for log in logs)
    for id, cause in texts("hangs.toml").items():
        # A pattern that a cause does not have is in every stack.
        ranks = [rank for rank, stack in stacks.items() if re.search(cause.get("one", ""), stack)]
        others = [rank for rank in stacks if rank not in ranks]
        some_are = "one" not in cause or (ranks and others)
        all_are = all(re.search(cause.get("both", ""), stack) for stack in stacks.values())
        if some_are and all_are and cause.get("ended", has_failed) == has_failed:
            return [finding(id, ranks=", ".join(ranks), others=", ".join(others))]
    return []


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait.

    Each group of ranks counts its collectives by itself: the ranks of a group are compared by the indices.
    """
    groups = dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)])
    seen = []
    for group in groups:
        calls = {log.rank: {entry.index: entry for entry in log.recent if entry.group == group} for log in logs}
        # After different calls the indices of the ranks say nothing more.
        seen += _different_branches(calls) or _waiting(group, logs, calls)
    return seen


def _different_branches(calls: Calls) -> list[Finding]:
    """Find the first index at which ranks called different kinds, or reduced different sizes."""
    for index in sorted(set().union(*calls.values())):
        sides: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entries in calls.items():
            if index not in entries:  # it has not begun this one, or its log begins later
                continue
            entry = entries[index]
            call = _name(entry)
            # Of other kinds the inputs may differ: parts of an all_to_all are unequal, and a scatter has one input.
            if entry.kind == "all_reduce" and entry.elements:
                call += f" of {entry.elements} elements"
            sides[call].append(rank)
        if len(sides) > 1:
            words = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in sides.items())
            remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
            return [Finding(f"Ranks took different branches: {words}", remedy)]
    return []


def _waiting(group: str, logs: list[RankLog], calls: Calls) -> list[Finding]:
    """Return which ranks of a group have not begun the collective in which others wait."""
    # --- in which collectives ranks wait
    # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
    waits = [
        index for log in logs if not _has_ended(log) for index, entry in calls[log.rank].items() if not entry.ended
    ]
    members = {rank for log in logs for rank in ({DEFAULT: range(log.ranks)} | log.groups).get(group, [])}
    if waits and (gone := members - calls.keys()):
        remedy = f"read the output of {_ranks(gone)}"
        return [Finding(f"{_ranks(gone).capitalize()} left no log (ended, or never started), and others wait", remedy)]
    # --- how far each rank has come
    # A log has the last collectives of all groups: if none of this group is among them, the rank began the one before.
    before = min(waits, default=0) - 1
    begun = {
        rank: max(entries, default=before) for rank, entries in calls.items() if entries or (waits and rank in members)
    }
    last = max(begun.values(), default=0)
    # Nobody waits: ranks that waited for one that ended early may have ended with an error by now.
    behind = [log for log in logs if begun.get(log.rank, last) < last and (waits or _has_ended(log))]
    if waits and not behind:
        sentence = f"All ranks have begun collective {before + 1}, and it does not end: their connection fails"
        return [Finding(sentence, "PyTorch ends the wait after 30 minutes with gloo and 10 with NCCL")]
    return [_behind(log, begun, calls) for log in behind[:MOST]]


def _has_ended(log: RankLog) -> bool:
    # The last place that a rank writes is "ended", or "ended with" its error and the place of that.
    return (log.place or "").startswith("ended")


def _behind(log: RankLog, begun: dict[int, int], calls: Calls) -> Finding:
    """Return the finding for a rank that has not begun the collective in which others wait: where it is instead."""
    missing = begun[log.rank] + 1
    # --- where the others are: the logs of those that are further ahead may no longer have the collective
    others = [rank for rank, index in begun.items() if index >= missing]
    known = [_name(calls[rank][missing]) for rank in others if missing in calls[rank]]
    # --- where this rank is
    waits = [f"it waits in {_name(entry)}" for entry in log.recent if not entry.ended]
    place = [*waits, f"it is at {log.place or 'work'}"][0]
    if _has_ended(log):
        place = f"it {log.place}"
    are = "is" if len(others) == 1 else "are"
    sentence = f"Rank {log.rank} has not begun {[*known, f'collective {missing}'][0]}, where {_ranks(others)} {are}"
    remedy = f"look at what rank {log.rank} does there: all ranks of a group must make the same calls"
    return Finding(f"{sentence}: {place}", remedy)


def _name(entry: Collective) -> str:
    group = "" if entry.group == DEFAULT else f" of group {entry.group[:12]}"
    return f"{entry.kind} {entry.index}{group}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2`."""
    names = list(map(str, sorted(ranks)))
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST:
        names[MOST:] = ["..."]
    return f"ranks {', '.join(names)}"


# --- Flight Recorder dumps of ranks that were not watched

MAX_BYTES = 64 * 2**20
MOST_RANKS = 4096
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
PACKAGES = re.compile(r"site-packages|dist-packages|<frozen|/lib/python3|\.cpp$|\?\?")
KEPT = 500  # collectives of a rank


def dumps_in(folder: Path) -> list[Path]:
    """Return the files of a folder whose names end in the number of a rank."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _rank_of(path))


def dumps(path: Path) -> list[RankLog]:
    """Return the logs of the ranks in a dump, or in a folder with one of each rank.

    A dump does not say how many ranks there are: as many as its groups and the names of the files have.
    """
    paths = dumps_in(path) if path.is_dir() else [path]
    logs = list(map(_read, paths[:MOST_RANKS]))
    ranks = {0}
    for log in logs:
        ranks.update([log.rank], *log.groups.values())
    return [log.model_copy(update={"ranks": max(ranks) + 1}) for log in logs]


def _rank_of(path: Path) -> str | None:
    """Return the rank of a dump by its name: nccl_trace_rank_3, comm_lib_trace_rank_3.json, dump_3."""
    match = re.search(r"(\d{1,6})(?:\.(?:json|pickle|pkl|pt))?$", path.name)
    return match and match[1]


class _Plain(pickle.Unpickler):
    """Loads plain values. A pickle that names a function or a class is refused before anything is made of it."""

    def find_class(self, module: str, name: str):
        raise ValueError(f"it is not plain: it names {module}.{name}")

    def persistent_load(self, pid):
        raise ValueError("it is not plain: it names something outside of it")


def _read(path: Path) -> RankLog:
    # PyTorch can write either: a pickle, which its own tools read, or JSON.
    try:
        content = files.read(path, MAX_BYTES)
        dump = _Plain(io.BytesIO(content)).load() if content[:1] == PICKLE else files.from_json(content)
        return _log_of(dump, int(_rank_of(path) or 0))
    except Exception as error:  # a stranger's file may hold another type wherever PyTorch writes one
        what = f"{str(path)!r:.300} is no Flight Recorder dump ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "name a run, or dumps of Flight Recorder") from None


def _log_of(dump: dict[str, Any], rank: int) -> RankLog:
    """Return the log of a rank. Its place is the script's line that began the first collective that has not ended."""
    # A send or a receive counts by itself, and needs two ranks only.
    entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")][-KEPT:]
    recent = [collective_of(entry) for entry in entries]
    waits = [entry for entry, each in zip(entries, recent, strict=True) if not each.ended]
    places = [
        f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"
        for frame in [*waits, {}][0].get("frames") or []
        if not PACKAGES.search(frame["filename"])
    ]
    return RankLog(
        rank=rank,
        ranks=1,
        written_unix_s=max((entry["time_created_ns"] for entry in entries), default=0) / 1e9,
        still_s=0.0,
        recorded=True,
        place=next(iter(places), None),
        groups={
            name: [int(number) for number in re.findall(r"\d{1,6}", str(each["ranks"]))]
            for name, each in (dump.get("pg_config") or {}).items()
        },
        recent=recent,
    )
