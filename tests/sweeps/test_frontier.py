"""How far an arm goes: the search for the last value that survives."""

import itertools
import re

import pytest

from study.core.errors import Stop
from study.sweeps.protocol import PART_NAME
from study.sweeps.sweep import search
from tests.sweeps.test_sweep import turns

RUNGS = [4, 8, 16, 32, 64, 128, 2000]


def searched(frontier: str = "micro_batch", rungs=RUNGS):
    return turns(frontier=frontier, **{"seed": 1, frontier: rungs})


@pytest.mark.parametrize("above", ["oom", "failed"])
def test_a_search_finds_the_rungs_beside_the_limit(above):
    """What runs the smaller and cannot run the larger lacks room."""
    (cell,) = searched()
    for good, bad in itertools.pairwise(cell.rungs):
        tried = []

        def run(cell, tried=tried, limit=bad) -> str:
            tried.append(cell.settings["micro_batch"])
            return "done" if tried[-1] < limit else above

        assert search(cell, run) == f"p single, micro_batch: {good} survives, {bad} does not"
        assert tried[0] == cell.rungs[0], "what needs least comes first"
        assert len(tried) == len({*tried}) <= 5, "no rung is tried twice"


ENDINGS = {"oom": "none survives, 4 does not", "done": "2000 survives, the", "failed": "none survives, the"}


@pytest.mark.parametrize("status", ENDINGS)
def test_the_result_of_a_search_is_a_sentence(status):
    """What runs no rung at all may lack a tool."""
    (cell,) = searched()
    assert f"micro_batch: {ENDINGS[status]}" in search(cell, lambda cell: status)


def test_a_frontier_needs_a_list():
    with pytest.raises(Stop, match="frontier 'micro_batch' has nothing to search"):
        searched(rungs=4)


def test_a_rung_is_part_of_a_cells_name():
    (batches,) = searched()
    assert [batches.at(rung).name.split("-")[2] for rung in (0, 3)] == ["4", "32"]
    (cell,) = searched("model", ["gpt2", "some/[odd] name*", "/a/b/..", "y" * 300])
    for rung in range(4):
        assert re.fullmatch(PART_NAME, cell.at(rung).name[:60]), cell.at(rung).name
        assert len(cell.at(rung).name) < 100
