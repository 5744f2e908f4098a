"""fp16: autocast with a loss scale that follows one rule in every arm. Without a GPU it runs under DeepSpeed alone."""

import json

from tests.conftest import ranks_of

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
