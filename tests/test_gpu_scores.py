"""What a GPU measured beside what was predicted: which quantities a run has, and how their errors are counted."""

import pytest
from shaped import finished, put, run

from study.bench import gpu_scores
from study.bench.scoreboard import main
from study.predictor.memory.memory_kinds import outside_bytes

ON_GPU = {"gpu": True, "model": "gpt2", "ranks": 1, "arm": "single"}


def scored(**settings) -> dict:
    """The quantities of one made-up run; empty if it has none."""
    quantities = [each.quantities for each in gpu_scores.scored([run(**ON_GPU | settings)])]
    return quantities[0] if quantities else {}


def test_a_run_on_a_gpu_has_three_kinds_of_memory_and_a_step():
    quantities = scored()
    assert tuple(quantities) == gpu_scores.NAMES
    assert quantities["allocated"].predicted <= quantities["reserved"].predicted
    assert quantities["driver"].predicted - quantities["reserved"].predicted == outside_bytes(ranks=1)
    low_s, high_s = quantities["step"].interval
    assert low_s < quantities["step"].predicted < high_s


def test_the_rank_that_holds_most_is_compared():
    settings = {"arm": "ddp", "ranks": 2}
    most = run(**ON_GPU | settings).record.memory.per_rank[0].peak_allocated_bytes + 5 * 10**8
    assert scored(**settings, memory__per_rank__1__peak_allocated_bytes=most)["allocated"].measured == most


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"arm": "zero3", "ranks": 8, "virtual": True}, {"driver", "step"}),
        ({"arm": "zero3_nvme"}, {"step"}),
        ({"hardware__devices": [{"name": "NVIDIA Unheard-of", "memory_bytes": 10**12}]}, {"step"}),
        ({"gpu": False}, {"allocated", "reserved", "driver", "step"}),
        ({"requested__compile": True}, {"allocated", "reserved", "driver", "step"}),
        ({"time__step_s": []}, {"step"}),
    ],
)
def test_what_was_not_measured_or_is_not_predicted_is_left_out(settings, lacks):
    assert set(gpu_scores.NAMES) - set(scored(**settings)) == lacks


def test_errors_are_what_they_are_by_hand():
    """One run took the predicted time, the other twice as long: errors of 0 and -50 %."""
    ideal_s = scored()["step"].predicted
    runs = [run(**ON_GPU, run_id=f"run-{times}", time__step_s=[times * ideal_s]) for times in (1, 2)]
    ours, published = [row for row in gpu_scores.errors(gpu_scores.scored(runs)) if row["quantity"] == "step"]
    assert (ours["cells"], ours["off by (median)"], ours["worst"], ours["within 10 %"]) == (2, "25%", "-50%", "50%")
    assert published["measured"] == "published"
    assert published["cells"] > 100


def test_the_scoreboard_shows_them_for_runs_on_a_gpu_alone(tmp_path, capsys):
    main((put(tmp_path / "gpu", finished(**ON_GPU)),), tracker=False)
    assert "On the GPU" in capsys.readouterr().out
    main((put(tmp_path / "cpu", finished()),), tracker=False)
    assert "On the GPU" not in capsys.readouterr().out
