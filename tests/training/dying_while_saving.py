"""The trainer, of which a rank is killed: DIES has a module, a function in it, the number of its call, and the rank.

In each of these runs the loss scale of fp16 doubles every four steps.
"""

import importlib
import itertools
import os
import signal
import time

import torch

import study.train
from study.training import main

GROWS = 4
*defaults, growth_interval, enabled = torch.amp.GradScaler.__init__.__defaults__
assert growth_interval == 2000
torch.amp.GradScaler.__init__.__defaults__ = (*defaults, GROWS, enabled)

if os.environ["DIES"] != "never":
    module, name, number, rank = os.environ["DIES"].split()
    owner = importlib.import_module(module)
    function = getattr(owner, name)
    calls = itertools.count(1)

    def deadly(*arguments, **options):
        if next(calls) == int(number) and os.environ["RANK"] == rank:
            time.sleep(0.3)  # the other ranks write meanwhile what they have to
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, deadly)
main.main(study.train.train)
