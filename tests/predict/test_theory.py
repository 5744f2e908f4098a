"""Compares formulas with the papers' tables, and what a rank holds and sends with numbers by hand."""

from dataclasses import replace
from math import ceil

import pytest
from conftest import DECODERS_ALONE

from study.core import arms
from study.core.errors import Stop
from study.predict import papers
from study.predict.architecture import named
from study.predict.estimate import Estimate, estimate
from study.predict.memory.engine import Engine
from study.predict.setup import Setup
from study.predict.trace.transformer import tensors_of_a_rank

FOR_BERT = [name for name in arms.NAMES if name not in DECODERS_ALONE]
RANKS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = [  # of the ZeRO paper: GB of model states by parameters and stage, on each of these ranks
    (7.5e9, 1, (120, 52.5, 35.6, 31.4, 30.4, 30.1)),
    (7.5e9, 2, (120, 41.3, 21.6, 16.6, 15.4, 15.1)),
    (7.5e9, 3, (120, 30, 7.5, 1.88, 0.47, 0.12)),
    (1e12, 3, (16000, 4000, 1000, 250, 62.5, 15.6)),
]


def gigabytes(*args) -> float:
    return sum(papers.states_bytes(*args).values()) / 1e9


@pytest.mark.parametrize(("size", "stage", "printed"), TABLE_1)
def test_table_1_of_the_zero_paper(size, stage, printed):
    for ranks, gb in zip(RANKS, printed, strict=True):
        last_digit = 10 ** -len(str(gb).partition(".")[2])  # some were cut off there, some rounded
        assert gigabytes(size, stage, ranks) == pytest.approx(gb, abs=last_digit), ranks


def test_bytes_of_a_parameter_by_recipe():
    by_hand = {"bf16_cast adamw": 16, "fp32 adamw": 16, "bf16_pure adamw": 8, "bf16_cast adamw_8bit": 10}
    for recipe, expected in (by_hand | {"bf16_cast sgd": 12, "fp32 sgd": 12}).items():
        assert sum(papers.states_bytes(1, 0, 1, *recipe.split()).values()) == expected
        assert sum(papers.states_bytes(1, 3, 8, *recipe.split()).values()) == expected / 8


def test_cpu_adam_is_as_fast_as_published():
    for billions, seconds in {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}.items():
        assert billions * papers.CPU_ADAM_S_PER_BILLION == pytest.approx(seconds, rel=0.2)


# --- partitions, by hand -------------------------------------------------------------------------------------------


def engine(arm: str, ranks: int, model: str = "bert-base"):
    return Engine(Setup.of_arm(named(model), arm, ranks=ranks))


def test_parts():
    """A part of the flat weights begins at 4 bytes, so it is a multiple of two elements."""
    assert engine("zero1", 2, "bert-tiny").part == 4386178 // 2 + 1 == 2193090
    assert engine("zero3", 2, "bert-tiny").part == 4386178 // 2
    owned = engine("zero1", 2, "bert-tiny").owned
    assert owned == {"bert.embeddings.word_embeddings.weight": 2193090}, "half the model is the first half of the words"


def test_what_stage_3_keeps_gathered():
    """With DeepSpeed's defaults, all of a small model; in the textbook arm, small weights and one fetch ahead."""
    everything = named("bert-base").parameters
    assert engine("zero3", 8).fetches.turn.running.weights == everything
    assert engine("zero3_textbook", 8).fetches.turn.running.weights < everything / 4
    assert 0.4e9 < engine("zero3", 8, "gemma2-9b").fetches.turn.running.weights < 1.2e9
    visits = engine("zero3", 8).fetches.forward
    last = "bert.encoder.layer.11.output.dense.weight"
    assert visits[last].waiting.flat == 12 * 768**2, "the buffer from which the last layers were made"
    assert visits["bert.pooler.dense.weight"].waiting.flat == 0, "it is alone"


def test_stage_3_waits_for_a_whole_mixture_of_experts():
    """DeepSpeed's leaf modules."""
    fetches = engine("zero3", 8, "mixtral-micro").fetches
    gate, up, down = (
        f"model.layers.3.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    )
    assert fetches.forward[gate] is fetches.forward[up] is fetches.forward[down]
    whole = sum(tensor.elements for tensor in named("mixtral-micro").tensors if tensor.elements > 10**5)
    assert fetches.forward[up].waiting.flat == whole, "all of it is one fetch of the model itself"
    assert fetches.forward["lm_head.weight"].running.flat == 0


def test_nvme_in_stage_2_is_the_host():
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}
    assert Engine(Setup(model=named("bert-tiny"), deepspeed=config, ranks=2)).optimizer_home == "cpu"


def of_arm(arm: str, model="bert-base", **values) -> Estimate:
    return estimate(Setup.of_arm(named(model), arm, **values))


def of_model(model, deepspeed: dict | None = None, **values) -> Estimate:
    return estimate(Setup(model=model, deepspeed=deepspeed, **values))


@pytest.mark.parametrize("arm", FOR_BERT)
def test_states_are_the_papers_and_deepspeeds_own_copy(arm):
    """bf16_cast after the step: weights, master and moments are P1's 2, 4 and 8 bytes, partitioned as it says."""
    ranks = 1 if arm == "single" else 8
    after = of_arm(arm, ranks=ranks, precision="bf16_cast").after_step
    count = named("bert-base").parameters
    ours = arms.read(arms.all_paths()[arm])
    paper = papers.states_bytes(count, 3 if ours.fsdp else ours.stage or 0, ours.sharing_ranks(ranks))
    if arm != "zero3_nvme":
        assert after["master"] + after["moments"] == pytest.approx(paper["optimizer"], rel=0.001)
    assert after["weights"] == pytest.approx(paper["weights"], rel=0.001)


def test_offloading_leaves_the_device():
    """The same bytes, in two memories on a GPU and in one on a CPU."""
    gpu, cpu = (of_arm("zero2_cpu", ranks=8, device=device) for device in ("cuda", "cpu"))
    count = named("bert-base").parameters
    assert gpu.host_bytes > 12 * count / 8
    assert "master" not in gpu.at_peak
    assert "master" in cpu.at_peak
    assert cpu.host_bytes == 0
    assert of_arm("zero3_nvme", ranks=2).nvme_bytes["held"] == pytest.approx(6 * count, rel=0.001)


def test_traffic_with_accumulation():
    """Stage 1 and DDP reduce once a step, stages 2 and 3 every microbatch."""
    count = 4 * named("bert-base").parameters
    moved = {arm: of_arm(arm, ranks=4, accumulation=4).traffic for arm in ("ddp", "zero1", "zero2", "zero3")}
    assert moved["ddp"] == {"all_reduce": count}
    assert moved["zero1"] == pytest.approx({"all_reduce": count, "all_gather": count}, rel=1e-3)
    assert moved["zero2"] == pytest.approx({"all_reduce": 4 * count, "all_gather": count}, rel=1e-3)
    assert moved["zero3"]["reduce_scatter"] == pytest.approx(4 * count, rel=1e-3)
    assert 3.9 * count < moved["zero3"]["all_gather"] < 4 * count, "small tensors are gathered once"
    assert of_arm("zero2_reduce", ranks=4).traffic["reduce"] == count
    assert of_arm("single").traffic == {}
    textbook = of_arm("zero3_textbook", ranks=4).traffic["all_gather"]
    assert textbook > 1.9 * of_arm("zero3", ranks=4).traffic["all_gather"]


def test_silence_is_deepspeeds_default():
    """The default is a bucket of half a billion elements, and two of them with overlap_comm."""
    quiet, both = (
        of_model(named("bert-tiny"), {"zero_optimization": {"stage": 2} | overlap}, ranks=2).at_peak["buckets"]
        for overlap in ({}, {"overlap_comm": True})
    )
    assert (quiet, both) == (500_000_000 * 4, 2 * 500_000_000 * 4)


def test_weights_that_are_pinned_part_by_part_are_on_the_host_twice():
    """DeepSpeed's default. By hand for BERT-large in fp32: its matrices are powers of two; its words are rounded up."""
    ours = arms.read(arms.all_paths()["zero3_cpu"]).deepspeed
    default = ours | {"zero_optimization": ours["zero_optimization"] | {"offload_param": {"device": "cpu"}}}
    held = [of_model(named("bert-large"), config, device="cuda").host_bytes for config in (ours, default)]
    layer = 4 * 2**22 + 2 * 2**24 + 9 * 2**12 + 2**14
    assert held[1] - held[0] == pytest.approx(2**27 + 2**21 + 24 * layer + 2**22, rel=0.001)


def test_stage_3_updates_a_sub_group_at_a_time():
    """A sub-group is whole tensors of a billion elements or more. A virtual rank 0 of 2 held 54.5 GB of GPT-J."""
    how = {"precision": "bf16_cast", "micro_batch": 1, "sequence": 32, "attention": "eager"}
    update = estimate(Setup.of_arm(named("gpt-j-6b"), "zero3", ranks=2, **how))
    assert update.peak_when == "update"
    assert update.peak_bytes == pytest.approx(54.5e9, rel=0.005)


def test_small_weights_that_stay_whole_have_no_second_copy():
    """Seen in virtual ranks of Jais-2 and GLM-4, whose tensors all stay whole."""
    values = {"precision": "bf16", "micro_batch": 2, "sequence": 48}
    both = [Setup.of_arm(named("bert-tiny"), "zero3_hpz", ranks=8, accumulation=count, **values) for count in (1, 2)]
    large = [tensor.elements for tensor in both[1].tensors if tensor not in Engine(both[1]).persistent]
    once, twice = (Engine(setup).second_copy(0)["weights"] for setup in both)
    assert (once, twice) == (0, 4 * sum(large) // 2)


# --- groups of ranks -----------------------------------------------------------------------------------------------


def shared(arm: str, tensor_ranks: int = 1, **values) -> Setup:
    model = values.pop("model", named("llama-micro"))
    usual = {"precision": "bf16_cast", "micro_batch": 1, "sequence": 128, "device": "cuda"}
    return replace(Setup.of_arm(model, arm, ranks=8), **usual | values, tensor_ranks=tensor_ranks)


def test_fsdp_shards_once_beside_ranks_that_divide_layers():
    divided = replace(shared("ddp", 2), fsdp="full_shard")
    by_hand = 2 * sum(ceil(tensor.elements / 4) for tensor in tensors_of_a_rank(divided.model, 2))
    assert estimate(divided).at_peak["weights"] == by_hand


def test_what_trains_is_the_same_for_ranks_that_divide_layers():
    head = replace(named("llama-micro"), train_only="lm_head")
    plain, divided = (estimate(shared("zero1", ranks, model=head)).at_peak["moments"] for ranks in (1, 2))
    assert divided == pytest.approx(plain, rel=0.01)


def test_ranks_that_do_not_make_whole_groups_are_refused():
    for ranks, tensor_ranks in ((1, 2), (3, 2)):
        with pytest.raises(Stop, match=f"{ranks} ranks do not divide layers in groups of {tensor_ranks}"):
            replace(shared("zero1"), ranks=ranks, tensor_ranks=tensor_ranks)
