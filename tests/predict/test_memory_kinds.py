"""Allocated, reserved and what the driver shows; a loss in place; frozen weights in bf16."""

import pytest

from study.core.arms import load_arm
from study.core.gpus import GPUS
from study.predict.allocator import MIB, Allocator, blocks_of, outside_bytes, replay, reserved_bytes
from study.predict.architecture import named
from study.predict.engines import engine_of
from study.predict.estimate import memory
from study.predict.placement import Fsdp
from study.predict.prediction import Prediction, estimate, memory_kinds
from study.predict.question import PlaceFlags, Question, TrainingFlags
from study.predict.trace.transformer import Transformer
from study.predict.training import Training
from tests.conftest import table
from tests.predict.families import config_of
from tests.predict.trainings import placed, training_of

pytestmark = pytest.mark.usefixtures("module_without_traces")
BY_HAND = table("predict/by_hand.toml")


def training(**values) -> Training:
    how = {"model": Transformer.of(config_of("llama"), "llama"), "micro_batch": 3, "sequence": 64, "device": "cuda"}
    return training_of(**how | values)


@pytest.mark.parametrize(("size", "allocated", "reserved"), BY_HAND["allocated"])
def test_a_tensor_takes_what_pytorch_takes(size, allocated, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_blocks_are_split_joined_and_given_back():
    allocator = Allocator(capacity_bytes=100 * MIB)
    first, second = allocator.take(8 * MIB), allocator.take(8 * MIB)  # of one segment of 20 MiB, with 4 MiB left
    assert allocator.reserved == 20 * MIB
    allocator.give(first)
    assert allocator.take(6 * MIB)[-1] == 0, "the smallest piece that is large enough"
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
    """A second way to the same peak: tensor by tensor in their order, compared with the instants of theory."""
    ours = training(precision="bf16_pure", checkpointing=checkpointing, optimizer="foreach", micro_batch=8)
    prediction, allocator = Prediction(ours), Allocator()
    replay(prediction.engine, blocks_of(prediction.engine, prediction.memory), allocator)
    assert allocator.peak_allocated == pytest.approx(prediction.memory.peak_bytes, rel=0.02)
    assert allocator.peak_reserved > allocator.peak_allocated


@pytest.mark.parametrize(("how", "begins", "ends"), BY_HAND["gradients"])
def test_gradients_lie_in_ddps_buckets_or_beside_them(how, begins, ends):
    """Copies of all gradients when the backward pass begins, and in the update. PyTorch 1 kept zeros between steps."""
    ours = training(**how)
    whole = 4 * ours.model.parameters
    _, instants, _ = memory(engine_of(ours), ours.profile)
    (_, first), *_, (_, last) = instants
    assert (first.get("gradients", 0), last["gradients"]) == (begins * whole, ends * whole)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_makes_temporaries_and_no_activations(stage):
    ours = training(precision="bf16_cast", ranks=2, zero={"stage": stage})
    _, instants, _ = memory(engine_of(ours), ours.profile)
    updates = [now for when, now in instants if when == "update"]
    assert updates
    for now in updates:
        assert now["temporaries"] > 0
        assert "activations" not in now


def test_an_update_tensor_by_tensor_makes_one_tensor():
    both = [training(optimizer=name) for name in ("foreach", "single_tensor")]
    at_once, in_turn = (dict(memory(engine_of(ours), ours.profile)[1])["update"]["temporaries"] for ours in both)
    assert at_once == 4 * both[0].model.parameters
    assert in_turn == 4 * max(tensor.elements for tensor in both[0].model.tensors)


def test_three_kinds():
    stage_3 = training(precision="bf16_cast", ranks=8, zero={"stage": 3})
    for each in (stage_3, placed(stage_3, deepspeed=None, fsdp=Fsdp())):
        kinds = memory_kinds(each, GPUS["A100-80GB"])
        assert kinds.allocated < kinds.reserved < kinds.driver
        assert kinds.driver - kinds.reserved == int(outside_bytes(each))


@pytest.mark.parametrize(("arm", "optimizer"), [("single", "adafactor"), ("ddp", "sgd"), ("fsdp2_cpu", "adamw")])
def test_no_more_is_allocated_than_is_reserved(arm, optimizer):
    """The prediction of reserved memory was below that of allocated memory in each of these."""
    for precision, accumulation in (("fp32", 4), ("bf16_cast", 1)):
        how = {"precision": precision, "accumulation": accumulation, "optimizer": optimizer, "micro_batch": 1}
        kinds = memory_kinds(training_of(named("bert-base"), arm, ranks=4, sequence=64, device="cuda", **how))
        assert kinds.allocated <= kinds.reserved, (precision, accumulation)


def test_fsdp2s_blocks_hold_the_moments_of_matrices():
    """They were those of vectors, which have more."""
    prediction = Prediction(training(arm="fsdp2", optimizer="adafactor"))
    assert sum(blocks_of(prediction.engine, prediction.memory).moments) == prediction.engine.moments_bytes


def test_near_the_end_of_a_gpu_nothing_more_is_held():
    ours = training(precision="fp32", micro_batch=64)
    engine, whole = Prediction(ours).engine, estimate(ours)
    free = reserved_bytes(engine, whole)
    assert reserved_bytes(engine, whole, free + 1) == free
    assert whole.peak_bytes < reserved_bytes(engine, whole, int(0.9 * free)) <= 0.9 * free


LEANER = [({"loss": "in_place"}, 4), ({"logits": "as_computed"}, 6)]


@pytest.mark.parametrize(("less", "saved_bytes"), LEANER)
def test_a_leaner_loss_holds_less(less, saved_bytes):
    """The last step of the loss holds three tensors of the logits' size. One in place holds the logits once less."""
    values = {"precision": "bf16_pure", "micro_batch": 16}
    whole, lean = (training(**values | how) for how in ({}, less))
    saved = sum(whole.profile.most) - sum(lean.profile.most)
    assert saved == pytest.approx(saved_bytes * whole.tokens * 512, rel=0.05)


KINDS = ("as_weights", "bf16")


def test_frozen_weights_are_loaded_in_bf16():
    """Under autocast. If all weights are bf16 already, nothing changes."""
    model = Transformer.of(config_of("llama"), "llama", lora_rank=4)
    as_weights, half = (estimate(training(model=model, precision="bf16", frozen=kind)) for kind in KINDS)
    frozen = sum(tensor.elements for tensor in model.tensors if not tensor.trains)
    assert half.after_step["weights"] == 4 * model.parameters - 2 * frozen
    assert as_weights.after_step["weights"] == 4 * model.parameters
    assert half.after_step["moments"] == as_weights.after_step["moments"] == 8 * (model.parameters - frozen)
    assert half.at_peak["activations"] < as_weights.at_peak["activations"], "no copies of frozen matrices"
    cast = [estimate(training(model=model, precision="bf16_cast", frozen=kind)) for kind in KINDS]
    assert cast[0] == cast[1]


def test_a_chunked_loss_holds_a_piece_of_the_logits():
    """Else log-probabilities in fp32 stay until the backward pass, which makes two gradients of their size."""
    model, tokens, vocabulary = Transformer.of(config_of("llama", vocab_size=8192), "llama"), 8 * 64, 8192
    flags = TrainingFlags(gpus=8, sequence=64)
    whole, chunked = (
        estimate(
            Question.of(model, flags, PlaceFlags(gpu="H100", chunked_loss=chunked)).training(load_arm("zero3"), 8, 1)
        ).at_peak
        for chunked in (False, True)
    )
    assert whole["temporaries"] == 2 * 4 * tokens * vocabulary
    assert chunked["temporaries"] < 0.1 * whole["temporaries"], "a piece of the logits, or the gradient of their weight"
    # Of 64 wide hidden states the gradient is kept, in bf16.
    spared = whole["activations"] - chunked["activations"]
    assert spared == pytest.approx(4 * tokens * vocabulary - 2 * tokens * 64, rel=0.001)
