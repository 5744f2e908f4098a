"""What people combine: each answer has its number, which the predictor gives, and its threads."""

import re
from dataclasses import replace

import pytest
from conftest import ranks_of
from families import config_of

from study.cli import combinations
from study.cli.commands import main, start
from study.errors import Stop
from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.advice.advise import advise
from study.predictor.advice.question import Given, Question
from study.predictor.estimate import estimate, profile
from study.predictor.library import Library
from study.predictor.memory.memory_kinds import outside_bytes
from study.predictor.setup import Setup
from study.predictor.timing.steptime import Machine, step_time
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted, asked_for

L4 = Machine(gpu="L4", gpus_per_node=4)


@pytest.fixture(scope="module")
def lora():
    return asked_for(Wanted(model="bert-tiny", lora_rank=8), 128)


@pytest.fixture
def setup(lora):
    values = {"precision": "bf16_cast", "micro_batch": 1, "sequence": 128, "device": "cuda", "checkpointing": True}
    return lambda arm="zero3", model=lora, **more: Setup.of_arm(model, arm, ranks=4, **values | more)


def answer(id: str, *setup: object) -> combinations.Answer:
    (found,) = [each for each in combinations.answers(*setup) if each.id == id]
    assert all(thread.startswith("https://github.com/") for thread in found.threads)
    return found


def test_stage_3_gathers_what_is_frozen(setup, lora):
    found = answer("frozen_gathered", setup())
    assert size(estimate(setup()).traffic["all_gather"]) in found.sentence
    ddp = estimate(setup("ddp"))
    assert f"under DDP a step moves {size(sum(ddp.traffic.values()))}" in found.sentence
    assert size(ddp.peak_bytes) in found.sentence
    assert sum(ddp.traffic.values()) < 0.1 * estimate(setup()).traffic["all_gather"]


def test_weights_in_4_bits_are_sharded_and_their_scales_are_not(setup, lora):
    packed = [t.elements for t in lora.tensors if t.block.startswith("layer.") and len(t.shape) == 2 and not t.trains]
    scales_bytes = sum(packed) * 4 / 64
    packed_bytes = sum(packed) / 2
    quantized = answer("quantized_whole", setup(quantized="nf4")).sentence
    assert quantized.startswith(
        f"Each rank holds all {size(packed_bytes + scales_bytes)} of nf4 weights while it loads"
    )
    assert f"it holds {size(scales_bytes)} of scales, and {size(packed_bytes / 4)} of weights" in quantized
    assert answer("quantized_whole", setup()).sentence.startswith("If the frozen weights are quantized")
    for arm, ranks in (("ddp", 1), ("zero2", 1), ("zero3", 4), ("fsdp2", 4)):
        plain, less = (estimate(setup(arm, quantized=kind)) for kind in (None, "nf4"))
        saved = plain.at_peak["weights"] - less.at_peak["weights"]
        assert saved == pytest.approx((2 * sum(packed) - packed_bytes) / ranks - scales_bytes, rel=1e-3)
        gathered = [each.traffic.get("all_gather", 0) for each in (plain, less)]
        times = {"zero3": 1, "fsdp2": 2}.get(arm, 0)  # a model as small as this stays whole under stage 3
        assert gathered[0] - gathered[1] == pytest.approx(times * (2 * sum(packed) - packed_bytes), rel=0.01)
    slow, fast = (step_time(setup(quantized=kind), Machine(gpu="L4", gpus_per_node=4)) for kind in (None, "nf4"))
    assert fast.parts["link"] < slow.parts["link"]


def test_experts_are_quantized_where_they_are_linear_layers():
    model = Transformer.of(config_of("mixtral"), "mixtral", lora_rank=2, lora_targets=("q_proj",))
    experts = sum(tensor.elements for tensor in model.tensors if len(tensor.shape) == 3)
    how = {"model": model, "quantized": "nf4", "precision": "bf16_pure"}
    fused, linear = (
        estimate(Setup(**how, library=Library(experts_loop=loop))).at_peak["weights"] for loop in (False, True)
    )
    assert fused - linear == pytest.approx(experts * (2 - 0.5 - 4 / 64), rel=1e-3)


def test_deepspeed_shards_integers(tmp_path):
    """As bitsandbytes keeps 4 bits: a frozen column of bytes. Its Linear4bit 0.50.2 was tried so, and gave the same."""
    run = ranks_of(
        """
        import deepspeed, torch
        from accelerate import PartialState
        PartialState()
        layer = torch.nn.Linear(8, 8)
        layer.packed = torch.nn.Parameter(torch.arange(64, dtype=torch.uint8).view(64, 1), requires_grad=False)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.SGD([layer.weight], lr=0.1)
        deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
        part = layer.packed.ds_tensor.numel(), layer.packed.numel()
        with deepspeed.zero.GatheredParameters([layer.packed]):
            print("SEEN", *part, layer.packed.dtype, layer.packed.sum().item())
        """,
        tmp_path,
    )
    assert run.output.count("SEEN 32 0 torch.uint8 2016") == 2, run.output


def test_a_quantized_weight_is_made_whole_in_the_backward_pass(setup, lora):
    largest = max(map(setup(quantized="nf4").packed_elements, lora.tensors))
    before, after = (profile(setup("ddp", quantized=kind)).gradients for kind in (None, "nf4"))
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].tensor.block.startswith("layer.")]
    made = {after.most.in_use - before.most.in_use for before, after in pairs}
    assert max(made) == 2 * largest  # beside the gradients of this weight's adapters; others have their most elsewhere


def test_recomputation_with_frozen_weights(setup):
    saved = estimate(setup(checkpointing=False)).peak_bytes - estimate(setup()).peak_bytes
    assert f"saves {size(saved)}" in answer("recomputed_frozen", setup()).sentence


def test_fsdp1_keeps_the_inputs_of_frozen_layers(setup, lora):
    inputs = (lora.dimensions["num_hidden_layers"] - 2) * 128 * lora.dimensions["hidden_size"] * 2
    more = answer("kept_by_fsdp1", setup("fsdp2")).sentence
    assert f"needs {size(inputs)} more at the peak" in more
    with pytest.raises(ValueError, match="not enough values"):
        answer("kept_by_fsdp1", setup("zero3"))


def test_a_second_program_on_the_gpu(setup, lora):
    sentence = answer("beside", setup(), L4, 0.55).sentence
    assert size(0.55 * 24.15e9)[:3] in sentence
    largest = max(tensor.elements for tensor in lora.tensors)
    whole, states = 2 * lora.parameters, sum(estimate(setup()).after_step.values())
    assert f"at once adds {size(whole)} to {size(states)} of states and fits" in sentence
    assert f"tensor by tensor it adds {size(2 * largest)} at most" in sentence
    assert sentence.endswith(f"A reference model adds {size(whole / 4)} to each rank")
    assert "A sync" not in answer("beside", setup("ddp"), L4, 0.55).sentence


def test_the_training_fits_beside_the_share_that_is_named(setup):
    whole = asked_for(Wanted(model="llama3.2-1b"), 1024)
    big = setup(model=whole, sequence=1024)
    share = int(re.search(r"fits beside (\d+)%", answer("beside", big, L4, 0.9).sentence)[1]) / 100
    for more, fits in ((-0.01, True), (0.01, False)):
        left = GPUS["L4"].memory_bytes - combinations.beside_bytes("L4", share + more)
        assert (estimate(big).peak_bytes + outside_bytes(4) <= left) is fits
    assert "runs out of memory" in answer("beside", big, L4, 0.9).sentence


def test_offloading_has_a_price(setup):
    whole = asked_for(Wanted(model="llama3.2-1b"), 1024)
    plain, offloaded = (setup(arm, whole, sequence=1024) for arm in ("zero3", "zero3_cpu"))
    sentence = answer("offloaded", offloaded, L4).sentence
    slow, fast = (step_time(each, L4) for each in (offloaded, plain))
    assert f"{slow.seconds:.3g} s instead of {fast.seconds:.3g} s" in sentence
    saved = estimate(plain).peak_bytes - estimate(offloaded).peak_bytes
    assert f"saves {size(saved)} of {size(estimate(plain).peak_bytes)}" in sentence
    assert f"at most {slow.parts['update on host']:.3g} s" in sentence
    assert "disk" not in sentence
    assert (
        "the disk's time is not counted" in answer("offloaded", setup("zero3_nvme", whole, sequence=1024), L4).sentence
    )
    with_disk = replace(L4, disk_bytes_per_s=1e9)
    of_disk = answer("offloaded", setup("zero3_nvme", whole, sequence=1024), with_disk).sentence
    assert "not counted" not in of_disk
    assert f"the disk {step_time(setup('zero3_nvme', whole, sequence=1024), with_disk).parts['disk']:.3g} s" in of_disk
    assert not [each for each in combinations.answers(plain, L4) if each.id == "offloaded"]


def test_nothing_is_said_of_what_is_not_combined(setup):
    whole = asked_for(Wanted(model="bert-tiny"), 128)
    assert combinations.answers(setup(model=whole)) == []
    assert [each.id for each in combinations.answers(setup("ddp"))] == ["recomputed_frozen"]


def test_an_advice_leaves_the_other_program_its_share():
    model = asked_for(Wanted(model="gpt2"), 512)
    half, whole = (advise(Question.of(model, 2, "L4", Given(sequence=512, beside=share))) for share in (0.5, 0.0))
    for one, other in zip(half.tried, whole.tried, strict=True):
        assert one.peak_bytes + one.headroom_bytes < 0.55 * (other.peak_bytes + other.headroom_bytes)
    with pytest.raises(Stop, match="less than 1"):
        Question.of(model, 2, "L4", Given(beside=1.0))


def test_the_command_says_it(capsys, monkeypatch):
    words = ["--model", "gpt2", "--arm", "zero3", "--ranks", "4", "--gpu", "L4", "--sequence", "512", "--beside"]
    answers = []
    for share in ("0.55", "0.95"):
        monkeypatch.setattr("sys.argv", ["study", "estimate", *words, share])
        main()
        answers.append(capsys.readouterr().out)
    assert "of each L4 belong to another program" in " ".join(answers[0].split())
    assert "It fits on L4" in answers[0]
    assert "It does not fit on L4" in " ".join(answers[1].split())


def test_deepcompile_is_not_predicted_and_has_to_be_started(setup):
    assert "engine.compile()" in answer("deepcompile", setup("zero3_deepcompile")).sentence
    assert not [each for each in combinations.answers(setup()) if each.id == "deepcompile"]


def test_fp8_is_refused_with_the_reason(setup):
    with pytest.raises(Stop, match="copies in 8 bits come on top"):
        setup(precision="fp8")
    with pytest.raises(Stop, match="copies in 8 bits"):
        start(["estimate", "--model", "gpt2", "--arm", "zero3", "--precision", "fp8"])
