"""Read what NCCL's watchdog, gloo and PyTorch's reports say: which rank is behind, in which collective.

The watchdog of each rank writes the first collective of a group that did not end in time. A rank that is not in it
writes nothing, or another one.
"""

import re
from collections import Counter
from dataclasses import dataclass

from study.configs.pasted.tracebacks import Seen, sign

MOST = 4  # ranks in a sentence
SMALL = 4096  # elements: flags, sizes, metrics; gradients and weights are more
EARLY = 20  # collectives: the training has not begun
WORK = re.compile(
    r"Rank (?P<rank>\d+)\][^\n]{0,40}?Watchdog caught collective operation timeout:\s+WorkNCCL\(SeqNum=(?P<index>\d+), "
    r"OpType=(?P<kind>\w+),(?: NumelIn=(?P<elements>\d+), NumelOut=\d+,)?[^\n]{0,60}?Timeout\(ms\)=(?P<limit_ms>\d+)"
)
# Of TORCH_DISTRIBUTED_DEBUG=DETAIL (c10d/ProcessGroupWrapper.cpp).
RUNNING = re.compile(
    r"Rank (?P<rank>\d+)\] Running collective: CollectiveFingerPrint\(SequenceNumber=(?P<index>\d+), OpType=(?P<kind>\w+)"
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


def hangs(text: str, words: str = "") -> list[Seen]:
    """Return who waits for whom, by what watchdogs wrote. Empty if none wrote. `words` are a person's."""
    if match := LAGGING.search(text):
        values = {"finished": match["finished"], "missing": match["missing"]}
        cause = _usual("", None, int(match["missing"]), text, words)
        return [sign("ranks-desync", text, match.start(), ranks=_ranks(_numbers(match["ranks"])), **values, **cause)]
    if match := BARRIER.search(text):
        ranks = _ranks(_numbers(match["ranks"]))
        return [sign("barrier-missed", text, match.start(), ranks=ranks, **_usual("BARRIER", 1, None, text, words))]
    if waits := _waits(text):
        return [_compared(text, words, waits)]
    if match := GLOO.search(text):
        limit_s = int(match["limit_ms"]) / 1000
        return [sign("gloo-timeout", text, match.start(), limit_s=limit_s, **_usual("", None, None, text, words))]
    if match := STUCK.search(text):
        return [sign("watchdog-stuck", text, match.start())]
    return []


def _waits(text: str) -> list[Wait]:
    """Return the first collective that did not end of each rank that tells it."""
    waits: dict[int, Wait] = {}
    for match in WORK.finditer(text):
        elements = match["elements"] and int(match["elements"])
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


def _compared(text: str, words: str, waits: list[Wait]) -> Seen:
    """Compare the collectives in which ranks waited."""
    first = min(waits, key=lambda wait: (wait.index, wait.rank))
    same = [wait for wait in waits if wait.index == first.index]
    others = [wait for wait in waits if wait.index > first.index]
    if len({(wait.kind, wait.elements) for wait in same}) > 1:
        calls = ", ".join(f"rank {wait.rank} {wait.call}" for wait in same[:MOST])
        return sign("different-calls", text, first.place, index=first.index, calls=calls)
    values = {"call": first.call, "limit_s": first.limit_s, "ranks": _ranks([wait.rank for wait in same])}
    cause = _usual(first.kind, first.elements, first.index, text, words)
    if others and len(same) <= len(others):
        ahead = _ranks([wait.rank for wait in others]).lower()
        return sign("rank-behind", text, first.place, ahead=ahead, further=others[0].call, **values, **cause)
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


def _usual(kind: str, elements: int | None, index: int | None, text: str, words: str) -> dict[str, str]:
    """Return which mistake it usually is, and what to do, by what the ranks waited for and did last."""
    if re.search(r"[Oo]ut of memory|OutOfMemoryError", text):
        cause = "one rank was out of memory first"
        remedy = "first mend the memory error: that rank ended, and the others waited"
    elif index is not None and index <= EARLY:
        cause = "at the start: one rank still prepares data, or NCCL cannot connect the GPUs"
        remedy = "do long work (tokenizing, downloads) before the group is made or under main_process_first, and raise its timeout (ddp_timeout, InitProcessGroupKwargs); if no rank works, try NCCL_P2P_DISABLE=1 and NCCL_DEBUG=INFO: then it is the connection"
    elif re.search(r"(?i)saving (?:model )?checkpoint|save_checkpoint|save_pretrained|save_model\(|save_state\(", text) or (
        re.search(r"(?i)\bsav(?:e|es|ing)\b", words)
    ):
        cause = "only one rank saves, or saving takes longer than the timeout"
        remedy = "call saving on all ranks, without `if is_main_process`; if it only takes long, raise the timeout (ddp_timeout)"
    elif re.search(r"Running Evaluation|evaluation_loop|in evaluate\b|(?i:\beval(?:uation)? step)", text) or (
        re.search(r"(?i)\bevaluat\w+|validation", words)
    ):
        cause = "ranks evaluate different numbers of batches, or one alone"
        remedy = "evaluate on all ranks with equally many batches, and gather what has one size (pad_across_processes)"
    elif re.search(r"(?i)epochs?\b", words):
        cause = "ranks have different numbers of batches in an epoch"
        remedy = "give all ranks equally many batches: drop_last=True, even_batches, a DistributedSampler; rows that are filtered on a rank count as well"
    else:
        return _of_what_it_carries(kind, elements)
    return {"cause": cause, "remedy": remedy}


def _of_what_it_carries(kind: str, elements: int | None) -> dict[str, str]:
    if elements is not None and elements <= SMALL:
        cause = "a small value (a flag, a size, a metric): a rank left the loop or logs alone"
        remedy = "look for what only some ranks call: logging with a gather, `.item()` of a gathered value, a barrier, an early end; give all ranks equally many batches (drop_last=True, even_batches)"
    elif kind in OF_WEIGHTS:
        cause = "a rank does not run the module whose weights are gathered, or has no batch any more"
        remedy = "let all ranks run the same modules (experts: `set_z3_leaf_modules`; generation: synced_gpus=True; images and text alike), and give all equally many batches"
    elif kind in OF_GRADIENTS:
        cause = "a rank skipped its pass, ended early, or is much slower: gradients are reduced there"
        remedy = "give all ranks equally many batches (drop_last=True), and look for rows that one rank skips or takes much longer for; if it is only slow, raise the timeout"
    else:
        cause = "unequal batches, a call that only some ranks make, or one that failed"
        remedy = "look at what the missing rank prints last (py-spy dump --pid PID); give all ranks equally many batches and calls; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes what `study diagnose FOLDER` compares"
    return {"cause": cause, "remedy": remedy}


def _numbers(words: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", words)]


def _ranks(ranks: list[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"Rank {names[0]}"
    if len(names) > MOST:
        return f"{len(names)} ranks ({', '.join(names[: MOST - 1])}, ...)"
    return f"Ranks {', '.join(names)}"
