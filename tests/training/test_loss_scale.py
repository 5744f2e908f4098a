"""fp16: autocast with a loss scale that follows one rule in every arm. Without a GPU it runs under DeepSpeed alone."""

import json

import pytest
from conftest import TRAINED, launch, ranks_of, traceback_of_ours

SHORT = ("--steps", "24", "--sequence", "32", "--micro-batch", "4", "--no-instruments")

# A gradient of 100 is above what fp16 holds until the scale has been halved seven times: 13 of 20 steps are left.
OVERFLOWING = """
import json, logging, os
import deepspeed, torch
from study.training import patches
logging.disable(logging.WARNING)
deepspeed.init_distributed("gloo")
ROW, results = torch.ones(1, 8), {}
for stage in (1, 2, 3):
    for mended in (False, True):
        model = torch.nn.Linear(8, 8)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                  "torch_autocast": {"enabled": True, "dtype": "float16"}}
        optimizer = torch.optim.AdamW(model.parameters())
        engine, zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if mended:
            patches.lower_loss_scale_on_overflow(zero)
        taken = 0
        for _ in range(20):
            before = zero.fp32_partitioned_groups_flat[0].clone() if stage == 3 else model.weight.detach().clone()
            engine.backward(100 * engine(ROW).sum())
            engine.step()
            after = zero.fp32_partitioned_groups_flat[0] if stage == 3 else model.weight
            taken += not torch.equal(before, after)
        results[f"{stage} {mended}"] = [taken, zero.torch_autocast_gradscaler.get_scale()]
print(json.dumps(results), flush=True)
os._exit(0)
"""


def test_an_overflow_lowers_the_scale_in_every_stage(tmp_path):
    """And without our patch DeepSpeed never takes a step."""
    results = json.loads(ranks_of(OVERFLOWING, tmp_path, ranks=1).output.splitlines()[-1])
    for stage in (1, 2, 3):
        assert results[f"{stage} False"] == [0, 65536.0], "if this fails, DeepSpeed has mended it"
        assert results[f"{stage} True"] == [13, 512.0]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["zero2", "zero3", "zero2_cpu"])
def test_zero_in_fp16_learns_what_it_learns_in_fp32(arm, trained):
    """Ten bits of fraction, so within a hundredth; and not the same, or nothing was computed in fp16."""
    half = trained(arm, *TRAINED, "--precision", "fp16", "--no-instruments").record
    full = trained("ddp", *TRAINED).record
    assert half["observed"]["autocast"] == "fp16"
    assert half["observed"]["dtypes"]["weights"] == half["observed"]["dtypes"]["moments"] == "float32"
    assert half["observed"]["loss_scale"] == 65536
    assert full["observed"]["loss_scale"] is None
    apart = [abs(a - b) for a, b in zip(half["loss"]["train"], full["loss"]["train"], strict=True)]
    assert 1e-6 < max(apart) < 0.01


@pytest.mark.parametrize("arm", ["single", "ddp"])
def test_without_deepspeed_it_needs_a_gpu(arm, tmp_path, cache):
    run = launch(arm, tmp_path / "run", *SHORT, "--precision", "fp16", cache=cache)
    assert run.code != 0
    assert f"--precision fp16 needs a GPU under {arm}" in run.output
    assert not traceback_of_ours(run.output)
