"""`SameGradients` lets trainers pass whose gradients are averaged, and stops one whose loss goes past DDP."""

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT, python

SCRIPT = Path(__file__).with_name("same_gradients.py")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("trainer", "the same in 2 updates"),
        ("sft", "the same in 2 updates"),
        ("dpo", "the same in 2 updates"),
        ("past", "update 1: 12 of 12 gradients differ between ranks, that of model.embed_tokens.weight first"),
    ],
)
def test_gradients_that_nobody_averages_are_found(kind, said, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT), kind]
    done = python(*launch, cwd=tmp_path, env=env)
    assert [f"rank {rank}: {said}" in done.stdout for rank in (0, 1)] == [True, True], done.stdout + done.stderr[-2000:]
