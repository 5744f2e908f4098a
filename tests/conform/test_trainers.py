"""`SameGradients` lets trainers pass whose gradients are averaged, and stops one whose loss goes past DDP."""

from pathlib import Path

import pytest

from tests.conftest import Launched, forked

SCRIPT = Path(__file__).with_name("same_gradients.py")
SAID = {
    "trainer": "the same in 2 updates",
    "sft": "the same in 2 updates",
    "dpo": "the same in 2 updates",
    "past": "update 1: 12 of 12 gradients differ between ranks, that of model.embed_tokens.weight first",
}


@pytest.fixture(scope="module")
def trained_with_each(tmp_path_factory) -> Launched:
    """One launch for all, which has most of its time in the imports of TRL."""
    folder = tmp_path_factory.mktemp("trainers")
    two = {"config": "accelerate_configs/ddp.yaml", "launcher": ("--num_processes", "2")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return forked(folder, **two, script=str(SCRIPT), flags=(str(folder), *SAID))


@pytest.mark.parametrize("kind", SAID)
def test_gradients_that_nobody_averages_are_found(kind, trained_with_each):
    output = trained_with_each.output
    assert [f"{kind}, rank {rank}: {SAID[kind]}" in output for rank in (0, 1)] == [True, True], output[-2000:]
