"""The difference of two peaks, on records made by hand, to the byte."""

import pytest

from study.core.errors import Stop
from study.records import metrics
from study.records.compare import REASONS, differences, peaks, reasons
from study.records.runs import Run, load
from study.records.schema import MEASURE_VERSION
from tests import shaped
from tests.conftest import ROOT

MB = 1_000_000
DDP = {"weights": 18 * MB, "gradients": 18 * MB, "moments": 35 * MB, "activations": 25 * MB, "other": MB}
ZERO2 = {"weights": 18 * MB, "moments": 18 * MB, "master": 9 * MB, "activations": 25 * MB, "other": MB}
ZERO2 |= {"buckets": 52 * MB, "temporaries": 3 * MB}


def run(arm: str, *ranks: dict[str, int], version: int = MEASURE_VERSION) -> Run:
    """A run of ranks that hold so many bytes at their peaks."""
    per_rank = [{"at_peak": held, "tracked_peak_bytes": sum(held.values())} for held in ranks]
    return shaped.run(
        run_id=arm, arm=arm, ranks=len(ranks) or 1, measure_version=version, memory__components={"per_rank": per_rank}
    )


@pytest.mark.parametrize(("a", "b"), [(DDP, ZERO2), (DDP, DDP), (DDP, {"new_thing": 7})])
def test_each_component_is_a_row_and_the_largest_change_comes_first(a, b):
    rows = peaks(run("ddp", a), run("zero2", b))
    assert {row["component"]: row["first"] for row in rows if row["first"]} == a
    assert {row["component"]: row["second"] for row in rows if row["second"]} == b
    changes = [abs(row["second"] - row["first"]) for row in rows]
    assert changes == sorted(changes, reverse=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arm": "zero2", "ranks": 4, "seed": 7}, ""),
        ({"requested__model": "gpt2", "requested__task": "imdb"}, "task wikitext and imdb, model gpt-tiny and gpt2"),
        ({"requested__precision": "bf16"}, "precision fp32 and bf16"),
        ({"requested__micro_batch": 4, "requested__accumulation": 2}, "micro-batch 8 and 4, accumulation 1 and 2"),
        ({"requested__sequence": 32}, "tokens 64 and 32"),
    ],
)
def test_what_differs_besides_the_arm_is_named(changes, said):
    assert differences(shaped.run(arm="ddp"), shaped.run(**{"arm": "ddp"} | changes)) == said


def test_the_rank_that_held_most_counts():
    uneven = run("ddp", {"weights": 5}, {"weights": 7, "moments": 1}, {"weights": 6})
    assert metrics.components(uneven.record) == {"weights": 7, "moments": 1}


def test_the_first_rank_is_shown_and_the_one_that_sent_most_is_counted():
    record = shaped.record()
    first = metrics.sent(record)
    record.traffic.per_rank[1]["all_reduce"].bytes *= 3
    assert metrics.sent(record) == first
    assert metrics.moved(record, ["all_reduce"], "tensors") == 3 * first["all_reduce"]


def test_a_record_without_components_is_a_stop():
    with pytest.raises(Stop, match="has no memory by component") as stop:
        peaks(run("ddp", DDP), run("zero2"))
    assert "--no-instruments" in stop.value.remedy


def test_between_steps_stage_3_keeps_gradients_and_stages_1_and_2_do_not():
    """As `REASONS` says. So stage 1 may have none at a peak before the first gradient, where stage 3 has its part."""
    smoke = load([ROOT / "reports/cpu-2core/runs/smoke"])
    kept = {arm: {has_gradients(run) for run in smoke.select(arm=arm).done} for arm in ("zero1", "zero2", "zero3")}
    assert kept == {"zero1": {False}, "zero2": {False}, "zero3": {True}}


def has_gradients(run: Run) -> bool:
    return any(rank.after_step.get("gradients", 0) > 0 for rank in run.record.memory.components.per_rank)


EITHER = "activations or temporaries"


def test_an_older_record_of_deepspeed_does_not_say_which_are_activations():
    """Llama-3-8B with stage 3 had 6 GB of them by its record: the update's copies, but for 36 bytes."""
    zero2 = run("zero2", ZERO2 | {"master": 13 * MB}, version=3)
    rows = {row["component"]: row for row in peaks(run("ddp", DDP, version=3), zero2)}
    assert rows.keys() == {*DDP, *ZERO2, EITHER} - {"activations", "temporaries"}
    assert (rows[EITHER]["first"], rows[EITHER]["second"]) == (25 * MB, 28 * MB)
    assert reasons([rows[EITHER]]) == [f"{EITHER}: {REASONS[EITHER]}"]


def test_more_than_an_update_copies_are_activations_in_an_older_record_too():
    rows = {row["component"]: row for row in peaks(run("ddp", DDP, version=3), run("zero2", ZERO2, version=3))}
    assert rows.keys() == {*DDP, *ZERO2}
    assert rows["activations"]["second"] == 25 * MB
