"""Read what NCCL's watchdog, gloo and PyTorch's reports say: which rank is behind, in which collective.

The watchdog of each rank writes the first collective of a group that did not end in time. A rank that is not in it
writes nothing, or another one.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import with_config

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.words import Sentence, meets, only
from study.core.tables import NO_OTHER_KEYS, Regex, read_table

WAITS = Path(__file__).with_name("waits.toml")
MOST = 4  # ranks in a sentence
SMALL = 4096  # elements: flags, sizes, metrics; gradients and weights are more
EARLY = 20  # collectives: the training has not begun
WORK = re.compile(
    r"Rank (?P<rank>\d+)\][^\n]{0,40}?Watchdog caught collective operation timeout:\s+WorkNCCL\(SeqNum=(?P<index>\d+), "
    r"OpType=(?P<kind>\w+),(?: NumelIn=(?P<elements>\d+), NumelOut=\d+,)?[^\n]{0,60}?Timeout\(ms\)=(?P<limit_ms>\d+)"
)
# Of TORCH_DISTRIBUTED_DEBUG=DETAIL (c10d/ProcessGroupWrapper.cpp).
RUNNING = re.compile(
    r"Rank (?P<rank>\d+)\] Running collective: "
    r"CollectiveFingerPrint\(SequenceNumber=(?P<index>\d+), OpType=(?P<kind>\w+)"
)
LAGGING = re.compile(
    r"\[(?P<ranks>[\d, ]+)\] finished collective #(?P<finished>\d+), but didn't join collective #(?P<missing>\d+)"
)
BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier")
FIRST = re.compile(r"due to a collective timeout from\s+rank (?P<ranks>\d+)")
GLOO = re.compile(r"Timed out waiting (?P<limit_ms>\d+)ms for (?:recv|send) operation")
# What a rank had begun when another ended, by its own line (ProcessGroupNCCL.cpp).
ENQUEUED = re.compile(
    r"(?i)PG (?:ID )?\d+\b[^\n\]]*? Rank (?P<rank>\d+)\][^\n]*?last enqueued (?:NCCL )?work: (?P<last>\d+)"
)
STEP = re.compile(r"\b(?:eval_)?loss['\"]?\s*[:=]\s*['\"]?\d")  # of a trainer: what it did before has ended
STUCK = re.compile(r"watchdog got stuck for \d+ seconds|Heartbeat monitor timed out")
# What a collective carries, by its kind: what the rank that is missing does instead.
OF_WEIGHTS = ("_ALLGATHER_BASE", "ALLGATHER", "ALLGATHER_BASE", "COALESCED", "_ALLGATHER_BASE_COALESCED")
OF_GRADIENTS = ("ALLREDUCE", "_REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "REDUCE", "ALLREDUCE_COALESCED")
OF_KINDS = dict.fromkeys(OF_WEIGHTS, "waited-weights") | dict.fromkeys(OF_GRADIENTS, "waited-gradients")


@dataclass(frozen=True)
class Wait:
    """The first collective of a rank that did not end, or its last that began."""

    rank: int
    index: int
    kind: str
    elements: int | None
    limit_s: float
    place: int

    @classmethod
    def of(cls, match: re.Match) -> Self:
        """Return what a match of WORK or of RUNNING says."""
        said = match.groupdict()
        elements = said.get("elements")
        return cls(
            rank=int(said["rank"]),
            index=int(said["index"]),
            kind=said["kind"],
            elements=int(elements) if elements else None,
            limit_s=int(said.get("limit_ms", 0)) / 1000,
            place=match.start(),
        )

    @property
    def call(self) -> str:
        """The collective, as a sentence has it."""
        size = "" if self.elements is None else f" of {self.elements:,} elements"
        return f"{self.kind.strip('_')} {self.index}{size}"


def hangs(text: str, said: Sequence[Sentence] = ()) -> Seen | None:
    """Return who waits for whom, by what watchdogs wrote. None if none wrote. `said` is a person's."""
    if match := LAGGING.search(text):
        cause = _usual(text, said, index=int(match["missing"]))
        return sign("ranks-desync", text, match.start(), **match.groupdict() | _named(match) | cause)
    if match := BARRIER.search(text):
        return sign("barrier-missed", text, match.start(), **_named(match), **_usual(text, said, elements=1))
    if waits := _timed_out(text) or _running(text):
        return _compared(text, said, waits)
    if match := GLOO.search(text):
        limit_s = int(match["limit_ms"]) / 1000
        return sign("gloo-timeout", text, match.start(), limit_s=limit_s, **_usual(text, said))
    if match := STUCK.search(text):
        return sign("watchdog-stuck", text, match.start())
    return None


def that_differ(text: str) -> set[int]:
    """Return the ranks that, at one collective, make another call than most do. Empty: none, or there is no most."""
    waits = _timed_out(text)
    index = min((wait.index for wait in waits), default=0)
    calls = {wait.rank: (wait.kind, wait.elements) for wait in waits if wait.index == index}
    usual = [call for call, times in Counter(calls.values()).items() if 2 * times > len(calls)]
    return {rank for rank, call in calls.items() if usual and call != usual[0]}


def _timed_out(text: str) -> list[Wait]:
    """Return the first collective of each rank that did not end in time."""
    waits: dict[int, Wait] = {}
    for wait in map(Wait.of, WORK.finditer(text)):
        waits.setdefault(wait.rank, wait)
    return [*waits.values()]


def _running(text: str) -> list[Wait]:
    """Return the last collective of each rank that began. Of a run that goes on they are equal, or nearly so."""
    waits: dict[int, Wait] = {}
    for wait in map(Wait.of, RUNNING.finditer(text)):
        if wait.index >= waits.get(wait.rank, wait).index:
            waits[wait.rank] = wait
    differ = len({wait.index for wait in waits.values()}) > 1
    return [*waits.values()] if differ else []


def _compared(text: str, said: Sequence[Sentence], waits: list[Wait]) -> Seen:
    """Compare the collectives in which ranks waited."""
    first = min(waits, key=lambda wait: (wait.index, wait.rank))
    same = [wait for wait in waits if wait.index == first.index]
    calls: dict[str, list[int]] = {}
    for wait in same:
        calls.setdefault(wait.call, []).append(wait.rank)
    if len(calls) > 1:
        two = ", ".join(f"{_ranks(ranks).lower()} {call}" for call, ranks in [*calls.items()][:2])
        id = _did_last(text, said)
        last = f"{causes_of_waits()[id].remedy}. Else " if id else ""
        return sign("ranks-call-differently", text, first.place, index=first.index, calls=two, last=last)
    cause = _usual(text, said, first.index, first.elements, first.kind)
    return _waiting(text, waits, same, {"call": first.call, "limit_s": first.limit_s, "beside": "", **cause})


def _waiting(text: str, waits: list[Wait], same: list[Wait], values: dict[str, Any]) -> Seen:
    """Return who waits for whom, of ranks that make the same calls. Those of `same` are furthest behind."""
    place = min(same, key=lambda wait: wait.rank).place
    ranks = {wait.rank for wait in waits}
    begun = {int(match["rank"]): match for match in ENQUEUED.finditer(text)}
    never = [rank for rank, match in begun.items() if rank not in ranks and int(match["last"]) < same[0].index]
    if never and only({*re.findall(r"PG (?:ID )?(\d+)\b", text)}):  # groups count for themselves
        return sign("rank-missing", text, begun[never[0]].start(), ranks=_ranks(never), **values)
    behind = _ranks([wait.rank for wait in same])
    ahead = [wait for wait in waits if wait not in same]
    if ahead:
        further = max(wait.index for wait in ahead)
        values |= {"ahead": _ranks([wait.rank for wait in ahead]).lower(), "further": further}
        values["beside"] = f"; {values['ahead']} at {further}, {further - same[0].index} ahead"
    if 0 < len(ahead) >= len(same):
        return sign("rank-behind", text, place, ranks=behind, **values)
    if missing := _missing(text, ranks):
        return sign("rank-missing", text, place, ranks=_ranks(missing), **values)
    match = FIRST.search(text)
    if match and int(match["ranks"]) not in ranks:
        return sign("rank-timed-out-first", text, match.start(), **_named(match), **values)
    return sign("nccl-watchdog", text, place, ranks=behind, **values)


def _missing(text: str, ranks: set[int]) -> list[int]:
    """Return the ranks that wrote nothing, if the text has enough of the others to say so."""
    size = only({*re.findall(r"(?i)world[_ ]size[\"']?[=: ]+(\d{1,4})\b", text)})
    missing = sorted({*range(int(size or max(ranks) + 1))} - ranks)
    # Of single lines that somebody chose nothing can be said.
    return missing if len(ranks) > 2 and len(missing) < len(ranks) else []


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class WaitCause:
    """A row of waits.toml. The fields are explained there."""

    cause: str
    remedy: str
    text: Regex = "(?!)"
    words: tuple[str, ...] = ()
    tells: str = ""


@functools.cache
def causes_of_waits() -> dict[str, WaitCause]:
    """Return the rows of waits.toml."""
    return read_table(WAITS, dict[str, WaitCause], WaitCause)


def _usual(
    text: str, said: Sequence[Sentence], index: int | None = None, elements: int | None = None, kind: str = ""
) -> dict[str, str]:
    """Return which mistake it usually is, and what to do, by what the ranks waited for and did last."""
    if index is not None and index <= EARLY:
        return _row("waited-start")
    is_small = elements is not None and elements <= SMALL
    carried = "waited-small" if is_small else OF_KINDS.get(kind, "waited-unknown")
    if id := _did_last(text, said):
        return _row(id, causes_of_waits()[carried].tells)
    return _row(carried)


def _did_last(text: str, said: Sequence[Sentence]) -> str:
    """Return the mistake of which a person's words speak, or what a log has after its last step. Empty: neither."""
    *_, begin = (0, *(match.end() for match in STEP.finditer(text)))
    # A script that is given beside the log has all calls: what was done last is in the file of the last step, or wait.
    parts = [text[begin:].partition(BETWEEN_TEXTS)[0]] if begin else text.split(BETWEEN_TEXTS)
    last = next(filter(WORK.search, parts), text if len(parts) > 1 else parts[0])
    for id, row in causes_of_waits().items():
        if meets(row.words, said) or re.search(row.text, last):
            return id
    return ""


def _row(id: str, tells: str = "") -> dict[str, str]:
    """Return a mistake and what to do, as signs take them. `tells`: where the ranks are that wait."""
    row = causes_of_waits()[id]
    return {"cause": row.cause, "remedy": "; ".join(filter(None, [tells, row.remedy]))}


def _named(match: re.Match) -> dict[str, str]:
    """Return the ranks that a message names, as its sign takes them."""
    return {"ranks": _ranks([int(word) for word in re.findall(r"\d+", match["ranks"])])}


def _ranks(ranks: list[int]) -> str:
    """Return ranks as a sentence begins, the first of many."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"Rank {names[0]}"
    if len(names) > MOST:
        return f"{len(names)} ranks ({', '.join(names[: MOST - 1])}, ...)"
    return f"Ranks {', '.join(names)}"
