"""Reproductions that run in forks of one process."""

import pytest

from study.probes import reproducing


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Write the only reproduction, called mine."""
    path = tmp_path / "mine.py"
    monkeypatch.setattr(reproducing, "scripts", lambda: {"mine": path})
    return path.write_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('print("{}")\nprint(\'{"found": [1], "more": 2}\')', {"found": [1], "told": "found [1] (more 2)"}),
        ("import os\nprint('{\"found\": 1}', flush=True)\nos._exit(0)", {"found": 1, "told": "found 1"}),
        ("raise KeyError('x')", {"error": "KeyError: 'x'"}),
        ("import sys\nsys.exit(3)", {"error": "SystemExit: 3"}),
        ("print(1)", {"error": "it printed no answer"}),
    ],
)
def test_a_script_has_an_answer_or_a_reason(script, text, expected):
    script(text)
    assert reproducing.answer({"what": "reproduction", "name": "mine"}) == expected


def test_a_script_that_takes_too_long_is_ended(script, monkeypatch):
    monkeypatch.setattr(reproducing, "LIMIT_S", 1)
    script("while True:\n    pass")
    assert reproducing.reproduced("mine") == {"error": "it took longer than 1 s"}
    monkeypatch.setattr(reproducing, "PATIENCE", 0.2)
    script("import time\ntime.sleep(60)")
    assert reproducing.reproduced("mine") == {"error": "it took longer than 1 s"}
