"""The frontier: the bracketing by hand, then a search with real launches under a cap."""

import pytest
from test_sweep import finish, mini, statuses, study

from study.core.errors import Stop
from study.sweeps import protocol
from study.sweeps.sweep import bracket, search

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
micro_batch = [4, 2000]
train_rows = 4000
eval_rows = 2
steps = 2
warmup_steps = 1
sequence = 256
memory_cap_gib = 0.4
instruments = false
[part.tiny]
"""


def test_the_frontier_is_bracketed():
    """Every answer below the limit is yes. What is found holds the limit between the two, an eighth apart at most."""
    for limit in (0, 1, 3, 8, 50, 99, 100):
        tried = []
        good, bad = bracket(lambda rung, limit=limit, tried=tried: tried.append(rung) or rung < limit, 100)
        assert good < limit <= bad
        assert bad - good <= max(1, (good + 1) // 8)
        assert len(tried) == len(set(tried)) <= 14, "no rung is tried twice"
        assert {good, bad} <= {-1, 100, *tried}, "both ends were really run"


def searched(tmp_path, text: str = SEARCH):
    return protocol.cells(protocol.read(str(mini(tmp_path, text))), "tiny")


@pytest.mark.parametrize(
    ("status_of", "words"),
    [
        (lambda rows: "done" if rows < 40 else "oom", " does not"),
        (lambda rows: "oom", "none survives, 4 does not"),
        (lambda rows: "done", "2000 survives, which is the last to try"),
        (lambda rows: "failed", "ended at a run that is failed"),
        # What runs the smaller and cannot run the larger lacks room. What runs neither may lack a tool.
        (lambda rows: "done" if rows < 40 else "failed", " does not"),
    ],
)
def test_the_result_of_a_search_is_a_sentence(tmp_path, status_of, words):
    (cell,), ended = searched(tmp_path), []
    sentence = search(cell, lambda cell: ended.append(status_of(cell.settings["micro_batch"])) or ended[-1])
    assert sentence.startswith("far single, micro_batch: ")
    assert words in sentence
    assert ("survives, " in sentence and "none" not in sentence) == ("done" in ended)


def test_the_runs_of_a_search_are_cells_of_their_own(tmp_path):
    (cell,) = searched(tmp_path)
    lower, higher = cell.at(0), cell.at(3)
    assert (lower.settings["micro_batch"], higher.settings["micro_batch"]) == (4, 7)
    assert lower.name != higher.name
    assert lower.name.startswith("far-single-4-")


def test_a_frontier_needs_its_ends(tmp_path):
    with pytest.raises(Stop, match="frontier 'micro_batch' has micro_batch") as caught:
        searched(tmp_path, SEARCH.replace("[4, 2000]", "[8, 4]"))
    assert "lowest, highest" in caught.value.remedy


@pytest.mark.slow
def test_a_search_with_real_runs_keeps_both_ends(tmp_path, cache):
    """Models of a ladder under a cap that the smallest keeps to and the next does not."""
    ladder = 'frontier = "model"\nmodel = ["gpt-tiny", "gpt2", "gpt2-medium"]\nmicro_batch = 4'
    text = SEARCH.replace('frontier = "micro_batch"', ladder).replace("micro_batch = [4, 2000]", "")
    output = finish(study("sweep", mini(tmp_path, text), "--runs", tmp_path / "runs", cache=cache))
    assert "far single, model: gpt-tiny survives, gpt2 does not" in output
    ended = {name.split("-r1")[0].rpartition("-")[0]: status for name, status in statuses(tmp_path / "runs").items()}
    assert ended == {"far-single-gpt-tiny": "done", "far-single-gpt2": "oom"}, output
