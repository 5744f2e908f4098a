"""Predicts a rank's memory with PyTorch's own FSDPMemTracker, which follows FSDP2 on tensors without values."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from transformers import PretrainedConfig

from study.core.models import config as configs
from study.core.models.build import build
from study.core.models.step import inputs, logits_and_losses
from study.core.models.values import WithoutValues
from study.records.schema import Record


def applies(record: Record) -> bool:
    """Return whether it knows a run's arm: only FSDP2, which keeps the same parts as stage 3 without offloading."""
    seen = record.observed
    return seen.stage == 3 and (seen.offload_optimizer, seen.offload_param) == ("none", "none")


def peak_bytes(record: Record) -> int:
    """Return the peak of a run's settings under FSDP2 instead of stage 3."""
    requested = record.requested
    config = configs.load(requested.model or "", attention=requested.attention, dropout=requested.dropout)
    names = ("precision", "micro_batch", "accumulation", "sequence", "checkpointing")
    return follow(config, record.observed.ranks or 1, **{name: getattr(requested, name) for name in names})


def follow(
    config: PretrainedConfig,
    ranks: int,
    *,
    precision: str,
    micro_batch: int,
    sequence: int,
    accumulation: int = 1,
    checkpointing: bool = False,
    gather_in: torch.dtype | None = None,
    reshard: bool | None = None,
) -> int:
    """Return the peak of two steps, with each layer as a unit that is gathered again in the backward pass.

    `gather_in` is the dtype of gathered weights if it is not that of the weights.
    """
    cast = torch.bfloat16 if precision == "bf16_cast" else gather_in
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        policy = MixedPrecisionPolicy(cast, cast)
        with FakeTensorMode(allow_non_fake_inputs=True), WithoutValues():
            dtype = torch.bfloat16 if precision == "bf16_pure" else torch.float32
            model = build(config, "cpu", dtype)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in _layers(model):
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # others read their step, which has no value
            batch = inputs(config, micro_batch, sequence)
            how = {"autocast": precision == "bf16", "logits": cast or dtype}
            # One step without the tracker: when DTensor first meets an operation, it tries it on tensors of whole
            # size, which the tracker would count as optimizer states.
            _step(model, optimizer, config, batch, 1, how)
            optimizer.state.clear()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tuple(batch.values()))
            with tracker:
                for _ in range(2):
                    _step(model, optimizer, config, batch, accumulation, how, tracker)
            return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()


def _step(model, optimizer, config, batch, passes: int, how: dict, tracker: FSDPMemTracker | None = None) -> None:
    for _ in range(passes):
        with torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
            losses = logits_and_losses(config, model, batch, how["logits"])[1]
        losses.mean().backward()
        if tracker:
            tracker.reset_mod_stats()  # it cannot follow a second pass without this; the peak stays
    optimizer.step()
    optimizer.zero_grad()


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost numbered modules."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)
