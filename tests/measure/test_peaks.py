"""The laboratory that measures a machine: what it divides by."""

import pytest
import torch
from peaks import HOST_TOKENS, PASSES, passes
from torch.utils._python_dispatch import TorchDispatchMode

from study.core.models.build import build
from study.core.models.config import load
from study.core.shapes import VOCABULARY
from study.predict.architecture import named
from study.predict.step_time import work
from tests.predict.trainings import training_of


class Kernels(TorchDispatchMode):
    """Counts operations that are neither views nor mere memory."""

    count = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        self.count += not (function.is_view or function.namespace == "prim" or "empty" in function.name())
        return function(*args, **(kwargs or {}))


def test_the_pace_of_the_host_is_divided_by_the_kernels_that_run():
    """Gradients of the pass before were added to, in 28 kernels that nothing counted."""
    model = build(load("gpt-tiny"), torch.device("cpu"))
    ids = torch.randint(0, VOCABULARY, (1, HOST_TOKENS))
    passes(model, ids)
    with Kernels() as kernels:
        passes(model, ids)
    ours = training_of(named("gpt-tiny"), micro_batch=1, sequence=HOST_TOKENS)
    assert kernels.count / PASSES == pytest.approx(sum(each.kernels for each in work(ours).values()), rel=0.05)
