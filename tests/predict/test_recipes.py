"""Recipes that projects publish with their hardware: the first answer of `advise` fits, and is not much slower.

Predicted on both sides: what they ran, and what is advised.
"""

from dataclasses import replace
from math import inf

import pytest

from study.core import arms
from study.core.gpus import GPUS, gpu_named
from study.predict.advise import advise, fits_on
from study.predict.architecture import named
from study.predict.prediction import estimate, step_time
from study.predict.question import settled_arm
from study.predict.trace.transformer import Transformer
from tests.conftest import table
from tests.predict.test_advise import question_of

SLOWER = 1.3
RECIPES = table("predict/recipes.toml")


def outcome(recipe: dict) -> tuple[str, str | None, float]:
    """Return if what they ran fits as predicted, the advised arm, and how many times as long its step takes."""
    rows, passes = recipe["rows"], recipe.get("passes", 1)
    given = recipe | recipe.get("options", {}) | {"batch": recipe["gpus"] * rows * passes, "checkpointing": None}
    name, rank = given.pop("model"), recipe.get("lora_rank")
    config = RECIPES["models"].get(name)
    model = Transformer.of(config, name, lora_rank=rank) if config else named(name, lora_rank=rank)
    question = question_of(model, **given)
    arm = settled_arm(arms.load_arm(recipe["arm"]), question.gpus, question.local)
    theirs = replace(question, checkpointing=recipe.get("checkpointing", True)).training(arm, rows, passes)
    fits = fits_on(GPUS[gpu_named(recipe["gpu"])], estimate(theirs).peak_bytes)
    if choice := advise(question).choice:
        return fits, choice.arm, choice.seconds / step_time(theirs, question.machine).seconds
    return fits, None, inf


@pytest.mark.slow
def test_the_first_answer_fits_what_they_ran_and_is_not_much_slower():
    recipes = RECIPES["recipe"]
    found = [(recipe["url"], recipe["model"], recipe["arm"], *outcome(recipe)) for recipe in recipes]
    bad = [each for each in found if each[3] == "no" or each[-1] > SLOWER]
    assert len(recipes) == 15
    assert len(bad) <= 2, bad
