"""The answers of the index and of the README: each sentence and mark is what the records and kept predictions say."""

import re

import pytest

from study.core.arms import ROOT
from study.core.numbers import nats
from study.records import metrics
from study.records import runs as records
from study.report import answers, style
from study.report.topics import memory

KEPT = ROOT / "reports" / "cpu-2core" / "runs"


@pytest.fixture(scope="module")
def kept():
    return records.load([KEPT / "smoke", KEPT / "at_scale"])


@pytest.fixture(scope="module")
def index(kept):
    return {answer.name: answer for answer in answers.answers(kept)}


def texts(answer) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", style.svg(answer.figure, answer.name))


def test_memory_is_that_of_the_records_with_prediction_and_published_beside_it(index, kept):
    """Recomputed from the records themselves. What offloads is predicted: without a GPU its split is not measured."""
    rows = index["memory"].rows
    rows = rows[rows["model"] == "Llama-3-8B"]
    chosen = [run for run in kept.select(model="llama3-8b", ranks=8).done if run.record.requested.checkpointing]
    assert len(chosen) >= 8
    drawn = texts(index["memory"])
    measured, predicted = (answers.totals(rows, basis) for basis in (answers.VIRTUAL, answers.PREDICTED))
    assert measured.keys() == {run.record.arm for run in chosen if not memory.has_one_memory(run)}
    for run in chosen:
        if run.record.arm in measured:
            assert measured[run.record.arm] == sum(metrics.components(run.record).values())
            assert measured[run.record.arm] == pytest.approx(predicted[run.record.arm], rel=0.024)
            assert f"{measured[run.record.arm] / 1e9:.3g} GB" in drawn
    for arm, name in (("ddp", "DDP"), ("zero1", "stage 1"), ("zero2", "stage 2"), ("zero3", "stage 3")):
        assert f"{measured[arm] / 1e9:.3g} GB under {name}" in index["memory"].sentence
    published = rows[rows["basis"] == answers.PUBLISHED].set_index("arm")["bytes"].to_dict()
    assert published == {"zero1": 50.065e9, "zero2": 36.455e9, "zero3": 25.121e9}, "tohtana/ds_verify_loss"
    assert "**On a tiny model it costs memory,**" in index["memory"].more


def test_losses_are_those_of_a_training_that_learns(index):
    answer = index["losses"]
    worst = answer.rows["difference"].max()
    assert 0 < worst < answers.FP32_NOISE
    assert nats(worst) in answer.sentence
    assert answer.sentence.startswith("**No.**")
    curve = answer.rows.groupby("step")["loss"].mean()
    assert curve.iloc[-1] < curve.iloc[0] - 1, "nats"
    assert answer.rows["arm"].nunique() == 12
    assert (nats(0.0), nats(3.6e-7), nats(0.012)) == ("0 nats", "4e-7 nats", "0.01 nats")


def test_traffic_has_no_paper_for_what_the_paper_does_not_know(index):
    rows = index["traffic"].rows
    of_paper = set(rows[rows["source"] == "ZeRO paper"]["arm"])
    assert of_paper >= {"ddp", "zero1", "zero3"}
    assert not [arm for arm in of_paper if arm.startswith("fsdp2")]


def test_over_no_runs_each_says_what_makes_them():
    nothing = records.Runs(())
    for answer in answers.answers(nothing):
        assert answer.figure or answer.command.startswith("study sweep "), answer.name


# --- the README's picture and findings -----------------------------------------------------------------------------
