"""The scoreboard: the same measured peaks for every predictor, and nothing said where one says nothing."""

import pytest
from test_train import FLAGS

from study.scoreboard import score


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_nvme"])
def test_our_prediction_is_within_five_per_cent(arm, trained):
    made = trained(arm, *FLAGS).record
    row = score(made)
    assert row["measured GB"] == made["memory"]["components"]["per_rank"][0]["tracked_peak_bytes"] / 1e9
    assert abs(row["ours"]) < 0.05
    assert abs(row["accelerate"]) > abs(row["ours"])
    assert (row["deepspeed"] is None) == (arm in ("ddp", "zero1")), "it has estimators for stages 2 and 3 alone"


def test_a_record_that_is_changed_is_a_prediction_that_is_off(trained):
    made = trained("zero2", *FLAGS).record
    held = made["memory"]["components"]["per_rank"][0]
    held["tracked_peak_bytes"] *= 2
    assert score(made)["ours"] == pytest.approx(-0.5, abs=0.03)


def test_what_was_held_out_is_told_by_its_name(trained):
    made = trained("ddp", *FLAGS).record
    assert not score(made)["held out"]
    assert score(made | {"run_id": "held-out-gpt-j-ddp-0123-r1.1"})["held out"]
