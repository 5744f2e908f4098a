"""Each alternative of each clue is held by a line that no other alternative finds."""

import re
from collections.abc import Iterator

from study.configs.oom.causes import rows
from tests.cases import for_each
from tests.conftest import table

LINES = table("configs/oom_clues.toml")
CLUES = {id: row["clue"] for id, row in rows().items() if "clue" in row}
PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[(|)]|.", re.DOTALL)  # of a regular expression


def without_each(clue: str) -> Iterator[tuple[str, str]]:
    """Yield each alternative, at any depth, and the expression without it."""
    groups: list[list[int]] = [[0]]  # open ones: where the alternatives so far begin
    for part in [*PARTS.finditer(clue), None]:
        text, at = (part[0], part.start()) if part else (")", len(clue))
        if text == "(":
            opening = re.compile(r"\((?:\?(?:[:=!]|<[=!]|\w+:))?").match(clue, at)
            groups.append([opening.end() if opening else at + 1])
        elif text == "|":
            groups[-1].append(at + 1)
        elif text == ")":
            begins = groups.pop()
            ends = [*(begin - 1 for begin in begins[1:]), at]
            for begin, end in zip(begins, ends, strict=True):
                if len(begins) == 1:
                    continue
                last = end == at
                yield clue[begin:end], clue[: begin - last] + clue[end + (not last) :]


def test_the_lines_are_of_all_clues():
    assert LINES.keys() == CLUES.keys()


@for_each("id", CLUES)
def test_a_clue_finds_its_lines_and_leaves_others(id):
    clue = re.compile(CLUES[id])
    assert [line for line in LINES[id]["found"] if not clue.search(line)] == []
    assert [line for line in LINES[id]["left"] if clue.search(line)] == []


@for_each("id", CLUES)
def test_no_alternative_of_a_clue_can_be_removed(id):
    lines = LINES[id]["found"] + LINES[id]["left"]
    expected = [re.findall(CLUES[id], line) for line in lines]  # the answer quotes what is found
    unheld = []
    for alternative, shorter in without_each(CLUES[id]):
        if [re.findall(shorter, line) for line in lines] == expected:
            unheld.append(alternative)
    assert unheld == []
