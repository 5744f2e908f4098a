"""DeepSpeed's optimizer of 16-bit weights without sharding: what its step makes, really and in theory."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

from study.measure.memory import MemoryWatch
from study.predict.architecture import named
from study.predict.estimate import moments, profile
from study.predict.memory.engine import Engine
from study.predict.setup import Setup

WIDTH, LAYERS = 256, 6
MADE_BYTES = 4 + 4  # of a parameter: the gradients in fp32, and a flat copy of them


def test_the_step_holds_all_gradients_in_fp32_twice(tmp_path, monkeypatch):
    """Before the update itself. The watch also sees the gradients in 16 bits, once they are read."""
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).bfloat16()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        optimizer = FP16_Optimizer(torch.optim.AdamW(model.parameters(), fused=True), static_loss_scale=1.0)
        optimizer.backward(model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().mean())
        peaks = []
        with MemoryWatch("cpu", dict, collect=False) as watch:
            before = watch.total
            monkeypatch.setattr(optimizer.optimizer, "step", lambda: peaks.append(watch.peak))
            optimizer.step()
    finally:
        dist.destroy_process_group()
    assert peaks[0] - before == pytest.approx((2 + MADE_BYTES) * LAYERS * WIDTH**2, abs=100)


def test_theory_holds_them_twice_with_deepspeed_only():
    def made_bytes(deepspeed: dict | None) -> int:
        setup = Setup(model=named("gpt2"), deepspeed=deepspeed, precision="bf16_cast", ranks=2)
        updates = [sum(now.values()) for when, now in moments(Engine(setup), profile(setup)) if when == "update"]
        return max(updates) - 2 * setup.model.trained

    elements = named("gpt2").trained
    assert made_bytes({"zero_optimization": {"stage": 0}}) == MADE_BYTES * elements
    assert made_bytes(None) == 4 * elements
