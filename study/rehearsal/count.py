"""What rank 0 holds, from the beginning of a script to its last update: a `MemoryWatch` over all of it."""

import gc
import sys
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from study.measure import readback, roles
from study.measure.memory import MemoryWatch
from study.rehearsal.request import Answer, Request
from study.rehearsal.values import Shapes


class Enough(BaseException):
    """The script has made its updates."""


class Count:
    """Follows a script's updates, and what is held meanwhile."""

    shapes: Shapes

    def __init__(self, request: Request):
        self.request = request
        self.answer = Answer()
        self.watch = MemoryWatch("cpu", self._roles, collect=False, counts=self._counts)
        self.engine: Any = None  # DeepSpeed's
        self.optimizer: Any = None
        self.model: Any = None
        self.in_update = False
        torch_optimizer.register_optimizer_step_pre_hook(self._before_update)
        torch_optimizer.register_optimizer_step_post_hook(self._after_update)
        nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    # --- what counts

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the GPU's: it has no values, or it was made in a pass, as masks are."""
        # Of real tensors, data sets are the host's, and batches take their bytes on a GPU once they are moved there.
        return isinstance(tensor, FakeTensor) or self.shapes.has_begun

    def _roles(self) -> dict[int, str]:
        if self.model is None:
            return {}
        return roles.claimed_storages(self.model, self.optimizer)

    # --- what happens

    def _before_forward(self, module, _) -> None:
        if not self.shapes.has_begun and module.training and torch.is_grad_enabled():
            self.shapes.has_begun = True
            self.answer.loading_peak_bytes = self.watch.peak
            self.watch.peak = self.watch.total

    def _before_update(self, optimizer, *_) -> None:
        if self.engine is None:
            self.optimizer = optimizer
        if self.watch.close_to_peak is not None:
            self.watch.mark()

    def _after_update(self, *_) -> None:
        if self.engine is None:
            self.end_update()

    def end_update(self) -> None:
        """Note an update's peak. After the last one that is asked for, one more shows what the peak consists of."""
        answer = self.answer
        answer.updates += 1
        answer.peaks.append(self.watch.peak)
        if answer.updates == 1:
            self._describe()
        answer.after_step = self.watch.by_role()
        if answer.updates < self.request.steps:
            self.watch.peak = self.watch.total
        elif answer.updates == self.request.steps:
            self.watch.look_again()
        else:
            answer.parts = self.watch.at_peak or {}
            raise Enough

    def _describe(self) -> None:
        if self.engine is not None:
            self.model, self.optimizer = self.engine, self.engine.optimizer
        else:
            self.model = root_of(self.optimizer.param_groups[0]["params"][0])
        accelerator = None
        if "accelerate" in sys.modules:
            kind = sys.modules["accelerate"].Accelerator
            accelerator = next((each for each in gc.get_objects() if type(each) is kind), None)
        seen = readback.distribution(accelerator, self.model, self.optimizer)
        seen.dtypes = roles.dtypes(self.model, self.optimizer)
        self.answer.observed = seen.model_dump(mode="json")

    def finish(self) -> Answer:
        answer = self.answer
        if answer.peaks:
            answer.peak_bytes = max(answer.peaks)
            answer.peak_step = answer.peaks.index(answer.peak_bytes) + 1
        return answer


def root_of(parameter: torch.Tensor) -> nn.Module:
    """Return the outermost module that has a parameter: the model in all of its wrappers."""
    parents: dict[int, nn.Module] = {}
    owner = None
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_modules" not in vars(module):
            continue
        for child in module.children():
            parents[id(child)] = module
        if any(each is parameter for each in module._parameters.values()):
            owner = module
    if owner is None:
        raise LookupError("no module has the parameters that the optimizer updates")
    while id(owner) in parents:
        owner = parents[id(owner)]
    return owner
