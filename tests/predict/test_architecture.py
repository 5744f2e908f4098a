"""Models of predictions: built-in shapes, and models that are given by a few numbers."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode

from study.core.errors import Stop
from study.core.settings import Settings, TrainerFlags, resolve
from study.core.shapes import NO_FUSED_ATTENTION, SHAPES, VOCABULARY
from study.predict.architecture import Wanted, asked_for, check_config, generic, named
from study.predict.trace.options import TraceOptions
from study.predict.trace.transformer import traced
from study.training import models, tasks


def settings_and_model(name: str, sequence: int = 128) -> tuple[Settings, torch.nn.Module]:
    values = {"task": "imdb" if name.startswith("bert") else "wikitext", "sequence": sequence}
    values |= {"attention": "eager"} if SHAPES[name]["model_type"] in NO_FUSED_ATTENTION else {}
    settings = resolve(TrainerFlags(model=name, data="embedded", init="in_place", **values), False)
    return settings, models.on_meta(settings, models.model_config(settings, VOCABULARY))


@pytest.mark.parametrize("name", ["bert-large", "gpt-tiny", "gemma2-9b", "gpt-neox-20b"])
def test_tensors_are_the_models_own(name):
    """Names, shapes and their order are the same, and tied heads count once."""
    _, built = settings_and_model(name)
    theirs = [(key, tuple(value.shape)) for key, value in built.named_parameters()]
    assert [(tensor.name, tensor.shape) for tensor in named(name).tensors] == theirs


@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", "gemma2-micro"])
def test_operations_are_what_pytorch_counts(name):
    settings, built = settings_and_model(name, sequence=60)
    ids = torch.zeros(1, 60, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids[0, :1]}
    with FlopCounterMode(display=False) as counter:
        tasks.row_losses(settings, built, batch)[0].mean().backward()
    attention = "eager" if name == "gemma2-micro" else "sdpa"
    seen = traced(named(name), TraceOptions(60, "fp32", attention, cuda=True), 1)
    scores = seen.backward.attention_flops / 5  # fused attention makes them again, which PyTorch does not count
    assert seen.flops - scores == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_generic_model_of_gpt2s_numbers_is_gpt2():
    theirs = named("gpt2-xl")
    ours = asked_for(Wanted(params=theirs.parameters, layers=48, hidden=1600), 2048)
    assert ours.tensors == theirs.tensors, "its positions are ours, and refuse no sequence"


def test_the_least_parameters_of_a_generic_model_have_one_inner_unit():
    least = 51283 * 64 + 2 * (4 * 64**2 + 9 * 64 + 2 * 64 + 1)
    assert generic(least, 2, 64).dimensions["n_inner"] == 1
    assert generic(2 * 51283 * 192, 2, 192).dimensions["n_head"] == 3, "each of 64"
    assert generic(2 * 51283 * 32, 2, 32).dimensions["n_head"] == 1


# --- configs of strangers -------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, **changes) -> str:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", -4),
        ("sliding_window", -1),
        ("vocab_size", 0),
        ("intermediate_size", -0.5),
        ("hidden_sizes", [64, -64]),
        ("num_local_experts", -1),
        ("n_inner", -1),
        ("rope_theta", -1),
    ],
)
def test_a_number_that_no_model_has_is_refused(tmp_path, name, number):
    for changes in ({name: number}, {"text_config": {name: number}}):
        with pytest.raises(Stop, match=rf"config.json says {name} = .*, which must be a number of at least [01]"):
            named(folder_of(tmp_path, **changes))


@pytest.mark.parametrize("share", [-1.0, 1.5])
def test_a_probability_is_from_0_to_1(tmp_path, share):
    with pytest.raises(Stop, match=f"says attention_dropout = {share}, and a probability is from 0 to 1"):
        named(folder_of(tmp_path, attention_dropout=share))


def test_defaults_of_transformers_are_no_mistakes():
    """Such as 0 layers that predict a further token, or a window of 0."""
    seen = 0
    for kind in transformers.CONFIG_MAPPING:
        with contextlib.suppress(ImportError, TypeError, ValueError, StrictDataclassError):  # some need values
            check_config(json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False)), kind)
            seen += 1
    assert seen > 300


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, "no method said"),
        ({"text_config": {"compression_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
    ],
)
def test_weights_in_few_bits_are_not_taken_for_whole_ones(tmp_path, said, method):
    with pytest.raises(Stop, match=rf"_config \({method}\), and weights in few bits do not train"):
        named(folder_of(tmp_path, **said))
