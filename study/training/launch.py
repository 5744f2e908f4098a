"""Finds the launcher above this process, and decides which of the processes that it started take part."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.errors import Stop
from study.machine import launcher
from study.machine.linux import is_alive, oom_kills
from study.measure.hardware import CUDA
from study.records import collectives
from study.spec.arms import Arm

RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class Launch:
    """The `accelerate launch` that started this process: its process id, config file and explicit process count."""

    pid: int
    started: float
    config_file: str
    num_processes: int | None
    oom_kills: int | None = None  # of this machine at the start; None if the kernel does not count them


def find_launch() -> Launch:
    """The `accelerate launch` above this process, from its command line.

    Accelerate passes neither the config file nor the process count on to the script, and a mistake in either would
    record one arm and run another.
    """
    script = Path(sys.argv[0])
    if above := launcher.find():
        process, options = above
        count = options.num_processes or ""
        ranks = int(count) if count.isdigit() else None
        return Launch(process.pid, process.create_time(), options.config_file, ranks, oom_kills())
    raise Stop(
        "this script must be started by `accelerate launch` with a --config_file, which says how to distribute it",
        f"type: accelerate launch --config_file accelerate_configs/single.yaml study/{script.name}",
    )


def has_surplus_ranks(arm: Arm, launch: Launch) -> bool:
    """Whether torchrun started more processes than the study wants.

    `num_processes: auto` means one process per GPU, and without a GPU torchrun starts one per core.
    """
    counted_by_torchrun = arm.num_processes == "auto" and launch.num_processes is None
    return counted_by_torchrun and not CUDA and int(os.environ.get("WORLD_SIZE", "1")) > RANKS_WITHOUT_GPU


def shrink_group() -> None:
    """Reduce the group to the first two ranks. The others exit with code 0, which torchrun accepts.

    Every library reads the size of the group from the environment, so it is changed there before any of them reads it.
    """
    if int(os.environ["RANK"]) >= RANKS_WITHOUT_GPU:
        os._exit(0)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_WITHOUT_GPU)


def ranks_that_died(folder: Path, within_s: float) -> list[int]:
    """The other ranks of this machine that were killed: their heartbeat file exists, their process does not.

    This waits a moment, because the kernel closes a dying process's connections before the process counts as dead.
    """
    until_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(Stop):  # a file may be removed meanwhile, or not be a heartbeat
            dead = [log.rank for log in collectives.load(folder) if log.pid and not is_alive(log.pid)]
            if dead or time.monotonic() > until_s:
                return dead
        if time.monotonic() > until_s:
            return []
        time.sleep(0.05)


def ranks_alive() -> int:
    """How many ranks run on this machine, including this one: siblings with the same command line."""
    command, count = psutil.Process().cmdline(), 1
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            count += process.pid != os.getpid() and process.cmdline() == command
    return count
