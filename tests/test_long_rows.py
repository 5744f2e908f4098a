"""What keeps passes over long rows small, compared with DeepSpeed's own tiles and PyTorch's own copies to the host."""

import math
from dataclasses import replace

import pytest
import torch
from families import config_of
from test_tracing import measured
from transformers.models.llama.modeling_llama import LlamaMLP

from study.cli.combinations import LONG, answers
from study.errors import Stop
from study.io.numbers import size
from study.predictor.estimate import estimate, moments, profile
from study.predictor.memory.engine import Engine
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

pytestmark = pytest.mark.usefixtures("without_traces")
TOKENS = 200  # of a row: four tiles of 64
ROWS = 2
PLAIN_FORWARD = LlamaMLP.forward


def setup(**values) -> Setup:
    """A training whose feed-forward layers are its largest part."""
    config = config_of("llama", vocab_size=64, intermediate_size=640, max_position_embeddings=TOKENS)
    model = Transformer.of(config, "llama")
    return Setup(model=model, micro_batch=ROWS, sequence=TOKENS, precision="bf16_cast", **values)


def backward_peak(trained: Setup) -> float:
    held = [sum(now.values()) for when, now in moments(Engine(trained), profile(trained)) if when == "backward"]
    return max(held)


def in_deepspeeds_tiles(layer: LlamaMLP, rows: torch.Tensor) -> torch.Tensor:
    """As DeepSpeed's documentation shows it."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    weights = [layer.down_proj.weight, layer.gate_proj.weight, layer.up_proj.weight]
    return TiledMLP.apply(PLAIN_FORWARD, layer, rows, math.ceil(rows.shape[-2] / rows.shape[-1]), weights)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_are_deepspeeds(monkeypatch, checkpointing):
    plain = setup(checkpointing=checkpointing)
    tiled = setup(checkpointing=checkpointing, tiled_mlp=True)
    monkeypatch.setattr(LlamaMLP, "forward", in_deepspeeds_tiles)
    kept, peak = measured(monkeypatch, tiled)
    monkeypatch.setattr(LlamaMLP, "forward", PLAIN_FORWARD)
    assert profile(tiled).kept == pytest.approx(kept, rel=0, abs=32)
    assert backward_peak(tiled) == pytest.approx(peak, rel=0.001)
    assert backward_peak(tiled) < backward_peak(plain)


def test_checkpoints_on_the_host_are_the_inputs_of_the_layers():
    plain = setup(checkpointing=True, device="cuda")
    on_host = replace(plain, host_checkpoints=True)
    layers = plain.model.dimensions["num_hidden_layers"]
    inputs = layers * ROWS * TOKENS * plain.model.dimensions["hidden_size"] * 2
    assert profile(plain).kept - profile(on_host).kept == inputs
    assert estimate(on_host).host_bytes - estimate(plain).host_bytes == inputs
    assert backward_peak(on_host) < backward_peak(plain)


def test_there_are_no_checkpoints_without_recomputation():
    with pytest.raises(Stop, match="without recomputation there are no checkpoints"):
        profile(setup(host_checkpoints=True, device="cuda"))


def test_long_rows_are_told_what_keeps_them_small():
    config = config_of("llama", vocab_size=64, hidden_size=512, intermediate_size=2048, max_position_embeddings=LONG)
    model = Transformer.of(config, "llama")
    long = Setup(model=model, micro_batch=1, sequence=LONG, precision="bf16_cast", device="cuda")
    (answer,) = answers(long)
    assert answer.id == "long_rows"
    assert f"instead of {size(estimate(long).peak_bytes)}" in answer.sentence
    small = replace(long, loss="chunked", checkpointing=True, tiled_mlp=True, host_checkpoints=True)
    assert f"it needs {size(estimate(small).peak_bytes)} at the peak" in answer.sentence
    assert estimate(small).peak_bytes < estimate(long).peak_bytes / 2
    assert answers(small) == []
