"""Decides how a launch ended, from everything that it left behind. No other module decides this.

If the trainer knows the reason, it is in its record. A killed rank records nothing, and the surviving ranks record
something else: that they lost the connection, or that torchrun ended them. So the record is completed from torchrun's
report on each rank, the kernel's log and count of processes killed for memory, and the ranks' heartbeats.
"""

import contextlib
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from study.errors import Stop
from study.machine.kernel_log import KernelLog
from study.machine.linux import MORE_MEMORY, is_stopped, oom_kills
from study.records import collectives, store
from study.records.hangs import hangs
from study.records.schema import Record

if TYPE_CHECKING:
    from study.sweeps.launches import Turn

LAST_LINES = 15
# Statuses that the trainer decides. Any other may only mean that the trainer was ended or lost another rank.
ANSWERS = ("done", "oom", "host_oom", "diverged", "unavailable")
# torchrun's report on a failed rank (torch 2.13); and a line of its log, which has only the local rank.
REPORTED = re.compile(r"\brank +: (\d+) \(local_rank: \d+\)[^\n]*\n[^\n]*?exitcode +: (-?\d+) +\(pid: (\d+)\)")
LOGGED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+(?: \(pid: (\d+)\))?")
# A rank that ignored SIGTERM after another rank had died: torchrun kills it 30 s later, and reports that too.
KILLED_BY_TORCHRUN = re.compile(r"Unable to shutdown process (\d+) via 15, forcefully exiting via 9")
# Ranks that torchrun ended, after another rank had failed or after a signal to itself. None of them is the cause.
ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
SIGNAL_TO_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
# Accelerate's message on the single process that it starts without torchrun; and a part of torchrun's.
DIED = re.compile(r"died with <Signals\.(SIG[A-Z0-9]+): \d+>|Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
EXITED = re.compile(r"exitcode +: (-\d+)")
FRAME = re.compile(r"\s|Traceback \(most recent call last\)|$")  # lines of a traceback before its last line
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
SENTENCE = re.compile(r"^(?:\d+: )?(\S.*)\. What to do: ", re.MULTILINE)  # that a rank printed; as srun shows it, too
OF_A_LAUNCHER = ("ChildFailedError", "CalledProcessError", "SignalException")  # these only say that a rank failed
ON_PURPOSE = ("SIGTERM", "SIGINT", "SIGHUP")  # signals with which a user ends a launch, or torchrun a rank
LOST_PEER = ("gloo", "nccl", "connection", "peer", "socket", "ended without an error message")
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
class Death:
    """A rank that a signal ended, as its launcher reports."""

    signal: str
    rank: int | None = None
    pid: int | None = None

    @property
    def name(self) -> str:
        return "a rank" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Kills:
    """What the kernel killed for lack of memory during a launch: the number on this machine, and the ids if known."""

    count: int | None = None
    pids: frozenset[int] = frozenset()


class Killing:
    """Counts the processes that the kernel kills for memory from now on."""

    def __init__(self):
        self._before, self._log = oom_kills(), KernelLog()

    def __enter__(self) -> "Killing":
        return self

    def __exit__(self, *_) -> None:
        self._log.close()

    def so_far(self) -> Kills:
        pids, now = self._log.killed_for_memory(), oom_kills()
        count = None if None in (now, self._before) else now - self._before
        return Kills(len(pids or ()) or None if count is None else count, frozenset(pids or ()))


def outcome(turn: "Turn", folder: Path, code: int | None, stop: Stop | None, kills: Kills) -> Record:
    """The record of a launch that ended or was ended by `stop`, completed with what the trainer could not know."""
    for part in [*folder.glob("record.json.part*"), *folder.glob(".*.part")]:  # of a killed writer
        part.unlink(missing_ok=True)
    pids = {log.pid: log.rank for log in heartbeats(folder)}
    if stop is None or stop.status != "timeout":
        for path in collectives.paths(folder):
            path.unlink(missing_ok=True)
    record = read(folder) or turn.new_record(folder)
    if record.status in ANSWERS:
        return record
    if stop is None:
        output = last_words(folder)
        stop = killed(record, output, code, kills, pids)
        if stop is None and record.status == "running":
            lines = " | ".join([line for line in output.splitlines() if not FRAME.match(line)][-LAST_LINES:])
            stop = Stop(f"the launch ended with {_how(code)} and no record of why: {lines}", "see its output.txt")
    return record if stop is None else write_end(folder, record, stop)


def killed(record: Record, output: str, code: int | None, kills: Kills, pids: dict[int, int]) -> Stop | None:
    """The Stop for a launch in which a rank was killed. None if there is no sign of that.

    Of several dead ranks, the first is the one that died neither of a lost connection nor by torchrun.
    """
    deaths = [death for death in reported(output) if death.signal not in ON_PURPOSE]
    deaths = [replace(death, rank=pids[death.pid]) if death.pid in pids else death for death in deaths]
    message = record.error.message.lower() if record.error and record.error.kind != "Stop" else ""
    lost_peer = any(words in message for words in LOST_PEER) or is_unnamed(record)
    ranks = pids | {death.pid: death.rank for death in deaths if death.pid is not None and death.rank is not None}
    victims = sorted(ranks[pid] for pid in kills.pids & ranks.keys())
    if kills.pids and ranks and not victims:
        kills = Kills(0)  # the kernel killed other processes, which are not ours
    by_kill = [death for death in deaths if death.signal == "SIGKILL"]
    by_kill += [Death("SIGKILL")] if code == -signal.SIGKILL else []  # the launcher itself
    if victims or (kills.count and (by_kill or lost_peer or record.status in ("running", "interrupted"))):
        victim = f"rank {victims[0]}" if victims else by_kill[0].name if by_kill else "a rank"
        what = f"the kernel killed {victim} because the host ran out of memory"
        return Stop(what, MORE_MEMORY, "host_oom", _if_numbered(victim))
    if record.status == "failed" and not lost_peer:
        return None
    if not deaths:
        return silent(record, output, code)
    first = deaths[0]
    meaning = MEANINGS.get(first.signal, "somebody or something sent it")
    if first.signal == "SIGKILL":
        unknown = kills.count is None
        meaning = "the kernel does not say whether for lack of memory" if unknown else "not for lack of memory"
    remedy = "see its output.txt, and start it again"
    return Stop(f"{first.name} was killed ({first.signal}; {meaning})", remedy, where=_if_numbered(first.name))


def silent(record: Record, output: str, code: int | None) -> Stop | None:
    """The Stop for a launch in which no rank wrote the reason: a signal, or the rank that failed first.

    This happens if a rank's imports fail, or a signal comes while it imports, before it has a record.
    """
    if record.status != "running" and not (record.error and record.error.where == "another rank"):
        return None
    by_torchrun = set(map(int, ENDED_BY_TORCHRUN.findall(output)))
    ended = [(death.signal, death.name) for death in reported(output) if death.pid not in by_torchrun]
    ended += [(_name(int(number)), "the launcher") for number in SIGNAL_TO_TORCHRUN.findall(output)]
    ended += [(_name(-code), "the launcher")] if code is not None and code < 0 else []
    if ended and ended[0][0] in ON_PURPOSE:
        name, victim = ended[0]
        return Stop(f"interrupted: {name} ended {victim}", "start it again", "interrupted", _if_numbered(victim))
    failed = [(rank, number) for rank, number, pid in reversed(REPORTED.findall(output)) if int(pid) not in by_torchrun]
    if not failed:
        return None
    rank, number = failed[0]
    errors = [line for line in TRACEBACK.findall(output) if not any(name in line for name in OF_A_LAUNCHER)]
    errors = errors or SENTENCE.findall(output)  # of a rank that could not write it into the record
    what = f"rank {rank} ended with exit code {number} and no {'record of why' if errors else 'message'}"
    return Stop(": ".join([what, *errors[-1:]]), "see its output.txt", where=f"rank {rank}")


def is_unnamed(record: Record) -> bool:
    """Whether the record says only that a rank is gone."""
    return record.error is not None and record.error.message.endswith("ended without an error message")


def reported(output: str) -> list[Death]:
    """The ranks that a signal ended, as the launcher reports. The root cause, which it prints last, comes first."""
    whole = [(int(code), int(rank), int(pid)) for rank, code, pid in reversed(REPORTED.findall(output))]
    logged = [(int(code), None, int(pid) if pid else None) for code, pid in LOGGED.findall(output)]
    if whole or logged:
        later = set(map(int, KILLED_BY_TORCHRUN.findall(output)))
        return [Death(_name(-code), rank, pid) for code, rank, pid in whole or logged if code < 0 and pid not in later]
    names = [first or second for first, second in DIED.findall(output)]
    return [Death(name) for name in names] or [Death(_name(-int(code))) for code in EXITED.findall(output)]


def hang(folder: Path) -> str:
    """A sentence on where the ranks of a launch wait for each other; empty if unknown."""
    logs = heartbeats(folder)
    stopped = [f"rank {log.rank}" for log in logs if log.pid and is_stopped(log.pid)]
    said = [f"{' and '.join(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP)"] if stopped else []
    said += [finding.sentence for finding in hangs(logs)]
    places = [f"rank {log.rank} at {log.place}" for log in logs if log.place]
    return "; ".join(said or places)


def heartbeats(folder: Path) -> list[collectives.RankLog]:
    """The heartbeats that the ranks have left; empty if they cannot be read."""
    with contextlib.suppress(Stop, OSError):
        return collectives.load(folder)
    return []


def read(folder: Path) -> Record | None:
    """The record that the trainer has written so far. None if no record can be read."""
    try:
        return store.load(folder)
    except Stop:
        return None


def write_end(folder: Path, record: Record, stop: Stop) -> Record:
    record = store.ended(record, stop, "Sweep")
    store.write(folder, record)
    return record


def last_words(folder: Path) -> str:
    """The end of what a launch printed: enough for torchrun's report."""
    with (folder / "output.txt").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
        return file.read().decode(errors="replace")


def _if_numbered(rank: str) -> str | None:
    """`rank 1`, for `where` in a Stop; None for `a rank` and `the launcher`."""
    return rank if rank.startswith("rank ") else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else f"signal {_name(-code)}"
