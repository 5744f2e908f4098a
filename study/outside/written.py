"""The predictions of the project's own rows as a file, so that pages and answers need not compute them."""

import functools
import json
from dataclasses import asdict

from study.errors import Stop
from study.outside import rows
from study.outside.compare import Compared, compared
from study.outside.summary import summary

FILE = rows.FOLDER / "predictions.json"


def as_json(everything: list[Compared]) -> dict:
    groups = {name: asdict(group) for name, group in summary(everything).items()}
    return {"rows": [each.as_json() for each in everything], "summary": groups}


def write() -> None:
    """Predict all own rows again, and keep the result."""
    FILE.write_text(json.dumps(as_json([compared(row) for row in rows.own()]), indent=1) + "\n")


@functools.cache
def read() -> dict:
    try:
        return json.loads(FILE.read_text())
    except (OSError, ValueError) as error:
        raise Stop(f"{FILE} cannot be read ({error})", "write it: study outside --write") from None


def accuracy() -> str:
    """How accurate such predictions were, in a sentence. Of time, only rows count that nothing was fitted on."""
    groups, parts = read()["summary"], []
    for name, group, what in (("memory", "all", "cells"), ("time", "all of role test", "step times")):
        if errors := groups.get(group, {}).get(name):
            parts.append(f"{name}: median {errors['median_absolute']:.0%} off over {errors['count']} published {what}")
    return f"Held against what others measured, {'; '.join(parts)} (study outside --against ours)."
