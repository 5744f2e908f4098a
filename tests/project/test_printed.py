"""Each command that README and the answers' pages print gives the numbers and the lines that stand beside it."""

import contextlib
import functools
import io
import re
import shlex

import pytest

from study.cli import commands
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "reports/answers").glob("*.md"))]
CHEAP = ("estimate", "virtual", "claims", "stack", "compare", "diff", "advise")  # seconds; others train
OF_THE_READER = re.compile(r"--runs|requirements\.txt|train\.py|trainer_glue")  # files that are not here
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?: [kMGT]?B\b)?(?!\w)")  # a size with its unit


def printed_in(text: str) -> list[tuple[str, str, str]]:
    """Each command of a page, the words beside it, and after a `$` the lines below it."""
    found = []
    for dollar, line, below in re.findall(r"^    (\$ )?study (\S.*)\n((?:    [^$\s].*\n)*)", text, re.MULTILINE):
        words, _, beside = line.partition("#")
        if words.split()[0] in CHEAP and not OF_THE_READER.search(words):
            found.append((words.strip(), beside.strip(), below if dollar else ""))
    return found


def lone(text: str) -> str:
    """Put an empty line after each command that shows no output."""
    return re.sub(r"^(    study .*)$", r"\1\n", text, flags=re.MULTILINE)


PRINTED = sorted({each for path in PAGES for each in printed_in(lone(path.read_text()))})


@functools.cache
def output(words: str) -> str:
    given = shlex.split(words)
    if given[0] == "virtual":  # it takes minutes. What it counts is the row of its page, and its estimate is the same.
        given[0] = "estimate"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):  # 1: a fault is known
        commands.start(given)
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(("words", "beside", "below"), PRINTED, ids=[words for words, *_ in PRINTED])
def test_a_printed_command_gives_the_numbers_beside_it_and_the_lines_below(words, beside, below, monkeypatch):
    monkeypatch.chdir(ROOT)
    printed = output(words)
    found = {*NUMBER.findall(printed)}
    assert [number for number in NUMBER.findall(beside) if number not in found | {*NUMBER.findall(words)}] == []
    assert [line for line in below.splitlines() if " ".join(line.split()) not in printed] == []


def test_pages_print_commands_with_numbers_and_their_precision():
    assert len(PRINTED) >= 18
    assert sum(bool(NUMBER.search(beside)) for _, beside, _ in PRINTED) >= 8
    assert sum(bool(below) for *_, below in PRINTED) >= 2
    # Without it DDP and DeepSpeed's stages are estimated in two precisions, whose numbers are no comparison.
    asked = [words for words, *_ in PRINTED if words.startswith(("estimate", "virtual"))]
    assert [words for words in asked if "--precision" not in words] == []


def test_another_number_beside_a_command_is_seen():
    ((words, beside, _),) = printed_in(
        "    study estimate --model llama3-8b --arm zero3 --precision bf16_cast  # 22.1 GB\n"
    )
    assert NUMBER.findall(beside) == ["22.1 GB"]
    assert "22.1 GB" not in NUMBER.findall(output(words)), "activations are kept"
