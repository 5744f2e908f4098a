"""Tables for people and for spreadsheets: how a column is headed and a value is written.

Everything that is shown is escaped: records come from anybody.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from study.core.text import quantity, short

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
    "against": "compared with",
    "message": "error message",
}
UNITS = re.compile(r"_(s|mb|gb|bytes)$")  # at the end of a name


def heading(name: str) -> str:
    """Return the words above a column."""
    unit = {"_s": " s", "_mb": " MB", "_gb": " GB", "_bytes": ""}
    return HEADINGS.get(name) or UNITS.sub(lambda found: unit[found[0]], name).replace("_", " ")


def cell(value: Any, name: str) -> str:
    """Return a value as a table shows it: four significant digits, sizes with a unit, a dash for what is not known."""
    if value == "" or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return short(None)
    return quantity(value, "bytes") if name.endswith("bytes") else short(value)


def as_html(rows: pd.DataFrame, columns: Iterable[str] = ()) -> str:
    """Return a table for people."""
    shown = rows[[*columns]] if columns else rows
    cells = {heading(str(name)): [cell(each, str(name)) for each in shown[name]] for name in shown}
    return pd.DataFrame(cells).to_html(index=False, border=0)


def write_csv(path: Path, rows: pd.DataFrame) -> None:
    """Write a table as CSV, every digit of it."""
    texts = rows.select_dtypes(exclude="number").astype(object).map(no_formula)
    rows.assign(**{str(name): texts[name] for name in texts}).rename(columns=no_formula).to_csv(path, index=False)


def no_formula(value: object) -> object:
    """Return a value for a CSV file that no spreadsheet takes for a formula: those begin with one of FORMULA."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
