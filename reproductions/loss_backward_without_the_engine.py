# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `engine.backward(loss)` takes the place of `loss.backward()` (DeepSpeed's Getting Started, Training).

What happens (two ranks with different rows, three updates): without a stage the ranks' weights drift apart without a
message in seven releases of 0.15.0 to 0.18.2, and 0.18.3, 0.18.9 and 0.19.8 end with one. With stages 1 to 3 the
older ones end (KeyError: 0; stage 2 of the first two: no attribute 'ipg_index'); 0.18.3 and 0.19.8 train as with
`engine.backward`. In 0.18.9 other faults end or spoil stages 1 to 3 on a CPU. "found": stage 0.
"""

import json
import logging
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import deepspeed
import torch

deepspeed.init_distributed("gloo")
rank = int(os.environ["RANK"])


def trained(stage: int, by_engine: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    rows = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1 + rank))
    for batch in rows:
        loss = engine(batch).square().mean()
        if by_engine:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
    with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
        return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


answers = {}
for stage in range(4):
    try:
        weights = trained(stage, by_engine=False)
    except Exception as error:
        answers[f"stage {stage}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        continue
    others = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(others, weights)
    apart = float((others[0] - others[1]).abs().max())
    wrong = float((weights - trained(stage, by_engine=True)).abs().max())
    answers[f"stage {stage}"] = {"ranks_apart": round(apart, 6), "from_engine_backward": round(wrong, 6)}
if rank == 0:
    print(json.dumps({"found": answers["stage 0"], **answers, "deepspeed": deepspeed.__version__}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
