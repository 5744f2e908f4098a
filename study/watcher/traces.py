"""Findings in traces of a step: Kineto's and Chrome's (idle time, overlap, longest kernels), and NCCL Inspector's."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from study.io import parsing
from study.records.hangs import Finding
from study.watcher.findings import Evidence, finding, in_form

INSPECTOR = b"coll_perf"  # a key of NCCL Inspector's lines
BEGINNING = 4096  # bytes of a file in which it is
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # Kineto's categories
COMMUNICATION = re.compile(r"nccl|rccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|broadcast_", re.IGNORECASE)
LOADER = re.compile(r"DataLoader.{0,80}?__next__|enumerate\(DataLoader")
# Smaller shares get no finding.
IDLE = 0.1
EXPOSED = 0.1
WAITING = 0.05
SLOWER = 0.15
NAMED = 3
LONGEST_NAME = 60

Span = tuple[float, float]


class Call(NamedTuple):
    """A collective of a rank, by NCCL Inspector."""

    rank: int
    seconds: float
    bus: float  # GB/s


def is_trace(value: Any) -> bool:
    events = value.get("traceEvents") if isinstance(value, dict) else value
    return isinstance(events, list) and any(isinstance(event, dict) and "ph" in event for event in events[:1000])


def look(value: Any) -> Iterator[Finding]:
    """Yield what a trace shows. Its times are microseconds."""
    listed = value["traceEvents"] if isinstance(value, dict) else value
    events = [event for event in listed if event.get("ph") == "X" and event.get("dur")]
    on_gpu = [event for event in events if event.get("cat") in GPU_WORK]
    work = on_gpu or [event for event in events if event.get("cat") in ("cpu_op", "Operator")]
    if not work:
        raise ValueError("it has no kernels and no operators")
    spans = _union(_span(event) for event in work)
    begin = spans[0][0]
    end = spans[-1][1]
    idle = 1 - _length(spans) / (end - begin)
    if idle >= IDLE:
        yield finding("idle", device="GPU" if on_gpu else "CPU", share=idle, span_s=(end - begin) / 1e6)
    yield from _exposed(work)
    yield _longest(on_gpu or _innermost(work))
    waits = [event for event in events if LOADER.search(str(event.get("name")))]
    waited = _length(_union(_span(event) for event in waits))
    if waited >= WAITING * (end - begin):
        yield finding("waits_for_data", share=waited / (end - begin), waited_s=waited / 1e6, count=len(waits))


def _longest(work: list[dict]) -> Finding:
    names = Counter[str]()
    for event in work:
        names[str(event["name"])[:LONGEST_NAME]] += event["dur"]
    shares = [f"{name} ({us / names.total():.0%}, {us / 1e6:.3g} s)" for name, us in names.most_common(NAMED)]
    return finding("longest_kernels", names=", ".join(shares))


def _exposed(work: list[dict]) -> Iterator[Finding]:
    """Yield how much of the communication runs while nothing is computed."""
    talks = _union(_span(event) for event in work if COMMUNICATION.search(str(event["name"])))
    computes = _union(_span(event) for event in work if not COMMUNICATION.search(str(event["name"])))
    if talks:
        alone = _length(_union([*talks, *computes])) - _length(computes)
        if alone >= EXPOSED * _length(talks):
            yield finding("exposed_communication", talks_s=_length(talks) / 1e6, share=alone / _length(talks))


def _innermost(work: list[dict]) -> list[dict]:
    """Return the operators that call no others: those of one thread are nested."""
    inner: list[dict] = []
    ordered = sorted(work, key=lambda event: (str(event.get("tid")), float(event["ts"]), -float(event["dur"])))
    for event, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is None or following.get("tid") != event.get("tid") or following["ts"] >= _span(event)[1]:
            inner.append(event)
    return inner


def _span(event: dict) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that do not overlap and cover the same time."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def inspector_logs(folder: Path) -> list[Path]:
    """Return the files that NCCL Inspector wrote: one for each rank."""
    return [path for path in sorted(folder.glob("*.log")) if path.is_file() and INSPECTOR in _beginning(path)]


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(BEGINNING)
    except OSError:
        return b""


def inspector(text: str, path: Path) -> Evidence:
    """Return findings in NCCL Inspector's lines, as published with NCCL 2.28: none was made here."""
    calls: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
    with in_form(path):
        for line in filter(str.strip, text.splitlines()):
            value = parsing.from_json(line)
            each = value["coll_perf"]
            key = str(each["coll"]), int(each["coll_msg_size_bytes"])
            rank = int(value["header"]["rank"])
            calls[key].append(Call(rank, float(each["coll_exec_time_us"]) / 1e6, float(each["coll_busbw_gbs"])))
    findings = [finding for key in calls for finding in _slow_ranks(key, calls[key])]
    for kind, message in sorted(calls, key=lambda key: -key[1] * len(calls[key]))[:NAMED]:
        speeds = [call.bus for call in calls[kind, message]]
        about = {"bus": statistics.median(speeds), "count": f"{len(speeds):,}"}
        findings.append(finding("bandwidth", kind=kind, message_bytes=message, **about))
    return Evidence("NCCL Inspector's lines", findings)


def _slow_ranks(key: tuple[str, int], calls: list[Call]) -> Iterator[Finding]:
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    for call in calls:
        by_rank[call.rank].append(call.seconds)
    medians = {rank: statistics.median(seconds) for rank, seconds in sorted(by_rank.items())}
    usual = statistics.median(medians.values())
    for rank, seconds in medians.items():
        if usual > 0 and seconds / usual - 1 >= SLOWER:
            about = {"ranks": len(medians), "slow_s": seconds, "median_s": usual, "more": seconds / usual - 1}
            yield finding("slow_rank", rank=rank, kind=key[0], message_bytes=key[1], **about)
