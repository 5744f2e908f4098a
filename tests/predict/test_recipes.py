"""Recipes that projects publish with their hardware: the first answer of `advise` fits, and is not much slower.

Predicted on both sides: what they ran, and what is advised.
"""

import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from study.core import arms
from study.core.gpus import gpu_named
from study.predict.advise import advise, fits_on
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.question import PlaceFlags, Question, StepFlags, TrainingFlags, settled_arm
from study.predict.step_time import step_time
from study.predict.trace.transformer import Transformer

SLOWER = 1.3
YI = {"model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60}
YI |= {"num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000, "max_position_embeddings": 4096}


def outcome(recipe: dict) -> tuple[str, str | None, float]:
    """Return if what they ran fits as predicted, the advised arm, and how many times as long its step takes."""
    rows, passes = recipe["rows"], recipe.get("passes", 1)
    given = recipe | recipe.get("options", {}) | {"batch": recipe["gpus"] * rows * passes, "checkpointing": None}
    kinds = (TrainingFlags, PlaceFlags, StepFlags)
    flags = (kind(**{name: given[name] for name in kind.__annotations__ if name in given}) for kind in kinds)
    rank = recipe.get("lora_rank")
    if recipe["model"] == "yi-34b":
        model = Transformer.of(YI, "yi-34b", lora_rank=rank)
    else:
        model = named(recipe["model"], lora_rank=rank)
    question = Question.of(model, *flags)
    arm = settled_arm(arms.load_arm(recipe["arm"]), question.gpus, question.local)
    theirs = replace(question, checkpointing=recipe.get("checkpointing", True)).training(arm, rows, passes)
    fits = fits_on(gpu_named(recipe["gpu"]), estimate(theirs).peak_bytes)
    if choice := advise(question).choice:
        return fits, choice.arm, choice.seconds / step_time(theirs, question.machine).seconds
    return fits, None, inf


@pytest.mark.slow
def test_the_first_answer_fits_what_they_ran_and_is_not_much_slower():
    recipes = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())["recipe"]
    found = [(recipe["url"], recipe["model"], recipe["arm"], *outcome(recipe)) for recipe in recipes]
    bad = [each for each in found if each[3] == "no" or each[-1] > SLOWER]
    assert len(recipes) == 15
    assert len(bad) <= 2, bad
