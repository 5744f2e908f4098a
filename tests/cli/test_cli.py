"""The `study` command, started as a user starts it."""

import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
import tyro
from rich.console import Console

from study.cli import commands, results, virtual
from study.cli.commands import COMMANDS
from study.conform.suite import PropertyAnswer
from study.core import arms
from study.core.arms import NAMES
from study.core.doctor import Examined
from study.core.text import bar, binary_size, during, number_of, one_by_one, show, size
from study.measure.memory import PHASE_ROLES
from study.measure.roles import ORDER
from study.predict.architecture import named
from study.predict.prediction import estimate
from study.predict.question import PlaceFlags, TrainingFlags
from study.records import store
from study.records.compare import REASONS
from tests.cases import for_each
from tests.conftest import ROOT, python, table
from tests.shaped import changed, failed, finished, put


def in_this_process(monkeypatch, words: str) -> int | None:
    """The exit code of the console script."""
    monkeypatch.setattr(sys, "argv", ["study", *words.split()])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which it changes
    try:
        commands.main()
    except SystemExit as end:
        return end.code


SMOKE = ROOT / "reports/cpu-2core/runs/smoke"
QUESTIONS = table("cli/questions.toml")
NAMED = {"SMOKE": SMOKE, "ZERO1": SMOKE / "arms-zero1-9502bd8f-r1.1", "ZERO3": SMOKE / "arms-zero3-46126d78-r1.1"}
NAMED |= {"BERT": SMOKE / "arms-zero2-72420bc1-r1.1", "CONFIGS": ROOT / "accelerate_configs", "LONG": "a" * 5000}
NAMED |= QUESTIONS["names"]


@pytest.fixture(scope="session")
def some_files(tmp_path_factory) -> Path:
    """A folder with files that questions are about."""
    made = tmp_path_factory.mktemp("some-files")
    for name, text in QUESTIONS["files"].items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    (made / "huge.txt").touch()
    os.truncate(made / "huge.txt", 2**40)
    odd = changed(finished("odd"), memory__components=[3])
    put(made / "other-losses", finished("ddp", "ddp"), finished("zero2", loss=2.1))
    put(made / "some", finished("good"), finished("other"), odd, failed("full"))
    for folder in (SMOKE / "arms-zero2-5228df76-r1.1", SMOKE / "arms-zero2-72420bc1-r1.1", *SMOKE.glob("arms-ddp-*")):
        record = json.loads((folder / "record.json").read_text())
        for sent in record["traffic"]["per_rank"]:
            if "all_gather" in sent:
                sent["all_gather"]["bytes"] *= 2
        put(made / "tampered", record)
    return made


@pytest.fixture
def asked(monkeypatch, some_files):
    """A function that asks a question in that folder, and returns the exit code. No question changes a file there."""
    given = {path: path.stat().st_mtime_ns for path in some_files.rglob("*")}
    monkeypatch.chdir(some_files)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def ask(words: str) -> int | None:
        for name, path in NAMED.items():
            words = words.replace(name, str(path))
        code = in_this_process(monkeypatch, words)
        assert {path: path.stat().st_mtime_ns for path in some_files.rglob("*")} == given
        return code

    return ask


@pytest.mark.parametrize(("words", "first"), QUESTIONS["answered"].items())
def test_an_ordinary_question_is_answered_in_the_first_line(words, first, asked, monkeypatch, capsys):
    if words.startswith("ADVISE"):
        monkeypatch.setattr(sys.modules["study.predict.advise"], "ORDER", ("ddp", "zero3_ulysses", "zero1_tp"))
    assert asked(words) in (None, 0, 1)  # see test_the_exit_code_is_one_rule
    lines = capsys.readouterr().out.splitlines()
    assert first in lines[0]
    if words.startswith(("arms", "advise", "ADVISE", "compare SMOKE --arms")):
        assert max(len(line.rstrip()) for line in lines) <= 100, "as wide as a screen"


EXIT_CODES = [(words, code) for code, each in QUESTIONS["exit_codes"].items() for words in each]


@pytest.mark.parametrize(("words", "code"), EXIT_CODES)
def test_the_exit_code_is_one_rule(words, code, asked, capsys):
    """0: nothing is surely wrong; 1: something is; 2: the question cannot be answered."""
    assert str(asked(words) or 0) == code


def test_the_rule_is_tested_for_each_command():
    """Those that take minutes too: what is surely wrong with them has a test of its own."""
    assert {words.split()[0] for words, _ in EXIT_CODES} == {*COMMANDS}


@pytest.mark.parametrize(("answer", "code"), [("holds", 0), ("refused", 0), ("fails", 1)])
def test_a_property_that_fails_is_surely_wrong(answer, code, monkeypatch, capsys):
    answers = [PropertyAnswer("zero2", "one-update", "2.13.0", "0.19.8", "1.15.0", answer)]
    monkeypatch.setattr("study.conform.command._hold", lambda *_: answers)
    assert (in_this_process(monkeypatch, "conform zero2") or 0) == code


@pytest.mark.parametrize(("notebooks", "code"), [([], 0), (["stages"], 1)])
def test_a_notebook_that_fails_is_surely_wrong(notebooks, code, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("study.report.site.build", lambda *_: notebooks)
    assert (in_this_process(monkeypatch, f"report --out {tmp_path}/site") or 0) == code


@pytest.mark.parametrize("command", QUESTIONS["printed"])
def test_what_people_read(command, asked, capsys, golden):
    text = ""
    for words in QUESTIONS["printed"][command]:
        asked(words)
        text += f"$ study {words}\n\n{capsys.readouterr().out.replace(str(Path.cwd()), '.')}\n"
    golden(f"command_{command}.txt", text)


# All that a look at real memory or an estimate tells apart, and what `compare` says of older records.
COMPONENTS = {*ORDER, *PHASE_ROLES.values(), "activations or temporaries"}


@pytest.mark.parametrize("name", sorted(COMPONENTS))
def test_each_component_of_memory_is_explained_in_a_sentence_by_its_name(name, asked, capsys):
    """A place in our sources that only names it is no condition of it."""
    assert {*REASONS} == COMPONENTS
    assert asked(f"explain {name}") is None
    said = " ".join(capsys.readouterr().out.split())
    assert f": {REASONS[name]}." in said
    assert not re.search(r"Condition: |Rule: |\.py:", said)


@pytest.mark.parametrize("command", ["estimate", "virtual"])
def test_each_row_of_a_printed_peak_is_one_of_them(command):
    printed = (ROOT / f"tests/golden/command_{command}.txt").read_text()
    tables = re.findall(r"^component .*\n((?:.+\n)+)", printed, re.MULTILINE)
    names = {name for rows in tables for name in re.findall(r"^(.+?)  ", rows, re.MULTILINE)}
    assert {"weights", "temporaries", "other"} <= names
    names = {re.sub(", and up to .* that autocast has cast$", "", name) for name in names}
    assert {each for name in names for each in name.split(", and DDP's ")} <= COMPONENTS | {"total"}


def test_all_arms_are_listed(asked, capsys):
    """With what each is."""
    assert asked("arms") is None
    lines = capsys.readouterr().out.splitlines()
    assert "zero3_qgz, zero3_qwz: no: collectives in 8 and 4 bits, of ZeRO++, need a GPU" in "".join(lines)
    assert {*NAMES, "zero3_textbook"} < {line.split()[0] for line in lines if line}
    assert "zero3: ZeRO stage 3: like zero2, and the parameters are partitioned too." in lines


def test_one_reason_for_all_arms_is_said_once(asked, monkeypatch, capsys):
    """As in the light install."""
    monkeypatch.setattr("study.sweeps.launches.version", lambda _: None)
    asked("arms")
    printed = capsys.readouterr().out
    assert printed.count("this needs accelerate") == 1
    assert "\nall: no: this needs accelerate" in printed


def test_an_arm_that_is_refused_stops_no_other(asked, monkeypatch, capsys):
    """Whether somebody names the file, or it lies beside ours. The exit code is 1."""
    assert asked("arms zero2 ignored.yaml ddp --json") == 1
    rows = {row["arm"]: row["here"] for row in json.loads(capsys.readouterr().out)}
    refused = "stage 2 takes nvme for cpu, and writes nothing to a disk: write cpu, or take stage 3; fix ignored.yaml"
    assert (rows["zero2"], rows["ddp"]) == ("yes", "yes")
    assert rows["ignored.yaml"].startswith("no: ")
    assert rows["ignored.yaml"].endswith(refused)
    assert "ignored.yaml:" not in rows["ignored.yaml"], "the row begins with it"
    every = arms.all_paths() | {"ignored": Path.cwd() / "ignored.yaml"}
    monkeypatch.setattr(arms, "all_paths", lambda: every)
    monkeypatch.setattr("study.cli.machine.all_paths", lambda: every)
    assert asked("arms") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert refused.partition("; fix")[0] in printed
    variants = len(every) - len(NAMES)
    assert re.search(rf"^\d+ of {len(NAMES)} arms and \d+ of {variants} variants can run on this machine\.", printed)


def test_the_arms_stand_apart_from_their_variants(asked, capsys):
    """README counts the first. A row is one line."""
    asked("arms")
    tables = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")]
    rows = {lines[0].split()[0]: [line.split()[0] for line in lines[1:]] for lines in tables if "stage " in lines[0]}
    assert rows == {"arm": [*arms.NAMES], "variant": [name for name in arms.all_paths() if name not in arms.NAMES]}


@pytest.mark.parametrize(("gpus", "of_node"), [(2, 2), (8, 8), (16, 8)])
def test_the_host_memory_of_a_node_is_that_of_its_ranks(asked, gpus, of_node, capsys):
    words = f"estimate --model gpt2 --arm zero3_cpu --gpus {gpus}"
    asked(f"{words} --gpu H100 --json")
    told = json.loads(capsys.readouterr().out)
    host_bytes = told["estimate"]["host_bytes"]
    assert told["host_bytes_of_node"] == of_node * host_bytes > 0
    asked(f"{words} --gpu H100")
    line = f"{size(of_node * host_bytes)} a node of {of_node} GPUs, and {size(of_node * (host_bytes + 4e9))} with 4 GB"
    assert f"host memory: {size(host_bytes)} a rank, {line}" in " ".join(capsys.readouterr().out.split())
    asked(words)
    assert "a node of" not in capsys.readouterr().out, "nobody said how many GPUs a node has"


def test_estimate_and_advise_say_how_many_micro_batches_were_taken(asked, capsys):
    """They differ, and so do the gradients that wait between micro-batches."""
    asked("estimate --model gpt2 --arm zero2 --gpus 8")
    assert "1 micro-batch in a step (--accumulation)" in " ".join(capsys.readouterr().out.split())
    words = "advise --model gpt2 --gpus 8 --gpu H100"
    asked(f"{words} --json")
    passes = number_of(json.loads(capsys.readouterr().out)["choice"]["accumulation"], "micro-batches")
    line = f"Without --batch a step has 128 sequences over all GPUs, here in {passes}; `study estimate` takes 1"
    asked(f"{words} --details")
    assert line in " ".join(capsys.readouterr().out.split())
    asked(f"{words} --batch 128 --details")
    assert "Without --batch" not in capsys.readouterr().out


GIVEN = (
    "--model gpt2 --sequence 1k --gpus 8 --gpu H100 --batch 128 --link pcie4 --host-memory 1TB --precision bf16_cast"
)
BELOW = ("fits: ", "A third of others' peaks", "Taken: ")


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (GIVEN, "what you gave"),
        ("--model gpt2 --gpus 8 --gpu H100", "--sequence 1024, --batch 128, --link nvswitch, --precision by arm"),
        ("--model gpt2 --gpus 1 --gpu T4 --batch 200000", "--sequence 1024, --host-memory 60 GiB, --precision by arm"),
        (
            "--model llama3-8b --gpus 2 --gpu RTX4090 --lora-rank 16",
            "--sequence 2048, --batch 128, --link pcie4, --precision bf16_cast",
        ),
    ],
)
def test_an_advice_ends_in_three_sentences_and_names_what_nobody_gave(words, taken, asked, capsys):
    asked(f"advise {words}")
    below = " ".join(capsys.readouterr().out.rpartition("\n\n")[2].split())
    assert [below.count(begin) for begin in BELOW] == [1, 1, 1]
    assert below.startswith(BELOW[0])
    assert below.endswith(f"Taken: {taken}; --details says more.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--params 1.3e9",
            "Shape taken for 1.3 billion parameters: gpt3-1.3b (1.32 billion), with a vocabulary of 50,257 tokens.",
        ),
        (
            "--params 8e9",
            "Shape taken for 8 billion parameters: llama3-8b (8.03 billion), with a vocabulary of 128,256 tokens.",
        ),
        ("--params 1.5e9 --layers 24 --hidden 2048", "Shape taken for 1.5 billion parameters: 24 layers of width 2048"),
        ("--model gpt2", None),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "advise --gpus 8 --gpu A100"])
def test_a_number_of_parameters_has_its_shape_beside_the_answer(command, words, said, asked, capsys):
    asked(f"{command} {words}")
    out = " ".join(capsys.readouterr().out.split())
    assert said is None or said in out
    assert ("Shape taken" in out) == ("Yours: --model and a folder" in out) == bool(said)


@pytest.mark.parametrize(
    "command",
    [
        "advise --model gpt2 --gpus 8",
        "estimate --model gpt2",
        "oom an.log --model gpt2",
        "sweep smoke --plan --gpus 8",
    ],
)
def test_every_command_says_which_size_of_gpu_it_takes(command, asked, capsys):
    """Of A100 there are two, and 80 GB were taken without a word. `virtual` is asked in tests/rehearsal."""
    said = "A100 taken as A100-80GB (A100-40GB is another)"
    for words, times in (("--gpu A100", 1), ("--gpu=A100", 1), ("--gpu A100-40GB", 0), ("", 0)):
        asked(f"{command} {words}")
        assert capsys.readouterr().err.count(said) == times, words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # ZeRO's figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 GPUs.
        ("ddp --precision bf16_cast", "120 GB (weights 15 GB, gradients 15 GB, optimizer 90 GB)"),
        ("zero2 --precision fp16", "31.4 GB (weights 30 GB, gradients 469 MB, optimizer 938 MB)"),
        ("zero1", "31.4 GB (weights 15 GB, gradients 15 GB, optimizer 1.41 GB)"),
        ("zero2", "16.6 GB (weights 15 GB, gradients 234 MB, optimizer 1.41 GB)"),
        ("zero3", "1.88 GB (weights 234 MB, gradients 234 MB, optimizer 1.41 GB)"),
        ("zero2_cpu", None),
    ],
)
def test_an_estimate_has_the_model_states_alone_by_the_paper(words, said, asked, capsys):
    asked(f"estimate --params 7.5e9 --layers 72 --hidden 2880 --gpus 64 --checkpointing --arm {words}")
    out = " ".join(capsys.readouterr().out.split())
    parameters = "7.5 billion parameters with fp32 weights" if "fp16" in words else "7.5 billion parameters"
    expected = [f"model states alone, divided as in the ZeRO paper, of {parameters}: {said}"] if said else []
    assert re.findall(r"model states alone.*?\)", out) == expected


def test_of_adapters_the_paper_has_no_states(asked, capsys):
    asked("estimate --params 7.5e9 --gpus 64 --checkpointing --arm zero2 --lora-rank 8")
    assert "model states alone" not in capsys.readouterr().out


def test_all_numbers_are_of_the_shape_that_is_taken_for_a_number_of_parameters(asked, capsys):
    asked("estimate --params 30B --gpus 16 --arm zero3 --checkpointing")
    out = " ".join(capsys.readouterr().out.split())
    assert "Shape taken for 30 billion parameters: llama-30b (32.5 billion)" in out
    assert "of 32.5 billion parameters: 32.5 GB (weights 4.07 GB, gradients 4.07 GB, optimizer 24.4 GB)" in out
    assert re.search(r"weights +4.07 GB", out), "the table has the same"


IMAGES, SEQUENCES = "4 images per micro-batch", "4 sequences of 1,024 tokens per micro-batch"


@pytest.mark.parametrize(("model", "says"), [("vit-large", IMAGES), ("gpt2", SEQUENCES)])
def test_a_vision_transformer_has_images_and_no_sequences(model, says, asked, capsys):
    asked(f"estimate --model {model} --gpus 2 --arm zero2 --micro-batch 4")
    asked(f"advise --model {model} --gpus 2 --gpu A10G --batch 8 --details")
    known = f"--model {model} --gpu A10G --arm zero2 --ranks 2 --micro-batch 4"
    asked(f"oom 'CUDA out of memory. Tried to allocate 1 GiB' {known}")
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(says) >= 3
    assert ("--sequence 1024" in out) == ("Tokens a second" in out) == (says == SEQUENCES)
    assert ("Images a second" in out) == (says == IMAGES)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("--buckets 200000000 --checkpointing", True),
        ("--buckets 200000000 --checkpointing --accumulation 2", False),  # whole gradients wait
        ("--checkpointing", False),  # most gradients are larger than the arm's buckets
    ],
)
def test_a_peak_below_the_states_of_the_paper_says_why(words, is_said, asked, capsys):
    asked(f"estimate --model llama3-8b --arm zero1 --gpus 8 {words}")
    assert ("[stage_1_keeps_no_gradients]" in capsys.readouterr().out) is is_said


FULL_MEMORY = "oom 'Tried to allocate 1.00 GiB' --model llama3-8b --gpu H100 --ranks 8 --micro-batch 1 --checkpointing"


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("estimate --model gpt2 --arm zero2 --precision bf16", True),
        ("estimate --model gpt2 --arm zero2 --precision fp16", True),
        ("estimate --model gpt2 --arm zero2", False),
        ("estimate --model gpt2 --arm ddp --precision bf16", False),  # of DDP it is the yaml's
        ("advise --model gpt2 --gpus 2 --gpu H100 --precision bf16", True),
        ("advise --model gpt2 --gpus 2 --gpu H100 --precision bf16_cast", False),
        (f"{FULL_MEMORY} --arm zero2 --precision bf16", True),
        (f"{FULL_MEMORY} --arm zero2", False),
        (f"{FULL_MEMORY} --arm ddp --precision bf16", False),
    ],
)
def test_the_16_bits_of_a_yaml_are_told_from_that_of_the_flag(words, is_said, asked, capsys):
    asked(words)
    assert ("[autocast_keeps_fp32_weights]" in capsys.readouterr().out) is is_said


def test_what_a_flag_of_autocast_predicts_is_beside_what_deepspeeds_own_needs(asked, capsys):
    words = "--arm zero2 --params 7.5e9 --layers 72 --hidden 2880 --gpus 64 --gpu V100-32GB --checkpointing"
    asked(f"estimate {words} --precision bf16_cast --json")
    cast = json.loads(capsys.readouterr().out)
    assert (cast["parameters_asked"], cast["fits"]) == (7.5e9, "only just")
    asked(f"estimate {words} --precision fp16")
    out = " ".join(capsys.readouterr().out.split())
    assert "It does not fit on V100-32GB" in out
    peak = cast["estimate"]["peak_bytes"]
    needs = f"{size(peak)} ({binary_size(peak)})"
    assert f"[autocast_keeps_fp32_weights] It needs {needs}. It fits only just on V100-32GB." in out
    asked("advise --model gpt2-xl --gpus 4 --gpu T4 --precision fp16")
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "[autocast_keeps_fp32_weights] The choice would be zero3 with activation checkpointing in DeepSpeed's fp16"
        in out
    )
    assert len(re.findall(r"\bUse \w+", out)) == 1


@pytest.mark.parametrize("arm", ["ddp", "zero2", "zero3", "fsdp2", "zero3_cpu"])
@pytest.mark.parametrize("gpu", ["V100-32GB", "H100"])
def test_no_kind_of_memory_is_below_the_one_inside_it(arm, gpu, asked, capsys):
    """Where a training does not fit, PyTorch's part was cut at the card, and the tensors were not."""
    asked(f"estimate --arm {arm} --model llama3-8b --gpus 8 --gpu {gpu} --sequence 8192 --json")
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert kinds["allocated"] <= kinds["reserved"] < kinds["driver"]


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("--arm ddp", True),
        ("--arm zero2 --precision bf16", True),
        ("--arm zero3 --precision bf16", False),  # its linear layers keep none
        ("--arm fsdp2", False),
        ("--arm ddp --precision bf16_cast", False),
        ("--arm ddp --precision fp32", False),
    ],
)
def test_copies_of_weights_are_told_from_activations(words, is_said, asked, capsys):
    """Of 16 tokens there are next to no activations: all is copies, 2 bytes of a weight but the embedding's."""
    asked(f"estimate --model llama3-8b --gpus 8 --sequence 16 --checkpointing {words}")
    out = " ".join(capsys.readouterr().out.split())
    assert ("activations, and up to 15 GB of weights that autocast has cast 15 GB" in out) is is_said
    assert ("autocast has cast" in out) is is_said


def test_an_estimate_has_its_peak_in_both_units(asked, capsys):
    """Cards, nvidia-smi, `advise` and PyTorch's errors mean GiB."""
    words = "estimate --model llama3-8b --arm zero3"
    asked(f"{words} --json")
    peak_bytes = json.loads(capsys.readouterr().out)["estimate"]["peak_bytes"]
    asked(words)
    assert f"needs {size(peak_bytes)} ({peak_bytes / 2**30:.3g} GiB) of GPU memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "word", "precision"),
    [
        ("DEEPSPEED", "bf16", "bf16_cast"),
        ("DEEPSPEED", "fp16", "bf16_cast"),  # as many bytes
        ("DEEPSPEED", "'no'", "fp32"),
        ("MULTI_GPU", "bf16", "bf16"),
        ("MULTI_GPU", "fp16", "fp16"),
    ],
)
def test_an_estimate_takes_a_yaml_as_accelerate_config_writes_it(kind, word, precision, asked, capsys, tmp_path):
    section = "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 3}\n" if kind == "DEEPSPEED" else ""
    bare, mine = tmp_path / "bare.yaml", tmp_path / "mine.yaml"
    bare.write_text(f"distributed_type: {kind}\n{section.replace('3', 'auto')}")
    mine.write_text(f"distributed_type: {kind}\nmixed_precision: {word}\nnum_processes: 5\n{section}")
    of_yaml = f"estimate --model gpt2 --config {mine}"
    passes = 3 if section else 1
    answers = []
    for words in (
        of_yaml,
        f"estimate --model gpt2 --arm {bare} --gpus 5 --accumulation {passes} --precision {precision}",
    ):
        asked(f"{words} --json")
        answers.append(json.loads(capsys.readouterr().out) | {"arm": "", "notes": ""})
    assert answers[0] == answers[1]
    asked(of_yaml)
    assert f"mine.yaml: --gpus 5, --precision {precision}" in " ".join(capsys.readouterr().out.split())
    asked(f"{of_yaml} --gpus 4 --json")
    assert json.loads(capsys.readouterr().out)["ranks"] == 4, "an option that was given counts"


ROWS = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("written", "gpus", "said"),
    [
        (ROWS, 8, "--micro-batch 2, --accumulation 4"),
        (ROWS, None, "--micro-batch 2, --accumulation 4"),
        (ROWS | {"gradient_accumulation_steps": 2}, None, "--gpus 16, --precision bf16_cast, --micro-batch 2"),
        (ROWS | {"gradient_accumulation_steps": 2}, 16, "--micro-batch 2, --accumulation 2"),
        ({"train_batch_size": 64}, 16, "--micro-batch 4, --accumulation 1"),
        (ROWS, 3, "train_batch_size of 64 is no multiple of 2 sequences x 3 ranks"),
        (ROWS | {"gradient_accumulation_steps": 2}, 8, "64 is not 2 sequences x 8 ranks x 2 micro-batches"),
        (ROWS | {"zero_optimization": {"stage": 2, "bogus": 1}}, 8, "zero_optimization.bogus is no key of deepspeed"),
    ],
)
def test_an_estimate_derives_rows_as_deepspeed_does_and_its_exit_code_says_what_is_refused(
    written, gpus, said, asked, capsys, tmp_path
):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}} | written))
    code = asked(f"estimate --model gpt2 --config {config}{f' --gpus {gpus}' if gpus else ''}")
    told = capsys.readouterr()
    assert said in " ".join((told.err + told.out).split())
    is_refused = "--" not in said
    assert code == (1 if is_refused else None)
    assert is_refused == ("deepspeed 0.19.8" in told.err or "refuses" in told.err)
    if "ranks" in said:  # the same sentence as others' of the same rows
        assert asked(f"stack deepspeed==0.19.8 --config {config} --ranks {gpus}") == 2
        assert said in capsys.readouterr().err


# As `accelerate config` of 1.15 writes it, and before it wrote a version.
WRITTEN_FSDP = """
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: {checkpointing}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: {offload}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  {version}
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
"""
FSDP1 = """fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_use_orig_params: true
  fsdp_sharding_strategy: {}"""
FSDP2 = "fsdp_version: 2\n  fsdp_reshard_after_forward: {}"
AS_ARMS = [
    (FSDP1.format("FULL_SHARD"), "false", "fsdp2"),
    (FSDP1.format("SHARD_GRAD_OP"), "false", "fsdp2_grad_op"),
    (FSDP1.format("2"), "false", "fsdp2_grad_op"),
    (FSDP1.format("HYBRID_SHARD"), "false", "hsdp"),
    (FSDP1.format("FULL_SHARD"), "true", "fsdp2_cpu"),
    (FSDP2.format("true"), "false", "fsdp2"),
    (FSDP2.format("false"), "false", "fsdp2_grad_op"),
    (FSDP2.format("true"), "true", "fsdp2_cpu"),
    (FSDP2.format("true\nparallelism_config: {parallelism_config_dp_replicate_size: 2}"), "false", "hsdp"),
]


@pytest.mark.parametrize(("version", "offload", "arm"), AS_ARMS)
def test_a_yaml_of_fsdp_is_predicted_as_the_arm_that_divides_the_same(version, offload, arm, asked, capsys, tmp_path):
    """By `study estimate`, and by `study oom`, which takes it with or without --config."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(WRITTEN_FSDP.format(version=version, offload=offload, checkpointing="true"))
    answers = []
    # What a plain loop's AdamW(model.parameters()) is, whose DTensors PyTorch updates all at once: the larger counts.
    larger = "" if arm.endswith("_cpu") else "--optimizer foreach"
    for words in (f"--config {mine}", f"--arm {arm} --gpus 16 --precision bf16 --checkpointing {larger}"):
        assert asked(f"estimate --model gpt2 {words} --json") is None
        answers.append(json.loads(capsys.readouterr().out) | {"arm": "", "model_states": "", "notes": ""})
    assert answers[0] == answers[1]
    asked(f"estimate --model gpt2 --config {mine}")
    printed = " ".join(capsys.readouterr().out.split())
    assert ("FSDP1 was not run" in printed) == (version in FSDP1_FILES)
    asked(f"estimate --model gpt2 --config {mine} --optimizer adamw")
    needs = re.search(r"needs ([\d.]+ [GM]B)", capsys.readouterr().out)[1]
    assert printed.count(f"with torch 2.8 or later, it needs {needs}.") == bool(larger)
    error = "'CUDA out of memory. Tried to allocate 3.91 GiB'"
    for words in (f"{error} {mine}", f"{error} --config {mine}"):
        asked(f"oom {words} --json")
        taken = json.loads(capsys.readouterr().out)["taken_as"]
        assert (taken["arm"], taken["ranks"], taken["checkpointing"]) == (arm, 16, True)


FSDP1_FILES = {version for version, *_ in AS_ARMS if "fsdp_use_orig_params" in version}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "--arm fsdp2"),
        ("FULL_SHARD", "NO_SHARD", "--arm ddp"),
        ("FULL_SHARD", "HALF_SHARD", "one of FULL_SHARD"),
    ],
)
def test_a_sharding_that_no_arm_has_is_not_predicted(old, new, said, asked, capsys, tmp_path):
    mine = tmp_path / "mine.yaml"
    written = WRITTEN_FSDP.format(version=FSDP1.format("FULL_SHARD"), offload="false", checkpointing="false")
    mine.write_text(written.replace(old, new))
    assert asked(f"estimate --model gpt2 --config {mine}") == 2
    assert said in capsys.readouterr().err
    asked(f"oom 'CUDA out of memory. Tried to allocate 3.91 GiB' {mine} --json")
    assert json.loads(capsys.readouterr().out)["taken_as"]["arm"] in (None, *(["fsdp2"] if "HALF" in new else ()))


OWN_MISTAKES = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config: {deepspeed_config_file: gone.json, zero_stage: 1, zero3_init_flag: true, flux: 1,
  offload_optimizer_device: nvme, offload_optimizer_nvme_path: /disk}
"""


def test_a_file_of_ones_own_is_told_a_mistake_a_line_and_nothing_else(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN_MISTAKES)
    assert asked("arms own.yaml") == 1
    first, second, *lines, last = capsys.readouterr().out.splitlines()
    mistakes = " ".join(" ".join(lines).split())
    assert first.startswith("own.yaml cannot be an arm: 7 mistakes. These are the rules of study/train.py; `study")
    assert f"{first} {second.strip()}".endswith("`study diagnose own.yaml` judges for any trainer.")
    assert [line[:3].strip() for line in lines if line[:3].strip()] == [f"{number}." for number in range(1, 8)]
    for words in ("gone.json", "--precision to study/train.py", "flux", "nothing to a disk", "init_flag", "nvme_path"):
        assert mistakes.count(words) == 1, words
    assert last == ""
    assert "for your own trainer leave it" in mistakes
    assert "--nvme-dir" not in mistakes, "stage 1 writes nothing to a disk"
    (tmp_path / "own.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}")
    assert asked("arms own.yaml") is None
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line] == ["arm", "own"]
    assert asked("arms gone.yaml") == 1
    assert "study diagnose" not in capsys.readouterr().out


def test_what_takes_long_is_said_once(capsys):
    for _ in range(2):
        during("what takes long")
    assert capsys.readouterr() == ("", "what takes long ...\n")


def test_what_takes_long_says_which_of_how_many_it_is(capsys):
    for way in one_by_one(["a", "b"], "way"):
        during("what each way takes")
        during("what each way takes")
        with bar(f"a trace of {way}"):
            pass
    during("what comes after all ways")
    said = "what each way takes (way {0} of 2) ...\na trace of {1} (way {0} of 2) ...\n"
    assert capsys.readouterr() == ("", said.format(1, "a") + said.format(2, "b") + "what comes after all ways ...\n")


@pytest.mark.usefixtures("without_traces")
def test_an_advice_says_how_many_arms_it_tries(monkeypatch, capsys):
    words = "advise --model llama-micro --attention-kernel eager --gpus 1 --gpu H100 --batch 1 --sequence 8"
    assert in_this_process(monkeypatch, words) is None
    answer = capsys.readouterr()
    tried = len(re.findall(r"(?m)^(?:single|zero|fsdp)\w*  ", answer.out))
    assert re.findall(r"once \(arm (\d) of (\d)\) \.\.\.\n", answer.err)[0] == ("1", str(tried))
    assert "(arm" not in answer.out


def test_what_takes_long_shows_that_it_goes_on(monkeypatch, capsys):
    """Many short blocks count as one: `advise` traces a model some twenty times."""
    monkeypatch.setattr("study.core.text.TICK_S", 0.2)
    for _ in range(10):
        with bar("tracing a model of a test"):
            time.sleep(0.1)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "tracing a model of a test ..."
    assert 2 <= len(others) <= 5
    assert all(re.fullmatch(r"tracing a model of a test \([01] s so far\) \.\.\.", line) for line in others)


def test_with_json_nothing_else_is_on_stdout(monkeypatch, capsys):
    """Libraries print there while they are imported: DeepSpeed its accelerator, before a command answers."""

    def noisy(folder: tyro.conf.Positional[Path], /) -> dict:
        print("a library is glad to be imported")  # noqa: T201
        return {"folder": folder}

    monkeypatch.setattr(results, "runs", noisy)
    assert in_this_process(monkeypatch, "runs here --json") is None
    assert json.loads(capsys.readouterr().out) == {"folder": "here"}


@pytest.mark.usefixtures("forked_cells")
def test_a_virtual_rank_holds_what_is_estimated_by_default(monkeypatch, tmp_path, capsys, golden):
    """Their defaults differed: fp32, 8 rows and 128 tokens beside bf16_cast, one row and 1024 tokens."""
    words = f"virtual --model llama-micro --arm zero2 --ranks 4 --run-dir {tmp_path / 'run'}"
    assert in_this_process(monkeypatch, words) is None
    golden("command_virtual.txt", capsys.readouterr().out)
    record = store.load(tmp_path / "run")
    assert (record.status, record.observed.virtual_ranks) == ("done", 4)
    (measured,) = record.memory.components.per_rank
    training, passes = TrainingFlags(gpus=4), virtual.PassFlags(arm="zero2")
    ours, _ = virtual.training_of(
        named("llama-micro"), training, PlaceFlags(), passes, arms.load_arm(passes.arm), "cpu"
    )
    predicted = estimate(ours)
    assert measured.tracked_peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.001)


def test_a_stranger_s_config_that_does_not_run_is_asked_of_the_calculator_before_it_is_reported(
    monkeypatch, tmp_path, capsys
):
    config = json.loads((ROOT / "study/core/shapes.json").read_text())["llama-micro"]
    (tmp_path / "config.json").write_text(json.dumps(config.get("config", config)))
    failed = types.SimpleNamespace(message="RuntimeError: k", what_to_do="report this, with the run's log.txt")
    monkeypatch.setattr(virtual.launches, "run", lambda *_: types.SimpleNamespace(error=failed))
    assert in_this_process(monkeypatch, f"virtual --model {tmp_path} --ranks 2 --sequence 16") == 2
    assert "config.json if `study estimate` refuses it as well, or report this" in capsys.readouterr().err


TRACING = "tracing the model; this takes seconds to minutes, once ...\n"


@for_each(("words", "said"), QUESTIONS["wrong"].items())
def test_what_is_wrong_is_one_sentence(words, said, asked, monkeypatch, capsys):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=8e9))
    monkeypatch.setattr("study.conform.command.Ranks", None)  # the process that imports torch
    assert asked(words) == 2
    # ADVISE has options that a question gives again.
    message = re.sub(r"--\S+ is given more than once: .*\n", "", capsys.readouterr().err).removeprefix(TRACING)
    message = re.sub(rf"{TRACING[:-5]}(?: \(arm \d+ of \d+\))?(?: \(\d+ s so far\))? \.\.\.\n", "", message)
    assert re.fullmatch(r"[^\n]+\. What to do: [^\n]+[.?]\n", message), message
    assert len(message) < 1500
    assert said in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpus 8 --arm single", "Not read: --gpus 8 (single uses one)."),
        ("--gpus 1 --gpu H100 --link nvlink", "Not read: --link (a GPU alone has none)."),
        ("--gpu H100 --disk 6GB/s", "Not read: --disk (zero3 keeps nothing there)."),
        ("--arm ddp --buckets 7", "Not read: --buckets (ddp has none of DeepSpeed)."),
        ("--attention-kernel flash3", "Not read: --attention-kernel (it changes the time, which needs --gpu)."),
        ("--gpus 2 --gpu H100 --link nvlink --buckets 7", None),
        ("--arm single", None),
    ],
)
def test_an_option_that_changes_nothing_is_said_to_be_unread(options, said, monkeypatch, capsys):
    assert in_this_process(monkeypatch, f"estimate --model gpt2 {options}") is None
    shown = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"Not read: .*?\)\.", shown) == ([said] if said else [])


def test_whole_gradients_of_fsdp2_are_explained_where_micro_batches_accumulate(monkeypatch, capsys):
    for options, is_said in (("fsdp2 --accumulation 4", True), ("fsdp2", False), ("zero3 --accumulation 4", False)):
        in_this_process(monkeypatch, f"estimate --model gpt2 --gpus 4 --arm {options}")
        assert ("sync_each_batch=True" in capsys.readouterr().out.replace("\n", " ")) == is_said


@pytest.mark.parametrize("again", ["--gpus 4", "--gpus=4", "--ranks 4"])
def test_an_option_that_is_given_twice_is_said(again, monkeypatch, capsys):
    assert in_this_process(monkeypatch, f"estimate --model gpt2 --gpus 2 {again}") is None
    out, err = capsys.readouterr()
    assert err == "--gpus is given more than once: the last counts\n"
    assert "A rank of 4" in out


WITHOUT_AN_ANSWER = {"hour", "report"}  # they write files


@pytest.mark.parametrize(("where", "why"), [("> /dev/full", r"\(No space left[^\n]+"), (">&-", "is closed")])
def test_an_answer_that_cannot_be_written_is_a_sentence(where, why):
    command = f"exec {Path(sys.executable).with_name('study')} arms {where}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert re.fullmatch(rf"[^\n]+{why}\. What to do: [^\n]+\.\n", done.stderr), done.stderr


@pytest.mark.parametrize(("params", "twin"), [("8B", "llama3-8b"), ("13B", "gpt3-13b"), ("12.8e9", "gpt3-13b")])
def test_a_number_of_parameters_is_a_model_of_nearly_that_size(params, twin, monkeypatch, capsys):
    """It is said which one, with its size, and which others are as large."""
    assert in_this_process(monkeypatch, f"estimate --params {params} --json") is None
    out, err = capsys.readouterr()
    assert json.loads(out)["parameters"] == named(twin).parameters
    assert re.search(rf"taken as {twin} \([\d.]+ billion\); as large: \S+", err), err


def test_what_a_machine_lacks_is_said_with_an_exit_code(monkeypatch, capsys):
    lacking = [Examined("python", "3.11"), Examined("ninja", "none", "pip install ninja")]
    for findings, code, first in ((lacking, 1, "needs: ninja."), (lacking[:1], None, "has everything")):
        monkeypatch.setattr("study.core.doctor.examine", lambda folder, found=findings: found)
        assert in_this_process(monkeypatch, "doctor") == code
        assert capsys.readouterr().out.startswith(f"This machine {first}")
        assert in_this_process(monkeypatch, "doctor --json") == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["fine"] == (code is None)
        assert [each["remedy"] for each in answer["findings"]] == [each.remedy for each in findings]


def test_columns_without_room_are_named_and_the_others_whole(monkeypatch, capsys):
    rows = [{"run": "arms-zero3_cpu-8e1c25c5", "status": "done", "loss": 6.5481} | dict.fromkeys("abcdef", 12345678)]
    monkeypatch.setattr("study.core.text.console", lambda: Console(width=40, highlight=False))
    show(rows)
    printed = capsys.readouterr().out.replace("\n", " ")
    for words in ("arms-zero3_cpu-8e1c25c5", "done", "6.548", "No room for: a, b, c, d, e, f."):
        assert words in printed


def test_study_alone_explains_itself_and_is_fast():
    code = "import sys; from study.cli import main; sys.argv = ['study']; main(); print(sorted(sys.modules))"
    done = python("-c", code)
    help_text, modules = done.stdout.rsplit("\n", 2)[:2]
    assert all(f"\n  {name} " in help_text for name in COMMANDS)
    heavy = ("tyro", "numpy", "pandas", "torch", "study.ledger")
    assert not [name for name in heavy if f"'{name}" in modules], "a command's module is imported when it is called"


RUN_ELSEWHERE = {"calibrate", "hour", "doctor", "report", "virtual"}  # their examples take long, or write


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, monkeypatch, capsys):
    """It says what --json gives, where it is taken, and an example, which is one of the questions above."""
    assert in_this_process(monkeypatch, f"{name} --help") == 0
    text = capsys.readouterr().out
    assert "{None}" not in text, "Python's word for an option that is not given"
    assert "default: None" not in text, "nor is it a default"
    for line, following in itertools.pairwise([*text.splitlines(), ""]):
        explained = re.search(r"\S  +\S", line) or following.startswith(8 * " ")
        assert explained or not line.startswith("  --"), f"{line} is not explained"
    *_, first = text.partition("\n\n")
    assert re.match(r"[A-Z][^\n]{20,}[.?:]?", first), "the first line says what it answers"
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 75
    assert "[[STR" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith("Example: "))
    assert ("--json: " in text) == (name not in WITHOUT_AN_ANSWER)
    (words,) = re.findall(r"Example: `study (.+)`", text)
    for short, path in {"SMOKE": "reports/cpu-2core/runs/smoke", "CONFIGS": "accelerate_configs"}.items():
        words = words.replace(path, short)
    assert words.split()[0] == name
    assert words in QUESTIONS["answered"] or name in RUN_ELSEWHERE


class Terminal(io.StringIO):
    """What a program writes to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_80_columns(asked, monkeypatch):
    """A function that asks a question, and returns the lines of the standard output and error of such a terminal."""

    def ask(words: str) -> tuple[list[str], list[str]]:
        out, err = Terminal(), Terminal()
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        asked(words)
        lines = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", each.getvalue()).splitlines() for each in (out, err)]
        return lines[0], lines[1]

    return ask


@pytest.mark.parametrize("words", [words for words in QUESTIONS["answered"] if words.startswith(("estimate", "stack"))])
def test_sentences_end_at_the_terminal_s_width(words, at_80_columns):
    out, err = at_80_columns(words)
    assert max(len(line) for line in out + err if "https://" not in line) <= 80
    assert not [line for line in out if re.search(r"\d$", line) and "  " not in line and "bytes" in line], (
        "a unit alone"
    )


@pytest.mark.parametrize(
    "words",
    [
        "--model llama3-8b --lora-rank 16 --gpus 4 --gpu A100-40GB",
        "--model llama3-8b --gpus 8 --gpu L4 --host-memory 1TB --sequence 512 --batch 64",
        "--model gpt2 --gpus 8 --gpu H100 --batch 64 --sequence 512",
        "--model qwen2.5-7b --gpus 8 --gpu A100-40GB",
    ],
)
def test_an_arm_takes_one_line_at_80_columns(words, at_80_columns):
    lines, _ = at_80_columns(f"advise {words}")
    (head,) = [number for number, line in enumerate(lines) if "predicted  " in line]
    rows = lines[head + 1 : lines.index("", head)]
    assert len(rows) >= 8
    assert {row.split()[0] for row in rows} <= {*NAMES, "zero3_opt_cpu"}, "none goes on in a second line"


@pytest.mark.parametrize("words", [*QUESTIONS["wrong"]][::6])
def test_an_error_ends_at_the_terminal_s_width(words, at_80_columns, monkeypatch):
    monkeypatch.setattr("study.conform.command.Ranks", None)
    _, err = at_80_columns(words)
    assert all(len(line) <= 80 or " " not in line for line in err)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_of_a_help_ends_before_it_has_to(name, at_80_columns):
    """A line of a description that begins with an option made tyro end the line before."""
    lines, _ = at_80_columns(f"{name} --help")
    text = lines[1 : next(number for number, line in enumerate(lines) if line.endswith(":") and number > 3)]
    for line, following in itertools.pairwise(text):
        if line and following and not following.startswith("Example: "):
            assert len(line) + 1 + len(following.split()[0]) > 80, line


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("estimate --model llama3-8b fsdp.yaml", "give it as --config fsdp.yaml"),
        ("virtual --model llama3-8b zero.yml", "give it as --config zero.yml"),
        ("advise --model llama3-8b ds.json", "it chooses the config itself: give --gpus and --gpu"),
    ],
)
def test_a_config_without_its_option_is_told_where_it_goes(words, remedy, asked, capsys):
    """`advise ds.json` asked for --json."""
    assert asked(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"What to do: {remedy}.")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"conform"}))
def test_an_unknown_option_leads_to_the_one_that_is_like_it_and_to_no_other(name, asked, capsys):
    """`--bla` led to `--all`: the dashes are like those of any option."""
    for unlike in ("--oops", "--bla", "--foo", "--xyzzy"):
        assert asked(f"{name} {unlike} 3") == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"study {name} takes no {unlike}. What to do: study {name} --help explains the options."
    asked(f"{name} --help")
    options = {*re.findall(r"(?m)^  (?:-h, )?(--[a-z][\w-]{3,})", capsys.readouterr().out)}
    assert options
    for option in options:
        typed = option[:3] + option[4:]
        if typed not in options:
            assert asked(f"{name} {typed} 3") == 2
            assert f"takes no {typed}. What to do: did you mean '{option}'" in capsys.readouterr().err, typed


@pytest.mark.parametrize("name", ["advise", "estimate", "virtual", "stack", "oom"])
@pytest.mark.parametrize("option", ["--config", "--config_file", "--config-file"])
def test_who_gives_a_config_hears_what_takes_it(name, option, asked, capsys):
    """--config where it is taken, and else an option of the same command that is."""
    text = ""
    if asked(f"{name} --help") == 0:
        text = capsys.readouterr().out
    if option in text:
        return
    assert asked(f"{name} {option} mine.yaml") == 2
    said = capsys.readouterr().err
    assert f"{name} takes no {option}. What to do: " in said
    named_options = re.findall(r"--[a-z][\w-]+", said.partition("What to do: ")[2])
    assert named_options
    assert all(each in text for each in named_options)


def test_what_a_rehearsal_alone_takes_is_no_misspelt_option_of_a_model(asked, capsys):
    """`study virtual --model X --gpu Y` was asked whether --gpus was meant."""
    taken = []
    for form in ("virtual train.py", "virtual"):
        asked(f"{form} --help")
        taken.append({*re.findall(r"(?m)^ +(?:-h, )?(--[a-z][\w-]+)", capsys.readouterr().out)})
    of_scripts = taken[0] - taken[1] - {"--config-file"}  # which --config means, too
    assert "--gpu" in of_scripts
    for option in of_scripts:
        assert asked(f"virtual --model gpt2 {option} x") == 2
        assert "did you mean '--" not in capsys.readouterr().err, option


@pytest.mark.parametrize("name", ["diagnose", "oom"])
def test_who_pipes_nothing_reads_the_command_that_was_typed(name, asked, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert asked(f"{name} -") == 2
    assert f"| study {name} -`" in capsys.readouterr().err


def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("für.yaml").write_text("lr: 1")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert in_this_process(monkeypatch, "diff für.yaml für.yaml") is None
    assert b"A: f?r.yaml (settings)" in sys.stdout.buffer.getvalue()


# --- three doors answer one question alike: a page of answers, `advise` and `estimate` --------------------------------
# The question: which arm for my model on my GPUs, with which memory, in how many seconds?

README = "--model mistral-7b --gpus 8 --gpu H100"
SLOW = [pytest.param(question, marks=pytest.mark.slow) for question in QUESTIONS["advised"]["slow"]]


@pytest.mark.parametrize("question", [README, *QUESTIONS["advised"]["quick"], *SLOW])
def test_advise_and_estimate_give_one_answer(question, monkeypatch, capsys):
    """The arm, the tensors' bytes, what nvidia-smi shows, the seconds and their interval, and whether it fits."""
    assert in_this_process(monkeypatch, f"advise {question} --json") is None
    advice = json.loads(capsys.readouterr().out)
    if question == README:
        page = (ROOT / "reports/answers/fit.md").read_text()
        assert f"study advise {README}\n    " + "\n    ".join(advice["in_words"]) in page
    assert in_this_process(monkeypatch, f"{advice['detail'].removeprefix('study ')} --json") is None
    whole = json.loads(capsys.readouterr().out)
    choice, step = advice["choice"], whole["step"]
    assert whole["arm"] == choice["arm"]
    assert whole["estimate"]["peak_bytes"] == choice["peak_bytes"]
    assert whole["kinds"]["driver"] == choice["driver_bytes"]
    assert [step["seconds"], step["low_s"], step["high_s"]] == [choice["step_s"], *choice["step_interval_s"]]
    is_tight = any("It fits only just" in line for line in advice["in_words"])
    assert whole["fits"] == ("only just" if is_tight else "yes")


@pytest.mark.parametrize("arm", ["single", "zero1", "zero2", "fsdp2"])
def test_a_peak_before_the_first_gradient_says_so(asked, arm, capsys):
    """A row that is missing looks forgotten. With a second micro-batch those of the first are there."""
    asked(f"estimate --model gpt2-medium --arm {arm}")
    assert re.search(r"^gradients +none yet", capsys.readouterr().out, re.MULTILINE)
    asked(f"estimate --model gpt2-medium --arm {arm} --accumulation 2")
    assert re.search(r"^gradients +[\d.]+ [MG]B", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("words", ["gpt2-xl --gpus 2 --gpu RTX3090", "bert-base --gpus 2 --gpu T4 --batch 8"])
def test_steps_in_one_column_have_one_unit(asked, words, capsys):
    asked(f"advise --model {words}")
    assert len({*re.findall(r"\d (\w+) \([\d.]+-[\d.]+\)  ", capsys.readouterr().out)}) == 1
