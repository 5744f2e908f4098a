"""Compares records with each other: copies, seeds, initial weights, and numbers that have to agree.

If records disagree, the sealed ones are believed. If none or all are sealed, the median is believed.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from study.ledger.audit import DRAWN
from study.records.runs import Run

SAME_WEIGHTS = ("task", "model", "data", "tokenizer", "precision", "init", "seed", "lora_rank", "train_only")
SAME_FIRST_LOSS = (
    *("task", "model", "data", "tokenizer", "precision", "init", "seed", "sequence", "micro_batch"),
    *("accumulation", "ranks", "dropout", "attention", "checkpointing", "compile"),
)
# The largest differences in the kept records are 0.5 % (stage 3 draws the weights in parts), 0, 0, and 85 %.
WITHIN = {"the first loss": 0.05, "what a step moves": 1e-6, "the tracked peak": 0.01, "the median step": 4.0}
WITHIN |= {"the number of calls of a step": 1e-6, "what is held after a step": 0.01}


def disagreements(runs: Iterable[Run]) -> dict[Run, list[str]]:
    """Return why finished runs that disagree with others are not evidence, in words."""
    compared = [run for run in runs if run.done and not run.record.is_script]
    found: dict[Run, list[str]] = defaultdict(list)
    for check in (_copies, _seeds, _weights, _outliers):
        for run, words in check(compared):
            found[run].append(words)
    return found


def _groups(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    """Return groups of two or more runs with an equal key."""
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _doubtful(group: list[Run]) -> list[Run]:
    """Return the runs of which one must be wrong: those that are not sealed, or all if none or all are sealed."""
    return [run for run in group if not run.sealed] or group


def _other(run: Run, group: list[Run]) -> str:
    return next(each.name for each in group if each is not run)


def _copies(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find runs that took exactly the same times."""
    timed = [run for run in runs if len(run.record.time.step_s) > 1]
    for group in _groups(timed, lambda run: tuple(run.record.time.step_s)):
        for run in _doubtful(group):
            yield run, f"its step times are those of {_other(run, group)}"


def _seeds(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Find runs of other seeds with the same curve, or the same drawn weights. Arms of a seed may have equal losses."""
    curves = [run for run in runs if len(run.record.loss.train) > 1]
    drawn = [run for run in runs if run.record.observed.weights_checksum and run.record.requested.init in DRAWN]
    alike = {
        "losses": _groups(curves, lambda run: tuple(run.record.loss.train)),
        "initial weights": _groups(drawn, lambda run: run.record.observed.weights_checksum),
    }
    for what, groups in alike.items():
        for group in groups:
            for run in _of_other_seeds(group):
                yield run, f"its {what} are those of another seed, in {_other(run, group)}"


def _of_other_seeds(group: list[Run]) -> list[Run]:
    """Return the doubtful runs of a group that must have one seed."""
    seeds = Counter(run.record.requested.seed for run in group).most_common(2)
    if len(seeds) < 2:
        return []
    (most, times), (_, fewer) = seeds
    doubtful = _doubtful(group)
    if len(doubtful) == len(group) and times > fewer:
        return [run for run in group if run.record.requested.seed != most]
    return doubtful


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
        yield from _far("the first loss", {run: run.record.loss.train[0] for run in group if run.record.loss.train})
    for group in _groups(runs, lambda run: (run.key(without=["seed"]), str(run.machine))):
        yield from _far("what a step moves", {run: sum(run.traffic.values()) for run in group if run.traffic})
        calls = {
            run: sum(kind.calls for kind in run.record.traffic.per_rank[0].values()) for run in group if run.traffic
        }
        yield from _far("the number of calls of a step", calls)
        after = {run: sum(_after_step(run)) for run in group if _after_step(run)}
        yield from _far("what is held after a step", after)
        yield from _far("the tracked peak", {run: run.tracked_bytes for run in group if run.tracked_bytes is not None})
        steps = {run: statistics.median(run.record.time.step_s) for run in group if run.record.time.step_s}
        yield from _far("the median step", steps)


def _far(what: str, numbers: Mapping[Run, float]) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose number is far from the median of those that are believed."""
    if len(numbers) < 2:
        return
    middle = statistics.median([numbers[run] for run in numbers if run.sealed] or numbers.values())
    for run, number in numbers.items():
        if max(number, middle) > (1 + WITHIN[what]) * min(number, middle):
            yield run, f"{what} is {number:.4g}, but {middle:.4g} in runs that have to agree"


def _after_step(run: Run) -> list[int]:
    """Return the bytes that the first rank holds after a step, by component."""
    return [*run.record.memory.components.per_rank[0].after_step.values()] if run.components else []
