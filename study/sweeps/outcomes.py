"""Decides how a launch ended, from everything that it left behind. No other module decides this.

If the trainer knows the reason, it is in its record. A killed rank records nothing, and the surviving ranks record
something else: that they lost the connection, or that torchrun ended them. So the record is completed from torchrun's
report on each rank, the kernel's log and count of processes killed for memory, and the ranks' heartbeats.
"""

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from study.core.errors import Stop
from study.core.linux import MORE_MEMORY, OomKills, is_stopped
from study.records import collectives, store
from study.records.schema import Record

if TYPE_CHECKING:
    from study.sweeps.launches import Turn

LAST_LINES = 15
# Statuses that the trainer decides. Any other may only mean that the trainer was ended or lost another rank.
ANSWERS = ("done", "oom", "diverged")
# torchrun's report on a failed rank (torch 2.13).
REPORTED = re.compile(r"\brank +: (\d+) \(local_rank: \d+\)[^\n]*\n[^\n]*?exitcode +: (-?\d+) +\(pid: (\d+)\)")
# A rank that ignored SIGTERM after another rank had died: torchrun kills it 30 s later, and reports that too.
KILLED_BY_TORCHRUN = re.compile(r"Unable to shutdown process (\d+) via 15, forcefully exiting via 9")
# Ranks that torchrun ended, after another rank had failed or after a signal to itself. None of them is the cause.
ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
SIGNAL_TO_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
# Accelerate's message on the single process that it starts without torchrun; and a part of torchrun's.
DIED = re.compile(r"died with <Signals\.(SIG[A-Z0-9]+): \d+>|Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
FRAME = re.compile(r"\s|Traceback \(most recent call last\)|$")  # lines of a traceback before its last line
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
SENTENCE = re.compile(r"^(?:\d+: )?(\S.*)\. What to do: ", re.MULTILINE)  # that a rank printed; as srun shows it, too
OF_A_LAUNCHER = ("ChildFailedError", "CalledProcessError", "SignalException")  # these only say that a rank failed
ON_PURPOSE = ("SIGTERM", "SIGINT", "SIGHUP")  # signals with which a user ends a launch, or torchrun a rank
LOST_PEER = ("gloo", "nccl", "connection", "peer", "socket")
MEANINGS = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a file or shared memory that lost its room, or a crash in native code",
    "SIGABRT": "native code gave up; its last words are in output.txt",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGFPE": "a crash in native code",
    "SIGXCPU": "its limit of CPU time",
    "SIGXFSZ": "its limit of a file's size",
}


@dataclass(frozen=True)
class RankKilled:
    """A rank that a signal ended, as its launcher reports."""

    signal: str
    rank: int | None = None
    pid: int | None = None

    @property
    def name(self) -> str:
        return "a rank" if self.rank is None else f"rank {self.rank}"


def outcome(turn: "Turn", folder: Path, code: int | None, stop: Stop | None, kills: OomKills) -> Record:
    """Return the record of a launch that ended by itself or by `stop`, with what the trainer did not know."""
    for part in [*folder.glob("record.json.part*"), *folder.glob(".*.part")]:  # of a killed writer
        part.unlink(missing_ok=True)
    pids = {log.pid: log.rank for log in heartbeats(folder) if log.pid is not None}
    if stop is None or stop.status != "timeout":
        for path in collectives.paths(folder):
            path.unlink(missing_ok=True)
    record = read(folder) or turn.new_record(folder)
    if record.status in ANSWERS:
        return record
    if stop is None:
        output = last_words(folder)
        stop = killed(record, output, code, kills, pids) or _unexplained(record, output, code)
    return record if stop is None else write_end(folder, record, stop)


def _unexplained(record: Record, output: str, code: int | None) -> Stop | None:
    """Return the Stop for a launch that ended without a record of why, with the last lines that it printed."""
    if record.status != "running":
        return None
    how = f"exit code {code}" if code is None or code >= 0 else f"signal {_name(-code)}"
    lines = " | ".join([line for line in output.splitlines() if not FRAME.match(line)][-LAST_LINES:])
    return Stop(f"the launch ended with {how} and no record of why: {lines}", "see its output.txt")


def killed(record: Record, output: str, code: int | None, kills: OomKills, pids: dict[int, int]) -> Stop | None:
    """Return the Stop for a launch in which a rank was killed, or None if there is no sign of that.

    `pids` are the ranks by their process id. Of several dead ranks, the first is the one that died neither of a lost
    connection nor by torchrun.
    """
    deaths = [each for each in reported(output) if each.signal not in ON_PURPOSE]
    if stop := _out_of_memory(record, deaths, code, kills, pids):
        return stop
    if record.status == "failed" and not _lost_peer(record):
        return None
    if not deaths:
        return _without_deaths(record, output, code)
    first = deaths[0]
    meaning = MEANINGS.get(first.signal, "sent by an unknown process")
    if first.signal == "SIGKILL":
        unknown = kills.count is None
        meaning = "the kernel does not say whether for lack of memory" if unknown else "not for lack of memory"
    what = f"{first.name} was killed ({first.signal}; {meaning})"
    return Stop(what, "see its output.txt, and start it again", where=_if_numbered(first.name))


def _lost_peer(record: Record) -> bool:
    """Return whether a record only says that a connection or another rank was lost."""
    if record.error is None:
        return False
    message = record.error.message.lower()
    by_name = record.error.kind != "Stop" and any(word in message for word in LOST_PEER)
    return by_name or message.endswith("ended without an error message")


def _out_of_memory(
    record: Record, deaths: list[RankKilled], code: int | None, kills: OomKills, pids: dict[int, int]
) -> Stop | None:
    """Return the Stop for a rank that the kernel killed for memory. Its count is the machine's: others may be meant."""
    ranks = pids | {each.pid: each.rank for each in deaths if each.pid and each.rank is not None}
    victims = [f"rank {ranks[pid]}" for pid in ranks if pid in kills.pids]
    if not victims and kills.count and not (kills.pids and ranks):
        victims = [each.name for each in deaths if each.signal == "SIGKILL"]
        if code == -signal.SIGKILL or _lost_peer(record) or record.status in ("running", "killed"):
            victims.append("a rank")
    if not victims:
        return None
    what = f"the kernel killed {victims[0]} because the host ran out of memory"
    return Stop(what, MORE_MEMORY, "oom", _if_numbered(victims[0]))


def _without_deaths(record: Record, output: str, code: int | None) -> Stop | None:
    """Return the Stop for a launch in which no rank wrote the reason: a signal, or the rank that failed first.

    This happens if a rank's imports fail, or a signal comes while it imports, before it has a record.
    """
    if record.status != "running" and not (record.error and record.error.where == "another rank"):
        return None
    by_torchrun = set(map(int, ENDED_BY_TORCHRUN.findall(output)))
    ended = [(each.signal, each.name) for each in reported(output) if each.pid not in by_torchrun]
    ended += [(_name(int(number)), "the launcher") for number in SIGNAL_TO_TORCHRUN.findall(output)]
    if code is not None and code < 0:
        ended.append((_name(-code), "the launcher"))
    if ended and ended[0][0] in ON_PURPOSE:
        name, victim = ended[0]
        return Stop(f"interrupted: {name} ended {victim}", "start it again", "killed", _if_numbered(victim))
    failed = [(rank, number) for rank, number, pid in reversed(REPORTED.findall(output)) if int(pid) not in by_torchrun]
    return _failed_first(*failed[0], output) if failed else None


def _failed_first(rank: str, number: str, output: str) -> Stop:
    """Return the Stop for the rank that failed first, with the last error that was printed."""
    errors = [line for line in TRACEBACK.findall(output) if not any(name in line for name in OF_A_LAUNCHER)]
    errors = errors or SENTENCE.findall(output)  # of a rank that could not write it into the record
    what = f"rank {rank} ended with exit code {number} and no {'record of why' if errors else 'message'}"
    return Stop(": ".join([what, *errors[-1:]]), "see its output.txt", where=f"rank {rank}")


def reported(output: str) -> list[RankKilled]:
    """Return the ranks that a signal ended, as the launcher reports. The root cause, which it prints last, is first."""
    reports = REPORTED.findall(output)
    if not reports:
        return [RankKilled(first or second) for first, second in DIED.findall(output)]
    later = KILLED_BY_TORCHRUN.findall(output)
    signalled = [each for each in reversed(reports) if int(each[1]) < 0 and each[2] not in later]
    return [RankKilled(_name(-int(code)), int(rank), int(pid)) for rank, code, pid in signalled]


def hang(folder: Path) -> str:
    """Return where the ranks of a launch are; empty if unknown. `study diagnose` says who waits for whom."""
    logs = heartbeats(folder)
    stopped = [f"rank {log.rank} stopped (SIGSTOP)" for log in logs if log.pid and is_stopped(log.pid)]
    return "; ".join([*stopped, *(f"rank {log.rank} at {log.place}" for log in logs if log.place)])


def heartbeats(folder: Path) -> list[collectives.RankLog]:
    """Return the heartbeats that the ranks have left; empty if they cannot be read."""
    with contextlib.suppress(Stop, OSError):
        return collectives.load(folder)
    return []


def read(folder: Path) -> Record | None:
    """Return the record that the trainer has written so far. None if no record can be read."""
    try:
        return store.load(folder)
    except Stop:
        return None


def write_end(folder: Path, record: Record, stop: Stop) -> Record:
    record = store.ended(record, stop, "Sweep")
    store.write(folder, record)
    return record


def last_words(folder: Path) -> str:
    """Return the end of what a launch printed: enough for torchrun's report."""
    with (folder / "output.txt").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
        return file.read().decode(errors="replace")


def _if_numbered(rank: str) -> str | None:
    """Return `rank 1`, for `where` in a Stop; None for `a rank` and `the launcher`."""
    return rank if rank.startswith("rank ") else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
