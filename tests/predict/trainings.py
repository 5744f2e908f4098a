"""Trainings by the names of the trainer's flags, for tests that change one value at a time."""

from dataclasses import replace

from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.predict.outside.loops import OthersTraining
from study.predict.placement import Placement
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Recomputation

PLACED = ("fsdp", "group", "tensor_ranks", "sequence_ranks")


def training_of(
    model: Transformer,
    arm: str | None = None,
    *,
    ranks: int = 1,
    device: str = "cpu",
    zero: dict | None = None,
    precision: str = "fp32",
    micro_batch: int = 8,
    accumulation: int = 1,
    sequence: int = 128,
    checkpointing: object = False,
    **values,
) -> OthersTraining:
    """A training under an arm; without one, under DDP or in one process, or as `zero` and the others say."""
    placed = {name: values.pop(name) for name in PLACED if name in values}
    placement = Placement(ranks=ranks, device=device, **placed)
    if arm:
        placement = Placement.of(load_arm(arm), ranks, device)
    if zero is not None:
        usual = (placement.deepspeed or {}).get("zero_optimization", {})
        placement = replace(placement, deepspeed={"zero_optimization": usual | zero})
    batch = Batch(micro_batch, accumulation, sequence, Recomputation(checkpointing))
    return OthersTraining(model, RECIPES[precision], batch, placement, **values)


def placed(training: OthersTraining, **changes) -> OthersTraining:
    return replace(training, placement=replace(training.placement, **changes))
