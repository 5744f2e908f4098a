"""Optimizers, bf16 states, adapters and frozen weights change the 16 bytes a parameter: measured and predicted."""

import pytest
import torch

from study.core.arms import all_paths, read
from study.core.errors import Stop
from study.core.optimizers import check, refusal
from study.core.settings import TrainerFlags
from study.predict.optimizer_states import moments_bytes
from study.predict.trace.tape import Tensor
from study.records.schema import Record
from study.report.of_record import predicted
from study.training.optimizers import build_optimizer
from tests.conftest import table

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
        return trained(arm, *FLAGS, *flags).record

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
    if name == "zero3, bf16_pure":
        assert {record.observed.dtypes[role] for role in ("weights", "master", "moments")} == {"bfloat16"}


def test_the_arms_agree(run):
    records = [run("ddp, muon"), run("zero1, muon")]
    assert len({record.observed.wrapper for record in records}) == 2
    ours, theirs = (record.loss.train for record in records)
    assert ours[-1] < ours[0]
    assert theirs == pytest.approx(ours, abs=1e-5)


# --- what an optimizer keeps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape", "held"), table("training/truth.toml")["keeps"])
def test_what_an_optimizer_keeps_of_a_tensor(kind, shape, held):
    assert moments_bytes(kind, [Tensor("w", tuple(shape), "layer.0")], 4) == held


def test_a_master_copy_goes_with_each_optimizer():
    model = torch.nn.Linear(8, 8).bfloat16()
    before = model.weight.detach().clone()
    settings = TrainerFlags(optimizer="sgd", lr=0.1, precision="bf16_cast")
    optimizer = build_optimizer(settings, model, with_master=True)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert type(optimizer).__name__ == "MasterSGD"
    assert optimizer.master[0].dtype == torch.float32
    assert torch.equal(model.weight, optimizer.master[0].bfloat16())
    assert not torch.equal(model.weight, before)


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arm", "optimizer", "precision"), table("training/refused.toml")["optimizers"])
def test_what_does_not_go_together_is_refused(arm, optimizer, precision):
    assert refusal(read(all_paths()[arm]), optimizer, precision).status == "unavailable"
    assert refusal(read(all_paths()[arm]), "adamw", "fp32") is None


def test_adapters_are_not_saved_as_a_model():
    arm = read(all_paths()["ddp"])
    with pytest.raises(Stop, match="transformers cannot load"):
        check(TrainerFlags(lora_rank=2, save=True), arm)
