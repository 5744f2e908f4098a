"""Prints rows as a table with rich: as wide as the terminal, or uncut if the output is not a terminal."""

import itertools
import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

from study.io.numbers import short

GAP = 2  # characters between two columns
LEAST_TEXT = 8  # characters of a text that are shown at least; twice as many for the first column
UNCUT = 400  # characters of a line if the output is not a terminal


def show(rows: list[dict]) -> None:
    """Print rows. Numbers are right-aligned, unknown values are a dash. Columns without room are named below."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name: all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in columns}
    least = {name: _least_width(name, [short(row.get(name)) for row in rows], numeric[name]) for name in columns}
    least[columns[0]] = max(
        least[columns[0]], min(2 * LEAST_TEXT, max(len(short(row.get(columns[0]))) for row in rows))
    )
    ends = itertools.accumulate(width + GAP for width in least.values())
    shown = [name for name, end in zip(columns, ends, strict=True) if end <= console().width] or columns[:1]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in shown:
        justify: Literal["left", "right"] = "right" if numeric[name] else "left"
        table.add_column(name, min_width=least[name], justify=justify, no_wrap=numeric[name], overflow="fold")
    for row in rows:
        table.add_row(*(short(row.get(name)) for name in shown))
    console().print(table)
    if hidden := columns[len(shown) :]:
        console().print(f"No room for: {', '.join(hidden)}. A wider terminal shows them, or a file or a pipe.")


def _least_width(name: str, texts: list[str], numeric: bool) -> int:
    """The least width of a column: numbers are never wrapped, and texts not into tiny pieces."""
    longest, word = max(map(len, texts)), max(map(len, name.split()), default=0)
    return max(longest if numeric else min(longest, LEAST_TEXT), word)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else UNCUT, highlight=False, markup=False, emoji=False)


def say(*lines: str) -> None:
    """Print lines immediately, even if the output is a pipe."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
