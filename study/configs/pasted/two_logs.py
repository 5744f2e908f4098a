"""Two logs in one text, or one log that jumps: are losses, or norms, a factor apart that a number explains?"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from study.configs.pasted import contrasts, matching
from study.configs.pasted.lines import FEW, MANY, Line
from study.configs.pasted.losses import SCALE
from study.configs.pasted.read import Pasted
from study.configs.pasted.said import numbers
from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.words import meets
from study.core.text import rounded

CLOSE = 0.01  # of the ratio: so far steps may differ
APART = 1.2  # times: by less two seeds, or other data, may differ as well
SUMMED, DIVIDED = "a sum over {}, and not a mean", "one division too many by {}"
ROUNDED = 2**-8  # of a loss: bf16 rounds a number by up to as much
GROWN = 0.02  # of a loss: the study's own rounding grew to 1.4 % in a hundred steps
ONE_SIDED = 0.9  # of the lines: rounding makes a loss higher as often as lower
OPEN = SUMMED.format("the micro-batches of an update, if it has {:g}")
MOST_FAULTS = 5
NEAR = 0.05  # of the ratio: so far medians of other steps, and numbers that a person rounds, may be from it
# What a person says that the loss or the norm is, and of which numbers: near it, and of nothing else.
OF_WHAT = re.compile(r"(?i)\b(?:loss(?:es)?|grad(?:ient)?[ _]?norms?)\b|损失")
COUNT = r"(\d{1,5}(?:\.\d+)?|two|three|four|five|six|eight|ten|sixteen)"
OF_EVALUATION = r"(?:(?:the|my|our|its) )?(?:eval|valid)\w*[ _]?loss"
TIMES = re.compile(
    rf"(?i)(?<![\w.])(?:{COUNT} ?(?:x|\u00d7|times|-?fold) "
    rf"(?:as (?:high|large|big|much)|too|higher|larger|bigger|greater|what|that of|{OF_EVALUATION})\b"
    rf"|by a factor of {COUNT}\b|{COUNT}-fold\b|{COUNT} ?\u500d|(doubled|twice as|tripled|quadrupled)\b)"
)
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8, "ten": 10, "sixteen": 16}
NUMBERS |= {"doubled": 2, "twice as": 2, "tripled": 3, "quadrupled": 4}
INSTEAD = re.compile(
    r"(?i)(?<![\w.])(\d+\.?\d*) (?:instead of|rather than|vs\.?|versus|compared (?:to|with)) (\d+\.?\d*)"
)
NOT_OF_LOSS = re.compile(
    r"(?i)\b(?:smaller|lower|less|small|low|divided|nan|batch\w*|data\w*|gpus?|cards?|ranks?|nodes?|memory|rates?|lr"
    r"|lengths?|models?|slow\w*|time)\b"
)
AROUND = 40  # characters
AS_BEFORE = 0.1  # of the ratio: so far that of another evaluation may be from it, where no row is learnt by heart
AS_EVALUATED = 0.2  # of the ratio: so far a mean of training may be from the evaluation beside it
PASSES = re.compile(rf"(?i)accumul|梯度累积|{OF_EVALUATION}")


def ratio_of_logs(pasted: Pasted) -> Seen | None:
    """Return that all losses or norms of one of two logs are as many times those of the other, and what makes that."""
    logs = _logs(pasted.log.usual)
    if len(logs) != 2:
        return None
    first, second = map(_by_step, logs)
    ratios = {name: _ratio(_ratios(name, first, second).values()) for name in ("loss", "norm")}
    apart = {name: ratio for name, ratio in ratios.items() if ratio and max(ratio, 1 / ratio) > APART}
    if not apart:
        return where_logs_part(pasted, first, second)
    both = len(apart) == 2 and abs(apart["norm"] / apart["loss"] - 1) <= CLOSE
    name, ratio = next(iter(apart.items()))
    other = "norm" if name == "loss" else "loss"
    larger, smaller = ("second", "first") if ratio > 1 else ("first", "second")
    factor = max(ratio, 1 / ratio)
    makes, letters = _makers(pasted, factor, name, CLOSE)
    makes = makes or "a sum where the other has a mean (give both configs: no number that was read fits)"
    id = "logs-apart" if both else f"logs-apart-{name}"
    values = {"larger": larger, "smaller": smaller, "factor": f"{factor:,.2f}", "makes": makes}
    values |= {"other": _other(ratios[other]), "faults": _faults(pasted, letters, id)}
    return sign(id, pasted.text, logs[1][0].place, **values)


def where_logs_part(pasted: Pasted, first: dict[tuple, Line], second: dict[tuple, Line]) -> Seen | None:
    """Return where losses of two ways to train part, in steps of both, and whether rounding makes as much."""
    if len(contrasts.ways(pasted.text)) < 2 and not meets(("loss + differ",), pasted.question):
        return None  # two runs of one training may have other rows, and nobody compares them
    ratios = _ratios("loss", first, second)
    higher = [ratio - 1 for ratio in ratios.values()]  # the second than the first
    steps = [step for step, ratio in ratios.items() if ratio != 1]
    if len(higher) < 2 * FEW or not steps:
        return None
    moment = first[steps[0]].moment or "a line"
    moment += ", the first," if higher[0] else ""
    begin, most, end = abs(higher[0]), max(map(abs, higher)), abs(higher[-1])
    of_second = sum(each > 0 for each in higher)
    of_one = max(of_second, len(steps) - of_second)
    is_rounding = most <= ROUNDED
    is_more = begin > GROWN or (of_one >= ONE_SIDED * len(steps) and end > GROWN)
    if not is_rounding and not is_more:
        return None  # rounding that grew, or other rows: a log does not tell
    side = "second" if 2 * of_second > len(steps) else "first"
    values: dict[str, Any] = {"at": moment, "lines": len(steps), "side": side, "higher": of_one}
    values |= {"most": rounded(100 * most, ".2g"), "end": rounded(100 * end, ".2g")}
    return sign("logs-part-rounded" if is_rounding else "logs-part", pasted.text, second[steps[0]].place, **values)


def factor_apart(pasted: Pasted) -> Seen | None:
    """Return what makes a factor between two logs, within one, or of which a person tells."""
    return ratio_of_logs(pasted) or jump_in_log(pasted) or above_evaluation(pasted) or factor_in_words(pasted)


def above_evaluation(pasted: Pasted) -> Seen | None:
    """Return that training's losses are as many times those of each evaluation as an update has micro-batches.

    Or that many times below them, where it is of ranks as well. Twice is not told: other data, or dropout, may make it.
    """
    ratios: list[float] = []
    place, is_level = 0, True
    for end, loss in pasted.log.evaluations:
        before = [line.values["loss"] for line in pasted.log.losses.lines if place <= line.place < end]
        if before and float(loss) > 0:
            ratios.append(statistics.median(before[-FEW:]) / float(loss))
            is_level = is_level and max(before[-FEW:]) <= (1 + AS_BEFORE) * min(before[-FEW:])
        place = end
    if not ratios:
        return None
    known = numbers("passes", pasted.text)
    # Nobody says how many there are: a loss that falls fast before an evaluation is above it as well.
    for passes in known or ({round(ratios[-1])} if is_level else ()):
        if passes >= FEW and _fits(ratios, passes):
            makes, letters = _makers(pasted, passes, "loss", CLOSE) if known else (OPEN.format(passes), {"g"})
            values = {"factor": rounded(ratios[-1], ".3g"), "makes": makes}
            values["faults"] = _faults(pasted, letters, "train-above-evaluation")
            seen = sign("train-above-evaluation", pasted.text, place, **values)
            return seen if known else replace(seen, sure="possible")
    smaller = [1 / ratio for ratio in ratios if ratio > 0]
    # Rows that are learnt by heart have a loss below that of evaluation as well, and ever further below.
    if len(smaller) < 2 or max(smaller) / min(smaller) - 1 > AS_BEFORE:
        return None
    fitting = [each for each in _known(pasted, "loss", DIVIDED) if each[0] >= FEW and _fits(smaller, each[0])]
    if not fitting:
        return None
    makes = " or ".join(dict.fromkeys(words for _, words, _ in fitting))
    values = {"factor": rounded(smaller[-1], ".3g"), "makes": makes}
    return sign("train-below-evaluation", pasted.text, place, **values)


def _fits(ratios: list[float], factor: float) -> bool:
    """Whether each ratio is this factor, as far as training is from evaluation."""
    return all(abs(ratio / factor - 1) <= AS_EVALUATED for ratio in ratios)


def jump_in_log(pasted: Pasted) -> Seen | None:
    """Return that from one line on losses and norms are as many times as high as a number of the training is."""
    lines = [line for line in pasted.log.usual if min(line.values.get(name, 0) for name in ("loss", "norm")) > 0]
    if len(lines) < 2 * FEW or len(_logs(lines)) != 1:
        return None
    losses, norms = ([line.values[name] for line in lines] for name in ("loss", "norm"))
    at = max(range(FEW, len(lines) - FEW + 1), key=lambda number: losses[number] / losses[number - 1])
    factors = [
        statistics.median(each[at : at + MANY]) / statistics.median(each[:at][-MANY:]) for each in (losses, norms)
    ]
    makes, letters = _makers(pasted, factors[0], "loss", NEAR)
    if not any(letters) or not all(letters == _makers(pasted, each, "loss", NEAR)[1] for each in factors):
        return None
    values = {"factor": f"{factors[0]:,.2f}", "makes": makes, "faults": _faults(pasted, letters, "jump-by-a-factor")}
    return sign("jump-by-a-factor", pasted.text, lines[at].place, **values)


def factor_in_words(pasted: Pasted) -> Seen | None:
    """Return that the loss is as many times too high as a number of the training is, where a person says so."""
    for sentence in pasted.question:
        for match in [*TIMES.finditer(sentence.text), *INSTEAD.finditer(sentence.text)]:
            near = sentence.text[max(0, match.start() - AROUND) : match.end() + AROUND // 2]
            what = OF_WHAT.search(near)
            if what is None or NOT_OF_LOSS.search(near):
                continue
            said = [each.lower() for each in match.groups() if each]
            factor = float(NUMBERS.get(said[0], said[0])) / (float(said[1]) or math.inf if len(said) > 1 else 1)
            name = "norm" if "norm" in what[0] else "loss"
            makes, letters = _makers(pasted, factor, name, NEAR)
            is_open = not any(letters) and not numbers("passes", pasted.text) and factor == round(factor) >= FEW
            if is_open and PASSES.search(sentence.text):  # nobody says how many there are
                makes, letters = OPEN.format(factor), {"g"}
            if factor > APART and any(letters):  # a number of rows is often the same by chance
                faults = _faults(pasted, letters, "times-in-words")
                values = {"what": what[0], "factor": f"{factor:g}", "makes": makes, "faults": faults}
                seen = sign("times-in-words", pasted.text, pasted.place(sentence.text), **values)
                return replace(seen, sure="possible") if is_open else seen
    return None


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


def _ratios(name: str, first: dict[tuple, Line], second: dict[tuple, Line]) -> dict[tuple, float]:
    """Return how many times the first log's values the second's are, by the steps of both."""
    ratios = {}
    for step in first:
        one, other = (log[step].values.get(name, 0) if step in log else 0 for log in (first, second))
        if 0 < one < math.inf and 0 < other < math.inf:
            ratios[step] = other / one
    return ratios


def _ratio(ratios: Collection[float]) -> float | None:
    """Return the ratio that all steps have. None: they have no such, or are few."""
    if len(ratios) < FEW:
        return None
    middle = statistics.median(ratios)
    return middle if all(abs(ratio / middle - 1) <= CLOSE for ratio in ratios) else None


def _other(ratio: float | None) -> str:
    """Return how the other values stand to each other."""
    if ratio is None:
        return "stand in no such ratio"
    return "agree" if abs(ratio - 1) <= CLOSE else f"are {max(ratio, 1 / ratio):,.2f} times apart"


def _makers(pasted: Pasted, factor: float, name: str, close: float) -> tuple[str, set[str]]:
    """Return what makes such a factor, of the numbers that were read, and by which letters faults have it."""
    fitting = [each for each in _known(pasted, name) if abs(factor / each[0] - 1) <= close]
    return " or ".join(dict.fromkeys(words for _, words, _ in fitting)), {letter for *_, letter in fitting}


def _known(pasted: Pasted, name: str, form: str = SUMMED) -> Iterator[tuple[float, str, str]]:
    """Yield factors, what makes them, and the letters of faults.toml for them."""
    many = {of: numbers(of, pasted.text) - {1} for of in ("passes", "ranks", "micro_batch", "sequence")}
    for passes in many["passes"]:
        yield passes, form.format(f"the {passes} micro-batches of an update"), "g"
    for ranks in many["ranks"]:
        yield ranks, form.format(f"the {ranks} ranks"), "N"
        for passes in many["passes"]:
            yield passes * ranks, form.format(f"{passes} micro-batches x {ranks} ranks"), "N"
        if name == "norm":
            yield ranks**0.5, f"squares of the same gradients that {ranks} ranks add", ""
    for rows in many["micro_batch"]:
        yield rows, form.format(f"the {rows} sequences of a micro-batch"), ""
    for tokens in many["sequence"]:
        yield tokens, form.format(f"the {tokens:,} tokens of a sequence"), ""
    yield SCALE, f"a loss scale of {SCALE:,} that is left in it", f"{SCALE:,}"


def _faults(pasted: Pasted, letters: set[str], id: str) -> str:
    """Return the known faults that make such a factor, and that nothing in the text excludes."""
    signs = "x/" if id == "logs-apart-norm" else "x"  # gradients may be too small in the other log
    ends = tuple(f" {each} {letter}" for each in signs for letter in letters if letter)
    ids = [each.fault.id for each in matching.matches(pasted, set()) if ends and each.fault.symptom.endswith(ends)]
    return f"; known faults that make it: `study explain {' '.join(ids[:MOST_FAULTS])}`" if ids else ""
