"""The first line of each command is its answer, in words, as a user with an ordinary question gets it."""

import json
import re

import pytest
from conftest import ROOT
from test_cli import in_this_process

from study.io import progress

SMOKE = ROOT / "reports" / "cpu-2core" / "runs" / "smoke"
ZERO1, ZERO3 = (SMOKE / f"arms-{name}-r1.1" for name in ("zero1-9502bd8f", "zero3-46126d78"))
OOM = "CUDA out of memory. Tried to allocate 3.79 GiB. GPU 0 has a total capacity of 79.11 GiB."
CONFIG = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}
# By the words of a command: a pattern of its first line.
FIRST = {
    "arms": r"\d+ of \d+ arms can run on this machine\.",
    "doctor --config CONFIG": r"ds\.json has 2 mistakes\. This machine ",
    "estimate --params 7.5e9 --ranks 64 --arm zero2": r"Model states alone take 16\.6 GB on each of 64 ranks",
    "estimate --model llama3-8b --ranks 8 --gpu H100": r"A rank of 8 under zero3 needs [\d.]+ GB of GPU memory",
    "estimate --model llama3-8b --loading": r"A node with 8 ranks needs 32 GB to 160 GB of host memory",
    "timeline --model llama3-8b": r"zero3 on 8 x H100-80GB, predicted: [\d.]+ s per step",
    "advise --model llama3-8b --gpus 8 --gpu H100": r"Use \w+, ",
    "runs SMOKE": r"31 of 31 runs are done\.",
    "compare SMOKE": r"31 cells, none of them in two environments: no time is compared",
    "compare SMOKE --arms": r"(imdb|wikitext), .*\. Losses: at no step is an arm further than ",
    "explain ZERO1 ZERO3": r"At the peak zero3 holds 68\.8 MB, 13\.1 MB less than zero1 \(81\.9 MB\)\.",
    "diagnose ZERO1": r"arms-zero1-9502bd8f-r1\.1: zero1 on 2 ranks, done: 3 findings\.",
    "diagnose CONFIG": r"ds\.json: DeepSpeed config: 2 findings\.",
    "diff accelerate_configs/zero2.yaml accelerate_configs/zero3.yaml": r"What changes losses or memory: stage\.",
    "oom OOM --vocabulary 248320": r"No cause is sure: \d+ causes possible, the likeliest first",
    "outside": r"Others published \d+ rows, in \d+ sources\.",
    "outside --against ours": r"On trainings that it had never seen, half of 563 predicted step times were within 28%",
    "outside --against ours --source torchtune": r"Compared with these measurements, memory is [\d.]+% off",
    "outside --board": r"The nearest: ours for memory, off by \d+%",
    "sweep smoke --dry-run": r"\d+ of \d+ cells are possible on this machine\.",
    "versions --from 0.18.1 --to 0.19.8": r"deepspeed 0\.18\.1 to 0\.19\.8, from the results of \d+ releases",
    "claims S000-03 --json": r"\[",
    "claims": r"Of 295 claims that others published: 161 supported, 38 refuted, 6 understated, ",  # as README: 167 hold
    "claims --verdict refuted --document 002": r"3 claims that others published with document 002 and verdict refuted",
}


@pytest.mark.parametrize("command", FIRST)
def test_the_first_line_is_the_answer(command, monkeypatch, tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    log = tmp_path / "train.log"
    log.write_text(OOM)
    named = {"SMOKE": SMOKE, "ZERO1": ZERO1, "ZERO3": ZERO3, "CONFIG": config, "OOM": log}
    words = [str(named.get(word, word)) for word in command.split()]
    monkeypatch.chdir(ROOT)
    in_this_process(monkeypatch, " ".join(words))
    first = capsys.readouterr().out.partition("\n")[0]
    assert re.match(FIRST[command], first), first


def test_what_takes_long_is_said_on_stderr_once_and_only_by_commands(capsys):
    with progress.during("tracing"):
        pass
    assert capsys.readouterr() == ("", ""), "a library says nothing"
    with progress.shown():
        for _ in range(2):
            with progress.during("tracing"):
                pass
    assert capsys.readouterr() == ("", "tracing ...\n")


def test_on_a_terminal_it_is_a_line_that_vanishes(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown(), progress.during("tracing"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "tracing" in err
    assert err.endswith("\x1b[2K") or "\x1b[" in err
