"""The two tasks: the loss of each row, and the metric over the evaluation rows."""

import math

import numpy as np
import torch

from study.models.step import logits_and_losses
from study.spec.settings import Settings
from study.training.data import Rows
from study.training.models import weights_dtype


def row_losses(settings: Settings, model, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, in fp32 in every precision, and its predicted class."""
    config = getattr(model, "module", model).config  # of what DDP or DeepSpeed wraps
    logits, losses = logits_and_losses(config, model, batch, weights_dtype(settings), row_tokens=settings.sequence)
    return losses, logits.argmax(-1) if settings.task == "imdb" else torch.zeros_like(losses, dtype=torch.long)


def metric(settings: Settings, losses: np.ndarray, predictions: np.ndarray, rows: Rows) -> dict[str, float | None]:
    """Accuracy or perplexity over the evaluation rows, with `evaluate` on real data.

    Runs on the embedded corpus do without `evaluate`, because importing it takes a second and they are short.
    """
    if settings.task == "imdb":
        formula, dtype, values, references = accuracy, "int64", predictions, rows["labels"].numpy()
    else:
        tokens = np.full(len(losses), rows["input_ids"].shape[1] - 1)
        formula, dtype, values, references = perplexity, "float64", losses, tokens
    if settings.data == "embedded":
        return formula(values, references)
    from study.training.metrics import Formula

    return Formula(formula, dtype).compute(predictions=values, references=references)


def accuracy(predictions, references) -> dict[str, float]:
    """Share of right answers."""
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def perplexity(predictions, references) -> dict[str, float | None]:
    """exp of the mean negative log-likelihood per token: `predictions` are means per row, `references` token counts."""
    mean = np.average(np.asarray(predictions, np.float64), weights=np.asarray(references))
    return {"perplexity": math.exp(mean) if mean < 700 else None}
