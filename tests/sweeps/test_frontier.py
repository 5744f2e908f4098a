"""The frontier: a search by hand, then one with real launches under a cap."""

import itertools

import pytest
from test_sweep import finish, mini, statuses, study

from study.core.errors import Stop
from study.sweeps import protocol
from study.sweeps.sweep import search

SEARCH = """about = "how far one device goes"
document = "none"
replicates = "nothing"
[[part]]
name = "far"
frontier = "micro_batch"
arm = "single"
task = "wikitext"
data = "embedded"
init = "random"
micro_batch = [4, 8, 16, 32, 64, 128, 2000]
train_rows = 4000
eval_rows = 2
steps = 2
warmup_steps = 1
sequence = 256
memory_cap_gib = 0.4
instruments = false
[part.tiny]
"""


def searched(tmp_path, text: str = SEARCH):
    return protocol.cells(protocol.read(str(mini(tmp_path, text))), "tiny")


@pytest.mark.parametrize("above", ["oom", "failed"])
def test_a_search_finds_the_rungs_beside_the_limit(above, tmp_path):
    """What runs the smaller and cannot run the larger lacks room."""
    (cell,) = searched(tmp_path)
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
def test_the_result_of_a_search_is_a_sentence(status, tmp_path):
    """What runs no rung at all may lack a tool."""
    (cell,) = searched(tmp_path)
    assert f"micro_batch: {ENDINGS[status]}" in search(cell, lambda cell: status)


def test_the_runs_of_a_search_are_cells_of_their_own(tmp_path):
    (cell,) = searched(tmp_path)
    lower, higher = cell.at(0), cell.at(3)
    assert (lower.settings["micro_batch"], higher.settings["micro_batch"]) == (4, 32)
    assert lower.name != higher.name
    assert lower.name.startswith("far-single-4-")


def test_a_frontier_needs_its_ends(tmp_path):
    with pytest.raises(Stop, match="frontier 'micro_batch' has nothing to search"):
        searched(tmp_path, SEARCH.replace("micro_batch = [4, 8, 16, 32, 64, 128, 2000]", "micro_batch = [4]"))


@pytest.mark.slow
def test_a_search_with_real_runs_keeps_both_ends(tmp_path, cache):
    """Models of a ladder under a cap that the smallest keeps to and the next does not."""
    ladder = 'frontier = "model"\nmodel = ["gpt-tiny", "gpt2", "gpt2-medium"]\nmicro_batch = 4'
    text = SEARCH.replace('frontier = "micro_batch"', ladder).replace("micro_batch = [4, 8, 16, 32, 64, 128, 2000]", "")
    output = finish(study("sweep", mini(tmp_path, text), "--runs", tmp_path / "runs", cache=cache))
    assert "far single, model: gpt-tiny survives, gpt2 does not" in output
    ended = {name.split("-r1")[0].rpartition("-")[0]: status for name, status in statuses(tmp_path / "runs").items()}
    assert ended == {"far-single-gpt-tiny": "done", "far-single-gpt2": "oom"}, output
