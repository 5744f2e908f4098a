"""The settings of a run: impossible values are refused by the name of their flag, and blanks get their defaults."""

import dataclasses
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from study.core.errors import Stop
from study.core.settings import Flags, as_dict, build, check, flag, learning_rate, resolve
from study.core.shapes import SHAPES

FIELDS = {field.name: field for field in dataclasses.fields(Flags)}
NUMBERS = {name: str(hint) for name, hint in get_type_hints(Flags).items() if re.search(r"int\b|float", str(hint))}
MAY_BE_0 = ("lr_warmup_steps", "weight_decay", "dropout", "seed")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, -1) for name in NUMBERS]
    + [(name, 0) for name in NUMBERS if name not in MAY_BE_0]
    + [(name, value) for name in NUMBERS if "float" in NUMBERS[name] for value in (float("nan"), float("inf"))]
    + [("dropout", 1.0), ("dropout", 1.5), ("steps", 10**20), ("seed", 2**32), ("threads", 100_000), ("sequence", 1)]
    + [("memory_cap_gib", 1e-6), ("virtual_ranks", 1)]
    + [("micro_batch", 1.5), ("micro_batch", True), ("precision", "fp4"), ("compile", 1), ("model", 5)],
)
def test_an_impossible_value_is_refused(name, value):
    """In words that name the flag and what came, with a remedy."""
    with pytest.raises(Stop, match=rf"(?m)^{flag(name)} must be .* \(got {re.escape(str(value))}|{value!r}\)$"):
        check(Flags(**{name: value}))


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 2**31 - 1, "threads": 1024, "memory_cap_gib": 0.01, "virtual_ranks": 2, "steps": 10**7},
        {"steps": 6, "warmup_steps": 5, "micro_batch": 1, "epochs": 0.01, "lr": 1e-9, "dropout": 0.999},
        {"steps": 101, "lr_warmup_steps": 100, "seed": 0, "dropout": 0.0},
    ],
)
def test_possible_values_pass(values):
    check(Flags(**values))
    assert build(values, "a.toml") == Flags(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 5}, "^--steps 5 leaves nothing to time after --warmup-steps 5$"),
        ({"steps": 100, "lr_warmup_steps": 100}, "^--lr-warmup-steps 100 never ends within --steps 100$"),
        ({"init": "none"}, "^--init none leaves nothing to train$"),
        ({"init": "none", "virtual_ranks": 2, "precision": "fp16"}, "^--init none has no values to scale for fp16$"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values, words):
    with pytest.raises(Stop, match=f"(?m){words}"):
        check(Flags(**values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"micro_batch": "4"}, r"^a\.toml: --micro-batch must be a whole number \(got '4'\)$"),
        ({"lr": 0}, r"^a\.toml: --lr must be greater than 0 \(got 0\)$"),
        ({"micro_bath": 4}, r"^a\.toml: there is no setting micro_bath$"),
        ({"steps": 2, "warmup_steps": 5}, r"^a\.toml: --steps 2 leaves nothing to time"),
    ],
)
def test_a_bad_value_in_a_file_names_the_file(values, words):
    with pytest.raises(Stop, match=f"(?m){words}"):
        build(values, "a.toml")


HUB_BERT = "google-bert/bert-base-uncased"
RESOLVED = [  # flags, with a GPU: some of the settings
    (
        {"task": "imdb"},
        False,
        {"model": "bert-tiny", "data": "embedded", "init": "random", "sequence": 128, "lr": 1e-3, "attention": "sdpa"},
    ),
    (
        {"task": "imdb"},
        True,
        {"model": "bert-large-uncased", "data": "hub", "init": "pretrained", "sequence": 128, "lr": 5e-5},
    ),
    ({"task": "wikitext"}, False, {"model": "gpt-tiny", "data": "embedded", "init": "random", "sequence": 128}),
    ({"task": "wikitext"}, True, {"model": "gpt2", "data": "hub", "init": "random", "sequence": 1024, "lr": 5e-5}),
    ({}, False, {"task": "imdb", "train_rows": 800, "eval_rows": 200}),
    ({"task": "wikitext"}, False, {"train_rows": None, "eval_rows": 100, "attention": "sdpa"}),
    ({"model": "vit-micro", "init": "none"}, False, {"task": "synthetic", "data": "synthetic", "sequence": 128}),
    # On a GPU too, the embedded corpus and a tiny model need no hub.
    ({"data": "embedded"}, True, {"model": "bert-large", "init": "random"}),
    ({"model": "bert-tiny"}, True, {"data": "embedded", "lr": 1e-3}),
    # Rows of real text are longer.
    ({"task": "wikitext", "data": "hub"}, False, {"sequence": 1024}),
    ({"task": "wikitext", "data": "some/folder"}, False, {"sequence": 1024}),
    # Published weights are the default of a hub name alone, and not of a built-in shape or a local folder.
    *(({"model": model}, False, {"init": "random"}) for model in [*SHAPES, "."]),
    ({"model": HUB_BERT}, False, {"init": "pretrained", "attention": "sdpa"}),
    # Attention is written out for the types that need it, by the type of the model and not by its name.
    *(
        ({"model": model}, False, {"attention": "eager"})
        for model in ("gpt-j-6b", "EleutherAI/gpt-j-6b", "gemma2-9b", "google/gemma-2-9b")
    ),
    ({"model": "gpt2"}, False, {"attention": "sdpa"}),
    *(({"model": model}, False, {"attention": None}) for model in ("somebody/gpt-joke", "x" * 5000)),
]


@pytest.mark.parametrize(("flags", "gpu", "expected"), RESOLVED)
def test_defaults_depend_on_task_model_data_and_gpu(flags, gpu, expected):
    values = as_dict(resolve(Flags(**flags), gpu))
    assert {name: values[name] for name in expected} == expected
    assert json.loads(json.dumps(values)) == values


def test_given_values_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = {"model": "bert-base", "data": "embedded", "init": "in_place", "sequence": 64, "lr": 1e-4, "seed": 3}
    given = Flags(**values, task="imdb", train_rows=10, eval_rows=5, attention="eager", cache_dir=Path("~/kept"))
    assert as_dict(resolve(given, gpu=True)) == as_dict(given) | {"cache_dir": "/home/somebody/kept"}


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ('{"model_type": "gptj"}', "eager"),
        ('{"model_type": "gemma2"}', "eager"),
        ('{"model_type": "gpt2"}', "sdpa"),
        *((text, None) for text in ("{}", "[]", "not json", None)),
    ],
)
def test_the_type_of_a_folder_is_in_its_config(tmp_path, config, attention):
    """If it is not, whoever builds the model says so."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert resolve(Flags(model=str(tmp_path)), gpu=False).attention == attention


# --- learning rate -------------------------------------------------------------------------------------------------


def rates(warmup: int, steps: int, lr: float = 1.0) -> list[float]:
    settings = Flags(lr=lr, lr_warmup_steps=warmup)
    return [learning_rate(settings, step, steps) for step in range(steps)]


def test_rates_by_hand():
    """Up in four equal parts to the peak, then down in six that would end at zero one step later."""
    by_hand = [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates(warmup=4, steps=10) == pytest.approx(by_hand)
    assert rates(warmup=4, steps=10, lr=5e-5) == pytest.approx([5e-5 * rate for rate in by_hand])
    assert rates(warmup=0, steps=4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(warmup=2, steps=2) == pytest.approx([0.5, 1.0])
