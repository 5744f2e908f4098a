"""Wraps the formulas of `study.training.tasks` as metrics of `evaluate`.

`evaluate.load` would fetch code from the hub. This is a separate module because `evaluate` imports `datasets`, which
takes 0.8 s and 110 MB: only the first rank of a run on real data imports it.
"""

import datasets
import evaluate


class Formula(evaluate.Metric):
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
