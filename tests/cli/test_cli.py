"""The `study` command, started as a user starts it."""

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest
import tyro
from conftest import ROOT, launch
from rich.console import Console
from shaped import changed, failed, finished, put

from study.cli import commands, predictions, results
from study.cli.commands import COMMANDS, EXAMPLES, GROUPS
from study.core import arms
from study.core.arms import NAMES
from study.core.doctor import Finding
from study.core.text import show
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.records import store
from study.sweeps import launches


def study(*words: str, env: dict | None = None, folder: Path = ROOT) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("study")), *words]
    env = os.environ | (env or {})
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)


def in_this_process(monkeypatch, words: str) -> int | None:
    """The exit code of the console script."""
    monkeypatch.setattr(sys, "argv", ["study", *words.split()])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which it changes
    try:
        commands.main()
    except SystemExit as end:
        return end.code


def test_all_arms_are_listed(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert in_this_process(monkeypatch, "arms") is None
    lines = capsys.readouterr().out.splitlines()
    assert "zero3_superoffload: no: DeepSpeed has SuperOffload only for NVIDIA GPUs" in lines
    listed = [line.split()[0] for line in lines if line.strip()]
    assert [name for name in listed if name in NAMES] == list(NAMES)
    assert "zero3_textbook" in listed


TRACING = "tracing the model; this takes seconds to minutes, once ...\n"
BY_HAND = {
    "keys": '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 99}',
    "no-layers": '{"model_type": "gpt2", "n_layer": 0, "n_embd": 64, "n_head": 2}',
    "mpnet": '{"model_type": "mpnet", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}',
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_config_written_by_hand_is_advised(name, monkeypatch, tmp_path, capsys):
    """It says less than transformers writes, has no layers, or is of a model that cannot recompute activations."""
    monkeypatch.setattr(arms, "NAMES", ("ddp", "zero3_ulysses", "zero1_tp"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(BY_HAND[name])
    monkeypatch.chdir(tmp_path)
    words = f"advise --model {name} --gpus 2 --gpu H100 --sequence 16 --batch 2"
    assert in_this_process(monkeypatch, words) is None
    assert capsys.readouterr().out.startswith("Use ")


def test_with_json_nothing_else_is_on_stdout(monkeypatch, capsys):
    """Libraries print there while they are imported: DeepSpeed its accelerator, before a command answers."""

    def noisy(folder: tyro.conf.Positional[Path], /) -> dict:
        print("a library is glad to be imported")  # noqa: T201
        return {"folder": folder}

    monkeypatch.setattr(results, "runs", noisy)
    assert in_this_process(monkeypatch, "runs here --json") is None
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"folder": "here"}
    assert in_this_process(monkeypatch, "runs here") is None
    assert "glad" in capsys.readouterr().out
    assert in_this_process(monkeypatch, "oom here --json") == 2, "it has no answer as JSON"


@pytest.fixture
def forked_virtual(monkeypatch, cache):
    """`study virtual` with a forked launch, as the other tests have it: a fresh one is almost all imports."""

    def forked(turn, folder, *_):
        launch(turn.arm, folder, *launches.options(turn.settings), cache=cache)
        return store.load(folder)

    monkeypatch.setattr(launches, "run", forked)


def test_a_virtual_rank_is_kept_in_the_folder_that_is_named(forked_virtual, monkeypatch, tmp_path, capsys, golden):
    """It was deleted, and the path of the deleted record was printed."""
    folder = tmp_path / "kept"
    words = f"virtual --model gpt-tiny --arm zero2 --ranks 64 --run-dir {folder}"
    assert in_this_process(monkeypatch, words) is None
    golden("command_virtual.txt", capsys.readouterr().out.replace(str(tmp_path), "FOLDER"))
    record = store.load(folder)
    assert (record.status, record.observed.virtual_ranks) == ("done", 64)


def test_virtual_and_estimate_describe_the_same_training_by_default(forked_virtual, monkeypatch, tmp_path):
    """Their defaults differed: fp32, 8 rows and 128 tokens beside bf16_cast, one row and 1024 tokens."""
    words = "--model llama-micro --arm zero2 --ranks 4"
    assert in_this_process(monkeypatch, f"virtual {words} --run-dir {tmp_path / 'run'}") is None
    record = store.load(tmp_path / "run")
    (measured,) = record.memory.components.per_rank
    (sent,) = record.traffic.per_rank
    training, passes = predictions.Training(gpus=4), predictions.Passes(arm="zero2")
    setup, _ = predictions.setup_of(named("llama-micro"), training, predictions.Place(), passes, None)
    predicted = estimate(dataclasses.replace(setup, device="cpu"))
    assert measured.tracked_peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)
    for role in ("weights", "master", "moments"):
        assert measured.after_step[role] == predicted.after_step[role], role
    for kind, moved_bytes in predicted.traffic.items():
        assert sent[kind].bytes == pytest.approx(moved_bytes, rel=0.001), kind


CONFIGS = {
    "mpnet": '{"model_type": "mpnet", "num_hidden_layers": 2}',
    "float": '{"model_type": "llama", "hidden_size": 128.0, "num_hidden_layers": 2, "vocab_size": 99}',
    "no-words": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 0}',
    "t6": '{"model_type": "t6"}',
    "empty": None,
    "deep": '{"model_type": "llama", "num_hidden_layers": 1000000000}',
}
ADVISE = "advise --gpus 8 --gpu L4 --link pcie4 --host-memory 1TB --sequence 128 --batch 16 "
NUMBERS = "--params 1e9 --layers 24 --hidden 1024 "
WRONG = {
    "virtual --model gpt2 --arm ddp --ranks 2 --sequence 4096": "more than the model's 1024 positions",
    "virtual --model gpt2 --arm zero3_hpz --ranks 5": "groups of 2 ranks (got 5)",
    "virtual --model llama-micro --arm zero1_tp --ranks 4": "AutoTP cannot divide layers without values",
    "diagnose /no/such/run": "'/no/such/run' cannot be read",
    "oom /no/such/train.log": "there is no file /no/such/train.log",
    "estimate --model gpt2 --arm zero3 --buckets 0": "at least 1 element (got 0)",
    ADVISE + "--model gpt2 --gpu H900": "'H900' is not a known GPU",
    ADVISE + "--model gpt2 --link nvlnk": "did you mean 'nvlink",
    ADVISE + "--model empty": "empty/config.json' cannot be read (No such file",
    ADVISE + "--model t6": "Unrecognized model identifier: t6",
    ADVISE + "--model float": "cannot read the config",
    "estimate --model no-words": "no-words cannot be followed without values (",
    ADVISE: "give --model, or --params with --layers and --hidden",
    ADVISE + "--model gpt2 --params 1e9": "--model and --params cannot be combined",
    ADVISE + NUMBERS + "--params 1e7": "24 layers of width 1024 have at least",
    ADVISE + "--model gpt2 --batch 80000000000": "--batch must be from 1 to 1000000000 rows (got 80000000000)",
    ADVISE + "--model mpnet --checkpointing True": "has no activation checkpointing for mpnet. What to do: leave",
    "estimate --model gpt2 --gpu L4 --gpus 8 --gpus-per-node 3": "8 GPUs do not fill nodes of 3",
    "estimate --arm zreo3 --params 1e9": "did you mean 'zero3'",
    "runs nosuch": "there is no run below nosuch",
    "compare malformed malformed": "memory.components must be a table (got [3])",
    "claims S000-1": "no claim is named S000-1",
    "virtual --model gpt2 --ranks 1": "--virtual-ranks must be at least 2 (got 1)",
    "conform zero4": "'zero4' is neither an adapter nor a file",
    "conform ddp --only xyz": "no property has 'xyz' in its name",
    "conform zero2 --release 0.19.8..0.16.4": "no answers from deepspeed 0.19.8 to 0.16.4 are kept",
    "conform zero2 --release 0.16.4": "no answers from deepspeed 0.16.4 to  are kept",
    "conform zero4 --release 0.16.4..0.19.8": "no answers of 'zero4' are kept",
    "sweep smoke --only colour=red": "--only must be a name and a pattern",
    "sweep smoke --only arm=zzz": "the values of arm here are single",
    "sweep smoke --timeout-s nan": "--timeout-s must be above 0 (got nan)",
    "sweep smoke --pack nowhere": "--pack nowhere holds no pack.json",
    "sweep smok": "there is no protocol smok. What to do: did you mean 'smoke'?",
    "advise --gpu L4 --model lama3-8b": "did you mean 'llama3-8b', 'llama-3.1-8b' or 'llama3-70b', or a local folder",
    "estimate --model gpt2 --ranks 99999999999999999999": "--gpus must be from 1 to 65536",
    "estimate --model deep": "says 1000000000 layers, and at most 10000 are traced",
    "oom --vocabulary -1": "--vocabulary must be at least 1 (got -1)",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_sentence(words, monkeypatch, tmp_path, capsys):
    for name, text in CONFIGS.items():
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "config.json").write_text(text)
    put(tmp_path, changed(finished("malformed"), memory__components=[3]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=8e9))
    assert in_this_process(monkeypatch, words) == 2
    message = capsys.readouterr().err.removeprefix(TRACING)
    assert re.fullmatch(r"[^\n]+\. What to do: [^\n]+[.?]\n", message), message
    assert WRONG[words] in message
    assert not list(tmp_path.glob("mine*"))


def test_an_answer_that_cannot_be_written_is_a_sentence():
    command = f"exec {Path(sys.executable).with_name('study')} arms > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"[^\n]+\(No space left[^\n]+\. What to do: [^\n]+\.\n", done.stderr), done.stderr


def test_a_sentence_is_all_that_reaches_the_terminal():
    done = study("estimate", "--model", "gpt2", "--ranks", "0")
    message = "--gpus must be from 1 to 65536 (got 0). What to do: give such a number.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_size_is_a_built_in_shape(monkeypatch, capsys):
    assert in_this_process(monkeypatch, "estimate --params 8e9 --json") is None
    out, err = capsys.readouterr()
    assert json.loads(out)["parameters"] == named("llama3-8b").parameters
    assert "taken as llama3-8b" in err


def test_of_runs_that_are_not_done_the_reason_is_told(tmp_path, monkeypatch, capsys):
    put(tmp_path, finished("good"), changed(finished("odd"), memory__components=[3]), failed("full"))
    assert in_this_process(monkeypatch, f"runs {tmp_path}") is None
    printed = capsys.readouterr().out
    assert printed.startswith("1 of 2 runs is done.")
    assert f"full: {failed('full')['error']['message']}. What to do: " in printed
    assert "memory.components must be a table (got [3])" in printed


def test_what_a_machine_lacks_is_json_with_the_same_exit_code(monkeypatch, capsys):
    lacking = [Finding("python", "3.11"), Finding("ninja", "none", "pip install ninja")]
    for findings, code in ((lacking, 1), (lacking[:1], None)):
        monkeypatch.setattr("study.core.doctor.examine", lambda folder, found=findings: found)
        assert in_this_process(monkeypatch, "doctor --json") == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["fine"] == (code is None)
        assert [each["remedy"] for each in answer["findings"]] == [each.remedy for each in findings]
        assert in_this_process(monkeypatch, "doctor") == code
        first = capsys.readouterr().out.splitlines()[0]
        assert first == ("This machine lacks: ninja." if code else "This machine has everything that the study needs.")


def test_columns_without_room_are_named_and_the_others_whole(monkeypatch, capsys):
    rows = [{"run": "arms-zero3_cpu-8e1c25c5", "status": "done", "loss": 6.5481} | dict.fromkeys("abcdef", 12345678)]
    monkeypatch.setattr("study.core.text.console", lambda: Console(width=40, highlight=False))
    show(rows)
    printed = capsys.readouterr().out.replace("\n", " ")
    for words in ("arms-zero3_cpu-8e1c25c5", "done", "6.548", "No room for: a, b, c, d, e, f."):
        assert words in printed


def test_study_alone_explains_itself_and_is_fast():
    code = "import sys; from study.cli import main; sys.argv = ['study']; main(); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    help_text, modules = done.stdout.rsplit("\n", 2)[:2]
    for heading, group in GROUPS.items():
        listed = help_text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in listed.splitlines()] == [*group]
    assert (len(GROUPS), len(COMMANDS)) == (3, 15)
    assert len(re.findall(r"^  study \w", help_text, re.MULTILINE)) == 3, "examples"
    heavy = ("tyro", "numpy", "pandas", "torch", "study.ledger")
    assert not [name for name in heavy if f"'{name}" in modules], "a command's module is imported when it is called"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, monkeypatch, capsys):
    assert in_this_process(monkeypatch, f"{name} --help") == 0
    help_text = capsys.readouterr().out
    assert f"usage: study {name}" in help_text
    assert "None" not in help_text, "Python's word for an option that is not given"


def test_the_examples_of_the_help_work(monkeypatch):
    """As far as their words go: each is parsed, and nothing is run."""
    called = []
    for line in EXAMPLES.splitlines():
        _, name, *words = line.split()
        module = importlib.import_module(COMMANDS[name][0])
        command = functools.wraps(getattr(module, name))(lambda *args, **options: called.append(1))
        monkeypatch.setattr(module, name, command)
        commands.start([name, *words])
    assert len(called) == 3


def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path):
    (tmp_path / "für.yaml").write_text("lr: 1")
    done = study("diff", "für.yaml", "für.yaml", env={"PYTHONIOENCODING": "ascii"}, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A: f?r.yaml (settings)" in done.stdout
