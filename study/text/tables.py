"""Rows as a table in the terminal, drawn by rich: as wide as the terminal, or uncut where the output is not one."""

import itertools
import sys

from rich.console import Console
from rich.table import Table

from study.text.numbers import short

GAP = 2  # columns between two of a table's
LEAST_TEXT = 8  # columns that a text has at least, and twice as many where it names the row
UNCUT = 400  # columns where nobody looks at a screen: another program reads it, or a file


def show(rows: list[dict]) -> None:
    """Print rows. Numbers are right-aligned; what is not known is a dash. Columns that have no room are named below."""
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
        look = {"justify": "right" if numeric[name] else "left", "no_wrap": numeric[name], "overflow": "fold"}
        table.add_column(name, min_width=least[name], **look)
    for row in rows:
        table.add_row(*(short(row.get(name)) for name in shown))
    console().print(table)
    if hidden := columns[len(shown) :]:
        console().print(f"No room for: {', '.join(hidden)}. A wider terminal shows them, or a file or a pipe.")


def _least_width(name: str, texts: list[str], numeric: bool) -> int:
    """A number is never broken, and a text not into pieces that nobody reads."""
    longest, word = max(map(len, texts)), max(map(len, name.split()), default=0)
    return max(longest if numeric else min(longest, LEAST_TEXT), word)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else UNCUT, highlight=False, markup=False, emoji=False)


def say(*lines: str) -> None:
    """Print lines now, also where the output is a pipe."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
