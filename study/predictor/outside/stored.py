"""The stored predictions of the published rows, so that pages and answers need not compute them."""

import functools
import json
from pathlib import Path

from pydantic import TypeAdapter

from study.errors import Stop
from study.predictor.outside.published import FOLDER, rows
from study.predictor.outside.trainings import Compared, ComparedRow, key_of

PREDICTIONS = FOLDER / "predictions.json"
NUMBERS = TypeAdapter(tuple[Compared, ...])


@functools.cache
def read(file: Path = PREDICTIONS) -> dict:
    """Return the content of a file that `python -m study.cli.outside --write` has written."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Stop(f"{file} cannot be read ({error})", "write it: python -m study.cli.outside --write") from None


@functools.cache
def predictions() -> tuple[ComparedRow, ...]:
    """Return the project's own rows with their stored predictions. A Stop if rows have changed since."""
    stored = read()["rows"]
    if [row["key"] for row in stored] != [key_of(row) for row in rows()]:
        raise Stop(f"{PREDICTIONS.name} does not match the rows", "write it again: python -m study.cli.outside --write")
    return tuple(
        ComparedRow(row, NUMBERS.validate_python(each["quantities"]), each["reason"])
        for row, each in zip(rows(), stored, strict=True)
    )
