"""Reads the files in which ranks say where they are among their collectives. `study.measure.heartbeat` writes them.

Each file is replaced as a whole, so it is readable while the run goes on and after it was killed.
"""

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from study.core.files import load as load_file

FILE = "collectives-rank{rank}.json"
MAX_BYTES = 4 * 2**20  # a file with 200 collectives has 30 kB
MAX_DIMENSIONS = 64  # of a tensor
# Anybody may have written such a file: its numbers are those of ranks, of sizes that 64 bits hold, and of seconds.
Rank = Annotated[int, Field(ge=0, lt=2**17)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=2**33, allow_inf_nan=False)]


# How gloo, and PyTorch's own check, report that ranks called different collectives. gloo then ends the process.
MISMATCH = re.compile(r"collective mismatch|mismatch between collectives|op\.preamble\.length <= op\.nbytes")


class LoggedCall(BaseModel, extra="forbid", frozen=True):
    """A collective of this rank. The index counts the collectives of its group, from 1."""

    group: str
    index: Number
    kind: str
    elements: Number | None = None  # of its input
    dtype: str = "unknown"  # of its input
    ended: bool


def collective_of(entry: dict) -> LoggedCall:
    """Read an entry of PyTorch's ring of collectives, the Flight Recorder."""
    name = entry["profiling_name"]
    # With gloo an entry stays "scheduled" when it is done, and `retired` tells; that was not tried with NCCL. An entry
    # that timed out is retired, too (c10d/FlightRecorder.hpp:174).
    return LoggedCall(
        group=str(entry["process_group"][0]),
        index=entry["collective_seq_id"],
        kind=(name.partition(":")[2] or name)[:60],
        elements=sum(math.prod(map(int, shape[:MAX_DIMENSIONS])) for shape in entry.get("input_sizes") or []),
        dtype=" ".join(entry.get("input_dtypes") or ["unknown"])[:40],
        ended=bool(entry.get("retired")) or entry["state"] == "completed",
    )


class RankLog(BaseModel, extra="forbid", frozen=True):
    """What a rank last wrote. `recent` is empty while collectives begin and end, and filled once that stops."""

    rank: Rank
    ranks: Rank
    pid: int | None = None  # on the rank's machine
    written_unix_s: Seconds
    still_s: Seconds  # seconds since a collective last began or ended
    recorded: bool  # whether PyTorch records collectives at all
    place: str | None = None  # what the main thread executes: "train.py:88 in step"
    # Its functions, the innermost first: "stage3.step", and "script:train.main" of the script itself.
    calls: list[str] = []
    groups: dict[str, list[Rank]] = {}  # the ranks of each process group
    recent: list[LoggedCall] = []


def paths(folder: Path) -> list[Path]:
    """Return the files of all ranks that have written one."""
    return sorted(folder.glob("collectives-rank*.json"))


def load(folder: Path) -> list[RankLog]:
    """Return the last logs of all ranks of a run, in their order; empty without such files."""
    what = "a log of collectives"
    remedy = "move it away: no rank wrote it"
    logs = [load_file(path, RankLog, what=what, remedy=remedy, most_bytes=MAX_BYTES) for path in paths(folder)]
    return sorted(logs, key=lambda log: log.rank)
