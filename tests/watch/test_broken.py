"""Trainings that are broken in one way each are named, in real launches, and healthy ones are not accused."""

import re

import pytest

from study.watch.about import about
from tests.conftest import forked, table

BROKEN = table("watch/broken.toml")
FIELD = table("watch/field.toml")
# Not mistakes, but costs: a tiny model has little else than states.
COSTS = {"states_replicated", "activations_dominate", "no_sync_unused", "outside_steps", "loader_waits", "straggler"}


@pytest.mark.parametrize("kind", BROKEN)
def test_each_broken_training_is_named_and_no_healthy_one_accused(kind, tmp_path):
    words = [str(tmp_path), *(f"{kind}-{name}" for name in BROKEN[kind])]
    launched = forked(tmp_path, config="accelerate_configs/ddp.yaml", script="tests/watch/broken.py", flags=words)
    assert launched.code == 0, launched.output
    abouts = {name: about(tmp_path / kind / name) for name in BROKEN[kind]}
    found = {name: sorted({each.id for each in known.findings} - COSTS) for name, known in abouts.items()}
    assert found == BROKEN[kind]
    if "frozen" in abouts:
        costs = {each.id for each in abouts["frozen"].findings}
        assert "states_replicated" not in costs, "a stage would save the moments of a few weights"


@pytest.mark.parametrize("kind", FIELD)
def test_what_goes_wrong_in_the_field_is_named_and_no_healthy_training_accused(kind, tmp_path):
    words = [str(tmp_path), *FIELD[kind]]
    launched = forked(tmp_path, config="accelerate_configs/single.yaml", script="tests/watch/field.py", flags=words)
    assert launched.code == 0, launched.output
    abouts = {name: about(tmp_path / name) for name in FIELD[kind]}
    found = {name: sorted({each.id for each in known.findings} - COSTS) for name, known in abouts.items()}
    assert found == FIELD[kind]
    for known in abouts.values():
        for each in known.findings:
            shares = [float(share) for share in re.findall(r"([\d.]+)%", each.sentence)]
            assert all(0 < share <= 100 for share in shares), each.sentence
