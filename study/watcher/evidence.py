"""Read what a job leaves behind that was not watched. Nothing of it is run or unpickled.

Recognised by content: Flight Recorder dumps of several ranks (pickled, or as JSON), and logs of Slurm and torchrun.
"""

import re
from pathlib import Path
from typing import Any

from study.errors import Stop
from study.io import files, parsing
from study.io.pickles import from_pickle
from study.records.collectives import RankLog
from study.records.hangs import MAX_NAMED, hangs
from study.watcher import logs, recorder
from study.watcher.findings import KNOWN, Evidence, in_form

MAX_BYTES = 64 * 2**20
MOST_VALUES = 20_000_000
MOST_RANKS = 4096
COMPRESSED = b"\x1f\x8b"
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
JSON = re.compile(rb"\s*(?:\{|\[\s*[\[{\]])")


def is_evidence(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a file of each rank."""
    return path.is_file() or (path.is_dir() and bool(recorder.dumps_in(path)))


def look(path: Path) -> Evidence:
    """Return the findings in a file, or in a folder with a file of each rank. Raise Stop if it is none of these."""
    if path.is_dir():
        return _recorded(path, recorder.dumps_in(path))
    content = _read(path)
    if content.startswith(COMPRESSED):
        raise Stop(f"{str(path)!r:.300} is compressed", "gunzip it, and name the file that comes out")
    if content.startswith(PICKLE) or JSON.match(content):
        return _recorded(path, [path])
    return logs.look(content.decode(errors="replace"), path)


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


def _recorded(given: Path, paths: list[Path]) -> Evidence:
    """Return which rank waits for which, by the dumps of as many ranks as there are."""
    dumps: list[RankLog] = []
    for path in paths[:MOST_RANKS]:
        value = _parsed(path, _read(path))
        with in_form(path):
            if isinstance(value, dict) and "entries" in value:
                dumps.append(recorder.log_of(value, recorder.rank_of(path) or 0))
    if not dumps:
        raise Stop(f"{str(given)!r:.300} has no Flight Recorder dump", KNOWN)
    last = max(rank for dump in dumps for ranks in [*dump.groups.values(), [dump.rank]] for rank in ranks)
    whole = [dump.model_copy(update={"ranks": last + 1}) for dump in dumps]
    places = [
        f"rank {log.rank} waits at {log.place}" for log in whole if log.place and not log.place.startswith("work")
    ]
    state = "; ".join([f"{len(dumps)} of {last + 1} ranks left a dump", *places[:MAX_NAMED]])
    return Evidence("Flight Recorder dumps", hangs(whole), state)
