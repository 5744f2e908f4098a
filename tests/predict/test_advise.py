"""Compares advice with its formulas, with arithmetic by hand, and with what an expert would try."""

import re
import sys
from dataclasses import MISSING, fields, replace
from typing import get_args

import pytest

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.text import times
from study.predict.advise import (
    FASTER,
    MISS,
    MOST_GPUS,
    ORDER,
    Advice,
    Row,
    advise,
    best_of,
    best_of_arm,
    fewest,
    fits_on,
    held_back,
    training_of,
    with_more_rows,
)
from study.predict.allocator import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, outside_bytes, reserve_bytes
from study.predict.architecture import generic, named
from study.predict.estimate import HOST_PROCESS_BYTES, loading_bytes
from study.predict.pace import class_of
from study.predict.prediction import Prediction, estimate
from study.predict.question import (
    BUCKET_ELEMENTS,
    PlaceFlags,
    Question,
    StepFlags,
    TrainingFlags,
    bytes_of,
    settled_arm,
)
from study.predict.trace.transformer import Transformer
from study.predict.training import Quantized, Training
from study.report.advice import enough, experts_note, in_json, in_words, no_way_out, stages_note, start
from study.report.reasons import by_precision, reason_for
from study.report.rows import (
    below_table,
    stage_3_holds_no_less,
    synced,
    table,
    throughputs,
    use,
    way,
    why_tight,
    widest,
)
from tests.conftest import ROOT

MISTRAL = Question(named("mistral-7b"), 8, GPUS["H100-80GB"], "nvswitch", 1e12, 6144, 24)
BERT = Question(named("bert-base"), 2, GPUS["L4"], "pcie4", 64e9, 128, 24, precision="bf16_cast", checkpointing=False)


@pytest.fixture(scope="module")
def mistral() -> Advice:
    return advise(MISTRAL)


def training(question: Question, arm: str, micro_batch: int) -> Training:
    return question.training(arms.load_arm(arm), micro_batch, question.batch // question.gpus // micro_batch)


def asked(model: Transformer, gpus: int | None, gpu: str, **flags) -> tuple:
    """The model, and the flags of each kind."""
    given = {"gpus": gpus, "gpu": gpu} | flags
    kinds = (TrainingFlags, PlaceFlags, StepFlags)
    return model, *(kind(**{name: given[name] for name in kind.__annotations__ if name in given}) for kind in kinds)


def question_of(*given, **flags) -> Question:
    return Question.of(*asked(*given, **flags))


def best(question: Question, arm: str, **changes) -> Row:
    return best_of_arm(replace(question, **changes), arms.load_arm(arm))


def tried(question: Question, **changes) -> list[str]:
    return [row.arm for row in advise(replace(question, **changes)).rows]


def test_sizes_in_words():
    sizes = {"512 GB": 512e9, "6GB/s": 6e9, "80GiB": 80 * 2**30, "4mb": 4e6}
    assert {text: bytes_of(text, "--flag") for text in sizes} == sizes
    for text in ("lots", "512", "9" * 400 + "TB"):
        with pytest.raises(Stop, match=r"--flag .* is not a size"):
            bytes_of(text, "--flag")


def test_what_is_left_out_has_a_default():
    question = question_of(named("gpt-j-6b"), 12, "a100", link="NVLink")
    assert (question.gpu.kind, question.link, question.gpus_per_node) == ("A100-80GB", "nvlink3", 6)
    assert (question.sequence, question.batch) == (2048, 132), "a multiple of the GPUs"
    assert question.host_memory_bytes == 2 * 6 * GPUS["A100-80GB"].memory_bytes
    alone = question_of(named("gpt2"), 1, "T4")
    assert (alone.link, alone.sequence, alone.batch) == (None, 1024, 128)
    assert question_of(named("gpt2"), 16, "T4").link == GPUS["T4"].network, "two nodes"


def test_every_arm_is_a_row(mistral):
    """Rows, passes and GPUs give the batch. Arms that do not fit have no time."""
    names = [row.arm for row in mistral.rows]
    assert names == [name for name in ORDER if name in names], "the simplest first"
    assert not {"single", "zero1_tp", "hsdp", "zero3_nvme"} & {*names}, "what makes no sense on one node"
    for row in mistral.rows:
        assert MISTRAL.gpus * row.micro_batch * row.accumulation == MISTRAL.batch, row.arm
        assert row.fits == (row.step_s is not None) == (row.headroom_bytes >= 0)
    assert mistral.rows[0].peak_bytes > 16 * MISTRAL.model.parameters, "under DDP the states alone are too much"


def test_the_largest_microbatch_that_fits_with_a_margin():
    """The next larger divisor of the batch does not fit. If even a single row has no margin, it goes without."""
    question = replace(BERT, sequence=512, batch=2 * 96, gpu=GPUS["T4"])
    row = best(question, "ddp")
    available = GPUS["T4"].memory_bytes - reserve_bytes(GPUS["T4"])
    larger = min(size for size in range(row.micro_batch + 1, 97) if 96 % size == 0)
    peaks = [estimate(training(question, "ddp", size)).peak_bytes for size in (row.micro_batch, larger)]
    assert (1 + MISS) * peaks[0] <= available < (1 + MISS) * peaks[1]
    assert (row.peak_bytes, row.headroom_bytes) == pytest.approx((peaks[0], available - peaks[0]))
    tight = best(MISTRAL, "zero1", checkpointing=False, sequence=5120)
    assert (row.is_tight, tight.is_tight, tight.micro_batch) == (False, True, 1)


def test_host_memory_is_of_all_ranks_of_a_node():
    row = best(BERT, "zero2_cpu", host_memory_bytes=1e12)
    assert row.host_bytes == 2 * (
        estimate(training(BERT, "zero2_cpu", row.micro_batch)).host_bytes + HOST_PROCESS_BYTES
    )
    assert row.host_bytes > 2 * HOST_PROCESS_BYTES
    less = {"host_memory_bytes": row.host_bytes - 1}
    assert [best(BERT, arm, **less).fits for arm in ("zero2_cpu", "zero2")] == [False, True]
    assert best(BERT, "zero2_cpu", gpus_per_node=1).host_bytes == row.host_bytes / 2


def test_the_disk_is_for_those_who_have_one():
    assert "zero3_nvme" not in tried(BERT)
    fast, slow = (best(BERT, "zero3_nvme", disk_bytes_per_s=speed) for speed in (1e12, 1e7))
    assert (fast.fits, slow.limit) == (True, "disk")
    assert slow.step_s > 10 * fast.step_s


def fitting(arm: str, step_s: float, peak_gb: float = 40) -> Row:
    """On a card of 85.9 GB, of which 6.3 GB stay free: 75 GB fit only if the prediction is accurate."""
    needs = {"peak_bytes": peak_gb * 1e9, "step_s": step_s, "step_interval_s": (step_s / 1.4, 1.4 * step_s)}
    others = dict.fromkeys(field.name for field in fields(Row) if field.default is MISSING)
    return Row(**others | {"arm": arm, "gpu": GPUS["A100-80GB"], "checkpointing": False} | needs)


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ([("zero1", 1.24), ("zero3", 1.0)], 0),  # hardly faster: the simpler arm wins
        ([("zero1", 1.26), ("zero3", 1.0)], 1),
        ([("zero1_cpu", 1.0), ("zero3", 1.5)], 1),  # states leave the GPU only if they must
        ([("zero1", 1.0, 75), ("zero3", 2.0)], 1),  # predictions miss
        ([("zero1_cpu", 1.0), ("zero3", 1.9)], 0),  # unless that is nearly twice as fast
        ([("zero3", 1.0, 75), ("zero1_cpu", 1.5)], 1),  # offloading only takes longer
    ],
)
def test_the_choice(offered, taken):
    rows = [fitting(*each) for each in offered]
    assert best_of(rows) is rows[taken]


def test_what_an_expert_would_try(mistral):
    """Recomputation, although an arm fits without it: it allows more rows per pass and a simpler arm."""
    without = [best(MISTRAL, arm, checkpointing=False).fits for arm in (mistral.choice.arm, "zero3")]
    assert (mistral.choice.checkpointing, mistral.choice.is_tight, without) == (True, False, [False, True])
    assert mistral.choice.bucket_elements == BUCKET_ELEMENTS
    assert [best(BERT, arm, precision=None).precision for arm in ("ddp", "zero1")] == ["bf16", "bf16_cast"]


def test_small_buckets_where_large_ones_do_not_fit():
    question = replace(BERT, model=named("gpt2-medium"), gpus=8, batch=8)
    peak = estimate(training(question, "zero2", 1)).peak_bytes
    enough = (peak + OUTSIDE_AT_MOST_BYTES) / (1 - FRAGMENTATION) + 1e6
    for memory_bytes, elements in ((enough, 6_553_600), (1.2 * enough, BUCKET_ELEMENTS)):
        row = best(replace(question, gpu=replace(GPUS["L4"], memory_bytes=int(memory_bytes))), "zero2")
        assert (row.fits, row.bucket_elements) == (True, elements)


def test_what_fits_leaves_room():
    """By the rule of an advice, which keeps more free than the context and NCCL take."""
    peak = estimate(training(BERT, "zero2", 12)).peak_bytes
    needed = peak + outside_bytes(training(BERT, "zero2", 12))
    for spare, fits in ((-1, "no"), (1, "no"), (OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * 2 * needed, "yes")):
        card = replace(GPUS["L4"], memory_bytes=int(needed + spare))
        assert fits_on(card, peak) == fits
    shown = {share: fits_on(card, peak, int(share * card.memory_bytes)) for share in (0.5, 0.94, 0.96, 1.0)}
    assert shown == {0.5: "yes", 0.94: "yes", 0.96: "only just", 1.0: "only just"}, "what nvidia-smi will show"


def test_an_arm_that_nearly_fills_the_card_says_so_in_its_row_and_comes_after_those_with_room():
    answer = advise(question_of(named("llama-2-13b"), 8, "H100"))
    places = {row["predicted"]: row["fits"] for row in table(answer)}
    full = [row for row in answer.rows if (row.driver_bytes or 0) > 0.95 * row.gpu.memory_bytes]
    assert full, "of some arm nvidia-smi would show nearly the whole card"
    assert answer.choice not in full
    for row in full:
        alternative = row is answer.alternative
        assert places[row.arm] == ("second" if alternative else "tight")
        assert alternative == ("it fits only just" in " ".join(in_words(answer)) and places[row.arm] == "second")


def test_fewer_rows_are_tried_before_offloading_where_most_would_fill_the_card():
    """With two rows nvidia-smi would show 39 of 40 GiB; with one there is room, and a step takes hardly longer."""
    answer = advise(question_of(named("qwen2.5-7b"), 8, "A100-40GB", sequence=4096))
    assert (answer.choice.offloads, answer.choice.is_tight, answer.choice.micro_batch) == (False, False, 1)
    (two,) = [row for row in answer.rows if row.arm == "zero2_cpu"]
    assert two.micro_batch == 2, "where there is room, more rows are better"


@pytest.mark.parametrize("gpus", [9, 15])
def test_nodes_of_any_size_have_a_second_copy_of_the_weights(gpus):
    """hpZ's groups are as large as nodes: of 9 GPUs three."""
    answer = advise(question_of(named("gpt2"), gpus, "H100", batch=gpus))
    assert "zero3_hpz" in [row.arm for row in answer.rows]
    assert answer.choice


FEW = [
    ("gpt2-xl", "T4", {"sequence": 128, "batch": 24, "checkpointing": True}),
    ("qwen2.5-7b", "A100-80GB", {"sequence": 4096}),
]


@pytest.mark.parametrize(("model", "gpu", "flags"), FEW)
def test_no_fewer_gpus_than_are_advised_leave_room(model, gpu, flags):
    """Powers of two alone were tried, and 2 were called enough where the advice then offloaded."""
    found = fewest(*asked(named(model), None, gpu, **flags))
    assert (found.question.gpus, found.only_just, found.with_offloading) == (3, 2, 1)
    assert found.keeps_with_room
    assert not found.choice.offloads
    assert not advise(question_of(named(model), 2, gpu, **flags)).keeps_with_room
    said = f"Enough: 3 x {gpu}. Without offloading 2 fit only just. With offloading 1 is enough."
    assert enough(found, flags.get("batch")) == said
    of_nodes = fewest(*asked(named(model), None, gpu, **flags, gpus_per_node=2))
    assert of_nodes.question.gpus == 4, "3 GPUs do not fill nodes of two"


def test_gpus_are_looked_for_beyond_those_that_are_given():
    flags = {"sequence": 128, "batch": 24, "checkpointing": True}
    assert fewest(*asked(named("gpt2-xl"), None, "T4", **flags), beyond=4).question.gpus == 5
    assert fewest(*asked(named("gpt2-xl"), None, "T4", **flags), beyond=8).question.gpus == 16, "two whole nodes"
    assert fewest(*asked(named("gpt2-xl"), None, "T4"), beyond=MOST_GPUS) is None


def test_a_batch_is_rounded_up_for_the_gpus_that_are_enough():
    """A batch of 2 was for 2 GPUs at most."""
    for batch, less, said in ((16, 8, ""), (2, 6, ", with --batch 16")):
        found = fewest(*asked(named("gpt2"), None, "RTX3090", gpu_memory="2.6GB", sequence=512, batch=batch))
        only_just = f"Without offloading {less} fit only just. With offloading 1 is enough."
        assert enough(found, batch) == f"Enough: 16 x RTX3090 of 2.6 GB{said}. {only_just}"


def test_where_all_that_keeps_the_states_fits_only_just_offloading_is_what_is_enough(monkeypatch):
    """No number of GPUs makes the activations smaller."""
    offered = {"zero1": 78, "zero1_cpu": 40}

    def row_of(_, arm, *__):
        fits = arm.name in offered
        return replace(fitting(arm.name, 1.0, offered.get(arm.name, 90)), fits=fits, driver_bytes=1)

    module = sys.modules[advise.__module__]
    monkeypatch.setattr(module, "best_of_arm", row_of)
    monkeypatch.setattr(module, "_fits_somehow", lambda _, arm: arm.name in offered)
    found = fewest(*asked(named("gpt2"), None, "H100-80GB"))
    assert enough(found, None) == "Enough: 1 x H100-80GB with offloading. Without offloading 2 fit only just."


def test_a_much_faster_arm_that_fits_only_just_is_the_alternative(monkeypatch):
    """best_of_arm is asked for each arm, and answers with these."""
    offered = {"zero1": (1.0, 75), "zero2": (1.31, 40), "zero3": (1.4, 40)}

    def row_of(_, arm):
        return replace(fitting(arm.name, *offered.get(arm.name, (9.0, 40))), fits=True, driver_bytes=1)

    monkeypatch.setattr(sys.modules[advise.__module__], "best_of_arm", row_of)
    assert [row.arm for row in (advise(MISTRAL).choice, advise(MISTRAL).alternative)] == ["zero2", "zero1"]
    offered["zero1"] = (1.1, 75)
    assert [row.arm for row in (advise(MISTRAL).choice, advise(MISTRAL).alternative)] == ["zero2", "zero3"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_offloading_the_states_of_adapters_alone_is_not_tried(gpus):
    model = named("gpt2", lora_rank=8)
    tried_arms = tried(BERT, model=model, gpus=gpus, link="pcie4" if gpus > 1 else None)
    assert {"zero3_cpu", "fsdp2_cpu"} < {*tried_arms}, "what also takes the frozen weights away"
    assert not {"zero1_cpu", "zero2_cpu"} & {*tried_arms}


def test_a_slow_arm_is_not_chosen_for_its_simplicity():
    """A first reader was told to take zero2_cpu, 34 s, beside arms that took 24 to 30."""
    answer = advise(question_of(named("qwen2.5-7b"), 4, "A100-40GB"))
    fastest = min(row.seconds for row in answer.rows if row.fits and not row.is_tight)
    assert answer.choice.seconds <= FASTER * fastest


def test_why_an_offloading_arm_is_chosen_before_a_faster_one():
    """Slower than zero3_cpu, and nearly twice as fast as without offloading: both are reasons."""
    rows = [fitting("zero3", 31), fitting("zero2_cpu", 14), fitting("zero3_cpu", 13)]
    rows = [
        replace(row, fits=True, host_bytes=1e9, precision="bf16_cast", micro_batch=1, accumulation=1) for row in rows
    ]
    choice = best_of(rows)
    words = in_words(Advice(MISTRAL, tuple(rows), choice, None))
    assert choice.arm == "zero2_cpu"
    assert "without offloading (zero3: " in words[-2]
    assert "zero3_cpu would be 1.1 times as fast; zero2_cpu is simpler, which counts up to 1.25 times." in words[-2]
    alike = [rows[0], replace(rows[1], step_s=13.02), rows[2]]
    said = in_words(Advice(MISTRAL, tuple(alike), alike[1], None))[-2]
    assert said.count("zero3_cpu is as fast; zero2_cpu is simpler.") == 1
    slower = replace(rows[0], arm="zero3_hpz", step_s=40)
    for others, more in ((rows[1:], ""), ([slower], "of the others that fit ")):
        tight = [replace(rows[0], peak_bytes=78e9), *others]
        words = in_words(Advice(MISTRAL, tuple(tight), best_of(tight), None))
        assert f"Why: without offloading zero3 fits only just (72.6 of at most 74.1 GiB); {more}" in words[-2]
    only = replace(rows[0], peak_bytes=78e9)
    assert in_words(Advice(MISTRAL, (only,), only, None))[1].endswith("[fits_only_just]")


ROW = {"fits": True, "host_bytes": 1e9, "precision": "bf16_cast", "micro_batch": 4, "accumulation": 8}


@pytest.mark.parametrize(
    ("arm", "precision", "gpu", "said"),
    [
        ("zero1", "bf16_cast", "A100-80GB", "--mixed_precision bf16 train.py`, with a batch of 4 sequ"),
        ("ddp", "bf16", "A100-80GB", "--mixed_precision bf16 train.py`"),
        ("zero2", "bf16_cast", "V100-16GB", "--mixed_precision fp16 train.py`"),
        ("fsdp2", "bf16_cast", "A100-80GB", "--mixed_precision bf16 train.py`"),
        ("fsdp2", "fp16", "A100-80GB", "--mixed_precision fp16 train.py`"),
        ("ddp", "fp16", "V100-16GB", "--mixed_precision fp16 train.py`"),
        ("zero2", "fp16", "A100-80GB", "train.py`, with a batch of 4 sequences and gradient_accumulation_steps=8 in "
         "your script. Its DeepSpeed JSON has `\"torch_autocast\": {\"enabled\": true, \"dtype\": \"float16\"}`."),
        ("single", "bf16_cast", "A100-80GB", "train.py`, with a batch of 4 sequences and "
         "gradient_accumulation_steps=8, and weights in 16 bits in your script."),
        ("ddp", "fp32", "A100-80GB", "train.py`, with a batch of 4 sequences and "
         "gradient_accumulation_steps=8 in your script."),
    ],
)  # fmt: skip
def test_the_command_that_starts_a_choice_has_its_precision_and_batch(arm, precision, gpu, said):
    row = replace(fitting(arm, 2.0), **ROW | {"precision": precision, "gpu": GPUS[gpu]})
    words = in_words(Advice(MISTRAL, (row,), row, None))[-1]
    launch = f"accelerate launch --config_file accelerate_configs/{arm}.yaml --num_processes 8"
    assert words.startswith(f"Start it: `{launch} {said}"), words
    assert ("Without --mixed_precision a model in fp32 trains in fp32." in words) == ("--mixed_precision" in said)
    stage = f'`"zero_optimization": {{"stage": {arm[4:]}, '
    section = f'}}, "{said.split()[1]}": {{"enabled": true}}`'
    is_cast = arm.startswith("zero") and precision == "bf16_cast"
    assert ("A Trainer's DeepSpeed JSON has" in words) == is_cast == (stage in words) == (section in words), words


# Of a question: what is the model or the machine, or what an arm's row has instead.
OF_GUIDE = (ROOT / "GUIDE.md").read_text().partition("## Several machines")[2].partition(" study/train.py")[0]
SEVERAL = " ".join(OF_GUIDE.replace("\\\n", " ").replace("10.0.0.1", "FIRST_MACHINE").split())
NOT_STARTED = {
    "model", "gpu", "link", "host_memory_bytes", "disk_bytes_per_s", "pace", "sequence", "batch", "precision",
    "checkpointing", "sync_each_batch",
}  # fmt: skip
STARTED = {
    "gpus": (16, SEVERAL.partition("--config_file accelerate_configs/zero3.yaml ")[2]),
    "gpus_per_node": (4, "Start it on each of 2 machines, with the address of the first for FIRST_MACHINE"),
    "optimizer": ("adamw_8bit", "`AdamW8bit` of bitsandbytes"),
    "quantized": ("int8", "load_in_8bit=True"),
    "attention_kernel": ("flash3", "flash3 attention"),
    "chunked_loss": (True, "a loss in pieces"),
    "compiled": (True, "`torch.compile`"),
    "optimizer_in_backward": (True, "within the backward pass"),
}
OF_ROW = {
    "arm": ("zero2", "accelerate_configs/zero2.yaml"),
    "gpu": (GPUS["V100-32GB"], "--mixed_precision fp16"),
    "precision": ("fp16", '`"torch_autocast": {"enabled": true, "dtype": "float16"}`'),
    "checkpointing": (True, "activation checkpointing"),
    "micro_batch": (2, "a batch of 2 sequences"),
    "accumulation": (4, "gradient_accumulation_steps=4"),
    "bucket_elements": (BUCKET_ELEMENTS, '"reduce_bucket_size": 50000000, "allgather_bucket_size": 50000000'),
    "sync_each_batch": (True, "`GradientAccumulationPlugin(num_steps=8, sync_each_batch=True)`"),
}
OF_NUMBERS = {
    "fits", "limit", "peak_bytes", "headroom_bytes", "driver_bytes", "host_bytes", "step_s", "step_interval_s",
}  # fmt: skip


def test_what_was_predicted_is_started():
    """Each option of a prediction is in the line that starts it: a new one has to be, or is no option."""
    assert {field.name for field in fields(Question)} == NOT_STARTED | {*STARTED}
    assert {field.name for field in fields(Row)} == OF_NUMBERS | {*OF_ROW}
    row, several = replace(fitting("zero1", 2.0), **ROW), replace(MISTRAL, batch=48)
    plain = start(row, several)
    for changed, given in ((STARTED, several), (OF_ROW, row)):
        for name, (value, said) in changed.items():
            other = replace(given, **{name: value, **({"gpus": 1, "link": None} if "backward" in name else {})})
            words = start(row, other) if given is several else start(other, several)
            assert said in words, name
            assert said not in plain, name
    assert "`AdamW(fused=True)`" in plain
    assert "yours to set" not in start(replace(row, arm="zero2_cpu"), several), "Accelerate makes DeepSpeedCPUAdam"
    alone = replace(several, gpus=1, link=None)
    assert "--num_" not in start(row, alone)
    small = start(replace(row, bucket_elements=6_553_600), several)
    assert "for small models" not in small
    nodes = replace(several, gpus=12, gpus_per_node=4)  # groups are nodes
    assert 'Write there `"zero_hpz_partition_size": 4`.' in start(replace(row, arm="zero3_hpz"), nodes)
    groups = "`parallelism_config_dp_replicate_size: 3` and `parallelism_config_dp_shard_size: 4`"
    assert f"Write in the arm's yaml {groups}." in start(replace(row, arm="hsdp"), nodes)


def test_the_reason_names_unequal_weights():
    """A student read in the table that stage 1 is 1.5 times as fast as DDP."""
    volta = GPUS["V100-32GB"]
    zero1, ddp = (replace(fitting(arm, seconds), **ROW | {"gpu": volta, "precision": precision, "limit": "compute"})
                  for arm, seconds, precision in (("zero1", 2.0, "bf16_cast"), ("ddp", 3.0, "bf16")))  # fmt: skip
    advice = Advice(replace(MISTRAL, gpu=volta, precision="bf16"), (ddp, zero1), zero1, None)
    assert "takes 1.5 times as long with fp32 weights, where zero1 has fp16, which" in reason_for(advice, zero1)
    alike = replace(advice, rows=(replace(ddp, precision="bf16_cast"), zero1))
    assert "takes 1.5 times as long, which" in reason_for(alike, zero1)
    told = in_json(advice)
    assert [row["computes_in"] for row in (told["choice"], *told["rows"])] == ["fp16"] * 3, "no bf16 on Volta"


@pytest.mark.parametrize("quantized", get_args(Quantized))
@pytest.mark.parametrize("arm", ["ddp", "single", "zero2"])
def test_the_line_that_starts_a_choice_quantizes_what_was_counted_so(quantized, arm):
    row = replace(fitting(arm, 2.0), **ROW)
    words = start(row, replace(MISTRAL, quantized=quantized))
    bits = "load_in_8bit" if quantized == "int8" else "load_in_4bit"
    assert f"and `BitsAndBytesConfig({bits}=True" in words
    assert ("bnb_4bit_use_double_quant=True" in words) == (quantized == "nf4_double")
    assert "weights in 16 bits" not in words


@pytest.mark.parametrize("arm", arms.NAMES)
def test_no_advice_calls_autocast_what_accelerate_does_with_fsdp2(arm):
    """It casts what is gathered, and runs no autocast: _prepare_fsdp2 of Accelerate 1.15 never calls prepare_model."""
    row = replace(fitting(arm, 2.0), **ROW | {"precision": "fp16", "gpu": GPUS["V100-16GB"]})
    said = use(row, replace(MISTRAL, gpu=row.gpu), (1, "s"))
    by_fsdp = arms.load_arm(arm).fsdp is not None
    assert ("in fp16, cast when gathered" in said, "autocast" in said) == (by_fsdp, not by_fsdp)


def test_a_choice_by_precision_says_so_and_what_it_is_on_a_gpu_without_bf16():
    for gpu, meant in (("T4", ", which is fp16 on a T4,"), ("A100-80GB", "")):
        advice = advise(replace(BERT, gpu=GPUS[gpu], precision=None))
        choice, ddp = (replace(fitting(arm, 2.0), gpu=GPUS[gpu], precision=precision) for arm, precision in
                       (("zero1", "bf16_cast"), ("ddp", "bf16")))  # fmt: skip
        said = by_precision(replace(advice, rows=(ddp, choice), alternative=None), choice)
        assert said.startswith(f" Precision decides that: by default ddp runs in autocast and zero1 does not. With "
                               f"--precision bf16_cast{meant} use ddp, "), said  # fmt: skip


def test_what_room_costs_is_said_below_the_table():
    """A row with room has more passes, so that stage 2 looks twice as slow as stage 1."""
    advice = advise(question_of(generic(3e9, 26, 3200), 8, "RTX4090", sequence=1024))
    found = held_back(advice)
    assert "zero2" in [arm for arm, *_ in found]
    for arm, rows, passes, step_s in found:
        row = next(row for row in advice.rows if row.arm == arm)
        more = Prediction.of(training_of(advice.question, replace(row, micro_batch=rows, accumulation=passes)))
        assert fits_on(row.gpu, more.memory.peak_bytes, more.kinds(row.gpu).driver) == "only just"
        assert row.seconds >= FASTER * step_s
        assert f"{arm} {rows} x {passes}" in below_table(advice)
    assert "Faster" not in below_table(replace(advice, rows=tuple(row for row in advice.rows if row.arm == "ddp")))


def test_the_fastest_says_whether_it_is_also_the_simplest():
    fast, slow = (replace(fitting(arm, seconds), **ROW) for arm, seconds in (("zero2", 2.0), ("zero1", 3.0)))
    said = in_words(Advice(MISTRAL, (slow, fast), fast, None))[-2]
    expected = "it is the fastest; zero1 is simpler, but takes 1.5 times as long, which counts from 1.25 times on."
    assert said.endswith(expected), said
    simplest = replace(fast, arm="zero1")
    slower = replace(slow, arm="zero3")
    assert in_words(Advice(MISTRAL, (simplest, slower), simplest, None))[-2].endswith("the fastest and the simplest.")
    alone = in_words(Advice(MISTRAL, (fast,), fast, None))[-2]
    assert alone.endswith("Why: no other row fits without offloading."), alone


def test_the_room_is_said_and_what_is_unexpected_of_stage_3():
    zero2, zero3 = (replace(fitting(arm, 2.0, peak_gb), **ROW) for arm, peak_gb in (("zero2", 40), ("zero3", 41)))
    advice = Advice(MISTRAL, (zero2, zero3), zero2, None)
    assert below_table(advice) == "fits: up to 73.8 of 80 GiB; the rest is for context and fragmentation."
    (said,) = stage_3_holds_no_less(advice)
    assert said.endswith("[stage_3_holds_no_less]")
    for other in ({"peak_bytes": 45e9}, {"checkpointing": True}, {"micro_batch": 8}, {"precision": "fp32"}):
        assert not stage_3_holds_no_less(Advice(MISTRAL, (zero3, replace(zero2, **other)), zero2, None)), other


@pytest.mark.parametrize("arm", ["zero1", "zero2", "zero3"])
def test_stages_1_and_2_are_said_to_need_as_much_only_where_the_update_decides(arm):
    other = {"zero1": "Stage 2", "zero2": "Stage 1"}.get(arm)
    for gpus, sequence, is_said in ((2, 64, True), (4, 64, True), (8, 64, False), (4, 1024, False), (1, 64, False)):
        question = question_of(named("gpt2-xl"), gpus, "H100", sequence=sequence, batch=gpus)
        said = stages_note(training(question, arm, 1))
        if gpus == 1:
            assert ["[one_rank_divides_nothing]" in each for each in said] == [True] * (arm != "ddp")
            continue
        said = [each for each in said if "[stage_3_holds_no_less]" not in each]
        assert [each.partition(" needs about as much here, ")[0] for each in said] == [other] * bool(is_said and other)


@pytest.mark.parametrize(
    ("model", "arm", "sequence", "is_said"),
    [
        ("bert-large", "zero3", 512, True),
        ("bert-large", "zero2", 512, False),
        ("bert-large", "zero3_cpu", 512, False),
        ("bert-large", "zero3_nvme", 512, False),
        ("bert-large", "zero3_opt_cpu", 512, False),
        ("llama3-8b", "zero3", 512, False),
    ],
)
def test_stage_3_is_said_to_need_no_less_where_it_does(model, arm, sequence, is_said):
    question = question_of(named(model), 4, "H100", sequence=sequence, batch=4)
    said = stages_note(training(question, arm, 1))
    assert any("[stage_3_holds_no_less] With zero2 a rank needs " in each for each in said) == is_said


def test_the_optimizer_alone_goes_to_the_host_where_that_fits_and_is_faster(mistral):
    advice = advise(question_of(named("llama3-8b"), 8, "RTX4090", sequence=4096))
    rows = {row.arm: row for row in advice.rows}
    here, both = rows["zero3_opt_cpu"], rows["zero3_cpu"]
    assert (here.fits, both.fits, here.seconds < both.seconds) == (True, True, True)
    assert here.host_bytes < both.host_bytes, "the weights are not there"
    assert advice.choice is here
    words = " ".join(in_words(advice))
    assert f"Use {here.arm} " in words
    assert (
        "--config_file accelerate_configs/variants/zero3_opt_cpu.yaml --num_processes 8 --mixed_precision bf16" in words
    )
    assert '"offload_optimizer": {"device": "cpu"}' in words.partition("A Trainer's")[2]
    on_host = Prediction.of(training_of(advice.question, here)).memory.on_host
    assert on_host["moments"]
    assert not on_host.get("weights")


@pytest.mark.parametrize("fastest_s", [0.4, 20, 119, 3000, 8000])
def test_an_advice_has_one_unit_of_time(fastest_s):
    rows = [fitting("zero1", fastest_s), fitting("zero3", 9 * fastest_s), fitting("zero1_cpu", 1.1 * fastest_s)]
    rows = [replace(row, **ROW) for row in rows]
    words = " ".join(in_words(Advice(MISTRAL, tuple(rows), rows[0], rows[1])))
    assert len({*re.findall(r"(?<=\d )(?:ms|s|min|h)\b", words)}) == 1


def test_ddp_in_fp32_weights_is_said_to_fit_in_16_bits():
    """A 3090 holds no 1.2 GB model with fp32 weights at this batch, and does with 16 bits."""
    small = question_of(named("gpt2-large"), 4, "RTX3090")
    row = best(small, "ddp")
    unfit = replace(row, fits=False, limit="GPU memory", step_s=None)
    (said,) = widest(Advice(small, (unfit,), None, None))
    assert said.startswith("ddp is compared with fp32 weights and autocast: with --precision bf16_cast it fits, ")
    assert not widest(Advice(replace(small, precision="bf16"), (unfit,), None, None))


def test_why_an_arm_is_chosen_before_one_that_offloads_and_divides_less_or_is_faster():
    def said(offloading: str, seconds: float) -> str:
        about = {"fits": True, "host_bytes": 1e9, "precision": "bf16_cast", "micro_batch": 1, "accumulation": 1}
        rows = tuple(replace(row, **about) for row in (fitting("zero3", 2.0), fitting(offloading, seconds)))
        return in_words(Advice(MISTRAL, rows, rows[0], None))[-2]

    for offloading, seconds in (("zero1_cpu", 3.0), ("zero3_cpu", 1.5)):
        assert f"{offloading} ({seconds:g} s" in said(offloading, seconds)
        assert "nearly twice as fast" in said(offloading, seconds)
    assert "nearly" not in said("zero3_cpu", 3.0)


SIMPLEST = "the simplest of the next fastest"


@pytest.mark.parametrize(
    ("chosen", "other", "peak_bytes", "said"),
    [
        (("zero2", 2.0), ("zero3", 3.0), 1e9, f"{SIMPLEST}: 1.5 times as long."),
        (
            ("zero2", 2.0),
            ("zero2_cpu", 1.6),
            1e9,
            f"{SIMPLEST}: 1.3 times as fast, with offloading.",
        ),
        (("zero2", 2.0), ("zero3", 1.8), 1e9, f"{SIMPLEST}: 1.1 times as fast; zero2 is simpler."),
        (("zero2", 2.0), ("zero3", 2.01), 1e9, f"{SIMPLEST}: as fast."),
        (("zero3", 3.0), ("zero2", 2.0), 78e9, "1.5 times as fast, but it fits only just (72.6 of at most 74.1 GiB)"),
        (("zero2_cpu", 2.0), ("zero3", 3.0), 1e9, "1.5 times as long, and without offloading, as published"),
    ],
)
def test_an_alternative_has_its_reason(chosen, other, peak_bytes, said):
    about = {"fits": True, "host_bytes": 1e9, "precision": "bf16_cast", "micro_batch": 1, "accumulation": 1}
    choice, alternative = (replace(fitting(*each), **about) for each in (chosen, other))
    alternative = replace(alternative, peak_bytes=peak_bytes)
    line = in_words(Advice(MISTRAL, (choice, alternative), choice, alternative))[1]
    assert line.startswith(f"Alternative: {other[0]}, ")
    assert f"; {said}" in line


def test_a_card_outside_the_list_and_a_slice_are_like_a_known_one():
    told = {"gpu_memory": "12GB", "gpu_tflops": 51}
    question = question_of(named("gpt2"), 1, "RTX3090", **told)
    mine, like = question.gpu, GPUS["RTX3090"]
    assert (mine.memory_bytes, mine.peaks["fp16"], mine.host_link) == (12 * 2**30, 51e12, like.host_link)
    assert mine.kind not in GPUS, "the list stays as it is"
    assert mine.memory_bytes_per_s / like.memory_bytes_per_s == pytest.approx(51e12 / like.peaks["fp16"])
    assert class_of("products", mine) == class_of("products", like)
    half = question_of(named("gpt2"), 1, "A100", gpu_memory="40GB").gpu
    assert (half.kind, half.memory_bytes) == ("A100-80GB of 40 GB", GPUS["A100-40GB"].memory_bytes), "as labels say"
    assert half.peaks == GPUS["A100-80GB"].peaks


def test_single_is_for_one_gpu_and_muon_for_arms_without_a_stage():
    """What DeepSpeed's Muon holds is not predicted."""
    alone = advise(replace(BERT, gpus=1, link=None))
    assert (alone.choice.arm, alone.alternative.arm) == ("single", "zero1_cpu"), "nothing is shared on one GPU"
    assert "single" not in tried(BERT)
    assert tried(BERT, optimizer="muon") == ["ddp"]


def test_beside_gpus_only_copies_in_another_type_are_loaded_to_the_host():
    needed = [loading_bytes(named("gpt2"), 8, size) for size in (2, 4)]
    assert needed == [8 * HOST_PROCESS_BYTES, 8 * (HOST_PROCESS_BYTES + 4 * 124_439_808)]


def test_where_the_launch_bound_an_advice_says_so_and_what_a_larger_batch_would_bring():
    small = replace(BERT, gpu=GPUS["H100-80GB"], link="nvswitch", batch=8)
    advice = advise(small)
    larger = with_more_rows(small, advice.choice)
    assert advice.choice.limit == "launching"
    assert (larger.arm, larger.micro_batch * larger.accumulation * small.gpus) == (advice.choice.arm, 4 * small.batch)
    assert larger.seconds < 1.5 * advice.choice.seconds, "for four times the rows"
    longer = times(larger.seconds / advice.choice.seconds)
    words = f"(--batch {4 * small.batch}) would take {longer} as long. [launch_bound]"
    assert words in in_words(advice)[-1]
    large = advise(replace(BERT, batch=4096))
    assert not [line for line in in_words(large) if "The host decides" in line]


def test_what_other_loops_do_is_an_option_of_the_machine():
    machine = question_of(named("gpt2"), 1, "H100", compiled=True, attention_kernel="flash3").machine
    assert (machine.fused_kernels, machine.host, machine.attention) == (True, "none", "flash3")


def test_an_optimizer_within_the_backward_pass_keeps_no_gradients_and_is_for_one_process_and_one_pass():
    model = named("gpt2")
    flags = {"sequence": 64, "batch": 1, "precision": "bf16_pure", "checkpointing": False}
    plain, fused = (question_of(model, 1, "H100", **flags, optimizer_in_backward=is_on) for is_on in (False, True))
    spared = best(plain, "single").peak_bytes - best(fused, "single").peak_bytes
    assert model.parameters < spared < 2 * model.parameters, "all but the largest"
    assert tried(fused) == ["single"]
    with pytest.raises(Stop, match="one process and one micro-batch"):
        training(replace(fused, batch=2), "single", 1)


def test_a_single_card_is_told_of_8_bit_adam_and_bf16_before_it_offloads():
    answer = advise(question_of(named("llama3.2-1b"), 1, "RTX4090"))
    assert answer.choice.offloads
    assert [option for option, _ in answer.ways_out] == ["--optimizer adamw_8bit", "--precision bf16_pure"]
    said = " ".join(in_words(answer))
    for option, row in answer.ways_out:
        assert (row.fits, row.offloads) == (True, False)
        assert f"Without offloading: {option}, " in said
    assert "moments of 8 bits" in said
    assert "round small updates away" in said
    assert not advise(question_of(named("gpt2"), 1, "H100")).ways_out, "it does not offload"


def test_no_bf16_is_proposed_to_a_card_without_it():
    answer = advise(question_of(named("llama3.2-1b"), 1, "T4"))
    assert answer.choice.offloads
    assert "bf16_pure" not in " ".join(option for option, _ in answer.ways_out)


def test_fsdp2_reduces_each_micro_batch_where_whole_gradients_have_no_room():
    asked = question_of(named("llama3-8b"), 8, "RTX3090", sequence=1024)
    answer = advise(asked)
    rows = {row.arm: row for row in answer.rows}
    assert (rows["fsdp2"].fits, rows["fsdp2"].sync_each_batch, rows["zero3"].sync_each_batch) == (True, True, False)
    whole = estimate(training_of(asked, replace(rows["fsdp2"], sync_each_batch=False)))
    kept = 2 * asked.model.parameters * (1 - 2 / 8)  # in 16 bits, and not a rank's part in fp32
    assert whole.peak_bytes - rows["fsdp2"].peak_bytes == pytest.approx(kept, rel=0.01)
    assert "fsdp2, fsdp2_grad_op: compared with Grad" in synced(answer)[0]
    roomy = advise(question_of(named("gpt2"), 8, "H100"))
    assert not synced(roomy)
    assert not any(row.sync_each_batch for row in roomy.rows)


def test_a_loss_in_pieces_is_tried_before_offloading():
    asked = question_of(named("qwen2.5-7b"), 4, "A100-40GB", sequence=4096)
    answer = advise(asked)
    assert answer.choice.offloads
    [(option, row)] = answer.ways_out
    assert (option, row.offloads, row.fits) == ("--chunked-loss", False, True)
    [line] = [line for line in in_words(answer) if line.startswith("Without offloading")]
    assert f"--chunked-loss, {way(row)}" in line
    both = way(replace(row, checkpointing=True, sync_each_batch=True))
    assert both == f"{row.arm} with activation checkpointing and sync_each_batch=True"
    assert "Liger" in line
    assert not advise(replace(asked, chunked_loss=True)).ways_out, "nothing more to try"


@pytest.mark.parametrize(
    ("model", "gpus", "flags", "ways", "ends"),
    [
        ("llama-3.1-8b", 8, {"sequence": 65536}, [("--chunked-loss", "zero3")], None),
        (
            "llama-3.1-8b",
            8,
            {"sequence": 131072},
            [("--chunked-loss", "zero3_opt_cpu"), ("--chunked-loss", "zero3_ulysses")],
            None,
        ),
        ("llama-3.1-8b", 1, {"sequence": 131072}, [("--chunked-loss", "zero3_cpu")], None),  # nobody to share with
        (
            "llama-3.1-8b",
            8,
            {"sequence": 131072, "chunked_loss": True, "checkpointing": False},
            [("--checkpointing", "zero3_opt_cpu"), ("--checkpointing", "zero3_ulysses")],
            None,
        ),
        ("qwen2.5-32b", 2, {"sequence": 131072}, [], "needs_sequence_parallelism"),
        ("qwen2.5-32b", 2, {"sequence": 512, "host_memory": "64GB"}, [], "needs_other_parallelism"),  # its states
    ],
)
def test_where_nothing_fits_what_does_is_told_and_other_parallelism_only_where_nothing_does(
    model, gpus, flags, ways, ends
):
    """A long sequence is divided by ranks that share it: neither adapters nor stages make it smaller."""
    asked = question_of(named(model), gpus, "H100", **flags)
    answer = advise(asked)
    assert answer.choice is None
    assert [(option, row.arm) for option, row in answer.ways_out] == ways
    assert all(row.fits for _, row in answer.ways_out)
    for option, row in answer.ways_out:  # what is told is what the other command predicts
        options = {"chunked_loss": True} if "chunked" in option else {"checkpointing": True}
        predicted = training_of(replace(asked, **options), row)
        assert estimate(predicted).peak_bytes == row.peak_bytes
    words = in_words(answer)
    is_long = flags["sequence"] > 512
    assert any("[sequences_fill_the_gpu]" in each for each in words) == is_long
    assert any("[adapters_need_less]" in each for each in words) != is_long
    if is_long and "chunked_loss" not in flags:
        [line] = [each for each in words if "sequences_fill" in each]
        logits = float(re.search(r"and (\d+) GiB of these are whole logits", line)[1]) * 2**30
        of_tokens = flags["sequence"] * asked.model.look.vocabulary
        assert 8 < logits / of_tokens < 12, "of each logit some copies in 16 and 32 bits"
    assert [re.search(r"\[(\w+)\]", each)[1] for each in no_way_out(answer)] == ([ends] if ends else [])


@pytest.mark.parametrize(
    ("model", "arm", "ranks", "said"),
    [
        ("mixtral-8x7b", "fsdp2", 16, "up to 1 expert, and 8 of 16 ranks hold none"),
        ("mixtral-8x7b", "fsdp2_cpu", 6, "up to 2 experts, and 2 of 6 ranks hold none"),
        ("mixtral-8x7b", "fsdp2", 8, None),
        ("mixtral-8x7b", "hsdp", 16, None),  # groups of 8
        ("mixtral-8x7b", "zero3", 16, "deepspeed.utils.set_z3_leaf_modules(model"),
        ("mixtral-8x7b", "zero2", 16, None),
        ("llama3-8b", "zero3", 16, None),
        ("llama3-8b", "fsdp2", 48, None),  # nothing to speak of
    ],
)
def test_what_experts_need_with_stage_3_and_how_unequally_fsdp2_divides_them_is_told(model, arm, ranks, said):
    asked = question_of(named(model), ranks, "H100", batch=ranks)
    predicted = asked.training(settled_arm(arms.load_arm(arm), ranks, asked.local), 1, 1)
    lines = experts_note(predicted)
    assert [said in line for line in lines] == ([True] if said else [])
    even = sum(each.elements for each in predicted.tensors) / predicted.placement.sharing_ranks
    held = estimate(predicted).at_peak.get("weights", 0) / predicted.recipe.weight_bytes
    if arm.startswith("fsdp2") and "cpu" not in arm:
        assert (held > 1.1 * even) == bool(said), "the prediction has the same cause"


def test_tokens_a_second_and_mfu_are_those_of_the_seconds():
    """MFU by hand: 6 operations for each weight of a product, and 12 for each pair of tokens, layer and width."""
    asked = question_of(named("llama3-8b"), 8, "A100-80GB", sequence=8192)
    answer = advise(asked)
    [line] = throughputs(answer)
    said = dict(re.findall(r"(\w+) ([\d,]+ \(\d+%\))", line.partition(":")[2]))
    assert [*said] == [row.arm for row in answer.rows if row.fits]
    for row in (row for row in answer.rows if row.fits):
        tokens, mfu = (float(each) for each in re.findall(r"[\d]+", said[row.arm].replace(",", "")))
        expected = 128 * 8192 / 8 / row.step_s
        assert tokens == pytest.approx(expected, rel=0.05)
        products = asked.model.parameters - 128256 * 4096  # the embedding is a look-up
        of_token = 6 * products + 12 * 32 * 4096 * 8192
        assert mfu / 100 == pytest.approx(expected * of_token / 312e12, abs=0.006)
    assert not throughputs(advise(question_of(named("llama3-8b"), 1, "T4", checkpointing=False)))


def test_only_just_never_comes_without_its_number():
    """From the peak, or from what nvidia-smi will show."""
    full = replace(fitting("zero2", 1.0, 60), driver_bytes=int(84e9))
    near = fitting("zero2", 1.0, 75)
    assert (full.is_tight, near.is_tight) == (True, True)
    assert why_tight(full) == "nvidia-smi shows 78 of 80 GiB, full from 76.0 on"
    assert why_tight(near) == "69.8 of at most 74.1 GiB"


def test_what_keeps_all_on_the_gpus_is_the_alternative_of_an_arm_that_offloads(monkeypatch):
    """70 billion on 16 A100: published trainings offload nothing. What fits only just is named, faster or not."""
    offered = {"zero3_cpu": (1.0, 30), "fsdp2": (0.9, 75)}

    def row_of(_, arm):
        return replace(fitting(arm.name, *offered.get(arm.name, (9.0, 95))), fits=arm.name in offered, driver_bytes=1)

    monkeypatch.setattr(sys.modules[advise.__module__], "best_of_arm", row_of)
    answer = advise(replace(MISTRAL, chunked_loss=True))
    assert (answer.choice.arm, answer.alternative.arm) == ("zero3_cpu", "fsdp2")


def test_a_batch_that_does_not_divide_gets_the_two_that_do():
    with pytest.raises(Stop, match="give --batch 6 or 9"):
        question_of(named("gpt2"), 3, "H100", batch=8)
    with pytest.raises(Stop, match=r"give --batch 8$"):
        question_of(named("gpt2"), 8, "H100", batch=3)


def test_an_optimizer_in_the_backward_pass_is_for_one_gpu_and_nothing_that_was_given_is_recommended():
    with pytest.raises(Stop, match="leave --optimizer-in-backward out"):
        question_of(named("gpt2"), 2, "H100", optimizer_in_backward=True)
    flags = (TrainingFlags(), PlaceFlags(gpu="T4", optimizer_in_backward=True), StepFlags(batch=8))
    assert fewest(named("llama-2-7b"), *flags) is None, "more GPUs are not looked for"
