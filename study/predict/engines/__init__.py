"""Memory and traffic of a rank, as DDP, DeepSpeed and FSDP hold and move it."""

from study.predict.engines.base import Engine
from study.predict.engines.fsdp import FullySharded
from study.predict.engines.plain import PlainEngine
from study.predict.engines.zero3 import Stage3
from study.predict.engines.zero12 import Stages1And2
from study.predict.training import Training


def engine_of(training: Training) -> Engine:
    """The engine of a training."""
    placement = training.placement
    if placement.fsdp:
        return FullySharded(training, placement.fsdp)
    if placement.stage == 3:
        return Stage3(training)
    return Stages1And2(training) if placement.stage else PlainEngine(training)
