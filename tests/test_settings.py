"""The settings of a run: impossible values are refused by the name of their flag, and blanks get their defaults."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
import tyro

from study.errors import Stop
from study.spec import settings
from study.spec.options import OPTIONS, with_plain_help
from study.spec.settings import Flags, as_dict, build, check, flag, learning_rate, resolve
from study.spec.shapes import SHAPES

FIELDS = {field.name: field for field in dataclasses.fields(Flags)}
NUMBERS = {name: str(hint) for name, hint in get_type_hints(Flags).items() if re.search(r"int\b|float", str(hint))}
MAY_BE_0 = ("lr_warmup_steps", "weight_decay", "dropout", "seed")


def test_every_field_is_explained():
    """A docstring directly under each field: it becomes the field's --help."""
    tree = ast.parse(inspect.getsource(settings))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Flags").body
    named = [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
    explained = [
        node.target.id
        for node, below in zip(body, body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    ]
    assert named == list(FIELDS), "the source was read"
    assert explained == named


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, -1) for name in NUMBERS]
    + [(name, 0) for name in NUMBERS if name not in MAY_BE_0]
    + [(name, value) for name in NUMBERS if "float" in NUMBERS[name] for value in (float("nan"), float("inf"))]
    + [("dropout", 1.0), ("dropout", 1.5), ("steps", 10**20), ("seed", 2**32), ("threads", 100_000), ("sequence", 1)]
    + [("memory_cap_gib", 1e-6), ("memory_cap_gib", 1e12), ("virtual_ranks", 1)]
    + [("micro_batch", 1.5), ("micro_batch", True), ("precision", "fp4"), ("compile", 1), ("model", 5)],
)
def test_an_impossible_value_is_refused(name, value):
    """In words that name the flag and what came, with a remedy."""
    with pytest.raises(
        Stop, match=rf"(?m)^{flag(name)} must be .* \(got {re.escape(str(value))}|{value!r}\)$"
    ) as caught:
        check(Flags(**{name: value}))
    assert caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dropout": 0.0, "seed": 0, "weight_decay": 0.0, "lr_warmup_steps": 0},
        {"seed": 2**31 - 1, "threads": 1024, "memory_cap_gib": 0.01, "virtual_ranks": 2, "steps": 10**7},
        {"steps": 6, "warmup_steps": 5, "micro_batch": 1, "epochs": 0.01, "lr": 1e-9, "dropout": 0.999},
        {"steps": 101, "lr_warmup_steps": 100},
        {"init": "none", "virtual_ranks": 2},
    ],
)
def test_possible_values_pass(values):
    check(Flags(**values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"virtual_ranks": 1}, r"^--virtual-ranks must be at least 2 \(got 1\)$"),
        ({"steps": 5}, "^--steps 5 leaves nothing to time after --warmup-steps 5$"),
        ({"steps": 100, "lr_warmup_steps": 100}, "^--lr-warmup-steps 100 never ends within --steps 100$"),
        ({"init": "none"}, "^--init none leaves nothing to train$"),
        ({"bandwidth_mbit": 50.0}, "^--bandwidth-mbit needs an emulated cluster$"),
        (
            {"hosts": 2, "virtual_ranks": 2},
            "^--hosts does not go with --virtual-ranks, which send nothing$",
        ),
        ({"init": "none", "virtual_ranks": 2, "precision": "fp16"}, "^--init none has no values to scale for fp16$"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values, words):
    with pytest.raises(Stop, match=f"(?m){words}"):
        check(Flags(**values))


def test_epochs_are_checked_as_the_steps_they_come_to():
    with pytest.raises(Stop, match=r"^--lr-warmup-steps 100 never ends within --epochs 2 \(100 steps\)"):
        settings.check_steps(Flags(epochs=2.0, lr_warmup_steps=100), 100)
    with pytest.raises(Stop, match=r"^--epochs 1e\+30 .* is more than 10000000 steps"):
        settings.check_steps(Flags(epochs=1e30), int(1e30 * 100))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"micro_batch": "4"}, r"^a\.toml: micro_batch must be a whole number \(got '4'\)$"),
        ({"lr": 0}, r"^a\.toml: lr must be greater than 0 \(got 0\)$"),
        ({"micro_bath": 4}, r"^a\.toml: there is no setting micro_bath$"),
        ({"steps": 2, "warmup_steps": 5}, r"^a\.toml: --steps 2 leaves nothing to time"),
    ],
)
def test_a_bad_value_in_a_file_names_the_file(values, words):
    with pytest.raises(Stop, match=f"(?m){words}"):
        build(values, "a.toml")


def test_values_in_a_file_are_settings():
    assert build({"lr": 1, "micro_batch": 4}, "a.toml") == Flags(lr=1, micro_batch=4)


RESOLVED = {  # task, with a GPU: model, data, init, sequence, lr, train rows, eval rows, attention
    ("imdb", False): ("bert-tiny", "embedded", "random", 128, 1e-3, 800, 200, "sdpa"),
    ("imdb", True): ("bert-large-uncased", "hub", "pretrained", 128, 5e-5, 800, 200, "sdpa"),
    ("wikitext", False): ("gpt-tiny", "embedded", "random", 128, 1e-3, None, 100, "sdpa"),
    ("wikitext", True): ("gpt2", "hub", "random", 1024, 5e-5, None, 100, "sdpa"),
}


@pytest.mark.parametrize(("task", "gpu"), RESOLVED)
def test_defaults_depend_on_task_and_gpu(task, gpu):
    s = resolve(Flags(task=task), gpu)
    resolved = (s.model, s.data, s.init, s.sequence, s.lr, s.train_rows, s.eval_rows, s.attention)
    assert resolved == RESOLVED[task, gpu]


def test_the_embedded_corpus_on_a_gpu_needs_no_hub():
    s = resolve(Flags(data="embedded"), gpu=True)
    assert (s.model, s.init) == ("bert-large", "random"), "the same shape, by its built-in name"


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_what_stays_blank_is_decided_later(task):
    """By the arm, the model, the data or the machine; everything else is filled in."""
    values = as_dict(resolve(Flags(task=task), gpu=False))
    blank = {"tokenizer", "steps", "eval_every", "dropout", "threads", "memory_cap_gib", "run_dir", "nvme_dir"}
    blank |= {"virtual_ranks", "log_with", "hosts", "bandwidth_mbit", "lora_rank", "train_only"}
    blank |= {"checkpoint_every", "dies_after", "resume"}
    blank |= {"train_rows"} if task == "wikitext" else set()
    assert {name for name, value in values.items() if value is None} == blank


def test_given_values_stay():
    values = {"model": "bert-base", "data": "embedded", "init": "in_place", "sequence": 64, "lr": 1e-4, "seed": 3}
    given = Flags(**values, task="imdb", train_rows=10, eval_rows=5, attention="eager", cache_dir=Path("/kept"))
    assert as_dict(resolve(given, gpu=True)) == as_dict(given)


@pytest.mark.parametrize(
    ("model", "init"),
    [(model, "random") for model in SHAPES] + [("google-bert/bert-base-uncased", "pretrained"), (".", "random")],
)
def test_published_weights_are_the_default_of_a_hub_name_alone(model, init):
    """A built-in shape and a local folder start from drawn weights."""
    assert resolve(Flags(model=model), gpu=False).init == init


EAGER = ["gpt-j-6b", "EleutherAI/gpt-j-6b", "gemma2-9b", "google/gemma-2-9b"]
FUSED = ["gpt2", "google-bert/bert-base-uncased"]
UNKNOWN = ["somebody/gpt-joke", "x" * 5000]  # until transformers has read its config


@pytest.mark.parametrize("model", EAGER + FUSED + UNKNOWN)
def test_attention_is_written_out_for_the_types_that_need_it(model):
    """By the type of the model, not by what its name contains."""
    attention = resolve(Flags(task="wikitext", model=model), gpu=False).attention
    assert attention == ("eager" if model in EAGER else "sdpa" if model in FUSED else None)


@pytest.mark.parametrize("kind", ["gptj", "gemma2", "gpt2"])
def test_the_type_of_a_folder_is_in_its_config(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    attention = "sdpa" if kind == "gpt2" else "eager"
    assert resolve(Flags(model=str(tmp_path)), gpu=False).attention == attention


@pytest.mark.parametrize("config", ["{}", "[]", "not json", None])
def test_a_folder_that_does_not_say_its_type_ends_nothing_here(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert resolve(Flags(model=str(tmp_path)), gpu=False).attention is None


@pytest.mark.parametrize(("data", "sequence"), [("hub", 1024), ("some/folder", 1024), ("embedded", 128)])
def test_rows_of_real_text_are_longer(data, sequence):
    assert resolve(Flags(task="wikitext", data=data), gpu=False).sequence == sequence


def test_a_tiny_model_on_a_gpu_needs_no_network():
    s = resolve(Flags(model="bert-tiny"), gpu=True)
    assert (s.data, s.lr) == ("embedded", 1e-3)


def test_the_cache_is_a_real_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve(Flags(cache_dir=Path("~/kept")), gpu=False).cache_dir == Path("/home/somebody/kept")


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


# --- the record's `requested` --------------------------------------------------------------------------------------


def test_as_dict_is_complete_and_plain():
    """Every field is there, as JSON can hold it."""
    values = as_dict(resolve(Flags(run_dir=Path("runs/a"), seed=7), gpu=False))
    assert list(values) == list(FIELDS)
    assert json.loads(json.dumps(values)) == values
    assert (values["run_dir"], values["seed"], values["nvme_dir"]) == ("runs/a", 7, None)


def test_the_help_of_an_option_is_one_paragraph():
    """tyro broke every line of a docstring that goes on where the source broke it."""
    options = with_plain_help(Flags)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        tyro.cli(options, args=["--help"], registry=OPTIONS)
    lines = [line.strip(" │") for line in shown.getvalue().splitlines()]
    (at,) = [number for number, line in enumerate(lines) if "synthetic: random" in line]
    assert "rows of the shape" in f"{lines[at]} {lines[at + 1]}"
    assert not lines[at].endswith("synthetic: random"), "no line ends where the source's did"
    assert with_plain_help(with_plain_help(Flags)).__doc__ == options.__doc__, "twice is once"
