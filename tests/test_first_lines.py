"""Each command answers an ordinary question; what takes long is said on stderr."""

import json

import pytest
from conftest import ROOT
from test_cli import in_this_process

from study.core.text import during, progress_shown

SMOKE = ROOT / "reports" / "cpu-2core" / "runs" / "smoke"
ZERO1, ZERO3 = (SMOKE / f"arms-{name}-r1.1" for name in ("zero1-9502bd8f", "zero3-46126d78"))
OOM = "CUDA out of memory. Tried to allocate 3.79 GiB. GPU 0 has a total capacity of 79.11 GiB."
CONFIG = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}
COMMANDS = [
    "arms",
    "estimate --params 7.5e9 --layers 72 --hidden 2928 --ranks 64 --arm zero2",
    "estimate --model llama3-8b --ranks 8 --gpu H100",
    "estimate --model llama3-8b --gpu H100 --timeline",
    "advise --model llama3-8b --gpus 8 --gpu H100",
    "runs SMOKE",
    "compare SMOKE",
    "compare SMOKE --arms",
    "compare ZERO1 ZERO3",
    "diagnose ZERO1",
    "diagnose CONFIG",
    "diff accelerate_configs/zero2.yaml accelerate_configs/zero3.yaml",
    "oom OOM --vocabulary 248320",
    "sweep smoke --dry-run",
    "conform zero2 --release 0.18.1..0.19.8",
    "claims S002-25 --json",
    "claims",
    "claims 002 --runs SMOKE",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_ordinary_question_is_answered(command, monkeypatch, tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    log = tmp_path / "train.log"
    log.write_text(OOM)
    named = {"SMOKE": SMOKE, "ZERO1": ZERO1, "ZERO3": ZERO3, "CONFIG": config, "OOM": log}
    words = [str(named.get(word, word)) for word in command.split()]
    monkeypatch.chdir(ROOT)
    in_this_process(monkeypatch, " ".join(words))
    assert capsys.readouterr().out.partition("\n")[0]


def test_what_takes_long_is_said_on_stderr_once_and_only_by_commands(capsys):
    with during("tracing"):
        pass
    assert capsys.readouterr() == ("", ""), "a library says nothing"
    with progress_shown():
        for _ in range(2):
            with during("tracing"):
                pass
    assert capsys.readouterr() == ("", "tracing ...\n")


def test_on_a_terminal_it_is_a_line_that_vanishes(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_shown(), during("tracing"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "tracing" in err
    assert err.endswith("\x1b[2K") or "\x1b[" in err
