"""Why the seconds of a step are not predicted: what was expected, what came, what to do."""

import json
import types

import pytest

from study.core.errors import Stop
from study.predict.front import Wanted, asked_for
from study.records.sections import Observed
from study.rehearsal import seconds
from study.rehearsal.request import Answer, Request
from tests.predict.families import config_of


def refusal(function, *arguments) -> str:
    with pytest.raises(Stop) as stop:
        function(*arguments)
    return stop.value.sentence


@pytest.mark.parametrize(
    ("calls", "passes", "expected", "came"),
    [
        (0, 4, "a step of 4 micro-batches should call the model 4 times", "the last step called it 0 times"),
        (2, 1, "a step of 1 micro-batch should call the model 1 time", "the last step called it 2 times"),
    ],
)
def test_other_calls_than_micro_batches(calls, passes, expected, came):
    said = refusal(seconds.refuse_other_calls, Answer(calls=calls), passes)
    assert said.startswith(f"{expected}, and {came}. What to do: ")
    assert said.endswith("measure a step where it trains.")
    seconds.refuse_other_calls(Answer(calls=passes), passes)


def test_a_reference_model_beside_the_one_that_trains():
    assert "calls others beside it" in refusal(seconds.refuse_other_calls, Answer(calls=1, has_other_models=True), 1)


def test_adapters_on_some_layers_are_not_called_another_model():
    model, seen = types.SimpleNamespace(parameters=1200), Observed(parameters=1020, trained_parameters=20)
    said = refusal(seconds.refuse_other_model, model, seen, 8)
    assert "adapters of rank 8 on all linear layers are predicted" in said
    assert "1,200" in said
    assert "1,020" in said
    assert "another one" not in said
    assert 'What to do: give PEFT target_modules="all-linear"' in said
    assert "it is another one" in refusal(seconds.refuse_other_model, model, seen, None)
    seconds.refuse_other_model(model, Observed(parameters=1195), 8)


def test_types_and_optimizers_that_are_not_known():
    assert "(got float64)" in refusal(seconds.recipe_of, Observed(dtypes={"weights": "float64"}))
    assert "should be Adam or AdamW (got Lion)" in refusal(seconds.optimizer_of, Observed(optimizer="Lion"))


def test_a_model_that_the_predictor_cannot_follow_is_named_by_its_type(tmp_path):
    """Its config is a file of ours in a temporary folder, which is not the user's to correct."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", num_key_value_heads=3)))
    model = asked_for(Wanted(model=str(tmp_path)), 8)
    seen = Observed(parameters=model.parameters, accumulation=1, dtypes={"weights": "float32"}, optimizer="AdamW")
    request = Request("train.py", [], ranks=2, ranks_per_machine=2, steps=3, gpu="A6000")
    record = types.SimpleNamespace(observed=seen)
    said = refusal(seconds.seconds_of, request, Answer(calls=1, batch=[2, 8]), record, tmp_path)
    assert said.startswith("the time predictor cannot follow this model (llama): ")
    assert str(tmp_path) not in said
    assert said.endswith("What to do: measure a step where it trains.")
