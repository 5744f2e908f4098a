"""Models of predictions: built-in shapes, and models that are given by a few numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from study.core.settings import Flags, Settings, resolve
from study.core.shapes import NO_FUSED_ATTENTION, SHAPES, VOCABULARY
from study.predict.architecture import Wanted, asked_for, generic, named
from study.predict.trace.asked import TraceOptions
from study.predict.trace.transformer import traced
from study.training import models, tasks


def settings_and_model(name: str, sequence: int = 128) -> tuple[Settings, torch.nn.Module]:
    values = {"task": "imdb" if name.startswith("bert") else "wikitext", "sequence": sequence}
    values |= {"attention": "eager"} if SHAPES[name]["model_type"] in NO_FUSED_ATTENTION else {}
    settings = resolve(Flags(model=name, data="embedded", init="in_place", **values), False)
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
