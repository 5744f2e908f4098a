"""What theory predicts for the run of a record."""

from dataclasses import replace
from typing import Any

from study.predictor.architecture import FAMILIES, Architecture, describe, parameters
from study.predictor.estimate import Estimate, estimate, inputs_bytes
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer
from study.records.schema import Observed, Record, Requested
from study.spec.shapes import SHAPES, VOCABULARY, config_of, shape_of


def predicted(
    record: Record, ranks: int | None = None, deepspeed: dict | None = None, look: bool = False
) -> Estimate | None:
    """Return the estimate of a run, or of the same run on other ranks or with another DeepSpeed config.

    With `look` the model is looked at even where there are formulas for it, which needs torch the first time.
    None if its model, or the size of its data in the same memory, is not known here, for scripts that are not ours, and
    for compiled models.
    """
    setup = setup_of(record, ranks, deepspeed, look)
    return None if setup is None else estimate(setup)


def setup_of(
    record: Record, ranks: int | None = None, deepspeed: dict | None = None, look: bool = False
) -> Setup | None:
    """Return what theory needs to know of a run; None where `predicted` is."""
    requested, observed = record.requested, record.observed
    if record.is_script or record.is_watched or requested.precision == "fp8" or requested.compile:
        return None  # what a compiler keeps and fuses is in no formula
    model = architecture(record, look)
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
    # A row is what a pass reads, and for reviews a label, which a model that was looked at reads too. A rank keeps
    # whole rows, also where it reads a part of each.
    label_bytes = 8 if requested.task == "imdb" and isinstance(model, Architecture) else 0
    row_bytes = inputs_bytes(replace(setup, sequence_ranks=1)) // setup.micro_batch + label_bytes
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


def architecture(record: Record, look: bool = False) -> Architecture | Transformer | None:
    """Return what a run trained. None if it is not a built-in shape, or has other parameters than that."""
    requested = record.requested
    size = record.observed.parameters
    name = shape_of(requested.model or "")
    if name not in SHAPES:
        return None
    model: Architecture | Transformer
    part = {"lora_rank": requested.lora_rank, "train_only": requested.train_only}
    if look or SHAPES[name]["model_type"] not in FAMILIES or any(part.values()):
        model = Transformer.of(config_of(name), name, dropout=requested.dropout, **part)
    else:
        model = describe(name, VOCABULARY, requested.dropout)
        if SHAPES[name]["vocab_size"] is None and requested.data != "embedded" and size:
            # The model has its data's vocabulary, which no record says: the embeddings make up the difference.
            more = (size - parameters(model)) // model.hidden
            model = replace(model, vocabulary=model.vocabulary + more)
    return model if size in (None, parameters(model)) else None
