# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: ZeRO does "not change the model optimization method or affect model convergence", of optimizers that save
memory, Adafactor among them (ZeRO paper, section 2.2.3); an optimizer that was not tested needs a flag only.

What happens (deepspeed 0.19.8): stages 1 to 3 hand an optimizer one flat vector a group. Adafactor factors matrices,
and of a vector it keeps a second moment for each weight: its states grow, and its updates are others than under DDP.
"""

import json
import logging
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    os.execv(
        sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    )
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from torch.nn.functional import mse_loss

deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
alive = []  # a DDP model that is freed while gloo works may hang
rows, targets = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(rank)).unbind()


def trained(stage: int | None, kind: type) -> tuple[float, int]:
    """The mean loss at the last of 8 steps, and the bytes of a rank's optimizer states; under DDP without a stage."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128))
    optimizer = kind(model.parameters(), lr=0.01)
    if stage is None:
        model = torch.nn.parallel.DistributedDataParallel(model)
        alive.append(model)
        backward, step = torch.Tensor.backward, optimizer.step
    else:
        zero = {"stage": stage, "reduce_bucket_size": 1 << 16}
        config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config | {"zero_optimization": zero})
        backward, step = model.backward, model.step
    for _ in range(8):
        loss = mse_loss(model(rows), targets)
        backward(loss)
        step()
        optimizer.zero_grad()
    torch.distributed.all_reduce(mean := loss.detach() / 2)
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return mean.item(), sum(value.numel() * value.element_size() for value in states if value.dim())


seen = {f"stage {stage or 0}": trained(stage, torch.optim.Adafactor) for stage in (None, 1, 2, 3)}
seen |= {f"stage {stage or 0}, AdamW": trained(stage, torch.optim.AdamW) for stage in (None, 1)}  # the control
if rank == 0:
    # Stage 0 is DDP.
    print(json.dumps({"found": round(seen["stage 1"][1] / seen["stage 0"][1], 1), **seen}), flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
