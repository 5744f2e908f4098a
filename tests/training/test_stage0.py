"""DeepSpeed's optimizer of 16-bit weights without sharding: what its step makes, in theory."""

import pytest

from study.predict.architecture import named
from study.predict.engines import engine_of
from tests.predict.trainings import training_of


@pytest.mark.parametrize(("zero", "times"), [({"stage": 0}, 2), (None, 1)])
def test_the_step_holds_all_gradients_in_fp32_twice_with_deepspeed_only(zero, times):
    ours = training_of(named("gpt2"), zero=zero, precision="bf16_cast", ranks=2)
    updates = [sum(now.values()) for when, now in engine_of(ours).instants(ours.profile) if when == "update"]
    assert max(updates) - 2 * ours.model.trained == 4 * times * ours.model.trained
