"""Theory's bytes of a checkpoint: by hand, for a million parameters."""

import pytest

from study.predictor.architecture import named
from study.predictor.memory.checkpoints import checkpoint_bytes
from study.predictor.setup import Setup

MILLION = 1_000_000
CASES = [  # arm, ranks, precision, bytes a parameter of all files, and of the rank that writes most
    ("single", 1, "fp32", 12, 12),
    ("ddp", 2, "fp32", 12, 12),
    ("ddp", 2, "bf16_cast", 14, 14),
    ("zero1", 2, "fp32", 16, 10),
    ("zero2", 4, "fp32", 16, 7),
    ("zero2", 2, "bf16_cast", 14, 8),
    ("zero3", 2, "fp32", 12, 6),
    ("zero3", 4, "bf16_cast", 12, 3),
    ("zero3_cpu", 2, "fp32", 12, 6),
    ("fsdp2", 4, "fp32", 12, 3),
    ("hsdp", 4, "fp32", 12, 3),
]


@pytest.mark.parametrize(("arm", "ranks", "precision", "total", "most"), CASES)
def test_by_hand(arm, ranks, precision, total, most):
    setup = Setup.of_arm(named("bert-tiny"), arm, ranks=ranks, precision=precision)
    answer = checkpoint_bytes(setup, MILLION)
    assert sum(answer) == pytest.approx(total * MILLION)
    assert max(answer) == pytest.approx(most * MILLION)
    assert len(answer) == ranks
