"""What a user reads: numbers, units, tables, lines and progress. 1 GB is 10^9 bytes."""

import contextlib
import functools
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, TypeGuard, TypeVar

if TYPE_CHECKING:
    from rich.console import Console  # rich takes longer to import than most answers

UNKNOWN = "-"
HALF_UP = 1 + 1e-12  # lifts a half, also one like 1.865, of which binary has 1.8649999


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def comparable(value):
    """Return a value as numbers where it, or its text, is one."""
    if isinstance(value, list):
        return list(map(comparable, value))
    # Python counts True as 1, and a stage of 1 is not `true`.
    if isinstance(value, bool):
        return str(value)
    # PyYAML reads 1e-5 as a text: its pattern of a number with an exponent wants a point (yaml/resolver.py:179).
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def short(value) -> str:
    """Return any value as a table shows it: four significant digits, yes or no, and a dash for unknown values."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(short, value))
    if isinstance(value, float):
        return _significant(value, 4) if math.isfinite(value) else "never"
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def size(size_bytes: float) -> str:
    """Return bytes with three significant digits and a unit."""
    return _scaled(size_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}) or _in_bytes(size_bytes)


def binary_size(size_bytes: float, digits: int = 3) -> str:
    """Return bytes with some significant digits and the units in which PyTorch writes them: 39.4 GiB."""
    units = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
    return _scaled(size_bytes, units, digits) or _in_bytes(size_bytes)


def _in_bytes(size_bytes: float) -> str:
    return number_of(int(rounded(size_bytes, ".0f")), "bytes")


def count(number: float) -> str:
    """Return a large number in words: 9.24 billion."""
    return _scaled(number, {"trillion": 1e12, "billion": 1e9, "million": 1e6}) or rounded(number, ",.0f")


def rounded(value: float, form: str) -> str:
    """Return a number in a format such as .2f. A half is rounded up, as people and browsers do: 2.125 is 2.13."""
    return format(value * HALF_UP, form)


def _scaled(value: float, units: dict[str, float], digits: int = 3) -> str | None:
    """Return a value in the largest unit of which it is at least one in three digits. None if it is too small."""
    for unit, factor in units.items():
        if abs(value) >= 0.9995 * factor:  # 999.5 MB would be written as 1000 MB
            return f"{_significant(value / factor, digits)} {unit}"
    return None


def nats(difference: float) -> str:
    """Return a difference between losses with one digit: 4e-7 nats."""
    return f"{rounded(difference, '.1g')} nats".replace("e-0", "e-")


def number_of(number: int, things: str) -> str:
    """Return a number of things, given as a plural: 1 rank, 4 ranks, 1 row per pass, 1 pass."""
    if number != 1:
        return f"{number} {things}"
    singular = re.sub(r"ies\b", "y", things, count=1)
    if singular == things:
        singular = re.sub(r"(?<=ss)es\b|(?<=ch)es\b|s\b", "", things, count=1)
    return f"1 {singular}"


def lasting(time_s: float) -> str:
    """Return a time in the unit in which people would say it: 40 s, 12 minutes, 27 hours, 3 days."""
    for unit, unit_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if time_s >= 2 * unit_s:
            return f"{rounded(time_s / unit_s, '.0f')} {unit}"
    return f"{rounded(time_s, '.0f')} s"


def times(ratio: float) -> str:
    """Return a ratio with two digits: 2.5 times, 1.0 times."""
    text = short(float(rounded(ratio, ".2g")))
    return "1.0 times" if text == "1" else f"{text} times"


def percent(share: float) -> str:
    """Return a share: 3.4%, or 12%."""
    return rounded(share, ".1%" if abs(share) < 0.1 else ".0%")


def _significant(value: float, digits: int) -> str:
    """Return a number with so many significant digits, without an exponent unless it is tiny or huge."""
    # Between these bounds g, too, would write an exponent: 12345 with four digits would be 1.234e+04.
    if value and not 1e-4 <= abs(value) < 1e7:
        return rounded(value, f".{digits}g")
    before_point = math.floor(math.log10(abs(value or 1))) + 1
    text = rounded(value, f".{max(0, digits - before_point)}f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- Print rows as a table with rich: as wide as the terminal, or as COLUMNS says, or else uncut

WIDTH = 100  # characters of a line of text at most
GAP = 2  # characters between two columns
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:bytes|[TGMk]i?B|s|min|h)\b)")  # where no line ends
GLUE = "\x1f"
NUMBER = re.compile(r"(?:-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:-[\d.]+)?%?(?: [^\W\d]+)?|never|-)?")  # in a cell
COMMAND = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:accelerate|deepspeed|pip|py-spy|python|study|torchrun) [^`]+)`")
SHORT_COMMAND = 60  # characters with its backticks, at most: a sentence goes on after it
TOGETHER = re.compile(r"""'[^']*'|"[^"]*"|--\S+ (?=[^-\s])""")  # of a command: a text, or an option and its value
COLUMNS = re.compile(r"[1-9]\d{1,3}")  # as a shell has them, of which a pipe does not tell
UNCUT = 400  # characters of a line of a table if the output is not a terminal


def show(rows: list[dict]) -> None:
    """Print rows: numbers and sizes right-aligned, unknown values as a dash. Columns without room are named below."""
    from rich.table import Table

    # Cells, headers too, are broken between words, so a column is at least as wide as its longest word.
    columns: dict[str, list[str]] = {}
    least: dict[str, int] = {}
    hidden = []
    room = free = console().width
    for name in dict.fromkeys(itertools.chain(*rows)):
        texts = [short(row.get(name)) for row in rows]
        word = max(map(len, " ".join([name, *texts]).split()), default=0)
        free -= word + GAP  # from here on it stays below zero: no later column jumps the queue
        if free < 0 and columns:
            hidden.append(name)
        else:
            columns[name], least[name] = texts, min(word, room)
    widths = _widths(columns, least, room)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in columns:
        justify: Literal["right", "left"] = "right" if all(map(NUMBER.fullmatch, columns[name])) else "left"
        table.add_column(name, width=widths[name], justify=justify, overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    if rows:
        console().print(table)
    if hidden:
        console().print(
            f"No room for: {', '.join(hidden)}. A wider terminal shows them, or a file or a pipe without COLUMNS."
        )


def _widths(columns: dict[str, list[str]], least: dict[str, int], room: int) -> dict[str, int]:
    """Return a width for each column. With widths of its own choice rich cuts cells."""
    widths = dict(least)
    free = room - sum(least.values()) - GAP * len(least)
    cells = {name: max(map(len, texts)) for name, texts in columns.items()}
    # What is left is for whole cells before whole headers, and first for the columns that want little more.
    for wanted in (cells, {name: max(most, len(name)) for name, most in cells.items()}):
        for name in sorted(columns, key=lambda name: wanted[name] - widths[name]):
            more = max(0, min(wanted[name] - widths[name], free))
            widths[name] += more
            free -= more
    return widths


def console() -> "Console":
    from rich.console import Console

    return Console(width=_columns(sys.stdout.isatty(), UNCUT), highlight=False, markup=False, emoji=False)


def _columns(is_terminal: bool, without: int) -> int:
    """Return the characters of a line: the terminal's, or those of COLUMNS; if nothing says it, `without`."""
    said = os.environ.get("COLUMNS", "")
    if is_terminal:
        return shutil.get_terminal_size().columns
    return int(said) if COLUMNS.fullmatch(said) else without


def say(*lines: str) -> None:
    """Print lines immediately, even if the output is a pipe."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def wrapped(text: str, indent: str, first: str, is_terminal: bool | None = None, end: str = "") -> list[str]:
    """Return the lines of a text. The first begins with `first`, the others with `indent`. All but the last end so.

    A command between backticks can be pasted: no line ends in a short one, and a long one has lines of its own.
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    width = min(WIDTH, _columns(is_terminal, WIDTH))
    room = min(SHORT_COMMAND, width - len(indent))
    text = COMMAND.sub(lambda found: found[0].replace(" ", GLUE) if len(found[0]) <= room else found[0], text)
    before, *others = COMMAND.split(BEFORE_UNIT.sub(GLUE, text))
    lines = [] if others and not before else _lines(before, indent, first, width, end)
    for command, after in zip(others[::2], others[1::2], strict=True):
        command = TOGETHER.sub(lambda found: found[0].replace(" ", GLUE), command)
        lines += _lines(command, f"{indent}      ", f"{indent}    ", width, " \\")  # as a shell reads it
        lines += _lines(after, indent, indent, width, end) if (after := after.lstrip(".,; ")) else []
    return lines


def _lines(text: str, indent: str, first: str, width: int, end: str) -> list[str]:
    wrapper = textwrap.TextWrapper(width - len(end), first, indent, break_long_words=False, break_on_hyphens=False)
    return f"{end}\n".join(wrapper.wrap(text)).replace(GLUE, " ").split("\n")


def say_wrapped(*texts: str, indent: str = "", first: str = "", end: str = "") -> None:
    for text in texts:
        say(*wrapped(text, indent, first, end=end))


def say_aside(text: str) -> None:
    """Write a sentence to stderr: wrapped on a terminal or to COLUMNS, else on one line, as programs read it."""
    is_terminal = sys.stderr.isatty()
    has_width = is_terminal or "COLUMNS" in os.environ
    lines = wrapped(text, "", "", is_terminal) if has_width else [text]
    sys.stderr.write("".join(f"{line}\n" for line in lines))


# --- Show on stderr what a slow command is doing

TICK_S = 10.0
Way = TypeVar("Way")
_place: ContextVar[str] = ContextVar("place", default="")  # among the ways that are gone through, as ` (arm 3 of 8)`


def one_by_one(ways: Sequence[Way], what: str) -> Iterator[Way]:
    """Yield each. What takes long says meanwhile which of how many it is: `arm 3 of 8`."""
    try:
        for number, way in enumerate(ways, 1):
            _place.set(f" ({what} {number} of {len(ways)})")
            yield way
    finally:
        _place.set("")


def during(text: str) -> None:
    """Say what takes long, once in a process for each way."""
    _say_once(f"{text}{_place.get()} ...")


@functools.cache
def _say_once(text: str) -> None:
    say_aside(text)


@functools.cache
def _begun(text: str) -> float:
    """Return when this process first said so: many short blocks may take long together."""
    return time.monotonic()


def _say_seconds(text: str, begun: float, ended: threading.Event) -> None:
    while not ended.wait(TICK_S - (time.monotonic() - begun) % TICK_S):
        say_aside(f"{text} ({time.monotonic() - begun:.0f} s so far) ...")


@contextlib.contextmanager
def bar(text: str) -> Iterator[None]:
    """As `during`, with a sign of life until the block ends: on a terminal a bar that moves, else the seconds so far.

    Nothing else may write there meanwhile.
    """
    if not sys.stderr.isatty():
        during(text)
        ended = threading.Event()
        threading.Thread(target=_say_seconds, args=(f"{text}{_place.get()}", _begun(text), ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(f"{text}{_place.get()}", total=None)
        yield
