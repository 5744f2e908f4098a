"""The trainer, and what strikes a rank of it in its third step: FAULT says what."""

import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import study.train
from study.training import main

RUNS = Path(sys.argv[sys.argv.index("--run-dir") + 1]).parent


def die() -> None:
    time.sleep(0.3)  # the other ranks write meanwhile what they have to
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("no such row")


def hang() -> None:
    (RUNS / "hangs").touch()
    time.sleep(600)


def fill_disk() -> None:
    """Fill the file system of the folder of all runs with a file of the user's."""
    with contextlib.suppress(OSError), (RUNS / "large").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


FAULTS = {
    "exception": (1, raise_error),
    "SIGKILL": (1, die),
    "hang": (1, hang),
    "full disk": (0, fill_disk),
    "none": (-1, die),  # strikes no rank
}
rank, strike = FAULTS[os.environ["FAULT"]]
steps = itertools.count(1)
step = study.train.optimizer_step


def struck(*arguments):
    if next(steps) == 3 and int(os.environ["RANK"]) == rank:
        strike()
    return step(*arguments)


study.train.optimizer_step = struck
main.main(study.train.train)
