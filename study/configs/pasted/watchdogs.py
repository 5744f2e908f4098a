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
from typing import Any, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.words import Sentence, meets
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
FIRST = re.compile(r"due to a collective timeout from\s+rank (?P<rank>\d+)")
GLOO = re.compile(r"Timed out waiting (?P<limit_ms>\d+)ms for (?:recv|send) operation")
STUCK = re.compile(r"watchdog got stuck for \d+ seconds|Heartbeat monitor timed out")
# What a collective carries, by its kind: what the rank that is missing does instead.
OF_WEIGHTS = ("_ALLGATHER_BASE", "ALLGATHER", "ALLGATHER_BASE", "COALESCED", "_ALLGATHER_BASE_COALESCED")
OF_GRADIENTS = ("ALLREDUCE", "_REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "REDUCE", "ALLREDUCE_COALESCED")


@dataclass(frozen=True)
class Wait:
    """The first collective of a rank that did not end, or its last that began."""

    rank: int
    index: int
    kind: str
    elements: int | None
    limit_s: float
    place: int

    @property
    def call(self) -> str:
        size = "" if self.elements is None else f" of {self.elements:,} elements"
        return f"{self.kind.strip('_')} {self.index}{size}"


def hangs(text: str, said: Sequence[Sentence] = ()) -> Seen | None:
    """Return who waits for whom, by what watchdogs wrote. None if none wrote. `said` is a person's."""
    for tell in (_lagging, _at_barrier, _compared, _in_gloo, _stuck):
        if seen := tell(text, said):
            return seen
    return None


def _lagging(text: str, said: Sequence[Sentence]) -> Seen | None:
    match = LAGGING.search(text)
    if match is None:
        return None
    values = {"ranks": _ranks(_numbers(match["ranks"])), "finished": match["finished"], "missing": match["missing"]}
    return sign("ranks-desync", text, match.start(), **values, **_usual("", None, int(match["missing"]), text, said))


def _at_barrier(text: str, said: Sequence[Sentence]) -> Seen | None:
    match = BARRIER.search(text)
    if match is None:
        return None
    ranks = _ranks(_numbers(match["ranks"]))
    return sign("barrier-missed", text, match.start(), ranks=ranks, **_usual("BARRIER", 1, None, text, said))


def _in_gloo(text: str, said: Sequence[Sentence]) -> Seen | None:
    match = GLOO.search(text)
    if match is None:
        return None
    limit_s = int(match["limit_ms"]) / 1000
    return sign("gloo-timeout", text, match.start(), limit_s=limit_s, **_usual("", None, None, text, said))


def _stuck(text: str, said: Sequence[Sentence]) -> Seen | None:
    match = STUCK.search(text)
    return sign("watchdog-stuck", text, match.start()) if match else None


def _timed_out(text: str) -> dict[int, Wait]:
    """Return the first collective of each rank that did not end in time."""
    waits: dict[int, Wait] = {}
    for match in WORK.finditer(text):
        elements = int(match["elements"]) if match["elements"] else None
        limit_s = int(match["limit_ms"]) / 1000
        wait = Wait(int(match["rank"]), int(match["index"]), match["kind"], elements, limit_s, match.start())
        waits.setdefault(wait.rank, wait)
    return waits


def _running(text: str) -> dict[int, Wait]:
    """Return the last collective of each rank that began. Of a run that goes on they are equal, or nearly so."""
    waits: dict[int, Wait] = {}
    for match in RUNNING.finditer(text):
        wait = Wait(int(match["rank"]), int(match["index"]), match["kind"], None, 0, match.start())
        if wait.index >= waits.get(wait.rank, wait).index:
            waits[wait.rank] = wait
    is_told = len({wait.index for wait in waits.values()}) > 1
    return waits if is_told else {}


def _compared(text: str, said: Sequence[Sentence]) -> Seen | None:
    """Compare the collectives in which ranks waited."""
    of_ranks = _timed_out(text) or _running(text)
    if not of_ranks:
        return None
    first = min(of_ranks.values(), key=lambda wait: (wait.index, wait.rank))
    same = [wait for wait in of_ranks.values() if wait.index == first.index]
    ahead = [wait for wait in of_ranks.values() if wait.index > first.index]
    calls = {(wait.kind, wait.elements): f"rank {wait.rank} {wait.call}" for wait in same}  # one rank of each
    if len(calls) > 1:
        two = ", ".join([*calls.values()][:2])
        return sign("ranks-call-differently", text, first.place, index=first.index, calls=two)
    values: dict[str, Any] = {"call": first.call, "limit_s": first.limit_s}
    values |= _usual(first.kind, first.elements, first.index, text, said)
    behind = [wait.rank for wait in same]
    if 0 < len(ahead) >= len(same):
        values |= {"ahead": _ranks([wait.rank for wait in ahead]).lower(), "further": ahead[0].index}
        return sign("rank-behind", text, first.place, ranks=_ranks(behind), **values)
    if missing := _missing(text, {*of_ranks}):
        return sign("rank-missing", text, first.place, ranks=_ranks(missing), **values)
    match = FIRST.search(text)
    if match and int(match["rank"]) not in of_ranks:
        return sign("rank-timed-out-first", text, match.start(), ranks=_ranks([int(match["rank"])]), **values)
    return sign("nccl-watchdog", text, first.place, ranks=_ranks(behind), **values)


def _missing(text: str, ranks: set[int]) -> list[int]:
    """Return the ranks that wrote nothing, if the text has enough of the others to say so."""
    sizes = Counter(int(size) for size in re.findall(r"world[_ ]size[\"']?[=: ]+(\d{1,4})\b", text, re.IGNORECASE))
    number = sizes.most_common(1)[0][0] if sizes else max(ranks) + 1
    missing = sorted({*range(number)} - ranks)
    # Of single lines that somebody chose nothing can be said.
    return missing if len(ranks) > 2 and len(missing) < len(ranks) else []


@with_config(NO_OTHER_KEYS)
class WaitCause(TypedDict):
    """A row of waits.toml. The keys are explained there."""

    cause: str
    remedy: str
    text: NotRequired[Regex]
    words: NotRequired[list[str]]


@functools.cache
def causes_of_waits() -> dict[str, WaitCause]:
    return read_table(WAITS, dict[str, WaitCause], WaitCause)


def _usual(kind: str, elements: int | None, index: int | None, text: str, said: Sequence[Sentence]) -> dict[str, str]:
    """Return which mistake it usually is, and what to do, by what the ranks waited for and did last."""
    if index is not None and index <= EARLY:
        return usual("waited-start")
    for id in ("waited-memory", "waited-saving", "waited-evaluation", "waited-epoch"):
        row = causes_of_waits()[id]
        if meets(row.get("words", ()), said) or re.search(row.get("text", "(?!)"), text):
            return usual(id)
    if elements is not None and elements <= SMALL:
        return usual("waited-small")
    if kind in OF_WEIGHTS:
        return usual("waited-weights")
    return usual("waited-gradients" if kind in OF_GRADIENTS else "waited-unknown")


def usual(id: str) -> dict[str, str]:
    row = causes_of_waits()[id]
    return {"cause": row["cause"], "remedy": row["remedy"]}


def _numbers(words: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", words)]


def _ranks(ranks: list[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"Rank {names[0]}"
    if len(names) > MOST:
        return f"{len(names)} ranks ({', '.join(names[: MOST - 1])}, ...)"
    return f"Ranks {', '.join(names)}"
