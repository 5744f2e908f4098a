"""Accuracy and perplexity as metrics of `evaluate`. They are ours, so nothing is fetched from the hub.

Each takes all rows at once, which Accelerate has gathered from the ranks: no file, no folder and no lock is needed.
Importing `evaluate` and what it imports takes two seconds, so rank 0 alone does it, at the first evaluation.
"""

import math

import evaluate
import numpy as np
from datasets import Features, Value

MOST = 700  # nats: exp(710) is more than a double holds


class Score(evaluate.Metric):
    """A metric over rows that are in memory."""

    FEATURES: Features  # what it takes of each row

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(self.__doc__, "", self.FEATURES)

    def _build_data_dir(self) -> str:
        return ""  # evaluate 0.4.6 makes a folder in the hub's cache also for what stays in memory


class Accuracy(Score):
    """The share of rows whose predicted class is theirs."""

    FEATURES = Features(predictions=Value("int64"), references=Value("int64"))

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


class Perplexity(Score):
    """The exponential of the mean loss of rows that have as many tokens as each other; None if that is no number."""

    FEATURES = Features(losses=Value("float64"))

    def _compute(self, losses: list[float]) -> dict[str, float | None]:
        loss = float(np.mean(losses))
        return {"perplexity": math.exp(loss) if loss < MOST else None}
