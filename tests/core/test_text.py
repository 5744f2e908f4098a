"""What people read is written as they would say it: numbers, units, counts and lines."""

import math
import re
import shlex
import sys

import pytest

from study.core import text
from tests.cases import for_each
from tests.conftest import ROOT


@for_each(
    ("of", "value", "said"),
    [
        (text.short, 12345.678, "12346"), (text.short, 0.1, "0.1"), (text.short, 1.0, "1"), (text.short, 0.0, "0"),
        (text.short, 99999999.0, "1e+08"), (text.short, 0.00001234, "1.234e-05"), (text.short, 0.0001, "0.0001"),
        (text.short, math.inf, "never"), (text.short, None, "-"), (text.short, True, "yes"), (text.short, False, "no"),
        (text.short, [1, None, "a"], "1, -, a"), (text.short, (2.5, True), "2.5, yes"), (text.short, 1200, "1200"),
        (text.size, 0, "0 bytes"), (text.size, 1, "1 byte"), (text.size, 999, "999 bytes"), (text.size, 1000, "1 kB"),
        (text.binary_size, 1023, "1023 bytes"), (text.binary_size, 1536, "1.5 KiB"), (text.binary_size, 2**20, "1 MiB"),
        (text.size, 999_400, "999 kB"), (text.size, 999_500, "1 MB"), (text.size, 1.5e9, "1.5 GB"),
        (text.size, 2e12, "2 TB"), (text.size, -1.5e6, "-1.5 MB"),
        (text.count, 9.24e9, "9.24 billion"), (text.count, 1e12, "1 trillion"), (text.count, 12_000, "12,000"),
        (text.count, 1e6, "1 million"),
        (text.nats, 4e-7, "4e-7 nats"), (text.nats, 0.02, "0.02 nats"),
        (text.lasting, 40, "40 s"), (text.lasting, 119, "119 s"), (text.lasting, 120, "2 minutes"),
        (text.lasting, 7199, "120 minutes"), (text.lasting, 97_200, "27 hours"), (text.lasting, 259_200, "3 days"),
        (text.times, 1.0, "1.0 times"), (text.times, 2.54, "2.5 times"), (text.times, 0.97, "0.97 times"),
        (text.percent, 0.034, "3.4%"), (text.percent, 0.1, "10%"), (text.percent, -0.034, "-3.4%"),
        (text.percent, 0.12, "12%"),
        # A half is rounded up, also where binary has a little less.
        (text.size, 2.125e9, "2.13 GB"), (text.size, 1.875e9, "1.88 GB"), (text.size, 1.865e9, "1.87 GB"),
        (text.size, -2.125e9, "-2.13 GB"), (text.size, 0.5, "1 byte"), (text.size, 2.5, "3 bytes"),
        (text.binary_size, 2.125 * 2**30, "2.13 GiB"), (text.count, 2.125e9, "2.13 billion"), (text.count, 2.5, "3"),
        (text.short, 1.0625, "1.063"), (text.times, 2.25, "2.3 times"), (text.percent, 0.125, "13%"),
        (text.percent, 0.0625, "6.3%"), (text.lasting, 150, "3 minutes"), (text.lasting, 2.5, "3 s"),
        (text.nats, 2.5e-7, "3e-7 nats"),
    ],
)  # fmt: skip
def test_a_value_is_said_as_people_say_it(of, value, said):
    assert of(value) == said


@pytest.mark.parametrize(
    ("number", "things", "said"),
    [(1, "properties of a run", "1 property of a run"), 
        (1, "ranks", "1 rank"), (0, "ranks", "0 ranks"), (2, "ranks", "2 ranks"), (1, "passes", "1 pass"),
        (1, "rows per pass", "1 row per pass"), (1, "micro-batches", "1 micro-batch"), (3, "passes", "3 passes"),
        (1, "sequences", "1 sequence"),
    ],
)  # fmt: skip
def test_one_thing_is_said_in_the_singular(number, things, said):
    assert text.number_of(number, things) == said


@pytest.mark.parametrize(
    ("value", "number"),
    [("1e-5", 1e-5), (3, 3.0), (True, "True"), ("auto", "auto"), (None, None), (["2", "x"], [2.0, "x"])],
)
def test_texts_of_numbers_compare_as_numbers(value, number):
    assert text.comparable(value) == number
    assert not text.is_number(True)
    assert text.is_number(1.5)


@pytest.mark.parametrize(("is_terminal", "columns", "most"), [(True, "60", 60), (True, "200", 100), (False, None, 100)])
def test_lines_are_as_wide_as_the_terminal_and_units_stay_with_their_numbers(monkeypatch, is_terminal, columns, most):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    lines = text.wrapped("it needs 12 GB, " * 30, "  ", "- ")
    assert most - 20 < max(map(len, lines)) <= most
    assert lines[0].startswith("- it needs 12 GB")
    assert all(line.startswith("  ") for line in lines[1:])
    assert not any(line.endswith("12") or line.strip().startswith("GB") for line in lines)
    assert text.wrapped("", "", "") == [""]


def test_a_name_that_is_longer_than_a_line_stays_whole():
    """Such as a path, or a key of a config: in two pieces nobody can copy it."""
    name = "library.runtime." + "part_" * 30
    assert text.wrapped(f"The key {name} is true.", "", "") == ["The key", name, "is true."]


LAUNCH = "accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 8 --mixed_precision no train.py"
QUOTED = f"study diagnose 'a log with spaces' --symptom \"loss is 0 after a while\" {'word ' * 10}"


@pytest.mark.parametrize(
    ("said", "command", "others"),
    [
        (f"Start it: `{LAUNCH}`, with a batch of 1.", LAUNCH, ["Start it:", "with a batch of 1."]),
        (f"`{LAUNCH}`.", LAUNCH, []),
        (f"Then `TORCH_LOGS=all {LAUNCH}`. It ends.", f"TORCH_LOGS=all {LAUNCH}", ["Then", "It ends."]),
        (f"Type `{QUOTED}`", QUOTED, ["Type"]),
    ],
)
@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_a_long_command_is_on_lines_that_can_be_pasted(monkeypatch, said, command, others, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = text.wrapped(said, "  ", "", is_terminal=False)
    assert max(map(len, lines)) <= int(columns)
    pasted = "\n".join(line for line in lines if line.startswith("      "))
    assert shlex.split(pasted.replace(" \\\n", " ")) == shlex.split(command)
    assert pasted.count(" \\\n") == pasted.count("\n"), "a shell reads on"
    assert [line.strip() for line in lines if not line.startswith("      ")] == others


@pytest.mark.parametrize(
    "said",
    [
        f"{'word ' * 12}`study oom FILE --model MODEL` names it",  # short: no line ends in it
        f"{'word ' * 12}`with deepspeed.zero.GatheredParameters(weight, modifier_rank=None)`, and more of it",  # Python
        f"{'word ' * 12}`{LAUNCH.replace('accelerate ', 'accelerate.')}` names a module, and `study` is a word",
    ],
)
def test_what_is_no_long_command_has_no_lines_of_its_own(monkeypatch, said):
    monkeypatch.setenv("COLUMNS", "80")
    lines = text.wrapped(said, "", "", is_terminal=False)
    assert " ".join(lines) == said
    assert ("study oom" not in said) or any("`study oom FILE --model MODEL`" in line for line in lines)


@pytest.mark.parametrize(("columns", "most"), [("60", 60), ("5", 100), ("060", 100), ("300", 100), ("", 100)])
def test_a_pipe_is_as_wide_as_a_shell_says(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", columns)
    longest = max(map(len, text.wrapped("a word " * 60, "", "", is_terminal=False)))
    assert most - 7 < longest <= most


def test_what_stands_beside_an_answer_is_one_line_for_a_program(capsys, monkeypatch):
    text.say_aside("a word " * 60)
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("COLUMNS", "80")
    text.say_aside("a word " * 60)
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    text.say_aside("a word " * 60)
    assert capsys.readouterr().err.count("\n") > 3


def test_what_takes_long_is_said_once(capsys):
    for _ in range(2):
        with text.bar("tests count to two"):
            pass
    assert capsys.readouterr().err == "tests count to two ...\n"


# Sizes of models and cards, which have so many digits, numbers that are quoted, and distances of an error.
NOT_ROUNDED = {"core/gpus.py", "report/calculator.py", "configs/oom/by_text.py", "configs/pasted/losses.py"}
NOT_ROUNDED |= {"conform/cases.py"}


def test_what_is_measured_or_predicted_is_rounded_by_one_rule():
    """Python's own format rounds a half to the even digit, and binary may have a little less than a half."""
    of_python = re.compile(r"\{[^{}\n]*:,?\.\dg\}")
    study = ROOT / "study"
    found = {str(path.relative_to(study)) for path in study.rglob("*.py") if of_python.search(path.read_text())}
    assert found == NOT_ROUNDED


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (["512 bytes", "16.1 GB", None], ["512 bytes", "  16.1 GB", "        -"]),
        ([4.0, 11.25, float("inf")], ["    4", "11.25", "never"]),
        (["3.4%", "12%", "19-22"], [" 3.4%", "  12%", "19-22"]),
        (["0.19.8", "0.19"], ["0.19.8", "0.19"]),
        (["1 x 16", "2 x 8"], ["1 x 16", "2 x 8"]),
        (["2 ranks of 8", "2 GB"], ["2 ranks of 8", "2 GB"]),
        ([True, False], ["yes", "no"]),
    ],
)
def test_numbers_and_sizes_end_at_the_right_edge_and_words_begin_at_the_left(capsys, cells, shown):
    text.show([{"name": "a", "value": cell} for cell in cells])
    assert [line[6:].rstrip() for line in capsys.readouterr().out.splitlines()[1:]] == shown
