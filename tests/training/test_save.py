"""`--save`: the trained weights, whole, in the run's precision, as transformers loads them; stage 3's as DDP's."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.training.test_checkpoints import FLAGS as REVIEWS
from tests.training.test_parity import CAST

FLAGS = ("--task", "wikitext", "--steps", "8", "--train-rows", "200", "--eval-rows", "8", "--sequence", "32")
FLAGS = (*FLAGS, "--no-instruments", "--save")


@pytest.mark.parametrize(
    ("arm", "flags", "model"),
    [
        ("zero3", REVIEWS, AutoModelForSequenceClassification),  # it keeps BERT's old names
        ("fsdp2", FLAGS, AutoModelForCausalLM),
    ],
)
def test_what_is_saved_in_parts_is_what_ddp_saves(arm, flags, model, trained):
    ddp, ours = trained("ddp", *flags), trained(arm, *flags)
    assert ours.record.observed.held_parameters < ours.record.observed.parameters, "each rank has a part"
    files = [set(load_file(run.folder / "model/model.safetensors")) for run in (ddp, ours)]
    assert files[0] == files[1]
    states = [model.from_pretrained(run.folder / "model").state_dict() for run in (ddp, ours)]
    start = ddp.record.observed.learning_rates[0]
    for name, tensor in states[0].items():
        # Adam's steps are of the size of the rate: what is equal to a hundredth of one has made the same way.
        torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=start / 100)


@pytest.mark.parametrize(
    ("arm", "flags", "dtype", "size_bytes"),
    [("zero3", REVIEWS, "float32", 4), ("zero2", CAST, "bfloat16", 2), ("fsdp2", FLAGS, "float32", 4)],
)
def test_the_file_is_of_the_runs_precision(trained, arm, flags, dtype, size_bytes):
    """`save_16bit_model` makes 16 bits of nothing: an fp32 run is saved in fp32."""
    seen = trained(arm, *flags).record.observed
    assert seen.saved.parameters == seen.parameters, "tied weights are written once"
    assert seen.saved.dtypes == [dtype]
    assert seen.saved.bytes == pytest.approx(seen.parameters * size_bytes, rel=0.01)
