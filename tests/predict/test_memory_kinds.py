"""Allocated, reserved and what the driver shows; a loss in place; frozen weights in bf16."""

from dataclasses import replace

import pytest
from families import config_of

from study.predict.architecture import named
from study.predict.estimate import estimate, memory, profile
from study.predict.memory import memory_kinds as kinds_of
from study.predict.memory.memory_kinds import MIB, Allocator, memory_kinds, outside_bytes, reserved_bytes
from study.predict.setup import Library, Setup
from study.predict.trace.transformer import Transformer

pytestmark = pytest.mark.usefixtures("module_without_traces")


def setup_of(**values) -> Setup:
    how = {"model": Transformer.of(config_of("llama"), "llama"), "micro_batch": 3, "sequence": 64, "device": "cuda"}
    return Setup(**how | values)


# CUDACachingAllocator.h of PyTorch: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge.
@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_a_tensor_takes_what_pytorch_takes(size, allocated, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_blocks_are_split_joined_and_given_back():
    allocator = Allocator(capacity_bytes=100 * MIB)
    first, second = allocator.take(8 * MIB), allocator.take(8 * MIB)  # of one segment of 20 MiB, with 4 MiB left
    assert allocator.reserved == 20 * MIB
    allocator.give(first)
    assert allocator.take(6 * MIB).place == 0, "the smallest piece that is large enough"
    allocator.take(9 * MIB)
    assert allocator.reserved == 40 * MIB, "nothing free is large enough: 2 and 4 MiB lie apart"
    allocator.give(second)
    allocator.take(13 * MIB)
    assert allocator.reserved == 40 * MIB, "8 MiB between free pieces of 2 and 4 are a piece of 14"
    large = allocator.take(40 * MIB)
    allocator.give(large)
    allocator.take(42 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (82 * MIB, 82 * MIB), "40 MiB went back to the driver"
    with pytest.raises(MemoryError):
        allocator.take(50 * MIB)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_replay_allocates_what_is_predicted(checkpointing):
    """A second way to the same peak: tensor by tensor in their order, compared with the moments of theory."""
    setup = setup_of(precision="bf16_pure", checkpointing=checkpointing, optimizer="foreach", micro_batch=8)
    allocator = Allocator()
    kinds_of.replay(setup, kinds_of.sizes_of(setup), allocator)
    assert allocator.peak_allocated == pytest.approx(estimate(setup).peak_bytes, rel=0.02)
    assert allocator.peak_reserved > allocator.peak_allocated


@pytest.mark.parametrize(
    ("how", "begins", "ends"),
    [
        ({"ranks": 1}, 0, 1),
        ({"ranks": 1, "library": Library(torch_major=1)}, 1, 1),
        ({"ranks": 2}, 1, 1),
        ({"ranks": 2, "library": Library(bucket_view=False)}, 1, 2),
        ({"ranks": 2, "library": Library(bucket_view=False, torch_major=1)}, 2, 2),
        ({"ranks": 2, "accumulation": 2}, 2, 1),
    ],
)
def test_gradients_lie_in_ddps_buckets_or_beside_them(how, begins, ends):
    """Copies of all gradients when the backward pass begins, and in the update. PyTorch 1 kept zeros between steps."""
    setup = setup_of(**how)
    whole = 4 * setup.model.parameters
    _, moments, _ = memory(setup, profile(setup))
    (_, first), *_, (_, last) = moments
    assert (first.get("gradients", 0), last["gradients"]) == (begins * whole, ends * whole)


def test_an_update_tensor_by_tensor_makes_one_tensor():
    setups = [setup_of(optimizer=name) for name in ("foreach", "single_tensor")]
    at_once, in_turn = (dict(memory(setup, profile(setup))[1])["update"]["temporaries"] for setup in setups)
    assert at_once == 4 * setups[0].model.parameters
    assert in_turn == 4 * max(tensor.elements for tensor in setups[0].model.tensors)


def test_three_kinds():
    setup = setup_of(precision="bf16_cast", ranks=8, deepspeed={"zero_optimization": {"stage": 3}})
    for each in (setup, replace(setup, deepspeed=None, fsdp="full_shard")):
        kinds = memory_kinds(each, "A100-80GB")
        assert kinds.allocated < kinds.reserved < kinds.driver
        assert kinds.driver - kinds.reserved == int(outside_bytes(each))


@pytest.mark.parametrize(("arm", "optimizer"), [("single", "adafactor"), ("ddp", "sgd"), ("fsdp2_cpu", "fused")])
def test_no_more_is_allocated_than_is_reserved(arm, optimizer):
    """The prediction of reserved memory was below that of allocated memory in each of these."""
    for precision, accumulation in (("fp32", 4), ("bf16_cast", 1)):
        how = {"precision": precision, "accumulation": accumulation, "optimizer": optimizer, "micro_batch": 1}
        kinds = memory_kinds(Setup.of_arm(named("bert-base"), arm, ranks=4, sequence=64, device="cuda", **how))
        assert kinds.allocated <= kinds.reserved, (precision, accumulation)


def test_near_the_end_of_a_gpu_nothing_more_is_held():
    setup = setup_of(precision="fp32", micro_batch=64)
    free = reserved_bytes(setup)
    assert reserved_bytes(setup, free + 1) == free
    assert estimate(setup).peak_bytes < reserved_bytes(setup, int(0.9 * free)) <= 0.9 * free


LEANER = [({"loss": "in_place"}, 4), ({"library": Library(logits="as_computed")}, 6)]


@pytest.mark.parametrize(("less", "saved_bytes"), LEANER)
def test_a_leaner_loss_holds_less(less, saved_bytes):
    """The last step of the loss holds three tensors of the logits' size. One in place holds the logits once less."""
    values = {"precision": "bf16_pure", "micro_batch": 16}
    whole, lean = (profile(setup_of(**values | how)) for how in ({}, less))
    assert sum(whole.most) - sum(lean.most) == pytest.approx(saved_bytes * setup_of(**values).tokens * 512, rel=0.05)


def test_frozen_weights_are_loaded_in_bf16():
    """Under autocast. If all weights are bf16 already, nothing changes."""
    model = Transformer.of(config_of("llama"), "llama", lora_rank=4)
    setup = setup_of(model=model, precision="bf16")
    as_weights, half = (estimate(replace(setup, frozen=kind)) for kind in ("as_weights", "bf16"))
    frozen = sum(tensor.elements for tensor in model.tensors if not tensor.trains)
    assert half.after_step["weights"] == 2 * frozen + 4 * model.trained
    assert as_weights.after_step["weights"] == 4 * (frozen + model.trained)
    assert half.after_step["moments"] == as_weights.after_step["moments"] == 8 * model.trained
    assert half.at_peak["activations"] < as_weights.at_peak["activations"], "no copies of frozen matrices"
    cast = [replace(setup, precision="bf16_cast", frozen=kind) for kind in ("as_weights", "bf16")]
    assert estimate(cast[0]) == estimate(cast[1])
