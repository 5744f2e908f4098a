"""The two tasks: the loss of each row, the metric over the evaluation rows, and rows that need no network.

The generated corpus is not language, but a model can learn it: reviews whose opinion words decide the label, and a
stream in which the class of each word decides the class of the next. A model that learns nothing here is not training.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from study.models.step import Batch, logits_and_losses
from study.spec.settings import Settings
from study.spec.shapes import VOCABULARY
from study.training.models import weights_dtype

Values = dict[str, float | None]
Formula = Callable[[np.ndarray, np.ndarray], Values]


def row_losses(settings: Settings, model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, in fp32 in every precision, and its predicted class."""
    config = getattr(model, "module", model).config  # of what DDP or DeepSpeed wraps
    logits, losses = logits_and_losses(config, model, batch, weights_dtype(settings), row_tokens=settings.sequence)
    return losses, logits.argmax(-1) if settings.task == "imdb" else torch.zeros_like(losses, dtype=torch.long)


def metric(settings: Settings, losses: np.ndarray, predictions: np.ndarray, rows: Batch) -> Values:
    """Accuracy or perplexity over the evaluation rows, with `evaluate` on real data.

    Runs on the embedded corpus do without `evaluate`, because importing it takes a second and they are short.
    """
    if settings.task == "imdb":
        return _computed(settings, accuracy, "int64", predictions, rows["labels"].numpy())
    tokens = np.full(len(losses), rows["input_ids"].shape[1] - 1)
    return _computed(settings, perplexity, "float64", losses, tokens)


def _computed(settings: Settings, formula: Formula, dtype: str, values: np.ndarray, references: np.ndarray) -> Values:
    if settings.data == "embedded":
        return formula(values, references)
    return _metric_class()(formula, dtype).compute(predictions=values, references=references)


def _metric_class() -> type:
    """Return the class that wraps a formula as a metric of `evaluate`, whose own `load` would fetch code from the hub.

    The import is here, because it takes 0.8 s and 110 MB: only the first rank of a run on real data needs it.
    """
    import datasets
    import evaluate

    class FormulaMetric(evaluate.Metric):
        """A function of predictions and integer references as a metric."""

        def __init__(self, formula, prediction_dtype: str):
            self.formula, self.prediction_dtype = formula, prediction_dtype
            super().__init__(keep_in_memory=True)

        def _info(self):
            dtypes = {"predictions": self.prediction_dtype, "references": "int64"}
            features = datasets.Features({name: datasets.Value(dtype) for name, dtype in dtypes.items()})
            text = self.formula.__doc__
            return evaluate.MetricInfo(description=text, citation="", inputs_description="", features=features)

        def _compute(self, predictions, references):
            return self.formula(predictions, references)

    return FormulaMetric


def accuracy(predictions, references) -> Values:
    """Share of right answers."""
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def perplexity(predictions, references) -> Values:
    """exp of the mean negative log-likelihood per token: `predictions` are means per row, `references` token counts."""
    mean = np.average(np.asarray(predictions, np.float64), weights=np.asarray(references))
    return {"perplexity": math.exp(mean) if mean < 700 else None}


PAD, UNK, CLS, SEP = 0, 1, 2, 3
FIRST_WORD = 4
NUM_CLASSES = 8
OPINIONS = 32  # words of praise; the same number of blame


def reviews(rows: int, sequence: int, seed: int) -> dict[str, np.ndarray]:
    """Batch like tokenised reviews: [CLS] words [SEP] padding, with a label that their opinion words decide.

    Three words in ten are opinions, and nine of ten opinions agree with the label. The rest is filler with a Zipf
    distribution, as in text. One label in twenty is wrong, so that the loss has a floor.
    """
    rng = np.random.default_rng([seed, 1])
    labels = rng.integers(0, 2, rows)
    praise = FIRST_WORD + np.arange(OPINIONS)
    filler = _zipf(rng, (rows, sequence), FIRST_WORD + 2 * OPINIONS)
    agrees = rng.random((rows, sequence)) < 0.9
    opinion = rng.choice(praise, (rows, sequence)) + OPINIONS * (labels[:, None] ^ agrees)
    ids = np.where(rng.random((rows, sequence)) < 0.3, opinion, filler)
    labels = np.where(rng.random(rows) < 0.05, 1 - labels, labels)
    length = rng.integers(sequence // 2, sequence + 1, rows)
    position = np.arange(sequence)[None, :]
    ids[:, 0] = CLS
    ids[position == length[:, None] - 1] = SEP
    mask = position < length[:, None]
    return {
        "input_ids": np.where(mask, ids, PAD),
        "attention_mask": mask.astype(np.int64),
        "labels": labels.astype(np.int64),
    }


def stream(tokens: int, seed: int, part: str) -> np.ndarray:
    """Tokens in which the class of each word decides the class of the next, nine times in ten.

    The rule is the same for each part ("train", "validation"); the words are not.
    """
    rng = np.random.default_rng([seed, 2, ("train", "validation").index(part)])
    following = np.random.default_rng(seed).permutation(NUM_CLASSES)
    jumps = rng.random(tokens) < 0.1
    anywhere = rng.integers(0, NUM_CLASSES, tokens)
    classes = np.empty(tokens, np.int64)
    now = 0
    for i in range(tokens):
        now = anywhere[i] if jumps[i] else following[now]
        classes[i] = now
    per_class = (VOCABULARY - FIRST_WORD) // NUM_CLASSES
    return FIRST_WORD + classes * per_class + _zipf(rng, tokens, 0, per_class)


def _zipf(rng: np.random.Generator, shape, first: int, count: int | None = None) -> np.ndarray:
    """Ids from `first` on, the k-th with a probability proportional to 1 / k^1.1."""
    count = VOCABULARY - first if count is None else count
    weight = 1 / np.arange(1, count + 1) ** 1.1
    return first + rng.choice(count, shape, p=weight / weight.sum())
