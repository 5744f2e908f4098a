"""Two logs in one text: does each loss, or norm, of one stand in one ratio to that of the same step of the other?"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from study.configs.pasted import matching
from study.configs.pasted.losses import FEW, SCALE, Line
from study.configs.pasted.read import Pasted
from study.configs.pasted.said import numbers
from study.configs.pasted.tracebacks import Seen, sign

CLOSE = 0.01  # of the ratio: so far steps may differ
APART = 1.2  # times: by less two seeds, or other data, may differ as well
SUMMED = "a sum over {}, and not a mean"
MOST_FAULTS = 5


def ratio_of_logs(pasted: Pasted) -> Seen | None:
    """Return that all losses or norms of one of two logs are as many times those of the other, and what makes that."""
    logs = _logs(pasted.log.usual)
    if len(logs) != 2:
        return None
    ratios = {name: _ratio(name, *map(_by_step, logs)) for name in ("loss", "norm")}
    apart = {name: ratio for name, ratio in ratios.items() if ratio and max(ratio, 1 / ratio) > APART}
    if not apart:
        return None
    both = len(apart) == 2 and abs(apart["norm"] / apart["loss"] - 1) <= CLOSE
    name, ratio = next(iter(apart.items()))
    other = "norm" if name == "loss" else "loss"
    larger, smaller = ("second", "first") if ratio > 1 else ("first", "second")
    factor = max(ratio, 1 / ratio)
    makes, letters = _makers(pasted, factor, name)
    id = "logs-apart" if both else f"logs-apart-{name}"
    values = {"larger": larger, "smaller": smaller, "factor": f"{factor:,.2f}", "makes": makes}
    values |= {"other": _other(ratios[other]), "faults": _faults(pasted, letters, id)}
    return sign(id, pasted.text, logs[1][0].place, **values)


def _logs(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each log: the steps of the next one begin anew."""
    logs: list[list[Line]] = []
    for line in lines:
        if not logs or _step(line) < _step(logs[-1][-1]):
            logs.append([])
        logs[-1].append(line)
    return logs


def _step(line: Line) -> tuple[float, float]:
    return line.values.get("epoch", 0), line.values.get("step", 0)


def _by_step(lines: Sequence[Line]) -> dict[tuple, Line]:
    """Return lines by their step, and by which of its lines they are: a rounded epoch has several."""
    times: Counter[tuple] = Counter()
    of_steps = {}
    for line in lines:
        step = _step(line)
        of_steps[step, times[step]] = line
        times[step] += 1
    return of_steps


def _ratio(name: str, first: dict[tuple, Line], second: dict[tuple, Line]) -> float | None:
    """Return how many times the first log's values the second's are, in all steps of both. None: there is no such."""
    ratios = []
    for step in first.keys() & second.keys():
        one, other = (log[step].values.get(name, math.nan) for log in (first, second))
        if 0 < one < math.inf and 0 < other < math.inf:
            ratios.append(other / one)
    if len(ratios) < FEW:
        return None
    middle = statistics.median(ratios)
    return middle if all(abs(ratio / middle - 1) <= CLOSE for ratio in ratios) else None


def _other(ratio: float | None) -> str:
    """Return how the other values stand to each other."""
    if ratio is None:
        return "stand in no such ratio"
    return "agree" if abs(ratio - 1) <= CLOSE else f"are {max(ratio, 1 / ratio):,.2f} times apart"


def _makers(pasted: Pasted, factor: float, name: str) -> tuple[str, set[str]]:
    """Return what makes such a factor, of the numbers that were read, and by which letters faults have it."""
    fitting = [each for each in _known(pasted, name) if abs(factor / each[0] - 1) <= CLOSE]
    if fitting:
        return " or ".join(dict.fromkeys(words for _, words, _ in fitting)), {letter for *_, letter in fitting}
    return "a sum where the other has a mean (give both configs: no number that was read fits)", set()


def _known(pasted: Pasted, name: str) -> Iterator[tuple[float, str, str]]:
    """Yield factors, what makes them, and the letters of faults.toml for them."""
    many = {of: numbers(of, pasted.text) - {1} for of in ("passes", "ranks", "micro_batch", "sequence")}
    for passes in many["passes"]:
        yield passes, SUMMED.format(f"the {passes} micro-batches of an update"), "g"
    for ranks in many["ranks"]:
        yield ranks, SUMMED.format(f"the {ranks} ranks"), "N"
        for passes in many["passes"]:
            yield passes * ranks, SUMMED.format(f"{passes} micro-batches x {ranks} ranks"), "N"
        if name == "norm":
            yield ranks**0.5, f"squares of the same gradients that {ranks} ranks add", ""
    for rows in many["micro_batch"]:
        yield rows, SUMMED.format(f"the {rows} sequences of a micro-batch"), ""
    for tokens in many["sequence"]:
        yield tokens, SUMMED.format(f"the {tokens:,} tokens of a sequence"), ""
    yield SCALE, f"a loss scale of {SCALE:,} that is left in it", f"{SCALE:,}"


def _faults(pasted: Pasted, letters: set[str], id: str) -> str:
    """Return the known faults that make such a factor, and that nothing in the text excludes."""
    signs = "x/" if id == "logs-apart-norm" else "x"  # gradients may be too small in the other log
    ends = tuple(f" {each} {letter}" for each in signs for letter in letters if letter)
    ids = [each.fault.id for each in matching.matches(pasted, set()) if ends and each.fault.symptom.endswith(ends)]
    return f"; known faults that make it: `study explain {' '.join(ids[:MOST_FAULTS])}`" if ids else ""
