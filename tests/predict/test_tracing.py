"""Traces of transformers models, compared with the real models, with each other, and by hand."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT
from families import config_of

from study.core.errors import Stop
from study.core.models import config as configs
from study.core.models.build import build
from study.core.models.step import inputs, logits_and_losses
from study.core.settings import CACHE
from study.measure.memory import MemoryWatch
from study.predict.architecture import named
from study.predict.estimate import estimate, moments, profile
from study.predict.memory.engine import Engine
from study.predict.setup import Setup
from study.predict.step_time import work
from study.predict.trace import kernels, tracing
from study.predict.trace.repeating import repeat
from study.predict.trace.tape import read
from study.predict.trace.transformer import SELECTIVE, TraceOptions, Transformer
from study.predict.trace.watch import PRODUCTS, Watch

pytestmark = pytest.mark.usefixtures("without_traces")
SEQUENCE = 40


def setup_of(name: str, rows: int = 3, **values) -> Setup:
    model = Transformer.of(config_of(name), name)
    attention = "sdpa" if model.has_fused_attention else "eager"
    return Setup(model=model, micro_batch=rows, sequence=SEQUENCE, **{"attention": attention} | values)


def measured(monkeypatch, setup: Setup) -> tuple[int, int]:
    """Bytes that the real model holds on a CPU: at the end of a forward pass, and at most until the backward ends."""
    config = configs.of_dict(json.loads(setup.model.config), setup.attention)
    dtype = torch.bfloat16 if setup.precision == "bf16_cast" else torch.float32
    model = build(config, "cpu", dtype)
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for place, layer in enumerate(model.model.layers if setup.checkpointing > 1 else ()):
        layer.gradient_checkpointing = place % setup.checkpointing == 0
    batch = inputs(config, setup.micro_batch, setup.sequence)
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    monkeypatch.setattr("study.measure.memory.gc", types.SimpleNamespace(collect=int, get_objects=lambda: tensors))
    cast = torch.autocast("cpu", torch.bfloat16) if setup.autocast else contextlib.nullcontext()
    with MemoryWatch("cpu", dict) as watch:
        before = watch.total
        with cast:
            loss = logits_and_losses(config, model, batch, dtype)[1].mean()
        kept = watch.total - before
        loss.backward()
    return kept, watch.peak - before


SLOW = pytest.mark.slow
REAL = [
    ("bert", 3, "bf16", "eager", True),
    ("gpt2", 1, "fp32", "sdpa", False),
    ("gpt_neox", 2, "bf16", "sdpa", True),
    ("llama", 1, "bf16_cast", "eager", True),
    ("llama", 3, "bf16", "sdpa", 2),
    ("gemma3_text", 3, "bf16_cast", "sdpa", False),
    ("whisper", 2, "fp32", "sdpa", False),
    ("modernbert", 3, "bf16", "sdpa", False),
    ("vit", 1, "fp32", "eager", False),
    ("bloom", 2, "bf16_cast", "eager", False),
    ("deberta-v2", 3, "fp32", "eager", False),
    ("resnet", 2, "fp32", "eager", False),
    pytest.param("gemma2", 3, "fp32", "eager", False, marks=SLOW),
    pytest.param("mixtral", 2, "bf16_cast", "sdpa", True, marks=SLOW),
    pytest.param("qwen3_moe", 3, "fp32", "sdpa", False, marks=SLOW),
    pytest.param("t5", 3, "bf16", "sdpa", True, marks=SLOW),
]


def assert_held(setup: Setup, kept: int, peak: int) -> None:
    """Equal at the end of the forward pass except for scalars, and within a thousandth at the peak of both passes."""
    seen = profile(setup)
    assert seen.kept == pytest.approx(kept, rel=0, abs=32)
    engine = Engine(dataclasses.replace(setup, deepspeed=None))
    held = [sum(now.values()) for when, now in moments(engine, seen) if when == "backward"]
    assert max(held) == pytest.approx(peak, rel=0.001)
    assert peak > kept > 0


@pytest.mark.parametrize(("name", "rows", "precision", "attention", "checkpointing"), REAL)
def test_a_pass_is_the_real_models(monkeypatch, name, rows, precision, attention, checkpointing):
    setup = setup_of(name, rows, precision=precision, attention=attention, checkpointing=checkpointing)
    assert_held(setup, *measured(monkeypatch, setup))


def test_stage_3_keeps_no_copies_of_lower_precision(monkeypatch):
    """With DeepSpeed's own linear layer in the real model. Without it, autocast keeps a copy of every matrix."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    setup = setup_of("llama", precision="bf16", checkpointing=True)
    stage_3 = dataclasses.replace(setup, deepspeed={"zero_optimization": {"stage": 3}})
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
        assert_held(stage_3, *measured(patch, stage_3))
    assert profile(setup).kept > profile(stage_3).kept


@pytest.mark.parametrize(("name", "checkpointing"), [("llama", True), ("qwen3_moe", False)])
def test_a_search_over_rows_needs_no_other_look(name, checkpointing):
    """Traces of two row counts give every number of rows: for seven rows, the same as a trace of seven."""
    setup = setup_of(name, rows=7, precision="bf16_cast", checkpointing=checkpointing)
    followed = tracing.followed(setup.model, setup.trace_options, (7,))
    direct = read(repeat(*followed.tapes, followed.stacks), setup.model.tensors)
    assert profile(setup) == direct.profile


def looks(monkeypatch, model: Transformer, options: TraceOptions) -> tuple[list[tuple], list[list[int]]]:
    """A trace of some layers and one of all layers, with the number of layers that each followed."""
    seen, counts, follow = [], [], Watch.follow

    def counted(watch, built) -> None:
        counts[-1].append(sum(len(each) for each in built.modules() if isinstance(each, torch.nn.ModuleList)))
        follow(watch, built)

    monkeypatch.setattr(Watch, "follow", counted)
    for with_all_layers in (False, True):
        counts.append([])
        tapes, stacks = tracing.followed(model, options, (2,), with_all_layers)
        whole = repeat(tapes[0], stacks)
        seen.append((read(whole, model.tensors), whole))
    return seen, counts


@pytest.mark.parametrize(
    ("name", "changes", "precision", "checkpointing", "which"),
    [
        ("llama", {"num_hidden_layers": 6}, "bf16", True, {}),
        ("llama", {"num_hidden_layers": 17}, "bf16", 2, {}),
        ("gpt2", {"n_layer": 20}, "bf16_cast", 3, {}),
        ("vit", {"num_hidden_layers": 6}, "bf16", False, {"lora_rank": 2}),
        ("qwen3_moe", {"num_hidden_layers": 8, "mlp_only_layers": [0]}, "fp32", False, {"train_only": "layers.[1-7]"}),
        *(
            pytest.param(name, layers, "bf16", checkpointing, {}, marks=SLOW)
            for checkpointing in (False, True)
            for name, layers in [
                ("t5", {"num_layers": 8}),
                ("whisper", {"encoder_layers": 7, "decoder_layers": 6}),
                ("gemma3_text", {"num_hidden_layers": 26}),
                ("modernbert", {"num_hidden_layers": 22}),
                ("qwen2_moe", {"num_hidden_layers": 7}),
            ]
        ),
    ],
)
def test_some_layers_stand_for_all(monkeypatch, name, changes, precision, checkpointing, which):
    """The same as with all layers, byte for byte and in the same order."""
    model = Transformer.of(config_of(name, **changes), name, **which)
    attention = "sdpa" if model.has_fused_attention else "eager"
    options = TraceOptions(SEQUENCE, precision, attention, checkpointing, "whole", False, True)
    (some, every), (few, all_layers) = looks(monkeypatch, model, options)
    assert len(few) == 1
    assert few < all_layers
    assert some == every


def unlike_in_their_constants(model) -> None:
    for place, layer in enumerate(model.model.layers):
        layer.mlp.extra = place


def unlike_in_the_pass(model) -> None:
    model.model.layers[-3].register_forward_hook(lambda _, __, out: out * 2.0)


@pytest.mark.parametrize(("plant", "followed"), [(unlike_in_their_constants, [6]), (unlike_in_the_pass, [5, 6])])
def test_layers_that_do_not_stand_for_others_are_all_followed(monkeypatch, plant, followed):
    model = Transformer.of(config_of("llama", num_hidden_layers=6), "planted")
    options = TraceOptions(SEQUENCE, "fp32", "sdpa", False, "whole", False, True)
    unplanted = tracing._built

    def built(*arguments):
        planted = unplanted(*arguments)
        plant(planted)
        return planted

    assert model.tensors
    monkeypatch.setattr(tracing, "_built", built)
    (some, every), counts = looks(monkeypatch, model, options)
    assert counts == [followed, [6]]
    assert some == every


FUNCTIONS = {
    "attention": [torch.nn.functional.scaled_dot_product_attention],
    "dropout": [torch.nn.functional.dropout, torch.dropout],
}


def fresh(model: Transformer, options: TraceOptions, rows: int):
    tapes, stacks = tracing.followed(model, options, (rows,))
    return read(repeat(tapes[0], stacks), model.tensors)


def test_what_differs_on_a_gpu_by_hand(monkeypatch):
    """Attention without kept scores, masks of one byte, and a gelu whose cube autocast computes in fp32."""
    rows, model = 3, Transformer.of(config_of("gpt2"), "gpt2")
    layers, heads, width, inner = (model.dimensions[name] for name in ("n_layer", "n_head", "n_embd", "n_inner"))
    tokens = rows * SEQUENCE

    def kept(*cuda: str) -> int:
        """Bytes that are kept if only some operations are as on a GPU."""
        with monkeypatch.context() as patch:
            if "autocast" not in cuda:
                patch.setattr(kernels, "IN_FP32", ())
            for name in {"attention", "dropout"} - {*cuda}:
                for function in FUNCTIONS[name]:
                    patch.delitem(kernels.REPLACED, function)
            return fresh(model, TraceOptions(SEQUENCE, "bf16", "sdpa", False, "whole", False, True), rows).profile.kept

    scores = 4 * rows * heads * SEQUENCE**2
    on_cpu = 3 * 4 * tokens * width + 2 * tokens * width + 3 * scores  # all in fp32, except what attention returns
    on_gpu = 4 * 2 * tokens * width + 4 * tokens * heads
    assert kept() - kept("attention") == layers * (on_cpu - on_gpu)
    after_a_layer, after_the_embeddings = 2 * layers * tokens * width, tokens * width
    assert kept("attention") - kept("attention", "dropout") == (2 - 1) * after_a_layer + (4 - 1) * after_the_embeddings
    assert kept("attention", "autocast") - kept("attention") == (16 - 10) * layers * tokens * inner
    assert kept() == profile(Setup(model=model, precision="bf16", micro_batch=rows, sequence=SEQUENCE)).kept


def test_the_backward_pass_of_cudas_softmax_makes_a_product_of_the_scores_size(monkeypatch):
    """It is at the peak, where attention is written out, rows are long, and layers are computed again."""
    rows, sequence, model = 3, 512, Transformer.of(config_of("llama"), "llama")

    def most() -> float:
        options = TraceOptions(sequence, "fp32", "eager", True, "whole", False, True)
        return max(sum(each.most) for each in fresh(model, options, rows).profile.gradients)

    with_product = most()
    monkeypatch.setattr(kernels, "_softmax", torch.nn.functional.softmax)
    scores = rows * model.dimensions["num_attention_heads"] * sequence**2
    assert with_product - most() == 4 * scores


def test_heads_that_share_keys_take_the_operations_of_heads_with_their_own():
    """PyTorch's own formulas refuse such heads before 2.12."""
    query = torch.empty(2, 8, 5, 16, device="meta")
    keys, values = (torch.empty(2, 2, 7, width, device="meta") for width in (16, 24))
    pairs = 2 * 8 * 5 * 7  # rows, heads, queries, keys
    assert PRODUCTS[torch.ops.study.fused_attention](query, keys, values) == 2 * pairs * (16 + 24)
    back = PRODUCTS[torch.ops.study.fused_attention_backward](values, query, keys, values)
    assert back == 2 * pairs * (3 * 16 + 2 * 24), "the scores again, and two products each for both gradients"


def test_what_is_frozen_has_no_gradients_and_no_states():
    whole = Transformer.of(config_of("llama"), "whole")
    adapted = dataclasses.replace(whole, lora_rank=4)
    part = dataclasses.replace(whole, train_only="norm|lm_head")
    trains = sum(tensor.elements for tensor in adapted.tensors if tensor.trains)
    # Each of the seven matrices of a layer: rank 4 times its rows and columns.
    assert trains == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    for arm, parts in (("single", 1), ("zero2", 4), ("zero3", 4)):
        full, lora, some = (
            estimate(Setup.of_arm(model, arm, ranks=4, precision="bf16_cast", micro_batch=2, sequence=SEQUENCE))
            for model in (whole, adapted, part)
        )
        assert lora.after_step["moments"] == pytest.approx(8 * trains / parts, rel=0.02), arm
        assert full.peak_bytes > some.peak_bytes > lora.peak_bytes, arm


def test_selective_recomputation_keeps_attention_and_every_second_product():
    """Of 7 products of a layer, it keeps those of q, v, gate and down; and of the scores a number for each row."""
    none, selective, whole = (
        setup_of("llama", device="cuda", precision="bf16_pure", checkpointing=each) for each in (0, SELECTIVE, True)
    )
    products = [work(each)["backward"].products.total() for each in (none, selective, whole)]
    again = [(each - products[0]) / 2 for each in products]  # of a layer
    assert again == [0, 3, 6], "the last product is not computed again, as no gradient needs it"
    kept = profile(selective).kept - profile(whole).kept
    layers, tokens = 2, none.tokens
    assert kept == layers * tokens * (2 * (64 + 32 + 160 + 64 + 64) + 4 * 4)


def test_a_fused_loss_holds_no_logits():
    whole, chunked = (setup_of("llama", rows=8, precision="bf16_cast", loss=loss) for loss in ("whole", "chunked"))
    logits = 4 * 8 * SEQUENCE * 512
    assert profile(whole).kept - profile(chunked).kept > 0.5 * logits
    with pytest.raises(Stop, match="cannot be computed in chunks"):
        profile(setup_of("t5", loss="chunked"))


def test_a_second_question_needs_no_torch(tmp_path, monkeypatch):
    """The first trace is kept, but only for this version of transformers."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    words = [sys.executable, "-c", CODE, str(tmp_path)]
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    monkeypatch.setenv(CACHE, str(tmp_path / "zero-study"))
    first = estimate(Setup.of_arm(named(str(tmp_path)), "zero3", ranks=8, sequence=32)).peak_bytes
    second = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 0, second.stderr
    assert second.stdout.split() == ["False", str(first)]


CODE = """
import sys
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.setup import Setup
peak = estimate(Setup.of_arm(named(sys.argv[1]), "zero3", ranks=8, sequence=32)).peak_bytes
print("torch" in sys.modules, peak)
"""


def test_a_config_that_makes_no_model_is_a_sentence():
    with pytest.raises(Stop, match="small cannot be built from its config"):
        estimate(Setup(model=Transformer.of(config_of("llama", hidden_size=-64), "small")))
    with pytest.raises(Stop, match="small cannot be followed without values"):
        profile(Setup(model=Transformer.of(config_of("llama", num_key_value_heads=3), "small"), sequence=8))
