"""Explain a run that hangs: which rank waits in which collective for which rank, from the ranks' log files."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from study.records.collectives import Collective, RankLog

MAX_NAMED = 8  # ranks in a sentence
EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")  # all ranks must give the same size
DEFAULT = "0"  # the name of the group of all ranks
STUCK = "PyTorch ends the wait after its timeout, 30 minutes with gloo and 10 with NCCL; end the processes yourself"


@dataclass(frozen=True)
class Finding:
    """Something wrong or costly in a run. `evidence` is the claim or the script of reproductions/ that shows it."""

    sentence: str
    remedy: str | None = None
    evidence: str | None = None
    id: str | None = None  # the rule that found it
    lost_s: float | None = None  # what it costs in a step
    memory_bytes: int | None = None  # what it costs at the peak of a rank
    traffic_bytes: int | None = None  # what it costs in a step


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    groups = dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)])
    return [finding for name in groups for finding in _in_group(_group(name, logs))]


def state(logs: list[RankLog], now_unix_s: float | None = None) -> str:
    """Return a sentence on when the ranks last wrote their logs, and which of them stood still then."""
    age_s = (time.time() if now_unix_s is None else now_unix_s) - max(log.written_unix_s for log in logs)
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    still = [log.rank for log in logs if log.recent]
    motion = f"{_ranks(still)} stood still" if still else "collectives came and went"
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago: {motion}"


@dataclass(frozen=True)
class Group:
    """Where the ranks of one process group are, by the last logs of all ranks."""

    name: str
    logs: dict[int, RankLog]  # by rank, of all groups
    members: set[int]
    calls: dict[int, dict[int, Collective]]  # the collectives of the group by rank and index
    waits: dict[int, Collective]  # by rank, the first collective that has not ended

    @property
    def first(self) -> Collective:
        """Return the collective in which the first of the waiting ranks is."""
        return self.waits[min(self.waits)]

    @property
    def begun(self) -> dict[int, int]:
        """Return the index of the last collective that each rank has begun."""
        # A log has the last collectives of all groups: of this group there may be none among them.
        before = [self.first.index - 1] if self.waits else []
        return {rank: max(entries or before) for rank, entries in self.calls.items() if entries or before}

    @property
    def last_ones(self) -> list[int]:
        """Return the ranks that have begun fewer collectives than others, at most as many as a person reads."""
        begun = self.begun
        return [rank for rank in sorted(begun) if begun[rank] < max(begun.values())][:MAX_NAMED]


def _group(name: str, logs: list[RankLog]) -> Group:
    members = {rank for log in logs for rank in log.groups.get(name, [])}
    if name == DEFAULT and logs:
        members |= set(range(logs[0].ranks))
    group = Group(name, {log.rank: log for log in logs}, members, {}, {})
    for log in logs:
        entries = {entry.index: entry for entry in log.recent if entry.group == name}
        if entries or (log.recent and log.rank in members):
            members.add(log.rank)
            group.calls[log.rank] = entries
        # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
        pending = [index for index, entry in entries.items() if not entry.ended]
        if pending and not _has_ended(log):
            group.waits[log.rank] = entries[min(pending)]
    return group


def _has_ended(log: RankLog) -> bool:
    return (log.place or "").startswith("ended")


def _in_group(group: Group) -> list[Finding]:
    """Return what the first rule that fits finds."""
    if branches := _different_branches(group):
        return [branches]
    if not group.waits:  # ranks that waited for one that ended early may have ended with an error by now
        return [_behind(group, rank) for rank in group.last_ones if _has_ended(group.logs[rank])]
    waiting = f"{_ranks(group.waits).capitalize()} {_verb(group.waits, 'waits', 'wait')} in {_name(group.first)}"
    if gone := group.members - group.logs.keys():
        sentence = f"{waiting}, and {_ranks(gone)} left no log: ended, never started, or died at once"
        return [Finding(sentence, f"read the output of {_ranks(gone)}")]
    if busy := group.members - group.calls.keys():
        sentence = f"{waiting}, and {_ranks(busy)} {_verb(busy, 'was', 'were')} at work when last heard of"
        remedy = f"look at what {_ranks(busy)} does: a long step, or code that lets no other thread run"
        return [Finding(sentence, remedy)]
    if group.last_ones:
        return [_behind(group, rank) for rank in group.last_ones]
    if left := group.members - group.waits.keys():
        remedy = "wait: all ranks have called it; if it lasts, look at the network"
        return [Finding(f"{waiting}, which {_ranks(left)} left", remedy)]
    together = f"All {len(group.members)} ranks wait in {_name(group.first)} together"
    return [Finding(f"{together}: what fails is the connection between them", STUCK)]


def _different_branches(group: Group) -> Finding | None:
    """Find the first index at which ranks called different kinds, or gave different sizes where they must be equal."""
    for index in sorted({index for entries in group.calls.values() for index in entries}):
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entries in group.calls.items():
            if entry := entries.get(index):
                size = f" of {entry.elements} elements" if entry.kind in EQUAL_SIZES and entry.elements else ""
                calls[entry.kind + size].append(rank)
        if len(calls) > 1:
            in_order = sorted(calls.items(), key=lambda call: -len(call[1]))
            sides = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in in_order)
            sentence = f"Ranks took different branches: at collective {index}{_group_words(group.name)}, {sides}"
            remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
            return Finding(sentence, remedy)
    return None


def _behind(group: Group, rank: int) -> Finding:
    """Return the finding for a rank that has not begun the collective in which others wait: where it is instead."""
    log = group.logs[rank]
    missing = group.begun[rank] + 1
    others = [other for other, begun in group.begun.items() if begun >= missing]
    ahead = next((group.calls[other][missing] for other in others if missing in group.calls[other]), None)
    place = _name(ahead) if ahead else f"collective {missing}{_group_words(group.name)}"
    others_are = f"{_ranks(others)} {_verb(others, 'is', 'are')}"
    elsewhere = next((entry for entry in log.recent if not entry.ended), None)
    sentence = f"Rank {rank} has not begun {place}, where {others_are}"
    if rank in group.waits:
        sentence = f"Rank {rank} waits in {_name(group.waits[rank])}, {others_are} at {place}"
    elif _has_ended(log):
        sentence += f": it {log.place}"
    elif elsewhere:
        sentence = f"Rank {rank} waits in {_name(elsewhere)} and has not begun {place}, where {others_are}"
    elif log.place:
        sentence += f": it is at {log.place}"
    return Finding(sentence, f"look at what rank {rank} does there: all ranks of a group must make the same calls")


def _name(entry: Collective) -> str:
    return f"{entry.kind} {entry.index}{_group_words(entry.group)}"


def _group_words(group: str) -> str:
    return "" if group == DEFAULT else f" of group {group[:12]}"


def _verb(ranks: Iterable[int], one: str, several: str) -> str:
    return one if len(list(ranks)) == 1 else several


def _ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1 and 2`; of many ranks the first few and the number of the others."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > MAX_NAMED:
        names[MAX_NAMED:] = [f"{len(names) - MAX_NAMED} more"]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
