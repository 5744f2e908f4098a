"""The time of a step: by hand, by physical limits, and by its constants and their fit."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from study.core import arms
from study.core.gpus import GPUS, LINKS
from study.predict.architecture import named
from study.predict.engines import engine_of
from study.predict.pace import Pace, class_of, constants, pace
from study.predict.placement import Fsdp
from study.predict.prediction import Prediction, estimate, step_time
from study.predict.step_time import PHASES, Hardware, Links, kind_of_interval, update_bytes, work
from study.predict.trace.tape import Product
from study.predict.training import QUANTIZED_BYTES, Training
from study.report import estimates
from tests.predict.trainings import placed, training_of

A100 = Hardware(gpu=GPUS["A100-80GB"])
H100 = Hardware(gpu=GPUS["H100-80GB"])
SLOW = replace(A100, network="eth-25")
MEDIUM = named("gpt2-medium")


def training(arm: str = "zero2", model=MEDIUM, zero: dict | None = None, **values) -> Training:
    """An arm, whose section zero_optimization may differ."""
    usual = {"precision": "bf16_cast", "micro_batch": 4, "sequence": 512, "device": "cuda", "ranks": 8}
    return training_of(model, arm, zero=zero, **usual | values)


def link_s(each: Training, machine: Hardware = A100) -> float:
    return step_time(each, machine).parts["link"]


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_ring_by_hand():
    """(N - 1) / N of the tensor goes over the slowest link. An all-reduce goes round twice."""
    links, of = Links(16, 8, "nvlink3", "ib-hdr", "pcie4"), pace()
    bandwidth = min(300e9 * of.link, 8 * 25e9 * of.network)
    assert links.seconds("all_gather", 1e9, of) == pytest.approx(15 / 16 * 1e9 / bandwidth)
    assert links.seconds("all_reduce", 1e9, of) == pytest.approx(2 * 15 / 16 * 1e9 / bandwidth)
    assert links.among(1).seconds("all_gather", 1e9, of) == 0
    pcie_bytes_per_s = LINKS["pcie4"].bytes_per_s
    pcie = links._replace(ranks=2, link="pcie4").seconds("all_gather", 1e9, of)
    assert pcie == pytest.approx(1 / 2 * 1e9 / (pcie_bytes_per_s * of.pcie))
    assert links.seconds("host", 1e9, of) == pytest.approx(1e9 / (pcie_bytes_per_s * of.host_link))
    assert links.among(4, 4) == links._replace(ranks=4, gpus_per_node=2)


def test_the_work_of_a_pass_by_hand():
    """A BERT layer: four products of width x width, two of width x 4 width; backward takes two for each."""
    tokens, width = 4 * 128, named("bert-tiny").dimensions["hidden_size"]
    square, wide = Product(1, tokens, width, width), Product(1, tokens, 4 * width, width)
    forward, backward = (work(training("ddp", named("bert-tiny"), sequence=128), phase) for phase in PHASES)
    layers = named("bert-tiny").dimensions["num_hidden_layers"]
    assert forward.products[square] >= 4 * layers
    assert forward.products[wide] == layers
    products = [passes.products.items() for passes in (forward, backward)]
    half = [sum(count * number * m * n * k for (number, m, n, k, _), count in each) for each in products]
    assert half[1] == pytest.approx(2 * half[0], rel=0.1)


def test_stage_2_reduces_in_each_pass_and_ddp_once():
    """Further passes add a reduction each in stage 2, and none in DDP."""
    sent = {}
    for arm in ("ddp", "zero1", "zero2"):
        for passes in (1, 4):
            step = step_time(training(arm, accumulation=passes), A100)
            assert step.seconds == pytest.approx(sum(phase.seconds for phase in step.phases))
            assert max(step.parts.values()) <= step.seconds
            sent[arm, passes] = step.parts["link"]
    assert sent["ddp", 4] == pytest.approx(sent["ddp", 1])
    reduced = sent["zero2", 4] - sent["zero2", 1]
    gathered = sent["zero1", 1] - sent["ddp", 1]  # stages 1 and 2 gather the new weights once a step
    assert sent["zero2", 1] - gathered == pytest.approx(reduced / 3)


def test_an_offloaded_sum_is_fetched_again_in_each_further_pass():
    """One pass: gradients go down and weights come up. Two: sums go down and up twice, and then the weights."""
    one, two = (link_s(training("zero2_cpu", ranks=1, accumulation=passes)) for passes in (1, 2))
    assert two == pytest.approx(5 / 2 * one)


# --- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3", "single"])
def test_never_above_the_peak(arm):
    chance = random.Random(arm)
    for gpu in chance.sample([*GPUS], 4):
        rows, ranks = 2 ** chance.randint(0, 7), chance.choice([2, 8, 64])
        each = training(arm, micro_batch=rows, ranks=ranks, precision=chance.choice(["bf16_cast", "bf16", "fp32"]))
        reached = max(1, pace().products[class_of("products", GPUS[gpu])])  # a GeForce was measured above its datasheet
        peak = GPUS[gpu].flops_per_s(each.recipe.product_bytes == 4) * reached
        step = step_time(each, Hardware(gpu=GPUS[gpu]))
        assert each.traced.flops * each.batch.passes / step.seconds < peak, (gpu, each)
        assert step.low_s < step.seconds < step.high_s


def test_groups_gather_inside_a_node_and_reduce_between_nodes():
    """16 ranks in two nodes. Parts of the gradients leave a node; hpZ's second copy of the weights is in each node."""
    whole = placed(training("ddp", ranks=16), fsdp=Fsdp())
    plain = training("zero3", named("gpt2-xl"), ranks=16)  # more than stay gathered for the backward pass
    for grouped, all_together in ((placed(whole, group=8), whole), (placed(plain, second_partition=8), plain)):
        assert link_s(grouped, SLOW) < link_s(all_together, SLOW)


@pytest.mark.parametrize("arm", ["zero2", "zero3", "fsdp2"])
def test_what_takes_time_is_what_traffic_counts(arm):
    """FSDP2's time had the units that stay whole gathered twice. Many ranks, so that many rows pad their parts."""
    each = training(arm, ranks=8192)
    sent = estimate(each).traffic.items()
    assert link_s(each) == pytest.approx(sum(A100.links(8192).seconds(*moved, pace()) for moved in sent))


def test_python_handles_each_tensor_as_its_library_does():
    """At a second for a kernel. DDP and stages 1 and 2: each gradient. Stage 3 and FSDP: each tensor in both passes.

    Under FSDP the backward pass gathers and reduces, so weights that stay whole are half of the work there. Where a
    layer is computed again stage 3 gathers again; FSDP's hooks return at once.
    """
    of = replace(pace(), launch=dict.fromkeys(pace().launch, 1.0))
    tensors = len(MEDIUM.tensors)
    alone = host_s(training("single", ranks=1), A100, of)
    whole = training("ddp")
    for each, python, handled in (
        (whole, "ddp", tensors),
        (training("zero1"), "stages_1_and_2", tensors),
        (training("zero2"), "stages_1_and_2", tensors),
        (training("zero3"), "stage_3", 2 * tensors),
        (placed(whole, fsdp=Fsdp()), "fsdp", 2 * tensors),
        (placed(whole, fsdp=Fsdp(reshards=False)), "fsdp", 1.5 * tensors),
    ):
        more = host_s(each, A100, of) - alone
        # Stage 3 has some kernels of its own, and the update of ZeRO's stages is of one vector.
        update = of.python["update"] * (len(engine_of(each).pieces) - tensors)
        assert more == pytest.approx(of.python[python] * handled + update, abs=20), python
    layers = sum(tensor.block.startswith("layer.") for tensor in MEDIUM.tensors)
    again = engine_of(training("zero3", checkpointing=True)).handled
    assert again == {"forward": tensors, "backward": tensors + layers}
    assert engine_of(training("fsdp2", checkpointing=True)).handled == engine_of(training("fsdp2")).handled


def host_s(each: Training, machine: Hardware, of: Pace) -> float:
    """Of both passes."""
    return sum(phase.host_s for phase in step_time(each, replace(machine, pace=of)).phases[:2])


def test_newer_kernels_of_attention_are_faster_from_hopper_on():
    for machine, faster in ((H100, pace().newer_attention), (A100, 1)):
        kinds = (replace(machine, attention=kernel) for kernel in ("flash2", "cudnn"))
        plain, newer = (step_time(training(), kind).parts["attention"] for kind in kinds)
        assert plain / newer == pytest.approx(faster)


def test_experts_that_python_calls_launch_for_each():
    """Mixtral has 8 in each of 32 layers: with 60 kernels for each, both passes launch 15,360 more."""
    each = training("zero3", named("mixtral-8x7b"), sequence=512)
    looping = replace(A100, loops_over_experts=True)
    more = host_s(each, looping, pace()) - host_s(each, A100, pace())
    assert more == pytest.approx(60 * 8 * 32 * pace().launch["unsaid"])


def test_the_interval_is_that_of_what_limits_and_a_guess_is_wider():
    """A large batch; a small one; a slow network; and a GPU of which few rows are known."""
    large = training("zero1", micro_batch=64)
    for kind, each, machine in (
        ("gpu", large, H100),
        ("host", training("zero1", micro_batch=1, sequence=64), H100),
        ("links", training("zero2", micro_batch=1, ranks=64), replace(SLOW, gpus_per_node=1)),
    ):
        step = step_time(each, machine)
        assert kind_of_interval(step.limit) == kind
        assert (step.low_s / step.seconds, step.high_s / step.seconds) == pytest.approx(pace().interval[kind]), kind
    guess = step_time(large, Hardware(gpu=GPUS["B200"]))
    assert guess.high_s / guess.seconds == pytest.approx(1.3 * pace().interval["gpu"][1])


def test_the_constants_are_at_most_32_and_each_has_its_rows():
    found = [entry for entries in constants().values() for entry in entries.values()]
    widths = {entry["width"] for entry in found if "width" in entry}
    assert len(found) + len(widths) + 1 <= 32, "one is in step_time.py"
    for entry in found:
        assert entry["interval"][0] <= entry["value"] <= entry["interval"][1]
        assert entry["rows"] > 0 or entry["fitted"] is False, entry


def test_products_in_full_fp32_are_as_slow_as_the_datasheet_says():
    """A100: 156 TFLOP/s in TF32, 19.5 in fp32. A T4 has no TF32, and products in 16 bits need none."""
    for gpu, precision, slower in (("A100-80GB", "fp32", 8), ("T4", "fp32", 1), ("A100-80GB", "bf16", 1)):
        one = training("ddp", micro_batch=16, precision=precision)
        tf32, full = (step_time(one, Hardware(gpu=GPUS[gpu], tf32=is_on)).parts["products"] for is_on in (True, False))
        assert full / tf32 == pytest.approx(slower, rel=0.01)


# --- adapters, quantized weights and weights that are fetched again --------------------------------------------------


def test_quantized_weights_are_made_whole_before_each_product():
    """QLoRA (arXiv 2305.14314, section 3): scales that are quantized take 0.127 bits a parameter instead of 0.5."""
    assert 8 * QUANTIZED_BYTES["nf4"] == 4.5
    assert 8 * QUANTIZED_BYTES["nf4_double"] == pytest.approx(4.127, abs=0.0005)
    adapted = named("bert-tiny", lora_rank=8)
    plain = training("ddp", adapted, precision="bf16", frozen="bf16", sequence=128, checkpointing=True)
    packed = replace(plain, quantized="nf4")
    width, inner = adapted.dimensions["hidden_size"], adapted.dimensions["intermediate_size"]
    linear = 2 * (4 * width**2 + 2 * width * inner)
    saved = estimate(plain).at_peak["weights"] - estimate(packed).at_peak["weights"]
    assert saved == pytest.approx(linear * (2 - 4.5 / 8), abs=1)
    forward, backward = (work(packed, phase).dequantized_bytes for phase in PHASES)
    assert forward == linear * (4.5 / 8 + 2)
    assert backward == 2 * forward, "the forward pass comes again"


def limited(reuse: int, rank: int | None = None, ranks: int = 8, **more) -> Training:
    """Stage 3 that keeps what is used again within so many elements, of which a billion may be fetched ahead."""
    limits = {"stage3_max_reuse_distance": reuse}
    return training("zero3", named("llama3-8b", lora_rank=rank), limits | more, micro_batch=1, ranks=ranks)


def test_frozen_weights_count_among_those_that_are_gathered_again():
    adapters = limited(12 * 10**9, rank=8)
    forward, backward, _ = step_time(adapters, H100).phases
    again = engine_of(adapters).refetched / engine_of(adapters).all_elements
    assert backward.link_s == pytest.approx(again * forward.link_s, rel=0.02)
    assert 0 < again < 0.5


def test_weights_that_stay_on_the_gpu_are_not_fetched_from_the_host_again():
    """Stage 3 with offload_param uploads what it gathers: all for the forward pass, the rest for the backward."""
    stay, fetched = (limited(reuse, ranks=1, offload_param={"device": "cpu"}) for reuse in (10**11, 0))
    assert link_s(stay, H100) < 0.7 * link_s(fetched, H100)


def test_bytes_of_an_update():
    """By hand: 9 elements of AdamW's; with a master copy, its gradient is copied to fp32, and its weight is rounded."""
    by_hand = {"fp32": 36, "bf16": 36, "fp16": 36, "bf16_cast": 42, "bf16_pure": 18}
    assert {name: update_bytes(training("ddp", precision=name)) for name in by_hand} == by_hand


def test_rows_that_pad_the_parts_of_fsdp2_are_sent():
    """A matrix of 1,024 rows is gathered as one of 8,192 on as many ranks."""
    assert estimate(training("fsdp2", ranks=8192)).traffic["all_gather"] > 20 * MEDIUM.parameters


GATHERED = {"all_gather": 1.0, "reduce_scatter": 1.0}


@pytest.mark.parametrize(
    ("arm", "ranks", "placement", "between"),
    [
        ("zero3", 16, {}, {}),
        ("zero3_hpz", 16, {"second_partition": 8}, GATHERED),  # the backward pass has the node's copy
        ("zero3_hpz", 8, {}, {}),
        ("hsdp", 16, {"group": 8}, {"all_reduce": 1 / 8}),  # of a rank's part of the gradients
        ("hsdp", 8, {"group": 4}, {}),
    ],
)
def test_what_goes_between_nodes_by_hand(arm, ranks, placement, between):
    """In shares of all weights. Of ranks that are all alike, or in one node, nothing is told apart."""
    prediction = Prediction.of(placed(training(arm, named("gpt2-xl"), ranks=ranks), **placement))
    sent, inside = Counter(prediction.memory.traffic), prediction.inside_nodes(H100)
    rest = (sent - Counter(inside)) if inside else {}
    shares = {kind: size / (2 * named("gpt2-xl").parameters) for kind, size in rest.items()}
    assert shares == pytest.approx(between, rel=0.02)
    needs = estimates.Needs.of(
        arms.load_arm(arm), "bf16_cast", True, prediction.engine.training, None, H100.gpus_per_node
    )
    assert needs.inside_nodes == inside, "whatever the kind of GPU"
    said = estimates.collectives(sent, inside)
    assert ("between nodes" in said, "inside nodes" in said) == (bool(between), bool(between))
