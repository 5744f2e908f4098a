"""Runs side by side: what is pooled, what never is, and what is said of the rest. The records are invented."""

import itertools
import re

import numpy as np
import pytest

from study.cli.results import compare as compare_command
from study.records import runs
from study.records.compare import Comparison, median_with_interval, notes, unequal_losses
from study.records.compare import compare as compare_runs
from tests import shaped
from tests.conftest import ROOT

ERROR = {"kind": "Stop", "message": "no memory", "what_to_do": "try again"}
CHANGES = {
    "hardware__host_memory_bytes": 24 * 2**30 + 12345,
    "loss__train": [0.7, 0.5],
    "loss__eval": [{"step": 4, "eval_loss": 0.25}],
    "time__step_s": [0.1],
    "memory__per_rank": [{"peak_allocated_bytes": None}] * 2,
    "memory__components": {"per_rank": [{"tracked_peak_bytes": 3e6}, {"tracked_peak_bytes": 5e6}]},
}


def compare(folders: list) -> Comparison:
    return compare_runs(runs.load(folders, every_folder_has_runs=True))


@pytest.fixture
def compared_of(tmp_path):
    """A function that writes a record for each of some changes, below `runs` or below the folder that `below` names.

    It compares all that there are by then.
    """
    count = itertools.count()

    def write(*changes: dict, below: str = "runs") -> Comparison:
        for each in changes:
            shaped.put(tmp_path / below, shaped.finished(f"run-{next(count):06}", "zero3_nvme", **CHANGES | each))
        return compare([tmp_path])

    return write


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("software__torch", "2.14.0", "torch 2.14.0"),
        ("hardware__host_memory_bytes", 32 * 2**30, "host GiB 32"),
        ("measure_version", 99, "measure_version 99"),
        ("dirty", True, f"commit {shaped.COMMIT[:12]} changed"),
    ],
)
def test_another_environment_is_another_row(compared_of, field, value, words):
    compared = compared_of({"time__step_s": [0.1]}, {field: value, "time__step_s": [0.3]})
    rows = [[row[name] for name in ("environment", "runs", "s/step", "vs A")] for row in compared.rows]
    assert rows == [["A", 1, 0.1, 1], ["B", 1, 0.3, pytest.approx(3)]]
    assert f"B: {words}" in notes(compared), "this field and no other"


@pytest.mark.parametrize(
    ("field", "value", "column"),
    [
        ("requested__arm", "zero3", "arm"),
        ("observed__ranks", 4, "ranks"),
        ("observed__data_checksum", "bb", "data_checksum"),
    ],
)
def test_another_setting_is_another_row_and_the_only_column(compared_of, field, value, column):
    rows = compared_of({}, {field: value}).rows
    assert [row["environment"] for row in rows] == ["A", "A"]
    assert [row[column] for row in rows].count(value) == 1
    before = list(rows[0])[: list(rows[0]).index("environment")]
    assert before == list(dict.fromkeys(["arm", column]))


def test_paths_and_what_a_boot_changes_do_not_split_a_row(compared_of):
    same = {
        "requested__seed": 43,
        "requested__run_dir": "/elsewhere",
        "requested__config_file": "/elsewhere/zero3_nvme.yaml",
        "requested__log_every": 1,
        "requested__data": "/there/embedded",
        "hardware__host_memory_bytes": 24 * 2**30 - 54321,
        "software__flash_attn": None,
    }
    (row,) = compared_of({}, *({field: value} for field, value in same.items())).rows
    assert row["runs"] == 1 + len(same)


def test_a_column_that_nothing_fills_is_not_shown(monkeypatch, capsys):
    """Of virtual ranks no second is known, and no loss. --json has all."""
    monkeypatch.setenv("COLUMNS", "300")
    result = compare_command((ROOT / "reports/cpu-2core/runs/at_scale",))
    head = re.search("^arm  .*$", capsys.readouterr().out, re.MULTILINE)[0].split("  ")
    assert {"peak MB", "virtual_ranks"} <= {name.strip() for name in head}
    assert not {"s/step", "vs A", "loss", "eval loss"} & {name.strip() for name in head}
    assert {"s/step", "loss"} <= result["rows"][0].keys()


def test_seeds_are_pooled_and_an_interval_takes_three_runs(compared_of):
    def row_of(*changes):
        (row,) = compared_of(*changes).rows
        return [row[name] for name in ("runs", "seeds", "s/step", "loss", "eval loss", "from", "to")]

    runs = [
        {"requested__seed": seed, "time__step_s": [s], "loss__train": [loss]}
        for seed, s, loss in [(1, 0.3, 0.6), (2, 0.1, 0.4), (3, 0.2, 0.5), (3, 0.9, 0.5)]
    ]
    assert row_of(*runs[:2]) == [2, 2, pytest.approx(0.2), 0.5, 0.25, None, None]
    *medians, low, high = row_of(*runs[2:])
    assert medians == [4, 3, pytest.approx(0.25), 0.5, 0.25]
    assert 0.1 <= low < 0.25 < high <= 0.9


def test_one_cell_in_two_environments_stands_together_and_the_first_folder_is_a(compared_of, tmp_path):
    newer = {"software__torch": "2.14.0"}
    compared_of({"requested__arm": "ddp", "time__step_s": [0.4]}, {"requested__arm": "zero1"}, below="old")
    compared_of(
        {"requested__arm": "zero2"} | newer, {"requested__arm": "ddp", "time__step_s": [0.1]} | newer, below="new"
    )
    compared = compare([tmp_path / "old", tmp_path / "new"])
    rows = [(row["arm"], row["environment"], row["vs A"]) for row in compared.rows]
    assert rows == [("ddp", "A", 1), ("ddp", "B", pytest.approx(0.25)), ("zero1", "A", 1), ("zero2", "B", None)]
    assert compare([tmp_path / "new", tmp_path / "old"]).environments["A"]["torch"] == "2.14.0"


def test_what_is_not_done_is_counted_and_not_averaged(compared_of):
    bad = [{"status": status, "error": ERROR} for status in ("failed", "failed", "oom", "running")]
    compared = compared_of(*bad, {})
    assert compared.left_out == {"failed": 2, "oom": 1, "running": 1}
    assert [row["runs"] for row in compared.rows] == [1]
    assert "left out: 2 failed" in notes(compared)


@pytest.mark.parametrize(
    ("per_rank", "components", "peak", "kind"),
    [
        ([None, None], [], None, None),
        ([None, None], [3e6, 5e6], 5.0, "tracked"),
        ([7e6, 6e6], [3e6, 5e6], 7.0, "allocated"),
        ([7e6, None], [], None, None),
    ],
)
def test_the_peak_is_the_largest_ranks_and_says_of_what(compared_of, per_rank, components, peak, kind):
    of_rank = {"per_rank": [{"tracked_peak_bytes": value} for value in components]}
    memory = {"per_rank": [{"peak_allocated_bytes": value} for value in per_rank], "components": of_rank}
    (row,) = compared_of({"memory": memory}).rows
    assert (row["peak MB"], row["peak of"]) == (peak, kind)


def test_what_one_run_does_not_know_the_row_does_not_know(compared_of):
    times = [{"step_s": step_s, "setup_s": 1.0} for step_s in ([0.1], [0.2], [])]
    allocated = {"memory__per_rank": [{"peak_allocated_bytes": 9e6}], "loss__eval": []}
    (row,) = compared_of(*({"time": section} | allocated for section in times), {}).rows
    assert {row[name] for name in ("s/step", "from", "to", "vs A", "eval loss")} == {None}
    assert (row["peak MB"], row["peak of"]) == (5.0, "tracked"), "the kind of peak that all know"


def test_on_a_cpu_peaks_of_arms_that_offload_are_said_to_hold_the_host_as_well(tmp_path):
    """In each command that shows peaks, once; of a GPU, and where nobody offloads, it is not said."""
    note = "zero3_cpu: without a GPU"
    for folder, arm, gpu in (("a", "zero3_cpu", False), ("b", "zero3_cpu", True), ("c", "zero3", False)):
        mine = [shaped.finished(f"{arm}-{seed}", arm, seed=seed, gpu=gpu) for seed in (1, 2)]
        compared = compare([shaped.put(tmp_path / folder, *mine)])
        assert sum(line.startswith(note) for line in notes(compared)) == (folder == "a")


def test_the_interval_is_that_of_the_resamples_drawn_one_by_one():
    """By hand, from the same generator: medians of samples with replacement, and their quantiles."""
    slow = [2.0, 2.2, 1.9, 2.1, 2.4, 2.0, 2.3]
    medians = np.median(np.random.default_rng(3).choice(slow, (2000, 7)), axis=1)
    expected = np.quantile(medians, [0.025, 0.975])
    assert median_with_interval(slow, np.random.default_rng(3)) == pytest.approx((2.1, *expected), rel=1e-12)


@pytest.mark.parametrize(
    ("fsdp", "passes", "is_said"), [({"offloads": False}, 4, True), ({"offloads": False}, 1, False), (None, 4, False)]
)
def test_fsdp_with_several_passes_keeps_whole_gradients(fsdp, passes, is_said, compared_of):
    compared = compared_of({"observed__fsdp": fsdp, "observed__accumulation": passes})
    assert any("whole gradients" in note for note in notes(compared)) == is_said


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({"loss": 2.002}, True),
        ({"loss": 2.0000001}, False),
        ({"loss": 2.1, "seed": 43}, False),
        ({"loss": 2.1, "requested__precision": "bf16"}, False),
        ({"loss": 2.1, "requested__optimizer": "adafactor"}, False),
        ({"loss": 2.1, "requested__lr": 0.002}, False),
        ({"loss": 2.1, "observed__tf32": True}, False),
        ({"loss": 2.1, "observed__clipping": 1.0}, False),
        ({"loss": 2.1, "observed__data_checksum": "0"}, False),
        ({"loss": 2.1, "observed__weights_checksum": None}, False),
    ],
)
def test_losses_of_equal_trainings_differ_by_rounding_alone(change, is_told, tmp_path):
    """What is not equal, or not known to be exact, is no fault."""
    shaped.put(tmp_path, shaped.finished("a", "ddp"), shaped.finished("b", "zero2", **change))
    told = unequal_losses(runs.load([tmp_path]).done)
    assert len(told) == is_told
    assert not is_told or "The losses of a (ddp) and b (zero2) differ by 0.003 nats" in told[0]


def test_no_losses_of_kept_records_differ_by_more_than_rounding():
    kept = runs.load([shaped.ROOT / "reports"]).done
    assert len(kept) > 700
    assert unequal_losses(kept) == []
