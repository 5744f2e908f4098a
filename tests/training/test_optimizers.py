"""Optimizers, bf16 states, adapters and frozen weights change the 16 bytes a parameter: measured and predicted."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from study.core.arms import all_paths, read
from study.core.errors import Stop
from study.core.optimizers import check, refusal
from study.core.settings import Flags
from study.measure import readback, roles
from study.predict.setup import held_bytes
from study.predict.trace.tape import Tensor
from study.records.schema import Record
from study.records.sections import Observed
from study.report.of_record import predicted
from study.training.optimizers import build_optimizer

FLAGS = ("--task", "wikitext", "--steps", "6", "--warmup-steps", "2", "--sequence", "32", "--eval-rows", "16")
RUNS = {
    "ddp, muon": ("ddp", "--optimizer", "muon"),
    "zero1, muon": ("zero1", "--optimizer", "muon"),
    "zero3, bf16_pure": ("zero3", "--precision", "bf16_pure"),
    "zero3, adapters": ("zero3", "--lora-rank", "4"),
}
PREDICTED = [name for name in RUNS if name != "zero1, muon"]


@pytest.fixture(scope="module")
def run(trained):
    """A function that gives the record of one of RUNS."""

    def record(name: str) -> Record:
        arm, *flags = RUNS[name]
        return Record(**trained(arm, *FLAGS, *flags).record)

    return record


def components(record: Record) -> dict[str, int]:
    return record.memory.components.per_rank[0].after_step


# --- two real ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREDICTED)
def test_each_component_is_as_predicted(name, run):
    record = run(name)
    theory, held = predicted(record), components(record)
    for part in ("weights", "master", "moments", "gradients", "buckets", "staging"):
        assert held.get(part, 0) == pytest.approx(theory.after_step.get(part, 0), rel=0.01), part
    measured = record.memory.components.per_rank[0].tracked_peak_bytes
    assert measured == pytest.approx(theory.peak_bytes, rel=0.01)
    sent = {kind: moved.bytes for kind, moved in record.traffic.per_rank[0].items() if moved.bytes > 100}
    assert sent == pytest.approx(theory.traffic, rel=0.01)


def test_the_arms_agree(run):
    records = [run("ddp, muon"), run("zero1, muon")]
    assert len({record.observed.wrapper for record in records}) == 2
    ours, theirs = (record.loss.train for record in records)
    assert ours[-1] < ours[0]
    assert theirs == pytest.approx(ours, abs=1e-5)


def test_bf16_states_are_in_bf16(run):
    record = run("zero3, bf16_pure")
    dtypes = record.observed.dtypes
    assert {dtypes[role] for role in ("weights", "master", "moments")} == {"bfloat16"}
    assert record.observed.deepspeed["bf16"]["bf16_optimizer_states"] is True
    held, share = components(record), record.observed.parameters / 2
    for role, parameter_bytes in {"weights": 2, "master": 2, "moments": 4, "gradients": 2}.items():
        assert held[role] == pytest.approx(parameter_bytes * share, rel=0.02), role


# --- what an optimizer keeps -----------------------------------------------------------------------------------------


def test_an_optimizer_that_works_by_matrices_keeps_more_of_a_vector():
    matrix, vector = Tensor("w", (512, 256), "layer.0"), Tensor("w", (512 * 256,), "layer.0")
    assert held_bytes("adafactor", [matrix], 4) == 4 * (512 + 256)
    assert held_bytes("adafactor", [vector], 4) == 4 * 512 * 256  # what DeepSpeed's stages give it
    assert held_bytes("fused", [matrix], 4) == held_bytes("fused", [vector], 4) == 8 * 512 * 256


def test_moments_of_eight_bits_have_scales_and_small_tensors_have_none():
    large, small = Tensor("w", (1024, 512), "layer.0"), Tensor("w", (64,), "layer.0")
    assert held_bytes("adamw_8bit", [large], 4) == 2 * (1024 * 512 + 4 * 2048) + 2048
    assert held_bytes("adamw_8bit", [small], 4) == 2 * 4 * 64


def test_a_master_copy_goes_with_each_optimizer():
    model = torch.nn.Linear(8, 8).bfloat16()
    before = model.weight.detach().clone()
    settings = Flags(optimizer="sgd", lr=0.1, precision="bf16_cast")
    optimizer = build_optimizer(settings, model, with_master=True)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert type(optimizer).__name__ == "MasterSGD"
    assert optimizer.master[0].dtype == torch.float32
    assert torch.equal(model.weight, optimizer.master[0].bfloat16())
    assert not torch.equal(model.weight, before)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_bitsandbytes_keeps_as_many_bytes_as_predicted():
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 8))
    optimizer = build_optimizer(Flags(optimizer="adamw_8bit", lr=0.1), model)
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    tensors = [tensor for state in optimizer.state.values() for tensor in roles.tensors_in(state)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    pieces = [Tensor("w", tuple(parameter.shape), "layer.0") for parameter in model.parameters()]
    assert sum(storages.values()) == held_bytes("adamw_8bit", pieces, 4)


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "optimizer", "precision"),
    [
        ("zero2_cpu", "sgd", "fp32"),
        ("zero3_cpu", "adamw", "bf16_pure"),
        ("fsdp2", "adamw_8bit", "fp32"),
        ("fsdp2", "adafactor", "fp32"),
        ("fsdp2", "muon", "fp32"),
    ],
)
def test_what_does_not_go_together_is_refused(arm, optimizer, precision):
    assert refusal(read(all_paths()[arm]), optimizer, precision).status == "unavailable"
    assert refusal(read(all_paths()[arm]), "adamw", "fp32") is None


def test_adapters_and_other_choices_of_what_trains_exclude_each_other():
    arm = read(all_paths()["ddp"])
    with pytest.raises(Stop, match="both choose the weights that train"):
        check(Flags(lora_rank=2, train_only="bias"), arm)
    with pytest.raises(Stop, match="transformers cannot load"):
        check(Flags(lora_rank=2, save=True), arm)


def test_another_optimizer_than_promised_fails_the_run():
    arm, settings = read(all_paths()["ddp"]), Flags(optimizer="sgd")
    seen = Observed(distributed_type="MULTI_CPU", ranks=2, ranks_counted=2, optimizer="AdamW", parameters=4)
    wrong = readback.mismatches(arm, settings, seen.model_copy(update={"trained_parameters": 4}), 2)
    assert any("promised MasterSGD or SGD, observed AdamW" in words for words in wrong)
    frozen = readback.mismatches(
        arm, replace(settings, lora_rank=2), seen.model_copy(update={"trained_parameters": 4}), 2
    )
    assert any("frozen weights: promised True" in words for words in frozen)
