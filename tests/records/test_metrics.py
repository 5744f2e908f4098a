"""Single values of a record."""

import pytest

from study.records import metrics
from tests import shaped

LOSSES = shaped.finished()["loss"]["train"]


@pytest.mark.parametrize(
    ("watched", "steps", "loss"),
    [
        ({"script": "mine.py"}, len(LOSSES), LOSSES[-1]),
        ({"script": "mine.py"}, len(LOSSES) + 1, None),  # it trained on without saying its losses
        ({}, len(LOSSES) + 1, LOSSES[-1]),
    ],
)
def test_the_last_loss_is_that_of_the_last_step(watched, steps, loss):
    record = shaped.record(watched=watched, observed__steps=steps)
    assert record.is_watched == bool(watched)
    assert metrics.value(record, "train_loss") == loss
