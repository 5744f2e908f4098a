"""Write a trace in Chrome's format, which Perfetto (ui.perfetto.dev) opens."""

import json
from collections.abc import Iterable
from pathlib import Path

Span = tuple[str, str, str, float, float]  # process, lane, name, begin and end in seconds
Counter = tuple[str, str, float, float]  # process, name, second, value


def write(path: Path, spans: Iterable[Span], counters: Iterable[Counter] = ()) -> None:
    """Write spans and counters. Times begin with the first span."""
    spans = sorted(spans, key=lambda span: span[3])
    zero_s = spans[0][3] if spans else 0.0
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict] = []
    for process, lane, name, begin_s, end_s in spans:
        pid = _number(processes, process, events, {"name": "process_name"})
        tid = _number(lanes, (process, lane), events, {"name": "thread_name", "pid": pid}, lane)
        times = {"ts": round((begin_s - zero_s) * 1e6, 3), "dur": round((end_s - begin_s) * 1e6, 3)}
        events.append({"ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid} | times)
    for process, name, at_s, value in counters:
        pid = _number(processes, process, events, {"name": "process_name"})
        at_us = round((at_s - zero_s) * 1e6, 3)
        events.append({"ph": "C", "name": name, "pid": pid, "ts": at_us, "args": {"value": float(value)}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False))


def _number(known: dict, key, events: list[dict], about: dict, name: str | None = None) -> int:
    """Return the number of a process or a lane, and add the event that names it."""
    if key not in known:
        known[key] = len(known) + 1
        number = "tid" if "pid" in about else "pid"
        events.append({"ph": "M", "args": {"name": name or key}} | about | {number: known[key]})
    return known[key]
