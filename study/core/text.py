"""What a user reads: numbers, units, tables, lines and progress. 1 GB is 10^9 bytes."""

import contextlib
import itertools
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from rich.console import Console  # rich takes longer to import than most answers

UNKNOWN = "-"


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short(value) -> str:
    """Any value as a table shows it: four significant digits, yes or no, and a dash for unknown values."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(short, value))
    if isinstance(value, float):
        return _significant(value, 4) if math.isfinite(value) else "never"
    return str(value)


def size(size_bytes: float) -> str:
    """Bytes with three significant digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= 0.9995 * factor:
            return f"{_significant(size_bytes / factor, 3)} {unit}"
    return number_of(round(size_bytes), "bytes")


def count(number: float) -> str:
    """A large number in words: 9.24 billion."""
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(number) >= 0.9995 * factor:
            return f"{_significant(number / factor, 3)} {word}"
    return f"{number:,.0f}"


def nats(difference: float) -> str:
    """A difference between losses with one digit: 4e-7 nats."""
    text = f"{difference:.1g}" if difference == 0 or difference >= 1e-3 else f"{difference:.0e}".replace("e-0", "e-")
    return f"{text} nats"


def number_of(number: float, things: str) -> str:
    """A number of things, given as a plural: 1 rank, 4 ranks, 1 call of deepspeed.initialize, 1.0 times the bytes."""
    shown = short(number)
    if shown != "1":
        return f"{shown} {things}"
    plural, space, rest = things.partition(" ")
    return f"1.0 {things}" if plural == "times" else f"1 {_singular(plural)}{space}{rest}"


def times(ratio: float) -> str:
    """A ratio with two digits: 2.5 times, 1.0 times."""
    return number_of(float(f"{ratio:.2g}"), "times")


def part_of(number: int, whole: int, things: str) -> str:
    """A part of some things, with its verb: 2 of 5 runs are, 1 of 5 runs is, the only run is."""
    if whole == 1:
        return f"the only {_singular(things)} is"
    return f"{number} of {whole} {things} {'is' if number == 1 else 'are'}"


def percent(share: float) -> str:
    """A share: 3.4%, or 12%."""
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def signed(share: float) -> str:
    """A share with its sign: -3.4%, or +12%."""
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"


def _singular(plural: str) -> str:
    """The word for one of a thing. Units such as s and GB/s have none."""
    if not plural.replace("-", "").isalpha() or len(plural) < 3 or plural.endswith("ss"):
        return plural
    if plural.endswith(("sses", "ches", "shes", "xes")):
        return plural.removesuffix("es")
    return f"{plural.removesuffix('ies')}y" if plural.endswith("ies") else plural.removesuffix("s")


def quantity(value, unit: str) -> str:
    """A value with its unit. Bytes are written as kB, MB, GB or TB."""
    number = is_number(value) and math.isfinite(value)
    if number and unit in ("bytes", "bytes/s"):
        return size(value) + unit.removeprefix("bytes")
    if number and unit == "parameters":
        return f"{count(value)} {unit if value != 1 else 'parameter'}"
    return number_of(value, unit) if number and unit else f"{short(value)} {unit}".rstrip()


def _significant(value: float, digits: int) -> str:
    """A number with so many significant digits, without an exponent unless it is tiny or huge."""
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        decimals = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.{digits}g}"


# --- The units in which documents write sizes, times and counts

BYTES = {"bytes": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COUNTS = {"": 1, "million ": 1e6, "billion ": 1e9, "trillion ": 1e12}
# What a unit measures, and its factor. A value without a unit measures a "number".
UNITS: dict[str, tuple[str, float]] = {name: ("bytes", factor) for name, factor in BYTES.items()}
UNITS |= {f"{name}/s": ("bytes/s", factor) for name, factor in BYTES.items()}
UNITS |= {f"{word}parameters": ("parameters", factor) for word, factor in COUNTS.items()}
UNITS |= {"s": ("s", 1), "seconds": ("s", 1), "ms": ("s", 1e-3), "%": ("number", 0.01)}
LONGEST_FIRST = sorted(UNITS, key=len, reverse=True)


def parsed_unit(unit: str) -> tuple[str, float]:
    """Return what a text's first unit measures, and its factor; the other words only explain."""
    words = unit.replace(" per second", "/s")
    names = (name for name in LONGEST_FIRST if re.match(rf"{re.escape(name)}(?![\w/])", words))
    return UNITS.get(next(names, ""), ("number", 1))


# --- Words as a sentence lists them


def joined(parts: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


# --- Print rows as a table with rich: as wide as the terminal, or uncut if the output is not a terminal

WIDTH = 100  # characters of a line of text
GAP = 2  # characters between two columns
UNCUT = 400  # characters of a line if the output is not a terminal


def show(rows: list[dict]) -> None:
    """Print rows. Numbers are right-aligned, unknown values are a dash. Columns without room are named below."""
    from rich.table import Table

    cells = {name: [short(row.get(name)) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
    least = {name: max(map(len, " ".join([name, *texts]).split()), default=0) for name, texts in cells.items()}
    ends = itertools.accumulate(width + GAP for width in least.values())
    shown = [name for name, end in zip(cells, ends, strict=True) if end <= console().width] or list(cells)[:1]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in shown:
        if all(isinstance(row.get(name), (int, float, type(None))) for row in rows):
            table.add_column(name, min_width=least[name], justify="right", no_wrap=True)
        else:
            table.add_column(name, min_width=least[name], overflow="fold")
    for texts in zip(*(cells[name] for name in shown), strict=True):
        table.add_row(*texts)
    if rows:
        console().print(table)
    if hidden := [name for name in cells if name not in shown]:
        console().print(f"No room for: {', '.join(hidden)}. A wider terminal shows them, or a file or a pipe.")


def console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else UNCUT, highlight=False, markup=False, emoji=False)


def say(*lines: str) -> None:
    """Print lines immediately, even if the output is a pipe."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    """Return the lines of a text. The first begins with `first`, the others with `indent`."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False) or [""]


def say_wrapped(*texts: str, indent: str = "", first: str = "") -> None:
    for text in texts:
        say(*wrapped(text, indent, first))


# --- Show on stderr what a slow command is doing: on a terminal a line with a clock, elsewhere one plain line

_texts: ContextVar[set[str] | None] = ContextVar("texts", default=None)  # None: no command runs that shows it


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Show progress within this block: a command does, a library does not."""
    token = _texts.set(set())
    try:
        yield
    finally:
        _texts.reset(token)


@contextlib.contextmanager
def during(text: str) -> Iterator[None]:
    """Show a text while this block runs."""
    texts = _texts.get()
    if texts is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(text)
            yield
        return
    if texts is not None and text not in texts:
        texts.add(text)
        sys.stderr.write(f"{text} ...\n")
    yield
