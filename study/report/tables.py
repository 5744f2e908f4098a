"""Tables: runs in the groups that are shown, how a column is headed, and how a value is written.

Everything that is shown is escaped: records come from anybody.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from study.core.text import UNKNOWN, is_number, short, size
from study.records.groups import lines
from study.records.runs import Run

NUMBER = re.compile(r"[+-][\d.]+(e[+-]?\d+)?")  # one with a sign begins like a formula
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four: in East Asian width
# Headings of columns whose names are too short for a reader; CSV files keep the names. Of others, _ is a space.
HEADINGS = {
    "n": "runs",
    "micro_batch": "micro-batch",
    "accumulation": "micro-batches",
    "against": "compared with",
    "ours": "the evidence gives",
    "theirs": "the text says",
}


def heading(name: str) -> str:
    """Return the words above a column. A size has its unit in each cell."""
    if ", " in name:  # of a group of runs: the names of settings stay as they are
        return name
    return HEADINGS.get(name) or name.removesuffix("bytes").replace("_", " ").strip()


def cell(value: Any, name: str) -> str:
    """Return a value as a table shows it: four significant digits, sizes with a unit, a dash for what is not known."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return UNKNOWN
    return size(value) if name.endswith("bytes") and is_number(value) else short(value)


def as_html(rows: pd.DataFrame) -> str:
    """Return a table without the columns of which nothing is known. pandas escapes what it writes."""
    cells = {heading(str(name)): [cell(each, str(name)) for each in rows[name]] for name in rows}
    known = {name: column for name, column in cells.items() if not column or {*column} - {UNKNOWN, ""}}
    return pd.DataFrame(known).to_html(index=False, border=0)


def write_csv(path: Path, rows: pd.DataFrame) -> None:
    rows.astype(object).map(no_formula).rename(columns=no_formula).to_csv(path, index=False)


def no_formula(value: object) -> object:
    """Return a value for a CSV file that no spreadsheet takes for a formula: those begin with one of FORMULA."""
    if isinstance(value, str) and value.startswith(FORMULA) and not NUMBER.fullmatch(value):
        return f"'{value}"
    return value


# --- groups ---------------------------------------------------------------------------------------------------------

# What decides memory: two peaks are compared only where these are equal.
SETTINGS: tuple[str, ...] = (
    *("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "attention"),
    *("optimizer", "lora_rank", "train_only", "compile"),
)


def lines_of(members_of: dict[str, list[Run]]) -> Iterator[tuple[dict[str, Any], list[Run], list[Run]]]:
    """Yield for each line of a figure the columns that say what it is, its runs, and all runs of its group.

    What the repository keeps is marked, also where a reader's own runs are beside it.
    """
    for group, members in members_of.items():
        for line, repeats in lines(members).items():
            title = group + repeats[0].mark
            about = {"group": title, "panel": title, "line": line, "n": len(repeats)}
            yield about | {name: repeats[0].facts[name] for name in ("arm", "ranks", "kind")}, repeats, members


def stacked(about: dict[str, Any], value: str, parts_of: Mapping[str, Mapping[str, float]]) -> list[dict]:
    """Return the parts of a line's bars as rows. Each source, such as a measurement, has a bar."""
    return [
        about | {"source": source, "part": part, value: number}
        for source, parts in parts_of.items()
        for part, number in parts.items()
    ]


def parts(rows: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    """Return the rows by the values of a column, in the order in which they come."""
    return {str(key): mine for key, mine in rows.groupby(name, sort=False)}


def wide(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the sums of a column for each line, with a column for each source: `measured_bytes`."""
    if rows.empty:
        return rows
    # A source that a line lacks is unknown there, and not zero.
    sums = rows.groupby(["group", "line", "source"], sort=False)[value].sum().unstack("source", sort=False)
    return sums.add_suffix(f"_{value}").reset_index()
