"""This process among those of its launch: the launcher above it, the other ranks, the machines, its share of them."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from study.core import machine
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.machine import cap_private_memory, is_alive, killed_by, oom_kills, usable_cores
from study.measure.hardware import CUDA
from study.records import collectives
from study.records.sections import MemoryCap

RANKS_WITHOUT_GPU = 2  # the fewest that show what sharding does


@dataclass(frozen=True)
class Launch:
    """The `accelerate launch` that started this process: its process id, config file and explicit process count."""

    pid: int
    started: float
    config_file: str
    num_processes: str | int | None
    oom_kills: int | None = None  # of this machine at the start; None if the kernel does not count them


NO_LAUNCH = Launch(0, 0.0, config_file="", num_processes=None, oom_kills=oom_kills())  # none is known yet


def from_torchrun(name: str, alone: int = 1) -> int:
    """Return a number that torchrun gives its ranks in the environment; `alone` without torchrun."""
    return int(os.environ.get(name, alone))


def find_launch() -> Launch:
    """Return the `accelerate launch` above this process, from its command line, which Accelerate passes to no rank."""
    above = machine.find_launcher()
    if above is None:
        what = "this script must be started by `accelerate launch` with a --config_file"
        raise Stop(what, "type: accelerate launch --config_file accelerate_configs/single.yaml study/train.py")
    process, options = above
    return Launch(process.pid, process.create_time(), options.config_file, options.num_processes, oom_kills())


def shrink_group(arm: Arm, launch: Launch) -> None:
    """Reduce a group that torchrun made as large as the machine, a rank for each core, to its first two ranks."""
    counted_by_torchrun = (launch.num_processes or arm.num_processes) == "auto"
    if CUDA or not counted_by_torchrun or from_torchrun("WORLD_SIZE") <= RANKS_WITHOUT_GPU:
        return
    if from_torchrun("RANK") >= RANKS_WITHOUT_GPU:
        os._exit(0)  # torchrun goes on with the others as long as none fails
    # Before any library reads it.
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_WITHOUT_GPU)


def ranks_that_died(folder: Path) -> dict[int, str | None]:
    """Return the other ranks that died, each with its signal if that is known. Their heartbeat file is left."""
    dead: dict[int, str | None] = {}
    # On several machines it is unknown: a process id may be another machine's. And without a folder nothing is asked.
    if from_torchrun("GROUP_WORLD_SIZE") > 1 or not folder.is_dir():
        return dead
    until_s = time.monotonic() + 0.5  # the kernel closes connections before the process counts as dead
    while not dead and time.monotonic() < until_s:
        with contextlib.suppress(Stop):  # a file may be removed meanwhile, or not be a heartbeat
            for log in collectives.load(folder):
                if log.pid and not is_alive(log.pid):
                    dead[log.rank] = killed_by(log.pid)
        time.sleep(0.01)  # torchrun asks for a dead rank's signal within 0.1 s, and then nobody else can
    return dead


def set_threads(threads: int | None) -> None:
    """Give every rank the same number of threads in every arm, also in `single`: a fair share of the cores."""
    # On a CPU at least two share the cores: the arm `single` must not be faster only for having more threads.
    sharing = max(from_torchrun("LOCAL_WORLD_SIZE"), 1 if CUDA else 2)
    threads = threads or max(1, usable_cores() // sharing)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are loaded later
    torch.set_num_threads(threads)


def cap_memory(gib: float | None) -> MemoryCap | None:
    """Emulate a device with this much memory. Returns the cap as it was set, and what enforces it."""
    if gib is None:
        return None
    cap_bytes = int(gib * 2**30)
    if not CUDA:
        cap_private_memory(cap_bytes)
        return MemoryCap(bytes=cap_bytes, emulated_by="RLIMIT_DATA")
    # The cap is on PyTorch's allocator: the context and NCCL take their memory beside it.
    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.get_device_properties().total_memory)
    return MemoryCap(bytes=cap_bytes, emulated_by="PyTorch's allocator")
