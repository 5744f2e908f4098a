"""Your own measurements: a line for each training with an arm of this study, in a small CSV file."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from study.errors import Stop
from study.io.numbers import short, signed
from study.machine.gpus import gpu_named
from study.predictor.architecture import named
from study.predictor.outside import predicting
from study.predictor.outside.described import NotPredicted
from study.predictor.outside.predicting import Predicted
from study.predictor.outside.published import Measured, MemoryKind, read
from study.predictor.setup import Setup
from study.predictor.step_time import Machine

DEFAULTS = (
    "Assumed of every line: all weights train, attention is sdpa, AdamW is fused, the loss needs all logits at once, "
    "nothing is compiled, and the GPUs have the usual links of their kind, eight to a node. Where the file has no "
    "value: one pass in a step, no recomputation, and memory as PyTorch's allocated bytes."
)


class Measurement(BaseModel, frozen=True):
    """A training and what was measured of it."""

    model: str  # a built-in shape, a folder with config.json, or a model on the hub
    gpu: str
    gpus: int = Field(ge=1)
    arm: str  # a file of accelerate_configs/
    tokens: int = Field(ge=1)  # of a row
    rows: int = Field(ge=1)  # of a GPU and pass
    precision: Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]
    passes: int = Field(1, ge=1)  # of a step
    recompute: bool = False
    memory_kind: MemoryKind = "allocated"
    memory_gb: Measured = None  # 10^9 bytes
    step_s: Measured = None


def compared(path: Path) -> list[dict]:
    """Return a line for each measured number of a file, with its prediction; or why there is none."""
    lines = []
    for one in read(path, Measurement):
        about = {"model": one.model, "arm": one.arm, "on": f"{one.gpus} x {one.gpu}"}
        for name, predict, measured in (("memory_gb", _memory_gb, one.memory_gb), ("step_s", _step_s, one.step_s)):
            if measured is not None:
                lines.append(about | {"quantity": name, "measured": measured} | _beside(predict, one, measured))
    return lines


def _beside(predict: Callable[[Measurement], Predicted], one: Measurement, measured: float) -> dict:
    """Return a prediction as columns: the number, how far off it is, and its interval."""
    try:
        predicted = predict(one)
    except (NotPredicted, Stop) as reason:
        return {"predicted": None, "off": str(reason)}
    ends = f"{short(predicted.low)} to {short(predicted.high)}" if predicted.low else None
    return {"predicted": predicted.value, "off": signed(predicted.value / measured - 1), "interval": ends}


def _memory_gb(one: Measurement) -> Predicted:
    return Predicted(predicting.memory(_setup(one), one.memory_kind, gpu_named(one.gpu)).value / 1e9)


def _step_s(one: Measurement) -> Predicted:
    return predicting.step(_setup(one), Machine(gpu=gpu_named(one.gpu), gpus_per_node=min(one.gpus, 8)))


def _setup(one: Measurement) -> Setup:
    return Setup.of_arm(
        named(one.model),
        one.arm,
        ranks=one.gpus,
        sequence=one.tokens,
        micro_batch=one.rows,
        accumulation=one.passes,
        checkpointing=one.recompute,
        precision=one.precision,
        device="cuda",
    )
