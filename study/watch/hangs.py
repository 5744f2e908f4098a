"""Explain a run that hangs: which rank waits in which collective for which rank, and why.

It goes by the log files of watched ranks, or by Flight Recorder dumps of others. The causes are in hangs.toml, the
surest first. They go by the functions in which the ranks are.
"""

import re
import time
from collections.abc import Iterable
from pathlib import Path

from study.core import files
from study.core.errors import Stop
from study.records.collectives import Collective, RankLog, collective_of
from study.watch.findings import Finding, finding, texts

MOST = 8  # ranks in a sentence
MOST_GROUPS = 200  # of ranks: with tensor and pipeline parallelism a rank is in some ten
DEFAULT = "0"  # the name of the group of all ranks
Calls = dict[int, dict[int, Collective]]  # the last collectives of a group, by rank and index


def state(logs: list[RankLog]) -> str:
    """Return a sentence on when the ranks last wrote their logs. Those without the common folder have none here."""
    # The ring is on by default, with 2000 entries (c10d/FlightRecorder.hpp:110), also for gloo: somebody has set it to
    # 0.
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    age_s = max(0, time.time() - max(log.written_unix_s for log in logs))  # clocks of machines differ
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago"


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    # Only ranks that stand still have written their functions, and of one rank alone nothing can be told.
    stacks = {str(log.rank): "\n".join(log.calls) for log in logs if log.calls}
    if len(stacks) < 2 or not hangs(logs):
        return []
    # Ctrl-C ends what already hangs.
    has_failed = any(re.match("ended with (?!KeyboardInterrupt)", log.place or "") for log in logs)
    # Of 48 trainings that hang, 19 end at once with gloo. The patterns were written on the others, and are tested on
    # them: how many hangs of strangers they name is not known (reports/log.md).
    for id, cause in texts("hangs.toml").items():
        ranks = [rank for rank, stack in stacks.items() if re.search(cause["calls"], stack)]
        how_many = "some"
        if not ranks:
            how_many = "none"
        elif len(ranks) == len(stacks):
            how_many = "all"
        if how_many == cause["ranks"] and cause.get("ended", has_failed) == has_failed:
            others = [rank for rank in stacks if rank not in ranks]
            return [finding(id, ranks=", ".join(ranks), others=", ".join(others))]
    return []


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    # Each group of ranks counts its collectives by itself: the ranks of a group are compared by the indices.
    seen = []
    groups = dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)])
    for group in [*groups][:MOST_GROUPS]:
        calls = {log.rank: {entry.index: entry for entry in log.recent if entry.group == group} for log in logs}
        # After different calls the indices of the ranks say nothing more.
        seen += _different_branches(calls) or _waiting(group, logs, calls)
    return seen


def _different_branches(calls: Calls) -> list[Finding]:
    """Find the first index at which ranks called different kinds, or reduced different sizes."""
    for index in sorted(set().union(*calls.values())):
        sides: dict[str, list[int]] = {}
        for rank, entries in calls.items():
            if index not in entries:  # it has not begun this one, or its log begins later
                continue
            entry = entries[index]
            call = _name(entry)
            # Of other kinds the inputs may differ: parts of an all_to_all are unequal, and a scatter has one input.
            if entry.kind == "all_reduce" and entry.elements:
                call += f" of {entry.elements} elements"
            sides.setdefault(call, []).append(rank)
        if len(sides) > 1:
            words = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in sides.items())
            remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
            return [Finding(f"Ranks took different branches: {words}", remedy)]
    return []


def _waiting(group: str, logs: list[RankLog], calls: Calls) -> list[Finding]:
    """Return which ranks of a group have not begun the collective in which others wait."""
    running = [log.rank for log in logs if not _has_ended(log)]
    # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
    waits = [index for rank in running for index, entry in calls[rank].items() if not entry.ended]
    if not waits:
        # Ranks that waited for one that ended early may have ended with an error by now.
        begun = {rank: max(entries) for rank, entries in calls.items() if entries}
        return _late([log for log in logs if log.rank not in running], begun, calls)
    members = {rank for log in logs for rank in log.groups.get(group, range(log.ranks) if group == DEFAULT else ())}
    if gone := members - calls.keys():
        remedy = f"read the output of {_ranks(gone)}; if it ended without an error, ranks usually had unequal batches"
        return [Finding(f"{_ranks(gone).capitalize()} left no log (ended, or never started), and others wait", remedy)]
    # A log has the last collectives of all groups: if none of this group is among them, the rank began the one before.
    before = min(waits) - 1
    begun = {rank: max(entries, default=before) for rank, entries in calls.items() if entries or rank in members}
    # The times below are PyTorch's defaults (c10d/Backend.hpp:19, c10d/ProcessGroupNCCL.hpp:157). A script may set
    # others.
    sentence = f"All ranks have begun collective {before + 1}, and it does not end: their connection fails"
    remedy = "PyTorch ends the wait after 30 minutes with gloo and 10 with NCCL"
    return _late(logs, begun, calls) or [Finding(sentence, remedy)]


def _late(logs: list[RankLog], begun: dict[int, int], calls: Calls) -> list[Finding]:
    """Say where the first ranks are that have not begun a collective of their group in which others wait."""
    last = max(begun.values(), default=0)
    late = []
    for log in [log for log in logs if begun.get(log.rank, last) < last][:MOST]:
        missing = begun[log.rank] + 1
        # --- where the others are: the logs of those that are further ahead may no longer have the collective
        others = [rank for rank, index in begun.items() if index >= missing]
        known = [_name(calls[rank][missing]) for rank in others if missing in calls[rank]]
        call = known[0] if known else f"collective {missing}"
        are = "is" if len(others) == 1 else "are"
        # --- where this rank is
        waits = [entry for entry in log.recent if not entry.ended]
        place = f"it is at {log.place or 'work'}"
        if _has_ended(log):
            place = f"it {log.place}"
        elif waits:
            place = f"it waits in {_name(waits[0])}"
        sentence = f"Rank {log.rank} has not begun {call}, where {_ranks(others)} {are}: {place}"
        remedy = f"look at what rank {log.rank} does there: all ranks of a group must make the same calls"
        late.append(Finding(sentence, remedy))
    return late


def _has_ended(log: RankLog) -> bool:
    # The last place that a rank writes is "ended", or "ended with" its error and the place of that.
    return (log.place or "").startswith("ended")


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

MAX_BYTES = 16 * 2**20  # PyTorch keeps 2000 collectives, in 1 MB


def dumps(folder: Path) -> list[RankLog]:
    """Return the logs of ranks by their dumps in JSON, a file for each rank: nccl_trace_rank_3.json."""
    named = ((path, re.fullmatch(r".*rank_(\d{1,5})", path.stem, re.ASCII)) for path in sorted(folder.glob("*.json")))
    return [_log_of(path, int(name[1])) for path, name in named if name]


def _log_of(path: Path, rank: int) -> RankLog:
    try:
        # PyTorch's own analyser loads dumps as pickles (flight_recorder/components/loader.py:35). A pickle can run code
        # while it is loaded, so a stranger's dump is read in JSON only.
        entries = files.from_json(files.read(path, MAX_BYTES))["entries"]
        # A send or a receive counts by itself, and needs two ranks only.
        recent = [collective_of(entry) for entry in entries if not entry.get("is_p2p")]
    except Exception as error:  # a stranger's file may hold another type wherever PyTorch writes one
        what = f"{str(path)!r:.300} is no Flight Recorder dump ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "name a run, or a folder of dumps in JSON") from None
    written_unix_s = path.stat().st_mtime
    # A dump does not say how many ranks there are.
    return RankLog(rank=rank, ranks=rank + 1, written_unix_s=written_unix_s, still_s=0.0, recorded=True, recent=recent)
