"""The frontier: a search by hand, then one with real launches under a cap."""

import itertools
from dataclasses import replace

import pytest
from test_sweep import Listener, statuses, swept, turns

from study.core.errors import Stop
from study.sweeps.sweep import search

RUNGS = [4, 8, 16, 32, 64, 128, 2000]
FAR = {"name": "far", "seed": 1, "task": "wikitext", "sequence": 256, "memory_cap_gib": 0.4}


def searched(frontier: str = "micro_batch", rungs=RUNGS):
    return turns(frontier=frontier, **FAR | {frontier: rungs})


@pytest.mark.parametrize("above", ["oom", "failed"])
def test_a_search_finds_the_rungs_beside_the_limit(above):
    """What runs the smaller and cannot run the larger lacks room."""
    (cell,) = searched()
    for good, bad in itertools.pairwise(cell.rungs):
        tried = []

        def run(cell, tried=tried, limit=bad) -> str:
            tried.append(cell.settings["micro_batch"])
            return "done" if tried[-1] < limit else above

        assert search(cell, run) == f"far single, micro_batch: {good} survives, {bad} does not"
        assert tried[0] == cell.rungs[0], "what needs least comes first"
        assert len(tried) == len({*tried}) <= 5, "no rung is tried twice"


ENDINGS = {"oom": "none survives, 4 does not", "done": "2000 survives, the", "failed": "none survives, the"}


@pytest.mark.parametrize("status", ENDINGS)
def test_the_result_of_a_search_is_a_sentence(status):
    """What runs no rung at all may lack a tool."""
    (cell,) = searched()
    assert f"micro_batch: {ENDINGS[status]}" in search(cell, lambda cell: status)


def test_the_runs_of_a_search_are_cells_of_their_own():
    (cell,) = searched()
    lower, higher = cell.at(0), cell.at(3)
    assert (lower.settings["micro_batch"], higher.settings["micro_batch"]) == (4, 32)
    assert lower.name != higher.name
    assert lower.name.startswith("far-single-4-")


def test_a_frontier_needs_a_list():
    with pytest.raises(Stop, match="frontier 'micro_batch' has nothing to search"):
        searched(rungs=4)


@pytest.mark.slow
def test_a_search_with_real_runs_keeps_both_ends(tmp_path, cache, monkeypatch):
    """Models of a ladder under a cap that the smallest keeps to and the next does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    few = {"micro_batch": 4, "train_rows": 4000, "eval_rows": 2, "steps": 2, "warmup_steps": 1}
    (cell,) = searched("model", ["gpt-tiny", "gpt2", "gpt2-medium"])
    swept([replace(cell, settings=cell.settings | few)], tmp_path, listener := Listener())
    assert listener.said == ["far single, model: gpt-tiny survives, gpt2 does not"]
    ended = {name.split("-r1")[0].rpartition("-")[0]: status for name, status in statuses(tmp_path).items()}
    assert ended == {"far-single-gpt-tiny": "done", "far-single-gpt2": "oom"}
