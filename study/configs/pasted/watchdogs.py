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
from typing import NotRequired

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


def hangs(text: str, said: Sequence[Sentence] = ()) -> list[Seen]:
    """Return who waits for whom, by what watchdogs wrote. Empty if none wrote. `said` is a person's."""
    if match := LAGGING.search(text):
        values = {"finished": match["finished"], "missing": match["missing"]}
        cause = _usual("", None, int(match["missing"]), text, said)
        return [sign("ranks-desync", text, match.start(), ranks=_ranks(_numbers(match["ranks"])), **values, **cause)]
    if match := BARRIER.search(text):
        ranks = _ranks(_numbers(match["ranks"]))
        return [sign("barrier-missed", text, match.start(), ranks=ranks, **_usual("BARRIER", 1, None, text, said))]
    if waits := _waits(text):
        return [_compared(text, said, waits)]
    if match := GLOO.search(text):
        limit_s = int(match["limit_ms"]) / 1000
        return [sign("gloo-timeout", text, match.start(), limit_s=limit_s, **_usual("", None, None, text, said))]
    if match := STUCK.search(text):
        return [sign("watchdog-stuck", text, match.start())]
    return []


def _waits(text: str) -> list[Wait]:
    """Return the first collective that did not end of each rank that tells it."""
    waits: dict[int, Wait] = {}
    for match in WORK.finditer(text):
        elements = int(match["elements"]) if match["elements"] else None
        limit_s = int(match["limit_ms"]) / 1000
        wait = Wait(int(match["rank"]), int(match["index"]), match["kind"], elements, limit_s, match.start())
        waits.setdefault(wait.rank, wait)
    if waits:
        return list(waits.values())
    for match in RUNNING.finditer(text):  # the last counts
        wait = Wait(int(match["rank"]), int(match["index"]), match["kind"], None, 0, match.start())
        if wait.rank not in waits or waits[wait.rank].index <= wait.index:
            waits[wait.rank] = wait
    # Of a run that goes on they are equal, or nearly so: it tells nothing.
    indices = {wait.index for wait in waits.values()}
    return list(waits.values()) if len(indices) > 1 else []


def _compared(text: str, said: Sequence[Sentence], waits: list[Wait]) -> Seen:
    """Compare the collectives in which ranks waited."""
    first = min(waits, key=lambda wait: (wait.index, wait.rank))
    same = [wait for wait in waits if wait.index == first.index]
    others = [wait for wait in waits if wait.index > first.index]
    if len({(wait.kind, wait.elements) for wait in same}) > 1:
        # One rank of each call is enough.
        each = {(wait.kind, wait.elements): wait for wait in same}.values()
        calls = ", ".join(f"rank {wait.rank} {wait.call}" for wait in [*each][:2])
        return sign("ranks-call-differently", text, first.place, index=first.index, calls=calls)
    values = {"call": first.call, "limit_s": first.limit_s, "ranks": _ranks([wait.rank for wait in same])}
    cause = _usual(first.kind, first.elements, first.index, text, said)
    if others and len(same) <= len(others):
        ahead = _ranks([wait.rank for wait in others]).lower()
        return sign("rank-behind", text, first.place, ahead=ahead, further=others[0].index, **values, **cause)
    if missing := _missing(text, waits):
        return sign("rank-missing", text, first.place, **values | {"ranks": _ranks(missing)}, **cause)
    if (match := FIRST.search(text)) and int(match["rank"]) not in {wait.rank for wait in waits}:
        ranks = _ranks([int(match["rank"])])
        return sign("rank-timed-out-first", text, match.start(), ranks=ranks, **cause)
    return sign("nccl-watchdog", text, first.place, **values, **cause)


def _missing(text: str, waits: list[Wait]) -> list[int]:
    """Return the ranks that wrote nothing, if the text has enough of the others to say so."""
    ranks = {wait.rank for wait in waits}
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
