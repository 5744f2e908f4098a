"""What clips by which norm, measured on two ranks."""

import json

import pytest
from conftest import ranks_of

# Rank r has the rows of seed r. Each way of training takes a step of SGD with lr 1 from the same weights, so that what
# they change by is the gradient that was used.
RANKS = """
import json, os, sys, warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from study.training.patches import fsdp_without_a_gpu

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, seen = dist.get_rank(), {}
rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])

def weights(prepared):
    parts = [getattr(p, "full_tensor", lambda p=p: p)() for p in prepared.parameters()]
    return torch.cat([part.detach().flatten().clone() for part in parts])

def loss_of(prepared):
    return 100 * prepared(rows).pow(2).mean()

plain = model()
loss_of(plain).backward()
mine = torch.cat([p.grad.flatten() for p in plain.parameters()])
everyones = mine.clone()
dist.all_reduce(everyones)
seen["own"], seen["full"] = mine.norm().item(), (everyones / 2).norm().item()
limit = seen["limit"] = seen["full"] / 4

def accelerated(kind):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    if kind == "ddp":
        accelerator = Accelerator(cpu=True)
    else:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, cpu_ram_efficient_loading=False
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        fsdp_without_a_gpu(plugin, "no")
    bare = model()
    return accelerator, *accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=1.0))

for kind in ("ddp", "fsdp2"):
    accelerator, prepared, optimizer = accelerated(kind)
    before = weights(prepared)
    accelerator.backward(loss_of(prepared))
    norm = accelerator.clip_grad_norm_(prepared.parameters(), limit)
    optimizer.step()
    seen[kind] = {"whole": norm.item(), "used": (weights(prepared) - before).norm().item()}

for stage in (1, 2, 3):
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": limit, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000}
    bare = model()
    engine = deepspeed.initialize(model=bare, optimizer=torch.optim.SGD(bare.parameters(), lr=1.0), config=config)[0]
    def whole():
        with deepspeed.zero.GatheredParameters(list(engine.parameters()), enabled=stage == 3):
            return weights(engine)
    before = whole()
    engine.backward(loss_of(engine))
    engine.step()
    seen[f"zero{stage}"] = {"whole": float(engine.get_global_grad_norm()), "used": (whole() - before).norm().item()}

Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("norms")
    run = ranks_of(RANKS, folder, str(folder))
    assert run.code == 0, run.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_all_clip_by_the_norm_of_the_whole_gradient(way, seen):
    """Not by a rank's own, nor by that of the part which it holds."""
    for rank in seen:
        assert rank["own"] != pytest.approx(rank["full"], rel=0.01), "else a rank's own norm would do as well"
        assert rank[way]["whole"] == pytest.approx(rank["full"], rel=1e-5)
        assert rank[way]["used"] == pytest.approx(rank["limit"], rel=1e-4)
