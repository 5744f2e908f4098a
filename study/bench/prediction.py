"""What theory predicts for the run of a record."""

from dataclasses import replace

from study.predictor.architecture import FAMILIES, Architecture, describe, parameters
from study.predictor.estimate import Estimate, estimate, inputs_bytes
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer
from study.records.schema import Observed, Record, Requested
from study.spec.shapes import SHAPES, VOCABULARY, config_of, shape_of


def predicted(
    record: Record, ranks: int | None = None, deepspeed: dict | None = None, look: bool = False
) -> Estimate | None:
    """The estimate of a run, or of the same run on other ranks or with another DeepSpeed config.

    With `look` the model is looked at even where there are formulas for it, which needs torch the first time.
    None if its model, or the size of its data in the same memory, is not known here, for scripts that are not ours, and
    for compiled models.
    """
    setup = setup_of(record, ranks, deepspeed, look)
    return setup and estimate(setup)


def setup_of(
    record: Record, ranks: int | None = None, deepspeed: dict | None = None, look: bool = False
) -> Setup | None:
    """What theory needs to know of a run; None where `predicted` is."""
    requested, observed = record.requested, record.observed
    if record.is_script or record.is_watched or requested.precision == "fp8" or requested.compile:
        return None  # what a compiler keeps and fuses is in no formula
    model, rows = architecture(record, look), data_rows(requested)
    if model is None or (rows is None and observed.device == "cpu"):
        return None
    sharded = _fsdp(observed) if observed.fsdp and deepspeed is None else {}
    setup = Setup.of_settings(
        model,
        requested,
        **sharded,
        deepspeed=deepspeed or (observed.deepspeed if observed.stage is not None else None),
        sequence_ranks=observed.sequence_ranks or 1,
        tensor_ranks=observed.tensor_ranks or 1,
        ranks=ranks or observed.ranks,
        device=observed.device,
    )
    # The rows are in the same memory as everything else, and so are those of the window that was read last.
    read = requested.micro_batch * (requested.accumulation * _last_window(record) - 1)
    return replace(setup, data_bytes=data_bytes(setup, requested.task, (rows or 0) + read))


def _fsdp(observed: Observed) -> dict:
    """FSDP2 as Accelerate prepared it: the trainer has no other."""
    kind = "full_shard" if observed.fsdp["units_resharded_after_forward"] else "shard_grad_op"
    mesh = observed.fsdp["mesh"][0]
    group = mesh[-1] if len(mesh) > 1 else None  # in a mesh of two dimensions the second one shards
    return {"fsdp": kind, "fsdp_by": "accelerate", "fsdp_offload": observed.fsdp["offloads"], "group": group}


def _last_window(record: Record) -> int:
    """Steps whose rows the instruments found in memory, if no epoch ended between them."""
    requested, steps = record.requested, record.observed.steps
    if requested.task == "synthetic" or None in (steps, requested.warmup_steps, requested.log_every):
        return 1
    timed = steps - requested.warmup_steps
    return max(1, (timed - 1) % requested.log_every + 1)


def architecture(record: Record, look: bool = False) -> Architecture | Transformer | None:
    """The architecture that a run trained. None if it is not a built-in shape, or has other parameters than that."""
    requested, size = record.requested, record.observed.parameters
    name = shape_of(requested.model)
    if name not in SHAPES:
        return None
    part = {"lora_rank": requested.lora_rank, "train_only": requested.train_only}
    if look or SHAPES[name]["model_type"] not in FAMILIES or any(part.values()):
        model = Transformer.of(config_of(name), name, dropout=requested.dropout, **part)
        return model if size in (None, parameters(model)) else None
    model = describe(name, VOCABULARY, requested.dropout)
    if SHAPES[name]["vocab_size"] is None and requested.data != "embedded" and size:
        # The model has its data's vocabulary, which no record says: the embeddings make up the difference.
        model = replace(model, vocabulary=model.vocabulary + (size - parameters(model)) // model.hidden)
    return model if size in (None, parameters(model)) else None


def data_rows(requested: Requested) -> int | None:
    """Rows of data on a rank, for training and for evaluation. None if their number is unknown."""
    if requested.task == "synthetic":
        return requested.train_rows or requested.micro_batch * requested.accumulation
    train_rows = requested.train_rows or (1600 if requested.data == "embedded" else None)
    return None if train_rows is None else train_rows + (requested.eval_rows or 0)  # None: all rows of the data set


def data_bytes(setup: Setup, task: str, rows: int) -> int:
    """Bytes of so many rows: what a pass reads, and for reviews a label, which a model that was looked at reads too."""
    label = 8 if task == "imdb" and isinstance(setup.model, Architecture) else 0
    whole = replace(setup, sequence_ranks=1)  # a rank keeps whole rows, also where it reads a part of each
    return rows * (inputs_bytes(whole) // setup.micro_batch + label)
