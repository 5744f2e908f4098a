"""DeepSpeed's optimizer of 16-bit weights without sharding: what its step makes, in theory."""

import pytest

from study.predict.architecture import named
from study.predict.estimate import moments, profile
from study.predict.memory.engine import Engine
from study.predict.setup import Setup


@pytest.mark.parametrize(("deepspeed", "times"), [({"zero_optimization": {"stage": 0}}, 2), (None, 1)])
def test_the_step_holds_all_gradients_in_fp32_twice_with_deepspeed_only(deepspeed, times):
    setup = Setup(model=named("gpt2"), deepspeed=deepspeed, precision="bf16_cast", ranks=2)
    updates = [sum(now.values()) for when, now in moments(Engine(setup), profile(setup)) if when == "update"]
    assert max(updates) - 2 * setup.model.trained == 4 * times * setup.model.trained
