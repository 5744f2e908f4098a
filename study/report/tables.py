"""Tables for people and for spreadsheets: the only place that knows how a column is headed and a value is written."""

import html
import itertools
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from study.io.numbers import quantity, short
from study.report.grouping import records
from study.report.style import conditions

FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four: in East Asian width
# Headings of columns whose names are too short for a reader; CSV files keep the names. Of others, _ is a space.
HEADINGS = {
    "n": "runs",
    "micro_batch": "rows per pass",
    "rows_per_step": "rows per step",
    "accumulation": "passes",
    "step_s": "s per step",
    "median": "s per step",
    "low": "from",
    "high": "to",
    "plainly": "in words",
    "against": "compared with",
    "message": "error message",
    "peak_mb": "peak MB",
    "moved_mb": "moved MB",
    "saved_mb": "saved MB",
    "vs_a": "over A's",
    "mbit": "Mbit/s",
    "largest_difference": "largest difference",
    "seeds_differ_by": "seeds differ by",
}
UNITS = {"_s": " s", "_mb": " MB", "_gb": " GB", "_bytes": ""}  # at the end of a name


def heading(name: str) -> str:
    """Return the words above a column."""
    if name in HEADINGS:
        return HEADINGS[name]
    for suffix, unit in UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " ") + unit
    return name.replace("_", " ")


def write_csv(path: Path, rows: pd.DataFrame) -> None:
    """Write a table as CSV, every digit of it."""
    rows.astype(object).map(no_formula).rename(columns=no_formula).to_csv(path, index=False)


def no_formula(value: object) -> object:
    """Return a value for a CSV file that no spreadsheet takes for a formula: those begin with one of FORMULA."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def as_html(rows: pd.DataFrame, columns: Iterable[str] = ()) -> str:
    """Return a table for people: four significant digits, sizes with a unit, a dash for what is not known.

    Where rows of one group follow each other, the group is a heading above them and no column.
    """
    names = list(columns) or [str(name) for name in rows]
    rows_of_table = records(rows)
    together = [(group, list(mine)) for group, mine in itertools.groupby(rows_of_table, lambda row: row.get("group"))]
    if "group" in names and 2 * len(together) <= len(rows_of_table):
        names.remove("group")
    else:
        together = [(None, rows_of_table)]
    lines = ["<table>", f"<thead><tr>{_cells('th', (html.escape(heading(name)) for name in names))}</tr></thead>"]
    for group, mine in together:
        lines.append("<tbody>")
        if group is not None:
            head = (
                f'<th colspan="{len(names)}" scope="rowgroup"><span>{html.escape(conditions(str(group)))}</span></th>'
            )
            lines.append(f'<tr class="group">{head}</tr>')
        lines += [f"<tr>{_cells('td', (_cell(name, row.get(name)) for name in names))}</tr>" for row in mine]
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>"])


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def _cell(name: str, value: object) -> str:
    if value is None:
        return short(None)
    if name == "verdict":
        return f"<span class='verdict {str(value).partition(' ')[0]}'>{html.escape(str(value))}</span>"
    if name == "group":
        return html.escape(conditions(str(value)))
    return html.escape(quantity(value, "bytes") if name.endswith("_bytes") else short(value))
