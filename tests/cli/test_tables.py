"""Tables on terminals as wide as people have them: no cell is cut, and a column without room is named."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from study.cli import commands
from study.core.text import say_wrapped, show
from tests.conftest import ROOT

SMOKE = "reports/cpu-2core/runs/smoke"
COMMANDS = [
    f"compare --arms --all {SMOKE}",
    f"compare {SMOKE}",
    f"runs {SMOKE}",
    "advise --model mistral-7b --gpus 8 --gpu H100",
    "claims --all",
    "arms",
]
RUN_ALL = """
import sys
from study.cli import main
for words in sys.argv[1:]:
    print("$", words)
    sys.argv = ["study", *words.split()]
    try:
        main()
    except SystemExit:
        pass
"""


def said(width: int | None) -> dict[str, str]:
    """What each command prints on a terminal of this width, or into a pipe."""
    argv = [sys.executable, "-c", RUN_ALL, *COMMANDS]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    if width is None:
        text = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    else:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        child = subprocess.Popen(argv, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        read = b""
        while piece := _read(ours):
            read += piece
        assert child.wait() == 0
        os.close(ours)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", read.decode())
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("$ ")[1:]}


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: the last program that had it open is gone
        return b""


def tables(text: str) -> list[list[list[str]]]:
    """The tables of what went into a pipe: lines of three cells or more, each as long as the one above it."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        cells = re.split(r"  +", line.strip())
        if found[-1] and len(cells) != len(found[-1][0]):
            found.append([])
        found[-1].append(cells)
    return [rows for rows in found if rows and len(rows) > 1 and len(rows[0]) > 2]


@pytest.fixture(scope="module")
def whole():
    return said(None)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_cell_is_cut_without_a_word(width, whole):
    shown = said(width)
    assert [*shown] == [*whole] == COMMANDS
    for command in COMMANDS:
        words = shown[command].split()
        without_room = re.sub(r"\s+", " ", "".join(re.findall(r"No room for:([^.]*)\.", shown[command])))
        known = tables(whole[command])
        assert known, command
        for header, *rows in known:
            for number, name in enumerate(header):
                if name not in without_room:
                    missing = {word for row in rows for word in row[number].split()} - {*words}
                    assert not missing, (command, name)


def test_a_first_column_wider_than_the_terminal_is_folded(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    show([{"run": "x" * 150, "seconds": 1.5}])
    text = capsys.readouterr().out
    assert text.count("x") == 150
    assert "No room for: seconds" in text


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("", 181)])
def test_a_table_in_a_pipe_is_as_wide_as_columns_say(columns, widest, monkeypatch, capsys):
    """It was uncut, beside texts that were wrapped."""
    monkeypatch.setenv("COLUMNS", columns)
    show([{"arm": "zero3", **{f"column_{number}": "a word " * 2 for number in range(10)}}])
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= widest
    unseen = [f"column_{number}" for number in range(10) if f"column_{number}" not in " ".join(text.split())]
    assert ("No room for" in text) == bool(columns)
    assert unseen == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_of_commands_is_wrapped_below_its_purposes(width, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    commands.start(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("  ") and line[2] != " " for line in lines) == len(commands.COMMANDS) + 2, "examples"


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("400", 100), ("", 100), ("wide", 100)])
def test_a_pipe_is_as_wide_as_columns_say(columns, widest, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    say_wrapped("a word " * 60)
    assert widest - 7 < max(map(len, capsys.readouterr().out.splitlines())) <= widest
