"""Read what other tools leave behind, and return findings as of a watched run. Nothing of it is run or unpickled.

Recognised by content: PyTorch's memory snapshots (pickled, or as JSON), Flight Recorder dumps of several ranks, Kineto
and Chrome traces, the JSON lines of NCCL Inspector, and logs of Slurm and torchrun.
"""

import re
from pathlib import Path
from typing import Any

from study.errors import Stop
from study.io import files, parsing
from study.io.pickles import from_pickle
from study.records.collectives import RankLog
from study.records.hangs import MAX_NAMED, hangs
from study.watcher import logs, recorder, snapshots, traces
from study.watcher.findings import KNOWN, Evidence, in_form

MAX_BYTES = 64 * 2**20
MOST_VALUES = 20_000_000
MOST_RANKS = 4096
COMPRESSED = b"\x1f\x8b"
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
JSON = re.compile(rb"\s*(?:\{|\[\s*[\[{\]])")


def is_evidence(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a file of each rank."""
    return path.is_file() or (path.is_dir() and bool(recorder.dumps_in(path) or traces.inspector_logs(path)))


def look(path: Path) -> Evidence:
    """Return the findings in a file, or in a folder with a file of each rank. Raise Stop if it is none of these."""
    if path.is_dir():
        lines = [_read(each).decode(errors="replace") for each in traces.inspector_logs(path)[:MOST_RANKS]]
        return traces.inspector("\n".join(lines), path) if lines else _recorded(recorder.dumps_in(path))
    content = _read(path)
    if content.startswith(COMPRESSED):
        raise Stop(f"{str(path)!r:.300} is compressed", "gunzip it, and name the file that comes out")
    if not content.startswith(PICKLE):
        text = content.decode(errors="replace")
        if not JSON.match(content):
            return logs.look(text, path)
        if traces.INSPECTOR in content[: traces.BEGINNING]:
            return traces.inspector(text, path)
    value = _parsed(path, content)
    keys = value.keys() if isinstance(value, dict) else ()
    with in_form(path):
        if "segments" in keys:
            return Evidence("PyTorch's memory snapshot", list(snapshots.look(value)))
        if "entries" in keys:
            return _recorded([path])
        if traces.is_trace(value):
            return Evidence("a Chrome trace", list(traces.look(value)))
    raise Stop(f"{str(path)!r:.300} is no evidence that is known", KNOWN)


def _read(path: Path) -> bytes:
    try:
        return files.read(path, MAX_BYTES)
    except OSError as error:
        raise Stop(f"{str(path)!r:.300} cannot be read ({files.why(error)})", KNOWN) from None


def _parsed(path: Path, content: bytes) -> Any:
    try:
        return from_pickle(content) if content[:1] == PICKLE else parsing.from_json(content, MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise Stop(f"{str(path)!r:.300} is not read ({files.why(error)})", KNOWN) from None


def _recorded(paths: list[Path]) -> Evidence:
    """Return which rank waits for which, by the dumps of as many ranks as there are."""
    dumps: list[RankLog] = []
    for path in paths[:MOST_RANKS]:
        value = _parsed(path, _read(path))
        with in_form(path):
            if isinstance(value, dict) and "entries" in value:
                dumps.append(recorder.log_of(value, recorder.rank_of(path) or 0))
    if not dumps:
        raise Stop("there are no Flight Recorder dumps", KNOWN)
    last = max(rank for dump in dumps for ranks in [*dump.groups.values(), [dump.rank]] for rank in ranks)
    whole = [dump.model_copy(update={"ranks": last + 1}) for dump in dumps]
    places = [
        f"rank {log.rank} waits at {log.place}" for log in whole if log.place and not log.place.startswith("work")
    ]
    state = "; ".join([f"{len(dumps)} of {last + 1} ranks left a dump", *places[:MAX_NAMED]])
    return Evidence("Flight Recorder dumps", hangs(whole), state)
