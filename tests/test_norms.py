"""What clips by which norm, and what FSDP2 holds of weights that were loaded in bf16: measured on two ranks."""

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

def model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]).to(dtype)

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

def accelerated(kind, mixed="no", dtype=torch.float32, optimizer=torch.optim.SGD, lr=1.0):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    if kind == "ddp":
        accelerator = Accelerator(cpu=True)
    else:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, cpu_ram_efficient_loading=False
        )
        accelerator = Accelerator(cpu=True, mixed_precision=mixed, fsdp_plugin=plugin)
        fsdp_without_a_gpu(plugin, mixed)
    bare = model(dtype)
    return accelerator, *accelerator.prepare(bare, optimizer(bare.parameters(), lr=lr))

for kind in ("ddp", "fsdp2"):
    accelerator, prepared, optimizer = accelerated(kind)
    before = weights(prepared)
    accelerator.backward(loss_of(prepared))
    norm = accelerator.clip_grad_norm_(prepared.parameters(), limit)
    optimizer.step()
    local = getattr(norm, "to_local", lambda norm=norm: norm)()
    whole = getattr(norm, "full_tensor", lambda norm=norm: norm)()
    used = (weights(prepared) - before).norm()
    seen[kind] = {"item": norm.item(), "local": local.item(), "whole": whole.item(), "used": used.item()}

for mixed in ("bf16", "no"):
    accelerator, prepared, optimizer = accelerated("fsdp2", mixed, torch.bfloat16, torch.optim.AdamW, 1e-3)
    accelerator.backward(prepared(rows.bfloat16()).float().pow(2).mean())
    optimizer.step()
    size = lambda tensor: getattr(tensor, "_local_tensor", tensor).nbytes
    held = sum(size(p) + size(p.grad) for p in prepared.parameters())
    held += sum(size(v) for s in optimizer.state.values() for v in s.values() if v.dim())
    total = torch.tensor(held)
    dist.all_reduce(total)
    seen[f"bytes {mixed}"] = total.item() / sum(p.numel() for p in prepared.parameters())

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


def test_what_is_logged_of_fsdp2s_norm_is_the_whole_one_on_each_rank(seen):
    """It comes as a DTensor: neither its `item()` nor its local value is the norm of a rank's part."""
    for rank in seen:
        assert rank["fsdp2"]["item"] == rank["fsdp2"]["local"] == pytest.approx(rank["full"], rel=1e-5)


def test_accelerate_trains_bf16_weights_in_fp32_under_fsdp2_with_bf16(seen):
    """Weights, gradients and two moments, over all ranks, bytes a parameter. All were loaded in bf16."""
    assert seen[0]["bytes bf16"] == 16
    assert seen[0]["bytes no"] == 8
