"""The settings of a run: impossible values are refused by the name of their flag, and blanks get their defaults."""

import re
from pathlib import Path

import pytest
import tyro

from study.core.errors import Stop
from study.core.settings import TrainerFlags, as_dict, build, flag, learning_rate, resolve
from tests.conftest import table

CASES = table("core/settings.toml")


@pytest.mark.parametrize("name", CASES["impossible"])
def test_an_impossible_value_is_refused(name):
    """In words that name the file, the flag and what came, with a remedy."""
    for value in CASES["impossible"][name]:
        with pytest.raises(Stop, match=rf"(?m)^a.toml: {flag(name)} must be .* \(got {re.escape(repr(value))}\)$"):
            build({name: value}, "a.toml")


def is_possible(name: str, value: object) -> bool:
    try:
        build({name: value}, "a.toml")
    except Stop:
        return False
    return True


def test_no_number_of_things_is_without_bound():
    whole = [name for name in vars(TrainerFlags()) if is_possible(name, 7) and not is_possible(name, 7.5)]
    assert {"micro_batch", "accumulation", "sequence", "train_rows", "lora_rank", "virtual_ranks"} < {*whole}
    assert [name for name in whole if is_possible(name, 10**20)] == []


def test_possible_values_pass():
    values = {"seed": 2**31 - 1, "threads": 1024, "memory_cap_gib": 0.01, "virtual_ranks": 2, "steps": 10**7}
    assert build(values | {"dropout": 0.0}, "a.toml") == TrainerFlags(**values, dropout=0.0)


@pytest.mark.parametrize(("values", "words"), CASES["misfits"])
def test_values_that_do_not_fit_each_other_are_refused(values, words):
    with pytest.raises(Stop, match=f"(?m)^a.toml: {words}$"):
        build(values, "a.toml")


@pytest.mark.parametrize(("words", "gpu", "expected"), CASES["resolved"])
def test_defaults_depend_on_task_model_data_and_gpu(words, gpu, expected):
    values = as_dict(resolve(tyro.cli(TrainerFlags, args=words.split()), gpu))
    assert {*expected.split()} <= {f"{name}={value}" for name, value in values.items()}


def test_given_values_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = {"model": "bert-base", "data": "embedded", "init": "in_place", "sequence": 64, "lr": 1e-4, "seed": 3}
    given = TrainerFlags(**values, task="imdb", train_rows=10, eval_rows=5, attention="eager", cache_dir=Path("~/kept"))
    assert as_dict(resolve(given, gpu=True)) == as_dict(given) | {"cache_dir": "/home/somebody/kept"}


def test_the_type_of_a_folder_is_in_its_config(tmp_path):
    for config, attention in {'{"model_type": "gptj"}': "eager", '{"model_type": "gpt2"}': "sdpa", "[]": None}.items():
        (tmp_path / "config.json").write_text(config)
        assert resolve(TrainerFlags(model=str(tmp_path)), gpu=False).attention == attention


@pytest.mark.parametrize(
    ("warmup", "lr", "by_hand"),
    [
        (4, 1.0, [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (0, 5e-5, [5e-5, 3.75e-5, 2.5e-5, 1.25e-5]),
    ],
)
def test_rates_by_hand(warmup, lr, by_hand):
    """Up in four equal parts to the peak, then down in six that would end at zero one step later."""
    settings = TrainerFlags(lr=lr, lr_warmup_steps=warmup)
    assert [learning_rate(settings, step, len(by_hand)) for step in range(len(by_hand))] == pytest.approx(by_hand)
