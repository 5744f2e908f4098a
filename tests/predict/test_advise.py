"""Compares advice with its formulas, with arithmetic by hand, and with what an expert would try."""

from dataclasses import replace

import pytest

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.predict import papers
from study.predict.advise import MISS, Advice, Row, advise, best_of, fewest, fits_on
from study.predict.architecture import named
from study.predict.estimate import HOST_PROCESS_BYTES, estimate
from study.predict.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, outside_bytes, reserve_bytes
from study.predict.question import BUCKET_ELEMENTS, Question, bytes_of
from study.predict.setup import Setup
from study.predict.step_time import step_time
from study.report.advice import assumptions, seconds

GEMMA = Question(named("gemma2-9b"), 8, "H100-80GB", "nvswitch", 1e12, 2048, 144)
BERT = Question(named("bert-base"), 2, "L4", "pcie4", 64e9, 128, 24, precision="bf16_cast", checkpointing=False)


@pytest.fixture(scope="module")
def gemma() -> Advice:
    return advise(GEMMA)


def setup(question: Question, arm: str, micro_batch: int) -> Setup:
    return question.setup(arms.load_arm(arm), micro_batch, question.batch // question.gpus // micro_batch)


def advised(question: Question, **changes) -> dict[str, Row]:
    return {row.arm: row for row in advise(replace(question, **changes)).rows}


def test_sizes_in_words():
    sizes = {"1TB": 1e12, "512 GB": 512e9, "6GB/s": 6e9, "80GiB": 80 * 2**30, "4mb": 4e6}
    assert {text: bytes_of(text, "--flag") for text in sizes} == sizes
    for text in ("lots", "512", "-1GB", "nanGB", "9" * 400 + "TB"):
        with pytest.raises(Stop, match=r"--flag .* is not a size"):
            bytes_of(text, "--flag")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch": -24}, r"batch must be from 1 to .*\(got -24\)"),
        ({"batch": 25}, "2 GPUs do not divide a batch of 25"),
        ({"quantized": "nf4"}, "quantized weights do not train"),
    ],
)
def test_what_is_not_possible_is_a_sentence(change, what):
    with pytest.raises(Stop, match=what):
        advise(replace(BERT, **change))


def test_what_is_left_out_has_a_default_that_is_said():
    question = Question.of(named("gpt-j-6b"), 12, "a100", link="NVLink", batch=24)
    assert (question.gpu, question.link, question.gpus_per_node) == ("A100-80GB", "nvlink3", 6)
    assert (question.sequence, question.host_memory_bytes) == (2048, 2 * 6 * GPUS["A100-80GB"].memory_bytes)
    assert any("24 rows per step" in line and "2048" in line for line in assumptions(question))
    alone = Question.of(named("gpt2"), 1, "T4")
    assert (alone.link, alone.sequence, alone.batch) == (None, 1024, 128)
    assert Question.of(named("gpt2"), 16, "T4").link == GPUS["T4"].network, "two nodes"
    with pytest.raises(Stop, match="'nvlnk' is not a known link"):
        Question.of(named("gpt2"), 2, "A100", link="nvlnk")


def test_every_arm_is_a_row(gemma):
    """Rows, passes and GPUs give the batch. Arms that do not fit have no time."""
    names = [row.arm for row in gemma.rows]
    assert names == [name for name in arms.NAMES if name in names], "the simplest first"
    assert not {"single", "zero1_tp", "hsdp", "zero3_nvme"} & {*names}, "what makes no sense on one node"
    for row in gemma.rows:
        assert GEMMA.gpus * row.micro_batch * row.accumulation == GEMMA.batch, row.arm
        assert row.fits == (row.step_s is not None) == (row.headroom_bytes >= 0)
    assert gemma.rows[0].peak_bytes > 16 * GEMMA.model.parameters, "under DDP the states alone are too much"


def test_the_largest_microbatch_that_fits_with_a_margin():
    """The next larger divisor of the batch does not fit. If even a single row has no margin, it goes without."""
    question = replace(BERT, sequence=512, batch=2 * 96, gpu="T4")
    row = advised(question)["ddp"]
    available = GPUS["T4"].memory_bytes - reserve_bytes(GPUS["T4"])
    assert 1 < row.micro_batch < 96
    larger = min(size for size in range(row.micro_batch + 1, 97) if 96 % size == 0)
    peaks = [estimate(setup(question, "ddp", size)).peak_bytes for size in (row.micro_batch, larger)]
    assert peaks[0] == row.peak_bytes
    assert (1 + MISS) * peaks[0] <= available < (1 + MISS) * peaks[1]
    assert row.headroom_bytes == pytest.approx(available - peaks[0])
    assert not row.is_tight
    tight = advised(GEMMA, checkpointing=False, batch=8)["zero3"]
    assert (tight.fits, tight.is_tight, tight.micro_batch) == (True, True, 1)


def test_host_memory_is_of_all_ranks_of_a_node():
    question = replace(BERT, host_memory_bytes=1e12)
    row = advised(question)["zero2_cpu"]
    offloaded = estimate(setup(question, "zero2_cpu", row.micro_batch)).host_bytes
    assert offloaded > 0
    assert row.host_bytes == 2 * (offloaded + HOST_PROCESS_BYTES)
    less = advised(question, host_memory_bytes=row.host_bytes - 1)
    assert (less["zero2_cpu"].fits, less["zero2_cpu"].limit) == (False, "host memory")
    assert less["zero2"].fits
    assert advised(question, gpus_per_node=1)["zero2_cpu"].host_bytes == row.host_bytes / 2


def test_the_disk_is_for_those_who_have_one():
    assert "zero3_nvme" not in advised(BERT)
    fast, slow = (advised(BERT, disk_bytes_per_s=speed)["zero3_nvme"] for speed in (1e12, 1e7))
    assert fast.fits
    assert slow.limit == "disk"
    assert slow.step_s > 10 * fast.step_s


def test_hosts_share_the_update():
    """A host updates the parts of all its ranks: with two hosts, each updates half."""
    spent_s = []
    for size, link in ((2, "pcie4"), (1, "ib-ndr")):
        question = replace(BERT, gpus_per_node=size, link=link)
        spent_s.append(step_time(setup(question, "zero2_cpu", 1), question.machine).parts["update on host"])
    assert spent_s[0] == pytest.approx(BERT.model.parameters / 1e9 * papers.CPU_ADAM_S_PER_BILLION)
    assert spent_s[1] == pytest.approx(spent_s[0] / 2)


def fitting(arm: str, step_s: float, peak_gb: float = 40) -> Row:
    """On a card of 85.9 GB, of which 6.3 GB stay free: 75 GB fit only if the prediction is accurate."""
    needs = {"peak_bytes": peak_gb * 1e9, "headroom_bytes": (79.6 - peak_gb) * 1e9, "host_bytes": 0, "step_s": step_s}
    needs["step_interval_s"] = (step_s / 1.4, 1.4 * step_s)
    settings = {"precision": "bf16", "checkpointing": False, "micro_batch": 1, "accumulation": 1}
    return Row(arm=arm, gpu="A100-80GB", fits=True, limit="compute", **settings, **needs)


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ([fitting("zero1", 1.35), fitting("zero3", 1.0)], 0),  # within the intervals, the simpler arm wins
        ([fitting("zero1", 1.45), fitting("zero3", 1.0)], 1),
        ([fitting("zero1_cpu", 1.0), fitting("zero3", 1.5)], 1),  # states leave the GPU only if they must
        ([fitting("zero1", 1.0, peak_gb=75), fitting("zero3", 2.0)], 1),  # predictions miss
        ([fitting("zero1_cpu", 1.0), fitting("zero3", 1.9)], 0),  # unless that is nearly twice as fast
        ([fitting("zero3", 1.0, peak_gb=75), fitting("zero1_cpu", 1.5)], 1),  # offloading only takes longer
    ],
)
def test_the_choice(offered, taken):
    assert best_of(offered) is offered[taken]


def test_a_card_that_is_shown_as_full_fits_only_just():
    shown = [replace(fitting("zero2", 1.0), driver_bytes=size_bytes) for size_bytes in (None, int(80e9), int(85.8e9))]
    assert [row.is_tight for row in shown] == [False, False, True]


def test_single_is_for_one_gpu():
    alone = advise(replace(BERT, gpus=1, link=None))
    assert (alone.choice.arm, alone.alternative.arm) == ("single", "zero1_cpu"), "nothing is shared on one GPU"
    assert "single" not in advised(BERT)


def test_what_an_expert_would_try(gemma):
    """Recomputation, although an arm fits without it: it allows more rows per pass and a simpler arm."""
    without = advise(replace(GEMMA, checkpointing=False))
    assert gemma.choice.checkpointing
    assert arms.NAMES.index(gemma.choice.arm) < arms.NAMES.index(without.choice.arm)
    assert not gemma.choice.is_tight
    assert gemma.choice.bucket_elements == BUCKET_ELEMENTS
    usual = advised(BERT, precision=None)
    assert (usual["ddp"].precision, usual["zero1"].precision) == ("bf16", "bf16_cast")


def test_small_buckets_where_large_ones_do_not_fit(monkeypatch):
    question = replace(BERT, model=named("gpt2-medium"), gpus=8, batch=8)
    peak = estimate(setup(question, "zero2", 1)).peak_bytes
    enough = (peak + OUTSIDE_AT_MOST_BYTES) / (1 - FRAGMENTATION) + 1e6
    for memory_bytes, elements in ((enough, 6_553_600), (1.2 * enough, BUCKET_ELEMENTS)):
        monkeypatch.setitem(GPUS, "L4", replace(GPUS["L4"], memory_bytes=int(memory_bytes)))
        row = advised(question)["zero2"]
        assert (row.fits, row.bucket_elements) == (True, elements)


def test_seconds_have_two_digits_and_a_unit(gemma):
    shown = ((0.5, 0.312, 0.75), (120, 61.0, 170.0), (7200, 3000, 9000.0))
    rows_shown = [replace(gemma.choice, step_s=step_s, step_interval_s=(low, high)) for step_s, low, high in shown]
    assert [seconds(each) for each in rows_shown] == ["0.5 s (0.31 to 0.75)", "2 min (1 to 2.8)", "2 h (0.83 to 2.5)"]


def test_an_estimate_says_whether_it_fits(monkeypatch):
    """By the rule of an advice, which keeps more free than the context and NCCL take."""
    peak = estimate(setup(BERT, "zero2", 12)).peak_bytes
    needed = peak + outside_bytes(8)
    for spare, fits in ((-1, "no"), (1, "no"), (OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * 2 * needed, "yes")):
        monkeypatch.setitem(GPUS, "L4", replace(GPUS["L4"], memory_bytes=int(needed + spare)))
        assert fits_on("L4", peak) == fits
        assert fits_on("L4", peak, int(needed + spare)) != "yes", "the card is full"


def test_how_many_are_needed():
    model = named("gpt-j-6b")
    enough = fewest(model, "A100-40GB")
    fewer = advise(Question.of(model, enough.question.gpus // 2, "A100-40GB"))
    assert not enough.choice.offloads
    assert fewer.choice is None or fewer.choice.offloads
    assert fewest(named("llama3-70b"), "T4") is None


def test_with_muon_only_arms_without_a_stage_are_tried():
    """It ended with the refusal of the first stage: what DeepSpeed's Muon holds is not predicted."""
    advice = advise(Question.of(named("gpt2"), 8, "H100", optimizer="muon"))
    assert [row.arm for row in advice.rows] == ["ddp"]
