"""Keeps the predictions of the published rows in a file, so that pages and answers need not compute them."""

import functools
import json
from dataclasses import asdict
from pathlib import Path

from study.errors import Stop
from study.predictor.outside.errors import Accuracy, Compared, ComparedRow, accuracy_of, compare, key_of, summary
from study.predictor.outside.published import FOLDER, Quantity, rows
from study.predictor.outside.tables import accuracy_in_words

PREDICTIONS = FOLDER / "predictions.json"
KEPT = ("key", "reason", "quantities")  # what is kept of a row besides the row itself


def write() -> None:
    """Predict all own rows again, and write the file, a line for each row."""
    compared = as_json([compare(row) for row in rows()])
    lines = ",\n".join(json.dumps({name: row[name] for name in KEPT}) for row in compared["rows"])
    text = json.dumps(compared["summary"], indent=1)
    PREDICTIONS.write_text(f'{{"rows": [\n{lines}\n],\n"summary": {text}}}\n')


def as_json(members: list[ComparedRow]) -> dict:
    groups = {name: asdict(group) for name, group in summary(members).items()}
    return {"rows": [member.as_json() for member in members], "summary": groups}


@functools.cache
def read(file: Path = PREDICTIONS) -> dict:
    """Return the content of a file that `study outside --write` has written."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Stop(f"{file} cannot be read ({error})", "write it: study outside --write") from None


@functools.cache
def predictions() -> tuple[ComparedRow, ...]:
    """Return the project's own rows with their kept predictions. A Stop if rows have changed since."""
    kept = read()["rows"]
    if [row["key"] for row in kept] != [key_of(row) for row in rows()]:
        raise Stop(f"{PREDICTIONS.name} does not match the rows", "write it again: study outside --write")
    return tuple(
        ComparedRow(row, tuple(_compared(**each) for each in stored["quantities"]), stored["reason"])
        for row, stored in zip(rows(), kept, strict=True)
    )


def _compared(interval: list[float] | None, **values) -> Compared:
    return Compared(**values, interval=None if interval is None else (interval[0], interval[1]))


@functools.cache
def accuracies() -> dict[Quantity, Accuracy | None]:
    """Return how accurate the predictions of the project's own rows are."""
    members = list(predictions())
    return {"memory": accuracy_of("memory", members), "time": accuracy_of("time", members)}


def accuracy() -> str:
    """Return in a sentence how accurate the predictions of others' measurements are."""
    return accuracy_in_words(accuracies())
