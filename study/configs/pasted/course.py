"""Where the losses of one run go, if that is not where a training goes: lost, flat, vanished, or high from the start.

Why, the log alone does not show: none of these is more than possible.
"""

import itertools
import math
import re
import statistics
from dataclasses import replace
from typing import Any

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.lines import FALLS, FEW, MANY, Line, Log, Series
from study.configs.pasted.losses import BROKEN, EXPLODED, RANDOM, USUAL_PASSES, VOCABULARIES, uniform
from study.configs.pasted.tracebacks import Seen, sign
from study.core.text import rounded

COURSE = 20  # lines that show where a loss goes
MUCH_HIGHER = 3  # times the lowest, where there are fewer lines
HIGHER, HIGHER_BY = 1.8, 0.5  # times the lowest, and more than it: where a loss ends that is lost
NATS = 2.0  # more than it, whatever that is, if it is a mean over tokens: losses are logarithms
DISTILLED = re.compile(r"(?i)distill(?:ation|ed|ing|_)|teacher|\b(?:kd|kl)_loss")
STEP = 0.1  # of the loss: so much it falls at least where an epoch begins that makes a stair
LEVEL = 0.25  # of that fall: so little it moves within an epoch
NEAR_LOWEST = 0.1  # of the way from the lowest to the end: a loss that is not lost yet
PLATEAU, SPREAD = 0.005, 0.015  # of the loss: so little it goes on, and so little its lines differ
LOST = ("loss-jumps-and-stays", "loss-goes-up")
SMALLEST_VOCABULARY = 8_000
AT_RANDOM = 0.05  # so far is the first loss of random weights from the logarithm of their vocabulary
PRETRAINED = re.compile(r"(?i)some weights of|newly initialized|loading checkpoint shards|from_pretrained|fine-?tun")
VANISHED, LANGUAGE = 0.005, 2.0  # a loss that has nothing to learn any more, and one with which a language model begins


def astray(log: Log, passes: int = USUAL_PASSES, vocabulary: int | None = None) -> Seen | None:
    """Return where the losses of one run go, all finite, if that is not where a training goes."""
    losses = log.losses.values
    if len(losses) < 2 or _begins_again(log.text, log.losses.lines):
        return None
    return (
        _explodes(log, vocabulary)
        or _evaluates_apart(log)
        or _is_stair(log)
        or _is_uniform(log, vocabulary)
        or _begins_random(log, vocabulary)
        or _by_medians(log, passes, vocabulary)
        or _spikes(log, vocabulary)
    )


def _is_far(loss: float, low: float, times: float, vocabulary: int | None) -> bool:
    """Whether a loss is far above a lower one: by a factor, by nats, or above that of random weights."""
    random = math.log(vocabulary) if vocabulary else RANDOM
    limit = min(times * low, low + NATS, random) if low < random else times * low
    return loss > limit > 0 and loss - low > HIGHER_BY


def diverges(log: Log) -> Seen | None:
    """Where losses rise in a log that ends in NaN, or in zeros that the Trainer makes of it."""
    losses = log.losses
    is_lost = [not math.isfinite(loss) or loss == 0 for loss in losses.values]
    end = is_lost.index(True) if any(is_lost) else 0
    before = replace(log, losses=Series.of("loss", log.text, losses.lines[:end]))
    if _begins_again(log.text, before.losses.lines):
        return None
    rises = _explodes(before) or _by_medians(before, USUAL_PASSES)
    return rises if rises and rises.id in LOST else None


def _is_uniform(log: Log, vocabulary: int | None) -> Seen | None:
    """All losses are the logarithm of a vocabulary."""
    losses = log.losses.values
    words = uniform(losses, vocabulary)
    if not words or (not vocabulary and len(losses) < 2 * FEW) or _warms_up(log.rates):
        return None
    return log.losses.sign("loss-plateau", 0, end=losses[-1], lines=len(losses), vocabulary=words)


def _begins_random(log: Log, vocabulary: int | None) -> Seen | None:
    """The first loss is the logarithm of a vocabulary, where a text tells of pretrained weights. A good start falls."""
    first, second, *_ = log.losses.values
    words = min([vocabulary] if vocabulary else VOCABULARIES, key=lambda each: abs(math.log(each) - first))
    if abs(math.log(words) - first) > AT_RANDOM or second < FALLS * first or not PRETRAINED.search(log.text):
        return None
    return log.losses.sign("loss-begins-random", 0, first=first, vocabulary=words)


def _by_medians(log: Log, passes: int, vocabulary: int | None = None) -> Seen | None:
    """By medians of MANY lines, without one of them: single rows are high, and a Trainer's last line is a mean of all.

    In a short log FEW lines show a loss that is lost, and nothing else.
    """
    losses, lines = log.losses.values, log.losses.lines
    if len(losses) < 2 * FEW:
        return None
    is_short = len(losses) < COURSE
    part, spared, higher = (FEW, 0, MUCH_HIGHER) if is_short else (MANY, 1, HIGHER)
    middles = [statistics.median(losses[at : at + part]) for at in range(len(losses) - part + 1)]
    low, end = min(middles), middles[-1]
    lowest = losses[middles.index(low) :][:part]
    is_apart = (
        middles.index(low) + 2 * part <= len(losses) and sorted(losses[-part:])[spared] > sorted(lowest)[-1 - spared]
    )
    if is_apart and _is_far(end, low, higher, vocabulary):
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
    is_high = RANDOM < statistics.median(losses[:FEW]) < BROKEN * RANDOM * passes
    if is_high and not DISTILLED.search(log.text):  # a sum over all words of the vocabulary begins anywhere
        return log.losses.sign("loss-begins-high", 0, **values)
    early, late = (statistics.median(part) for part in (losses[: len(losses) // 4], losses[-len(losses) // 4 :]))
    is_flat = abs(late - early) < PLATEAU * early and max(losses) - min(losses) < SPREAD * early
    if is_flat and math.log(SMALLEST_VOCABULARY) < late < RANDOM and not _warms_up(log.rates):
        is_of_model = vocabulary and abs(late - math.log(vocabulary)) < PLATEAU * late
        words = vocabulary if is_of_model else round(math.exp(late), -2)
        return log.losses.sign("loss-plateau", 0, **values, vocabulary=words)
    return None


def _explodes(log: Log, vocabulary: int | None = None) -> Seen | None:
    """The last two losses are high, and their norms far above those before: they say what two losses alone do not."""
    if len(log.losses.values) < FEW:
        return None
    *losses, first, last = log.losses.values
    of_norm = [line.values.get("norm", math.nan) for line in log.losses.lines]
    low, high = min(losses), min(first, last)
    norms = [norm for loss, norm in zip(losses, of_norm, strict=False) if loss < (low + high) / 2]
    if not _is_far(high, low, MUCH_HIGHER, vocabulary) or not min(of_norm[-2:]) > EXPLODED * statistics.median(norms):
        return None
    return _is_lost(log, low, last, 2)


def _spikes(log: Log, vocabulary: int | None) -> Seen | None:
    """A loss jumps with a norm far above those before it, and comes back."""
    losses, lines = log.losses.values, log.losses.lines
    norms = [line.values.get("norm", math.nan) for line in lines]
    for at in range(MANY, len(losses)):
        low, usual = statistics.median(losses[at - MANY : at]), statistics.median(norms[at - MANY : at])
        high = losses[at]
        if _is_far(high, low, HIGHER, vocabulary) and norms[at] > EXPLODED * usual:
            back = next((n for n in range(at + 1, len(losses)) if losses[n] <= low + NEAR_LOWEST * (high - low)), None)
            if back is None:
                return None
            values = {"at": _moment(log.losses, at), "low": low, "high": high, "norm": norms[at], "count": back - at}
            values["rate"] = _lower(lines[at])
            return log.losses.sign("loss-spikes", at, **values)
    return None


def _evaluates_apart(log: Log) -> Seen | None:
    """The losses of evaluation are far above those of training: they rise, or stay where they were."""
    held_out = [float(loss) for _, loss in log.evaluations]
    place = log.evaluations[-1][0] if held_out else 0
    before = [line.values["loss"] for line in log.losses.lines if line.place < place]
    if len(held_out) < 2 or len(before) < 2 * FEW:
        return None
    trained, low, end = statistics.median(before[-FEW:]), min(held_out), held_out[-1]
    values = {"low": low, "end": end, "trained": trained}
    if end > (1 + STEP) * low and _is_far(end, trained, HIGHER, None):
        return sign("loss-evaluated-rises", log.text, place, **values)
    is_level = max(held_out) < (1 + STEP) * low
    if is_level and _is_far(end, trained, MUCH_HIGHER, None):
        return sign("loss-evaluated-apart", log.text, place, **values)
    return None


def _is_stair(log: Log) -> Seen | None:
    """The losses fall where an epoch begins, each time, and are flat within."""
    # The line at 1.0 is the last one of the first epoch.
    of_epochs = itertools.groupby(log.losses.lines, key=lambda line: math.ceil(line.values.get("epoch", 0)))
    epochs = [[line.values["loss"] for line in lines] for _, lines in of_epochs]
    if len(epochs) < 2 or min(map(len, epochs)) < FEW:
        return None
    for before, after in itertools.pairwise(epochs):
        fall = statistics.median(before[-MANY:]) - statistics.median(after[:MANY])
        within = max(abs(statistics.median(each[:FEW]) - statistics.median(each[-FEW:])) for each in (before, after))
        if min(before) <= max(after) or fall < STEP * statistics.median(before) or within > LEVEL * fall:
            return None
    first, end = statistics.median(epochs[0]), statistics.median(epochs[-1])
    return log.losses.sign("loss-stair", len(epochs[0]), count=len(epochs), first=first, end=end)


def _begins_again(text: str, lines: list[Line]) -> bool:
    """Whether steps or epochs go back, or another file begins: another run follows, or this one was resumed."""
    if lines and BETWEEN_TEXTS in text[lines[0].place : lines[-1].place]:
        return True
    moments = ([line.values[name] for line in lines if name in line.values] for name in ("step", "epoch"))
    return any(after < before for each in moments for before, after in itertools.pairwise(each))


def _warms_up(rates: Series) -> bool:
    """Whether the learning rate still rises in the last lines."""
    return len(rates.values) > 1 and rates.values[-1] > rates.values[-2]


def _is_lost(log: Log, low: float, end: float, part: int) -> Seen:
    """Return from where on the losses are above the lowest, and whether at once or by and by."""
    losses, lines = log.losses.values, log.losses.lines
    near = min(low + NEAR_LOWEST * (end - low), HIGHER * low)
    at = 1 + max(number for number, loss in enumerate(losses[:-part]) if loss <= near)
    high = max(losses[at : at + FEW])
    is_jump = high > (low + end) / 2
    norm = max((line.values.get("norm", 0) for line in lines[at - 1 : at + FEW if is_jump else None]), default=0)
    values = {
        "at": _moment(log.losses, at),
        "low": low,
        "high": high,
        "end": end,
        "last": "at the end" if len(losses) == sum("loss" in line.values for line in log.usual) else "and then NaN",
        "beside": f", grad_norm up to {rounded(norm, ',.4g')}" if norm else "",
        "rate": _lower(lines[at]),
    }
    return log.losses.sign("loss-jumps-and-stays" if is_jump else "loss-goes-up", at, **values)


def _lower(line: Line) -> str:
    """Return a lower learning rate than that of a line, as a remedy has it."""
    rate = line.values.get("rate")
    return f"a lower learning rate than {rounded(rate, '.3g')}" if rate else "a lower learning rate"


def _moment(losses: Series, number: int) -> str:
    """Return where a line is, as a sentence has it."""
    return losses.lines[number].moment or f"line {number + 1} of {len(losses.lines)}"
