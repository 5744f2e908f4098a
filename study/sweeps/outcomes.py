"""Decides how a launch ended, from everything that it left behind. No other module decides this.

If the trainer knows the reason, it is in its record. A killed rank records nothing, and the surviving ranks record
something else: that they lost the connection, or that torchrun ended them. So the record is completed from torchrun's
report on each rank, the kernel's log and count of processes killed for memory, and the ranks' heartbeats.
"""

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from study.core.errors import Stop
from study.core.machine import MORE_MEMORY, is_stopped
from study.records import collectives, store
from study.records.schema import Record
from study.sweeps.protocol import Cell

LAST_LINES = 15
LAST_BYTES = 2**20  # of what a launch printed: enough for torchrun's report
# Statuses that the trainer decides. Any other may only mean that the trainer was ended or lost another rank.
ANSWERS = ("done", "oom", "diverged")
# torchrun's report on a failed rank (torch 2.13).
REPORTED = re.compile(r"\brank +: (\d+) \(local_rank: \d+\)[^\n]*\n[^\n]*?exitcode +: (-?\d+) +\(pid: (\d+)\)")
# Ranks that torchrun ended, after another rank had failed or after a signal to itself. None of them is the cause. One
# that ignored its SIGTERM is killed 30 s later, and torchrun reports that too.
ENDED_BY_TORCHRUN = re.compile(r"(?:Sending process|Unable to shutdown process) (\d+) (?:closing signal|via 15)")
SIGNAL_TO_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
# Accelerate's message on the single process that it starts without torchrun; and a part of torchrun's.
DIED = re.compile(r"died with <Signals\.(SIG[A-Z0-9]+): \d+>|Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
FRAME = re.compile(r"\s|Traceback \(most recent call last\)|$")  # lines of a traceback before its last line
ON_PURPOSE = ("SIGTERM", "SIGINT", "SIGHUP")  # signals with which a user ends a launch, or torchrun a rank
ENDS = {-each: each.name for each in signal.Signals}  # by exit code
LOST_PEER = ("gloo", "nccl", "connection", "peer", "socket")


class Ended(NamedTuple):
    """How a process of a launch ended, as its launcher reports: by a signal, or with an exit code."""

    name: str  # "rank 1", "a rank" or "the launcher"
    how: str
    where: str | None = None  # "rank 1"; None unless the report says which rank it was


def outcome(cell: Cell, folder: Path, code: int, stop: Stop | None, kills: int | None) -> Record:
    """The record of a launch that ended by itself or by `stop`, with what the trainer did not know."""
    left = [*folder.glob("record.json.part*"), *folder.glob(".*.part")]  # of a killed writer
    if stop is None or stop.status != "timeout":  # where each rank was explains a hang, and nothing else
        left += collectives.paths(folder)
    for path in left:
        path.unlink(missing_ok=True)
    record = read(folder) or cell.new_record(folder)
    if record.status in ANSWERS:
        return record
    if stop is None:
        with (folder / "output.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            output = file.read().decode(errors="replace")
        stop = why_it_ended(record, output, code, kills)
    if stop is None:
        return record
    return write_end(folder, record, stop)


def why_it_ended(record: Record, output: str, code: int, kills: int | None) -> Stop | None:
    """The Stop for a launch that ended by itself, or None if its record has the reason.

    `kills`: how many processes of this machine the kernel killed meanwhile; None if it does not say.
    """
    # The launcher stands last: its own end is a consequence, unless no rank was reported.
    ends = [*reported(output), Ended("the launcher", _how(code))]
    lost_peer = _lost_peer(record)
    # --- the kernel's count comes first, because the ranks that survive a kill give reasons of their own
    killed = [end for end in ends if end.how == "SIGKILL"]
    if kills and (killed or lost_peer or record.status in ("running", "killed")):
        victim = [*killed, Ended("a rank", "SIGKILL")][0]
        what = f"the kernel killed {victim.name} because the host ran out of memory"
        return Stop(what, MORE_MEMORY, "oom", victim.where)
    # --- then the record: a rank that met an error of its own knows more than any launcher
    if record.status == "failed" and not lost_peer:
        return None
    # --- then what the launcher reports; of several dead ranks, the root cause stands first
    for end in ends:
        if end.how.startswith("SIG") and end.how not in ON_PURPOSE:
            reason = "not for lack of memory"
            if kills is None:
                reason = "the kernel does not say whether for lack of memory"
            what = f"{end.name} was killed ({end.how}; {reason})"
            return Stop(what, "see its output.txt, and start it again", where=end.where)
    if record.error and record.error.where != "another rank":
        return None
    # --- no rank wrote the reason: its imports failed, or a signal came while it imported, before it had a record
    first = ends[0]
    if first.how in ON_PURPOSE:
        return Stop(f"interrupted: {first.how} ended {first.name}", "start it again", "killed", first.where)
    lines = " | ".join([line for line in output.splitlines() if not FRAME.match(line)][-LAST_LINES:])
    what = f"{first.name} ended with {first.how} and no record of why: {lines}"
    return Stop(what, "see its output.txt", where=first.where)


def _lost_peer(record: Record) -> bool:
    """Whether a record only says that a connection or another rank was lost."""
    if record.error is None:
        return False
    message = record.error.message.lower()
    # A sentence of our own that holds one of these words, such as of the connection to the hub, is a reason.
    by_name = record.error.kind != "Stop" and any(word in message for word in LOST_PEER)
    return by_name or message.endswith("ended without an error message")


def reported(output: str) -> list[Ended]:
    """How processes ended, as the launcher reports. The root cause, which it prints last, is first."""
    by_torchrun = ENDED_BY_TORCHRUN.findall(output)
    ends = [
        Ended(f"rank {rank}", _how(int(code)), f"rank {rank}")
        for rank, code, pid in reversed(REPORTED.findall(output))
        if pid not in by_torchrun
    ]
    ends += [Ended("the launcher", _how(-int(number))) for number in SIGNAL_TO_TORCHRUN.findall(output)]
    # Without torchrun's report: a single process has no rank to name.
    return ends or [Ended("a rank", first or second) for first, second in DIED.findall(output)]


def _how(code: int) -> str:
    return ENDS.get(code, f"exit code {code}")


def hang(folder: Path) -> str:
    """Where the ranks of a launch are; empty if unknown. `study diagnose` says who waits for whom."""
    logs = []
    with contextlib.suppress(Stop, OSError):
        logs = collectives.load(folder)
    stopped = [f"rank {log.rank} stopped (SIGSTOP)" for log in logs if log.pid and is_stopped(log.pid)]
    return "; ".join([*stopped, *(f"rank {log.rank} at {log.place}" for log in logs if log.place)])


def read(folder: Path) -> Record | None:
    """The record that the trainer has written so far. None if no record can be read."""
    with contextlib.suppress(Stop):
        return store.load(folder)
    return None


def write_end(folder: Path, record: Record, stop: Stop) -> Record:
    record = store.ended(record, stop, "Sweep")
    store.write(folder, record)
    return record
