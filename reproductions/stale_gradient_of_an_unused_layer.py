# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: ZeRO changes how gradients are kept, and not what is computed (DeepSpeed's ZeRO page).

What happens (deepspeed 0.19.8): stage 3 moves a layer that an update does not use by its gradient of the update before.
"found": how far, with SGD and a gradient of 1. With stage 2, the control, it stays.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")

import deepspeed
import torch


class Model(torch.nn.ModuleDict):
    def forward(self, names: list[str]) -> torch.Tensor:
        return sum(self[name](torch.ones(1, 1)) for name in names).sum()


found = {}
config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
for name, zero in {"found": {"stage": 3}, "stage2": {"stage": 2}}.items():
    model, seen = Model({layer: torch.nn.Linear(1, 1) for layer in ("always", "sometimes")}), []
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config | {"zero_optimization": zero})
    for names in (["always", "sometimes"], ["always"]):
        engine.backward(engine(names))
        engine.step()
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            seen.append(float(model["sometimes"].bias.detach()))
    found[name] = round(seen[0] - seen[1], 3)
assert [*found.values()] == [1.0, 0.0], found
print(json.dumps(found), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
