"""In which releases a claim of the ledger is right, from the answers that `study versions` kept."""

import json
from itertools import groupby
from pathlib import Path

import pandas as pd
from packaging.version import Version

from study.conform import changes, trials
from study.io.words import joined

PACKAGES = {"deepspeed_config": "deepspeed", "accelerate_yaml": "accelerate"}  # that a trial of this kind is about


def write(folder: Path) -> None:
    (folder / "ranges.json").write_text(json.dumps(content(folder), indent=1) + "\n", encoding="utf-8")


def content(folder: Path) -> dict[str, str]:
    """Return the releases in which each claim is right, for claims whose trials were run over releases."""
    rows, _ = changes.answers(folder)
    answers = {name: each.set_index("release")["answer"] for name, each in rows.groupby(["package", "question"])}
    right: dict[tuple[str, str], list[pd.Series]] = {}
    for trial in (row["trial"] for row in trials.installed()):
        question, packages = trials.key(trial), [PACKAGES.get(trial["what"], trial.get("of", "").partition(".")[0])]
        if trials.is_reproduction(trial):
            question, packages = trial["name"], list(PACKAGES.values())
        for package in packages:
            if (package, question) in answers:
                given = answers[package, question].map(json.loads)
                given = given[given.map(lambda answer: answer != changes.NO_ANSWER)]
                for name, values, tolerance in trials.claims({trials.key(trial)}):
                    same = [any(changes.is_right(answer, value, tolerance) for value in values) for answer in given]
                    right.setdefault((name, package), []).append(pd.Series(same, given.index))
    return {
        name: _words(package, pd.concat(each, axis=1).dropna().all(axis=1)) for (name, package), each in right.items()
    }


def _words(package: str, right: pd.Series) -> str:
    releases = sorted(right.index, key=Version)
    runs = [(now, list(each)) for now, each in groupby(releases, key=lambda release: bool(right[release]))]
    tried = f"{package} {releases[0]} to {releases[-1]}"
    if len(runs) == 1:
        return f"{tried}, all {len(releases)} that were tried" if runs[0][0] else f"in no release of {tried}"
    if len(runs) == 2:
        return f"{'right' if runs[1][0] else 'out of date'} since {package} {runs[1][1][0]}"
    return f"{package} {joined([f'{each[0]} to {each[-1]}' for now, each in runs if now])}"
