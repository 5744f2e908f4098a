"""Errors of the predictions of published rows: by row, by source, and over all sources."""

import json
from collections.abc import Iterable
from typing import get_args

import pandas as pd

from study.predictor.outside import published, stored
from study.predictor.outside.published import Quantity, Role, sources
from study.predictor.outside.stored import percent, signed
from study.predictor.outside.trainings import Compared, ComparedRow, compare

TOO_LOW = 0.1  # what is predicted lower than this ends in a lack of memory
FLAT = "flat 40 % MFU"
COLUMNS = ["source", "quantity", "model", "gpu", "gpus", "arm", "role", "complete", "error", "inside", FLAT, "why"]


def table(members: Iterable[ComparedRow]) -> pd.DataFrame:
    """Return a row for each number that is predicted and measured. Errors are shares of the measured value."""
    rows = []
    for member in members:
        row = member.row
        about = {"source": row.source, "model": row.model, "gpu": row.gpu, "gpus": row.n_gpus, "arm": row.arm}
        about |= {"role": row.role, "complete": member.complete}
        for each in member.quantities:
            flat = each.others[FLAT] / each.measured - 1 if FLAT in each.others else None
            numbers = {"quantity": each.quantity, "error": each.error, "inside": each.inside, FLAT: flat}
            rows.append(about | numbers | {"why": member.why_off(each), "missed": each.missed})
    return pd.DataFrame(rows, columns=[*COLUMNS, "missed"])


def summary(errors: pd.Series, inside: pd.Series) -> dict:
    """Return the errors of some predictions in words."""
    off = errors.abs()
    return {
        "rows": len(errors),
        "median": signed(errors.median()),
        "off by": percent(off.median()),
        "worst": signed(max(errors, key=abs)),
        "within 10 %": percent((off <= 0.1).mean()),
        "within 30 %": percent((off <= 0.3).mean()),
        "in interval": percent(inside.dropna().mean()) if inside.notna().any() else None,
    }


def summary_of(members: list[Compared]) -> dict:
    """Return the errors of some numbers in words."""
    inside = pd.Series([each.inside for each in members], dtype=object)
    return summary(pd.Series([each.error for each in members]), inside)


def lines(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the errors of each source, of each role, and of all rows."""
    rows = table(members)
    groups = {str(name): group for name, group in rows.groupby("source", sort=False)}
    groups |= {f"all of role {role}": rows[rows["role"] == role] for role in get_args(Role)}
    found = []
    for name, group in (groups | {"all": rows}).items():
        for quantity in get_args(Quantity):
            mine = group[group["quantity"] == quantity]
            if len(mine):
                own_error = sources()[name].own_error.get(quantity) if name in sources() else None
                found.append({"source": name, "quantity": quantity} | _line(mine, own_error))
    return found


def _line(rows: pd.DataFrame, own_error: float | None) -> dict:
    complete = rows.loc[rows["complete"], "error"].abs()
    flat = rows[FLAT].astype(float).abs().median()
    return summary(rows["error"], rows["inside"]) | {
        "complete rows": len(complete) or None,
        "off by (complete)": percent(complete.median()) if len(complete) else None,
        "within 10 % (complete)": _counted(complete, 0.1),
        "within 30 % (complete)": _counted(complete, 0.3),
        FLAT: None if pd.isna(flat) else percent(flat),
        "its simulator": None if own_error is None else percent(own_error),
    }


def _counted(off: pd.Series, limit: float) -> str | None:
    return f"{(off <= limit).sum()} of {len(off)}" if len(off) else None


def misses(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the predictions that missed, with their explanations. Rows that only differ in their batch are one."""
    rows = table(members)
    rows = rows[rows["missed"]]
    found = []
    by = ["source", "quantity", "model", "gpu", "gpus", "arm", "complete", "why"]
    for (source, quantity, model, gpu, gpus, arm, complete, why), mine in rows.groupby(by, sort=False, dropna=False):
        ends = dict.fromkeys((signed(mine["error"].min()), signed(mine["error"].max())))
        about = {"source": source, "quantity": quantity, "model": model, "on": f"{gpus} x {gpu}", "arm": arm}
        about |= {"complete": "yes" if complete else "no", "rows": len(mine), "off by": " to ".join(ends)}
        found.append(about | {"why": why if isinstance(why, str) else "not explained"})
    return found


def accuracies(members: Iterable[ComparedRow]) -> dict[str, dict]:
    """Return how far off predictions are of rows that no constant was fitted to. Each source weighs the same.

    `too_low`: the share of rows that are predicted more than 10 % too low. `inside`: the share of rows inside the
    interval, of sources that did not decide its width.
    """
    rows = table(members)
    found = {}
    for quantity in get_args(Quantity):
        mine = rows[(rows["quantity"] == quantity) & ((quantity == "memory") | (rows["role"] != "fit"))]
        if not len(mine):
            continue
        tested = mine[(mine["role"] == "test") & mine["inside"].notna()]
        inside = tested["inside"].astype(float).groupby(tested["source"]).mean().mean()
        found[quantity] = {
            "rows": len(mine),
            "sources": mine["source"].nunique(),
            "median_error": float(mine["error"].abs().groupby(mine["source"]).median().median()),
            "too_low": float((mine["error"] < -TOO_LOW).groupby(mine["source"]).mean().mean()),
            "inside": None if pd.isna(inside) else float(inside),
        }
    return found


def write() -> None:
    """Predict all own rows again, and write the file: a line for each row, and the accuracy."""
    members = [compare(row) for row in published.rows()]
    kept = [{name: member.as_json()[name] for name in ("key", "reason", "quantities")} for member in members]
    rows = ",\n".join(map(json.dumps, kept))
    accuracy = json.dumps(accuracies(members), indent=1)
    stored.PREDICTIONS.write_text(f'{{"rows": [\n{rows}\n],\n"accuracy": {accuracy}}}\n')
