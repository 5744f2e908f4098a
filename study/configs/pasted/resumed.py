"""What the lines of a trainer show after a resume: a schedule or a loss that does not go on where it stood."""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.lines import BAR, FEW, MANY, Line, Log
from study.configs.pasted.tracebacks import Seen, sign

# Of transformers ("Continuing training from global step 500"), LLaMA-Factory, Accelerate's examples and others.
RESUMED = re.compile(
    r"(?i)\bresum(?:ed|ing)\b[^\n]{0,40}(?:from|checkpoint)|\bcontinuing training from\b"
    r"|\bresume from (?:checkpoint|step)[- ]?\d"
)
OF_STEPS = re.compile(rf"(?m)(?:^|\r)[ \t]*\d+%\|[^|\n]*{BAR.pattern}")  # bars of loading and of data have a name
HALF = 0.5  # a rate below that share of what was to come does not go on
RAISED = 1.5  # times what was to come: a log that begins late does not show the highest rate
JUMP = 1.25  # times the losses before
AS_AT_FIRST = 0.8  # of the first loss


def signs(log: Log) -> Iterator[Seen]:
    """Yield what does not go on after the last line that tells of a resume. Few lines on a side say nothing."""
    rated = [line for line in log.losses.lines if "rate" in line.values]
    lines = rated if len(rated) >= FEW else log.losses.lines  # with rates: a summary at the end of a run has none
    for match in reversed([*RESUMED.finditer(log.text)]):
        after = [line for line in lines if line.place > match.start()]
        before = _until(after, [line for line in lines if line.place < match.start()])
        if len(before) >= FEW and len(after) >= FEW:
            yield from filter(None, (_rate(log, before, after), _loss(log, before, after)))
            return
    if not RESUMED.search(log.text):
        yield from _without_a_line(log, rated)


def is_cut(log: Log) -> bool:
    """Whether a text tells of a resume, and has too few lines on a side of the last one."""
    places = [line.place for line in log.losses.lines]
    at = max((match.start() for match in RESUMED.finditer(log.text)), default=-1)
    before = sum(place < at for place in places)
    return at >= 0 and bool(places) and min(before, len(places) - before) < FEW


def _without_a_line(log: Log, rated: list[Line]) -> Iterator[Seen]:
    """Yield where the rate falls and rises as in a warm-up, while steps go on: what restarts by plan only rises."""
    rates, moments = [line.values["rate"] for line in rated], [*map(_moment, rated)]
    for at in range(FEW, len(rated) - FEW + 1):
        warms_up = rates[at] < rates[at + 1] < rates[at + 2] and rates[at] < HALF * rates[at - 1]
        if warms_up and moments[at - 2] < moments[at - 1] < moments[at]:
            before, after = rated[:at], rated[at:]
            found = (_rate(log, before, after, "From this line on"), _loss(log, before, after, "Beside it"))
            if BETWEEN_TEXTS not in log.text[before[0].place : after[0].place]:
                yield from (replace(each, sure="possible") for each in found if each)
            return


def counted(log: Log) -> int:
    """Return how many steps a log counts, or micro-batches. After a resume its bar counts those of another run."""
    if RESUMED.search(log.text):
        return 0
    return max(
        sum("loss" in line.values for line in log.lines), *(int(bar[1]) for bar in OF_STEPS.finditer(log.text)), 0
    )


def _until(after: list[Line], before: list[Line]) -> list[Line]:
    """Return the lines before a resume up to where it takes up: a run may have gone on behind its last checkpoint."""
    end = min(map(_moment, after[:1]), default=math.inf)
    return [line for line in before if _moment(line) <= end]


def _moment(line: Line) -> float:
    """Return the epoch of a line, or its step. 0: it says neither."""
    return line.values.get("epoch", line.values.get("step", 0.0))


def _rate(log: Log, before: list[Line], after: list[Line], since: str = "After the resume") -> Seen | None:
    """The learning rate begins again, or is far below what was to come."""
    if not all("rate" in line.values for line in (*before, *after)):
        return None
    old = [line.values["rate"] for line in before]
    new = [line.values["rate"] for line in after]
    behind = _intervals(before, after[0])
    if behind > FEW:  # lines are left out
        return None
    to_come = old[-1] + (old[-1] - old[-2]) * behind  # by the last two, as a linear schedule has it
    values: dict[str, Any] = {"old": old[-1], "new": new[0], "since": since}
    rises = new[0] < new[1] < new[2]
    is_up = old[-1] < HALF * max(old) and new[0] > HALF * max(old) and to_come < HALF * new[0]
    is_down = new[0] < HALF * min(old[-1], to_come)
    if is_up or (rises and is_down):
        return sign("rate-begins-again", log.text, after[0].place, **values)
    if old[-1] <= old[-2] and new[0] > RAISED * max(old[-1], to_come):
        return replace(sign("rate-begins-again", log.text, after[0].place, **values), sure="possible")
    return sign("rate-falls-on-resume", log.text, after[0].place, **values) if is_down else None


def _intervals(before: list[Line], first: Line) -> float:
    """Return how far a line is behind the last one before, in distances between the last two."""
    moments = [*map(_moment, (*before[-2:], first))]
    distance = moments[1] - moments[0]
    return (moments[2] - moments[1]) / distance if distance > 0 else 1


def _loss(log: Log, before: list[Line], after: list[Line], since: str = "After the resume") -> Seen | None:
    """The first losses are all above the last ones by more than these differ."""
    old = [line.values["loss"] for line in before]
    last = old[-MANY:]
    new = [line.values["loss"] for line in after[:FEW]]
    if not min(new) > max(JUMP * statistics.median(last), 2 * max(last) - min(last)):
        return None
    at_first = min(new) > AS_AT_FIRST * old[0] > JUMP * statistics.median(last)
    cause = "the weights were not loaded: it is as at the beginning" if at_first else "a state was not loaded"
    values = {"old": statistics.median(last), "new": new[0], "cause": cause, "since": since}
    return sign("loss-jumps-on-resume", log.text, after[0].place, **values)
