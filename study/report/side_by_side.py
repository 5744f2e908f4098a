"""Arms side by side at a realistic size: predicted seconds of a step on eight H100, and what others measured."""

import functools

from study.predictor.front import Given, Machine, Question, Setup, advise, named, step_time
from study.predictor.front import published as others
from study.report import advice as answer
from study.spec.arms import NAMES
from study.spec.shapes import letters

MODEL = "llama3-8b"
RANKS = 8
GPU = "H100-80GB"
BASELINE = "ddp"
ARMS = (BASELINE, "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu", "fsdp2", "fsdp2_grad_op")
OURS = {"sequence": 2048, "micro_batch": 1, "accumulation": 1, "checkpointing": True}  # as protocol at_scale has it
ADVISED = "mistral-7b"  # the model of the question "which arm for 7 billion parameters?"


def published(model: str = MODEL, ranks: int = RANKS) -> list[others.Row]:
    """Return the published rows with this model, number of GPUs and an arm of this study."""
    return [
        row
        for row in others.rows()
        if row.set == others.KNOWN and row.arm in NAMES and row.n_gpus == ranks and same_name(row.model, model)
    ]


def same_name(one: str | None, other: str | None) -> bool:
    """Return whether two names mean the same model: Llama-3-8B and llama3-8b."""
    return letters(one or "") == letters(other or "")


def settings() -> list[dict]:
    """Return the setting of this study, and those in which others measured the seconds of a step."""
    all_settings: list[dict] = [OURS]
    for row in published():
        counts = {"sequence": row.seq, "micro_batch": row.micro_batch, "accumulation": row.grad_acc}
        setting = counts | {"checkpointing": False}
        known = row.step_s is not None and all(isinstance(count, int) for count in counts.values())
        if known and setting not in all_settings:
            all_settings.append(setting)
    return all_settings


@functools.cache
def steps() -> list[dict]:
    """Predict each arm in each setting."""
    model = named(MODEL)
    lines = []
    for setting in settings():
        usual = {"ranks": RANKS, "precision": "bf16_cast", "device": "cuda"} | setting
        times = {arm: step_time(Setup.of_arm(model, arm, **usual), Machine(gpu=GPU)) for arm in ARMS}
        for arm, step in times.items():
            ddp = times[BASELINE]  # the ends are those of two predictions that err in opposite directions
            over_ddp = {"over_ddp_low": step.low_s / ddp.high_s, "over_ddp_high": step.high_s / ddp.low_s}
            seconds = {"seconds": step.seconds, "low": step.low_s, "high": step.high_s}
            lines.append({"arm": arm} | setting | seconds | over_ddp)
    return lines


@functools.cache
def advice() -> list[str]:
    """Return the advice for a model of 7 billion parameters."""
    return answer.in_words(advise(Question.of(named(ADVISED), RANKS, GPU, Given())))
