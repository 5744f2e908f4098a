"""What a watch shows while the training goes on: a line in the terminal, and values for Accelerate's trackers."""

import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live as Line

from study.core.numbers import short, size
from study.watch.steps import StepLog
from study.watch.trends import WORDS, Table, seconds, shares

EVERY_S = 1.0
LAST = 50  # steps that are averaged
PREFIX = "watch/"


class Live:
    """The live line of rank 0, only in a terminal, and the export to the trackers of an Accelerator."""

    def __init__(self, steps: StepLog, accelerator: Any, shows: bool):
        self.steps = steps
        self.trackers = getattr(accelerator, "trackers", [])
        self._next_s = time.monotonic() + EVERY_S
        self._shows = shows and sys.stderr.isatty()
        redirects = sys.stdout.isatty()  # what the script prints appears above the line; a file still gets it
        self._line = Line(console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=redirects)

    def step_ended(self) -> None:
        if time.monotonic() < self._next_s or not (self._shows or self.trackers):
            return
        self._next_s = time.monotonic() + EVERY_S
        recent = self.steps.recent(LAST)
        if not len(recent):
            return
        if self._shows:
            self._line.start()  # does nothing the second time
            self._line.update(in_words(recent), refresh=True)
        step = int(recent["step"][-1])
        for tracker in self.trackers:
            if tracker.name == "wandb":  # its own step must not move: values wait for the script's next ones
                tracker.log(values(recent) | {f"{PREFIX}step": step}, commit=False)
            else:
                tracker.log(values(recent), step=step)

    def close(self) -> None:
        self._line.stop()


def values(recent: Table) -> dict[str, float]:
    """Return the values for a tracker: means over the last steps."""
    named = {f"{PREFIX}{phase}_share": share for phase, share in shares(recent).items()}
    named |= {f"{PREFIX}step_s": float(seconds(recent).mean()), f"{PREFIX}loss": float(recent["loss"][-1])}
    named |= {f"{PREFIX}memory_bytes": float(recent["memory_bytes"][-1])}
    return {name: value for name, value in named.items() if np.isfinite(value)}


def in_words(recent: Table) -> str:
    """Return the live line: `step 120, 0.031 s, 52% backward, ..., 33,000 tokens/s, loss 2.31, 812 MB`."""
    step_s = float(seconds(recent).mean())
    ordered = sorted(shares(recent).items(), key=lambda part: -part[1])
    parts = [f"{share:.0%} {WORDS.get(phase, phase)}" for phase, share in ordered if share >= 0.05]
    speed = float(recent["tokens"].mean()) / step_s
    ends = [
        (speed, f"{speed:,.0f} tokens/s"),
        (recent["loss"][-1], f"loss {short(float(recent['loss'][-1]))}"),
        (recent["memory_bytes"][-1], size(float(np.nan_to_num(recent["memory_bytes"][-1])))),
    ]
    known = [text for value, text in ends if np.isfinite(value)]
    return ", ".join([f"step {recent['step'][-1]:.0f}", f"{short(step_s)} s", *parts, *known])
