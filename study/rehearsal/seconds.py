"""The seconds of a step of a script: of the training that its prepared objects are, as the predictor knows it."""

from math import isclose
from pathlib import Path

from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.recipes import RECIPES
from study.predict.front import (
    Batch,
    Fsdp,
    Hardware,
    Placement,
    Recomputation,
    StepTime,
    Training,
    Wanted,
    asked_for,
    step_time,
)
from study.records.schema import Record
from study.records.sections import Observed
from study.rehearsal.request import Answer, Request

SAME = 0.02  # of parameters: heads and buffers of a task are small


def seconds_of(request: Request, answer: Answer, record: Record, folder: Path) -> StepTime:
    """Return the predicted time of a step. Raise Stop with the reason if it cannot be predicted."""
    seen = record.observed
    if len(answer.batch) != 2 or not (folder / "config.json").exists():
        raise Stop("what it trains is no transformer that reads rows of tokens", "measure it", "unavailable")
    rows, tokens = answer.batch
    passes = seen.accumulation or 1
    if answer.calls != passes or answer.has_other_models:
        calls = f"{answer.calls} times in {passes} micro-batches" if answer.calls != passes else "beside other models"
        raise Stop(f"its model is called {calls}", "measure it", "unavailable")
    model = asked_for(Wanted(model=str(folder), lora_rank=answer.lora_rank), tokens)
    if not seen.parameters or not isclose(model.parameters, seen.parameters, rel_tol=SAME):
        what = f"its model has {seen.parameters:,} parameters, and the language model of its config"
        what += f" {model.parameters:,}: it is another one"
        raise Stop(what, "measure it", "unavailable")
    fsdp = None
    if seen.fsdp is not None:
        fsdp = Fsdp(by_accelerate=True, offloads=seen.offload_param not in (None, "none"))
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
    return step_time(training, machine)


def recipe_of(seen: Observed) -> str:
    """Return the precision by its name."""
    weights = seen.dtypes.get("weights")
    if weights == "float32" and seen.autocast in (None, "bf16", "fp16"):
        return seen.autocast or "fp32"
    if weights == "bfloat16" and seen.dtypes.get("master") == "float32":
        return "bf16_cast"
    if weights == "bfloat16" and not seen.dtypes.get("master"):
        return "bf16_pure"
    raise Stop(f"weights in {weights} are no precision that is predicted", "measure it", "unavailable")


def optimizer_of(seen: Observed):
    if seen.optimizer not in ("AdamW", "Adam", "DeepSpeedCPUAdam", "FusedAdam"):
        raise Stop(f"{seen.optimizer} is not predicted", "measure it", "unavailable")
    is_fused = (
        (seen.optimizer_settings or {}).get("fused") or "DeepSpeed" in seen.optimizer or "Fused" in seen.optimizer
    )
    return "adamw" if is_fused else "foreach"
