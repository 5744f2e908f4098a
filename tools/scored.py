"""How far predictions are from the rows of reports/outside, by set; and what is refused, and why.

`python tools/scored.py` shows it; `--write` predicts all rows again, and stores the result in
reports/outside/predictions.csv. Most models are traced for that, which takes an hour where the cache is empty.
`--gpus` counts instead how many peaks of our own runs on a GPU were predicted before, and how well.
"""

import argparse
import itertools
import sys
from collections import Counter

import pandas as pd

from study.core.text import say, show
from study.predict.outside import published, scores
from study.predict.outside.predicting import why_not
from study.report.topics import on_gpu


def by_set() -> list[dict]:
    """Return the figures of each set. 0: rows that the predictor met first. The last one is unseen by fits."""
    return scores.lines_of(scores.numbers(), lambda each: str(published.set_number(each.set)))


def store_predictions() -> None:
    """Predict all rows again. `first` stays as it is; a set that is new has its first predictions now."""
    old = {(each.key, each.quantity): each.first for each in scores.numbers()}
    scored = {each.set for each in scores.numbers()}  # somebody may have seen an error on these sets
    lines = []
    for each in itertools.chain.from_iterable(scores.predict(published.rows())):
        first = old.get((each.key, each.quantity)) if each.set in scored else each.ours
        lines.append(each.model_dump(exclude={"why"}) | {"first": first})
    scores.numbers.cache_clear()
    pd.DataFrame(lines).to_csv(scores.FILE, index=False, float_format="%.6g")


def refused() -> list[dict]:
    """Return how many numbers have no prediction, by the reason."""
    known = {row.key: row for row in published.rows()}
    reasons: Counter[tuple[str, str]] = Counter()
    for each in scores.numbers():
        if each.ours is None:
            reasons[each.quantity, why_not(known[each.key], each.quantity) or "the predictor refuses it"] += 1
    return [{"quantity": quantity, "numbers": n, "why": why} for (quantity, why), n in reasons.most_common()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store what is predicted now")
    parser.add_argument("--gpus", action="store_true", help="our own runs on GPUs, at first sight")
    options = parser.parse_args()
    if options.gpus:
        show(on_gpu.at_first_sight().to_dict("records"))
        sys.exit()
    if options.write:
        store_predictions()
    scores.show_lines(by_set())
    say("", "refused:")
    show(refused())
