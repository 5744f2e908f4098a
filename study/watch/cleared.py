"""Which backward passes began with gradients, and which lost theirs before the update.

Gradients that become None are noticed in every step. Values are read in the first steps alone, as that waits for a GPU.
"""

import statistics
from collections import deque

import torch

from study.records.sections import Watched
from study.watch.steps import Step

READ_STEPS = 6  # whose gradients are read
READ_GRADIENTS = 8  # of so many tensors


class ClearedGradients:
    """The gradients of one loop. Without tensors that are trained, as with ZeRO, nothing is seen."""

    def __init__(self, trained: list[torch.nn.Parameter], updated: list[torch.nn.Parameter], watched: Watched):
        self._trained = trained
        self._updated = updated
        self._watched = watched
        self._with_gradient: torch.nn.Parameter | None = None
        self._cleared: deque[int] = deque(maxlen=20)  # of the last steps
        self._cleared_first: list[int] = []  # of the first steps, in which zeros are seen as well
        self._had_gradients = False  # after a backward pass of the first steps, by their values

    def begin_backward(self, number: int, step: Step) -> None:
        """Look before a backward pass, after so many updates."""
        has_gradients = number <= READ_STEPS and self.has_gradients()
        self._look_for_cleared(step, self._had_gradients and not has_gradients)
        step.begins_with_gradients = has_gradients and (step.begins_with_gradients or step.backwards == 0)

    def end_backward(self, number: int) -> None:
        # Only gradients that become None are noticed, as zero_grad makes them by default
        # (torch/optim/optimizer.py:1024): zeros could only be seen by reading values, which waits for a GPU.
        self._with_gradient = None
        for parameter in self._trained:
            if parameter.grad is not None:
                self._with_gradient = parameter
                break
        self._had_gradients = number < READ_STEPS and self.has_gradients()

    def update(self, number: int, step: Step) -> None:
        """Look after an update, before it is counted."""
        self._look_for_cleared(step, to_zero=False)
        self._with_gradient = None
        self._note_passes_cleared(number, step)
        if number < READ_STEPS and self._updated and not step.cleared:
            self._watched.without_gradients += not self.has_gradients()

    def has_gradients(self) -> bool:
        """Return whether a gradient of the first tensors is not zero. It waits for a GPU."""
        known = [parameter.grad for parameter in self._updated if parameter.grad is not None]
        return any(bool(gradient.any()) for gradient in known[:READ_GRADIENTS])

    def _look_for_cleared(self, step: Step, to_zero: bool) -> None:
        if self._with_gradient is not None and (to_zero or self._with_gradient.grad is None):
            step.cleared = step.backwards

    def _note_passes_cleared(self, number: int, step: Step) -> None:
        watched = self._watched
        # The usual value of 20 steps: a script may clear gradients once on purpose, such as after an overflow.
        self._cleared.append(step.cleared)
        if number < READ_STEPS:
            self._cleared_first.append(step.cleared)
        usual = statistics.mode(self._cleared)
        watched.passes_cleared = max(usual, statistics.mode(self._cleared_first)) if self._cleared_first else usual
        # A pass whose gradients are cleared, as that of a generator, does not add what it began with.
        if number:
            watched.gradients_kept += step.begins_with_gradients and not step.cleared
        watched.updates_beside_others += step.other_updated
