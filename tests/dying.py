"""The trainer, and what strikes a rank. FAULT has that, a module, a function in it, the number of its call, the rank.

In each of these runs the loss scale of fp16 doubles every four steps.
"""

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path

import torch

import study.train
from study.training import main

RUNS = Path(sys.argv[sys.argv.index("--run-dir") + 1]).parent
GROWS = 4
*defaults, growth_interval, enabled = torch.amp.GradScaler.__init__.__defaults__
assert growth_interval == 2000
torch.amp.GradScaler.__init__.__defaults__ = (*defaults, GROWS, enabled)


def die() -> None:
    time.sleep(0.3)  # the other ranks write meanwhile what they have to
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("no such row")


def crash() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    sys.exit(0)


def fill_the_disk() -> None:
    time.sleep(0.3)
    with (RUNS / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def remove_the_folder() -> None:
    shutil.rmtree(sys.argv[sys.argv.index("--run-dir") + 1])


def hang() -> None:
    (RUNS / "hangs").touch()
    time.sleep(600)


STRIKES = {"exception": raise_error, "SIGKILL": die, "SIGSEGV": crash, "exit": leave, "hang": hang}
STRIKES |= {"fill": fill_the_disk, "remove": remove_the_folder}
if os.environ["FAULT"]:
    what, module, name, number, rank = os.environ["FAULT"].split()
    owner = importlib.import_module(module)
    function = getattr(owner, name)
    calls = itertools.count(1)

    def struck(*arguments, **options):
        if next(calls) == int(number) and os.environ["RANK"] == rank:
            STRIKES[what]()
        return function(*arguments, **options)

    setattr(owner, name, struck)


def train(run):
    weakref.finalize(run.model, os._exit, 3)  # DDP that is freed before its process ends may wait for ever
    return study.train.train(run)


main.main(train)
