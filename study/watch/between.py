"""What a script does between the passes and the updates of a watched loop: to weights, gradients and random numbers.

Each look reads a few numbers, in the first steps or after an evaluation, as it waits for a GPU.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch

from study.records.sections import Watched
from study.watch.targets import is_due

READ_PASSES = 6  # whose random numbers are compared
READ_WEIGHTS = 32  # steps before which weights are compared: whoever changes them in every few steps means it
READ_GRADIENT_IN = 2  # the number of updates before the step whose gradients are compared over ranks
SAMPLE = 32  # numbers of a tensor
TENSORS = 8  # from each end of the model
# Of the weights: putting them back may round them.
MOVED = {torch.float32: 1e-3, torch.float64: 1e-3}
MOVED_HALF = 0.02

Sample = list[float]


class BetweenUpdates:
    """The looks at one loop, of the weights that its optimizer updates. Without any, as with ZeRO, nothing is seen."""

    def __init__(self, updated: list[torch.nn.Parameter], watched: Watched, device: str):
        self._updated = updated
        self._watched = watched
        large = [each for each in updated if each.numel() >= SAMPLE and each.is_floating_point()]
        self._last = large[-1] if large else None
        self._random = torch.cuda if device == "cuda" else torch
        self._draws: str | None = None  # what the numbers of the pass in progress begin with
        self._weights: torch.Tensor | None = None  # a part of those that the last update left
        self._has_run = False
        self._trains_otherwise = False  # by parts of the model, past its forward pass
        self.gradient: list[Sample] = [[], []]  # of one step on this rank: after its last backward pass, at its update

    def forward(self, number: int, is_first: bool, evaluated: bool, dropouts: Iterable[torch.nn.Module]) -> None:
        """Look before a forward pass in training, after so many updates. `is_first`: of its step."""
        if is_first and (evaluated or number < READ_WEIGHTS):
            self._compare_weights(evaluated)
        self._draws = None
        is_read = number < READ_WEIGHTS and len(self._watched.random_states) < READ_PASSES
        if is_read and any(each.training for each in dropouts):
            self._draws = self._numbers()

    def backward(self) -> None:
        """Look before a backward pass: a forward pass that draws nothing leaves the numbers as they are."""
        if self._draws and self._draws != self._numbers():
            self._watched.random_states.append(self._draws)
        self._draws = None

    def gradients(self, number: int, at_update: bool) -> None:
        if number == READ_GRADIENT_IN:
            self.gradient[at_update] = sample([each.grad for each in self._updated if each.grad is not None])

    def update(self, forwards: int, has_gradients: Callable[[], bool], is_looking: bool) -> None:
        """Look after an update. `is_looking`: instruments count what is computed."""
        self._weights = None if is_looking else self._part()
        self._has_run |= forwards > 0
        if forwards or not self._has_run or self._trains_otherwise or not self._updated:
            self._watched.updates_without_model = 0
            return
        self._watched.updates_without_model += 1
        self._trains_otherwise = is_due(self._watched.updates_without_model) and has_gradients()

    def _numbers(self) -> str:
        return hashlib.sha256(self._random.get_rng_state().numpy().tobytes()).hexdigest()[:12]

    @torch.no_grad()
    def _part(self) -> torch.Tensor | None:
        """Return a copy of a part of the last large tensor. A step has little time for it."""
        if self._last is None or not self._last.is_contiguous():
            return None
        return self._last.view(-1)[: SAMPLE**2].clone()

    def _compare_weights(self, evaluated: bool) -> None:
        before, now = self._weights, self._part()
        if before is None or now is None:
            return
        moved = float((now - before).norm()) > MOVED.get(now.dtype, MOVED_HALF) * float(before.norm())
        if evaluated:
            self._watched.evaluations += 1
            self._watched.moved_in_evaluation += moved
        else:
            self._watched.moved_besides += moved


@torch.no_grad()
def sample(gradients: list[torch.Tensor]) -> Sample:
    """Return a few numbers of the first and the last tensors, in one copy."""
    chosen = gradients[:TENSORS] + gradients[TENSORS:][-TENSORS:]
    parts = [each.reshape(-1)[:: max(1, each.numel() // SAMPLE)].float() for each in chosen if not each.is_sparse]
    return torch.cat(parts).tolist() if parts else []


def factor(before: list[Sample], after: Sample) -> float | None:
    """Return the gradient at the update over the sum of those of all ranks: 1 for a sum. None if it is neither."""
    if not after or {len(each) for each in before} != {len(after)}:
        return None
    total = torch.tensor(before, dtype=torch.float64).sum(0)
    seen = torch.tensor(after, dtype=torch.float64)
    times = float(seen @ total / total.square().sum().clamp(min=1e-300))
    return times if float((seen - times * total).norm()) < 1e-3 * float(seen.norm()) else None
