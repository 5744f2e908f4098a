"""Read what NCCL's watchdog, gloo and PyTorch's desync report say: which rank is behind, in which collective.

The watchdog of each rank writes the first collective of a group that did not end in time. A rank that is not in it
writes nothing, or another one.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from study.configs.pasted.tracebacks import Seen, line_at

MOST = 4  # ranks in a sentence
SMALL = 4096  # elements: flags, sizes, metrics; gradients and weights are more
EARLY = 20  # collectives: the training has not begun
WORK = re.compile(
    r"Rank (?P<rank>\d+)\][^\n]{0,40}?Watchdog caught collective operation timeout:\s+WorkNCCL\(SeqNum=(?P<index>\d+), "
    r"OpType=(?P<kind>\w+),(?: NumelIn=(?P<elements>\d+), NumelOut=(?P<out>\d+),)?[^\n]{0,60}?Timeout\(ms\)=(?P<limit_ms>\d+)"
)
STATE = re.compile(
    r"Rank (?P<rank>\d+)\][^\n]{0,120}?at work(?: sequence id)?:? (?P<work>\d+)[^\n]{0,20}?,? ?(?:PG status: )?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
LAGGING = re.compile(
    r"\[(?P<ranks>[\d, ]+)\] finished collective #(?P<finished>\d+), but didn't join collective #(?P<missing>\d+)"
)
BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier")
GLOO = re.compile(r"Timed out waiting (?P<limit_ms>\d+)ms for (?:recv|send) operation")
STUCK = re.compile(r"watchdog got stuck for (?P<s>\d+) seconds|Heartbeat monitor timed out")
# What a collective carries, by its kind: what the rank that is missing does instead.
OF_WEIGHTS = ("_ALLGATHER_BASE", "ALLGATHER", "ALLGATHER_BASE", "COALESCED", "_ALLGATHER_BASE_COALESCED")
OF_GRADIENTS = ("ALLREDUCE", "_REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "REDUCE", "ALLREDUCE_COALESCED")
RESTS_ON = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: each rank's watchdog names its first collective that did not end"


@dataclass(frozen=True)
class Wait:
    """The first collective of a rank that did not end in time."""

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


def hangs(text: str) -> list[Seen]:
    """Return who waits for whom, by what watchdogs wrote. Empty if none wrote."""
    if match := LAGGING.search(text):
        return [_lagging(text, match)]
    if match := BARRIER.search(text):
        sentence = f"{_ranks(_numbers(match['ranks']))} did not come to a barrier where the others waited"
        return [_seen(text, match.start(), "barrier-missed", sentence, *_why("BARRIER", 1, False, text), "sure")]
    waits = {}
    for match in WORK.finditer(text):
        elements = match["elements"] and int(match["elements"])
        limit_s = int(match["limit_ms"]) / 1000
        wait = Wait(int(match["rank"]), int(match["index"]), match["kind"], elements, limit_s, match.start())
        waits.setdefault(wait.rank, wait)
    if waits:
        return [_compared(text, list(waits.values()))]
    if match := GLOO.search(text):
        limit_s = int(match["limit_ms"]) / 1000
        sentence = f"A rank waited {limit_s:.0f} s for another in a collective of gloo"
        return [_seen(text, match.start(), "gloo-timeout", sentence, *_why("", None, False, text), "likely")]
    if match := STUCK.search(text):
        cause = "a process is stuck in a call of CUDA, or another rank ended"
        do = "read the other ranks' first error; if none has one, look at the GPU (`dmesg | grep Xid`) and the network"
        return [_seen(text, match.start(), "watchdog-stuck", "NCCL's watchdog got no answer", do, cause, "possible")]
    return []


def _compared(text: str, waits: list[Wait]) -> Seen:
    """Compare the collectives in which ranks waited."""
    first = min(waits, key=lambda wait: (wait.index, wait.rank))
    kinds = {(wait.kind, wait.elements) for wait in waits if wait.index == first.index}
    same = [wait for wait in waits if wait.index == first.index]
    others = [wait for wait in waits if wait.index > first.index]
    if len(kinds) > 1:
        sides = ", ".join(f"rank {wait.rank} {wait.call}" for wait in same[:4])
        sentence = f"Ranks make different calls at collective {first.index}: {sides}"
        do = "look for an `if` on the rank, or data of other sizes or without some layers, around what they call there"
        return _seen(text, first.place, "different-calls", sentence, do, "sure", "likely")
    missing = _missing(text, waits)
    early = first.index <= EARLY
    do, cause = _why(first.kind, first.elements, early, text)
    waited = f"after {first.limit_s:.0f} s"
    if others and len(same) <= len(others):
        ahead = _ranks([wait.rank for wait in others])
        sentence = f"{_ranks([wait.rank for wait in same])} behind: in {first.call}, {ahead} in {others[0].call}"
        return _seen(text, first.place, "rank-behind", sentence, do, cause, "likely")
    if missing:
        sentence = f"{_ranks(missing)} did not join {first.call}; the others gave up {waited}"
        return _seen(text, first.place, "rank-missing", sentence, do, cause, "likely")
    sentence = f"{_ranks([wait.rank for wait in same])} waited in {first.call} and gave up {waited}"
    if early:
        sentence += ", before the training began"
    return _seen(text, first.place, "nccl-watchdog", sentence, do, cause, "possible")


def _missing(text: str, waits: list[Wait]) -> list[int]:
    """Return the ranks that wrote nothing, if the text has enough of the others to say so."""
    ranks = {wait.rank for wait in waits}
    sizes = Counter(int(size) for size in re.findall(r"world[_ ]size[\"']?[=: ]+(\d{1,4})\b", text, re.IGNORECASE))
    number = sizes.most_common(1)[0][0] if sizes else max(ranks) + 1
    missing = sorted({*range(number)} - ranks)
    # Of single lines that somebody chose nothing can be said.
    return missing if len(ranks) > 1 and len(missing) <= len(ranks) else []


def _lagging(text: str, match: re.Match) -> Seen:
    ranks = _numbers(match["ranks"])
    sentence = f"{_ranks(ranks)} behind: ended collective {match['finished']} and did not join {match['missing']}"
    do, cause = _why("", None, int(match["missing"]) <= EARLY, text)
    return _seen(text, match.start(), "desync", sentence, do, cause, "sure")


def _why(kind: str, elements: int | None, early: bool, text: str) -> tuple[str, str]:
    """Return what to do, and which mistake it usually is, by what the ranks waited for and did last."""
    if re.search(r"[Oo]ut of memory|OutOfMemoryError", text):
        return "first mend the memory error: that rank ended, and the others waited", "one rank was out of memory first"
    if early:
        do = "do long work (tokenizing, downloads) before the group is made or under main_process_first, and raise its timeout (ddp_timeout, InitProcessGroupKwargs); if no rank works, try NCCL_P2P_DISABLE=1 and NCCL_DEBUG=INFO: then it is the connection"
        return do, "at the start: one rank still prepares data, or NCCL cannot connect the GPUs"
    if re.search(r"(?i)saving (?:model )?checkpoint|save_checkpoint|save_pretrained|save_model\(|save_state\(", text):
        do = "call saving on all ranks, without `if is_main_process`; if it only takes long, raise the timeout (ddp_timeout)"
        return do, "only one rank saves, or saving takes longer than the timeout"
    if re.search(r"Running Evaluation|evaluation_loop|in evaluate\b|\beval(?:uation)? step", text):
        do = "evaluate on all ranks with equally many batches, and gather what has one size (pad_across_processes)"
        return do, "ranks evaluate different numbers of batches, or one alone"
    if elements is not None and elements <= SMALL:
        do = "look for what only some ranks call: logging with a gather, `.item()` of a gathered value, a barrier, an early end; give all ranks equally many batches (drop_last=True, even_batches)"
        return do, "a small value (a flag, a size, a metric): a rank left the loop or logs alone"
    if kind in OF_WEIGHTS:
        do = "let all ranks run the same modules (experts: `set_z3_leaf_modules`; generation: synced_gpus=True; images and text alike), and give all equally many batches"
        return do, "weights are gathered: a rank does not run the module, or has no batch any more"
    if kind in OF_GRADIENTS:
        do = "give all ranks equally many batches (drop_last=True), and look for rows that one rank skips or takes much longer for; if it is only slow, raise the timeout"
        return do, "gradients are reduced: a rank skipped its pass, ended early, or is much slower"
    do = "look at what the missing rank prints last (py-spy dump --pid PID); give all ranks equally many batches and calls; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes what `study diagnose FOLDER` compares"
    return do, "unequal batches, a call that only some ranks make, or one that failed"


def _seen(
    text: str, place: int, id: str, sentence: str, do: str, cause: str, sure: Literal["sure", "likely", "possible"]
) -> Seen:
    return Seen(id, f"{sentence}: usually {cause}", do, sure, RESTS_ON, place=place, line=line_at(text, place))


def _numbers(words: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", words)]


def _ranks(ranks: list[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"Rank {names[0]}"
    if len(names) > MOST:
        return f"{len(names)} ranks ({', '.join(names[: MOST - 1])}, ...)"
    return f"Ranks {', '.join(names)}"
