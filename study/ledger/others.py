"""A check by what others measured: speeds in reports/outside/measurements.csv, one over another."""

import functools
import itertools
import re
from collections import defaultdict
from statistics import median

from study.errors import Stop
from study.io.numbers import short
from study.io.validation import nearest
from study.ledger.verdict import Finding
from study.predictor.outside.published import Row, rows

Patterns = dict[str, str]  # a regular expression for each of some columns


def published(*, of: Patterns, to: Patterns, where: Patterns = {}) -> Finding:  # noqa: B006
    """The speed of published trainings over that of others, of one source, model, machine and row length.

    Each side gives regular expressions for columns of reports/outside/measurements.csv. Speed is rows a second and GPU,
    so the batches may differ. The interval is that of all pairs.
    """
    pairs = [
        (row.source, _rows_per_s(row) / _rows_per_s(other))
        for group in _comparable()
        for row, other in itertools.product(group, repeat=2)
        if _matches(row, where | of) and _matches(other, where | to)
    ]
    if not pairs:
        return Finding(None, "no published pair", missing="published trainings of both sides on one machine")
    found = [ratio for _, ratio in pairs]
    sources = tuple(dict.fromkeys(source for source, _ in pairs))
    span = (min(found), max(found))
    words = (
        f"{len(pairs)} published pairs of {len(sources)} sources: {short(span[0])} to {short(span[1])} times the speed"
    )
    return Finding(median(found), words, span, evidence=sources)


@functools.cache
def _comparable() -> list[list[Row]]:
    """Return the rows with a known speed, those that may be compared with each other together."""
    groups = defaultdict(list)
    for row in rows():
        if row.step_s and isinstance(row.micro_batch, int):
            groups[row.source, row.model, row.gpu, row.n_gpus, row.seq].append(row)
    return [*groups.values()]


def _matches(row: Row, patterns: Patterns) -> bool:
    for name in patterns:
        if name not in Row.model_fields:
            raise Stop(f"{name!r} is not a column of measurements.csv", nearest(name, Row.model_fields))
    return all(re.search(pattern, str(getattr(row, name))) for name, pattern in patterns.items())


def _rows_per_s(row: Row) -> float:
    passes = row.grad_acc if isinstance(row.grad_acc, int) else 1
    return float(row.micro_batch or 0) * passes / float(row.step_s or 0)
