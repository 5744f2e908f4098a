"""The trainer, with what can happen to it. The environment says what, and to which rank.

FAULT="exception" strikes rank 1 in its third step, FAULT="full disk" rank 0.
"""

import contextlib
import itertools
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

import study.train
from study.core import machine
from study.core.machine import oom_kills
from study.training import main
from study.training.launch import NO_LAUNCH, Launch

RANK = int(os.environ.get("RANK", 0))


def before(owner, name: str, count: int, then) -> None:
    """Have `then` run before this call of a function, counted from 1."""
    function = getattr(owner, name)
    numbers = itertools.count(1)

    def called(*arguments, **options):
        if next(numbers) == count:
            then()
        return function(*arguments, **options)

    setattr(owner, name, called)


def die() -> None:
    time.sleep(0.3)  # the other ranks write meanwhile what they have to
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("no such row")


def take_memory() -> None:
    """With no more address space than this process has, whoever allocates is refused it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, resource.RLIM_INFINITY))
    torch.empty(2**30)


def fill_disk() -> None:
    """Fill the file system of the folder of all runs with a file of the user's."""
    runs = Path(sys.argv[sys.argv.index("--run-dir") + 1]).parent
    with contextlib.suppress(OSError), (runs / "large").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


FAULTS = {
    "exception": (1, raise_error),
    "SIGKILL": (1, die),
    "out of memory": (1, take_memory),
    "hang": (1, lambda: time.sleep(600)),
    "full disk": (0, fill_disk),
}
if fault := os.environ.get("FAULT"):
    rank, strike = FAULTS[fault]
    if rank == RANK:
        before(study.train, "optimizer_step", 3, strike)
ranks = int(os.environ.get("WORLD_SIZE", 1))
forked = Launch(os.getppid(), time.time(), str(machine.launcher_config()), ranks, oom_kills())
main.main(study.train.train, NO_LAUNCH if fault else forked)  # a sweep has a real launcher, which is looked up
