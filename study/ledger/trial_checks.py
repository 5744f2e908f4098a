"""Checks that ask the installed libraries. Their arguments are those of a trial of `study.probes`, or of a property."""

import functools
import inspect
from collections.abc import Callable, Iterable

from study.io import files
from study.io.parsing import from_json
from study.ledger.arguments import Check
from study.ledger.verdict import NOT_TESTED, Finding
from study.probes import answers, worker
from study.probes.answers import REPRODUCTION
from study.spec.arms import ROOT

CONFORM = ROOT / "reports" / "conform"
MAX_BYTES = 2**20


def _check(function: Callable) -> Check:
    """Return a check that takes the arguments of a trial and finds what the trial finds."""

    @functools.wraps(function)
    def check(**given) -> Finding:
        trial = trial_of(function, given)
        if stop := answers.refusal(trial):
            raise stop
        if missing := answers.not_installed():
            words = f"{', '.join(missing)} is not installed here"
            return Finding(None, words, without=NOT_TESTED, missing="run make setup, then study claims again")
        versions = tuple(f"{name} {answers.versions()[name]}" for name in ("deepspeed", "accelerate", "transformers"))
        (answer,) = answers.ask([trial])
        if isinstance(answer, str):
            words = f"the trial itself failed: {answer}"
            return Finding(None, words, evidence=versions, missing="a trial that runs to its end")
        script = f"reproductions/{trial['name']}.py: " if trial["what"] == REPRODUCTION else ""
        return Finding(answer.found, f"{script}{answer.told}", evidence=versions)

    return check


def trial_of(function: Callable, given: dict) -> dict:
    """Return the trial with all defaults of the function, so that equal trials have equal keys."""
    return {"what": function.__name__} | (function.__kwdefaults__ or {}) | given


def trials_of(function: Check, calls: Iterable[dict]) -> list[dict]:
    """Return the trials that calls of a check ask for, without those that are refused. A property asks for none."""
    if function is holds:
        return []
    trials = [trial_of(inspect.unwrap(function), given) for given in calls]
    return [trial for trial in trials if not answers.refusal(trial)]


@_check
def reproduction(*, name: str) -> Finding:
    """Return what a script of `reproductions/` finds."""
    raise NotImplementedError  # its signature is all that is used


TRIALS = {name: _check(function) for name, function in worker.TRIALS.items()} | {REPRODUCTION: reproduction}


def holds(*, adapter: str, name: str) -> Finding:
    """Return whether a property holds with an adapter, by the committed results of `study conform`."""
    try:
        content = from_json(files.read_below(CONFORM, files.safe_name(f"{adapter}.json"), MAX_BYTES))
        (row,) = [{"status": "holds", "words": ""} | each for each in content["results"] if each["property"] == name]
    except (OSError, ValueError):
        words = f"there is no result of {name} with {adapter}"
        return Finding(None, words, without=NOT_TESTED, missing=f"run study conform {adapter}")
    working = f"reports/conform/{adapter}.json: {name} {row['status']}{': ' if row['words'] else ''}{row['words']}"
    evidence = tuple(f"{library} {release}" for library, release in content["versions"].items() if release)
    return Finding(row["status"] == "holds", working, evidence=evidence)
