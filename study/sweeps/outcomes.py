"""Decides how a launch ended, from everything that it left behind. No other module decides this.

A killed rank records nothing, and the others record that they lost the connection, or that torchrun ended them. So the
record is completed from torchrun's report, the kernel's count of processes killed for memory, and the ranks' logs.
"""

import contextlib
import re
import signal
from pathlib import Path
from typing import NamedTuple

from study.core.errors import Stop
from study.core.machine import MORE_MEMORY
from study.records import collectives, store
from study.records.schema import Record
from study.sweeps.protocol import Cell

LAST_LINES = 15
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
SAID = re.compile(r"^(?!\s|Traceback \(most recent call last\)).+", re.MULTILINE)  # of a traceback only the last line
# By exit code: as Python reports a signal, and as a shell and our trainer do.
ENDS = {code: each.name for each in signal.Signals for code in (-each, 128 + each)}
ON_PURPOSE = ("SIGTERM", "SIGINT", "SIGHUP")  # a user ends a launch with them, or torchrun a rank
ACCIDENTS = {*ENDS.values()} - {*ON_PURPOSE}
# By how many processes the kernel killed: of a killed rank, once more of them were ruled out.
WITHOUT_KILLS = {0: "not for lack of memory", None: "the kernel does not say whether for lack of memory"}
LOST_PEER = ("gloo", "nccl", "connection", "peer", "socket")


class Ended(NamedTuple):
    """How a process of a launch ended, as its launcher reports."""

    how: str  # SIGSEGV, or "exit code 1"
    where: str | None = None  # "rank 1", if the report names it

    @property
    def name(self) -> str:
        return self.where or "a process of the launch"


def outcome(cell: Cell, folder: Path, code: int, stop: Stop | None, kills: int | None) -> Record:
    """Complete and return the record of a launch that ended by itself or by `stop`."""
    left = [*folder.glob(".*.part")]  # of a killed writer
    if stop is None or stop.status != "timeout":  # where each rank was explains a hang, and nothing else
        left += collectives.paths(folder)
    for path in left:
        path.unlink(missing_ok=True)
    record = read(folder) or cell.new_record(folder)
    if record.status in ANSWERS:
        return record
    if stop is None:
        stop = why_it_ended(record, (folder / "output.txt").read_text(errors="replace"), code, kills)
    if stop is None:
        return record
    return write_end(folder, record, stop)


def why_it_ended(record: Record, output: str, code: int, kills: int | None) -> Stop | None:
    """Return the Stop for a launch that ended by itself, or None if its record has the reason.

    `kills`: how many processes of this machine the kernel killed meanwhile; None if it does not say.
    """
    # The launcher stands last: its own end is a consequence, unless no rank was reported.
    ends = [*reported(output), Ended(_how(code))]
    has_reason = record.status == "failed" and not _lost_peer(record)
    # --- the kernel's count comes first, because the ranks that survive a kill give reasons of their own
    killed = [end for end in ends if end.how == "SIGKILL"]
    if kills and (killed or not has_reason):
        victim = killed[0] if killed else Ended("SIGKILL")
        what = f"the kernel killed {victim.name} because the host ran out of memory"
        return Stop(what, MORE_MEMORY, "oom", victim.where)
    # --- then the record: a rank that met an error of its own knows more than any launcher
    if has_reason:
        return None
    # --- then what the launcher reports; of several dead ranks, the root cause stands first
    for end in ends:
        if end.how == "SIGABRT" and collectives.MISMATCH.search(output):
            what = f"{end.name} was ended by gloo: the ranks called different collectives"
            return Stop(what, "look for an `if` on the rank around one", where=end.where)
        if end.how in ACCIDENTS:
            what = f"{end.name} was killed ({end.how}; {WITHOUT_KILLS[kills]})"
            return Stop(what, "see its output.txt, and start it again", where=end.where)
    if record.error and record.error.where != "another rank":
        return None
    # --- no rank wrote the reason: its imports failed, or a signal came while it imported, before it had a record
    first = ends[0]
    what = f"{first.name} ended with {first.how}"
    status = "killed"
    if first.how not in ON_PURPOSE:
        what += f" and no record of why: {' | '.join(SAID.findall(output)[-LAST_LINES:])}"
        status = "failed"
    return Stop(what, "see its output.txt", status, first.where)


def _lost_peer(record: Record) -> bool:
    """Return whether a record only says that a connection or another rank was lost."""
    if record.error is None:
        return False
    message = record.error.message.lower()
    # A sentence of our own that holds one of these words, such as of the connection to the hub, is a reason.
    by_name = record.error.kind != "Stop" and any(word in message for word in LOST_PEER)
    return by_name or message.endswith("ended without an error message") or "was killed by sig" in message


def reported(output: str) -> list[Ended]:
    """Read how processes ended, as the launcher reports. The root cause, which it prints last, is first."""
    by_torchrun = ENDED_BY_TORCHRUN.findall(output)
    ranks = [each for each in reversed(REPORTED.findall(output)) if each[2] not in by_torchrun]
    ends = [Ended(_how(int(code)), f"rank {rank}") for rank, code, _ in ranks]
    ends += [Ended(_how(-int(number))) for number in SIGNAL_TO_TORCHRUN.findall(output)]
    # Without torchrun's report: a single process has no rank to name.
    return ends or [Ended(first or second) for first, second in DIED.findall(output)]


def _how(code: int) -> str:
    return ENDS.get(code, f"exit code {code}")


def hang(folder: Path) -> str:
    """Read where the ranks of a launch are; empty if unknown. `study diagnose` says who waits for whom."""
    logs = []
    with contextlib.suppress(Stop, OSError):
        logs = collectives.load(folder)
    return "; ".join(f"rank {log.rank} at {log.place}" for log in logs if log.place)


def read(folder: Path) -> Record | None:
    """Return the record that the trainer has written so far. None if no record can be read."""
    with contextlib.suppress(Stop):
        return store.load(folder)
    return None


def write_end(folder: Path, record: Record, stop: Stop) -> Record:
    record = store.ended(record, stop, "Sweep")
    store.write(folder, record)
    return record
