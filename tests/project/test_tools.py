"""The tools that make what the repository keeps: each begins, and gives what is kept."""

import re

import headline
import planted_faults
import pytest
from conftest import ROOT

from study.records.runs import load

WORDS = re.compile(r">([^<>]+)</text>")


@pytest.mark.parametrize("machine", headline.PICTURES)
def test_the_pictures_are_those_of_the_kept_runs(machine):
    draw, caption = headline.PICTURES[machine]
    drawn = headline.style.svg(draw(load(ROOT / "reports" / machine / "runs")), caption)
    kept = (ROOT / "reports" / machine / "headline.svg").read_text()
    assert WORDS.findall(drawn) == WORDS.findall(kept)  # other releases of matplotlib may place them otherwise


def test_each_planted_fault_is_one_change(tmp_path):
    file = tmp_path / "share.py"
    file.write_text("def share(part, whole):\n    if whole == 0:\n        return 1\n    return part / whole\n")
    changed = {}
    for fault in planted_faults.faults_in(tmp_path, file):
        content = file.read_bytes()
        changed[fault.kind, fault.line] = (
            content[: fault.start] + fault.after.encode() + content[fault.end :]
        ).decode()
    lines = {place: text.splitlines()[place[1] - 1].strip() for place, text in changed.items()}
    assert lines == {
        ("branch", 2): "if (not whole == 0):",
        ("comparison", 2): "if (whole != 0):",
        ("constant", 2): "if whole == (1):",
        ("constant", 3): "return (2)",
        ("return", 3): "return (None)",
        ("operator", 4): "return (part * whole)",
        ("return", 4): "return (None)",
    }


def test_each_reproduction_has_its_line():
    scripts = {path.stem for path in (ROOT / "reproductions").glob("*.py")} - {"as_printed"}
    lines = re.findall(r"^\| `(\w+)` \|", (ROOT / "reproductions" / "README.md").read_text(), re.MULTILINE)
    assert sorted(lines) == sorted(scripts)
