"""Five doors answer one question alike: README, the index, the calculator, `advise` and `estimate`.

The question: which arm for my model on my GPUs, with which memory, in how many seconds?
The calculator is asked the same questions in tests/report/test_calculator.py, which has a browser.
"""

import json
import shlex

import pytest
from test_cli import in_this_process

from study.core.gpus import GPUS
from study.report import answers

README = "--model mistral-7b --gpus 8 --gpu H100"
NOTHING_FITS = "--model llama3-70b --gpus 1 --gpu T4"
QUESTIONS = (
    README,
    "--model gpt2-xl --gpus 1 --gpu RTX4090",
    "--model bert-large --gpus 2 --gpu T4 --sequence 128 --batch 24",
    "--params 3e9 --layers 26 --hidden 3072 --gpus 16 --gpu L40S --batch 64 --link pcie4",
)
SLOW_QUESTIONS = (
    NOTHING_FITS,
    "--model llama3-8b --gpus 4 --gpu A100-40GB",
    "--model llama3-70b --gpus 64 --gpu H100",
    "--model gpt2 --lora-rank 8 --gpus 1 --gpu RTX4090 --sequence 256",
    "--model llama3.2-1b --gpus 8 --gpu H100 --sequence 32768 --batch 16",
    "--model qwen3-30b-a3b --gpus 8 --gpu H200",
    "--model gpt2 --gpus 13 --gpu H100 --sequence 128",
    "--model gpt2 --gpus 8 --gpu GH200 --sequence 128",
)
SLOW = [pytest.param(question, marks=pytest.mark.slow) for question in SLOW_QUESTIONS]


def answer_to(words: str, monkeypatch, capsys) -> dict:
    assert in_this_process(monkeypatch, f"{words} --json") is None, words
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("question", [*QUESTIONS, *SLOW])
def test_advise_and_estimate_give_one_answer(question, monkeypatch, capsys):
    """The arm, the tensors' bytes, what nvidia-smi shows, the seconds and their interval, and whether it fits."""
    advice = answer_to(f"advise {question}", monkeypatch, capsys)
    choice = advice["choice"]
    if choice is None:
        assert question == NOTHING_FITS
        assert advice["in_words"][0].startswith("Nothing fits on ")
        assert advice["detail"] == ""
        return
    _, command, *flags = shlex.split(advice["detail"])
    assert command == "estimate"
    whole = answer_to(f"estimate {' '.join(flags)}", monkeypatch, capsys)
    assert whole["arm"] == choice["arm"]
    assert whole["estimate"]["peak_bytes"] == choice["peak_bytes"]
    assert whole["kinds"]["driver"] == choice["driver_bytes"]
    memory_bytes = GPUS[advice["question"]["gpu"]].memory_bytes
    assert choice["driver_bytes"] is None or choice["peak_bytes"] < choice["driver_bytes"] <= memory_bytes
    assert whole["step"]["seconds"] == choice["step_s"]
    assert [whole["step"]["low_s"], whole["step"]["high_s"]] == choice["step_interval_s"]
    fills_card = (choice["driver_bytes"] or 0) >= 0.99 * memory_bytes
    assert whole["fits"] == (
        "only just" if fills_card or choice["headroom_bytes"] < 0.1 * choice["peak_bytes"] else "yes"
    )


def test_the_index_gives_the_same_answer(monkeypatch, capsys):
    """It answers README's question; tests/project/test_readme.py holds README to it."""
    assert answers.advice() == answer_to(f"advise {README}", monkeypatch, capsys)["in_words"]
    assert answers.ADVISED in README
