"""Compares records with each other: copies, seeds, initial weights, and numbers that have to agree.

If records disagree, the sealed ones are believed. If none or all are sealed, the median is believed.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

from study.records import metrics
from study.records.runs import Run

SAME_WEIGHTS = ("task", "model", "data", "tokenizer", "precision", "init", "seed", "lora_rank", "train_only")
SAME_FIRST_LOSS = (
    *("task", "model", "data", "tokenizer", "precision", "init", "seed", "sequence", "micro_batch"),
    *("accumulation", "ranks", "dropout", "attention", "checkpointing", "compile"),
)
DRAWN = ("random", "in_place")  # weights that depend on the seed
FIRST_LOSS_WITHIN = 0.05  # stage 3 draws the weights in parts: 0.5 % in the kept records


def disagreements(runs: Iterable[Run]) -> dict[Run, list[str]]:
    """Return why finished runs that disagree with others are not evidence, in words."""
    compared = [run for run in runs if run.done and not run.record.is_script]
    reasons: dict[Run, list[str]] = defaultdict(list)
    for check in (_copies, _seeds, _weights, _outliers):
        for run, words in check(compared):
            reasons[run].append(words)
    return reasons


def _groups(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    """Return groups of two or more runs with an equal key. Runs without a key are in none."""
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return [group for known, group in groups.items() if known and len(group) > 1]


def _doubtful(group: list[Run]) -> list[Run]:
    """Return the runs of which one must be wrong: those that are not sealed, or all if none or all are sealed."""
    return [run for run in group if not run.sealed] or group


def _other(run: Run, group: list[Run]) -> str:
    return next(each.name for each in group if each is not run)


def _copies(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find runs that took exactly the same times."""
    for group in _groups(runs, lambda run: _if_several(run.record.time.step_s)):
        for run in _doubtful(group):
            yield run, f"its step times are those of {_other(run, group)}"


def _seeds(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find runs of other seeds with the same curve, or the same drawn weights. Arms of a seed may have equal losses."""
    drawn = [run for run in runs if run.record.requested.init in DRAWN]
    alike = {
        "losses": _groups(runs, lambda run: _if_several(run.record.loss.train)),
        "initial weights": _groups(drawn, lambda run: run.record.observed.weights_checksum),
    }
    for what, groups in alike.items():
        for group in groups:
            most, *others = Counter(run.record.requested.seed for run in group).most_common(2)
            doubtful = _doubtful(group) if others else []
            if doubtful == group and others and most[1] > others[0][1]:
                doubtful = [run for run in group if run.record.requested.seed != most[0]]
            for run in doubtful:
                yield run, f"its {what} are those of another seed, in {_other(run, group)}"


def _weights(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find runs that do not start from the weights that their seed has in other arms, before losses are compared."""

    def key(run: Run) -> tuple:
        return run.key(only=SAME_WEIGHTS), *(run.record.software.get(name) for name in ("torch", "transformers"))

    for group in _groups((run for run in runs if run.record.observed.weights_checksum), key):
        sums = {run: run.record.observed.weights_checksum for run in group}
        counts = Counter(sums[run] for run in group if run.sealed) or Counter(sums.values())
        (most, times), *others = counts.most_common(2)
        believed = None if others and times == others[0][1] else most
        for run in group:
            unlike = [each for each in group if sums[each] != sums[run]]
            if sums[run] != believed and unlike:
                yield run, f"it starts from other weights than {unlike[0].name}, which has the same seed"


def _outliers(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find numbers that do not agree, between arms that begin with the same weights and rows, and between repeats."""
    for group in _groups(runs, lambda run: run.key(only=SAME_FIRST_LOSS)):
        yield from _far("the first loss", group, lambda run: metrics.dig(run.record, "loss.train.0"), FIRST_LOSS_WITHIN)
    for group in _groups(runs, lambda run: (run.key(without=["seed"]), str(run.machine))):
        for what, (number, within) in OF_REPEATS.items():
            yield from _far(what, group, number, within)


def _far(
    what: str, group: list[Run], number: Callable[[Run], float | None], within: float
) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose number is far from the median of those that are believed. An unknown one is not."""
    numbers = {run: known for run in group if (known := number(run)) is not None}
    if len(numbers) < 2:
        return
    middle = statistics.median([numbers[run] for run in numbers if run.sealed] or numbers.values())
    for run, known in numbers.items():
        if max(known, middle) > (1 + within) * min(known, middle):
            yield run, f"{what} is {known:.4g}, but {middle:.4g} in runs that have to agree"


def _if_several(numbers: list[float]) -> tuple[float, ...]:
    """Return the numbers as a key of a group. One number may be equal by chance, so it is no key."""
    return tuple(numbers) if len(numbers) > 1 else ()


def _calls(run: Run) -> int | None:
    return sum(kind.calls for kind in run.record.traffic.per_rank[0].values()) if run.traffic else None


def _after_step(run: Run) -> int | None:
    """Return the bytes that the first rank holds after a step."""
    components = run.record.memory.components.per_rank[0].after_step if run.components else {}
    return sum(components.values()) if components else None


# With how far they may be apart. The largest differences in the kept records are 0, 0, 0.5 %, 0 and 85 %.
OF_REPEATS: dict[str, tuple[Callable[[Run], float | None], float]] = {
    "what a step moves": (lambda run: sum(run.traffic.values()) if run.traffic else None, 1e-6),
    "the number of calls of a step": (_calls, 1e-6),
    "what is held after a step": (_after_step, 0.01),
    "the tracked peak": (lambda run: run.tracked_bytes, 0.01),
    "the median step": (lambda run: metrics.median_step_s(run.record), 4.0),
}
