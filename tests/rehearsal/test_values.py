"""Masks of data choose from tensors without values: how many they choose is known."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from study.core.models.values import WithoutValues
from study.rehearsal.values import Script, Shapes, Values

MASK = torch.tensor([[True, False, True], [False, True, False]])


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        (lambda logits: logits[MASK], (3, 5)),
        (lambda logits: logits[MASK.to(torch.uint8)], (3, 5)),
        (lambda logits: logits[:, MASK[0]], (2, 2, 5)),
        (lambda logits: logits[torch.tensor([1]), MASK[0]], (2, 5)),
        (lambda logits: logits[..., 0].masked_select(MASK), (3,)),
        (lambda logits: logits.masked_select(MASK[..., None]), (15,)),
        (lambda logits: logits[0, 0].masked_select(torch.ones(2, 3, 5, dtype=torch.bool)), (30,)),
        (lambda logits: logits.repeat_interleave(torch.tensor([2, 1]), dim=0), (3, 3, 5)),
    ],
)
def test_a_mask_of_data_chooses_from_what_has_no_values(choose, shape):
    values = Values(Script(Path(__file__), {}))
    shapes = Shapes(values, WithoutValues())
    with shapes.only():
        logits = torch.empty(2, 3, 5)
    with values:
        chosen = choose(logits)
    assert isinstance(chosen, FakeTensor)
    assert chosen.shape == shape
