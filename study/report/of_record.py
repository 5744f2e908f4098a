"""What theory predicts for the run of a record, and what its counted collectives send in rings."""

from dataclasses import replace
from typing import Any

from study.core.arms import feature_for_cuda_alone
from study.core.errors import Stop
from study.core.recipes import RECIPES
from study.core.shapes import SHAPES, config_of, shape_of
from study.predict.front import (
    Batch,
    Estimate,
    Fsdp,
    Placement,
    Recomputation,
    Training,
    Transformer,
    estimate,
    papers,
)
from study.records.runs import Run
from study.records.schema import Record
from study.records.sections import Observed, Requested

EMBEDDED_ROWS = 1600  # of the corpus that comes with the study


def predicted(record: Record) -> Estimate | None:
    """Return the estimate of a run. None where `training_of` is."""
    try:
        if training := training_of(record):
            return estimate(training)
    except Stop as stop:
        if stop.status != "unavailable":
            raise
        # The model has to be traced, and torch is not installed.
    return None


def training_of(record: Record) -> Training | None:
    """Return what theory needs to know of a run. None if its model, or the size of its data, is not known here."""
    requested = record.requested
    observed = record.observed
    model = architecture(record)
    rows = _rows(requested)
    # Scripts are not ours, and what a compiler keeps and fuses is unknown, as is what stage 3 keeps of frozen weights
    # where recomputation is reentrant: that changes with DeepSpeed's release.
    if model is None or record.is_script or record.is_watched or requested.compile or requested.reentrant:
        return None
    if requested.precision not in RECIPES:  # fp8, which two older records asked for
        return None
    if requested.optimizer == "muon" and observed.stage:
        return None
    if observed.tensor_ranks or feature_for_cuda_alone(observed.deepspeed):
        return None
    # With a GPU the rows of the data set stay on the host, and do not matter.
    if rows is None and observed.device == "cpu":
        return None
    training = of_settings(requested, model, _placement(observed))
    # The rows are in the same memory as everything else, and so are those of the window that was read last: of the
    # steps whose rows the instruments found in memory, if no epoch ended between them.
    steps = 1
    if requested.task != "synthetic" and observed.steps and requested.warmup_steps and requested.log_every:
        steps = (observed.steps - requested.warmup_steps - 1) % requested.log_every + 1
    batch = training.batch
    read = batch.rows * (batch.passes * steps - 1)
    # A row is all that a pass reads. A rank keeps whole rows, also where it reads a part of each.
    whole = replace(training, placement=replace(training.placement, sequence_ranks=1))
    row_bytes = whole.traced.inputs_bytes // batch.rows
    return replace(training, data_bytes=((rows or 0) + read) * row_bytes)


def of_settings(settings: Any, model: Transformer, placement: Placement) -> Training:
    """Return a training by the trainer's settings: those of a record, or of a cell."""
    again = Recomputation(bool(settings.checkpointing))
    return Training(
        model,
        RECIPES[settings.precision],
        Batch(settings.micro_batch, settings.accumulation, settings.sequence, again),
        placement,
        optimizer=settings.optimizer or "adamw",  # older records name none
        attention=settings.attention or "sdpa",
    )


def _rows(requested: Requested) -> int | None:
    """Return the rows of a rank, for training and for evaluation. None: all rows of the data set."""
    rows = requested.train_rows
    if requested.task == "synthetic":
        return rows or (requested.micro_batch or 1) * (requested.accumulation or 1)
    if rows or requested.data == "embedded":
        return (rows or EMBEDDED_ROWS) + (requested.eval_rows or 0)
    return None


def _placement(observed: Observed) -> Placement:
    fsdp = group = None
    if seen := observed.fsdp:  # FSDP2 as Accelerate prepared it: the trainer has no other
        mesh = seen["mesh"][0]
        fsdp = Fsdp(seen["units_resharded_after_forward"], True, seen["offloads"])
        group = mesh[1] if len(mesh) > 1 else None  # of a mesh with two dimensions, the second shards
    return Placement(
        ranks=observed.ranks or 1,
        device=observed.device or "",  # unknown: as a GPU
        deepspeed=observed.deepspeed,
        fsdp=fsdp,
        in_ddp=observed.distributed_type == "MULTI_GPU",
        group=group,
        second_partition=observed.second_partition_ranks,
        sequence_ranks=observed.sequence_ranks or 1,
    )


def architecture(record: Record) -> Transformer | None:
    """Return what a run trained. None if it is not a built-in shape, or has other parameters than that."""
    requested = record.requested
    size = record.observed.parameters
    name = shape_of(requested.model or "")
    if name not in SHAPES:
        return None
    part = {"lora_rank": requested.lora_rank, "train_only": requested.train_only}
    model = Transformer.of(config_of(name), name, dropout=requested.dropout, **part)
    return model if size in (None, model.parameters) else None


def sent_bytes(run: Run) -> dict[str, float]:
    """Return what the first rank sends in a step, by collective. Rings: an all-reduce sends the data twice."""
    sent: dict[str, float] = {}
    for first_rank in run.record.traffic.per_rank[:1]:
        for kind, count in first_rank.items():
            # In a hybrid arm, some collectives have fewer ranks, and a ring of fewer sends a smaller share.
            by_ranks = count.by_ranks(run.record.observed.ranks or 1)
            sent[kind] = sum(papers.wire_bytes({kind: part}, len(ranks)) for ranks, part in by_ranks.items())
    return sent
