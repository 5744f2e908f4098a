"""One cell in one launch: start it, watch it, end it with all its processes, and complete the record that it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.errors import Stop
from study.machine.linux import die_with_parent, oom_kills
from study.records import schema, store
from study.records.schema import Record
from study.spec import arms
from study.spec.settings import options
from study.sweeps.protocol import SCRIPTS, Cell

POLL_S = 2.0  # seldom: what the sweep does while steps are timed disturbs them
GRACE_S = 20  # how long a launch may take to end when told to
LAST_LINES = 15
TAIL_BYTES = 4096  # of steps.jsonl: some thirty steps
# What a trainer finds out by itself. The others may be how it took being ended, or the loss of another rank.
ANSWERS = ("done", "oom", "host_oom", "diverged", "unavailable")
# A rank that is killed can say nothing. Its launcher says this of it (torchrun; Accelerate for a single process), and
# the other ranks, if they are sooner than the launcher, say that the connection is lost (gloo, NCCL).
KILLED = ("exitcode: -9", "exitcode  : -9", "Signal 9 (SIGKILL)", "Signals.SIGKILL")
LOST_PEER = ("gloo", "nccl", "connection", "peer", "socket")
INTERRUPTED = Stop("the sweep was ended while this cell ran", "start the sweep again", "interrupted")


@dataclass(frozen=True)
class Turn:
    """A cell with the number of its repeat: what one run folder is for."""

    cell: Cell
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}-r{self.repeat}"

    @property
    def declared(self) -> schema.Cell:
        """The place of this run in its experiment, for the record."""
        cell = self.cell
        return schema.Cell(protocol=cell.protocol, part=cell.part, scale=cell.scale, repeat=self.repeat)

    def new_record(self, folder: Path) -> Record:
        """A record of this cell for when the trainer leaves none."""
        requested = schema.Requested(**self.cell.settings, arm=self.cell.arm)
        return store.new(folder.name, []).model_copy(update={"requested": requested, "cell": self.declared})


def command(cell: Cell, folder: Path, nvme_dir: Path | None, resumed: Path | None = None) -> list[str]:
    """What one would type: the launch of a cell."""
    config = arms.all_paths()[cell.arm]
    if hosts := cell.value("hosts"):
        words = [sys.executable, "-m", "study.sweeps.over_hosts", str(cell.ranks or hosts), str(config)]
    else:
        words = arms.launcher(config) + (["--num_processes", str(cell.ranks)] if cell.ranks else [])
    return words + flags(cell, folder, nvme_dir) + (["--resume", str(resumed)] if resumed else [])


def flags(cell: Cell, folder: Path, nvme_dir: Path | None) -> list[str]:
    """The script of a cell with its flags."""
    words = [str(SCRIPTS[cell.script]), "--run-dir", str(folder)]
    words += ["--nvme-dir", str(nvme_dir)] if nvme_dir else []
    return words + options(cell.settings)


def run(
    turn: Turn,
    folder: Path,
    timeout_s: float,
    ends: float,
    nvme_dir: Path | None,
    watch: Callable[[Path, float], None],
    resumed: Path | None = None,
) -> Record:
    """Run one cell in a fresh launch, and return its record, however it ended. `ends` is the window's end.

    `resumed` is an earlier try that left a checkpoint to go on from.
    """
    folder.mkdir()
    killed_before, started, stop = oom_kills(), time.monotonic(), None
    try:
        with (folder / "output.txt").open("w") as output:
            launcher = subprocess.Popen(
                command(turn.cell, folder.resolve(), nvme_dir, resumed and resumed.resolve()),
                cwd=arms.ROOT,
                env=os.environ | {store.CELL: turn.declared.model_dump_json()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            while stop is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(POLL_S)
                    break
                seconds = time.monotonic() - started
                stop = out_of_time(seconds, timeout_s, ends)
                watch(folder, seconds)
            before_its_end = read(folder) if stop else None
        finally:
            end(launcher, folder, stacks=stop is not None)
        if before_its_end and before_its_end.status != "running":
            stop = None  # the record says how it ended, and it was only slow to exit
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            outcome(turn, folder, None, INTERRUPTED, 0)
        raise
    kills = None if killed_before is None else oom_kills() - killed_before
    return outcome(turn, folder, launcher.returncode, stop, kills)


def out_of_time(seconds: float, timeout_s: float, ends: float) -> Stop | None:
    """Why a launch is ended that has run for so long, None if it goes on."""
    if seconds > timeout_s:
        remedy = "see in its output.txt where the ranks stood that still answered, or give a larger --timeout-s"
        return Stop(f"it took longer than {timeout_s:.0f} s", remedy, "timeout")
    if time.monotonic() >= ends:
        return Stop(f"the window ended {seconds:.0f} s after its start", "start the sweep again", "interrupted")
    return None


def end(launcher: subprocess.Popen, folder: Path, stacks: bool) -> None:
    """End a launch and all that it started: with their stacks if it hung, then by SIGTERM, and at last by SIGKILL."""
    ranks = family(launcher, folder)
    try:
        if stacks:
            for process in ranks:
                _signal(process, signal.SIGUSR2, signal.SIGCONT)  # the trainer writes where each of its threads stands
                time.sleep(0.5)  # one after the other: they write into one file, and lines would be mixed
        for process in ranks:
            _signal(process, signal.SIGTERM, signal.SIGCONT)  # one that was stopped would not take it
        launcher.send_signal(signal.SIGCONT)
        for process in psutil.wait_procs(ranks, timeout=GRACE_S)[1]:
            _signal(process, signal.SIGKILL)
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(GRACE_S)
    finally:  # also when Ctrl-C is pressed again, by one who does not want to wait
        for process in ranks:
            _signal(process, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def family(launcher: subprocess.Popen, folder: Path) -> list[psutil.Process]:
    """The processes of a launch that still run, without the launcher itself.

    A rank whose launcher is gone is nobody's child any more, but its command line names the run folder.
    """
    ranks = set()
    with contextlib.suppress(psutil.Error):
        ranks.update(psutil.Process(launcher.pid).children(recursive=True))
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--run-dir" in words and str(folder.resolve()) in words and process.pid != launcher.pid:
            ranks.add(process)
    return list(ranks)


def _signal(process: psutil.Process, *numbers: int) -> None:
    with contextlib.suppress(psutil.Error):
        for number in numbers:
            process.send_signal(number)


def outcome(turn: Turn, folder: Path, code: int | None, stop: Stop | None, kills: int | None) -> Record:
    """The record of a launch that has ended, or was ended by `stop`, completed with what the trainer could not write.

    `kills` is how many processes the kernel has killed for lack of memory meanwhile, None where it does not say.
    """
    for part in folder.glob("record.json.part*"):  # of a writer that was killed
        part.unlink()
    record = read(folder) or turn.new_record(folder)
    if record.status in ANSWERS:
        return record
    if stop is None:
        output = (folder / "output.txt").read_text(errors="replace")
        stop = killed(record, output, code, kills)
        if stop is None and record.status == "running":
            lines = " | ".join(output.splitlines()[-LAST_LINES:])
            stop = Stop(f"the launch ended with exit code {code} and no record of why: {lines}", "see its output.txt")
    return record if stop is None else write_end(folder, record, stop)


def killed(record: Record, output: str, code: int | None, kills: int | None) -> Stop | None:
    """Why a launch ended of which a rank was killed, None if there is no sign of that.

    The ranks that survive report something else: that torchrun ended them, or that they lost the connection.
    """
    message = record.error.message.lower() if record.error and record.error.kind != "Stop" else ""
    lost_peer = any(word in message for word in LOST_PEER)
    signalled = code == -signal.SIGKILL or any(words in output for words in KILLED)
    if kills and (signalled or lost_peer or record.status in ("running", "interrupted")):
        remedy = "give fewer ranks, a smaller model, or a machine with more memory"
        return Stop("the kernel killed a rank because the host ran out of memory", remedy, "host_oom")
    if signalled and record.status != "failed":
        counted = "the kernel does not say whether for lack of memory" if kills is None else "not for lack of memory"
        return Stop(f"a rank was killed (SIGKILL; {counted})", "see its output.txt for which, and start it again")
    return None


def last_step(folder: Path) -> dict:
    """The newest training step of a run in progress, from the end of its file: {} before the first."""
    with contextlib.suppress(OSError, ValueError, TypeError, StopIteration):
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")[:-1]  # the last one is not whole
        return next(step for line in reversed(lines) if "loss" in (step := json.loads(line)))
    return {}


def read(folder: Path) -> Record | None:
    """What the trainer has written so far; None where no record can be read."""
    try:
        return store.load(folder)
    except Stop:
        return None


def write_end(folder: Path, record: Record, stop: Stop) -> Record:
    record = store.ended(record, stop, "Sweep")
    store.write(folder, record)
    return record
