"""Explain a run that hangs: which rank waits in which collective for which rank, and why, by the ranks' log files.

The causes are in hangs.toml, the surest first. They go by the functions in which the ranks are.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable

from study.records.collectives import Collective, RankLog
from study.watch.findings import Finding, finding, texts

MOST = 8  # ranks in a sentence
DEFAULT = "0"  # the name of the group of all ranks
ENDED = re.compile("ended with (?!KeyboardInterrupt)")  # Ctrl-C ends what already hangs
Calls = dict[int, dict[int, Collective]]  # the last collectives of a group, by rank and index


def state(logs: list[RankLog]) -> str:
    """Return a sentence on when the ranks last wrote their logs."""
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    age_s = time.time() - max(log.written_unix_s for log in logs)
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago"


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    stacks = {log.rank: "\n".join(log.calls) for log in logs if log.calls}
    if len(stacks) < 2 or not hangs(logs):
        return []
    has_ended = any(ENDED.match(log.place or "") for log in logs)
    for id, cause in texts("hangs.toml").items():
        ranks = [rank for rank, stack in stacks.items() if re.search(cause.get("one", ""), stack)]
        others = [rank for rank in stacks if rank not in ranks]
        is_one = "one" not in cause or (ranks and others)
        is_both = all(re.search(cause.get("both", ""), stack) for stack in stacks.values())
        if is_one and is_both and cause.get("ended", has_ended) == has_ended:
            return [finding(id, ranks=", ".join(map(str, ranks)), others=", ".join(map(str, others)))]
    return []


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    groups = dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)])
    return [finding for group in groups for finding in _in_group(group, logs)]


def _in_group(group: str, logs: list[RankLog]) -> list[Finding]:
    calls = {log.rank: {entry.index: entry for entry in log.recent if entry.group == group} for log in logs}
    if branches := _different_branches(calls):
        return [branches]
    members = {rank for log in logs for rank in log.groups.get(group, [])} | {rank for rank in calls if calls[rank]}
    if group == DEFAULT and logs:
        members |= set(range(logs[0].ranks))
    ended = {log.rank for log in logs if (log.place or "").startswith("ended")}
    # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
    pending = {rank: [index for index, entry in entries.items() if not entry.ended] for rank, entries in calls.items()}
    waits = {rank: min(indices) for rank, indices in pending.items() if indices and rank not in ended}
    # A log has the last collectives of all groups: of this group there may be none among them.
    before = [min(waits.values()) - 1] if waits else []
    begun = {rank: max(calls[rank] or before) for rank in members & calls.keys() if calls[rank] or before}
    behind = [rank for rank in sorted(begun) if begun[rank] < max(begun.values())][:MOST]
    if not waits:  # ranks that waited for one that ended early may have ended with an error by now
        behind = [rank for rank in behind if rank in ended]
    elif gone := members - calls.keys():
        remedy = f"read the output of {_ranks(gone)}"
        return [Finding(f"{_ranks(gone).capitalize()} left no log (ended, or never started), and others wait", remedy)]
    elif not behind:
        sentence = f"All ranks have begun collective {before[0] + 1}, and it does not end: their connection fails"
        return [Finding(sentence, "PyTorch ends the wait after 30 minutes with gloo and 10 with NCCL")]
    return [_behind(log, begun, calls) for log in logs if log.rank in behind]


def _behind(log: RankLog, begun: dict[int, int], calls: Calls) -> Finding:
    """Return the finding for a rank that has not begun the collective in which others wait: where it is instead."""
    missing = begun[log.rank] + 1
    others = [rank for rank, index in begun.items() if index >= missing]
    known = [_name(calls[rank][missing]) for rank in others if missing in calls[rank]]
    waits = [_name(entry) for entry in log.recent if not entry.ended]
    place = f"it is at {log.place or 'work'}"
    if (log.place or "").startswith("ended"):
        place = f"it {log.place}"
    elif waits:
        place = f"it waits in {waits[0]}"
    are = "is" if len(others) == 1 else "are"
    sentence = f"Rank {log.rank} has not begun {[*known, f'collective {missing}'][0]}, where {_ranks(others)} {are}"
    remedy = f"look at what rank {log.rank} does there: all ranks of a group must make the same calls"
    return Finding(f"{sentence}: {place}", remedy)


def _different_branches(calls: Calls) -> Finding | None:
    """Find the first index at which ranks called different kinds, or reduced different sizes."""
    for index in sorted({index for entries in calls.values() for index in entries}):
        sides: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entries in calls.items():
            if entry := entries.get(index):
                size = f" of {entry.elements} elements" if entry.kind == "all_reduce" and entry.elements else ""
                sides[_name(entry) + size].append(rank)
        if len(sides) > 1:
            words = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in sides.items())
            remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
            return Finding(f"Ranks took different branches: {words}", remedy)
    return None


def _name(entry: Collective) -> str:
    group = "" if entry.group == DEFAULT else f" of group {entry.group[:12]}"
    return f"{entry.kind} {entry.index}{group}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2`."""
    names = [str(rank) for rank in sorted(ranks)]
    more = ", ..." if len(names) > MOST else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:MOST])}{more}"
