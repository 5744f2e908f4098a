"""The seconds of a step of a script: of the training that its prepared objects are, as the predictor knows it."""

from math import isclose
from pathlib import Path

from study.core.errors import NotFollowed, Stop
from study.core.files import why
from study.core.gpus import GPUS
from study.core.recipes import RECIPES
from study.core.text import number_of
from study.predict.front import (
    Batch,
    Fsdp,
    Hardware,
    Placement,
    Recomputation,
    StepTime,
    Training,
    Transformer,
    Wanted,
    asked_for,
    step_time,
)
from study.records.schema import Record
from study.records.sections import Observed
from study.rehearsal.request import Answer, Request

MEASURE = "measure a step where it trains"
SAME = 0.02  # of parameters: heads and buffers of a task are small


def seconds_of(request: Request, answer: Answer, record: Record, folder: Path) -> StepTime:
    """Return the predicted time of a step. Raise Stop with the reason if it cannot be predicted."""
    seen = record.observed
    if len(answer.batch) != 2 or not (folder / "config.json").exists():
        what = "only those of a Hugging Face transformer that reads rows of tokens are, and this one reads"
        raise Stop(f"{what} {described(answer.batch)}", MEASURE, "unavailable")
    rows, tokens = answer.batch
    passes = seen.accumulation or 1
    refuse_other_calls(answer, passes)
    model = asked_for(Wanted(model=str(folder), lora_rank=answer.lora_rank), tokens)
    refuse_other_model(model, seen, answer.lora_rank)
    fsdp = None
    if seen.fsdp is not None:
        fsdp = Fsdp(by_accelerate=True, offloads="weights" in seen.offloads)
    training = Training(
        model,
        RECIPES[recipe_of(seen)],
        Batch(rows, passes, tokens, Recomputation(bool(seen.checkpointing))),
        Placement(
            ranks=request.ranks,
            device="cuda",
            deepspeed=seen.deepspeed if seen.stage is not None else None,
            fsdp=fsdp,
            in_ddp=seen.wrapper == "DistributedDataParallel",
        ),
        optimizer=optimizer_of(seen),
        attention="eager" if seen.attention == "eager" else "sdpa",
    )
    machine = Hardware(gpu=GPUS[request.gpu or ""], gpus_per_node=request.ranks_per_machine)
    try:
        return step_time(training, machine)
    except NotFollowed as stop:  # it names the folder of the rehearsal, whose config is not the user's to correct
        what = f"the time predictor cannot follow this model ({model.family}): {why(stop.__cause__ or stop)}"
        raise Stop(what, MEASURE, "unavailable") from stop


def described(batch: list[int]) -> str:
    return f"a batch of {' x '.join(map(str, batch))}" if batch else "no batch of tensors"


def refuse_other_calls(answer: Answer, passes: int) -> None:
    """Raise Stop if a step is not one call of the model for each micro-batch, and nothing else."""
    if answer.calls not in (None, passes):
        expected = f"a step of {number_of(passes, 'micro-batches')} should call the model {number_of(passes, 'times')}"
        remedy = f"check that the script calls the model itself and not a part of it, or {MEASURE}"
        came = f"the last step called it {number_of(answer.calls or 0, 'times')}"
        raise Stop(f"{expected}, and {came}", remedy, "unavailable")
    if answer.has_other_models:
        what = "a step should call one model, and it calls others beside it, such as a reference model"
        raise Stop(what, MEASURE, "unavailable")


def refuse_other_model(model: Transformer, seen: Observed, lora_rank: int | None) -> None:
    """Raise Stop if the prepared model is not the one that its config describes."""
    if seen.parameters and isclose(model.parameters, seen.parameters, rel_tol=SAME):
        return
    expected = f"the language model of its config has {model.parameters:,} parameters"
    came = f"the prepared one {seen.parameters or 0:,}"
    if not lora_rank:
        what = f"{expected}, and {came}: it is another one"
        raise Stop(what, MEASURE, "unavailable")
    what = f"adapters of rank {lora_rank} on all linear layers are predicted, with which {expected}, and {came}"
    remedy = f'give PEFT target_modules="all-linear" if you want these, or {MEASURE}'
    raise Stop(what, remedy, "unavailable")


def recipe_of(seen: Observed) -> str:
    """Return the precision by its name."""
    weights = seen.dtypes.get("weights")
    if weights == "float32" and seen.autocast in (None, "bf16", "fp16"):
        return seen.autocast or "fp32"
    if weights == "bfloat16" and seen.dtypes.get("master") == "float32":
        return "bf16_cast"
    if weights == "bfloat16" and not seen.dtypes.get("master"):
        return "bf16_pure"
    known = "float32, or bfloat16 with a master copy in float32 or none"
    raise Stop(f"weights should be {known} (got {weights})", MEASURE, "unavailable")


def optimizer_of(seen: Observed):
    if seen.optimizer not in ("AdamW", "Adam", "DeepSpeedCPUAdam", "FusedAdam"):
        raise Stop(f"the optimizer should be Adam or AdamW (got {seen.optimizer})", MEASURE, "unavailable")
    is_fused = (
        (seen.optimizer_settings or {}).get("fused") or "DeepSpeed" in seen.optimizer or "Fused" in seen.optimizer
    )
    return "adamw" if is_fused else "foreach"
