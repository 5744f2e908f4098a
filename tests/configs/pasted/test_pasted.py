"""A pasted text gets one answer, and nothing is taken for something else."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from study.cli import diagnosis, pasted
from study.configs.code import that_counts
from study.configs.oom.by_text import by_text
from study.configs.pasted import (
    condense,
    in_use,
    matching,
    memory,
    situations,
    tracebacks,
    two_releases,
    watchdogs,
    words,
)
from study.configs.pasted.answer import answer
from study.configs.pasted.config_in_text import deepspeed_config
from study.configs.pasted.ranking import OF_NAN, WAITED
from study.configs.pasted.read import read
from study.configs.pasted.said import said as said_of
from study.configs.pasted.told import told as of_model
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.known.faults import releases_of
from study.known.faults import table as faults
from tests.cases import for_each
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT, python, table

WORK = (
    "[rank{rank}]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={index}, OpType={kind}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran "
    "for 600060 milliseconds before timing out.\n"
)
OF_STEP = "{'loss': 1.5, 'grad_norm': 0.61, 'learning_rate': 0.0001, 'epoch': 0.1}"
WHOLE_WORDS: dict[str, bool] = {"break_long_words": False, "break_on_hyphens": False}
HERE = ROOT / "tests/configs/pasted"
EXAMPLES = table("configs/pasted/examples.toml")
WELL = {id: row["text"] for id, row in table("configs/pasted/well.toml").items()}
WELL |= {path.stem: path.read_text() for path in sorted((HERE / "healthy").iterdir())}
HARMLESS = (HERE / "harmless.txt").read_text().splitlines()  # which libraries print in trainings that are well
JUDGED = table("configs/pasted/judged.toml")
ROWS = {
    row["name"]: row | {"folder": which}
    for which in (
        "threads",
        "threads2",
        "threads3",
        "threads4",
        "threads5",
        "threads6",
        "threads7",
        "threads8",
        "threads9",
    )
    for row in table(f"configs/pasted/{which}.toml")["thread"]
}
THREADS = {name: (HERE / row["folder"] / f"{name}.txt").read_text() for name, row in ROWS.items()}
# What the reader said of each set before it had seen it: right or helpful, and wrong.
UNSEEN = {
    "a": (7, 0),
    "b": (6, 2),
    "c": (5, 2),
    "d": (8, 3),
    "e": (7, 2),
    "f": (8, 5),
    "g": (14, 1),
    "h": (8, 1),
    "i": (7, 2),
    "j": (4, 4),
    "k": (14, 0),
    "l": (13, 0),
    "m": (7, 3),
}


# --- the tables ------------------------------------------------------------------------------------------------------


# Several tests look at the answer to one text.
answered = functools.cache(answer)
diagnosed = functools.cache(functools.partial(answer, by_text=by_text))  # as `study diagnose` answers


def example(id: str) -> str:
    place = "tests/configs/pasted/examples.toml"
    assert "text" in EXAMPLES.get(id, {}), (
        f"{id} has no example: add [{id}] with a `text`, as it is printed, to {place}"
    )
    return EXAMPLES[id]["text"]


@for_each("id", EXAMPLES)
def test_each_example_has_a_row(id):
    tables = "tracebacks.toml, signs.toml or situations.toml in study/configs/pasted/"
    rows = {*tracebacks.messages(), *tracebacks.rows(), *situations.situations()}
    assert id in rows, f"{id} has an example and no row: add [{id}] to {tables}, or correct the name in examples.toml"


OF_NOTES = {*tracebacks.rows(), *matching.symptoms_table()}  # a note explains signs and symptoms, too


@for_each("id", tracebacks.messages())
def test_each_message_is_explained_by_its_row_and_by_no_other(id):
    message = tracebacks.messages()[id]
    found = [each.id for each in tracebacks.errors(example(id))]
    assert found == [id], (
        f"the example of {id} meets {found}: correct its `pattern`, or name rows that say less in `hides`"
    )
    explained = {*tracebacks.messages(), *(OF_NOTES if message.note else ())}
    assert {*message.hides} <= explained, f"{id}: `hides` names no row of tracebacks.toml"
    known = {fault.id for fault in faults().fault}
    assert not message.fault or message.fault in known, f"{id}: `fault` names none of study/known/faults.toml"


def test_a_message_is_known_as_it_is_quoted_wrapped_and_printed_by_a_rank():
    for id, message in tracebacks.messages().items():
        lines = example(id).splitlines()
        texts = [
            "\n".join(f"> [rank3]: {line}" for line in lines),
            "\n".join(f"\u2502 {line} \u2502" for line in lines),
        ]
        if not re.search(r"\\n|(?<!\\)\.", message.pattern):  # what has to stand on one line is not wrapped
            texts.append("\n".join("> " + part for line in lines for part in textwrap.wrap(line, 50, **WHOLE_WORDS)))
        for text in texts:
            assert id in [each.id for each in tracebacks.errors(text)], text


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("RuntimeError: Expected all tensors to be on the same devic", "two-devices"),
        ("RuntimeError: CUDA error: device-side assert trigg...", "device-assert"),
        ("ValueError: DeepSpeed Zero-3 is not compatible wit", "zero3-device-map"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration befo", "unused-parameters"),
        # What differs is cut off, or nothing is.
        ("RuntimeError: Expected all tensors to be on the same device, but found at least two device", ""),
        ("RuntimeError: CUDA error: operation n", ""),
        ("AttributeError: 'NoneType' object has no attr", ""),
        ("AttributeError: 'Odd' object has no attribute 'd", ""),
        ("RuntimeError: Expected all ten", ""),
        ("RuntimeError: Expected all tensors to be on the same devices", ""),
        ("RuntimeError: Expected all tensors to be on the same devic\nTraining goes on", ""),
    ],
)
def test_a_message_that_is_cut_at_the_end_of_a_text_is_known_if_it_is_one_alone(line, id):
    told = answer(f'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    main()\n{line}')
    assert (told.id, told.is_answered) == (id, bool(id))
    assert answer(f"{line}\n", "crashed").id == answer(f"{line}\n\n\f\nimport torch").id == id
    assert not {*"{}"} & {*"".join(each.sentence + each.remedy for each in told.found)}


def test_a_difference_that_a_library_accepts_is_no_error():
    differ = "Installed CUDA version 12.2 does not match the version torch was compiled with 12.4"
    accepted = f"{differ} but since the APIs are compatible, accepting this combination"
    for text in (accepted, textwrap.fill(accepted, 50), textwrap.indent(accepted, "[rank0]: ")):
        assert tracebacks.errors(text) == []
    for text in (f"{accepted}\n{example('cuda-mismatch')}", f"{example('cuda-mismatch')}\n{accepted}"):
        assert [each.id for each in tracebacks.errors(text)] == ["cuda-mismatch"]


@for_each("id", [*tracebacks.rows(), *situations.situations()])
def test_each_sign_and_each_situation_is_seen_in_its_text(id):
    assert id in [each.id for each in diagnosed(example(id)).found]


def test_an_answer_is_in_its_first_two_lines_at_80_columns():
    for id in EXAMPLES:
        found = diagnosed(example(id)).found
        assert found, f"nothing is found in the example of {id}: its row is missing, or its `pattern` does not fit"
        first = found[0]
        assert len(f"{pasted.HOW_SURE[first.sure]}{first.sentence}") <= 2 * 78, id
        assert first.sure in ("sure", "likely", "possible")
        assert all((first.sentence, first.remedy, first.evidence))


@pytest.mark.parametrize(
    "texts", [{id: row.get("text", "") for id, row in EXAMPLES.items()}, THREADS], ids=["rows", "threads"]
)
def test_an_answer_hedges_once(texts, capsys):
    """Not “Likely: memory was full: perhaps ...”, where a reader does not know which of both counts."""
    hedge = re.compile(r"\b(likely|perhaps|possibl[ey]|maybe|probably|usually|mostly|most often)\b", re.IGNORECASE)
    for name, text in texts.items():
        pasted.tell(diagnosed(text), details=False)
        said, *also = re.findall(r"(?s)\A(.+?)(?:\n\n|\Z)|(?<=Also seen: )(.+?)(?=What to do)", capsys.readouterr().out)
        assert [each for each in map("".join, (said, *also)) if len(hedge.findall(each)) > 1] == [], name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step 1 loss 10.2 grad_norm nan\nstep 2 loss nan", "norm-nan-first at step 1"),
        ("step 7 loss 2.1 grad_norm 3.0\nstep 8 loss 2.1 grad_norm inf\nstep 9 loss nan", "norm-nan-first at step 8"),
        (
            "step 1 loss 9 grad_norm inf\nstep 2 loss 9 grad_norm 2.5\nstep 3 loss 9 grad_norm nan\n"
            "step 4 loss 9 grad_norm nan\nstep 5 loss nan grad_norm nan",
            "norm-nan-first at step 3",
        ),
        ("step 1 loss 10.2\nstep 1 grad_norm nan\nstep 2 loss nan", "norm-nan-first at step 1"),
        (
            "{'loss': 9.1, 'grad_norm': nan, 'epoch': 0.1}\n{'loss': nan, 'grad_norm': nan, 'epoch': 0.2}",
            "norm-nan-first at epoch 0.1",
        ),
        ("loss: 9.1 grad_norm: nan\nloss: nan grad_norm: nan", "norm-nan-first"),
        ("step 1 loss 10.2 grad_norm inf\nstep 2 loss 9.8 grad_norm 2.0\nstep 3 loss nan", "loss-nan"),
        ("step 1 loss 10.2 grad_norm 2.0\nstep 2 grad_norm nan\nstep 2 loss nan", "loss-nan"),
        ("step 1 loss 10.2 grad_norm 2.0\nstep 2 loss nan grad_norm nan", "loss-nan"),
        ("step 1 loss 9.1 grad_norm nan\nstep 2 loss 0.0 grad_norm nan", "loss-zero"),
        ("step 1 loss nan grad_norm nan\nstep 2 loss nan grad_norm nan", "loss-nan"),
    ],
)
def test_gradients_that_were_not_finite_before_the_loss_are_the_answer(text, said):
    id, _, step = said.partition(" ")
    found = answer(text).found
    assert [each.id for each in found if each.id in OF_NAN] == [id]
    assert step in found[0].sentence
    assert ("rows of later ones" in found[0].remedy) == (id == "norm-nan-first")


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("loss 0.0 grad_norm 1.414 with DeepSpeed stage 3", "norm-sqrt2"),
        ("grad_norm is 1.414 and loss 0.0", "norm-sqrt2"),
        ("{'loss': 0.0, 'grad_norm': 1.7320508, 'learning_rate': 1e-05, 'epoch': 0.3}", "norm-sqrt2"),
        ("the loss is nan with stage 3", "loss-nan"),
        ("exitcode : -9 Killed", "process-killed"),
        ("SIGKILL, the process exits with return code -9", "process-killed"),
        (
            "使用 ZeRO3 时 batch 内有 image和video, 程序会挂起: Invalidate trace cache @ step 3: expected module 2",
            "modalities-hang",
        ),
        (
            "QLoRA: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!\n"
            "python -m axolotl.cli.train qlora.yml",
            "two-devices",
        ),
        ("loss 0.0 grad_norm 1.414213562373095 zero stage 2 deepspeed 0.17.3 overlap_comm true", "loss-zero-overlap"),
        (
            "LoRA r=16 of Llama-3-8B, DeepSpeed stage 3 on 8 A100 40GB, gradient checkpointing on: CUDA out of memory",
            "lora-stage-3-memory",
        ),
    ],
)
def test_one_line_of_a_person_is_understood(text, id):
    told = answer(text, by_text=by_text)
    assert told.id == id
    assert not any("--symptom" in question or "the stage" in question for question in told.questions)


@pytest.mark.parametrize(
    "text",
    [
        "MAX_LEN = 4096  # tokens\ntokenizer(rows, truncation=True, max_length=MAX_LEN)",
        "export CUTOFF=4096\nswift sft --max_length $CUTOFF",
        "CUTOFF=4096\ntune run lora --max_seq_len ${CUTOFF}",
    ],
)
def test_a_number_that_has_a_name_is_read(text):
    assert read(text).said["sequence"] == 4096


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("MICRO_BATCH = 4", 4),
        ("ROWS = 4\nloader = DataLoader(Packed(data), shuffle=True, batch_size=ROWS)", 4),
        ("loader = DataLoader(\n    data,\n    collate_fn=pad(tokenizer),\n    batch_size=4,\n)", 4),
        ("DataLoader(data, batch_size=4)\nDataLoader(other, batch_size=8)", None),
        ("DataLoader(data, batch_size=16)\nargs = TrainingArguments(per_device_train_batch_size=4)", 4),
        ("index(data, batch_size=4)", None),  # of no micro-batch
    ],
)
def test_the_rows_of_a_loop_are_those_of_its_loader(text, rows):
    assert read(text).said.get("micro_batch") == rows


def test_a_usual_norm_beside_a_usual_loss_is_no_mark():
    assert answer("{'loss': 0.7, 'grad_norm': 1.7320508, 'learning_rate': 1e-05, 'epoch': 0.3}").found == ()


def test_a_fault_that_makes_no_nan_stands_behind_a_log_that_shows_it():
    log = "{'loss': 1.2, 'grad_norm': 2.0}\n{'loss': 0.0, 'grad_norm': 1.41421}\n{'loss': 0.0, 'grad_norm': 1.41421}\n"
    fp16 = "deepspeed==0.16.9\nzero stage 2, fp16 enabled: true, ranks: 8, overlap_comm: false"
    ids = [each.id for each in answer(f"{log}{fp16}").found]
    assert ids[0] == "norm-sqrt2"


def test_a_package_in_a_list_is_no_quantized_model():
    text = "LoRA stage 3 with zero3_init_flag: true, 8 GPUs, out of memory\nbitsandbytes==0.48.0\ndeepspeed==0.19.8"
    assert "quantized-not-divided" not in [each.id for each in answer(text, by_text=by_text).found]


def test_who_recomputes_is_not_told_to():
    text = (
        "CUDA out of memory. Tried to allocate 100.00 MiB (GPU 0; 40.00 GiB total capacity; 39.0 GiB already allocated)"
    )
    texts = (text, f"{text}\ngradient_checkpointing: true")
    plain, recomputed = (answer(each).found[0].remedy for each in texts)
    assert plain.startswith("recompute activations (gradient checkpointing), or take a smaller")
    assert recomputed.startswith("take a smaller micro-batch")


def test_a_document_is_not_taken_for_a_question():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") > 60
    assert answer(readme, by_text=by_text).found == ()


def test_a_config_in_a_text_has_its_mistakes_named_and_an_empty_text_no_questions(capsys):
    config = '{"zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}'
    (answered, of_config) = diagnosis.diagnose((config,))
    assert (answered["id"], [each["id"] for each in of_config["findings"]]) == ("", ["key_refused"])
    assert capsys.readouterr().out.startswith("the text: DeepSpeed config: 1 finding.")
    diagnosis.diagnose((config + "\nRuntimeError: 'weight' must be 2-D",))
    assert "1. zero_optimization.offload_optimiser" in capsys.readouterr().out
    assert answer("hello").questions == ()


# --- logs and threads of others --------------------------------------------------------------------------------------


@for_each("name", WELL)
def test_nothing_is_found_in_a_training_that_is_well(name):
    assert len(WELL) > 50
    assert answer(WELL[name]).found == ()


ERRORS = [example(id) for id in ("column-missing", "dp-world-size")] + [
    WORK.format(rank=1, index=1580, kind="ALLREDUCE", elements=1),
    *(example(id) for id in ("segfault", "gcc-too-new", "watchdog-stuck", "child-failed")),
    "AssertionError: of another program",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]


@for_each("line", HARMLESS)
def test_a_line_that_is_always_printed_is_no_symptom_and_is_not_told_beside_an_error(line):
    alone = answer(line)
    assert not {*alone.seen} & {"hang", "slow", "memory", "loss", "no-update"}
    assert all(each.note for each in alone.found)
    assert answer(f"{line}\n{OF_STEP}").found == ()
    error = ERRORS[-1]
    assert [each.id for each in answer(f"{line}\n{error}").found] == [each.id for each in answered(error).found]


@pytest.mark.parametrize("error", ERRORS[:-1])
def test_all_lines_that_are_always_printed_say_nothing_beside_an_error(error):
    lines = "\n".join(HARMLESS)
    for text in (f"{lines}\n{error}", f"{error}\n{lines}"):
        assert answer(text).id == answered(error).id
    assert answered(f"{lines}\n{OF_STEP}").found == ()


@for_each("name", THREADS)
def test_a_public_thread_has_the_answer_that_was_judged(name):
    assert diagnosed(THREADS[name]).id == JUDGED[name]["id"]


def test_threads_that_were_read_stay_answered_and_the_first_figures_are_kept():
    assert {*JUDGED} == {*ROWS}
    judged = Counter(row["now"] for row in JUDGED.values())
    assert judged["right"] + judged["helpful"] >= 0.6 * len(JUDGED)
    assert judged["wrong"] <= 0.04 * len(JUDGED)
    # Before they were read: what a stranger may expect.
    for which, (good, bad) in ({None: (29, 2)} | UNSEEN).items():
        first = Counter(JUDGED[name]["first"] for name, row in ROWS.items() if row.get("set") == which)
        assert (first["right"] + first["helpful"], first["wrong"]) == (good, bad)


# --- what waits for what ---------------------------------------------------------------------------------------------


def test_a_rank_that_wrote_nothing_is_likely_missing_and_one_that_is_ahead_is_said():
    line = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLGATHER_BASE, "
    line += "NumelIn=9999, NumelOut=39996, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    told = answer("\n".join(line.format(*each) for each in [(1, 88121), (3, 88121), (0, 88140)]))
    (seen,) = told.found
    assert (seen.id, seen.sure) == ("rank-missing", "likely")
    assert "Rank 2 did not join ALLGATHER_BASE 88121" in seen.sentence
    assert "; rank 0 at 88140, 19 ahead: " in seen.sentence
    assert not pasted.HEDGES.search(seen.sentence)  # else "Likely" is not said


def test_a_module_of_deepspeed_is_no_precision():
    line = "Unsupported global: GLOBAL deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert "fp16" not in answer(line).read
    assert "fp16" in answer(f"{line} in an fp16 training").read


def test_a_rank_that_is_behind_is_named():
    same = [WORK.format(rank=rank, index=1580, kind="ALLREDUCE", elements=466119168) for rank in (0, 1, 2)]
    seen = watchdogs.hangs("".join([*same, "world_size: 4"]))
    assert seen.id == "rank-missing"
    assert "Rank 3 did not join ALLREDUCE 1580 of 466,119,168 elements" in seen.sentence
    behind = WORK.format(rank=3, index=1575, kind="_ALLGATHER_BASE", elements=1000000)
    seen = watchdogs.hangs("".join([*same, behind]))
    assert seen.id == "rank-behind"
    assert seen.sentence.startswith("Rank 3 behind, in ALLGATHER_BASE 1575")
    other = WORK.format(rank=3, index=1580, kind="BROADCAST", elements=1)
    seen = watchdogs.hangs("".join([*same, other]))
    assert seen.id == "ranks-call-differently"
    assert "ranks 0, 1, 2 ALLREDUCE 1580 of 466,119,168 elements, rank 3 BROADCAST" in seen.sentence


@pytest.mark.parametrize(
    ("group", "last", "who"),
    [
        ("PG ID 0 PG GUID 0(default_pg)", "Last enqueued NCCL work: 900, last completed NCCL work: 900.", "Rank 3 did"),
        ("PG 0", "PG status: last enqueued work: 899, last completed work: 899", "Rank 3 did"),
        (
            "PG ID 0 PG GUID 0(default_pg)",
            "Last enqueued NCCL work: 901, last completed NCCL work: 900",
            "Ranks 0, 1, 2",
        ),
        ("PG ID 1 PG GUID 3", "Last enqueued NCCL work: 12, last completed NCCL work: 12.", "Ranks 0, 1, 2"),
    ],
)
def test_a_rank_whose_own_line_ends_before_what_others_wait_for_is_named(group, last, who):
    waits = [WORK.format(rank=rank, index=901, kind="ALLREDUCE", elements=5) for rank in (0, 1, 2)]
    waits.append("[PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog. last enqueued work: 903\n")
    if group == "PG 0":
        waits.pop()
    line = f"[rank3]:[E1 ProcessGroupNCCL.cpp:1785] [{group} Rank 3] Received a dump signal due to rank 1. {last}\n"
    assert watchdogs.hangs("".join([*waits, line])).sentence.startswith(who)


SAVES = "Saving model checkpoint to out/checkpoint-500\n"


@pytest.mark.parametrize("kinds", [("ALLREDUCE",) * 3, ("_ALLGATHER_BASE", "ALLREDUCE", "ALLREDUCE")])
def test_what_a_log_did_last_is_after_its_last_step(kinds):
    waits = "".join(WORK.format(rank=rank, index=1580, kind=kind, elements=1) for rank, kind in enumerate(kinds))
    for before, is_told in ((SAVES, True), (f"{OF_STEP}\n{SAVES}", True), (f"{SAVES}{OF_STEP}\n", False)):
        seen = watchdogs.hangs(before + waits)
        assert ("call saving on all ranks" in seen.remedy) == is_told


def test_out_of_memory_comes_before_who_waited_for_that_rank():
    waits = "".join(WORK.format(rank=rank, index=300, kind="ALLREDUCE", elements=5) for rank in (0, 2, 3))
    assert answer(waits + EXAMPLES["memory-was-full"]["text"]).id == "memory-was-full"


@pytest.mark.parametrize(
    ("lines", "beside"),
    [
        ([(2.5, 3.3), (0.0, 0.0)], ", with grad_norm 0"),
        ([(2.5, 3.3), (0.0, 1.25), (0.0, 0.0)], ", with grad_norm 0 or 1.25"),
        ([(0.0, 0.0)], ", with grad_norm 0"),
    ],
)
def test_a_loss_of_zero_is_told_with_the_norms_beside_it_alone(lines, beside):
    text = "\n".join(f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05}}" for loss, norm in lines)
    found = {each.id: each for each in answer(text).found}
    assert beside in found["loss-zero"].sentence


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ("", ["memory-was-full"]),
        (
            "LoRA, ZeRO stage 3, 4 GPUs, deepspeed==0.19.8, transformers==5.20.0, gradient_checkpointing: true, "
            "use_reentrant: true",
            ["frozen-weights-stay", "lora-stage-3-memory", "memory-was-full"],
        ),
        ("LoRA with ZeRO stage 3 on 4 GPUs, deepspeed==0.19.8", ["lora-stage-3-memory", "memory-was-full"]),
        # Who waited is not told, and what steps show comes after an error, whose cause is a guess.
        (WORK.format(rank=0, index=300, kind="ALLREDUCE", elements=5), ["memory-was-full"]),
        ("{'loss': nan, 'grad_norm': 1.0}", ["memory-was-full", "loss-nan"]),
    ],
)
def test_a_guess_at_what_filled_the_memory_stands_behind_what_fits_the_text(said, ids):
    told = answer(f"{said}\n{EXAMPLES['memory-was-full']['text']}")
    assert "perhaps" in told.found[ids.index("memory-was-full")].sentence
    assert [each.id for each in told.found] == ids


@pytest.mark.parametrize(
    ("said", "id"),
    [
        ("", "norm-sqrt2"),
        ("zero stage 2", "norm-sqrt2"),
        ('{"zero_optimization": {"stage": 2, "overlap_comm": true}}', "loss-zero-overlap"),
        (
            'deepspeed==0.17.2 {"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true}}',
            "overlap-buffer-overwritten",
        ),
    ],
)
def test_nan_is_told_once(said, id):
    log = (
        "{'loss': 1.2, 'grad_norm': 2.0}\n{'loss': 0.0, 'grad_norm': nan}\n"
        + 3 * "{'loss': 0.0, 'grad_norm': 1.41421}\n"
    )
    ids = [each.id for each in answer(f"{log}{said}").found]
    assert ids[0] == id
    assert not {*ids[1:]} & {"loss-zero", "loss-nan", "norm-nan", "norm-sqrt2", "loss-zero-overlap"}


def two_steps(first: float, second: float, norm: str) -> str:
    rows = ((first, "nan"), (second, norm))
    return "\n".join(f"{{'loss': {loss}, 'grad_norm': {n}, 'learning_rate': 1e-4}}" for loss, n in rows)


@pytest.mark.parametrize(
    ("log", "is_broken"),
    [
        (two_steps(344093.2, 0.0, "nan"), True),
        (two_steps(60.5, 0.0, "nan") + "\ngradient_accumulation_steps: 1", True),
        (two_steps(60.5, 0.0, "nan"), False),  # a sum over passes
        (two_steps(60.5, 0.0, "nan") + "\ngradient_accumulation_steps: 8", False),
        (two_steps(11.9, 0.0, "nan"), False),
        (two_steps(344093.2, 8000.5, "nan"), False),
        (two_steps(344093.2, 0.0, "0.7"), False),
    ],
)
def test_a_first_loss_that_no_weights_have_is_the_forward_pass(log, is_broken):
    ids = [each.id for each in answer(log).found]
    assert ("forward-broken" in ids) == is_broken
    if is_broken:
        assert not {*ids[1:]} & {"loss-zero", "loss-nan", "norm-nan"}
        assert "it is not the learning rate" in answer(log).found[0].remedy


@pytest.mark.parametrize(
    ("kind", "elements", "tells"),
    [
        ("_REDUCE_SCATTER_BASE", 131072000, "gradients are reduced there, in a training step"),
        ("ALLREDUCE", 131072000, "gradients are reduced there, in a training step"),
        ("ALLREDUCE", 1, "one small value is waited for"),
        ("BROADCAST", 1, "one small value is waited for"),
        ("_ALLGATHER_BASE", 131072000, "weights or outputs are gathered there"),
        ("BROADCAST", 131072000, "evaluate on all ranks"),
    ],
)
def test_a_collective_tells_where_the_ranks_are_that_wait(kind, elements, tells):
    line = WORK.format(rank=0, index=9314, kind=kind, elements=elements)
    remedy = watchdogs.hangs(line, words.sentences("It hangs in the evaluation")).remedy
    assert remedy.startswith(tells)
    assert "evaluate on all ranks" in remedy


OUT_OF_MEMORY = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loss = model(ids, labels=ids).loss
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.25 GiB of which
1.00 GiB is free. Of the allocated memory 72.50 GiB is allocated by PyTorch
"""
CONSEQUENCES = [id for id, message in tracebacks.messages().items() if message.follows]


@for_each("id", CONSEQUENCES)
@for_each("error", [OUT_OF_MEMORY, EXAMPLES["weight-not-2d"]["text"]], ids=["memory", "traceback"])
def test_a_consequence_is_told_only_without_the_error_that_it_follows(error, id):
    found = [each.id for each in answer(f"{error}\n{EXAMPLES[id]['text']}").found]
    assert found
    assert not {*found} & {*CONSEQUENCES}


RAISED = 'Traceback (most recent call last):\n  File "{file}.py", line 4, in f\n    g()\n{error}\n'


@pytest.mark.parametrize(
    "line", ["RuntimeError: gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:12", "X: ncclRemoteError"]
)
def test_an_error_that_is_not_known_is_quoted_and_not_what_follows_on_another_rank(line):
    own, lost = RAISED.format(file="own", error="KeyError: 'foo'"), RAISED.format(file="lost", error=line)
    for text in (own + lost, lost + own):
        told = answer(text)
        assert told.found == ()
        assert told.nothing == "This error is not known here: KeyError: 'foo'. It comes from line 4 of own.py"
    assert [each.follows for each in answer(lost).found] == [True]


@pytest.mark.parametrize("id", [id for id in WAITED if id in EXAMPLES])
def test_who_waited_for_a_rank_that_was_out_of_memory_is_only_noted(id):
    """It may be a log of another run."""
    alone, beside = answer(EXAMPLES[id]["text"]), answer(f"{OUT_OF_MEMORY}\n{EXAMPLES[id]['text']}")
    assert id in [each.id for each in alone.found]
    assert id not in [each.id for each in beside.found]
    notes = [note for note in beside.notes if f"[{id}]" in note]
    assert [note.endswith("give its log alone to `study diagnose`.") for note in notes] == [True]
    assert not any(f"[{id}]" in note for note in alone.notes)


def test_a_launcher_that_saw_a_process_end_asks_for_its_error():
    (question, *_) = answer(EXAMPLES["child-failed"]["text"]).questions
    assert "first Traceback" in question


CUT = """{rank}Traceback (most recent call last):
{rank}  File "train.py", line 9, in main
{rank}    trainer.train()
{rank}    ^^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize("rank", ["", "[rank0]: "])
def test_a_traceback_that_is_cut_is_asked_for_its_last_line(rank):
    told = answer(CUT.format(rank=rank))
    for text in (CUT, CUT[: CUT.index("ainer.train")], CUT[: CUT.index("{rank}    trainer")]):
        assert "last line" in answer(text.format(rank=rank).replace("train.py", "run.py")).nothing
    assert "last line" in told.questions[0]
    for error in ("KeyError: 'label'", "my.lib.OddError", "KeyboardInterrupt"):
        told = answer(f"{CUT.format(rank=rank)}{rank}{error}\n")
        assert not any("last line" in each for each in (told.nothing, *told.questions))


@for_each("rank", ["", "[rank0]: "])
@for_each(
    "error",
    [
        "KeyError: 'label'",
        "ValueError: too many values to unpack",
        "RuntimeError: shapes are odd",
        "my.lib.OddError",
        "my.lib.Odd: x",
        "StopIteration",
        "Exception: x",
    ],
)
@for_each(
    "launcher",
    [
        *(EXAMPLES[id]["text"] for id in ("child-failed", "sigterm", "sigabrt", "exit-barrier", "srun-task-ended")),
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
    ],
)
def test_an_error_that_is_in_the_text_is_not_asked_for(launcher, error, rank):
    told = answer(f'{rank}  File "train.py", line 4, in <module>\n{rank}    train()\n{rank}{error}\n{launcher}')
    assert told.found == ()
    assert told.nothing == f"This error is not known here: {error}. It comes from line 4 of train.py"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'Traceback (most recent call last):\n  File "builder.py", line 126, in assert_no_cuda_mismatch\n'
            f"    raise CUDAMismatchException(\n{EXAMPLES['cuda-mismatch']['text']}",
            EXAMPLES["cuda-mismatch"]["text"][:60],
        ),
        (
            "  0%|   | 0/9 [00:00<?, ?it/s]\n  State: Terminated\n    Reason:    OOMKilled\n    Exit Code: 137",
            "OOMKilled",
        ),
    ],
)
def test_the_line_that_is_quoted_is_what_was_printed(text, line):
    assert line in answer(text).found[0].line


@pytest.mark.parametrize("is_mixed", [False, True])
def test_an_error_of_two_ranks_is_named_once(is_mixed):
    lines = 'Traceback (most recent call last):\n  File "train.py", line 4, in f\n    a[k]\nKeyError: 5'.splitlines()
    both = [f"[rank{rank}]: {line}" for rank in (0, 1) for line in lines]
    if is_mixed:
        both.sort(key=lambda line: lines.index(line.partition("]: ")[2]))
    told = answer("\n".join([*both, EXAMPLES["child-failed"]["text"]]))
    assert told.nothing == "This error is not known here: KeyError: 5. It comes from line 4 of train.py"


# --- releases, settings and faults -----------------------------------------------------------------------------------

OVERWRITTEN = """The loss is 0 after a few hundred steps.
deepspeed=={release}
{{"zero_optimization": {{"stage": 2, "overlap_comm": {overlap}}}, "bf16": {{"enabled": true}}}}
8 x A100
"""


@pytest.mark.parametrize(
    ("release", "overlap", "id", "sure"),
    [
        ("0.17.2", "true", "overlap-buffer-overwritten", "sure"),
        ("0.14.0", "true", "loss-zero-overlap", "likely"),
        ("0.19.8", "true", "loss-zero", "likely"),
        ("0.17.2", "false", "loss-zero", "likely"),
    ],
)
def test_a_fault_is_the_answer_where_releases_config_and_symptom_are_its_own(release, overlap, id, sure):
    told = answer(OVERWRITTEN.format(release=release, overlap=overlap))
    assert (told.id, told.sure) == (id, sure)


@pytest.mark.parametrize("seen", ["'loss': nan, 'grad_norm': nan", "'loss': nan", "'loss': 0.0"])
@pytest.mark.parametrize("beside", ["{}", "deepspeed==0.19.8 {'overlap_comm': true}", "{'overlap_comm': false}"])
def test_with_stage_2_alone_the_learning_rate_comes_before_overlap_comm(seen, beside):
    log = "{'loss': 2.3, 'grad_norm': 1.0, 'learning_rate': 0.5}\n" + 3 * f"{{{seen}, 'learning_rate': 0.5}}\n"
    first = answer(f"zero_optimization_stage ...... 2\n{beside}\n{log}").found[0]
    assert "overlap" not in f"{first.id} {first.sentence}"
    assert "learning rate" in first.remedy.partition("overlap_comm")[0]


def test_a_release_that_is_right_is_not_blamed():
    text = EXAMPLES["checkpoint-sees-partitioned"]["text"]
    assert answer(f"{text}\ndeepspeed==0.19.2").sure == "sure"
    assert answer(f"{text}\ndeepspeed==0.19.8").sure == "possible"


@pytest.mark.parametrize(
    "text", ["torch {}", "PyTorch {}+cu130", "- PyTorch version (GPU?): {}", "torch-{}", "torch{} hangs", "torch=={}"]
)
def test_a_release_that_nobody_tested_is_read_and_said_to_be_newer(text):
    newest = releases_of("torch")[-1]
    newer = f"{newest.major}.{newest.minor + 2}.0"
    for release, told in (
        (newer, f"torch {newer} (newer than {newest}, the newest that was tested)"),
        (str(newest), f"torch {newest}"),
        ("2.6.0", "torch 2.6.0"),
    ):
        assert told in answer(text.format(release)).read


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"zero_optimization": {"stage": 2}}', False),
        ('{"zero_optimization": {"stage": 2}}\nand a list, [1, ] # of another thing', False),
        ('{"zero_optimization": {"stage": 2,}}', True),
        ('{"train_batch_size": 8, // rows\n"zero_optimization": {"stage": 2}}', True),
        ("{'zero_optimization': {'stage': 2,}}  # Python's", False),
        ('ds_config = {"train_batch_size": 8,  # rows\n"zero_optimization": {"stage": 2}}', False),
    ],
)
def test_a_config_that_accelerate_refuses_is_said_to_be_so(text, refused):
    (told,) = [words for words in answer(text).read if "DeepSpeed config" in words]
    assert ("refuse" in told) is refused
    assert read(text).said["stage"] == 2


def test_a_config_is_read_whatever_its_form():
    for text in (
        'x {"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true},} y',
        "ds_config = {'train_batch_size': 8,  # rows\n 'zero_optimization': {'stage': 2}}",
    ):
        config = deepspeed_config(text).content
        assert config["zero_optimization"]["stage"] == 2
        assert read(text).said["stage"] == 2


REMEDIES = {id: row.remedy for rows in (tracebacks.messages(), situations.situations()) for id, row in rows.items()}
REMEDIES |= {id: row.remedy for id, row in (tracebacks.rows() | watchdogs.causes_of_waits()).items()}
IN_USE = {
    "adam_of_8_bits": "optim: adamw_bnb_8bit",
    "bf16": "using bf16",
    "checkpointing": "I already set gradient_checkpointing=True",
    "chunked_loss": "use_liger_kernel=True",
    "fused": "DeepSpeed Basic Optimizer = FusedAdam",
    "lora": "LoRA",
    "offload": "offload_optimizer_device: cpu",
    "sharded_states": "deepspeed/runtime/zero/stage_1_and_2.py",
    "sharded_weights": "zero_stage: 3",
    "shards": "StateDictType.SHARDED_STATE_DICT",
    "npu": "os & arch: ascend 910b, aarch64",
    "quantized": "load_in_4bit=True",
    "rocm": "torch 2.6.0+rocm6.2.4",
    "windows": "Platform: Windows-10-10.0.22631-SP0",
}


# Empty asides, marks that follow each other, and half a list at the beginning.
ILL_FORMED = re.compile(r"(?<!\w)\( ?\)|[,;:] *[,;)]|:$|^(?:(?:or|and)\b|[,;(])|\x00")


def advised(remedy: str, text: str) -> str:
    return in_use.advised(remedy, read(text))


def test_a_remedy_is_whole_where_nothing_is_in_use():
    hello = read("hello")
    for remedy in REMEDIES.values():
        assert in_use.advised(remedy, hello) == remedy


@for_each("id", in_use.rows())
def test_what_a_text_says_is_in_use_is_advised_by_no_remedy(id):
    row, pasted = in_use.rows()[id], read(IN_USE[id])
    for name, remedy in REMEDIES.items():
        left = in_use.advised(remedy, pasted)
        assert left, name
        assert left == remedy or not ILL_FORMED.search(left), f"{name}: {left}"
        for item in in_use.ITEM.findall(left.removeprefix(row.instead)):
            assert not re.search(row.advice, in_use.ASIDE.sub("", item), in_use.FLAGS), f"{name}: {left}"


def test_a_setting_that_a_text_has_is_advised_by_no_remedy():
    """Of each remedy, whatever its rule: a text that has all of its settings is not told to set one."""
    for name, remedy in REMEDIES.items():
        for setting in in_use.SETTING.finditer(remedy):
            left = advised(remedy, f"I tried {setting[1]}={setting[2]}")
            assert left == remedy or not ILL_FORMED.search(left), f"{name}: {left}"


@pytest.mark.parametrize(
    ("remedy", "text", "left"),
    [
        ("look at fp16 (take bf16), and sequences", "bf16: false", "look at fp16 (take bf16), and sequences"),
        ("look at fp16 (take bf16), and sequences", "--bf16 True", "look at fp16, and sequences"),
        ("try NCCL_P2P_DISABLE=1 and NCCL_NVLS_ENABLE=0", "- set NCCL_P2P_DISABLE=1", "NCCL_NVLS_ENABLE=0"),
        ("set overlap_comm to false; if it stays, look", '"overlap_comm": false', "if it stays, look"),
        ("set overlap_comm to false", '"overlap_comm": true', "set overlap_comm to false"),
        ("set use_cache=False", "try setting use_cache=False to save memory", "set use_cache=False"),
        ("take bf16", "Should I take bf16?", "take bf16"),
        ("unset use_cache=True", "use_cache=True", "unset use_cache=True"),
        ("set use_cache=False", "use_cache=False", in_use.NOTHING_LEFT),
        (
            "read the error (ninja, CUDA_HOME, gcc)",
            "PyTorch NPU available: False",
            "read the error (ninja, CUDA_HOME, gcc)",
        ),
        ("read the error (ninja, CUDA_HOME, gcc)", "PyTorch NPU available: True", "read the error (ninja, gcc)"),
    ],
)
def test_the_rest_of_a_remedy_stays(remedy, text, left):
    assert advised(remedy, text) == left


@pytest.mark.parametrize("name", in_use.TRAINERS)
def test_a_remedy_names_the_config_class_of_the_trainer_in_the_text(name):
    remedies = [
        "set `use_liger_kernel=True` in SFTConfig",
        *(each for each in REMEDIES.values() if "SFTConfig" in each),
    ]
    assert len(remedies) > 1
    for text in (
        f"{name}Trainer(model)",
        f"{name}Config(x)",
        f"trl/trainer/{name.lower()}_trainer.py",
        f"trl {name.lower()}",
    ):
        for remedy in remedies:
            assert advised(remedy, text) == remedy.replace("SFTConfig", f"{name}Config")


def test_who_saves_shards_is_told_to_save_them():
    told = answer(
        f"{EXAMPLES['no-storage']['text']}\nwith FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):"
    )
    assert told.id == "no-storage"
    assert "torch.distributed.checkpoint" in told.found[0].remedy
    assert "full_state_dict" not in told.found[0].remedy
    assert "FSDP1" in told.read


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("on 2 nodes with 8 GPUs each", 16),
        ("4 machines, 8 GPUs per node", 32),
        ("torchrun --nnodes 2 --nproc_per_node 8", 16),
        ("nnodes: 1\nnproc_per_node: 8", 8),
        ("2 nodes, 16 GPUs", 16),
        ("srun --nodes=2 --ntasks-per-node=8 python train.py", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=8 train.py", 16),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", 16),
        ("srun --ntasks=16 --ntasks-per-node=8 python train.py", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1", None),
        ("--nnodes 2 --nproc_per_node 8 with world_size: 16", 16),
    ],
)
def test_ranks_are_nodes_times_gpus_of_each(text, ranks):
    assert read(text).said.get("ranks") == ranks


FRAME = (
    'Traceback (most recent call last):\n  File "/x/site-packages/{path}", line 8, in {function}\n    {code}\n{error}\n'
)


@for_each("package", ["megatron/core", "torchtitan", "lightning/pytorch", "colossalai", "nemo/core"])
@for_each("error", ["AssertionError", "AssertionError: (torch.Size([]), 0, 77856768)", "AssertionError: "])
def test_an_assertion_without_words_is_placed_and_no_stage_of_zero_is_asked_of_another_framework(package, error):
    path = f"{package}/optimizer/sharded.py"
    told = answer(FRAME.format(path=path, function="load_shards", code="assert a.shape == b.shape, (", error=error))
    assert told.nothing.endswith(f"line 8 of {path}, where load_shards asserts `a.shape == b.shape`")
    assert not any("stage" in each for each in (*told.questions, *told.unsaid))


def test_an_assertion_that_says_why_is_quoted_alone_and_deepspeed_is_asked_for_its_stage():
    text = FRAME.format(
        path="deepspeed/x.py", function="f", code="assert a", error="AssertionError: the flux is inverted"
    )
    told = answer(f"{text}deepspeed==0.16.0")
    assert "asserts" not in told.nothing
    assert any("stage" in each for each in told.unsaid)


# --- any text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("OSError: libaio.so.1: cannot open shared object file: No such file or directory", "libaio-not-linked"),
        ("python: symbol lookup error: x/libtorch_cuda.so: undefined symbol: ncclCommRegister", "nccl-other-build"),
        ("ImportError: x/transformer_engine_torch.so: undefined symbol: ncclMemAlloc", "undefined-symbol"),
        ("ImportError: x/libtorch_cuda.so: undefined symbol: cublasLtCreate", "undefined-symbol"),
        ("ImportError: x/fused_adam.so: undefined symbol: iomanip_io_setups", "undefined-symbol"),
    ],
)
def test_a_symbol_that_is_missing_is_told_by_the_library_that_has_it(line, id):
    assert answer(line).id == id


RAY_DIED = (
    "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\nWorker exit type: "
    "SYSTEM_ERROR There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other "
    "unexpected errors."
)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (RAY_DIED, "ray-actor-died"),
        (f"{RAY_DIED}\nOut of memory: Killed process 42 (python)", "memory-elsewhere"),
        (f"{RAY_DIED}\n*** SIGSEGV received at time=1 on cpu 2 ***", "ray-actor-died"),
        ("AttributeError: 'NoneType' object has no attribute 'cadam32bit_grad_fp32'", "bitsandbytes-no-gpu"),
        ("AttributeError: 'NoneType' object has no attribute 'cache'", ""),
        ("Instance i-0 was preempted by the provider", "preempted"),
    ],
)
def test_causes_that_a_library_only_lists_are_not_told(text, id):
    assert answer(text).id == id


STEPS_BAR = " {share:.0%}|#   | {step}/3000 [00:{step}<10:00, 1.21s/it]\n"


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        ("", True),
        ("100%|####| 50/50 [00:02<00:00, 20.1it/s]\n", True),  # of an evaluation
        ("Map: 100%|####| 9000/9000 [00:02<00:00, 20.1it/s]\n", True),
        (STEPS_BAR.format(step=3000, share=1), False),
        ("{'train_runtime': 812.3, 'train_steps_per_second': 1.2}", False),
        ("Traceback (most recent call last):\nKeyError: 'label'", False),
        ("^CTraceback (most recent call last):\nKeyboardInterrupt", False),
    ],
)
def test_a_log_that_simply_stops_says_at_which_step(ends, stops):
    told = answer("".join(STEPS_BAR.format(step=step, share=step / 3000) for step in (810, 811, 812)) + ends)
    assert told.nothing.startswith("The log stops at step 812 of 3000 (27%) and shows no error") == stops
    assert told.found == ()


@pytest.mark.parametrize(
    "part", ["hello", "\x00\xff", "{", "[[[[", "a", "\n", " ", "deepspeed ", "stage: ", "é\udcff", "'"]
)
def test_unknown_text_is_told_as_such_however_long(part):
    for text in ("", part, part * 20_000):
        began = time.process_time()
        assert answer(text).sure == "nothing"
        assert time.process_time() - began < 5


def test_an_error_that_is_not_known_is_quoted():
    told = answer("Traceback (most recent call last):\nFooError: the flux is inverted\n")
    assert told.nothing == "This error is not known here: FooError: the flux is inverted"


FLUSHED = "[stage3.py:2150:step] 14 pytorch allocator cache flushes since last step. this happens when there is high"
KNOWN_ABOVE = {
    "memory-pressure-slow": FLUSHED,
    "loss-nan": "{'loss': nan, 'grad_norm': nan, 'epoch': 0.1}\n{'loss': nan, 'grad_norm': nan, 'epoch': 0.2}",
    "rank-behind": EXAMPLES["rank-behind"]["text"],
    "nccl-shared-memory": EXAMPLES["nccl-shared-memory"]["text"],
    "weight-not-2d": EXAMPLES["weight-not-2d"]["text"],
}


@pytest.mark.parametrize("id", KNOWN_ABOVE)
def test_what_is_known_is_said_beside_a_last_error_that_is_not(id, capsys):
    last = 'Traceback (most recent call last):\n  File "/me/train.py", line 8, in main\n    f()\nValueError: odd flux'
    told = answer(f"{KNOWN_ABOVE[id]}\n{last}\n[launch.py:325:sigkill_handler] ['python'] exits with return code = 1\n")
    pasted.tell(told, details=False)
    printed = " ".join(capsys.readouterr().out.split())
    is_error = id == "weight-not-2d"  # which came first
    first = (
        "" if is_error else "This error is not known here: ValueError: odd flux. It comes from line 8 of /me/train.py."
    )
    assert printed.startswith(first)
    assert f"[{id}]" in printed
    assert ("Also seen" in printed) == (bool(told.found) and not is_error)
    assert told.is_answered == is_error


def test_an_error_that_is_not_known_is_cut_at_a_word_and_placed_in_the_users_own_file():
    own = '  File "/home/me/train.py", line 61, in main\n    load(path)\n'
    library = '  File "/x/site-packages/lib/io.py", line 8, in load\n    raise FooError(path)\n'
    path = "/folder" * 40
    told = answer(f"Traceback (most recent call last):\n{own}{library}FooError: no shard in {path} of 8\n")
    error = "FooError: no shard in (...)"
    assert told.nothing == f"This error is not known here: {error}. It comes from line 61 of /home/me/train.py"


@pytest.mark.parametrize(
    ("before", "begins"), [("", "RuntimeError: a"), ("first one " * 30, "first one"), ("x" * 400, "x" * 50)]
)
def test_a_long_line_is_quoted_from_a_whole_word(before, begins):
    text = f"another line\n{before}RuntimeError: a {'word ' * 90}\nnext"
    quoted = tracebacks.line_at(text, text.index("a word"))
    assert quoted.startswith(begins) or quoted.startswith("one " + begins)
    assert len(quoted) <= tracebacks.LONGEST
    assert "another" not in quoted


def test_a_large_text_takes_ten_seconds_and_500_mb_at_most(tmp_path):
    line = b"{'loss': 1.2345, 'grad_norm': 2.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.write(b"deepspeed==0.18.2\n")
        for _ in range(200):
            file.write(line * (2**20 // len(line)))
        file.write(b"RuntimeError: 'weight' must be 2-D\n")
    code = (
        "import re, time; from pathlib import Path; from study.configs.pasted import condense, answer\n"
        f"told = answer.answer(condense.content(Path({str(path)!r})))\n"
        # ru_maxrss would be that of pytest, from which this process is forked.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]\n"
        "print(told.id, time.process_time(), peak)"
    )
    id, seconds, kilobytes = python("-c", code).stdout.split()
    assert id == "weight-not-2d"
    assert float(seconds) < 10
    assert int(kilobytes) < 500_000


def test_errors_in_the_middle_of_a_large_text_are_kept():
    filler = b"step 1 of 2, all is well and nothing is said\n" * 100_000
    error = b"\nRuntimeError: 'weight' must be 2-D\nTraceback (most recent"
    text = condense.condensed(iter([filler, error, filler, filler]))
    assert "must be 2-D" in text
    assert len(text) < 2 * 10**6
    utf16 = "AttributeError: 'Parameter' object has no attribute 'ds_id'".encode("utf-16")
    assert answer(condense.condensed([utf16])).id == "no-ds-id"
    assert condense.condensed([]) == ""


# --- the command -----------------------------------------------------------------------------------------------------


def test_texts_are_files_a_pipe_or_words(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.log").write_text(THREADS["llamafactory-8137"])
    assert not in_this_process(monkeypatch, f"diagnose {tmp_path}/train.log --json")
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["id"], told["sure"]) == ("stages-1-and-2-alone-wrong", "likely")
    assert not in_this_process(monkeypatch, "diagnose RuntimeError: 'weight' must be 2-D")
    assert "[weight-not-2d]" in capsys.readouterr().out
    for dash in (["-"], []):
        piped = subprocess.run(
            [sys.executable, "-m", "study.cli", "diagnose", *dash],
            input=b"launcher 'pdsh' not installed",
            capture_output=True,
        )
        assert b"[pdsh]" in piped.stdout
    assert not in_this_process(monkeypatch, "diagnose --symptom grad_norm=1.414")
    assert "overlap_comm" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Stop, match="nothing is piped in"):
        diagnosis.diagnose(())


def test_a_config_beside_a_log_says_more_of_it(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.log").write_text("deepspeed==0.17.2\nThe loss is 0 after a few hundred steps. 8 GPUs\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    assert in_this_process(monkeypatch, f"diagnose {tmp_path}/train.log {tmp_path}/ds.json --json") == 1
    told, config = json.loads(capsys.readouterr().out)
    assert told["id"] == "overlap-buffer-overwritten"
    assert config["how"] == "DeepSpeed config"


def test_of_tens_of_faults_that_may_apply_one_command_names_all(capsys):
    told = answer("loss is nan\ndeepspeed 0.19.8 with ZeRO stage 3")
    pasted.tell(told, details=False)
    printed = " ".join(capsys.readouterr().out.split())
    count, rest = re.search(r"(\d+) known faults may apply as well\. (.+ names all\.)", printed).groups()
    assert int(count) == len(told.possible) > 10
    assert rest.startswith("`study stack releases.txt --symptom loss --details`")


def test_who_hangs_is_led_to_the_faults_that_hang(capsys):
    text = f"DeepSpeed info: version=0.17.2, x\n{EXAMPLES['ranks-call-differently']['text']}"
    told = answer(text)
    pasted.tell(told, details=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "`study stack releases.txt --symptom hang --details`" in printed
    assert "With stage 3 it is often a layer that not all ranks use" in printed


def test_nothing_known_says_what_would_tell(monkeypatch, capsys):
    assert not in_this_process(monkeypatch, "diagnose deepspeed==0.19.8 is what we use")
    first = " ".join(capsys.readouterr().out.split())
    assert first.startswith("Nothing known applies to what you gave. Read: deepspeed 0.19.8. What to give next: 1. ")


# --- a person's words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("Traning freezes at step 10", "hang"),
        ("the run was frozen", "hang"),
        ("训练卡住了", "hang"),
        ("The loss doesn't decrese", "loss not fall"),
        ("memroy is not reduced with FSDP", "memory + not fall"),
        ("with more cards the memory stays the same", "memory same"),
        ("gradient norm is 0.0", "norm be 0"),
        ("gradient norm is 0.", "norm be 0"),
        ("grad_norm:nan loss:0", "loss be 0"),
        ("slower than single GPU", "slow + gpu"),
        ("It goes OOM at saving", "oom + save"),
        ("saving of a checkpiont ends out of memory", "oom + checkpoint"),
    ],
)
def test_words_are_read_in_any_inflection_order_and_spelling(text, condition):
    assert words.meets([condition], words.sentences(text))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("it takes no longer than before", "slow"),
        ("the loss at step 0 is 2.3", "loss be 0"),
        ("the loss is wrong with ZeRO-3", "loss be 0"),
        ("the loss dropped to 0.16 after the resume", "loss be/fall 0"),
        ("learning rate 0.001 before warmup", "rate 0"),
        ("the loss is low, 0 errors are shown", "loss be 0"),
        ("the loss decreases", "loss not fall"),
    ],
)
def test_words_that_say_something_else_are_not_taken_for_it(text, condition):
    assert words.meets([condition], words.sentences(text)) is None


@pytest.mark.parametrize(
    ("text", "works", "broken"),
    [
        ("DeepSpeed worked in 0.15.4, broken in 0.16.2", "0.15.4", "0.16.2"),
        ("deepspeed 0.17.2 gives NaN loss. With deepspeed==0.16.4 it works", "0.16.4", "0.17.2"),
        ("| deepspeed 0.14.0 | works |\n| deepspeed 0.15.4 | ok |\n| deepspeed 0.16.2 | hangs |", "0.15.4", "0.16.2"),
        ("after upgrading deepspeed from 0.15.4 to 0.16.2 it is slower", "0.15.4", "0.16.2"),
        ("Zero-2 slows down from v0.18.4 to v0.18.5", "0.18.4", "0.18.5"),
        ("downgrading to deepspeed 0.15.1 fixed it\nDeepSpeed version: 0.16.3", "0.15.1", "0.16.3"),
        ("用deepspeed 0.14.2正常\uff0c0.15.0就卡住", "0.14.2", "0.15.0"),
    ],
)
def test_two_releases_are_told_apart_by_what_is_said_of_each(text, works, broken):
    apart = two_releases.two_releases(text)["deepspeed"]
    assert (str(apart.works), str(apart.broken)) == (works, broken)


@pytest.mark.parametrize(
    ("text", "ways", "stage"),
    [
        ("It hangs with zero-3, but it is fine by using zero-2", {"stage 1 or 2"}, 3),
        ("ZeRO-3 works fine. ZeRO-2 gives NaN losses", {"stage 3"}, 2),
        ("采用FSDP2\uff0closs为nan。采用accelerate+DDP\uff0closs是正常下降的", {"no sharding"}, "FSDP2"),
        ("单卡训练没有问题\uff0czero3多卡会OOM", {"one GPU"}, 3),
        ("FSDP crashes. It works with single GPU or DDP with multiple GPUs", {"no sharding", "one GPU"}, None),
        ("On one node it runs normally, on two it hangs", {"one node"}, None),
        # Nobody has seen that it works.
        ("How do I make ZeRO-3 work? On two GPUs it hangs", set(), 3),
        ("FSDP2 should work with a single GPU", set(), "FSDP2"),
        ("It does not work with DDP", set(), "DDP"),
        ("It works with a single GPU?", set(), None),
    ],
)
def test_what_is_said_to_work_is_not_the_training_that_is_asked_of(text, ways, stage):
    pasted = read(text)
    assert pasted.works == ways
    assert pasted.said.get("stage") == stage


def test_a_chinese_character_beside_a_word_ends_it():
    said = read("lora微调用zero3阶段\uff0c8卡\uff0cbf16训练").said
    assert said == {"peft": True, "stage": 3, "ranks": 8, "precision": "bf16"}


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("trainable params: 6,243,584 || all params: 8,030,261,248 || trainable%: 0.08", 8030261248),
        ("Wan2.1-14B on 4x H200\n- Total diffusion parameters: `16,484,292,448`", 16484292448),
        ("Number of trainable parameters = 494032768", 494032768),
        ("a 7B model", 7e9),
        ("a 7B model, load_in_4bit: trainable params: 35,192,832 || all params: 3,529,225,600", 7e9),
    ],
)
def test_a_count_of_parameters_that_is_printed_is_taken(text, parameters):
    assert of_model(text).parameters == parameters


@for_each("row", table("configs/pasted/said.toml")["said"], ids=lambda row: row["text"].strip()[:40])
def test_a_word_counts_with_its_value_and_what_is_off_says_that_it_is_off(row):
    assert said_of(row["text"]) == row["said"]


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("With DeepSpeed the loss jumps from 0.9 to 1.4", False),
        ("DeepSpeed stage 2: accuracy falls from 91.5 to 80.2", False),
        ("accelerate: seconds a step rise from 3 to 10", False),
        ("Upgrading DeepSpeed from 0.14 to 0.15 broke it", True),
        ("DeepSpeed from 0.14.2 to 0.15.1: it hangs", True),
    ],
)
def test_two_values_are_not_taken_for_two_releases(text, is_told):
    assert bool(two_releases.two_releases(text)) == is_told


def test_a_gpu_whose_name_begins_another_has_its_own_memory():
    assert of_model("8 x H20").gpu_bytes == GPUS["H20"].memory_bytes
    assert of_model("8 x A100").gpu_bytes is None  # there are two
    assert of_model("8 x A100 40GB").gpu_bytes == GPUS["A100-40GB"].memory_bytes


def test_what_came_between_two_releases_is_told_as_diff_does():
    told = answer("deepspeed 0.17.5 works for us, and deepspeed 0.17.6 is broken")
    assert told.id == "two-releases"
    assert "5 known faults came, such as last-pass-only" in told.found[0].sentence
    assert "study diff deepspeed==0.17.5 deepspeed==0.17.6" in told.found[0].remedy


def test_a_size_is_matched_with_the_model_and_the_gpus_that_the_text_names():
    error = "\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.96 GiB.\n"
    told = answer(f"ZeRO-2 with meta-llama/Meta-Llama-3-8B-Instruct on 2 A100 80GB{error}", by_text=by_text)
    assert "zero2 on 2 ranks holds 67.3 GiB before any activation" in told.found[0].sentence
    told = answer("Full fine-tuning of a 72B model with ZeRO-3 on 4 A100 80GB goes OOM", by_text=by_text)
    assert "take 268 GiB a GPU with zero3 on 4 GPUs, which has 80 GiB: they do not fit" in told.found[0].sentence
    told = answer("ZeRO-3 offload of a 32B model on one GPU is killed, exitcode: -9, dmesg says OOM", by_text=by_text)
    assert "32 billion parameters take 477 GiB" in told.found[0].sentence
    assert "of all ranks" in told.found[0].sentence


def test_a_log_that_is_given_to_stack_says_releases_and_flags(monkeypatch, capsys, tmp_path):
    path = tmp_path / "train.log"

    def applies(words: str = "") -> list[str]:
        in_this_process(monkeypatch, f"stack {path} {words} --json")
        answer = json.loads(capsys.readouterr().out)
        return [row["id"] for row in answer["faults"] if row["answer"] == "applies"]

    log = "zero_optimization_stage ...... 2\ngradient_accumulation_steps: 4\n8 x A100\nTrainingArguments\n"
    path.write_text(f"deepspeed==0.18.2\n{log}")
    assert "last-pass-only" in applies()
    assert "last-pass-only" not in applies("--stage 3")  # flags win
    path.write_text(f"deepspeed is used\n{log}")
    assert not in_this_process(monkeypatch, f"stack {path}")
    assert "Read from the text: stage 2, gradient accumulation 4, 8 ranks" in " ".join(capsys.readouterr().out.split())


# --- a wrong guess is worse than none --------------------------------------------------------------------------------

# Of each mechanism that gave a wrong answer to a thread that the reader had not seen: a text with all that it told by,
# and what contradicts it, or holds it apart.
FALLS = "".join(f"{{'loss': {3 - number / 10:.2f}, 'epoch': 0.1}}\n" for number in range(20))
CONTRADICTED = {
    "an error that nothing explains": (
        "With FSDP it hangs while saving.\nFooError: the flux is inverted\n",
        "",
    ),
    "parts of a long sentence": (
        "I save the results of each of my experiments in a folder that all of my colleagues read, and in the one of "
        "today I saw that the newest release of the tool with which we look at pictures is slow\n",
        "",
    ),
    "a log whose loss falls": (f"The loss does not fall as I want.\n{FALLS}", ""),
    "one node": ("nnodes: 1\nThe training hangs on the node of the cluster at some step\n", ""),
    "a change of code": ("It hangs on our nodes since pull request 4906; with that commit reverted it does not\n", ""),
    "pictures in a data set": ("With stage 3 it hangs at some step\nClass 0: 70000 images\n", ""),
    "a number of something else": ("In all of our steps grad_norm=0 and loss is not as I want\n", "norm-zero"),
    "a speed that rises": ("The speed is not better with two GPUs, it only increases by 10%\n", ""),
    "early stopping": ("It stops early, by early stopping, at the best checkpoint, and I resume from it\n", ""),
    "a time that is no limit": ("It hangs on our GPUs; before, a step takes 10 minutes\n", ""),
    "the name of a GPU": ("The training hangs on RTX 4090 at some step\n", ""),
}


@pytest.mark.parametrize("why", CONTRADICTED)
def test_words_are_not_taken_for_what_the_text_contradicts(why):
    text, id = CONTRADICTED[why]
    assert answer(text).id == id


def test_each_situation_rests_on_a_setting_a_number_or_a_message():
    """Of forty threads that nobody had read, words alone were right in one, wrong in one, and led elsewhere in nine."""
    for id, each in situations.situations().items():
        shown = {*each.symptoms} & {*tracebacks.rows()}
        assert each.needs or each.when or each.works or shown, id


def test_each_word_of_a_condition_is_one_that_texts_can_have():
    """A condition with another word is never met: "generate" was read as "evaluate"."""
    conditions = [*two_releases.WORKS, *two_releases.BROKEN, *memory.OUT_OF_MEMORY, *memory.OF_SIZES, *memory.HANGS]
    conditions += [each for row in situations.situations().values() for each in row.words]
    conditions += [each for row in matching.symptoms_table().values() for each in row.words]
    conditions += [each for row in tracebacks.rows().values() for each in (*row.said, *row.alone)]
    conditions += [each for row in watchdogs.causes_of_waits().values() for each in row.words]
    for word in {word for each in conditions for word in re.split(r"[\s/+]+", each) if word}:
        (sentence,) = words.sentences(word)
        assert sentence.words == (word,)


@pytest.mark.parametrize(
    "text",
    [
        "install",
        "instances",
        "convert it",
        "in general",
        "improper",
        "a quantity",
        "handed over",
        "saying",
        "workers",
        "matrices",
    ],
)
def test_another_word_is_no_typing_error(text):
    (sentence,) = words.sentences(text)
    assert " ".join(sentence.words) == text


def test_fine_tuning_is_training_and_no_praise():
    assert words.meets(["train + hang"], words.sentences("Fine-tuning hangs"))
    assert words.meets(["works"], words.sentences("I fine-tune a model")) is None


def test_words_alone_are_told_nothing():
    for words_alone in (
        "It hangs",
        "It is slow on our GPUs",
        "The loss is higher than with the other trainer",
    ):
        assert answer(words_alone).found == (), words_alone


def test_a_file_beside_a_log_is_no_part_of_its_message(tmp_path, capsys):
    log, listed = tmp_path / "train.log", tmp_path / "requirements.txt"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full.\n")
    listed.write_text("torch==2.6.0\n")
    diagnosis.diagnose((str(log), str(listed)))
    (shown,) = re.findall(r"In the text: (.*?)\n\n", capsys.readouterr().out, re.DOTALL)
    assert shown.endswith("Tried to allocate 2.00 GiB.")


OVERLAP = 'DeepSpeed info: version=0.17.2, git-hash=x\n{"zero_optimization": {"stage": 2, "overlap_comm": true}}\n'
STACK_OF_LOG = "transformers==4.53.2\naccelerate==1.8.1\ntorch==2.7.1\n"


@pytest.mark.parametrize("seen", ["", EXAMPLES["memory-was-full"]["text"], "CUDA error: not known here"])
def test_a_fault_that_surely_applies_is_named_whatever_was_seen(seen, monkeypatch, capsys, tmp_path):
    """As `study stack` does, of the same files."""
    log = tmp_path / "train.log"
    log.write_text(f"{seen}\n{OVERLAP}{STACK_OF_LOG}world_size: 8\n")
    told = answer(log.read_text())
    surely = [match.fault.id for match in told.applying if match.applies.answer == "applies"]
    assert surely == ["overlap-buffer-overwritten"]
    assert "overlap-buffer-overwritten" not in {match.fault.id for match in told.possible}
    in_this_process(monkeypatch, f"diagnose {log}")
    said = " ".join(capsys.readouterr().out.split())
    assert "Applies here: With overlap_comm, " in said
    assert "set overlap_comm to false" in said.partition("Applies here")[2].partition("may apply")[0]


def test_a_fault_that_surely_applies_is_told_once():
    told = answer(f"{OVERLAP}{STACK_OF_LOG}world_size: 8\n", "the loss falls to 0 and grad_norm is 1.414")
    assert told.id == "overlap-buffer-overwritten"
    assert told.applying == ()


@pytest.mark.parametrize("command", ["diagnose", "stack"])
def test_of_a_release_in_a_log_and_another_in_a_list_it_is_said_which_counts(command, monkeypatch, capsys, tmp_path):
    log, frozen = tmp_path / "train.log", tmp_path / "requirements.txt"
    frozen.write_text("deepspeed==0.19.5\ntorch==2.7.1\n")
    for line, counts in (
        ("DeepSpeed info: version=0.17.2, git-hash=x", "0.17.2 counts, as the log says that it ran."),
        ("deepspeed==0.17.2", "which one is used is not known. Give that one alone."),
    ):
        log.write_text(f"{line}\nzero_stage: 2\nworld_size: 8\n")
        in_this_process(monkeypatch, f"{command} {log} {frozen}")
        said = " ".join(capsys.readouterr().out.split())
        assert f"Of deepspeed 0.17.2 and 0.19.5 are named: {counts}" in said


ROOTS = "".join(f"{{'loss': 1.8{step}, 'grad_norm': 1.4142135, 'learning_rate': 1e-4}}\n" for step in range(10))


@pytest.mark.parametrize(
    ("said", "id"),
    [
        ("Distributed environment: DistributedType.FSDP  Backend: nccl", "norm-constant"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1", "norm-constant"),
        ("distributed_type: MULTI_GPU", "norm-constant"),
        ("deepspeed==0.18.3\ndistributed_type: FSDP", "norm-constant"),  # a list of packages
        ("", "norm-sqrt2"),
        ("zero_stage: 3", "norm-sqrt2"),
        ("With DeepSpeed it is so, with FSDP all is well.", "norm-sqrt2"),
    ],
)
def test_a_mark_of_deepspeed_is_seen_only_where_deepspeed_may_train(said, id):
    ids = [each.id for each in answer(f"{said}\n{ROOTS}").found]
    assert ids[0] == id
    assert len({"norm-constant", "norm-sqrt2"} & {*ids}) == 1


def test_words_of_a_root_are_no_mark_with_fsdp():
    assert answer("grad_norm is 1.414 with FSDP2").id != "norm-sqrt2"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Mistral-7B LoRA with Accelerate FSDP: grad_norm is constant and the loss does not fall since we upgraded",
            {"norm-constant", "loss-stands-still"},
        ),
        ("grad_norm stays the same", {"norm-constant"}),
        ("FSDP2: constant gradient norm", {"norm-constant"}),
        ("my gradient norm never changes", {"norm-constant"}),
        ("the loss does not decrease with FSDP", {"loss-stands-still"}),
        ("loss is flat with FSDP2", {"loss-stands-still"}),
        ("training loss isn't going down", {"loss-stands-still"}),
        ("the loss is stuck at 1.87", {"loss-stands-still"}),
    ],
)
def test_words_alone_of_what_stands_still_have_a_possible_answer(text, ids):
    found = {each.id: each for each in answer(text).found}
    assert found.keys() == ids
    assert {each.sure for each in found.values()} == {"possible"}
    assert all("optimizer" in each.remedy and "adapters" in each.remedy for each in found.values())


@pytest.mark.parametrize(
    "text", ["The loss falls well with FSDP2.", "The norm differs between FSDP and DDP.", "Is the loss not averaged?"]
)
def test_words_of_a_training_that_moves_are_no_standstill(text):
    assert {"norm-constant", "loss-stands-still"}.isdisjoint(each.id for each in answer(text).found)


FALLING = [(2.31, 1.21), (2.02, 0.87), (1.74, 1.05), (1.69, 0.66), (1.52, 0.71)]


def printed(name: str, rows: list, loss: float = 1, norm: float = 1) -> str:
    """The lines of a trainer, with steps called so, and each loss and norm so many times as large."""
    return "".join(
        f"{{'loss': {loss * each:.5f}, 'grad_norm': {norm * other:.5f}, '{name}': {step}}}\n"
        for step, (each, other) in enumerate(rows, 1)
    )


@for_each(
    ("loss", "norm", "says"),
    [
        (8, 8, "each loss and each norm of the second log is 8.00 times that of the first: usually a sum over the 8 m"),
        (1 / 8, 1 / 8, "each loss and each norm of the first log is 8.00 times that of the second: usually a sum over"),
        (4, 4, "each loss and each norm of the second log is 4.00 times that of the first: usually a sum over the 4 r"),
        (32, 32, "usually a sum over 8 micro-batches x 4 ranks, and not a mean"),
        (
            8,
            1,
            "each loss of the second log is 8.00 times that of the first, and norms agree: usually a sum over the 8",
        ),
        (1, 8, "each norm of the second log is 8.00 times that of the first, and losses agree: usually a sum over the"),
        (1, 2, "each norm of the second log is 2.00 times that of the first, and losses agree: usually squares of the"),
        (1, 65_536, "a loss scale of 65,536"),
        (3, 3, "usually a sum where the other has a mean (give both configs"),
        (1, 1, None),
        (1.05, 1, None),
    ],
)
@for_each("name", ["epoch", "step"])
def test_two_logs_in_one_ratio_are_told_first_with_what_makes_it(loss, norm, says, name, monkeypatch, capsys, tmp_path):
    (tmp_path / "ddp.log").write_text(printed(name, FALLING))
    (tmp_path / "z3.log").write_text(printed(name, FALLING[:-1], loss, norm))
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 8\n  zero_stage: 3\n"
        "num_processes: 4\n"
    )
    assert not in_this_process(monkeypatch, f"diagnose {tmp_path}/ddp.log {tmp_path}/z3.log {tmp_path}/zero3.yaml")
    first = " ".join(capsys.readouterr().out.split("\n\n")[0].split()).lower()
    assert (says in first) if says else ("log" not in first)


SETTINGS = "\nTrainingArguments(gradient_accumulation_steps=8, per_device_train_batch_size=3)\nnum_processes: 4\n"


@pytest.mark.parametrize(
    ("loss", "norm", "is_told"),
    [(8, 8, True), (8.2, 7.9, True), (4, 4, True), (8, 1, False), (8, 4, False), (5, 5, False)],
)
def test_losses_and_norms_that_jump_by_a_number_of_the_training_are_told(loss, norm, is_told):
    rows = [*FALLING, *((loss * each, norm * other) for each, other in FALLING)]
    told = answer("resumed from checkpoint-5\n" + printed("step", rows) + SETTINGS)
    assert (told.id == "jump-by-a-factor") is is_told
    if is_told:
        assert f"a sum over the {round(loss)} " in told.found[0].sentence
        assert "loss-jumps-on-resume" not in [each.id for each in told.found]


@for_each(
    ("words", "says"),
    [
        ("loss is 8 times as high after the upgrade", "a sum over the 8 micro-batches of an update"),
        ("since the new version the loss is 8x larger", "a sum over the 8 micro-batches of an update"),
        ("the loss quadrupled when I upgraded", "a sum over the 4 ranks"),
        ("grad_norm is four times what it was", "a sum over the 4 ranks"),
        ("the loss is too high by a factor of 32", "8 micro-batches x 4 ranks"),
        ("loss 20.1 instead of 2.51", "a sum over the 8 micro-batches of an update"),
        ("loss is 5 times as high after the upgrade", ""),
        ("loss is 8 times lower after the upgrade", ""),
        ("loss fell from 20.1 to 2.51", ""),
        ("loss 1.4 instead of 0", ""),
        ("the loss tripled after the upgrade", ""),
        ("memory is 8 times as high", ""),
        ("loss is nan on 8 x H100 with 8 times the data", ""),
        ("loss is bad with an 8 times larger batch", ""),
        ("with 8 times as much memory the loss is the same", ""),
        ("the loss is fine", ""),
    ],
)
def test_a_factor_that_a_person_says_is_explained_by_the_numbers_of_the_training(words, says):
    told = answer(SETTINGS, words)
    assert ("times-in-words" in [each.id for each in told.found]) is bool(says), told.found
    assert not says or says in told.found[0].sentence


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train loss is 8 times the eval loss with gradient accumulation 8", "a sum over the 8 micro-batches"),
        ("loss is 8 times too large since I use gradient accumulation", "an update, if it has 8, and not a mean"),
        ("my training loss is ten times the eval loss", "an update, if it has 10, and not a mean"),
        ("training loss is 4x the validation loss", "an update, if it has 4, and not a mean"),
        ("eval loss is 8 times lower than the training loss", ""),
        ("the train loss is twice the eval loss", ""),
        ("the loss is 8 times too large", ""),
        ("train loss equals the eval loss", ""),
    ],
)
def test_a_factor_above_evaluation_or_with_accumulation_may_be_the_passes(words, says):
    told = answer("", words)
    assert ("times-in-words" in [each.id for each in told.found]) is bool(says), told.found
    assert not says or says in told.found[0].sentence


@pytest.mark.parametrize(
    ("factor", "evaluated", "is_told"),
    [(8, (1.0, 1.0), True), (9, (1.0, 1.0), True), (8, (1.0, 8.0), False), (1, (1.0, 1.0), False), (5, (1,), False)],
)
def test_losses_that_are_as_many_times_the_evaluations_as_an_update_has_passes_are_a_sum(factor, evaluated, is_told):
    rows = "".join(printed("step", FALLING, factor, 1) + f"\n{{'eval_loss': {1.9 * each}}}\n" for each in evaluated)
    told = answer(f"transformers==4.46.0\ntransformers Trainer\n{rows}{SETTINGS}")
    assert ("train-above-evaluation" in [each.id for each in told.found]) is is_told
    if is_told:
        assert (told.id, told.sure) == ("train-above-evaluation", "likely")
        assert "passes-summed-without-num-items" in told.found[0].remedy


@pytest.mark.parametrize(
    "text",
    [
        printed("epoch", FALLING) + printed("epoch", [(8 * loss, norm**2) for loss, norm in FALLING[::-1]]),
        printed("epoch", FALLING) + 2 * printed("epoch", FALLING, 8, 8),
        printed("epoch", FALLING[:2]) + printed("epoch", FALLING[:2], 8, 8),
    ],
    ids=["ratio that changes", "three logs", "two steps"],
)
def test_logs_in_no_one_ratio_are_not_compared(text):
    assert "logs-apart" not in answer(text).id


@pytest.mark.parametrize(
    ("said", "factor", "named"),
    [
        ("", 8, {"passes-summed-by-own-losses", "passes-divided-twice-under-deepspeed"}),
        ("", 4, {"classifier-loss-times-ranks", "loss-times-tensor-parallel"}),
        ("zero_stage: 2\n", 65_536, {"autocast-norm"}),
        ("", 3, set()),
    ],
)
def test_faults_that_make_the_ratio_are_named(said, factor, named):
    said += "transformers Trainer, gradient_accumulation_steps: 8, num_processes: 4\n"
    (found, *_) = answer(said + printed("step", FALLING) + printed("step", FALLING, 1, factor)).found
    of_factor = {each.id for each in faults().fault if each.symptom.endswith(("x g", "/ g", "x N", "x 65,536"))}
    told = {id for id in of_factor if id in found.remedy}
    assert (named <= told) if named else not told


SAYS_IN_A_PATH = {
    "precision": "deepspeed/runtime/fp16/loss_scaler.py",
    "peft": "home/me/lora/train.py",
    "stage": "home/me/zero2/train.py",
    "optimizer": "torch/optim/muon.py",
    "ranks": "runs/8xA100/train.py",
}
CODE_RAN = {
    ("stage", 3): "deepspeed/runtime/zero/stage3.py",
    ("stage", "FSDP1"): "torch/distributed/fsdp/_runtime_utils.py",
    ("stage", "FSDP2"): "torch/distributed/fsdp/_fully_shard/_fsdp_state.py",
    ("stage", "DDP"): "torch/nn/parallel/distributed.py",
    ("checkpointing", True): "torch/utils/checkpoint.py",
    ("peft", True): "peft/tuners/linear.py",
    ("trainer", "axolotl"): "axolotl/train.py",
    ("trainer", "trainer"): "transformers/trainer.py",
}
FRAMES = ('File "/{}", line 65, in backward', "/{}:65 in backward", "/{}:65: UserWarning: x")


@pytest.mark.parametrize("frame", FRAMES)
def test_the_files_of_a_traceback_say_which_code_ran_and_no_setting(frame):
    for condition, path in SAYS_IN_A_PATH.items():
        assert condition not in said_of(frame.format(path)), path
    for (condition, value), path in CODE_RAN.items():
        assert said_of(frame.format(path))[condition] == value, path
    assert said_of(f"{frame.format(SAYS_IN_A_PATH['precision'])}\nbf16 is on")["precision"] == "bf16"


REPLACED = tracebacks.messages()["evaluation-strategy"].instead


@for_each("name", REPLACED)
def test_an_argument_that_is_gone_has_one_in_its_place_that_the_installed_release_has(name):
    """Of warmup_ratio it said what became of tokenizer."""
    (seen,) = tracebacks.errors(f"TypeError: TrainingArguments.__init__() got an unexpected keyword argument '{name}'")
    assert seen.remedy == REPLACED[name]
    source = Path(next(iter(importlib.util.find_spec("transformers").submodule_search_locations)))
    texts = [(source / f"{each}.py").read_text() for each in ("training_args", "trainer")]
    known = re.findall(r"(?m)^ {4,8}(\w+): ", "".join(texts))
    new = re.search(r"into (\w+)$", seen.remedy) or re.match(r"write (\w+)", seen.remedy)
    assert new[1] in known
    assert name not in known


HANGS_LATER = """from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
if accelerator.is_main_process:
    accelerator.save_state("out")
"""


@pytest.mark.parametrize("beside", ["", "hangs", "error", "faults"])
@pytest.mark.parametrize("symptom", ["the moon is green", "throughput wobbles", "since stage 3 it is odd"])
def test_a_symptom_that_is_not_known_is_said_to_be_so_first_and_no_more_than_files_decide(
    symptom, beside, capsys, tmp_path
):
    script, config, log = tmp_path / "train.py", tmp_path / "ds.json", tmp_path / "train.log"
    script.write_text(HANGS_LATER)
    config.write_text('{"zero_optimization": {"stage": 3}}')
    log.write_text(EXAMPLES["memory-was-full"]["text"] if beside == "error" else OVERLAP + STACK_OF_LOG)
    files = {"": (), "hangs": (script, config), "error": (log,), "faults": (log,)}[beside]
    diagnosis.diagnose(tuple(map(str, files)), symptom=symptom)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"The symptom '{symptom}' is not known here."), said
    assert "Nothing was seen" not in said
    assert ("A line of the script may hang when it is reached." in said) == (beside == "hangs")
    assert ("Memory was full" in said) == (beside == "error")
    assert ("Applies here: With overlap_comm" in said) == (beside == "faults")


@pytest.mark.parametrize("symptom", ["norm", "it hangs", "the loss is nan", "grad_norm 1.414", "KeyError: 5", ""])
def test_a_symptom_that_is_known_is_not_said_to_be_unknown(symptom):
    assert "The symptom" not in answer("A training.", symptom).unknown


# --- a layer class that the model does not have

WRAPS = (
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: {classes}\n  fsdp_version: {version}\n"
)
LOADS = 'model = AutoModelForCausalLM.from_pretrained("{model}")\n'
LAYERS = [
    ("LlamaDecoderLayer", "Qwen/Qwen2.5-7B", True),
    ("Qwen2DecoderLayer,LlamaDecoderLayer", "Qwen/Qwen2.5-7B", True),
    ("Qwen2DecoderLayer", "Qwen/Qwen2.5-7B", False),
    ("Qwen2MoeDecoderLayer", "Qwen/Qwen2.5-7B", True),
    ("GemmaDecoderLayer", "google/gemma-2-9b", True),
    ("Gemma3DecoderLayer", "google/gemma-3-1b-pt", False),
    ("GPTNeoXLayer", "EleutherAI/gpt-neox-20b", False),
    ("BertLayer", "google-bert/bert-base-uncased", False),
    ("MyBlock", "Qwen/Qwen2.5-7B", False),
    ("LlamaDecoderLayer", "mine/other", False),
]


@for_each("version", [1, 2])
@for_each(("classes", "model", "is_wrong"), LAYERS)
def test_a_layer_class_of_another_family_is_told_before_the_start(classes, model, is_wrong, version):
    told = answer(WRAPS.format(classes=classes, version=version) + LOADS.format(model=model))
    assert (told.id == "fsdp-layer-name") is is_wrong
    assert not is_wrong or (told.sure, told.found[0].line[:12]) == ("likely", "fsdp_transfo")
    of_zero = WRAPS.format(classes=classes, version=version).replace(
        "distributed_type: FSDP\nfsdp_config", "zero_stage: 3\nx"
    )
    assert answer(LOADS.format(model=model) + of_zero.replace("fsdp_", "")).id == ""


# --- what a release can change

ASKS = {
    "sure": (EXAMPLES["fsdp-layer-name"]["text"], "", False),
    "dump": (EXAMPLES["dumps-apart"]["text"], "it hangs", False),
    "possible": ("zero_stage: 2, gradient_accumulation_steps: 4", "the loss is nan", True),
    "nothing": ("zero_stage: 2, gradient_accumulation_steps: 4", "", True),
}


@pytest.mark.parametrize("name", ASKS)
def test_releases_are_asked_only_where_one_may_change_the_answer(name):
    text, symptom, is_asked = ASKS[name]
    told = answer(text, symptom)
    assert any("Which releases" in question for question in told.questions) is is_asked


@pytest.mark.parametrize(
    "error",
    [
        "inconsistent tensor size, expected tensor [4] and src [0] to have the same number of elements, but got 4",
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [0]",
        "Expected weight to be a vector of size equal to the number of channels in input, but got weight of shape [0]",
        "weight tensor should be defined either for all 4 classes or no classes but got weight tensor of shape: [0]",
        "The expanded size of the tensor (5) must match the existing size (0) at non-singleton dimension 1.",
        "einsum(): subscript h has size 0 for operand 1 which does not broadcast with previously seen size 4",
        "contracted dimensions need to match, but first has size 4 in dim 2 and second has size 0 in dim 0",
        "Mismatch of parameter numbers and input channel size. Found parameter numbers = 0 and channel size = 3.",
    ],
)
def test_whatever_operation_meets_a_weight_of_size_0_it_was_not_gathered(error):
    assert answer(f"RuntimeError: {error}").id == "matrix-not-gathered"


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ('Unexpected key(s) in state_dict: "_forward_module.model.norm.weight".', "module-prefix"),
        ("RuntimeError: Unable to JIT load the async_io op due to it not being compatible", "async-io"),
        ("W0612 api.py:753] Received Signals.SIGTERM death signal, shutting down workers", "launcher-ended"),
        ("zero stage 2 with offload_optimizer cpu is slow", "offload-slow"),
    ],
)
def test_a_cause_that_the_text_names_is_told(text, id):
    assert answer(text).id == id


@pytest.mark.parametrize(
    ("words", "is_hang"),
    [("The loss does not move", False), ("accuracy is stuck", False), ("it prints the loss and hangs", True)],
)
def test_a_loss_that_stands_still_is_no_hang(words, is_hang):
    assert ("hang" in answer(words).seen) is is_hang


# Sizes beside the name of a model, as scripts and launch commands give them, and whether it is the model of that name.
SIZED = [
    ('cfg = AutoConfig.for_model("gpt2", n_layer=4, n_embd=256)', "gpt2 with n_layer=4, n_embd=256"),
    ('AutoTokenizer.from_pretrained("gpt2")\nGPT2LMHeadModel(GPT2Config(n_layer=4))', "gpt2 with n_layer=4"),
    ('AutoConfig.from_pretrained("gpt2", num_hidden_layers=2)', "gpt2 with num_hidden_layers=2"),
    ('AutoModel.from_pretrained("Qwen/Qwen2.5-7B", num_hidden_layers=2)', "qwen2.5-7b with num_hidden_layers=2"),
    ('c = AutoConfig.from_pretrained("Qwen/Qwen2.5-7B")\nc.hidden_size = 512', "qwen2.5-7b with hidden_size=512"),
    ("run_clm.py --model_name_or_path gpt2 --config_overrides n_embd=1024,n_layer=24", "gpt2 with n_embd=1024, n_la"),
    ('AutoConfig.from_pretrained("gpt2", n_layer=12, vocab_size=50257)', ""),
    ('model = AutoModel.from_pretrained("gpt2")\nhead = Head(hidden_size=64)', ""),
    ('model = AutoModel.from_pretrained("gpt2")  # was n_layer=4', ""),
]


@pytest.mark.parametrize(("script", "altered"), SIZED)
def test_a_model_with_other_sizes_is_not_that_of_its_name(script, altered):
    """Such a script was predicted as the whole model, and the log was said to differ."""
    about = of_model(that_counts(script))
    assert (about.model is None, about.parameters) == (bool(altered), None)
    assert about.altered.startswith(altered)
    assert bool(about.altered) == bool(altered)
