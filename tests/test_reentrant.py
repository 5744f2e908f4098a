"""Frozen units of FSDP1 inside reentrant checkpointing keep inputs and their gradients: PyTorch's FSDP, and theory."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from families import config_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from study.measure.memory import MemoryWatch
from study.predictor.estimate import profile
from study.predictor.library import Library
from study.predictor.outside import described, published
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

LAYERS, ROWS, SEQUENCE, WIDTH = 6, 4, 64, 32
INPUT_BYTES = ROWS * SEQUENCE * WIDTH * 4


class Layer(nn.Module):
    """A frozen product with an adapter. It can compute itself again, as layers do since transformers 4.52."""

    def __init__(self, again_inside: bool):
        super().__init__()
        self.again_inside = again_inside
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def product(self, hidden):
        return self.base(hidden) + self.adapter(hidden)

    def forward(self, hidden):
        return checkpoint(self.product, hidden, use_reentrant=True) if self.again_inside else self.product(hidden)


def wraps(module, recurse, nonwrapped_numel) -> bool:
    """Layers are units, and each adapter, as by PEFT's policy."""
    trains = [each.requires_grad for each in module.parameters(recurse=False)]
    return recurse or isinstance(module, Layer) or any(trains)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    gc.disable()  # else the collector releases some of them, at a moment that depends on what ran before
    yield
    gc.enable()
    dist.destroy_process_group()


class Stack(nn.Module):
    def __init__(self, inside: bool, reentrant: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer(inside) for _ in range(LAYERS))
        self.inside, self.reentrant = inside, reentrant

    def forward(self, hidden):
        for each in self.layers:
            hidden = each(hidden) if self.inside else checkpoint(each, hidden, use_reentrant=self.reentrant)
        return hidden


def measured_peak(sharded: bool, inside: bool, reentrant: bool) -> int:
    model = Stack(inside, reentrant)
    if sharded:
        how = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=wraps, **how)
    for _ in range(2):  # the first pass prepares the units
        hidden = torch.randn(ROWS * SEQUENCE, WIDTH, requires_grad=True)
        with MemoryWatch("cpu", dict, collect=False) as watch:
            before = watch.total
            model(hidden).mean().backward()
    return watch.peak - before


@pytest.mark.parametrize(
    ("inside", "reentrant", "kept"),
    [(False, True, LAYERS - 2), (False, False, 0), (True, True, 0)],
    ids=["around units", "not reentrant", "inside layers"],
)
def test_inputs_of_frozen_units_are_kept_until_the_pass_ends(one_rank, inside, reentrant, kept):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = [measured_peak(sharded, inside, reentrant) for sharded in (True, False)]
    assert measured[0] - measured[1] == pytest.approx(kept * INPUT_BYTES, abs=0.5 * INPUT_BYTES)


@pytest.mark.usefixtures("without_traces")
def test_the_predicted_peak_has_the_inputs_of_all_layers_but_two_more():
    dimensions = config_of("llama", num_hidden_layers=LAYERS, vocab_size=16)  # so that the peak is not in the loss
    model = Transformer.of(dimensions, "llama", lora_rank=4, lora_targets=("q_proj",))
    how = {"micro_batch": ROWS, "sequence": SEQUENCE, "checkpointing": True, "ranks": 2, "fsdp": "full_shard"}
    setup = Setup(model=model, **how)
    without, with_inputs = (
        profile(replace(setup, library=Library(keeps_inputs=kept))).gradients for kept in (False, True)
    )
    input_bytes = ROWS * SEQUENCE * dimensions["hidden_size"] * 4
    most = [max(gradient.most.total for gradient in gradients) for gradients in (without, with_inputs)]
    assert most[1] - most[0] == pytest.approx((LAYERS - 2) * input_bytes, abs=0.5 * input_bytes)


def test_rows_say_it_by_their_versions():
    row = next(each for each in published.rows() if each.fsdp == "full_shard" and each.recompute == "whole")
    row = row.model_copy(update={"fsdp_version": 1, "versions": "torch 2.4.1, transformers 4.48.1"})
    assert described.library_of(row).keeps_inputs
    for otherwise in (
        {"fsdp_version": 2},
        {"versions": "transformers 4.53.0"},
        {"versions": None},
        {"recompute": "yes"},
    ):
        assert not described.library_of(row.model_copy(update=otherwise)).keeps_inputs, otherwise
