"""Audit of records against each other: it finds copied runs, copied seeds, and scaled curves or bytes.

If records disagree, the sealed ones are believed. If none or all are sealed, the median is believed.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

from study.ledger.audit import DRAWN
from study.records.runs import Run

WEIGHTS = ("task", "model", "data", "tokenizer", "precision", "init", "seed", "lora_rank", "train_only")
FIRST_LOSS = (
    *("task", "model", "data", "tokenizer", "precision", "init", "seed", "sequence", "micro_batch"),
    *("accumulation", "ranks", "dropout", "attention", "checkpointing", "compile"),
)
# The largest differences in the kept records are 0.5 % (stage 3 draws the weights in parts), 0, 0, and 85 %.
WITHIN = {"the first loss": 0.05, "what a step moves": 1e-6, "the tracked peak": 0.01, "the median step": 4.0}


def faults(runs: Iterable[Run]) -> dict[Run, list[str]]:
    """For each finished run that disagrees with the others: why it is not evidence, in words."""
    wrong = defaultdict(list)
    runs = [run for run in runs if run.done and not run.record.is_script]
    for check in (_copies, _seeds, _weights, _outliers):
        for run, words in check(runs):
            wrong[run].append(words)
    return wrong


def _groups(runs: list[Run], key: Callable[[Run], Hashable | None]) -> list[list[Run]]:
    """Groups of two or more runs with an equal key. Runs whose key is None are in no group."""
    groups = defaultdict(list)
    for run in runs:
        if (value := key(run)) is not None:
            groups[value].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _doubtful(group: list[Run]) -> list[Run]:
    """The runs of which at least one must be wrong: those that are not sealed, or all if none or all are sealed."""
    unsealed = [run for run in group if not run.sealed]
    return unsealed if len(unsealed) < len(group) else group


def _copies(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """No two runs take exactly the same times."""
    for group in _groups(runs, lambda run: tuple(run.record.time.step_s) if len(run.record.time.step_s) > 1 else None):
        for run in _doubtful(group):
            yield run, f"its step times are those of {_other(run, group)}"


def _seeds(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Another seed gives another curve, and other weights if they are drawn."""

    def weights(run: Run) -> str | None:
        return run.record.observed.weights_checksum if run.record.requested.init in DRAWN else None

    keys = {"losses": lambda run: tuple(run.losses) if len(run.losses) > 1 else None, "initial weights": weights}
    for what, key in keys.items():
        for group in _groups(runs, key):
            seeds = Counter(run.record.requested.seed for run in group).most_common(2)
            if len(seeds) < 2:
                continue
            doubtful = _doubtful(group)
            if len(doubtful) == len(group) and seeds[0][1] > seeds[1][1]:  # arms of a seed may well have equal losses
                doubtful = [run for run in group if run.record.requested.seed != seeds[0][0]]
            for run in doubtful:
                yield run, f"its {what} are those of another seed, in {_other(run, group)}"


def _weights(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Runs that have to start from the same weights do so, in every arm. This is checked before losses are compared."""

    def key(run: Run) -> tuple | None:
        software = tuple(run.record.software.get(name) for name in ("torch", "transformers"))  # they draw the weights
        return (run.key(only=WEIGHTS), software) if checksum(run) else None

    def checksum(run: Run) -> str | None:
        return run.record.observed.weights_checksum

    for group in _groups(runs, key):
        counts = Counter(checksum(run) for run in group if run.sealed) or Counter(map(checksum, group))
        (most, times), *others = counts.most_common(2)
        believed = most if not others or times > others[0][1] else None  # None: a tie
        for run in group:
            if checksum(run) == believed:
                continue
            if other := next((each for each in group if checksum(each) != checksum(run)), None):
                yield run, f"it starts from other weights than {other.name}, which has the same seed"


def _other(run: Run, group: list[Run]) -> str:
    return next(each.name for each in group if each is not run)


def _outliers(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Numbers that have to agree do so: between arms that begin with the same weights and rows, and between repeats."""
    repeats = _groups(runs, lambda run: (run.key(without=["seed"]), str(run.machine)))
    values = {
        "the first loss": (
            _groups(runs, lambda run: run.key(only=FIRST_LOSS)),
            lambda run: run.losses[0] if run.losses else None,
        ),
        "what a step moves": (repeats, lambda run: sum(run.traffic.values()) if run.traffic else None),
        "the tracked peak": (repeats, lambda run: run.tracked_bytes),
        "the median step": (repeats, lambda run: run.median_step_s),
    }
    for what, (groups, value) in values.items():
        for group in groups:
            known = [(run, number) for run in group if (number := value(run)) is not None]
            believed = [number for run, number in known if run.sealed] or [number for _, number in known]
            if len(known) < 2:
                continue
            middle = statistics.median(believed)
            for run, number in known:
                if max(number, middle) > (1 + WITHIN[what]) * min(number, middle):
                    yield run, f"{what} is {number:.4g}, but {middle:.4g} in runs that have to agree"
