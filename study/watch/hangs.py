"""Explain a run that hangs: which rank waits in which collective for which rank, and why.

It goes by the log files of watched ranks, or by Flight Recorder dumps of others. The causes are in known/hangs.toml,
the surest first. They go by the functions in which the ranks are.
"""

import re
import time
from collections.abc import Iterable
from pathlib import Path

from study.core import files
from study.core.errors import Stop
from study.core.text import lasting
from study.known.findings import Finding, causes_of_hangs, finding
from study.records.collectives import LoggedCall, RankLog, collective_of

MOST = 8  # ranks in a sentence
MOST_GROUPS = 200  # of ranks: with tensor and pipeline parallelism a rank is in some ten
# All ranks give these inputs of one size and dtype. PyTorch's own analyser wants so of more kinds, but not of
# all_to_all and scatter (flight_recorder/components/types.py).
EQUAL = "_?(all_?reduce|all_gather|reduce|broadcast)"
DEFAULT = "0"  # the name of the group of all ranks
Calls = dict[int, dict[int, LoggedCall]]  # the last collectives of a group, by rank and index


def state(logs: list[RankLog]) -> str:
    """Return a sentence on when the ranks last wrote their logs. Those without the common folder have none here."""
    # The ring is on by default, with 2000 entries (c10d/FlightRecorder.hpp:110), also for gloo: somebody has set it to
    # 0.
    if not any(log.recorded for log in logs):
        return finding("nothing_recorded").said
    age_s = max(0, time.time() - max(log.written_unix_s for log in logs))  # clocks of machines differ
    # A dump of gloo does not say which ranks there are.
    ranks = logs[-1].ranks if DEFAULT in logs[-1].groups else "an unknown number of"
    return f"{len(logs)} of {ranks} ranks have a log, the newest of {lasting(age_s)} ago."


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    # Where ranks wait, and how they ended, is read beside their functions.
    stacks = {
        str(log.rank): "\n".join(
            [*log.calls, *(f"waits in {each.kind}" for each in log.recent if not each.ended), f"{log.place}"]
        )
        for log in logs
    }
    seen = {each.id for each in hangs(logs)}
    # Of one rank alone nothing can be told, nor without the functions of a rank that may be the cause: only ranks that
    # stand still have written them. Nor if all are in the same call. But an error that was seen is told.
    known = (
        1 < len(stacks) == logs[0].ranks and all(log.calls for log in logs) and not seen <= {"all_began", "some_began"}
    )
    # Of 48 trainings that hang, 19 end at once with gloo. The patterns were written on the others, and are tested on
    # them: how many hangs of strangers they name is not known (reports/log.md).
    for id, cause in causes_of_hangs().items():
        ranks = [rank for rank, stack in stacks.items() if re.search(cause["calls"], stack)]
        others = [rank for rank in stacks if rank not in ranks]
        is_told = known or cause.get("without_all")
        if seen and ranks and is_told and bool(others) == (cause["ranks"] == "some"):
            return [finding(id, ranks=", ".join(ranks), others=", ".join(others))]
    return []


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    # Each group of ranks counts its collectives by itself: the ranks of a group are compared by the indices.
    sends = [f"rank {log.rank} in {log.place}" for log in logs if re.match("(send|recv) |coalesced$", f"{log.place}")]
    seen = [finding("sends", calls=", ".join(sends[:MOST]))] if sends else []
    groups = dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)])
    for group in [*groups][:MOST_GROUPS]:
        calls = {log.rank: {entry.index: entry for entry in log.recent if entry.group == group} for log in logs}
        # After different calls the indices of the ranks say nothing more.
        seen += _different_branches(calls) or _waiting(group, logs, calls)
    return seen


def _different_branches(calls: Calls) -> list[Finding]:
    """Find the first index at which ranks called different kinds, or gave different sizes or dtypes."""
    for index in sorted(set().union(*calls.values())):
        sides: dict[str, list[int]] = {}
        for rank, entries in calls.items():
            if index not in entries:  # it has not begun this one, or its log begins later
                continue
            entry = entries[index]
            call = _name(entry)
            if re.match(EQUAL, entry.kind) and entry.elements:
                call += f" of {entry.elements} elements of dtype {entry.dtype}"
            sides.setdefault(call, []).append(rank)
        if len(sides) > 1:
            words = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in sides.items())
            return [finding("different_calls", calls=words)]
    return []


def _waiting(group: str, logs: list[RankLog], calls: Calls) -> list[Finding]:
    """Return which ranks of a group have not begun the collective in which others wait."""
    # On a GPU collectives begin ahead of time: a rank waits in its first that has not ended. That of one rank may have
    # ended on another, which is further.
    waits = [
        min(unended)
        for log in logs
        if (unended := [index for index, entry in calls[log.rank].items() if not entry.ended]) and not _has_ended(log)
    ]
    begun = {rank: max(entries) for rank, entries in calls.items() if entries}
    if not waits:
        # Ranks that waited for one that ended early may have ended with an error by now.
        return _late(list(filter(_has_ended, logs)), begun, calls, max(begun.values(), default=0))
    first = max(waits)
    listed = {rank for log in logs for rank in log.groups.get(group, ())}
    members = listed
    if not listed and group == DEFAULT:  # there are at least those that have a log, and those before them
        members = set(range(logs[-1].ranks))
    seen = []
    if gone := members - calls.keys():
        seen = [finding("no_log", ranks=_ranks(gone).capitalize())]
    # A log has the last collectives of all groups: if none of this group is among them, the rank began the one before.
    begun = dict.fromkeys(members & calls.keys(), first - 1) | begun
    seen += _late(logs, begun, calls, first)
    if seen:
        return seen
    # On a GPU a collective begins when it is enqueued.
    id = "all_began" if listed else "some_began"
    return [finding(id, ranks=_ranks(begun).capitalize(), collective=first, group=group[:12])]


def _late(logs: list[RankLog], begun: dict[int, int], calls: Calls, waited: int) -> list[Finding]:
    """Say where the first ranks are that have not begun the collective of their group in which others wait."""
    late = []
    for log in [log for log in logs if begun.get(log.rank, waited) < waited][:MOST]:
        missing = begun[log.rank] + 1
        # --- where the others are: the logs of those that are further ahead may no longer have the collective
        others = [rank for rank, index in begun.items() if index >= missing]
        known = [_name(calls[rank][missing]) for rank in others if missing in calls[rank]]
        call = known[0] if known else f"collective {missing}"
        are = "is" if len(others) == 1 else "are"
        # --- where this rank is
        waits = [entry for entry in log.recent if not entry.ended]
        place = f"it is at {log.place or 'a place that its log does not name'}"
        if _has_ended(log):
            place = f"it {log.place}"
        elif waits:
            place = f"it waits in {_name(waits[0])}"
        late.append(finding("not_begun", rank=log.rank, call=call, others=f"{_ranks(others)} {are}", place=place))
    return late


def _has_ended(log: RankLog) -> bool:
    # The last place that a rank writes is "ended", or "ended with" its error and the place of that.
    return (log.place or "").startswith("ended")


def _name(entry: LoggedCall) -> str:
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
    """Return the logs of ranks by their dumps in JSON, a file for each rank: nccl_trace_rank_3, or with .json."""
    named: dict[int, Path] = {}
    for path in sorted(folder.glob("*rank_*")):
        name = re.fullmatch(r".*rank_(\d{1,5})(\.json)?", path.name, re.ASCII)
        if name is None or not path.is_file():
            continue
        rank = int(name[1])
        # What was made of a pickle, and has .json, replaces it here.
        if rank in named and path.name != f"{named[rank].name}.json":
            what = f"{named[rank].name!r:.80} and {path.name!r:.80} are both dumps of rank {rank}"
            raise Stop(what, "keep those of one moment in a folder, one of each rank")
        named[rank] = path
    return [_log_of(path, rank) for rank, path in sorted(named.items())]


def _log_of(path: Path, rank: int) -> RankLog:
    try:
        # PyTorch's own analyser loads dumps as pickles (flight_recorder/components/loader.py:35). A pickle can run code
        # while it is loaded, so a stranger's dump is read in JSON only.
        dump = files.from_json(files.read(path, MAX_BYTES))
        # NCCL's says which ranks are in each group, and gloo's not. One without entries has none
        # (c10d/FlightRecorderDetail.hpp:581).
        groups = {name: files.from_json(each["ranks"]) for name, each in dump["pg_config"].items()}
        recent = []
        # A send or a receive counts by itself, and needs two ranks only. Those of a batch are never marked as ended:
        # the last entry with their number is the batch, `coalesced`, and that is (c10d/ProcessGroupNCCL.cpp).
        pairs = {}
        for entry in dump.get("entries", []):
            call = collective_of(entry)
            if entry.get("is_p2p"):
                pairs[call.group, entry.get("p2p_seq_id")] = call
            else:
                recent.append(call)
        waits = [call.kind for call in pairs.values() if not call.ended]
        return RankLog(
            rank=rank,
            ranks=1 + max([rank, *groups.get(DEFAULT, [])]),
            written_unix_s=path.stat().st_mtime,
            still_s=0.0,
            recorded=True,
            groups=groups,
            recent=recent,
            place=waits[0] if waits else None,
        )
    except Exception as error:  # a stranger's file may hold another type wherever PyTorch writes one
        why = f"it does not have {error}" if isinstance(error, KeyError) else files.why(error)
        what = f"{str(path)!r:.300} is no Flight Recorder dump in JSON ({why})"
        # Done with what `_dump_fr_trace` of torch 2.13 gives. All dumps have this format (c10d/FlightRecorder.hpp:302).
        remedy = "PyTorch writes pickles: load one that you trust with `pickle`, and write it with `json` (GUIDE.md)"
        raise Stop(what, f"name a run, or a folder of dumps in JSON. {remedy}") from None
