"""Which optimizers a library refuses, by arm, precision and what is saved."""

import pytest

from study.core import optimizers
from study.core.arms import all_paths, read
from study.core.errors import Stop
from study.core.settings import TrainerFlags
from tests.cases import for_each


def refused(arm: str, optimizer: str = "adamw", precision: str = "bf16", has_values: bool = True, saves=None) -> bool:
    stop = optimizers.refusal(read(all_paths()[arm]), optimizer, precision, has_values, saves)
    assert stop is None or arm in stop.what
    return stop is not None


@for_each("arm", sorted(all_paths()))
def test_adamw_goes_with_every_arm(arm):
    assert not refused(arm)
    assert not refused(arm, has_values=False)


@pytest.mark.parametrize(
    ("arm", "optimizer", "is_refused"),
    [
        ("zero2_cpu", "adamw_8bit", True), ("zero3_cpu", "adafactor", True), ("zero2_cpu", "sgd", True),
        ("zero2", "adamw_8bit", False), ("zero2", "adafactor", False), ("zero3", "muon", False),
        ("fsdp2", "adamw_8bit", True), ("fsdp2", "adafactor", True), ("fsdp2", "muon", True), ("fsdp2", "sgd", False),
        ("ddp", "adamw_8bit", False), ("ddp", "adafactor", False), ("single", "adafactor", False),
    ],
)  # fmt: skip
def test_offloading_and_fsdp2_refuse_optimizers(arm, optimizer, is_refused):
    assert refused(arm, optimizer) == is_refused


def test_adafactor_reads_a_value():
    assert refused("ddp", "adafactor", has_values=False)
    assert not refused("ddp", "adafactor")


def test_moments_of_two_bytes_do_not_go_with_offloading():
    assert refused("zero2_cpu", precision="bf16_pure")
    assert not refused("zero2", precision="bf16_pure")


def test_a_checkpoint_needs_values_weights_in_memory_and_a_place_for_masters():
    assert refused("zero3_nvme", saves=10)
    assert refused("zero2", saves=10, has_values=False)
    assert refused("ddp", precision="bf16_cast", saves=10)
    assert not refused("zero2", precision="bf16_cast", saves=10)
    assert not refused("zero2", saves=10)


def test_a_model_with_adapters_is_not_saved_as_a_model():
    arm = read(all_paths()["zero2"])
    optimizers.check(TrainerFlags(lora_rank=8), arm)
    optimizers.check(TrainerFlags(save=True), arm)
    with pytest.raises(Stop, match="transformers cannot load"):
        optimizers.check(TrainerFlags(lora_rank=8, save=True), arm)
