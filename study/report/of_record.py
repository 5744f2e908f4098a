"""What theory predicts for the run of a record."""

from dataclasses import replace
from typing import Any

from study.core.errors import Stop
from study.core.shapes import SHAPES, VOCABULARY, config_of, shape_of
from study.predict.front import Estimate, Setup, Transformer, estimate, inputs_bytes
from study.records.schema import Record


def predicted(record: Record, **changes: Any) -> Estimate | None:
    """Return the estimate of a run, or of the same run with changes to its setup. None where `setup_of` is."""
    try:
        setup = setup_of(record)
        return estimate(replace(setup, **changes)) if setup else None
    except Stop as stop:
        if stop.status != "unavailable":
            raise
        return None  # it has to be traced, and torch is not installed


def setup_of(record: Record) -> Setup | None:
    """Return what theory needs to know of a run.

    None if its model, or the size of its data in the same memory, is not known here, for scripts that are not ours, and
    for compiled models.
    """
    requested = record.requested
    observed = record.observed
    if record.is_script or record.is_watched or requested.precision == "fp8" or requested.compile:
        return None  # what a compiler keeps and fuses is unknown here
    if requested.optimizer == "muon" and observed.stage:
        return None
    model = architecture(record)
    rows = requested.train_rows  # on a rank, for training and for evaluation
    if requested.task == "synthetic":
        rows = rows or (requested.micro_batch or 1) * (requested.accumulation or 1)
    elif rows or requested.data == "embedded":
        rows = (rows or 1600) + (requested.eval_rows or 0)
    if model is None or (rows is None and observed.device == "cpu"):  # None: all rows of the data set
        return None
    values: dict[str, Any] = {"deepspeed": observed.deepspeed if observed.stage is not None else None}
    if fsdp := observed.fsdp:  # FSDP2 as Accelerate prepared it: the trainer has no other
        mesh = fsdp["mesh"][0]
        values = {"fsdp": "full_shard" if fsdp["units_resharded_after_forward"] else "shard_grad_op"}
        values |= {"fsdp_by": "accelerate", "fsdp_offload": fsdp["offloads"]}
        values["group"] = mesh[-1] if len(mesh) > 1 else None  # in a mesh of two dimensions the second one shards
    values |= {"ranks": observed.ranks, "device": observed.device}
    values |= {name: getattr(observed, name) or 1 for name in ("sequence_ranks", "tensor_ranks")}
    setup = Setup.of_settings(model, requested, **values)
    # The rows are in the same memory as everything else, and so are those of the window that was read last: of the
    # steps whose rows the instruments found in memory, if no epoch ended between them.
    steps = 1
    if requested.task != "synthetic" and observed.steps and requested.warmup_steps and requested.log_every:
        steps = max(1, (observed.steps - requested.warmup_steps - 1) % requested.log_every + 1)
    read = setup.micro_batch * (setup.accumulation * steps - 1)
    # A row is all that a pass reads. A rank keeps whole rows, also where it reads a part of each.
    row_bytes = inputs_bytes(replace(setup, sequence_ranks=1)) // setup.micro_batch
    return replace(setup, data_bytes=((rows or 0) + read) * row_bytes)


def architecture(record: Record) -> Transformer | None:
    """Return what a run trained. None if it is not a built-in shape, or has other parameters than that."""
    requested = record.requested
    size = record.observed.parameters
    name = shape_of(requested.model or "")
    if name not in SHAPES:
        return None
    part = {"lora_rank": requested.lora_rank, "train_only": requested.train_only}
    model = Transformer.of(config_of(name), name, dropout=requested.dropout, **part)
    if SHAPES[name].get("vocab_size", 0) is None and requested.data != "embedded" and size:
        # The model has its data's vocabulary, which no record says: the embeddings make up the difference.
        vocabulary = VOCABULARY + (size - model.parameters) // model.dimensions["n_embd"]
        model = Transformer.of(config_of(name, vocabulary), name, dropout=requested.dropout)
    return model if size in (None, model.parameters) else None
