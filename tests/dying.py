"""The trainer, with what can happen to it. The environment says what, and to which rank.

DIES_AT=1:5 kills rank 1 in the fifth step it takes. FULL_AT=2 lets the disk refuse what the second checkpoint writes.
GROWS=4 doubles the loss scale every four steps.
"""

import itertools
import os
import resource
import signal
import time

import torch

import study.train
from study.machine import launcher
from study.machine.linux import oom_kills
from study.training import checkpoints, main
from study.training.launch import Launch

FILE_BYTES = 100_000  # a record is smaller, the files of a checkpoint are larger
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


def fill() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


if at := os.environ.get("DIES_AT"):
    rank, step = map(int, at.split(":"))
    if rank == RANK:
        before(study.train, "optimizer_step", step, die)
if number := os.environ.get("FULL_AT"):
    before(checkpoints, "save", int(number), fill)
if steps := os.environ.get("GROWS"):
    defaults = list(torch.amp.GradScaler.__init__.__defaults__)
    defaults[defaults.index(2000)] = int(steps)
    torch.amp.GradScaler.__init__.__defaults__ = tuple(defaults)

ranks = int(os.environ.get("WORLD_SIZE", 1))
main.main(study.train.train, Launch(os.getppid(), time.time(), str(launcher.config_file()), ranks, oom_kills()))
