"""Writes a file for each rank that says where it is among its collectives, to explain a run that hangs.

PyTorch records each collective in a ring buffer, in C++ and below everything that calls one: torch.distributed, DDP's
reducer, FSDP, DeepSpeed; with NCCL and with gloo (torch 2.10 and later; TORCH_FR_BUFFER_SIZE entries, 2000 by default).
Collectives outside PyTorch's process groups (MPI, DeepSpeed's shared-memory operators) are not seen, nor is the last
second of a rank that was killed while it worked. A rank that never releases Python's lock writes nothing.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch.distributed as dist
from torch._C import _distributed_c10d

from study.core import files
from study.records.collectives import FILE, LoggedCall, RankLog, collective_of

ASK = signal.SIGUSR2  # tells a rank to write where it is
KEPT = 200  # collectives in a file of some 30 kB; the ring has 2,000
EVERY_S = 1.0
STILL_S = 5.0  # without a beginning or an end, before the ring is copied
MOVING_S = 10.0  # between two writes while collectives begin and end
MOST_CALLS = 60
Frames = Sequence[tuple[FrameType, int]]
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's ring, in a PyTorch with CUDA, and gloo's


class RankFile:
    """The file of a rank. One that is left shows that its rank was killed or hangs."""

    def __init__(self, folder: Path, rank: int):
        self.file = folder / FILE.format(rank=rank)
        self.rank = rank

    def write(
        self, place: str | None, recent: Sequence[LoggedCall] = (), frames: Frames = (), still_s: float = 0.0
    ) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        groups: dict = {}
        if dist.is_initialized():
            world = dist.distributed_c10d._world
            ranks = dist.get_world_size()
            groups = {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
        log = RankLog(
            rank=self.rank,
            ranks=ranks,
            pid=os.getpid(),
            written_unix_s=time.time(),
            still_s=still_s,
            recorded=bool(_ring()),
            place=place,
            calls=[_call(frame.f_code) for frame, _ in frames[:MOST_CALLS]],
            groups=groups,
            recent=list(recent),
        )
        files.write_below(self.file.parent, self.file.name, log.model_dump_json().encode(), to_disk=False)

    def write_all(self, still_s: float = 0.0) -> None:
        """Write where the main thread is, and PyTorch's ring."""
        frames = list(traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
        self.write(_place(frames), _copy(), frames, still_s)


class CollectiveLog(RankFile, contextlib.AbstractContextManager):
    """Writes a rank's file from a thread, until it is closed. Create it after the process group."""

    def __init__(self, folder: Path, rank: int, every_s: float = EVERY_S, still_s: float = STILL_S):
        super().__init__(folder, rank)
        self.every_s = every_s
        self.still_s = still_s
        self._status: dict | None = None  # how many collectives of each group have begun and ended
        self._since_s = time.monotonic()
        self._written_s = -math.inf
        self._copied = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collective log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop()
        self.file.unlink(missing_ok=True)

    def __exit__(self, kind, error, *_) -> None:
        """After an error the file stays: it says where this rank left the others."""
        if kind is None:
            self.close()
            return
        self._stop()
        frames = list(traceback.walk_tb(error.__traceback__))[::-1]
        with contextlib.suppress(OSError):
            self.write(f"ended with {kind.__name__} at {_place(frames)}", _copy(), frames)

    def _stop(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        # At an OSError the folder is gone, or the disk is full: a log must not end the training.
        with contextlib.suppress(OSError):
            while not self._closed.wait(self.every_s):
                self.look()

    def look(self) -> None:
        """Write the file if a collective has begun or ended since the last look, or if none has for a while."""
        status = _ring()
        now_s = time.monotonic()
        # Numbers of collectives, which change while the loop goes on. The ring itself is copied only once it stands.
        if status != self._status:
            self._status = status
            self._since_s = now_s
            if self._copied or now_s - self._written_s >= MOVING_S:
                self._copied = False
                self._written_s = now_s
                self.write(None)
        elif not self._copied and now_s - self._since_s >= self.still_s:
            self._copied = True
            self.write_all(now_s - self._since_s)


class Heartbeat(RankFile):
    """Writes a rank's file in the study's own trainer: between two parts of the training, and at the signal ASK.

    Nothing runs during timed steps: a thread sleeps in a read until this process gets a signal. At ASK, which the sweep
    sends to a launch that takes too long, it copies PyTorch's ring, even if the main thread waits in a collective.
    """

    def __init__(self, folder: Path, rank: int, on_other_signal: Callable[[int], None] = lambda number: None):
        super().__init__(folder, rank)
        self.on_other_signal = on_other_signal  # called in a thread of its own
        faulthandler.unregister(ASK)  # register again below, after Python's own handler, so that it calls that one too
        # Python writes the number of each signal into this pipe from C, so the thread that reads it wakes up even while
        # the main thread waits in a collective.
        signals, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(signals, True)
        signal.signal(ASK, lambda *_: None)
        faulthandler.register(ASK, chain=True)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(signals,), name="heartbeat", daemon=True).start()
        if rank == 0:  # the folder may belong to another run until the first rank has checked it
            self.beat("set-up")

    def beat(self, position: str) -> None:
        with contextlib.suppress(OSError):  # no folder yet, or not on this machine, or the disk is full
            self.write(position)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _answer(self, signals: int) -> None:
        while number := os.read(signals, 1):  # the numbers of all signals arrive here
            if number[0] == ASK:
                with contextlib.suppress(OSError):
                    self.write_all()
            else:
                threading.Thread(target=self.on_other_signal, args=(number[0],), daemon=True).start()


def _ring(with_entries: bool = False) -> dict:
    """Return NCCL's ring if a group has used it, else gloo's: a group with both libraries counts in each from 1.

    So a wait in gloo is not seen in a process that also has NCCL (by the sources of torch 2.11 and 2.13). Without
    entries it takes microseconds.
    """
    # A PyTorch with CUDA has both names, one for a CPU the second alone.
    dumps = [getattr(_distributed_c10d, name) for name in DUMPS if hasattr(_distributed_c10d, name)]
    for dump in dumps:
        ring = json.loads(dump(with_entries, False))
        if ring.get("pg_status"):
            return ring
    return {}


def _copy() -> list[LoggedCall]:
    """Return the last collectives in order, in tens of milliseconds; no sends and receives, which have no index."""
    entries = [entry for entry in _ring(with_entries=True).get("entries", []) if not entry.get("is_p2p")]
    return [collective_of(entry) for entry in entries[-KEPT:]]


def _place(frames: Frames) -> str | None:
    """Return the first line that is not in an installed package; the first of all if there is none."""
    of_script = [(frame, line) for frame, line in frames if _is_of_script(frame.f_code)]
    for frame, line in (*of_script, *frames):
        return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    return None


def _is_of_script(code: CodeType) -> bool:
    return "site-packages" not in code.co_filename and not code.co_filename.startswith((sys.base_prefix, "<"))


def _call(code: CodeType) -> str:
    call = f"{Path(code.co_filename).stem}.{code.co_name}"
    return f"script:{call}" if _is_of_script(code) else call
