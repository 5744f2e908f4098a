"""Tables and runs in the groups that figures and sentences show."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from study.core import arms
from study.records.groups import by
from study.records.runs import Run

# What decides memory: two peaks are compared only where these are equal.
SETTINGS: tuple[str, ...] = (
    "task",
    "model",
    "precision",
    "micro_batch",
    "accumulation",
    "sequence",
    "checkpointing",
    "attention",
)
SETTINGS += ("optimizer", "lora_rank", "train_only", "compile")
SET_BY_MODEL = ("lr", "attention")  # their defaults depend on it
ORDER = {arm: place for place, arm in enumerate(arms.all_paths())}


def columns(run: Run, *names: str) -> dict:
    """Return attributes of a run as columns."""
    return {name: run.facts[name] for name in names}


def in_order(run: Run) -> int:
    """Return the place of a run's arm in every table."""
    return ORDER.get(run.record.arm, len(ORDER))


def parts(rows: pd.DataFrame, *names: str) -> dict[str, pd.DataFrame]:
    """Return the rows by the values of a column, or of several joined by commas, in the order in which they come."""
    if rows.empty:
        return {}
    groups = rows.groupby(list(names), sort=False, dropna=False)
    return {", ".join(map(str, key)): mine for key, mine in groups}


def sums(rows: pd.DataFrame, name: str, value: str) -> dict[str, float]:
    """Return the sum of one column by the values of another, in the order in which they come."""
    if rows.empty:
        return {}
    return {str(key): float(total) for key, total in rows.groupby(name, sort=False)[value].sum().items()}


def each(rows: pd.DataFrame) -> Iterator[Any]:
    """Return the rows one by one, their columns as attributes."""
    return iter(rows.itertuples())


def records(rows: pd.DataFrame) -> list[dict]:
    """Return the rows as dictionaries, in which what is not known is None."""
    known = rows.astype(object).where(rows.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]


def least(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return the row with the smallest value of a column, the first of equal ones."""
    return rows.sort_values(name, kind="stable").iloc[0]


def largest(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return the row with the largest value of a column, the first of equal ones."""
    return rows.sort_values(name, ascending=False, kind="stable").iloc[0]


def split_by_ranks(members_of: dict[str, list[Run]], with_lone: bool = False) -> dict[str, list[Run]]:
    """Return the groups, split by the number of ranks. Labels name that number if a group has several.

    `with_lone` adds the runs of a lone process to each part, because a rank of DDP should hold as much as they do; then
    all labels name the ranks.
    """
    split = {}
    for group, members in members_of.items():
        lone = [run for run in members if with_lone and run.record.arm == "single"]
        shared = by([run for run in members if run not in lone], "ranks") or {(1,): []}
        is_named = with_lone or len(shared) > 1
        for (ranks,), mine in shared.items():
            suffix = f", {ranks} rank{'s' if ranks > 1 else ''}" if is_named else ""
            split[group + suffix] = lone + mine
    return split


def largest_groups(rows: pd.DataFrame, most: int) -> list[pd.DataFrame]:
    """Return the groups that a notebook shows: those with the most arms on real ranks."""
    if rows.empty:
        return []
    name = "arm" if "arm" in rows else "line"
    real = rows[name].where(rows["kind"] == "real") if "kind" in rows else rows[name]
    by_group = rows.assign(real=real).groupby("group", sort=False)
    counts = by_group.agg(real=("real", "nunique"), lines=(name, "nunique"), rows=(name, "size"))
    in_order = counts.sort_values([*counts], ascending=False, kind="stable").index[:most]
    return [rows[rows["group"] == group] for group in in_order]
