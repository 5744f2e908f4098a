"""The report's calculator: its JavaScript computes what `study estimate` does."""

import json
import random

import pytest

from study.machine.gpus import GPUS
from study.report import calculator
from study.report.style import ARMS
from study.theory.architecture import Architecture
from study.theory.estimate import estimate
from study.theory.setup import Setup
from study.theory.steptime import Machine, step_time

QUESTIONS, SEED = 1000, 18
RELATIVE = 1e-9  # of seconds: the two add up floats in another order. Bytes are equal
# What the page asks its own functions, in one go.
ASK = """
function ask(data, questions) {
  return questions.map((q) => {
    const setup = setupOf({ ...q.model }, data.arms[q.arm], q);
    const { parameters, atPeak, peakBytes, hostBytes, nvmeBytes, traffic } = estimate(setup);
    return { parameters, atPeak, peakBytes, hostBytes, nvmeBytes, traffic, ...stepTime(setup, data.gpus[q.gpu], data) };
  });
}
"""


def questions(count: int) -> list[dict]:
    """Random questions: half of them about a model of the list with fewer layers, half about random numbers."""
    draw, known = random.Random(SEED), calculator.models()
    return [
        {
            "model": known[draw.choice(list(known))] | {"layers": draw.randint(1, 5)} if draw.random() < 0.5 else decoder(draw),
            "arm": draw.choice(list(ARMS)),
            "gpu": draw.choice(list(GPUS)),
            "ranks": draw.choice([1, 2, 3, 4, 7, 8, 16, 64, 1000]),
            "precision": draw.choice(list(calculator.PRECISIONS)),
            "microBatch": draw.choice([1, 2, 3, 8, 31]),
            "accumulation": draw.choice([1, 1, 2, 5]),
            "sequence": draw.choice([1, 77, 128, 1024, 4096]),
            "checkpointing": draw.random() < 0.5,
        }
        for _ in range(count)
    ]


def decoder(draw: random.Random) -> dict:
    """The numbers that a reader may type, some of them odd."""
    kv_heads = draw.choice([1, 2, 8])
    heads = kv_heads * draw.choice([1, 2, 5])
    sizes = {"layers": draw.randint(1, 6), "hidden": heads * draw.choice([16, 64, 100, 128]), "heads": heads}
    sizes |= {"kv_heads": kv_heads, "inner": draw.randint(50, 9000), "vocabulary": draw.randint(100, 300_000)}
    fixed = {"family": "llama", "head_width": sizes["hidden"] // heads, "positions": 0, "rotary": 0, "biases": False}
    fixed |= {"parallel": False, "hidden_dropout": 0, "attention_dropout": 0, "embedding_dropout": 0, "labels": 2}
    return sizes | fixed | {"tied": draw.random() < 0.5, "activation": None}


def answer(question: dict) -> dict:
    """What Python says."""
    names = {"micro_batch": "microBatch", "accumulation": "accumulation", "sequence": "sequence"}
    model = Architecture(**question["model"])
    values = {name: question[key] for name, key in names.items()} | {"precision": question["precision"]}
    values |= {"checkpointing": question["checkpointing"], "device": "cuda"}
    values["attention"] = "sdpa" if model.has_fused_attention else "eager"
    setup = Setup.of_arm(model, question["arm"], ranks=question["ranks"], **values)
    whole, step = estimate(setup), step_time(setup, Machine(gpu=question["gpu"]))
    return {
        "parameters": whole.parameters,
        "atPeak": whole.at_peak,
        "peakBytes": whole.peak_bytes,
        "hostBytes": whole.host_bytes,
        "nvmeBytes": whole.nvme_bytes["held"],
        "traffic": whole.traffic,
        "seconds": step.seconds,
        "low": step.low_s,
        "high": step.high_s,
    }


def differs(ours: dict, theirs: dict) -> dict:
    """In what two answers differ."""
    return {
        name: (value, theirs[name])
        for name, value in ours.items()
        if theirs[name] != (pytest.approx(value, rel=RELATIVE) if name in ("seconds", "low", "high") else value)
    }
