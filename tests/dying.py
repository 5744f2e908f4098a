"""The trainer, with what can happen to it. The environment says what, and to which rank.

DIES_AT=1:5 kills rank 1 in the fifth step it takes. DIES_IN=seal:2 kills the first rank when it is about to seal its
second checkpoint, and DIES_IN=save:2 a rank that is about to save it, after the first one has. FULL_AT=2 lets the disk
refuse what the second checkpoint writes. GROWS=4 doubles the loss scale every four steps.
"""

import os
import resource
import signal
import time

import torch
from accelerate import Accelerator

import study.train
from study.machine import launcher
from study.machine.linux import oom_kills
from study.records import checkpoints as on_disk
from study.training import checkpoints, main
from study.training.launch import Launch

FILE_BYTES = 100_000  # a record is smaller, the files of a checkpoint are larger
RANK = int(os.environ.get("RANK", 0))
counts: dict[str, int] = {}


def before(owner, name: str, then) -> None:
    """Have `then` run before each call of a function, with the number of the call."""
    function = getattr(owner, name)

    def called(*arguments, **options):
        counts[name] = counts.get(name, 0) + 1
        then(counts[name])
        return function(*arguments, **options)

    setattr(owner, name, called)


def dies_at(count: int):
    def die(number: int) -> None:
        if number == count:
            time.sleep(0.3)  # the other ranks write meanwhile what they have to
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def fills_at(count: int):
    def fill(number: int) -> None:
        if number == count:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    return fill


if at := os.environ.get("DIES_AT"):
    rank, step = map(int, at.split(":"))
    if rank == RANK:
        before(study.train, "optimizer_step", dies_at(step))
if what := os.environ.get("DIES_IN"):
    part, number = what.split(":")
    if part == "seal":
        before(on_disk, "seal", dies_at(int(number)))
    elif RANK == 1:
        before(Accelerator, "save_state", dies_at(int(number)))
if number := os.environ.get("FULL_AT"):
    before(checkpoints, "save", fills_at(int(number)))
if steps := os.environ.get("GROWS"):
    defaults = list(torch.amp.GradScaler.__init__.__defaults__)
    defaults[defaults.index(2000)] = int(steps)
    torch.amp.GradScaler.__init__.__defaults__ = tuple(defaults)

ranks = int(os.environ.get("WORLD_SIZE", 1))
main.main(study.train.train, Launch(os.getppid(), time.time(), str(launcher.config_file()), ranks, oom_kills()))
