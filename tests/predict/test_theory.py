"""Compares formulas with the papers' tables, and what a rank holds and sends with numbers by hand."""

import pytest

from study.core import arms
from study.core.errors import Stop
from study.predict import papers
from study.predict.architecture import named
from study.predict.engines import engine_of
from study.predict.estimate import Estimate
from study.predict.prediction import estimate
from study.report.estimates import Needs
from tests.cases import for_each
from tests.conftest import DECODERS_ALONE, table
from tests.predict.trainings import placed, training_of

FOR_BERT = [name for name in arms.NAMES if name not in DECODERS_ALONE]
TABLES = table("predict/by_hand.toml")


def gigabytes(*args) -> float:
    return sum(papers.states_bytes(*args).values()) / 1e9


@pytest.mark.parametrize(("size", "stage", "printed"), TABLES["zero"])
def test_table_1_of_the_zero_paper(size, stage, printed):
    for ranks, gb in zip(TABLES["ranks"], printed, strict=True):
        last_digit = 10 ** -len(str(gb).partition(".")[2])  # some were cut off there, some rounded
        assert gigabytes(size, stage, ranks) == pytest.approx(gb, abs=last_digit), ranks


def test_bytes_of_a_parameter_by_recipe():
    for recipe, expected in TABLES["parameter"].items():
        assert sum(papers.states_bytes(1, 0, 1, *recipe.split()).values()) == expected
        assert sum(papers.states_bytes(1, 3, 8, *recipe.split()).values()) == expected / 8


# --- partitions, by hand -------------------------------------------------------------------------------------------


def engine(arm: str, ranks: int, model: str = "bert-base"):
    return engine_of(training_of(named(model), arm, ranks=ranks))


def test_parts():
    """A part of the flat weights begins at 4 bytes, so it is a multiple of two elements."""
    assert engine("zero1", 2, "bert-tiny").part == 4386178 // 2 + 1 == 2193090
    assert engine("zero3", 2, "bert-tiny").part == 4386178 // 2
    owned = engine("zero1", 2, "bert-tiny").owned
    assert owned == {"bert.embeddings.word_embeddings.weight": 2193090}, "half the model is the first half of the words"


@pytest.mark.parametrize("arm", [name for name in FOR_BERT if name != "hsdp"])  # which needs two ranks
def test_a_rank_alone_sends_nothing(arm):
    """DeepSpeed and FSDP call collectives there too, which copy at most. In none is a tensor for another rank."""
    needs = Needs.of(arms.load_arm(arm), "bf16", True, training_of(named("gpt2"), arm), None)
    assert needs.estimate.traffic == {}


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


def test_passes_before_have_copied_all_that_does_not_stay_whole():
    """DeepSpeed's default keeps tensors of at most 100,000 elements: all of BERT-tiny but its words."""
    training = training_of(named("bert-tiny"), "zero3_hpz", ranks=4, accumulation=2)
    assert engine_of(training).second_copy(0) == {"weights": 30522 * 128 // 2 * 4}


def of_arm(arm: str, model="bert-base", **values) -> Estimate:
    return estimate(training_of(named(model), arm, **values))


def of_zero(model: str, zero: dict, **values) -> Estimate:
    return estimate(training_of(named(model), zero=zero, **values))


def test_bytes_by_the_papers():
    """FSDP, stage 3: 2 M gathered, M scattered (P4). Hybrid sharding: an all-reduce of M/8 besides (P5)."""
    model = named("bert-large")
    sharded = {"all_gather": 2, "reduce_scatter": 1}
    expected = {"fsdp2": sharded, "zero3_textbook": sharded, "hsdp": sharded | {"all_reduce": 1 / 8}}
    for arm, times in expected.items():
        moved = estimate(training_of(model, arm, ranks=16)).traffic
        assert {kind: size / 4 / model.parameters for kind, size in moved.items()} == pytest.approx(times, rel=0.02)


@for_each("arm", FOR_BERT)
def test_states_are_the_papers_and_deepspeeds_own_copy(arm):
    """bf16_cast after the step: weights, master and moments are P1's 2, 4 and 8 bytes, partitioned as it says."""
    ranks = 1 if arm == "single" else 8
    after = of_arm(arm, ranks=ranks, precision="bf16_cast").after_step
    count = named("bert-base").parameters
    ours = arms.load_arm(arm)
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
    assert (cpu.host_bytes, cpu.on_host) == (0, {})
    assert of_arm("zero3_nvme", ranks=2).swapped_bytes == pytest.approx(6 * count, rel=0.001)


def test_silence_is_deepspeeds_default():
    """The default is a bucket of half a billion elements, and two of them with overlap_comm."""
    quiet, both = (of_zero("bert-tiny", {"stage": 2} | more, ranks=2) for more in ({}, {"overlap_comm": True}))
    assert (quiet.at_peak["buckets"], both.at_peak["buckets"]) == (500_000_000 * 4, 2 * 500_000_000 * 4)
    nvme = {"offload_optimizer": {"device": "nvme"}}  # which is stage 3's
    assert of_zero("bert-tiny", {"stage": 2} | nvme, ranks=2).swapped_bytes == 0


def test_weights_that_are_pinned_part_by_part_are_on_the_host_twice():
    """DeepSpeed's default. By hand for BERT-large in fp32: its matrices are powers of two; its words are rounded up."""
    ours = arms.load_arm("zero3_cpu").deepspeed["zero_optimization"]
    both = (ours, ours | {"offload_param": {"device": "cpu"}})
    held = [of_zero("bert-large", zero, device="cuda").host_bytes for zero in both]
    layer = 4 * 2**22 + 2 * 2**24 + 9 * 2**12 + 2**14
    assert held[1] - held[0] == pytest.approx(2**27 + 2**21 + 24 * layer + 2**22, rel=0.001)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_is_not_pinned_is_rounded_up_nowhere(stage):
    """The default since DeepSpeed 0.19.5 is true, and was false before."""
    sections = ({"device": "cpu"} | more for more in ({}, {"pin_memory": True}, {"pin_memory": False}))
    silent, pinned, not_pinned = (
        of_zero("bert-large", {"stage": stage, "offload_optimizer": each}, device="cuda").on_host for each in sections
    )
    assert silent == pinned
    assert pinned.pop("pinned") > not_pinned.pop("pinned", 0) == 0
    assert pinned == not_pinned


def test_stage_3_updates_a_sub_group_at_a_time():
    """A sub-group is whole tensors of a billion elements or more. A virtual rank 0 of 2 held 54.5 GB of GPT-J."""
    how = {"precision": "bf16_cast", "micro_batch": 1, "sequence": 32, "attention": "eager"}
    update = estimate(training_of(named("gpt-j-6b"), "zero3", ranks=2, **how))
    assert update.peak_when == "update"
    assert update.peak_bytes == pytest.approx(54.5e9, rel=0.005)


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}])
def test_gradients_that_deepspeed_keeps_in_fp32(zero, passes):
    """Four bytes of each element of a rank's part, once."""
    ours = training_of(named("gpt2"), zero=zero, precision="bf16_cast", ranks=2, accumulation=passes, device="cuda")
    config = ours.placement.deepspeed | {"data_types": {"grad_accum_dtype": "fp32"}}
    engine = engine_of(placed(ours, deepspeed=config))
    most = max(now.get("gradients", 0) for when, now in engine.instants(ours.profile) if when == "backward")
    assert most + engine.standing.get("gradients", 0) == 4 * engine.part
    assert engine_of(ours).sum_bytes == 2


def test_what_pytorchs_linear_layers_keep_under_stage_3_is_not_predicted():
    """A single rank gathers nothing."""
    zero = {"stage": 3, "memory_efficient_linear": False}
    with pytest.raises(Stop, match="linear layers keep"):
        of_zero("bert-tiny", zero, ranks=2)
    assert of_zero("bert-tiny", zero, ranks=1).peak_bytes == of_zero("bert-tiny", {"stage": 3}, ranks=1).peak_bytes


@pytest.mark.parametrize(("zero", "times"), [({"stage": 0}, 2), (None, 1)])
def test_the_step_holds_all_gradients_in_fp32_twice_with_deepspeed_only(zero, times):
    """DeepSpeed's optimizer of 16-bit weights without sharding."""
    ours = training_of(named("gpt2"), zero=zero, precision="bf16_cast", ranks=2)
    updates = [sum(now.values()) for when, now in engine_of(ours).instants(ours.profile) if when == "update"]
    assert max(updates) == (2 + 4 * times) * ours.model.parameters


def test_what_stage_3_keeps_on_the_host():
    """Of each element of a rank's part: weights, master, both moments, the sum of gradients, the update's gradient."""
    part = engine("zero3_cpu", 8).part
    kept = {"weights": 2 * part, "master": 4 * part, "moments": 8 * part, "gradients": (2 + 4) * part}
    # Pinned memory comes in powers of two: 32 MiB for the weights and for the sum, 64 MiB for the update's gradient.
    pinned_beyond = 2 * (2**25 - 2 * part) + 2**26 - 4 * part
    whole = of_arm("zero3_cpu", ranks=8, precision="bf16_cast", device="cuda")
    assert whole.on_host == kept | {"pinned": pinned_beyond}
    assert whole.host_bytes == sum(whole.on_host.values())
