"""Tensors, operations and activations, against the models themselves."""

import contextlib
import functools
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import NewGELUActivation

from study.errors import Stop
from study.measure.memory import MemoryWatch
from study.predictor import architecture
from study.predictor.estimate import moments
from study.predictor.memory.activations import activations, profile
from study.predictor.memory.engine import Engine
from study.predictor.setup import Setup
from study.predictor.wanted import Wanted, asked_for, count_of
from study.spec.settings import Flags, Settings, resolve
from study.spec.shapes import SHAPES
from study.training import models, tasks

VOCABULARY = 2048
GPT = {"vocab_size": 1009, "n_positions": 64, "n_embd": 96, "n_layer": 2, "n_head": 3, "n_inner": 352}
NEW = {"vocab_size": 1009, "max_position_embeddings": 64, "hidden_size": 96, "intermediate_size": 352}
NEW |= {"num_hidden_layers": 2, "num_attention_heads": 3}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "query_pre_attn_scalar": 20}
SMALL = {
    "bert": NEW | {"model_type": "bert"},
    "gpt2": GPT | {"model_type": "gpt2"},
    "gptj": GPT | {"model_type": "gptj", "rotary_dim": 16, "tie_word_embeddings": False},
    "gpt_neox": NEW | {"model_type": "gpt_neox", "rotary_pct": 0.25},
    "gemma2": NEW | GROUPED | {"model_type": "gemma2", "sliding_window": 64},
}


def settings_for(name: str, **values) -> Settings:
    task = "imdb" if name.startswith("bert") else "wikitext"
    if name in ("gptj", "gemma2"):
        values |= {"attention": "eager"}
    return resolve(Flags(task=task, model=name, data="embedded", init="in_place", **values), False)


def meta(settings: Settings):
    return models.on_meta(settings, models.model_config(settings, VOCABULARY))


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name]["model_type"] in architecture.FAMILIES])
def test_tensors_are_the_models_own(name):
    """Names, shapes and their order are the same, and tied heads count once."""
    theirs = [(key, tuple(value.shape)) for key, value in meta(settings_for(name)).named_parameters()]
    model = architecture.describe(name, VOCABULARY)
    assert [(tensor.name, tensor.shape) for tensor in architecture.tensors(model)] == theirs
    assert architecture.parameters(model) > 0.7e6


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "gpt-j-6b", "gemma2-9b", "gpt-neox-20b"])
def test_a_whole_config_says_the_same_as_the_shape(name):
    """Configs as transformers writes them, with its own names and all defaults, including dropout."""
    config = models.model_config(settings_for(name), VOCABULARY).to_dict()
    ours = architecture.describe(name)
    assert architecture.describe(config) == ours
    theirs = {value for key, value in config.items() if key in architecture.DROPOUT[ours.family]}
    assert {ours.attention_dropout, ours.hidden_dropout, ours.embedding_dropout} == theirs
    off = architecture.describe(name, dropout=0.0)
    assert off.attention_dropout == off.hidden_dropout == off.embedding_dropout == 0


@pytest.mark.parametrize(("parameters", "layers", "hidden"), [(1.5e9, 48, 1600), (7.5e9, 72, 3072), (8.3e9, 72, 3072)])
def test_a_generic_model_has_the_parameters_asked_for(parameters, layers, hidden):
    model = architecture.generic(parameters, layers, hidden)
    assert architecture.parameters(model) == pytest.approx(parameters, rel=0.001)
    assert (model.layers, model.hidden) == (layers, hidden)


def test_a_generic_model_of_gpt2s_numbers_is_gpt2():
    theirs = architecture.describe("gpt2-xl")
    wanted = Wanted(params=architecture.parameters(theirs), layers=48, hidden=1600, heads=25)
    assert asked_for(wanted, 2048) == theirs, "its positions are ours, and refuse no sequence"


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7e9), ("350m", 350e6), ("1.5 T", 1.5e12), ("12K", 12e3), (7e9, 7e9)]
)
def test_parameters_as_people_write_them(text, count):
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["7X", "B", "-7B", "7BB", "many", "", "7 9"])
def test_what_is_no_number_of_parameters(text):
    with pytest.raises(Stop, match="is not a number of parameters"):
        count_of(text)


def test_a_shape_without_a_vocabulary_needs_one():
    with pytest.raises(Stop, match="the config gives None for vocabulary"):
        architecture.describe("gpt-tiny")


@pytest.mark.parametrize("sequence", [16, 60])
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", *SMALL])
def test_operations_are_what_pytorch_counts(monkeypatch, name, sequence):
    if name in SMALL:
        monkeypatch.setitem(SHAPES, name, SMALL[name] | {"vocab_size": VOCABULARY})
    settings = settings_for(name, sequence=sequence)
    ids = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids[0, :1]}
    model = meta(settings)
    with FlopCounterMode(display=False) as counter:
        tasks.row_losses(settings, model, batch)[0].mean().backward()
    ours = architecture.flops_per_row(architecture.describe(name, VOCABULARY), sequence)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


FUSED = ("bert", "gpt2", "gpt_neox")
CASES = [
    (family, precision, attention, checkpointing, dropout)
    for family in SMALL
    for precision in ("fp32", "bf16", "bf16_cast")
    for attention in (("sdpa", "eager") if family in FUSED else ("eager",))
    for checkpointing, dropout in ((False, 0.1), (False, 0.0), (True, None))
    if (dropout != 0.0 or precision == "fp32") and not (checkpointing and attention == "eager" and family in FUSED)
]


def measured(monkeypatch, shape: dict, rows: int, sequence: int, precision, attention, checkpointing, dropout):
    """Bytes that the real model holds on a CPU: at the end of a forward pass, and at most until the backward ends."""
    monkeypatch.setitem(SHAPES, "small", shape)
    task = "imdb" if shape["model_type"] == "bert" else "wikitext"
    values = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "dropout": dropout}
    settings = Flags(task=task, model="small", data="embedded", init="in_place", sequence=sequence, **values)
    settings = resolve(settings, False)
    model = models.build_model(settings, models.model_config(settings, 100), torch.device("cpu"))
    ids = torch.randint(0, 100, (rows, sequence))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.ones(rows, dtype=torch.long)}
    cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]  # looking through all objects takes a second
    monkeypatch.setattr("study.measure.memory.gc", types.SimpleNamespace(collect=int, get_objects=lambda: tensors))
    watch = MemoryWatch("cpu", dict)
    with watch:
        before = watch.total
        with cast:
            loss = tasks.row_losses(settings, model, batch)[0].mean()
        kept = watch.total - before
        watch.peak = 0
        loss.backward()
    return kept, watch.peak - before


def test_on_a_gpu_autocast_keeps_more_of_a_gelu_that_is_written_out():
    """CUDA's autocast takes powers in fp32, a CPU's does not. Done by hand here: an fp32 copy, two fp32 results, and
    half the input in bf16; the product after it takes another bf16 copy."""

    class CubeInFp32(TorchFunctionMode):
        def __torch_function__(self, function, _, args=(), kwargs=None):
            if function in (torch.pow, torch.Tensor.pow):
                args = (args[0].float(), *args[1:])
            return function(*args, **(kwargs or {}))

    saved = {}
    x = torch.randn(4, 1000, dtype=torch.bfloat16, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(id(t), t), lambda t: t), CubeInFp32():
        NewGELUActivation()(x)
    assert sum(tensor.numel() * tensor.element_size() for tensor in saved.values()) + 2 * x.numel() == 16 * x.numel()
    model = architecture.named("gpt-j-6b")  # which drops nothing: masks are smaller on a GPU
    of = functools.partial(Setup, model=model, micro_batch=1)
    gpu, cpu = (activations(of(device=device, precision="bf16")).layer for device in ("cuda", "cpu"))
    assert gpu - cpu == (16 - 10) * 128 * model.inner
    assert activations(of(device="cuda")).layer == activations(of()).layer


QUICK = {  # of each family and of each other value, together with the fp32 ones
    ("fp32", False, 0.1), ("fp32", True, None), ("bf16", False, 0.1), ("bf16_cast", True, None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "precision", "attention", "checkpointing", "dropout"),
    [pytest.param(*case, marks=() if (case[1], *case[3:]) in QUICK else pytest.mark.slow) for case in CASES],
)
def test_activations_are_what_the_model_keeps(monkeypatch, family, precision, attention, checkpointing, dropout):
    """Within 2 % of the real model's bytes at the end of the forward pass, and within 12 % at the backward's peak."""
    shape, rows, sequence = SMALL[family], 3, 40
    kept, peak = measured(monkeypatch, shape, rows, sequence, precision, attention, checkpointing, dropout)
    model = architecture.describe(shape, dropout=dropout)
    values = {"precision": precision, "attention": attention, "checkpointing": checkpointing}
    setup = Setup(model=model, micro_batch=rows, sequence=sequence, **values)
    ours = activations(setup)
    assert ours.kept == pytest.approx(kept, rel=0.02)
    held = [sum(now.values()) for _, now in moments(Engine(setup), profile(setup))]
    assert max(held[:-1]) == pytest.approx(peak, rel=0.12), "the last moment is the update"


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize(("rows", "sequence", "layers", "width"), [(1, 64, 1, 96), (2, 24, 2, 192)])
def test_activations_grow_as_the_models_do(monkeypatch, family, rows, sequence, layers, width):
    sizes = {"layers": layers, "hidden": width}
    names = {name: size for key, size in sizes.items() for name in architecture.NAMES[key] if name in SMALL[family]}
    shape = SMALL[family] | names
    attention = "sdpa" if family in FUSED else "eager"
    kept, _ = measured(monkeypatch, shape, rows, sequence, "fp32", attention, False, None)
    setup = Setup(model=architecture.describe(shape), micro_batch=rows, sequence=sequence, attention=attention)
    assert activations(setup).kept == pytest.approx(kept, rel=0.02)
