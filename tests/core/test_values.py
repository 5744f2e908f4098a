"""What tensors without values give in place of values, and the shapes and work of grouped products."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from study.core.models.values import GROUPED, WithoutValues

# Sizes that differ from each other: 5 groups, 6 rows, products along 8, 16 columns.
CASES = {
    "rows of groups": ((6, 8), (5, 8, 16), (6, 16), 6 * 16),
    "matrices of groups": ((5, 6, 8), (5, 8, 16), (5, 6, 16), 5 * 6 * 16),
    "columns of groups": ((6, 8), (8, 16), (5, 6, 16), 6 * 16),
    "columns of a group's matrices": ((5, 6, 8), (8, 16), (6, 16), 6 * 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_grouped_products_have_a_shape_in_every_dtype_and_their_work_is_counted(case, dtype):
    left, right, shape, products = CASES[case]
    with FakeTensorMode():
        offsets = None if len(left) == len(right) == 3 else torch.empty(5, dtype=torch.int32)
        matrices = torch.empty(left, dtype=dtype), torch.empty(right, dtype=dtype)
        with WithoutValues(), FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
            product = torch._grouped_mm(*matrices, offs=offsets)
    assert (product.shape, product.dtype) == (shape, dtype)
    assert counter.get_total_flops() == 2 * products * 8


def test_a_value_that_nobody_knows_reads_as_zero():
    with FakeTensorMode(), WithoutValues():
        assert torch.ones(1).item() == 0.0
        assert type(torch.ones(1, dtype=torch.int64).item()) is int
        assert torch.ones(1).sum().isfinite() is not None
