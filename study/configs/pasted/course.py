"""Where the losses of one run go, if that is not where a training goes: lost, flat, vanished, or high from the start.

Why, the log alone does not show: none of these is more than possible.
"""

import itertools
import math
import statistics
from typing import Any

from study.configs.pasted.losses import BROKEN, FEW, MANY, RANDOM, USUAL_PASSES, Line, Log, Series
from study.configs.pasted.tracebacks import Seen
from study.core.text import rounded

COURSE = 20  # lines that show where a loss goes
MUCH_HIGHER = 3  # times the lowest, where there are fewer lines
HIGHER, HIGHER_BY = 1.8, 0.5  # times the lowest, and more than it: where a loss ends that is lost
NEAR_LOWEST = 0.1  # of the way from the lowest to the end: a loss that is not lost yet
PLATEAU, SPREAD = 0.005, 0.015  # of the loss: so little it goes on, and so little its lines differ
SMALLEST_VOCABULARY = 8_000
VANISHED, LANGUAGE = 0.005, 2.0  # a loss that has nothing to learn any more, and one with which a language model begins


def astray(log: Log, passes: int = USUAL_PASSES) -> Seen | None:
    """Return where the losses of one run go, if that is not where a training goes.

    By medians of MANY lines, and without one of them: single rows are high, and a Trainer's last line is a mean of all.
    In a short log FEW lines show a loss that is lost, and nothing else.
    """
    losses, lines = log.losses.values, log.losses.lines
    if len(losses) < 2 * FEW or not all(map(math.isfinite, losses)) or _begins_again(lines):
        return None
    is_short = len(losses) < COURSE
    part, spared, higher = (FEW, 0, MUCH_HIGHER) if is_short else (MANY, 1, HIGHER)
    middles = [statistics.median(losses[at : at + part]) for at in range(len(losses) - part + 1)]
    low, end = min(middles), middles[-1]
    lowest = losses[middles.index(low) :][:part]
    is_apart = (
        middles.index(low) + 2 * part <= len(losses) and sorted(losses[-part:])[spared] > sorted(lowest)[-1 - spared]
    )
    if is_apart and end > higher * low > 0 and end - low > HIGHER_BY:
        return _is_lost(log, low, end, part)
    if is_short:
        return None
    values: dict[str, Any] = {"first": losses[0], "end": end, "lines": len(losses), "random": RANDOM}
    if any(line.is_of_pairs for line in lines):
        return None
    if end < VANISHED and losses[0] > LANGUAGE:
        at = next(number for number, middle in enumerate(middles) if middle < VANISHED)
        is_first_epoch = lines[at].values.get("epoch", 0) < 1
        return log.losses.sign("loss-vanishes", at, **values, at=_moment(log.losses, at)) if is_first_epoch else None
    if RANDOM < statistics.median(losses[:FEW]) < BROKEN * RANDOM * passes:
        return log.losses.sign("loss-begins-high", 0, **values)
    early, late = (statistics.median(part) for part in (losses[: len(losses) // 4], losses[-len(losses) // 4 :]))
    is_flat = abs(late - early) < PLATEAU * early and max(losses) - min(losses) < SPREAD * early
    if is_flat and math.log(SMALLEST_VOCABULARY) < late < RANDOM and not _warms_up(log.rates):
        return log.losses.sign("loss-plateau", 0, **values, vocabulary=round(math.exp(late), -2))
    return None


def _begins_again(lines: list[Line]) -> bool:
    """Whether steps or epochs go back: another run follows, or this one was resumed."""
    moments = ([line.values[name] for line in lines if name in line.values] for name in ("step", "epoch"))
    return any(after < before for each in moments for before, after in itertools.pairwise(each))


def _warms_up(rates: Series) -> bool:
    """Whether the learning rate still rises in the last lines."""
    return len(rates.values) > 1 and rates.values[-1] > rates.values[-2]


def _is_lost(log: Log, low: float, end: float, part: int) -> Seen:
    """Return from where on the losses are above the lowest, and whether at once or by and by."""
    losses, lines = log.losses.values, log.losses.lines
    at = 1 + max(number for number, loss in enumerate(losses[:-part]) if loss <= low + NEAR_LOWEST * (end - low))
    high = max(losses[at : at + FEW])
    is_jump = high > (low + end) / 2
    norm = max((line.values.get("norm", 0) for line in lines[at - 1 : at + FEW if is_jump else None]), default=0)
    rate = lines[at].values.get("rate")
    values = {
        "at": _moment(log.losses, at),
        "low": low,
        "high": high,
        "end": end,
        "beside": f", grad_norm up to {rounded(norm, ',.4g')}" if norm else "",
        "rate": f"a lower learning rate than {rounded(rate, '.3g')}" if rate else "a lower learning rate",
    }
    return log.losses.sign("loss-jumps-and-stays" if is_jump else "loss-goes-up", at, **values)


def _moment(losses: Series, number: int) -> str:
    """Return where a line is, as a sentence has it."""
    values = losses.lines[number].values
    named = next((f"{name} {values[name]:g}" for name in ("step", "epoch") if name in values), "")
    return named or f"line {number + 1} of {len(losses.lines)}"
