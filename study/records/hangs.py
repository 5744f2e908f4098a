"""Explains a run that hangs: which rank waits in which collective for which rank, from the ranks' log files."""

import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from study.records.collectives import Collective, RankLog
from study.records.findings import Finding

MAX_NAMED = 8  # ranks in a sentence
EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")  # all ranks must give the same size
DEFAULT = "0"  # the name of the group of all ranks
STUCK = "PyTorch ends the wait after its timeout, 30 minutes with gloo and 10 with NCCL; end the processes yourself"


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Return where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    return [finding for group in _groups(logs) for finding in _in_group(_group_state(group, logs))]


def state(logs: list[RankLog], now_unix_s: float | None = None) -> str:
    """Return a sentence on when the ranks last wrote their logs, and which of them stood still then."""
    age_s = (time.time() if now_unix_s is None else now_unix_s) - max(log.written_unix_s for log in logs)
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    still = [log.rank for log in logs if log.recent]
    how = f"{_ranks(still, low=True)} stood still" if still else "collectives came and went"
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago: {how}"


def _groups(logs: list[RankLog]) -> list[str]:
    """Return the names of all groups; the group of all ranks comes first."""
    return list(dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)]))


@dataclass(frozen=True)
class GroupState:
    """Where the ranks of one group are, by the last logs of all ranks."""

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
    def waiting(self) -> str:
        return f"{_ranks(list(self.waits))} {_plural('wait', self.waits)} in {_name(self.first)}"


def _group_state(group: str, logs: list[RankLog]) -> GroupState:
    calls = {log.rank: {e.index: e for e in log.recent if e.group == group} for log in logs if log.recent}
    members = {rank for log in logs for rank in log.groups.get(group, [])}
    members |= {rank for rank, entries in calls.items() if entries}
    if group == DEFAULT and logs:
        members |= set(range(logs[0].ranks))
    calls = {rank: entries for rank, entries in calls.items() if rank in members}
    by_rank = {log.rank: log for log in logs}
    waits = {}
    for rank, entries in calls.items():
        # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
        pending = [entries[index] for index in sorted(entries) if not entries[index].ended]
        if pending and not _has_ended(by_rank[rank]):
            waits[rank] = pending[0]
    return GroupState(group, by_rank, members, calls, waits)


def _has_ended(log: RankLog) -> bool:
    return (log.place or "").startswith("ended")


def _in_group(state: GroupState) -> list[Finding]:
    """Return what the first rule that fits finds."""
    for rule in (_different_branches, _ended_early):
        if found := rule(state):
            return found
    if not state.waits:
        return []
    for rule in (_without_log, _at_work, _behind_others, _left_by_some):
        if found := rule(state):
            return found
    words = f"All {len(state.members)} ranks wait in {_name(state.first)} together"
    return [Finding(f"{words}: what fails is the connection between them", STUCK)]


def _different_branches(state: GroupState) -> list[Finding]:
    """Find the first index at which ranks called different kinds, or gave different sizes where they must be equal."""
    for index in sorted({index for entries in state.calls.values() for index in entries}):
        calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, entries in state.calls.items():
            if index in entries:
                calls[entries[index].kind, _size(entries[index])].append(rank)
        if len(calls) > 1:
            sentence = f"Ranks took different branches: at collective {index}{_of(state.name)}, {_sides(calls)}"
            remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
            return [Finding(sentence, remedy)]
    return []


def _size(entry: Collective) -> str:
    return f" of {entry.elements} elements" if entry.kind in EQUAL_SIZES and entry.elements else ""


def _sides(calls: dict[tuple[str, str], list[int]]) -> str:
    """Return which ranks are in which call, most ranks first. Sizes matter only between calls of one kind."""
    same_kind = len({kind for kind, _ in calls}) == 1
    in_order = sorted(calls.items(), key=lambda call: -len(call[1]))
    return ", ".join(f"{_ranks(r, low=True)} in {kind}{size if same_kind else ''}" for (kind, size), r in in_order)


def _ended_early(state: GroupState) -> list[Finding]:
    """Find ranks that ended before the others. Ranks that waited for them may have ended with an error by now."""
    if state.waits:
        return []
    begun = {rank: max(entries) for rank, entries in state.calls.items() if entries}
    return [_behind(state, rank, begun) for rank in _last_ones(begun) if _has_ended(state.logs[rank])]


def _last_ones(begun: dict[int, int]) -> list[int]:
    """Return the ranks that have begun fewer collectives than others, at most as many as a person reads."""
    return [rank for rank in sorted(begun) if begun[rank] < max(begun.values())][:MAX_NAMED]


def _without_log(state: GroupState) -> list[Finding]:
    gone = sorted(state.members - state.logs.keys())
    if not gone:
        return []
    sentence = f"{state.waiting}, and {_ranks(gone, low=True)} left no log: ended, never started, or died at once"
    return [Finding(sentence, f"read the output of {_ranks(gone, low=True)}")]


def _at_work(state: GroupState) -> list[Finding]:
    busy = sorted(state.members - state.calls.keys())
    if not busy:
        return []
    sentence = f"{state.waiting}, and {_ranks(busy, low=True)} {_plural('was', busy)} at work when last heard of"
    remedy = f"look at what {_ranks(busy, low=True)} does: a long step, or code that lets no other thread run"
    return [Finding(sentence, remedy)]


def _behind_others(state: GroupState) -> list[Finding]:
    # A log has the last collectives of all groups: of this group there may be none among them.
    begun = {rank: max(entries, default=state.first.index - 1) for rank, entries in state.calls.items()}
    return [_behind(state, rank, begun) for rank in _last_ones(begun)]


def _left_by_some(state: GroupState) -> list[Finding]:
    left = sorted(state.members - state.waits.keys())
    if not left:
        return []
    sentence = f"{state.waiting}, which {_ranks(left, low=True)} left"
    return [Finding(sentence, "wait: all ranks have called it; if it lasts, look at the network")]


def _behind(state: GroupState, rank: int, begun: dict[int, int]) -> Finding:
    """Return the finding for a rank that has not begun the collective in which others wait: where it is instead."""
    log, missing = state.logs[rank], begun[rank] + 1
    others = [other for other in sorted(begun) if begun[other] >= missing]
    ahead = next((state.calls[other][missing] for other in others if missing in state.calls[other]), None)
    where = _name(ahead) if ahead else f"collective {missing}{_of(state.name)}"
    sentence = _instead(state, log, where, f"{_ranks(others, low=True)} {_plural('is', others)}")
    return Finding(sentence, f"look at what rank {rank} does there: all ranks of a group must make the same calls")


def _instead(state: GroupState, log: RankLog, where: str, others_are: str) -> str:
    """Say where a rank is, while the others are `where`."""
    ended = _has_ended(log)
    elsewhere = None if ended else next((entry for entry in log.recent if not entry.ended), None)
    if log.rank in state.waits:
        return f"Rank {log.rank} waits in {_name(state.waits[log.rank])}, {others_are} at {where}"
    if elsewhere:
        return f"Rank {log.rank} waits in {_name(elsewhere)} and has not begun {where}, where {others_are}"
    sentence = f"Rank {log.rank} has not begun {where}, where {others_are}"
    if not log.place:
        return sentence
    return f"{sentence}: it {log.place}" if ended else f"{sentence}: it is at {log.place}"


def _name(entry: Collective) -> str:
    return f"{entry.kind} {entry.index}{_of(entry.group)}"


def _plural(verb: str, ranks: Collection[int]) -> str:
    several = {"wait": "wait", "is": "are", "was": "were"}
    return several[verb] if len(ranks) > 1 else {"wait": "waits"}.get(verb, verb)


def _of(group: str) -> str:
    return "" if group == DEFAULT else f" of group {group[:12]}"


def _ranks(ranks: list[int], low: bool = False) -> str:
    """`Rank 3`, `Ranks 0, 1 and 2`; of many ranks the first few and the number of the others."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    shown = [str(rank) for rank in ranks[:MAX_NAMED]]
    last = f"{len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else shown.pop()
    names = f"{', '.join(shown)} and {last}" if shown else last
    return f"{noun if low else noun.capitalize()} {names}"
