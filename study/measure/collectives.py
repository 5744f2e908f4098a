"""Where this rank is among its collectives, kept in a file, for a run that hangs.

PyTorch records each collective in a ring in memory, in C++ and below everything that calls one: torch.distributed,
DDP's reducer, FSDP, DeepSpeed; with NCCL and gloo alike (torch 2.10 and later; TORCH_FR_BUFFER_SIZE entries, 2000 by
default). So nothing is added to a collective. A thread asks once a second how many there were, and copies the ring into
the rank's file once none has begun or ended for some seconds.

It does not see what goes around PyTorch's process groups (MPI, DeepSpeed's shared-memory operators), nor what a rank
did in its last second if it was killed in the middle of work. A rank that holds Python's lock for ever writes nothing.
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
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d

from study.inputs import files
from study.records.collectives import FILE, Collective, RankLog

ASK = signal.SIGUSR2  # asks a rank where it is
KEPT = 200  # collectives in a file
EVERY_S = 1.0
STILL_S = 5.0
MOVING_S = 10.0  # between two files while collectives come and go
_dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)


class CollectiveLog:
    """Writes the file of one rank into a run's folder, from a thread, until it is closed.

    Create it after the process group. `close` removes the file: what is left behind belongs to a run that did not end.
    """

    def __init__(self, path: Path, rank: int, every_s: float = EVERY_S, still_s: float = STILL_S):
        self.file, self.rank, self.every_s, self.still_s = Path(path) / FILE.format(rank=rank), rank, every_s, still_s
        self._status, self._since_s = None, time.monotonic()
        self._written_s, self._copied = -math.inf, False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collective log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop()
        self.file.unlink(missing_ok=True)

    def __enter__(self) -> "CollectiveLog":
        return self

    def __exit__(self, kind, *_) -> None:
        """After an error the file stays: it says where this rank left the others."""
        if kind is None:
            return self.close()
        self._stop()
        return self._write(_copy(), f"ended with {kind.__name__}")

    def _stop(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.look()
            self._closed.wait(self.every_s)

    def look(self) -> None:
        """Write the file where something has begun or ended since the last look, or where nothing has for `still_s`."""
        status, now_s = _counts(), time.monotonic()
        if status != self._status:
            self._status, self._since_s = status, now_s
            if self._copied or now_s - self._written_s >= MOVING_S:
                self._copied = False
                self._write([], None)
        elif not self._copied and now_s - self._since_s >= self.still_s:
            self._copied = True
            self._write(_copy(), _place())

    def _write(self, recent: list[Collective], place: str | None) -> None:
        self._written_s = time.monotonic()
        try:
            _write(self.file, self.rank, recent, place, bool(self._status), self._written_s - self._since_s)
        except OSError:
            self._closed.set()  # the folder is gone, or the disk is full: a log must not end the training


def print_stacks_when_asked() -> None:
    """Also before there is a run folder."""
    faulthandler.register(ASK)


class Heartbeat:
    """The file of one rank of the study's own trainer: written where the training is between two parts, and when asked.

    Nothing runs during timed steps: a thread sleeps in a read until this process gets ASK, which the sweep sends to a
    launch that takes too long. Then it copies PyTorch's ring, although the main thread waits in a collective. Of any
    other signal it tells `when_told_to_end`, in a thread.
    """

    def __init__(self, folder: Path, rank: int, when_told_to_end: Callable[[int], None] = lambda number: None):
        self.when_told_to_end = when_told_to_end
        self.file, self.rank = files.below(folder, FILE.format(rank=rank)), rank
        faulthandler.unregister(ASK)  # else it would not see the handler that comes below it now
        asked, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(asked, True)
        signal.signal(ASK, lambda *_: None)
        faulthandler.register(ASK, chain=True)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(asked,), name="heartbeat", daemon=True).start()
        if rank == 0:  # the others may be in a folder of another run, until the first rank has looked
            self.beat("set-up")

    def beat(self, place: str) -> None:
        self._write([], place)

    def close(self) -> None:
        """What is left behind belongs to a rank that was killed, or that hangs."""
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _answer(self, asked: int) -> None:
        while number := os.read(asked, 1):  # the numbers of all signals come this way
            if number[0] == ASK:
                self._write(_copy(), _place())
            else:
                threading.Thread(target=self.when_told_to_end, args=(number[0],), daemon=True).start()

    def _write(self, recent: list[Collective], place: str | None) -> None:
        with contextlib.suppress(OSError):  # no folder yet or on this machine, or no room on the disk
            _write(self.file, self.rank, recent, place, bool(_counts()), still_s=0.0)


def _write(file: Path, rank: int, recent: list[Collective], place: str | None, recorded: bool, still_s: float) -> None:
    log = RankLog(
        rank=rank,
        ranks=dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1)),
        pid=os.getpid(),
        written_unix_s=time.time(),
        still_s=still_s,
        recorded=recorded,
        place=place,
        groups=_groups(),
        recent=recent,
    )
    files.write_below(file.parent, file.name, log.model_dump_json().encode(), to_disk=False)


def _counts() -> dict | None:
    """How many collectives of each group have begun and ended. Takes microseconds. None: PyTorch records none."""
    return json.loads(_dump(False, False)).get("pg_status") if _dump else None


def _copy() -> list[Collective]:
    """The last collectives, in the order in which they began: all of PyTorch's ring is read, tens of milliseconds."""
    return _entries(json.loads(_dump(True, False))) if _dump else []


def _entries(content: dict) -> list[Collective]:
    """The last collectives in the order in which they began. Those between two ranks alone have no common index."""
    entries = [entry for entry in content.get("entries", []) if not entry.get("is_p2p")]
    return [
        Collective(
            group=str(entry["process_group"][0]),
            index=entry["collective_seq_id"],
            kind=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            elements=sum(math.prod(shape) for shape in entry.get("input_sizes") or []),
            ended=bool(entry["retired"]) or entry["state"] == "completed",
        )
        for entry in entries[-KEPT:]
    ]


def _groups() -> dict[str, list[int]]:
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}


def _place() -> str | None:
    """The line of the main thread nearest to its end that is not in an installed package."""
    frame, first = sys._current_frames().get(threading.main_thread().ident), None
    while frame is not None:
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        first = first or place
        if "site-packages" not in code.co_filename and not code.co_filename.startswith((sys.base_prefix, "<")):
            return place
        frame = frame.f_back
    return first
