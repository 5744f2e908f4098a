"""The steps of a user's loop so far. Losses stay on the device, so that no step waits for it."""

import contextlib
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from study.measure.clock import now, seconds_between
from study.watcher.loop import Step

CHUNK = 256  # losses that are kept one by one


class Marks:
    """Seconds per step of a user's own loop: a mark after each step, without waiting."""

    FAR = 256  # after so many steps a GPU has passed a mark, so that reading it does not wait

    def __init__(self):
        self._marks = [now()]
        self._step_s: list[float] = []

    def tick(self) -> None:
        self._marks.append(now())
        if len(self._marks) > 2 * self.FAR:  # a long run does not keep all its events
            self._step_s += seconds_between(self._marks[: self.FAR + 1])
            del self._marks[: self.FAR]

    def read(self) -> list[float]:
        """Return the seconds of every step, including the first. On a GPU this waits for the last step."""
        if isinstance(last := self._marks[-1], torch.cuda.Event):
            last.synchronize()
        return self._step_s + seconds_between(self._marks)


class History:
    """The inputs, losses and times of each step. Steps count from 1."""

    def __init__(self) -> None:
        self.steps = 0
        self.evaluated: set[int] = set()
        self.rates: list[float | None] = []
        self._marks = Marks()
        self._passes: list[int] = []
        self._rows: list[int | None] = []
        self._tokens: list[int | None] = []
        self._recent: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        self._all_losses = True

    def add(self, step: Step) -> None:
        self._marks.tick()
        self.steps += 1
        if step.evaluated:
            self.evaluated.add(self.steps)
        self.rates.append(step.rate)
        self._passes.append(step.passes)
        self._rows.append(_sum(step.rows) or None)
        self._tokens.append(step.tokens or None)
        loss = step.loss if self._all_losses else None
        self._all_losses = loss is not None
        if loss is not None:
            self._recent.append(loss.float())
        if len(self._recent) == CHUNK:  # one small tensor in place of many
            self._chunks.append(torch.stack(self._recent))
            self._recent = []

    def losses(self) -> list[float]:
        """Return the losses of all steps; an empty list if one is unknown, or if the device has failed."""
        if not self._all_losses or not self.steps:
            return []
        with contextlib.suppress(RuntimeError):
            return torch.cat([*self._chunks, *(loss.reshape(1) for loss in self._recent)]).tolist()
        return []

    @property
    def passes_per_step(self) -> int | None:
        return _typical(self._passes)

    def measured(self, losses: list[float], timed: list[int]) -> dict[str, Any]:
        """Return the fields of RankMeasurements that the steps give."""
        finite = list(itertools.takewhile(math.isfinite, losses))
        step_s = self._marks.read()
        return {
            "steps": self.steps,
            "step_s": {step: step_s[step - 1] for step in timed},
            "losses": finite,
            "diverged_in": len(finite) + 1 if len(finite) < len(losses) else None,
            "rows_per_step": _typical(self._rows),
            "tokens_per_step": self._tokens[0] if len(set(self._tokens)) == 1 else None,  # not with padded rows
            "timed_rows": _sum([self._rows[step - 1] for step in timed]),
            "timed_tokens": _sum([self._tokens[step - 1] for step in timed]),
        }


def _typical(values: list) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if a value is unknown."""
    return statistics.mode(values) if values and None not in values else None


def _sum(values: Sequence[int | None]) -> int | None:
    """Return the sum. None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
