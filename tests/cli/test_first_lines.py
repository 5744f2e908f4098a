"""Each command answers an ordinary question in its first line; what takes long is said on stderr."""

import json

import pytest
from conftest import ROOT
from test_cli import in_this_process

from study.core.text import during, progress_shown

SMOKE = ROOT / "reports" / "cpu-2core" / "runs" / "smoke"
ZERO1, ZERO3 = (SMOKE / f"arms-{name}-r1.1" for name in ("zero1-9502bd8f", "zero3-46126d78"))
OOM = "CUDA out of memory. Tried to allocate 3.79 GiB. GPU 0 has a total capacity of 79.11 GiB."
CONFIG = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}
FIRST_LINES = {
    "arms": "arms can run on this machine.",
    "estimate --params 7.5e9 --layers 72 --hidden 2928 --ranks 64 --arm zero2": "A rank of 64 under zero2 needs ",
    "estimate --model llama3-8b --gpu H100": "A rank of 8 under zero3 needs ",
    "advise --model gpt2-xl --gpus 8 --gpu H100": "Use zero1, ",
    "advise --model bert-base --gpu B200": "Enough: 1 x B200",
    "runs SMOKE": "runs are done.",
    "compare SMOKE": "none of them in two environments",
    "compare SMOKE --arms": "wikitext",
    "compare ZERO1 ZERO3": "At the peak zero3 holds ",
    "diagnose ZERO1": "zero1 on 2 ranks, done",
    "diagnose CONFIG": "DeepSpeed config: 2 findings.",
    "diff accelerate_configs/zero2.yaml accelerate_configs/zero3.yaml": "What changes losses or memory: ",
    "oom OOM --vocabulary 248320": "No cause is sure.",
    "sweep smoke --dry-run": "possible on this machine.",
    "conform zero2 --release 0.18.1..0.19.8": "answers change from 0.18.1 to 0.19.8.",
    "claims S002-25 --json": "[",
    "claims": "published claims",
    "claims 002 --runs SMOKE": "numbers of published claims",
}
AS_WIDE_AS_A_SCREEN = ("arms", "advise")


@pytest.mark.parametrize("command", FIRST_LINES)
def test_an_ordinary_question_is_answered(command, monkeypatch, tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    log = tmp_path / "train.log"
    log.write_text(OOM)
    named = {"SMOKE": SMOKE, "ZERO1": ZERO1, "ZERO3": ZERO3, "CONFIG": config, "OOM": log}
    words = [str(named.get(word, word)) for word in command.split()]
    monkeypatch.chdir(ROOT)
    in_this_process(monkeypatch, " ".join(words))
    lines = capsys.readouterr().out.splitlines()
    assert FIRST_LINES[command] in lines[0]
    if words[0] in AS_WIDE_AS_A_SCREEN:
        assert max(len(line.rstrip()) for line in lines) <= 100


def test_what_takes_long_is_said_on_stderr_once_and_only_by_commands(capsys):
    with during("tracing"):
        pass
    assert capsys.readouterr() == ("", ""), "a library says nothing"
    with progress_shown():
        for _ in range(2):
            with during("tracing"):
                pass
    assert capsys.readouterr() == ("", "tracing ...\n")
