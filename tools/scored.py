"""How far predictions are from the rows of reports/outside, by set. 0: rows that the predictor met first.

`python tools/scored.py` shows it; `--write` predicts all rows again, and stores the result in
reports/outside/predictions.csv. Most models are traced for that, which takes an hour where the cache is empty.
"""

import sys

import pandas as pd

from study.predict.outside import published, scores


def by_set() -> list[dict]:
    """Return the figures of each set. The last one is unseen by fits."""
    return scores.lines_of(scores.numbers(), lambda each: str(published.set_number(each.set)))


def store_predictions() -> None:
    """Predict all rows again. `first` stays as it is; a set that is new has its first predictions now."""
    old = {(each.key, each.quantity): each.first for each in scores.numbers()}
    scored = {each.set for each in scores.numbers()}  # somebody may have seen an error on these sets
    lines = []
    for each in scores.predict(published.rows()):
        first = old.get((each.key, each.quantity)) if each.set in scored else each.ours
        lines.append(each.model_dump() | {"first": first})
    scores.numbers.cache_clear()
    pd.DataFrame(lines).to_csv(scores.FILE, index=False, float_format="%.6g")


if __name__ == "__main__":
    if "--write" in sys.argv:
        store_predictions()
    scores.show_lines(by_set())
