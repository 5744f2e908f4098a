"""Print rows as a table with rich: as wide as the terminal, or uncut if the output is not a terminal."""

import itertools
import sys
import textwrap

from rich.console import Console
from rich.table import Table

from study.core.numbers import short

WIDTH = 100  # characters of a line of text
GAP = 2  # characters between two columns
UNCUT = 400  # characters of a line if the output is not a terminal


def show(rows: list[dict]) -> None:
    """Print rows. Numbers are right-aligned, unknown values are a dash. Columns without room are named below."""
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


def console() -> Console:
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
