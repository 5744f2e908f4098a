"""Trainings by the names of the trainer's flags, for tests that change one value at a time."""

from dataclasses import replace

from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.predict.loop import Loop
from study.predict.placement import Placement
from study.predict.training import Batch, Recomputation, Training

OF_BATCH = {"micro_batch": "rows", "accumulation": "passes", "sequence": "tokens"}


def training_of(model, arm=None, *, zero=None, precision="fp32", checkpointing=False, **values) -> Training:
    """A training under an arm; without one, under DDP or in one process, or as `zero` and the others say."""
    batch = {name: values.pop(flag) for flag, name in OF_BATCH.items() if flag in values}
    placement = Placement(**{name: values.pop(name) for name in vars(Placement()) if name in values})
    if arm:
        placement = Placement.of(load_arm(arm), placement.ranks, placement.device)
    if zero is not None:
        usual = (placement.deepspeed or {}).get("zero_optimization", {})
        placement = replace(placement, deepspeed={"zero_optimization": usual | zero})
    batch = Batch(**batch, recomputation=Recomputation(checkpointing))
    loop = Loop(**{name: values.pop(name) for name in vars(Loop()) if name in values})
    return Training(model, RECIPES[precision], batch, placement, loop=loop, **values)


def placed(training: Training, **changes) -> Training:
    return replace(training, placement=replace(training.placement, **changes))
