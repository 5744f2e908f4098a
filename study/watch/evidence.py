"""Reads the Flight Recorder dumps of ranks that were not watched, pickled or as JSON. Nothing is run or unpickled."""

from pathlib import Path

from study.core import files, parsing
from study.core.errors import Stop
from study.core.pickles import from_pickle
from study.records.collectives import RankLog
from study.watch import recorder

MAX_BYTES = 64 * 2**20
MOST_VALUES = 20_000_000
MOST_RANKS = 4096
PICKLE = b"\x80"  # the first byte of protocols 2 to 5
# What a damaged dump raises wherever a value has another type than the tool writes.
ODD = (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


def dumps(path: Path) -> list[RankLog]:
    """Return the logs of the ranks in a dump, or in a folder with one of each rank."""
    logs = [_read(each) for each in (recorder.dumps_in(path) if path.is_dir() else [path])[:MOST_RANKS]]
    last = max((rank for log in logs for ranks in [*log.groups.values(), [log.rank]] for rank in ranks), default=0)
    return [log.model_copy(update={"ranks": last + 1}) for log in logs]


def _read(path: Path) -> RankLog:
    try:
        content = files.read(path, MAX_BYTES)
        dump = from_pickle(content) if content[:1] == PICKLE else parsing.from_json(content, MOST_VALUES)
        return recorder.log_of(dump, recorder.rank_of(path) or 0)
    except ODD as error:
        what = f"{str(path)!r:.300} is no Flight Recorder dump ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "name a run, or dumps of Flight Recorder") from None
