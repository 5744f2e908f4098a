"""Traces of transformers models, compared with the real models, with each other, and by hand."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from study.core.errors import Stop
from study.core.models import config as configs
from study.core.models.build import build
from study.core.recipes import RECIPES
from study.predict.architecture import named
from study.predict.engines import engine_of
from study.predict.prediction import estimate
from study.predict.step_time import work
from study.predict.trace import tracing
from study.predict.trace.options import TraceOptions
from study.predict.trace.tape import Pass, read
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Recomputation, Training
from tests.predict.families import SMALL, config_of, held_by
from tests.predict.trainings import placed, training_of

pytestmark = pytest.mark.usefixtures("without_traces")
SEQUENCE = 40


def training(name: str, rows: int = 3, **values) -> Training:
    model = Transformer.of(config_of(name), name)
    attention = "sdpa" if model.look.has_fused_attention else "eager"
    return training_of(model, micro_batch=rows, sequence=SEQUENCE, **{"attention": attention} | values)


def assert_as_real(monkeypatch, ours: Training) -> None:
    """Equal at the end of the forward pass except for scalars, and within a thousandth at the peak of both passes."""
    config = configs.of_dict(ours.model.dimensions, ours.attention)
    dtype = torch.bfloat16 if ours.recipe.weight_bytes == 2 else torch.float32
    model = build(config, "cpu", dtype)
    if ours.batch.recomputation is Recomputation.ALL:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kept, peak = held_by(monkeypatch, config, model, ours.batch.rows, SEQUENCE, dtype, ours.autocast)
    seen = ours.profile
    assert seen.kept == pytest.approx(kept, rel=0, abs=32)
    engine = engine_of(placed(ours, deepspeed=None))
    held = [sum(now.values()) for when, now in engine.instants(seen) if when == "backward"]
    assert max(held) == pytest.approx(peak, rel=0.001)
    assert peak > kept > 0


@pytest.mark.parametrize(("name", "rows", "precision", "attention", "checkpointing"), SMALL["passes"])
def test_a_pass_is_the_real_models(monkeypatch, name, rows, precision, attention, checkpointing):
    how = {"precision": precision, "attention": attention, "checkpointing": checkpointing}
    assert_as_real(monkeypatch, training(name, rows, **how))


def test_stage_3_keeps_no_copies_of_lower_precision(monkeypatch):
    """With DeepSpeed's own linear layer in the real model. Without it, autocast keeps a copy of every matrix."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    how = {"precision": "bf16", "checkpointing": True}
    stage_3 = training("llama", zero={"stage": 3}, **how)
    assert training("llama", **how).profile.kept > stage_3.profile.kept
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
    assert_as_real(monkeypatch, stage_3)


def fresh(model: Transformer, options: TraceOptions, rows: int) -> Pass:
    (tape,) = tracing.whole(model, options, (rows,))
    return read(tape, model.tensors)


def test_flash_attention_of_gemma_2_keeps_no_scores_and_what_is_taken_is_said():
    """By hand: a layer keeps softmax's fp32 output, its copy in the type of the weights and capped scores' tanh."""
    peaks = {}
    for kernel in ("eager", "sdpa", "flash2", "cudnn"):
        ours = Training(named("gemma2-micro"), RECIPES["fp32"], Batch(2, 1, 256), attention=kernel)
        peaks[kernel] = estimate(ours).peak_bytes
    scores_bytes = 4 * 2 * 8 * 256**2
    assert peaks["flash2"] + 4 * 2 * scores_bytes < peaks["sdpa"] == peaks["eager"] == peaks["cudnn"]
    assert "flash2 keeps none" in named("gemma2-micro").attention_note("sdpa")
    assert named("gemma2-micro").attention_note("flash2") == named("llama-micro").attention_note("flash2") == ""
    assert named("gpt-j-6b").attention_note("flash2").startswith("no flash2 is predicted for gptj")


def test_a_search_over_rows_needs_no_other_look():
    """Traces of two row counts give every number of rows: for seven rows, the same as a trace of seven."""
    ours = training("qwen3_moe", rows=7, precision="bf16_cast", checkpointing=True)
    assert ours.profile == fresh(ours.model, ours.trace_options, 7).profile


def test_what_is_frozen_has_no_gradients_and_no_states():
    whole = Transformer.of(config_of("llama"), "whole")
    adapted = dataclasses.replace(whole, lora_rank=4)
    part = dataclasses.replace(whole, train_only="norm|lm_head")
    # Each of the seven matrices of a layer: rank 4 times its rows and columns.
    trained = adapted.parameters - whole.parameters
    assert trained == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    values = {"ranks": 4, "precision": "bf16_cast", "micro_batch": 2, "sequence": SEQUENCE}
    full, lora, some = (estimate(training_of(model, "zero3", **values)) for model in (whole, adapted, part))
    assert lora.after_step["moments"] == pytest.approx(8 * trained / 4, rel=0.02)
    assert full.peak_bytes > some.peak_bytes > lora.peak_bytes


def test_selective_recomputation_keeps_attention_and_every_second_product():
    """Of 7 products of a layer, it keeps those of q, v, gate and down; and of the scores a number for each row."""
    none, selective, whole = (
        training("llama", device="cuda", precision="bf16_pure", checkpointing=each)
        for each in (Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.ALL)
    )
    products = [work(each, "backward").products.total() for each in (none, selective, whole)]
    again = [(each - products[0]) / 2 for each in products]  # of a layer
    assert again == [0, 3, 6], "the last product is not computed again, as no gradient needs it"
    kept = selective.profile.kept - whole.profile.kept
    assert kept == 2 * none.tokens * (2 * (64 + 32 + 160 + 64 + 64) + 4 * 4)


def test_a_config_that_makes_no_model_is_a_sentence():
    with pytest.raises(Stop, match="small cannot be built from its config"):
        estimate(training_of(Transformer.of(config_of("llama", hidden_size=-64), "small")))
    with pytest.raises(Stop, match="small cannot be followed without values") as stop:
        estimate(training_of(Transformer.of(config_of("llama", num_key_value_heads=3), "small"), sequence=8))
    assert stop.value.remedy.startswith("if it trains elsewhere, the predictor does not know models of type llama")
