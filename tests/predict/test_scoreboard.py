"""The scoreboard: the same measured peaks for every predictor, and None where a predictor has no answer."""

import pandas as pd
import pytest
from scoreboard import measured_on_gpu, score

from study.predict.allocator import CONTEXT_BYTES
from study.records.runs import Run, Runs
from study.records.schema import Record
from study.report.of_record import predicted
from tests.conftest import TRAINED
from tests.shaped import changed, finished, run


@pytest.mark.parametrize("arm", ["ddp", "zero2", "zero2_cpu", "zero3"])
def test_our_prediction_is_within_five_per_cent(arm, trained):
    record = trained(arm, *TRAINED).record
    row = score(Run(None, record))
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


# --- what a GPU measured -------------------------------------------------------------------------------------------

NAMES = {"allocated", "reserved", "driver", "step"}


def on_gpu(**settings) -> pd.DataFrame:
    return measured_on_gpu(Runs((run(**{"gpu": True, "ranks": 1, "arm": "single"} | settings),)))


def test_a_run_on_a_gpu_has_three_kinds_of_memory_and_a_step():
    rows = on_gpu().set_index("quantity")
    predicted = rows["predicted"]
    assert {*rows.index} == NAMES
    assert predicted["driver"] - predicted["reserved"] == CONTEXT_BYTES, "a single process has no NCCL"
    assert (rows["predicted over measured"] == predicted / rows["measured"]).all()


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"arm": "zero3", "ranks": 8, "virtual": True}, {"driver", "step"}),
        ({"hardware__devices": [{"name": "NVIDIA Unheard-of", "memory_bytes": 10**12}]}, {"step"}),
        ({"requested__compile": True}, NAMES),
    ],
)
def test_what_was_not_measured_or_is_not_predicted_is_left_out(settings, lacks):
    rows = on_gpu(**settings)
    assert NAMES - set(rows["quantity"] if len(rows) else ()) == lacks
