"""The scoreboard: the same measured peaks for every predictor, and None where a predictor has no answer."""

import pytest
from scoreboard import library_estimates, score

from study.records.runs import Run
from study.records.schema import Record
from study.report.of_record import predicted
from tests.conftest import TRAINED
from tests.shaped import changed, finished


@pytest.mark.parametrize("arm", ["ddp", "zero2", "zero2_cpu", "zero3"])
def test_our_prediction_is_within_five_per_cent(arm, trained):
    record = trained(arm, *TRAINED).record
    run = Run(None, record)
    row = score(run, library_estimates(run))
    assert row["measured GB"] == record.memory.components.per_rank[0].tracked_peak_bytes / 1e9
    assert abs(row["ours"]) < 0.05
    assert abs(row["accelerate"]) > abs(row["ours"])
    assert (row["deepspeed"] is None) == (arm in ("ddp", "zero1")), "it has estimators for stages 2 and 3 only"


# --- predictions of records


def estimate_of(record: dict):
    return predicted(Record.model_validate(record))


def test_a_run_on_real_text_is_predicted_for_its_own_rows():
    real = changed(finished(), requested__data="hub")
    assert estimate_of(real) is None, "the number of rows that a rank holds is not known"
    few, many = (changed(real, requested__train_rows=rows, requested__eval_rows=2) for rows in (10, 1610))
    assert estimate_of(many).peak_bytes - estimate_of(few).peak_bytes == 1600 * 8 * real["requested"]["sequence"]
    on_gpu = changed(finished(gpu=True), requested__data="hub")
    assert estimate_of(on_gpu), "on a GPU the rows are in host memory"


def test_another_model_under_the_name_of_a_shape_is_not_predicted():
    named = changed(finished(), requested__model="my/gpt-tiny/")
    assert estimate_of(named)
    assert estimate_of(changed(named, observed__parameters=10**6)) is None
    assert estimate_of(changed(named, requested__model="my/own/")) is None
