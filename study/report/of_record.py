"""What theory predicts for the run of a record."""

from dataclasses import replace
from typing import Any

from study.core.errors import Stop
from study.core.shapes import SHAPES, VOCABULARY, config_of, shape_of
from study.predict.front import Estimate, Setup, Transformer, estimate, inputs_bytes
from study.records.schema import Record


def predicted(record: Record) -> Estimate | None:
    """Return the estimate of a run. None where `setup_of` is."""
    try:
        if setup := setup_of(record):
            return estimate(setup)
    except Stop as stop:
        if stop.status != "unavailable":
            raise
        # The model has to be traced, and torch is not installed.
    return None


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
    # --- the rows of the data set: with a GPU they stay on the host, and do not matter
    model = architecture(record)
    rows = requested.train_rows  # on a rank, for training and for evaluation
    if requested.task == "synthetic":
        rows = rows or (requested.micro_batch or 1) * (requested.accumulation or 1)
    elif rows or requested.data == "embedded":
        rows = (rows or 1600) + (requested.eval_rows or 0)
    if model is None or (rows is None and observed.device == "cpu"):  # None: all rows of the data set
        return None
    # --- how it is distributed, as it was observed
    values: dict[str, Any] = {"ranks": observed.ranks, "device": observed.device, "deepspeed": observed.deepspeed}
    values |= {"sequence_ranks": observed.sequence_ranks or 1, "tensor_ranks": observed.tensor_ranks or 1}
    if fsdp := observed.fsdp:  # FSDP2 as Accelerate prepared it: the trainer has no other
        sharded = {True: "full_shard", False: "shard_grad_op"}[bool(fsdp["units_resharded_after_forward"])]
        values |= {"fsdp": sharded, "fsdp_by": "accelerate", "fsdp_offload": fsdp["offloads"]}
        values["group"] = dict(enumerate(fsdp["mesh"][0])).get(1)  # of a mesh with two dimensions, the second shards
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
    if size not in (None, model.parameters):
        return None
    return model
