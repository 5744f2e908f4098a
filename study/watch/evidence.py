"""Reads the Flight Recorder dumps of ranks that were not watched, pickled or as JSON. Nothing is run or unpickled."""

import re
from pathlib import Path
from typing import Any

from study.core import files, parsing
from study.core.errors import Stop
from study.core.pickles import from_pickle
from study.records.collectives import RankLog
from study.records.hangs import MAX_NAMED, Finding, hangs
from study.watch import recorder
from study.watch.findings import in_form

KNOWN = "name a run, or Flight Recorder dumps"
MAX_BYTES = 64 * 2**20
MOST_VALUES = 20_000_000
MOST_RANKS = 4096
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
JSON = re.compile(rb"\s*(?:\{|\[\s*[\[{\]])")


def is_evidence(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a file of each rank."""
    return path.is_file() or (path.is_dir() and bool(recorder.dumps_in(path)))


def look(path: Path) -> tuple[list[Finding], str]:
    """Return the findings in a dump, or in a folder with one of each rank, and a sentence on the ranks."""
    return _recorded(path, recorder.dumps_in(path) if path.is_dir() else [path])


def _read(path: Path) -> bytes:
    try:
        return files.read(path, MAX_BYTES)
    except OSError as error:
        raise Stop(f"{str(path)!r:.300} cannot be read ({files.why(error)})", KNOWN) from None


def _parsed(path: Path, content: bytes) -> Any:
    if not (content.startswith(PICKLE) or JSON.match(content)):
        raise Stop(f"{str(path)!r:.300} is no Flight Recorder dump", KNOWN)
    try:
        return from_pickle(content) if content[:1] == PICKLE else parsing.from_json(content, MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise Stop(f"{str(path)!r:.300} is not read ({files.why(error)})", KNOWN) from None


def _recorded(given: Path, paths: list[Path]) -> tuple[list[Finding], str]:
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
    return hangs(whole), state
