"""Explains a run that hangs: which rank waits in which collective for which rank, from the ranks' log files."""

import time
from collections import defaultdict

from study.records.collectives import Collective, RankLog
from study.records.findings import Finding

MAX_NAMED = 8  # ranks in a sentence
EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")  # all ranks must give the same size
DEFAULT = "0"  # the name of the group of all ranks
STUCK = "PyTorch ends the wait after its timeout, 30 minutes with gloo and 10 with NCCL; end the processes yourself"


def hangs(logs: list[RankLog]) -> list[Finding]:
    """Where ranks wait for each other, by their logs. Empty if no rank is seen to wait."""
    return [finding for group in _groups(logs) for finding in _in_group(group, logs)]


def state(logs: list[RankLog], now_unix_s: float | None = None) -> str:
    """A sentence on when the ranks last wrote their logs, and which of them stood still then."""
    age_s = (time.time() if now_unix_s is None else now_unix_s) - max(log.written_unix_s for log in logs)
    if not any(log.recorded for log in logs):
        return "PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0, or there is no process group"
    still = [log.rank for log in logs if log.recent]
    how = f"{_ranks(still, low=True)} stood still" if still else "collectives came and went"
    return f"{len(logs)} of {logs[0].ranks} ranks have a log, the newest of {age_s:.0f} s ago: {how}"


def _groups(logs: list[RankLog]) -> list[str]:
    """The names of all groups; the group of all ranks comes first."""
    return list(dict.fromkeys([DEFAULT, *(entry.group for log in logs for entry in log.recent)]))


def _in_group(group: str, logs: list[RankLog]) -> list[Finding]:
    """The first collective in which ranks differ; otherwise the ranks that have not begun what the others wait in."""
    over = {log.rank for log in logs if (log.place or "").startswith("ended")}  # these ranks do not wait
    by_rank = {log.rank: {e.index: e for e in log.recent if e.group == group} for log in logs if log.recent}
    members = {rank for log in logs for rank in log.groups.get(group, [])}
    if group == DEFAULT:
        members |= set(range(logs[0].ranks if logs else 0))
    members |= {rank for rank, seen in by_rank.items() if seen}
    by_rank = {rank: seen for rank, seen in by_rank.items() if rank in members}
    if branch := _branches(group, by_rank):
        return [branch]
    # On a GPU collectives begin ahead of time: a rank waits in the first that has not ended.
    waits = {
        rank: next(seen[index] for index in sorted(seen) if not seen[index].ended)
        for rank, seen in by_rank.items()
        if rank not in over and not all(entry.ended for entry in seen.values())
    }
    if not waits:  # ranks that waited for a rank that ended may have ended with an error by now
        begun = {rank: max(seen) for rank, seen in by_rank.items() if seen}
        behind = [rank for rank in sorted(begun) if rank in over and begun[rank] < max(begun.values())]
        return [_behind(log, group, by_rank, begun, waits) for log in logs if log.rank in behind[:MAX_NAMED]]
    first = waits[min(waits)]
    waiting = f"{_ranks(list(waits))} {_plural('wait', waits)} in {_name(first)}"
    if gone := sorted(members - {log.rank for log in logs}):
        sentence = f"{waiting}, and {_ranks(gone, low=True)} left no log: ended, never started, or died at once"
        return [Finding(sentence, f"read the output of {_ranks(gone, low=True)}")]
    if busy := sorted(members - by_rank.keys()):
        sentence = f"{waiting}, and {_ranks(busy, low=True)} {_plural('was', busy)} at work when last heard of"
        remedy = f"look at what {_ranks(busy, low=True)} does: a long step, or code that lets no other thread run"
        return [Finding(sentence, remedy)]
    # A log has the last collectives of all groups: of this group there may be none among them.
    begun = {rank: max(seen, default=first.index - 1) for rank, seen in by_rank.items()}
    behind = [rank for rank in sorted(begun) if begun[rank] < max(begun.values())]
    if behind:
        by_log = {log.rank: log for log in logs}
        return [_behind(by_log[rank], group, by_rank, begun, waits) for rank in behind[:MAX_NAMED]]
    if len(waits) < len(members):
        sentence = f"{waiting}, which {_ranks(sorted(members - set(waits)), low=True)} left"
        return [Finding(sentence, "wait: all ranks have called it; if it lasts, look at the network")]
    sentence = f"All {len(members)} ranks wait in {_name(first)} together: what fails is the connection between them"
    return [Finding(sentence, STUCK)]


def _branches(group: str, by_rank: dict[int, dict[int, Collective]]) -> Finding | None:
    """The first index at which ranks called different kinds, or gave different sizes where they must be equal."""
    for index in sorted({index for seen in by_rank.values() for index in seen}):
        calls = defaultdict(list)
        for rank, seen in by_rank.items():
            if index in seen:
                entry = seen[index]
                size = f" of {entry.elements} elements" if entry.kind in EQUAL_SIZES and entry.elements else ""
                calls[entry.kind, size].append(rank)
        if len(calls) == 1:
            continue
        same_kind = len({kind for kind, _ in calls}) == 1
        calls = sorted(calls.items(), key=lambda call: -len(call[1]))
        parts = [f"{_ranks(ranks, low=True)} in {kind}{size if same_kind else ''}" for (kind, size), ranks in calls]
        sentence = f"Ranks took different branches: at collective {index}{_of(group)}, {', '.join(parts)}"
        remedy = "look for an `if` on the rank, or for data that differs, around a call that all ranks must make"
        return Finding(sentence, remedy)
    return None


def _behind(log: RankLog, group: str, by_rank: dict, begun: dict[int, int], waits: dict) -> Finding:
    """The finding for a rank that has not begun the collective in which others wait: where it is instead."""
    rank, missing = log.rank, begun[log.rank] + 1
    others = [other for other in sorted(begun) if begun[other] >= missing]
    ahead = next((by_rank[other][missing] for other in others if missing in by_rank[other]), None)
    where = _name(ahead) if ahead else f"collective {missing}{_of(group)}"
    others_are = f"{_ranks(others, low=True)} {_plural('is', others)}"
    ended = (log.place or "").startswith("ended")
    elsewhere = None if ended else next((entry for entry in log.recent if not entry.ended), None)
    if rank in waits:
        sentence = f"Rank {rank} waits in {_name(waits[rank])}, {others_are} at {where}"
    elif elsewhere:
        sentence = f"Rank {rank} waits in {_name(elsewhere)} and has not begun {where}, where {others_are}"
    else:
        sentence = f"Rank {rank} has not begun {where}, where {others_are}"
        if log.place:
            sentence += f": it {'' if ended else 'is at '}{log.place}"
    return Finding(sentence, f"look at what rank {rank} does there: all ranks of a group must make the same calls")


def _name(entry: Collective) -> str:
    return f"{entry.kind} {entry.index}{_of(entry.group)}"


def _plural(verb: str, ranks) -> str:
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
