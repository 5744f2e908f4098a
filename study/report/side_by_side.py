"""Arms side by side at a realistic size: predicted seconds of a step on eight H100, and what others measured."""

import functools
from typing import Any

from study.core.arms import NAMES
from study.core.shapes import letters
from study.predict.front import Machine, Question, Setup, advise, named, step_time
from study.predict.front import published as others
from study.report import advice as answer

MODEL = "llama3-8b"
RANKS = 8
GPU = "H100-80GB"
BASELINE = "ddp"
ARMS = (BASELINE, "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu", "fsdp2", "fsdp2_grad_op")
OURS = {"sequence": 2048, "micro_batch": 1, "accumulation": 1, "checkpointing": True}  # as protocol at_scale has it
ADVISED = "mistral-7b"  # the model of the question "which arm for 7 billion parameters?"


def published(model: str = MODEL, ranks: int = RANKS) -> list[others.Row]:
    """Return the published rows with this model, number of GPUs and an arm of this study."""
    known = [row for row in others.rows() if row.set == others.KNOWN and row.arm in NAMES and row.n_gpus == ranks]
    return [row for row in known if letters(row.model or "") == letters(model)]  # Llama-3-8B is llama3-8b


@functools.cache
def steps() -> list[dict]:
    """Predict each arm in the setting of this study, and in those in which others measured the seconds of a step."""
    model = named(MODEL)
    settings: list[dict] = [OURS]
    for row in published():
        setting = {"sequence": row.seq, "micro_batch": row.micro_batch, "accumulation": row.grad_acc}
        if row.step_s and all(setting.values()):
            settings.append(setting | {"checkpointing": False})
    lines = []
    for number, setting in enumerate(settings):
        if setting in settings[:number]:
            continue
        usual: dict[str, Any] = {"ranks": RANKS, "precision": "bf16_cast", "device": "cuda"} | setting
        times = {arm: step_time(Setup.of_arm(model, arm, **usual), Machine(gpu=GPU)) for arm in ARMS}
        ddp = times[BASELINE]  # the ends are those of two predictions that err in opposite directions
        for arm, step in times.items():
            line: dict = {"arm": arm} | setting | {"seconds": step.seconds, "low": step.low_s, "high": step.high_s}
            over_ddp = {"over_ddp_low": step.low_s / ddp.high_s, "over_ddp_high": step.high_s / ddp.low_s}
            lines.append(line | over_ddp)
    return lines


@functools.cache
def advice() -> list[str]:
    """Return the advice for a model of 7 billion parameters."""
    return answer.in_words(advise(Question.of(named(ADVISED), RANKS, GPU)))
