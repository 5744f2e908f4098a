"""Over which releases a claim of the ledger is right, from the answers that `study versions` kept."""

import json
from itertools import groupby
from pathlib import Path

import pandas as pd
from packaging.version import Version

from study.conform import changes, trials
from study.io.words import joined

PACKAGES = {"deepspeed_config": "deepspeed", "accelerate_yaml": "accelerate"}  # of a trial's kind


def write(folder: Path) -> None:
    (folder / "ranges.json").write_text(json.dumps(content(folder), indent=1) + "\n", encoding="utf-8")


def content(folder: Path) -> dict[str, str]:
    """Return the range of each claim whose trials all releases of a library answered."""
    rows, _ = changes.answers(folder)
    answers = {name: each.set_index("release")["answer"] for name, each in rows.groupby(["package", "question"])}
    right: dict[str, list[pd.Series]] = {}
    packages: dict[str, str] = {}
    for trial in (row["trial"] for row in trials.installed()):
        package = PACKAGES.get(trial["what"], trial.get("of", "").partition(".")[0])
        given = answers.get((package, trials.key(trial)))
        for name, values, *_ in trials.claims({trials.key(trial)}) if given is not None else ():
            same = [any(_equal(json.loads(answer), value) for value in values) for answer in given]
            right.setdefault(name, []).append(pd.Series(same, given.index))
            packages[name] = package
    return {name: _words(packages[name], pd.concat(each, axis=1).all(axis=1)) for name, each in right.items()}


def _equal(answer: object, value: object) -> bool:
    if {type(answer), type(value)} <= {int, float}:
        return answer == value
    return str(answer) == str(value)


def _words(package: str, right: pd.Series) -> str:
    releases = sorted(right.index, key=Version)
    runs = [(now, list(each)) for now, each in groupby(releases, key=lambda release: bool(right[release]))]
    tried = f"{package} {releases[0]} to {releases[-1]}"
    if len(runs) == 1:
        return f"{tried}, all {len(releases)} that were tried" if runs[0][0] else f"in no release of {tried}"
    if len(runs) == 2:
        return f"{'right' if runs[1][0] else 'out of date'} since {package} {runs[1][1][0]}"
    return f"{package} {joined([f'{each[0]} to {each[-1]}' for now, each in runs if now])}"
