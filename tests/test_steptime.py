"""The time of a step: by hand, by physical limits, and by its constants and their fit."""

import random
from dataclasses import replace

import fit
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.shapes import config_of
from study.predict.architecture import named
from study.predict.estimate import estimate, operations
from study.predict.memory.engine import Engine
from study.predict.setup import QUANTIZED_BYTES, Setup
from study.predict.step_time import (
    Links,
    Machine,
    Product,
    class_of,
    constants,
    pace,
    peak_flops_per_s,
    step_time,
    update_bytes,
    work,
)
from study.predict.trace.transformer import Transformer

A100 = Machine(gpu="A100-80GB")
H100 = Machine(gpu="H100-80GB")
MEDIUM = named("gpt2-medium")


def setup(arm: str = "zero2", model=MEDIUM, **values) -> Setup:
    usual = {"precision": "bf16_cast", "micro_batch": 4, "sequence": 512, "device": "cuda", "ranks": 8}
    return Setup.of_arm(model, arm, **usual | values)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_ring_by_hand():
    """(N - 1) / N of the tensor goes over the slowest link. An all-reduce goes round twice."""
    links, of = Links(16, 8, "nvlink3", "ib-hdr"), pace()
    bandwidth = min(300e9 * of.link, 8 * 25e9 * of.network)
    assert links.seconds("all_gather", 1e9, of) == pytest.approx(15 / 16 * 1e9 / bandwidth)
    assert links.seconds("all_reduce", 1e9, of) == pytest.approx(2 * 15 / 16 * 1e9 / bandwidth)
    assert Links(1, 8, "nvlink3", "ib-hdr").seconds("all_gather", 1e9, of) == 0
    assert (links.within(8).are_slow, links.are_slow) == (False, True)
    assert (links.between(8).ranks, links.between(8).gpus_per_node) == (2, 1)
    assert (links.between(4).ranks, links.between(4).gpus_per_node) == (4, 2)


def test_the_work_of_a_pass_by_hand():
    """A BERT layer: four products of width x width, two of width x 4 width; backward takes two for each."""
    tiny = setup("ddp", named("bert-tiny"), sequence=128)
    tokens, width = 4 * 128, named("bert-tiny").dimensions["hidden_size"]
    square, wide = Product(1, tokens, width, width), Product(1, tokens, 4 * width, width)
    forward, backward = (work(tiny)[phase] for phase in ("forward", "backward"))
    layers = named("bert-tiny").dimensions["num_hidden_layers"]
    assert forward.products[square] >= 4 * layers
    assert forward.products[wide] == layers
    flops = [sum(count * each.flops for each, count in passes.products.items()) for passes in (forward, backward)]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.1)


def test_a_step_is_its_phases_and_no_shorter_than_its_busiest_resource():
    for arm in ("ddp", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu"):
        step = step_time(setup(arm, accumulation=2), A100)
        assert step.seconds == pytest.approx(sum(phase.seconds for phase in step.phases))
        assert max(step.parts.values()) <= step.seconds
        assert ("_cpu" in arm) == ("update on host" in step.parts)


def test_stage_2_reduces_in_each_pass_and_ddp_once():
    """Further passes add a reduction each in stage 2, and none in DDP."""
    sent = {}
    for arm in ("ddp", "zero1", "zero2"):
        for passes in (1, 4):
            sent[arm, passes] = step_time(setup(arm, accumulation=passes), A100).parts["link"]
    assert sent["ddp", 4] == pytest.approx(sent["ddp", 1])
    reduced = sent["zero2", 4] - sent["zero2", 1]
    gathered = sent["zero1", 1] - sent["ddp", 1]  # stages 1 and 2 gather the new weights once a step
    assert sent["zero2", 1] - gathered == pytest.approx(reduced / 3)


# --- limits --------------------------------------------------------------------------------------------------------


def test_never_above_the_peak():
    """Five trainings of each of twelve models: a model that is not known takes a second to trace."""
    chance = random.Random(7)
    for _ in range(12):
        heads = chance.choice([8, 16, 64, 128])
        sizes = {"n_layer": chance.randint(1, 6), "n_head": heads, "n_embd": heads * chance.choice([64, 128, 256])}
        config = config_of("gpt2") | sizes | {"vocab_size": chance.choice([512, 50257, 256000])}
        model = Transformer.of(config, "drawn")
        sequence, checkpointing = 2 ** chance.randint(5, 10), chance.random() < 0.5
        precision = chance.choice(["bf16_cast", "bf16", "fp32"])
        for _ in range(5):
            gpu, arm = chance.choice(list(GPUS)), chance.choice(["ddp", "zero1", "zero2", "zero3", "single"])
            ranks, rows = chance.choice([1, 2, 8, 64]), 2 ** chance.randint(0, 7)
            values = {"ranks": ranks, "micro_batch": rows, "sequence": sequence, "precision": precision}
            assert_below_the_peak(gpu, setup(arm, model, checkpointing=checkpointing, **values))


def assert_below_the_peak(gpu: str, each: Setup) -> None:
    peak = peak_flops_per_s(gpu, each.precision == "fp32")  # a GeForce was measured above its datasheet
    step = step_time(each, Machine(gpu=gpu))
    assert operations(each) / step.seconds < peak, (gpu, each)
    hidden = sum(passes.attention_flops for passes in work(each).values()) / 2
    assert (operations(each) - hidden * each.accumulation) / step.low_s <= peak * (1 + 1e-9)
    assert step.low_s < step.seconds < step.high_s


def test_faster_machines_are_faster():
    step_s = {name: step_time(setup(micro_batch=16), Machine(gpu=name)).seconds for name in ("T4", "A100-80GB", "H200")}
    assert step_s["T4"] > step_s["A100-80GB"] > step_s["H200"]
    fused = step_time(setup(micro_batch=16), replace(A100, fused_kernels=True))
    assert fused.seconds < step_s["A100-80GB"]
    slow = Machine(gpu="A100-80GB", link="pcie3")
    assert step_time(setup("ddp"), slow).seconds > step_time(setup("ddp"), A100).seconds


def test_no_interval_excludes_its_prediction():
    """A causal mask hides half of the scores, and products of 8 bits have twice the peak."""
    rows = setup("ddp", named("llama3-8b"), micro_batch=1, sequence=4096)
    in_16, in_8 = (step_time(rows, replace(H100, products_8_bits=is_on)).peak_s for is_on in (False, True))
    assert in_8 == pytest.approx(in_16 / 2)
    hidden = sum(passes.attention_flops for passes in work(rows).values()) / 2
    assert in_16 == pytest.approx((operations(rows) - hidden) / peak_flops_per_s(H100.gpu, False))


def test_groups_gather_inside_a_node_and_reduce_between_nodes():
    """16 ranks in two nodes: a group of 8 stays inside its node, but its parts of the gradients leave it."""
    whole = replace(setup("ddp", ranks=16), fsdp="full_shard")
    machine = Machine(gpu="A100-80GB", network="eth-25")
    grouped = replace(whole, group=8)
    parts = [step_time(each, machine).parts["link"] for each in (whole, grouped)]
    assert parts[1] < parts[0], "on a slow network"
    held = [estimate(each) for each in (whole, grouped)]
    assert held[1].at_peak["moments"] == pytest.approx(2 * held[0].at_peak["moments"], rel=1e-3)
    assert held[1].traffic["all_reduce"] == held[0].traffic["reduce_scatter"] // 8


def test_a_second_partition_spares_the_network_in_the_backward_pass_and_takes_memory():
    """hpZ: 2 bytes of each released parameter, over the ranks of a node. By default a billion are not released."""
    large = named("gpt2-xl")  # more than stay gathered for the backward pass
    plain = setup("zero3", large, ranks=16)
    hpz = replace(
        plain, deepspeed={"zero_optimization": plain.deepspeed["zero_optimization"] | {"zero_hpz_partition_size": 8}}
    )
    machine = Machine(gpu="A100-80GB", network="eth-25")
    assert step_time(hpz, machine).parts["link"] < step_time(plain, machine).parts["link"]
    more = estimate(hpz).at_peak["weights"] - estimate(plain).at_peak["weights"]
    assert more == pytest.approx(2 * (large.parameters - 1e9) / 8, rel=0.2)
    release = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    all_of_it = replace(hpz, deepspeed={"zero_optimization": hpz.deepspeed["zero_optimization"] | release})
    more = estimate(all_of_it).at_peak["weights"] - estimate(plain).at_peak["weights"]
    assert more == pytest.approx(2 * large.parameters / 8, rel=1e-3)


def test_groups_divide_the_ranks_that_are_sharded():
    with pytest.raises(Stop, match="8 ranks do not shard states in groups of 3"):
        replace(setup("ddp"), fsdp="full_shard", group=3)


def test_python_works_for_the_units_of_fsdp_and_the_modules_of_stage_3():
    """A unit of FSDP is a layer, in both passes. One kernel's time of the host is given."""
    machine = replace(A100, kernel_s=1.0)
    plain, sharded, modules = (
        step_time(each, machine).parts["launching"]
        for each in (setup("ddp"), replace(setup("ddp"), fsdp="full_shard"), setup("zero3"))
    )
    assert sharded - plain == pytest.approx(2 * 24 * pace().unit_kernels)
    assert modules > sharded, "a layer has several modules"
    assert "launching" not in step_time(setup("ddp"), replace(A100, kernel_s=0.0)).parts


def test_products_in_full_fp32_are_as_slow_as_the_datasheet_says():
    """A100: 156 TFLOP/s in TF32, 19.5 in fp32. A T4 has no TF32, and products in 16 bits need none."""
    for gpu, precision, slower in (("A100-80GB", "fp32", 8), ("T4", "fp32", 1), ("A100-80GB", "bf16", 1)):
        one = setup("ddp", micro_batch=16, precision=precision)
        machines = (Machine(gpu=gpu), Machine(gpu=gpu, tf32=False))
        tf32, full = (step_time(one, each).parts["products"] for each in machines)
        assert full / tf32 == pytest.approx(slower, rel=0.01)


# --- constants, and what they were fitted on -----------------------------------------------------------------------


def test_each_constant_has_an_origin_and_an_interval_and_there_are_25():
    known = constants()
    entries = [entry for kind in known.values() for entry in kind.values()]
    assert len(entries) <= 25
    for entry in entries:
        assert entry["origin"]
        low, high = entry["interval"]
        assert low <= entry["value"] * 1.001
        assert entry["value"] <= high * 1.001
    assert class_of("products", "A6000") == "workstation"
    assert {gpu for entry in known["products"].values() for gpu in entry["gpus"]} <= set(GPUS)


def test_the_fit_finds_constants_from_rows():
    """The rows are made with a slower host and slower products than the fit starts from."""
    true = fit.changed(pace(), {("kernel_s", None): 3.2e-5, ("products", "ampere"): 0.7})
    rows = []
    for model in ("gpt2", "gpt2-medium", "bert-large"):
        for rows_of_a_pass in (1, 4, 16):
            each = setup("ddp", named(model), micro_batch=rows_of_a_pass)
            rows += [fit.Timed(f"{model} {n}", 0, step_time(each, A100, true).seconds, each, A100) for n in range(4)]
    found = fit.fit(rows, pace())
    assert found.kernel_s == pytest.approx(true.kernel_s, rel=0.1)
    predicted = [step_time(each.setup, A100, found).seconds / each.seconds for each in rows]
    assert predicted == pytest.approx([1.0] * len(rows), rel=0.05)


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels read and write; numbers of one element are left out."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        written = args[:1] if function.__name__.split(".")[0].endswith("_") else made
        tensors = [each for each in tree_leaves((args, kwargs, written)) if isinstance(each, torch.Tensor)]
        self.total += sum(each.nbytes for each in tensors if each.numel() > 1)
        return made


def test_foreach_moves_three_times_the_bytes_of_the_fused_update():
    """The fused kernel reads gradient, weight and two moments, and writes all but the gradient."""
    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = torch.optim.AdamW([weight], foreach=True, weight_decay=0.01)
    for _ in range(2):
        weight.grad = torch.randn(64)
        with Traffic() as traffic:
            optimizer.step()
    each = setup("ddp", precision="fp32")
    more = update_bytes(replace(each, optimizer="foreach")) - update_bytes(each)
    assert traffic.total / 64 - 7 * 4 == more == 56
    updates = [step_time(replace(each, optimizer=name), A100).parts["update"] for name in ("fused", "foreach")]
    moved = [update_bytes(replace(each, optimizer=name)) for name in ("fused", "foreach")]
    assert updates[1] / updates[0] == pytest.approx(moved[1] / moved[0] / pace().separate_update)


def test_quantized_weights_are_made_whole_before_each_product():
    """QLoRA (arXiv 2305.14314, section 3): scales that are quantized take 0.127 bits a parameter instead of 0.5."""
    assert 8 * QUANTIZED_BYTES["nf4"] == 4.5
    assert 8 * QUANTIZED_BYTES["nf4_double"] == pytest.approx(4.127, abs=0.0005)
    adapted = replace(named("bert-tiny"), lora_rank=8)
    plain = setup("ddp", adapted, precision="bf16", frozen="bf16", sequence=128, checkpointing=True)
    packed = replace(plain, quantized="nf4")
    linear = sum(map(packed.packed_elements, adapted.tensors))
    layer = adapted.dimensions["hidden_size"], adapted.dimensions["intermediate_size"]
    assert linear == 2 * (4 * layer[0] ** 2 + 2 * layer[0] * layer[1])
    saved = estimate(plain).at_peak["weights"] - estimate(packed).at_peak["weights"]
    assert saved == pytest.approx(linear * (2 - 4.5 / 8), abs=1)
    forward, backward = (work(packed)[phase].dequantized_bytes for phase in ("forward", "backward"))
    assert forward == linear * (4.5 / 8 + 2)
    assert backward == 2 * forward, "the forward pass comes again"
    with pytest.raises(Stop, match="quantized weights do not train"):
        replace(packed, model=named("bert-tiny"))


def test_without_autocast_only_products_of_quantized_weights_are_in_16_bits():
    """Adapters, attention and the head compute in fp32, which a T4 does at 8.1 TFLOP/s instead of 65."""
    adapted = replace(named("gpt2"), lora_rank=8)
    whole = setup("ddp", adapted, precision="fp32", sequence=128)
    packed = replace(whole, quantized="nf4")
    kinds = (packed, whole, replace(packed, precision="bf16", frozen="as_weights"))
    parts, of_whole, of_half = (step_time(each, Machine(gpu="T4", kernel_s=0.0)).parts for each in kinds)
    assert of_half["products"] < parts["products"] < of_whole["products"]
    assert parts["attention"] == of_whole["attention"] > of_half["attention"]


def test_adapters_are_where_they_are_wanted():
    model = replace(named("gpt-tiny"), lora_rank=4, lora_targets=("c_attn",))
    width = model.dimensions["n_embd"]
    assert model.trained == model.dimensions["n_layer"] * 4 * (width + 3 * width)
    with pytest.raises(Stop, match="no linear layer named q_proj"):
        replace(model, lora_targets=("c_attn", "q_proj")).trained  # noqa: B018


def limited(live: int, **more) -> Setup:
    """Return stage 3 with this limit of gathered elements."""
    known = setup("zero3", named("llama3-8b"), micro_batch=1, **more)
    zero = known.deepspeed["zero_optimization"]
    limits = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    return replace(known, deepspeed=known.deepspeed | {"zero_optimization": zero | limits})


def test_frozen_weights_count_among_those_that_are_gathered_again():
    known = limited(7 * 10**9)
    adapters = replace(known, model=named("llama3-8b", lora_rank=8))
    for each in (known, adapters):
        engine = Engine(each)
        forward, backward, _ = step_time(each, H100).phases
        reduced = 0 if each is adapters else forward.link_s
        again = engine.refetched / engine.all_elements
        assert backward.link_s == pytest.approx(again * forward.link_s + reduced, rel=0.02)
    assert 0 < Engine(adapters).refetched < Engine(adapters).all_elements / 2


def test_weights_that_stay_on_the_gpu_are_not_fetched_from_the_host_again():
    """Stage 3 with offload_param uploads what it gathers: all for the forward pass, the rest for the backward."""

    def on_link(live: int) -> float:
        known = limited(live, ranks=1)
        zero = known.deepspeed["zero_optimization"] | {"offload_param": {"device": "cpu"}}
        whole = replace(known, deepspeed=known.deepspeed | {"zero_optimization": zero})
        return step_time(whole, H100).parts["link"]

    assert on_link(10**11) < 0.7 * on_link(0)


def test_a_step_waits_for_the_slower_of_host_and_disk():
    known = setup("zero3_nvme", named("llama3-8b"), micro_batch=1)
    without, fast = (step_time(known, replace(H100, disk_bytes_per_s=speed)) for speed in (None, 1e13))
    assert fast.seconds == pytest.approx(without.seconds, rel=1e-3)
    assert fast.seconds >= without.seconds
