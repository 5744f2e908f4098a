"""The time of a step: replays checked by hand, physical limits, and the rows that constants were fitted to."""

import random
from dataclasses import replace

import fit
import numpy as np
import pytest
import scipy.stats
import torch
from fit import timed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.cli import steps
from study.cli.steps import Training, explained, lanes, timeline
from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.architecture import named
from study.predictor.estimate import estimate, operations
from study.predictor.library import Library
from study.predictor.memory.engine import Engine
from study.predictor.outside import published, scores
from study.predictor.outside.predicting import of_row
from study.predictor.setup import QUANTIZED_BYTES, Setup
from study.predictor.timing import pace
from study.predictor.timing.machine import Links, collective_s
from study.predictor.timing.pace import filled
from study.predictor.timing.replay import Task, busy_s, length_s, replay
from study.predictor.timing.schedule import Schedule, update_bytes
from study.predictor.timing.steptime import Machine, step_time
from study.predictor.timing.work import Product, Work, blocks
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted
from study.spec.shapes import config_of

A100 = Machine(gpu="A100-80GB")
H100 = Machine(gpu="H100-80GB")
MEDIUM = named("gpt2-medium")


def setup(arm: str = "zero2", model=MEDIUM, **values) -> Setup:
    usual = {"precision": "bf16_cast", "micro_batch": 4, "sequence": 512, "device": "cuda", "ranks": 8}
    return Setup.of_arm(model, arm, **usual | values)


# --- the replay ----------------------------------------------------------------------------------------------------


def test_three_layers_by_hand():
    """Weights are gathered a layer ahead: 2 s each, beside 3 s of computation. Nothing hides the first gather.

    gather  0-2, 2-4, then waits for the second layer's turn: 5-7
    compute       2-5, 5-8, 8-11
    """
    tasks = [
        Task("gather 0", "communication", 2),
        Task("gather 1", "communication", 2),
        Task("layer 0", "compute", 3, after=(0,)),
        Task("gather 2", "communication", 2, after=(2,)),
        Task("layer 1", "compute", 3, after=(1, 2)),
        Task("layer 2", "compute", 3, after=(3, 4)),
    ]
    spans = replay(tasks)
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 2), (2, 4), (2, 5), (5, 7), (5, 8), (8, 11)]
    assert length_s(spans) == 11
    assert busy_s(spans)["communication"] == 6


def test_kernels_run_no_earlier_than_they_are_launched():
    """With a slow host, each pass ends with its last launch. A fast host runs ahead, and the GPU decides."""
    for launch_s, ends in ((4, [4, 8]), (1, [3, 6])):
        tasks = []
        for layer in range(2):
            tasks.append(Task(f"launch {layer}", "launch", launch_s))
            tasks.append(Task(f"layer {layer}", "compute", 3, launched_by=2 * layer))
        assert [span.end_s for span in replay(tasks) if span.task.stream == "compute"] == ends


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu"])
def test_overlap_has_bounds(arm):
    """A step is no shorter than its busiest stream, and no longer than all streams one after another."""
    step = step_time(setup(arm, accumulation=2), A100)
    busy = busy_s(step.timeline)
    assert max(busy.values()) <= step.seconds <= sum(busy.values()) + 1e-9
    assert ("_cpu" in arm) == bool(busy["host"])


def test_further_passes_take_as_long_as_one_in_the_middle(monkeypatch):
    shorter = step_time(setup(accumulation=6), A100)
    monkeypatch.setattr("study.predictor.timing.steptime.MOST_PASSES", 6)
    whole = step_time(setup(accumulation=6), A100)
    assert len(whole.timeline) > len(shorter.timeline)
    assert shorter.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert shorter.parts == pytest.approx(whole.parts)


# --- published rows ---------------------------------------------------------------------------------------------------


def test_a_row_of_each_kind_has_its_stored_prediction():
    """Every part of the model of time stands in one of them."""
    names = ("source", "arm", "recompute", "adapter", "quantized", "products", "fused_kernels", "attention_kernel")
    stored = {(each.key, each.quantity): each for each in scores.numbers()}
    kinds = {tuple(getattr(row, name) for name in names): row for row in published.known() if row.step_s}
    assert len(kinds) > 100
    for row in kinds.values():
        predicted, kept = of_row(row)[0].get("time"), stored[row.key, "time"].ours
        assert kept == (predicted and pytest.approx(predicted.value, rel=1e-5)), row


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
    peak = pace.peak_flops_per_s(gpu, each.precision == "fp32")  # a GeForce was measured above its datasheet
    step = step_time(each, Machine(gpu=gpu))
    assert operations(each) / step.seconds < peak, (gpu, each)
    hidden = sum(block.forward.attention_flops + block.backward.attention_flops for block in blocks(each)) / 2
    assert (operations(each) - hidden * each.accumulation) / step.low_s <= peak * (1 + 1e-9)
    assert step.low_s < step.seconds < step.high_s


def test_faster_machines_are_faster():
    step_s = {name: step_time(setup(micro_batch=16), Machine(gpu=name)).seconds for name in ("T4", "A100-80GB", "H200")}
    assert step_s["T4"] > step_s["A100-80GB"] > step_s["H200"]
    fused = step_time(setup(micro_batch=16), replace(A100, fused_kernels=True))
    assert fused.seconds < step_s["A100-80GB"]
    slow = Machine(gpu="A100-80GB", link="pcie3")
    assert step_time(setup("ddp"), slow).seconds > step_time(setup("ddp"), A100).seconds


def test_a_ring_by_hand():
    """NCCL's latencies along the ring, plus (N - 1) / N of the tensor. An all-reduce goes round twice."""
    links, constants = Links(16, 8, "nvlink3", "ib-hdr"), pace.pace()
    bandwidth = min(300e9 * constants.link_share, 8 * 25e9 * constants.network_share)
    latency = 8.4e-6 + 14 * 3.4e-6 + 9.6e-6
    assert collective_s("all_gather", 1e9, links, constants) == pytest.approx(latency + 15 / 16 * 1e9 / bandwidth)
    twice = 8.4e-6 + 2 * (14 * 3.4e-6 + 9.6e-6) + 2 * 15 / 16 * 1e9 / bandwidth
    assert collective_s("all_reduce", 1e9, links, constants) == pytest.approx(twice)
    assert collective_s("all_gather", 1e9, Links(1, 8, "nvlink3", "ib-hdr"), constants) == 0


def test_a_product_takes_as_long_as_its_operations_or_its_bytes():
    """Memory limits the scores of a head of 64; operations limit a product of large matrices."""
    constants, a100 = pace.pace(), GPUS["A100-80GB"]
    scores, large = Product(128, 512, 512, 64), Product(1, 8192, 8192, 8192)
    seconds = {
        each: pace.work_s(Work((each,)), "A100-80GB", False, False, constants).products for each in (scores, large)
    }
    bytes_s = 2 * 128 * (2 * 512 * 64 + 512 * 512) / a100.memory_bytes_per_s
    assert seconds[scores] == pytest.approx(bytes_s / constants.moving_share)
    reached = pace.ceilings("A100-80GB")["products"][0] * constants.product_share * filled(large, 108)
    assert seconds[large] == pytest.approx(2 * 8192**3 / (a100.half_flops_per_s * reached))


@pytest.mark.parametrize(("rows", "sequence", "measured_s"), [(8, 512, 9.14e-3), (96, 128, 18.43e-3)])
def test_a_layer_of_bert_on_a_v100_takes_what_was_published(rows, sequence, measured_s):
    """spcl/substation, README: PyTorch, both passes. Both measurements decide the reached share of the bandwidth."""
    bert = Setup(
        model=named("bert-large"), micro_batch=rows, sequence=sequence, precision="bf16_cast", attention="eager"
    )
    layer = next(block for block in blocks(replace(bert, device="cuda")) if block.name == "layer.3")
    passes = [pace.work_s(each, "V100-32GB", False, False, pace.pace()) for each in (layer.forward, layer.backward)]
    assert sum(each.products + each.moving for each in passes) == pytest.approx(measured_s, rel=0.05)
    moving_s = [pace.work_s(layer.forward, gpu, False, False, pace.pace()).moving for gpu in ("V100-32GB", "A100-80GB")]
    assert moving_s[0] / moving_s[1] > 2039 / 900, "other GPUs have the share that is fitted"


# --- groups of ranks -----------------------------------------------------------------------------------------------


def test_groups_gather_inside_a_node_and_reduce_between_nodes():
    """16 ranks in two nodes: a group of 8 stays inside its node, but its parts of the gradients leave it."""
    links = Links(16, 8, "nvlink3", "ib-hdr")
    assert (links.within(8).nodes, links.within(None)) == (1, links)
    assert (links.between(8).ranks, links.between(8).nodes) == (2, 2)
    assert (links.between(4).ranks, links.between(4).gpus_per_node) == (4, 2)
    whole = replace(setup("ddp", ranks=16), fsdp="full_shard")
    machine = Machine(gpu="A100-80GB", network="eth-25")
    grouped = replace(whole, group=8)
    kinds = [
        {s.task.name.partition(" ")[0] for s in step_time(each, machine).timeline if s.task.stream == "communication"}
        for each in (whole, grouped)
    ]
    assert kinds == [{"all_gather", "reduce_scatter"}, {"all_gather", "reduce_scatter", "all_reduce"}]
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


@pytest.mark.parametrize("change", [{"group": 3}, {"group": 4, "fsdp": None}, {"group": 0}])
def test_groups_divide_the_ranks_that_are_sharded(change):
    with pytest.raises(Stop, match="are not sharded in groups"):
        replace(setup("ddp"), **{"fsdp": "full_shard"} | change)


def hosts_s(**values) -> float:
    """Return the host's seconds of a step."""
    return busy_s(step_time(setup(**values), replace(A100, host_pace=1.0)).timeline)["launch"]


def test_python_works_for_the_units_of_fsdp_and_the_gradients_of_stages_1_and_2():
    """Units are layers, in both passes. A tensor's gradient is reduced once a pass, or in stage 1 once a step."""
    constants, layers, tensors = pace.pace(), 24, len(MEDIUM.tensors)
    alone = hosts_s(arm="single", optimizer="foreach") - constants.tensor_s * tensors
    assert hosts_s(arm="single") == pytest.approx(alone), "one kernel updates all"
    stage2 = [hosts_s(arm="zero2", accumulation=passes) for passes in (1, 2)]
    assert stage2[0] == pytest.approx(alone + constants.gradient_s * tensors)
    assert stage2[1] == pytest.approx(2 * stage2[0])
    assert hosts_s(arm="zero1", accumulation=2) == pytest.approx(2 * alone + constants.gradient_s * tensors)
    fsdp1 = replace(setup("ddp"), fsdp="full_shard", library=Library(fsdp_views=True))
    launches = busy_s(step_time(fsdp1, replace(A100, host_pace=1.0)).timeline)["launch"]
    assert launches == pytest.approx(alone + 2 * layers * constants.unit_s)


def test_products_in_full_fp32_are_as_slow_as_the_datasheet_says():
    """A100: 156 TFLOP/s in TF32, 19.5 in fp32. A T4 has no TF32, and products in 16 bits need none."""
    for gpu, precision, slower in (("A100-80GB", "fp32", 8), ("T4", "fp32", 1), ("A100-80GB", "bf16", 1)):
        one = setup("ddp", micro_batch=16, precision=precision)
        machines = (Machine(gpu=gpu), Machine(gpu=gpu, tf32=False))
        tf32, full = (step_time(one, each).parts["products"] for each in machines)
        assert full / tf32 == pytest.approx(slower, rel=0.01)


# --- constants, and what they were fitted on -----------------------------------------------------------------------


def test_the_fit_finds_constants_from_rows():
    """The rows are made with a slower host and slower products than the fit starts from."""
    true = replace(pace.pace(), product_share=0.7, kernel_s=8e-5)
    chosen = [each for each in timed(newest=False) if "vTrain" in each[0].row.source][::12]
    rows = []
    for training, machine in chosen:
        seconds = step_time(training.setup, machine, true).seconds
        rows.append((replace(training, row=training.row.model_copy(update={"step_time_s": seconds})), machine))
    constants = fit.fit(rows, ["product_share", "kernel_s"], pace.pace())
    assert constants.product_share == pytest.approx(0.7, rel=0.01)
    assert constants.kernel_s == pytest.approx(8e-5, rel=0.01)


def test_the_newest_set_is_not_fitted():
    """No row of its sources is in the fit."""
    fitted, held = ({t.row.source for t, _ in timed(newest=newest)} for newest in (False, True))
    assert fitted
    assert held
    assert not fitted & held


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
    assert updates[1] / updates[0] == pytest.approx(moved[1] / moved[0] / pace.pace().update_share)


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
    for before, after in zip(blocks(plain), blocks(packed), strict=True):
        once = after.forward.lasting_bytes - before.forward.lasting_bytes
        assert once == (linear / 2 * (4.5 / 8 + 2) if after.is_layer else 0)
        assert after.backward.lasting_bytes - before.backward.lasting_bytes == 2 * once
    scales = replace(packed, quantized="nf4_double")
    more = [a.forward.kernels - b.forward.kernels for a, b in zip(blocks(scales), blocks(packed), strict=True)]
    assert sorted(set(more)) == [0, 2 * 6], "a layer's six: their values, and an offset"
    layer, plain_layer = (next(each for each in blocks(one) if each.is_layer) for one in (packed, plain))
    more = [getattr(layer, each).python_kernels for each in ("forward", "backward")]
    assert more == [(7 - 1) * 6, (7 - 1 + 4 - 1) * 6], (
        "beside the kernel that dequantizes; the forward pass comes again"
    )
    assert plain_layer.forward.python_kernels == 0
    with pytest.raises(Stop, match="quantized weights do not train"):
        replace(packed, model=named("bert-tiny"))


def test_without_autocast_only_products_of_quantized_weights_are_in_16_bits():
    """Adapters, attention and the head compute in fp32, which a T4 does at 8.1 TFLOP/s instead of 65."""
    adapted = replace(named("gpt2"), lora_rank=8)
    whole = setup("ddp", adapted, precision="fp32", sequence=128)
    packed = replace(whole, quantized="nf4")
    layer, head = ([each.element_bytes for each in block.forward.products] for block in blocks(packed)[-2:])
    assert sorted(layer) == 4 * [2] + 8 * [4], "two of an adapter beside each quantized one"
    assert head == [4]
    t4 = Machine(gpu="T4", host_pace=0.0)
    parts, of_whole, of_half = (
        step_time(each, t4).parts for each in (packed, whole, replace(packed, precision="bf16", frozen="as_weights"))
    )
    assert of_half["products"] < parts["products"] < of_whole["products"]
    assert parts["attention"] == of_whole["attention"] > of_half["attention"]
    assert pace.product_flops_per_s("T4", True) == pytest.approx(4.35e12, rel=0.001)


def test_adapters_are_where_they_are_wanted():
    model = replace(named("gpt-tiny"), lora_rank=4, lora_targets=("c_attn",))
    width = model.dimensions["n_embd"]
    assert model.trained == model.dimensions["n_layer"] * 4 * (width + 3 * width)
    with pytest.raises(Stop, match="no linear layer named q_proj"):
        replace(model, lora_targets=("c_attn", "q_proj")).trained  # noqa: B018


def flops(work: Work) -> float:
    return sum(product.flops for product in work.products) + work.attention_flops


def test_a_loop_over_experts_launches_kernels_and_gathers_modules_one_by_one():
    grouped = setup("zero2", named("mixtral-micro"), sequence=64)
    looped = replace(grouped, library=Library(experts_loop=True))
    layer, loop = (next(each for each in blocks(one) if each.name == "layer.0") for one in (grouped, looped))
    experts = named("mixtral-micro").dimensions["num_local_experts"]
    assert loop.forward.kernels - layer.forward.kernels == 10 * experts
    assert loop.modules_above(100) - layer.modules_above(100) == 3 * experts - 1
    assert (loop.elements, flops(loop.forward)) == (layer.elements, flops(layer.forward))
    launching = [step_time(each, A100).parts["launching"] for each in (looped, grouped)]
    constants, layers = pace.pace(), named("mixtral-micro").dimensions["num_hidden_layers"]
    more_s = 30 * experts * constants.kernel_s + (3 * experts - 2) * constants.gradient_s  # gate and up were one tensor
    assert launching[0] - launching[1] == pytest.approx(layers * more_s * constants.host_pace)


def test_every_second_layer_is_computed_again():
    """Whole layers: the forward passes of half of them come again, and hooks of the others run once."""
    whole_layers = Library(recomputes_whole_layers=True)
    none, half, whole = (blocks(setup("zero3", checkpointing=each, library=whole_layers)) for each in (0, 2, True))
    again = [
        [flops(a.backward) - flops(b.backward) for a, b in zip(every, none, strict=True)] for every in (half, whole)
    ]
    assert sum(again[0]) == pytest.approx(sum(again[1]) / 2)
    assert [setup(checkpointing=2).computes_again(name) for name in ("layer.2", "layer.1", "head")] == [
        True,
        False,
        False,
    ]


def of_others(values: list[float]) -> float:
    """Return the factor about their mean that has 80 % of others, by Student's t."""
    logarithms = np.log(values)
    spread = scipy.stats.t.ppf(0.9, len(values) - 1) * logarithms.std(ddof=1) * np.sqrt(1 + 1 / len(values))
    return float(np.exp(spread))


def test_the_share_of_pcie_is_that_of_machines_and_the_interval_has_its_spread():
    constants = pace.pace()
    older, newer = (
        [each["value"] for each in pace._read()["pcie"].values() if (each["link"] == "pcie5") == is_new]
        for is_new in (False, True)
    )
    assert np.exp(np.log(older).mean()) == pytest.approx(constants.pcie_share, abs=0.01)
    assert np.exp(np.log(newer).mean()) == pytest.approx(constants.pcie5_share, abs=0.01)
    assert of_others(older) == pytest.approx(constants.pcie_factor, abs=0.01)
    waits = setup("zero3", ranks=2)
    by_pcie, by_nvlink = (step_time(waits, Machine(gpu=gpu, host_pace=0.5)) for gpu in ("A100-PCIe-80GB", "A100-80GB"))
    slow = step_time(
        waits,
        Machine(gpu="A100-PCIe-80GB", host_pace=0.5),
        replace(constants, pcie_share=constants.pcie_share / constants.pcie_factor),
    )
    assert by_pcie.most_s == pytest.approx(slow.seconds)
    assert by_pcie.least_s < by_pcie.seconds
    assert by_nvlink.least_s == by_nvlink.seconds == by_nvlink.most_s
    alone = step_time(replace(waits, ranks=1), Machine(gpu="A100-PCIe-80GB", host_pace=0.5))
    assert alone.most_s == alone.seconds


# --- how wide the interval is --------------------------------------------------------------------------------------


def test_each_source_weighs_the_same_in_the_interval():
    """Of five sources, one has most rows. With a sixth, 80 % are more than the four that are within 10 %."""
    off = {name: np.log([1.05, 1.1]) for name in "abcd"} | {"e": np.log(np.full(1000, 1.5))}
    assert fit.factor(off.values()) == pytest.approx(1.5)
    assert fit.factor(list(off.values())[:4]) == pytest.approx(1.1), "four of four"
    assert fit.left_out(off) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 0}


def test_the_interval_goes_as_far_as_it_was_decided():
    step_of = {"small": "gpt2", "large": "gpt2-xl"}
    for size, name in step_of.items():
        step = step_time(setup("ddp", named(name), micro_batch=1), A100)
        factor = pace._read()["interval"][size]
        known = step_time(
            setup("ddp", named(step_of[size]), micro_batch=1), replace(A100, host_pace=pace.pace().host_pace)
        )
        assert (known.seconds, known.high_s) == pytest.approx((step.seconds, step.seconds * factor))
        assert known.low_s == pytest.approx(max(step.peak_s, step.seconds / factor))
        assert step.low_s <= known.low_s < known.high_s < step.high_s
        both = np.hypot(np.log(factor), np.log(step.most_s / step.seconds))
        assert step.high_s == pytest.approx(step.seconds * np.exp(both))


def test_a_kind_that_no_source_of_the_interval_has_gets_the_widest_one():
    widest = max(pace._read()["interval"].values())
    known = setup("ddp", named("gpt2-xl"), micro_batch=1)
    assert step_time(known, A100).factor == pytest.approx(pace._read()["interval"]["large"])
    assert step_time(known, replace(A100, casts="te")).factor == pytest.approx(widest)
    assert step_time(known, replace(A100, gpu="A10")).factor == pytest.approx(widest), "its ceiling is assumed"
    adapters = replace(known, model=replace(known.model, lora_rank=8))
    assert step_time(adapters, A100).factor == pytest.approx(widest)


def test_what_went_into_a_time_is_told_with_the_factor_of_its_interval():
    step = step_time(setup(), A100)
    by_name = {row["constant"]: row for row in explained(step, "A100-80GB")}
    assert set(pace.origins()) < set(by_name)
    assert float(by_name["interval"]["value"]) == pytest.approx(step.factor, rel=0.01)


# --- as it is shown ------------------------------------------------------------------------------------------------


def test_a_timeline_has_a_lane_for_each_stream(tmp_path, capsys):
    picture = tmp_path / "step.svg"
    links = steps.Links(gpu="A100")
    training = Training(arm="zero3", micro_batch=8)
    timeline(Wanted(model="gpt2"), training, steps.Kernels(), links, gpus=4, svg=picture)
    drawn = {line.split(" ")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"compute", "communication", "launch"} <= drawn
    assert picture.read_text().count("<svg") == 1
    lane = dict(line.split() for line in lanes(step_time(setup("ddp", micro_batch=32), A100).timeline))
    last_forward = lane["compute"].rindex("f")
    assert last_forward < lane["compute"].index("b")
    assert "r" not in lane["communication"][:last_forward], "gradients are reduced in the backward pass"


# --- groups of ranks, and parts of the work ------------------------------------------------------------------------


def busy(prediction, resource: str) -> float:
    return prediction.parts.get(resource, 0.0)


def test_no_interval_excludes_its_prediction():
    """A causal mask hides half of the scores, and products of 8 bits have twice the peak."""
    long_rows = setup("ddp", named("llama3-8b"), micro_batch=1, sequence=131_072, checkpointing=True)
    for gpu in ("A6000", "RTX4090"):
        step = step_time(long_rows, Machine(gpu=gpu, attention_kernel="fa2"))
        assert step.low_s < step.seconds < step.high_s
    rows = setup("ddp", named("llama3-8b"), micro_batch=1, sequence=4096)
    in_16, in_8 = (step_time(rows, replace(H100, casts=casts)).peak_s for casts in (None, "te"))
    assert in_8 == pytest.approx(in_16 / 2)
    hidden = sum(block.forward.attention_flops + block.backward.attention_flops for block in blocks(rows)) / 2
    assert in_16 == pytest.approx((operations(rows) - hidden) / pace.peak_flops_per_s(H100.gpu, False))


def limited(live: int, **more) -> Setup:
    """Return stage 3 with this limit of gathered elements."""
    known = setup("zero3", named("llama3-8b"), micro_batch=1, **more)
    zero = known.deepspeed["zero_optimization"]
    limits = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    return replace(known, deepspeed=known.deepspeed | {"zero_optimization": zero | limits})


def test_frozen_weights_count_among_those_that_are_gathered_again():
    known = limited(7 * 10**9)
    adapters = replace(known, model=named("llama3-8b", lora_rank=8))
    whole, few = (Engine(each) for each in (known, adapters))
    for engine in (whole, few):
        schedule = Schedule(engine.setup, H100, pace.pace(), {}, ())
        assert schedule.gathers_again == pytest.approx(engine.refetched / engine.all_elements, rel=1e-3)
    assert 0 < few.refetched < few.all_elements / 2


def test_weights_that_stay_on_the_gpu_are_not_fetched_from_the_host_again():
    """Stage 3 with offload_param uploads what it gathers: all for the forward pass, the rest for the backward."""

    def on_link(live: int) -> float:
        known = limited(live)
        zero = known.deepspeed["zero_optimization"] | {"offload_param": {"device": "cpu"}}
        return busy(
            step_time(replace(known, deepspeed=known.deepspeed | {"zero_optimization": zero}), H100), "host link"
        )

    assert on_link(10**11) < 0.7 * on_link(0)


def test_a_group_divides_what_its_host_holds():
    known = setup("fsdp2_cpu", named("llama3-8b"), micro_batch=1)
    grouped = step_time(replace(known, group=4), H100)
    assert busy(grouped, "host link") == pytest.approx(2 * busy(step_time(known, H100), "host link"), rel=1e-6)


def test_a_step_waits_for_the_slower_of_host_and_disk():
    known = setup("zero3_nvme", named("llama3-8b"), micro_batch=1)
    without, fast = (step_time(known, replace(H100, disk_bytes_per_s=speed)) for speed in (None, 1e13))
    assert fast.seconds == pytest.approx(without.seconds, rel=1e-3)
    assert fast.seconds >= without.seconds
