"""What theory predicts for the run of a record."""

from dataclasses import replace
from typing import Any

from study.errors import Stop
from study.predictor.front import Estimate, Setup, Transformer, estimate, inputs_bytes
from study.records.schema import Observed, Record, Requested
from study.spec.shapes import SHAPES, VOCABULARY, config_of, shape_of


def predicted(record: Record, ranks: int | None = None, deepspeed: dict | None = None) -> Estimate | None:
    """Return the estimate of a run, or of the same run on other ranks or with another DeepSpeed config.

    None if its model, or the size of its data in the same memory, is not known here, for scripts that are not ours, and
    for compiled models.
    """
    try:
        setup = setup_of(record, ranks, deepspeed)
        return None if setup is None else estimate(setup)
    except Stop as stop:
        if stop.status != "unavailable":
            raise
        return None  # it has to be traced, and torch is not installed


def setup_of(record: Record, ranks: int | None = None, deepspeed: dict | None = None) -> Setup | None:
    """Return what theory needs to know of a run; None where `predicted` is."""
    requested = record.requested
    observed = record.observed
    if record.is_script or record.is_watched or requested.precision == "fp8" or requested.compile:
        return None  # what a compiler keeps and fuses is unknown here
    model = architecture(record)
    rows = _data_rows(requested)
    if model is None or (rows is None and observed.device == "cpu"):
        return None
    sharding: dict[str, Any] = {"deepspeed": observed.deepspeed if observed.stage is not None else None}
    if deepspeed:
        sharding = {"deepspeed": deepspeed}
    elif observed.fsdp:
        sharding |= _sharding(observed.fsdp)
    setup = Setup.of_settings(
        model,
        requested,
        **sharding,
        sequence_ranks=observed.sequence_ranks or 1,
        tensor_ranks=observed.tensor_ranks or 1,
        ranks=ranks or observed.ranks,
        device=observed.device,
    )
    # The rows are in the same memory as everything else, and so are those of the window that was read last.
    read = setup.micro_batch * (setup.accumulation * _last_window(requested, observed) - 1)
    # A row is all that a pass reads. A rank keeps whole rows, also where it reads a part of each.
    row_bytes = inputs_bytes(replace(setup, sequence_ranks=1)) // setup.micro_batch
    return replace(setup, data_bytes=((rows or 0) + read) * row_bytes)


def _sharding(fsdp: dict) -> dict[str, Any]:
    """Return FSDP2 as Accelerate prepared it: the trainer has no other."""
    kind = "full_shard" if fsdp["units_resharded_after_forward"] else "shard_grad_op"
    mesh = fsdp["mesh"][0]
    group = mesh[-1] if len(mesh) > 1 else None  # in a mesh of two dimensions the second one shards
    return {"fsdp": kind, "fsdp_by": "accelerate", "fsdp_offload": fsdp["offloads"], "group": group}


def _last_window(requested: Requested, observed: Observed) -> int:
    """Return the steps whose rows the instruments found in memory, if no epoch ended between them."""
    if requested.task == "synthetic" or not (observed.steps and requested.warmup_steps and requested.log_every):
        return 1
    return max(1, (observed.steps - requested.warmup_steps - 1) % requested.log_every + 1)


def _data_rows(requested: Requested) -> int | None:
    """Return the rows of data on a rank, for training and for evaluation. None if their number is unknown."""
    if requested.task == "synthetic":
        return requested.train_rows or (requested.micro_batch or 1) * (requested.accumulation or 1)
    train_rows = requested.train_rows or (1600 if requested.data == "embedded" else None)
    return None if train_rows is None else train_rows + (requested.eval_rows or 0)  # None: all rows of the data set


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
