"""Keeps the predictions of the project's own rows in a file, so that pages and answers need not compute them."""

import functools
import json
from dataclasses import asdict
from pathlib import Path

from study.errors import Stop
from study.predictor.outside import rows
from study.predictor.outside.compare import Compared, Quantity, compared, key_of
from study.predictor.outside.summary import summary
from study.predictor.outside.words import percent

FILE = rows.FOLDER / "predictions.json"
KEPT = ("key", "reason", "assumed", "quantities")  # what is kept of a row besides the row itself


def as_json(everything: list[Compared]) -> dict:
    groups = {name: asdict(group) for name, group in summary(everything).items()}
    return {"rows": [each.as_json() for each in everything], "summary": groups}


def write() -> None:
    """Predict all own rows again and write the file, a line for each row."""
    everything = as_json([compared(row) for row in rows.own()])
    lines = [json.dumps({name: row[name] for name in KEPT}) for row in everything["rows"]]
    text = ",\n".join(lines)
    FILE.write_text(f'{{"rows": [\n{text}\n],\n"summary": {json.dumps(everything["summary"], indent=1)}}}\n')


@functools.cache
def read(file: Path = FILE) -> dict:
    """The content of a file that `study outside --write` has written."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Stop(f"{file} cannot be read ({error})", "write it: study outside --write") from None


def own() -> list[Compared]:
    """The own rows with their kept predictions. A Stop if rows have changed since."""
    kept = read()["rows"]
    if [each["key"] for each in kept] != [key_of(row) for row in rows.own()]:
        raise Stop(f"{FILE.name} does not match the rows", "write it again: study outside --write")
    return [
        Compared(row, tuple(_quantity(**each) for each in said["quantities"]), said["reason"], tuple(said["assumed"]))
        for row, said in zip(rows.own(), kept, strict=True)
    ]


def _quantity(interval: list[float] | None, **values) -> Quantity:
    return Quantity(**values, interval=interval and tuple(interval))


def accuracy() -> str:
    """How accurate predictions were, in a sentence. For time, only rows count that were not used to fit."""
    groups, parts = read()["summary"], []
    for name, group, what in (("memory", "all", "cells"), ("time", "all of role test", "step times")):
        if errors := groups.get(group, {}).get(name):
            parts.append(
                f"{name}: median {percent(errors['median_absolute'])} off over {errors['count']} published {what}"
            )
    return f"Held against what others measured, {'; '.join(parts)} (study outside --against ours)."
