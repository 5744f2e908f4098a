"""The built-in shapes have as many parameters as published, and are refused if they do not fit."""

import json
from pathlib import Path

import pytest

from study.core import shapes
from study.core.errors import Stop
from study.core.models.config import class_for, kind_of, load
from study.core.settings import Flags, Settings, resolve
from study.core.shapes import NO_FUSED_ATTENTION, SHAPES, model_of_name, shape_of
from study.predict.architecture import named
from study.training import models

PUBLISHED = {  # millions of parameters; BERT with a head for two labels, heads tied to embeddings counted once
    "bert-tiny": 4.386178,
    "bert-base": 109.48,
    "bert-large": 335.14,
    "gpt2": 124.44,
    "gpt2-medium": 354.82,
    "gpt2-large": 774.03,
    "gpt2-xl": 1557.61,
    "gpt-j-6b": 6050.88,
    "gemma2-9b": 9241.71,
    "gpt3-2.7b": 2651.55,  # by hand: 32 (12 h^2 + 13 h) + 52305 h + 2 h with h = 2560
    "gpt3-13b": 12853.39,  # by hand: 40 (12 h^2 + 13 h) + 52305 h + 2 h with h = 5120
    "gpt-neox-20b": 20554.57,
    "llama3-8b": 8030.26,
    "llama3-70b": 70553.71,
    "llama3.2-1b": 1235.81,
    "qwen2.5-7b": 7615.62,
    "qwen3-8b": 8190.74,
    "qwen3-32b": 32762.12,
    "mistral-7b": 7248.02,
    "gemma3-1b": 999.89,
    "phi3-mini": 3821.08,
    "olmo2-7b": 7298.62,
    "mixtral-8x7b": 46702.79,
    "qwen3-30b-a3b": 30532.12,
    "t5-large": 737.67,
    "modernbert-large": 395.83,
    "vit-large": 304.33,
    "whisper-large": 1543.49,
}

UNFUSED = [name for name, shape in SHAPES.items() if shape["model_type"] in NO_FUSED_ATTENTION]
FAMILIES = list({shape["model_type"]: name for name, shape in SHAPES.items()}.values())  # a shape of each


def task_of(model: str) -> str:
    kind = kind_of(load(model))
    return next((task for task, fits in models.KINDS.items() if fits == kind), "synthetic")


def settings_for(model: str, **more) -> Settings:
    return Flags(model=model, task=task_of(model), sequence=64, attention="eager", **more)


def config_of(settings: Settings, vocabulary: int = 2048):
    return models.model_config(settings, None if settings.task == "synthetic" else vocabulary)


def built(settings: Settings, vocabulary: int = 2048):
    return models.on_meta(settings, config_of(settings, vocabulary))


def parameters_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_published(model):
    on_meta = built(settings_for(model))
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}, "nothing is allocated to count"
    assert parameters_of(on_meta) / 1e6 == pytest.approx(PUBLISHED[model], abs=0.01)


def test_our_own_shape_takes_the_vocabulary_of_its_data():
    """By hand: embeddings, two blocks of 12 h^2 + 13 h, and the last norm."""
    h, vocabulary = 128, 50257
    by_hand = (vocabulary + 1024) * h + 2 * (12 * h**2 + 13 * h) + 2 * h
    assert parameters_of(built(settings_for("gpt-tiny"), vocabulary)) == by_hand


@pytest.mark.parametrize("model", FAMILIES)
def test_a_shape_is_built_with_its_default_attention(model):
    """Attention is fused if transformers' classes support it."""
    settings = resolve(Flags(model=model, task=task_of(model), sequence=64), gpu=False)
    assert class_for(config_of(settings))._supports_sdpa == (model not in UNFUSED)
    attention = built(settings).config._attn_implementation
    assert attention == "eager" if model in UNFUSED else "sdpa" in attention
    assert UNFUSED == ["gpt-j-6b", "gemma2-9b", "gemma2-micro"]


@pytest.mark.parametrize(
    ("settings", "vocabulary", "what"),
    [
        ({"model": "bert-tiny", "sequence": 513}, 2048, "--sequence 513 is more than the model's 512 positions"),
        ({"model": "gpt2", "task": "imdb"}, 2048, r"--model gpt2 \(gpt2\) does not fit task imdb"),
        ({"model": "bert-tiny"}, 50257, "the data uses 50257 token ids and --model bert-tiny knows 30522"),
        ({"model": "gemma2-9b", "attention": "sdpa"}, 2048, "no fused attention"),
    ],
)
def test_what_a_model_cannot_do_is_refused(settings, vocabulary, what):
    given = {"task": "imdb" if "bert" in settings["model"] else "wikitext", "sequence": 64, "attention": "eager"}
    with pytest.raises(Stop, match=what):
        config_of(Flags(**given | settings), vocabulary)


def test_a_local_folder_is_a_shape_of_its_own(tmp_path):
    """By its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["bert-tiny"] | {"num_hidden_layers": 1}))
    model = built(Flags(model=str(tmp_path), task="imdb", sequence=128, attention="eager"))
    one_layer = 4 * (128**2 + 128) + 2 * 128 * 512 + 512 + 128 + 4 * 128
    assert parameters_of(model) == 4_386_178 - one_layer


@pytest.mark.parametrize("model", ["bert-tiny", "gpt2", "gpt-neox-20b"])
def test_dropout_is_set_everywhere_in_the_model(model):
    modules = built(settings_for(model, dropout=0.3)).modules()
    assert {module.p for module in modules if type(module).__name__ == "Dropout"} == {0.3}


def test_the_shape_that_a_name_means():
    assert [shape_of(name) for name in ("path/to/gpt2/", "openai-community/gpt2", "gpt2")] == ["gpt2"] * 3
    assert [shape_of(name) for name in ("google-bert/bert-base-uncased/", "bert-base")] == ["bert-base"] * 2
    assert [shape_of(name) for name in ("gpt-tiny", "path/to/mine/", "")] == ["gpt-tiny", "path/to/mine/", ""]


def test_the_model_that_a_name_means():
    meant = {
        "Qwen 3 8B": "qwen3-8b",
        "Llama3_8B": "llama3-8b",
        "Meta-Llama-3-70B-Instruct": "llama3-70b",
        "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
        "mistral-7b-instruct-v0.2": "mistral-7b-v0.2",
        "google-bert/bert-base-uncased": "bert-base",
        "Qwen 3 80B": None,
        "": None,
    }
    assert {name: model_of_name(name) for name in meant} == meant


def test_models_that_are_only_predicted_have_as_many_parameters_as_published():
    published = json.loads(Path(shapes.__file__).with_name("models.json").read_text())
    assert not set(published) & set(SHAPES)
    counted = {name: named(name).parameters for name in published}
    assert {name: count for name, count in counted.items() if published[name]["parameters"] not in (count, None)} == {}
    for name in (each for each in published if published[each]["parameters"] is None):
        size = float(name.rpartition("-")[2][:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert counted[name] == pytest.approx(size, rel=0.02)
