"""The built-in shapes have as many parameters as published, and are refused if they do not fit."""

import json

import pytest

from study.core.errors import Stop
from study.core.models.config import class_for, kind_of, load
from study.core.settings import TrainerFlags, resolve
from study.core.shapes import NO_FUSED_ATTENTION, SHAPES, model_of_name, shape_of
from study.core.shapes import models as known_models
from study.predict.architecture import named
from study.training import models
from tests.conftest import table

NAMES = table("core/names.toml")
PUBLISHED = [name for name, shape in SHAPES.items() if "parameters" in shape]
FAMILIES = list({shape["model_type"]: name for name, shape in SHAPES.items()}.values())  # a shape of each


def built(model: str, vocabulary: int = 2048, **settings):
    """Return the model on `meta`, and its settings, for the task that its kind fits."""
    kind = kind_of(load(model))
    task = next((task for task, fits in models.KINDS.items() if fits == kind), "synthetic")
    resolved = resolve(TrainerFlags(**{"model": model, "task": task, "sequence": 64} | settings), gpu=False)
    words = None if resolved.task == "synthetic" else vocabulary
    return models.on_meta(resolved, models.model_config(resolved, words))


def parameters_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_published(name):
    """In millions with two digits; of BERT with a head for two labels. Heads tied to embeddings count once."""
    model = built(name, attention="eager")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}, "nothing is allocated to count"
    assert parameters_of(model) == pytest.approx(SHAPES[name]["parameters"], abs=1e4)


def test_our_own_shape_takes_the_vocabulary_of_its_data():
    """By hand: embeddings, two blocks of 12 h^2 + 13 h, and the last norm."""
    h, vocabulary = 128, 50257
    by_hand = (vocabulary + 1024) * h + 2 * (12 * h**2 + 13 * h) + 2 * h
    assert parameters_of(built("gpt-tiny", vocabulary)) == by_hand


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shape_is_built_with_its_default_attention(name):
    """Attention is fused if transformers' classes support it."""
    attention = built(name).config._attn_implementation
    is_fused = SHAPES[name]["model_type"] not in NO_FUSED_ATTENTION
    assert class_for(load(name))._supports_sdpa == is_fused == ("sdpa" in attention)


@pytest.mark.parametrize(("settings", "vocabulary", "what"), table("core/settings.toml")["models"])
def test_what_a_model_cannot_do_is_refused(settings, vocabulary, what):
    with pytest.raises(Stop, match=what):
        built(**settings, vocabulary=vocabulary)


def test_a_local_folder_is_a_shape_of_its_own(tmp_path):
    """By its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["bert-tiny"] | {"num_hidden_layers": 1}))
    one_layer = 4 * (128**2 + 128) + 2 * 128 * 512 + 512 + 128 + 4 * 128
    assert parameters_of(built(str(tmp_path))) == 4_386_178 - one_layer


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2", "gpt-neox-20b"])
def test_dropout_is_set_everywhere_in_the_model(name):
    modules = built(name, dropout=0.3).modules()
    assert {module.p for module in modules if type(module).__name__ == "Dropout"} == {0.3}


def test_the_shape_and_the_model_that_a_name_means():
    for name, shape in NAMES["shape"].items():
        assert shape_of(name) == shape
    for name, model in NAMES["model"].items():
        assert (model_of_name(name) or "") == model


def test_models_that_are_only_predicted_have_as_many_parameters_as_published():
    predicted = {name: config["parameters"] for name, config in known_models().items() if name not in SHAPES}
    counted = {name: named(name).parameters for name in predicted}
    assert counted == {name: count or counted[name] for name, count in predicted.items()}
    for name in (each for each in predicted if predicted[each] is None):
        size = float(name.rpartition("-")[2][:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert counted[name] == pytest.approx(size, rel=0.02)
