"""Tables and runs in the groups that figures show."""

from typing import Any

import pandas as pd

from study.core import arms
from study.records.groups import by
from study.records.runs import Run

# What decides memory: two peaks are compared only where these are equal.
SETTINGS: tuple[str, ...] = (
    *("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "attention"),
    *("optimizer", "lora_rank", "train_only", "compile"),
)
ORDER = {arm: place for place, arm in enumerate(arms.all_paths())}


def columns(run: Run, *names: str) -> dict[str, Any]:
    """Return attributes of a run as columns."""
    return {name: run.facts[name] for name in names}


def in_order(run: Run) -> int:
    """Return the place of a run's arm in every table."""
    return ORDER.get(run.record.arm, len(ORDER))


def parts(rows: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    """Return the rows by the values of a column, in the order in which they come."""
    return {str(key): mine for key, mine in rows.groupby(name, sort=False, dropna=False)} if len(rows) else {}


def split_by_ranks(members_of: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Return the groups, split by the number of ranks, which their labels name.

    The runs of a lone process are in each part, because a rank of DDP should hold as much as they do.
    """
    split: dict[str, list[Run]] = {}
    for group, members in members_of.items():
        lone = [run for run in members if run.record.arm == "single"]
        shared = by([run for run in members if run not in lone], "ranks") or {(1,): []}
        split |= {f"{group}, ranks {ranks}": lone + mine for (ranks,), mine in shared.items()}
    return split


def largest_groups(rows: pd.DataFrame, most: int) -> list[pd.DataFrame]:
    """Return the groups that a notebook shows: those with the most arms on real ranks."""
    if rows.empty:
        return []
    real = rows["arm"].where(rows["kind"] == "real")
    counts = rows.assign(real=real).groupby("group", sort=False).agg(real=("real", "nunique"), arms=("arm", "nunique"))
    in_order = counts.sort_values(["real", "arms"], ascending=False, kind="stable").index[:most]
    return [rows[rows["group"] == group] for group in in_order]


def wide(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the sums of a column for each line, with a column for each source: `measured_bytes`."""
    if rows.empty:
        return rows
    sums = rows.groupby(["group", "line", "source"], sort=False)[value].sum().unstack("source", sort=False)
    return sums.add_suffix(f"_{value}").reset_index()
