"""What a notebook shows: a figure with the data behind it, a table, a sentence, and what is missing.

Each output carries its data as CSV beside it, under a type that Jupyter does not show: the report writes it to a file.
"""

import csv
import html
import io
from collections.abc import Callable

from IPython.display import Markdown, display

from study.record import Stop
from study.style import svg
from study.table import shown

CSV, NAME = "text/csv", "study_name"
MOST_ROWS = 60  # of a table in a notebook; the CSV has them all


def figure(draw: Callable, rows: list[dict], name: str, make: str = "", **options) -> None:
    """Draw a table of rows, or say which command makes what it needs."""
    if not rows:
        missing(f"the figure “{name}”", make)
        return
    made = svg(draw(rows, **options), name)
    bundle = {"image/svg+xml": made, CSV: as_csv(rows), "text/plain": f"figure {name}"}
    display(bundle, raw=True, metadata={NAME: name})


def figures(draw: Callable, rows: list[dict], name: str, make: str = "", most: int = 4, **options) -> None:
    """One figure for each group, those with most rows first; which groups were left out is said."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    chosen = sorted(groups, key=lambda group: -len(groups[group]))
    for number, group in enumerate(chosen[:most], 1):
        figure(draw, groups[group], f"{name}-{number}" if len(chosen) > 1 else name, **options)
    if not rows:
        missing(f"the figure “{name}”", make)
    if left := chosen[most:]:
        say(f"Not drawn: {len(left)} more group{'s' * (len(left) > 1)} with fewer rows. The tables have all of them.")


def table(rows: list[dict], name: str, make: str = "", columns: list[str] | None = None) -> None:
    """Rows as a table, or what makes them."""
    if not rows:
        missing(f"the table “{name}”", make)
        return
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    bundle = {"text/html": as_html(rows[:MOST_ROWS], columns), CSV: as_csv(rows), "text/plain": f"table {name}"}
    display(bundle, raw=True, metadata={NAME: name})
    if len(rows) > MOST_ROWS:
        say(f"The first {MOST_ROWS} of {len(rows)} rows; the data has all of them.")


def say(text: str | list[str]) -> None:
    """Sentences, as Markdown. Nothing where there is nothing to say."""
    text = text if isinstance(text, str) else " ".join(text)
    if text:
        display(Markdown(text))


def missing(what: str, make: str) -> None:
    """Name what is not there, and the command that makes it."""
    say(f"> **Not here yet:** {what}." + (f" It is made by `{make}`." if make else ""))


def attempt(table_of: Callable, evidence) -> list[dict]:
    """A table that needs what a laptop may lack: without it a sentence, and no rows."""
    try:
        return table_of(evidence)
    except Stop as stop:
        say(f"> **Not here:** {stop.what}. What to do: {stop.remedy}.")
        return []


def as_html(rows: list[dict], columns: list[str]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(_td(row.get(name)) for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _td(value) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    exact = f" class='number' data-value='{value!r}'" if is_number else ""
    return f"<td{exact}>{html.escape(shown(value))}</td>"


def as_csv(rows: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
