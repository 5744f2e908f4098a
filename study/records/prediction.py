"""What theory predicts for the run of a record."""

from dataclasses import replace

from study.records.schema import Record, Requested
from study.spec.shapes import SHAPES, VOCABULARY, config_of, shape_of
from study.theory.architecture import FAMILIES, Architecture, describe, parameters
from study.theory.estimate import Estimate, estimate
from study.theory.setup import Setup
from study.theory.transformer import Transformer


def predicted(record: Record, ranks: int | None = None, deepspeed: dict | None = None) -> Estimate | None:
    """The estimate of a run, or of the same run on other ranks or with another DeepSpeed config.

    None if its model, or the size of its data in the same memory, is not known here, and for the published script.
    """
    requested, observed = record.requested, record.observed
    if record.is_script:
        return None
    model, held_bytes = architecture(record), data_bytes(requested)
    if model is None or (held_bytes is None and observed.device == "cpu"):
        return None
    setup = Setup.of_settings(
        model,
        requested,
        deepspeed=deepspeed or (observed.deepspeed if observed.stage is not None else None),
        ranks=ranks or observed.ranks,
        device=observed.device,
        data_bytes=held_bytes or 0,
    )
    return estimate(setup)


def architecture(record: Record) -> Architecture | Transformer | None:
    """The architecture that a run trained. None if it is not a built-in shape, or has other parameters than that."""
    requested, size = record.requested, record.observed.parameters
    name = shape_of(requested.model)
    if name not in SHAPES:
        return None
    if SHAPES[name]["model_type"] not in FAMILIES:
        model = Transformer.of(config_of(name), name, dropout=requested.dropout)
        return model if size in (None, parameters(model)) else None
    model = describe(name, VOCABULARY, requested.dropout)
    if SHAPES[name]["vocab_size"] is None and requested.data != "embedded" and size:
        # The model has its data's vocabulary, which no record says: the embeddings make up the difference.
        model = replace(model, vocabulary=model.vocabulary + (size - parameters(model)) // model.hidden)
    return model if size in (None, parameters(model)) else None


def data_bytes(requested: Requested) -> int | None:
    """Bytes of data on a rank: token ids, and for reviews a mask and a label. None if the number of rows is unknown."""
    train_rows = requested.train_rows or (1600 if requested.data == "embedded" else None)
    if train_rows is None:  # all rows of the data set
        return None
    rows = train_rows + (requested.eval_rows or 0)
    return rows * 8 * (2 * requested.sequence + 1 if requested.task == "imdb" else requested.sequence)
