"""The trainer, with one rank that kills itself: DIES_AT is the rank and the step it does not finish, as `1:5`."""

import os
import signal
import time

import study.train
from study.machine import launcher
from study.training import main
from study.training.launch import Launch

rank, last = map(int, os.environ["DIES_AT"].split(":"))
step, taken = study.train.optimizer_step, 0


def dying_step(*arguments):
    global taken
    taken += 1
    if taken == last and int(os.environ.get("RANK", 0)) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)


study.train.optimizer_step = dying_step
ranks = int(os.environ.get("WORLD_SIZE", 1))
main.main(study.train.train, Launch(os.getppid(), time.time(), str(launcher.config_file()), ranks))
