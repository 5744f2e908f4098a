"""What losses, norms and rates that trainers print show: what is zero, not a number, constant, or ends too early.

A healthy training has none of these signs; GRPO's loss begins at 0, and fp16 skips its first steps.
"""

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.lines import BAR, FEW, MANY, Log, Series
from study.configs.pasted.tracebacks import Seen, rows, sign, sign_in_words
from study.configs.pasted.words import Sentence, meets

# As DeepSpeed writes it (runtime/fp16/loss_scaler.py): with the scale of fp16, and else of gradients without one.
OVERFLOW = re.compile(
    r"(?i:overflow)(?:!| detected\.) (?:Rank \d+ )?Skipping step\."
    r"(?: Attempted loss scale: ([\d.e+]+)(?:, reducing to ([\d.e+]+))?)?"
)
# Megatron counts them since the last line.
SKIPPED = re.compile(r"number of skipped iterations:\s+(\d+)")
SAVING = re.compile(r"[Ss]aving [^\n]{0,40}?to (\S{1,200}?\d{6})\b")
MOST_GROUPS = 16
SCALE = 65_536
SMALL_LOSS = 0.05  # lower ones may be rounded to 0
MOST_OVERFLOWS = 20  # steps without one between: from a scale of 2**16, as DeepSpeed begins, 16 lead to 1
RANDOM = math.log(262_144)  # the loss of random weights with the largest vocabulary
BROKEN = 3  # times that: no weights have such a loss
# Of models of which many are trained, and GPT-2's as Megatron pads it to a multiple of 128 (50,304).
VOCABULARIES = (30_522, 32_000, 32_064, 32_768, 50_257, 50_304, 100_352, 128_256, 151_936, 152_064, 256_000, 262_144)
NEAR = 0.02  # so far is a loss from the logarithm of the model's own vocabulary, in few digits
ALIKE = 0.0015  # so far from the logarithm of a vocabulary a loss is that of an output in which all words are alike
DIGITS = 4  # of a loss of evaluation: fewer may be the same by rounding
USUAL_PASSES = 32  # of an update, where the text says none: some releases of the Trainer print their sum
# As DeepSpeed, torchtitan, torchtune and loops write them, with the unit before the number or behind it.
UNIT = r"(?:tok(?:en)?s?|samples?|seq(?:uence)?s?|it(?:er(?:ation)?s?)?|steps?)(?:/|_per_)s(?:ec(?:ond)?)?(?:_per_gpu)?"
RATE = re.compile(
    rf"(?:CurrSamplesPerSec=|\btps: *|\b{UNIT}\b[\"']?[:= ] *)(\d[\d,]*\.?\d*)([KkM]?)"
    rf"|\b(?:step|loss|iter(?:ation)?)\b[^\n]{{0,300}}?(?<![\w.,])(\d[\d,]*\.?\d*)([KkM]?) ?{UNIT}\b(?![:=])"
)
THOUSANDS = {"": 1, "K": 1e3, "M": 1e6}  # as nanotron writes rates
RANK = re.compile(r"[ \t]*\[(?:rank|default)\d+\]")  # as torchrun and torchtitan begin a line
RISES, GROWN = 1.04, 1.5  # of steps that grow: each part to the one before, and the last to the first
PARTS = 24  # of a log: in each its median counts
SLOWER = {5: GROWN, 3: 2.0, 2: 3.0}  # times, if at least so many steps are on each side
STOPS, LOST = 3.0, 0.1  # times the usual seconds, and the share of all that such steps take above these
EXPLODED = 10  # times the norms before: noise, warm-up and a hard row make less
SHARE = 0.9  # of the steps: a rate that is 0 after them is as it should be


def signs(log: Log, has_marks: bool, passes: int = USUAL_PASSES, vocabulary: int | None = None) -> list[Seen]:
    """Return what the lines of a trainer show. A mark comes first: it says why a loss is 0.

    `has_marks`: DeepSpeed may have written the norms. `passes`: those of an update. `vocabulary`: that of the model.
    """
    mark = norm_is_a_mark(log.norms) if has_marks else None
    skips = steps_overflow(log)  # why the norm, or the rate, is 0
    found = [
        mark,
        forward_is_broken(log.losses, passes),
        gradients_are_nan_first(log),
        loss_is_nan(log.losses),
        loss_is_zero(log.losses),
        skipped := norm_is_nan(log.norms),
        skips,
        None if skipped or skips else stands_still("loss-stands-still", log.losses),
        evaluation_stands_still(log),
        None if skips else norm_is_zero(log, vocabulary),
        None if mark else stands_still("norm-constant", log.norms),
        norm_is_scaled(log.norms),
        None if skips else rate_ends(log.rates),
        steps_slow_down(log),
        steps_stop(log),
        ranks_save_apart(log.text),
    ]
    return [seen for seen in found if seen]


def signs_in_words(text: str, words: Sequence[Sentence], has_marks: bool = True) -> list[Seen]:
    """Return what a person says of such lines, the cause first."""
    said = {id: meets(row.said, words) for id, row in rows().items() if has_marks or id != "norm-sqrt2"}
    found = [sign_in_words(id, text, sentence) for id, sentence in said.items() if sentence]
    return sorted(found, key=lambda each: each.id != "norm-sqrt2")


def guesses_by_words(text: str, words: Sequence[Sentence]) -> list[Seen]:
    """Return what a person's words alone may mean, where nothing else was found."""
    said = {id: meets(row.alone, words) for id, row in rows().items()}
    return [replace(sign_in_words(id, text, each), sure="possible") for id, each in said.items() if each]


# --- Each check returns one sign of signs.toml, or None


def forward_is_broken(losses: Series, passes: int) -> Seen | None:
    """The first loss is far above that of random weights, and the next is 0 or NaN, with no usual norm beside it."""
    if len(losses.values) < 2:
        return None
    first, second, *_ = losses.values
    if not BROKEN * RANDOM * passes < first < math.inf:
        return None
    if (math.isfinite(second) and second != 0) or _is_usual(losses.lines[1].values.get("norm", math.nan)):
        return None
    return losses.sign("forward-broken", 0, first=first, random=RANDOM)


def gradients_are_nan_first(log: Log) -> Seen | None:
    """A norm is not finite in the steps right before the first loss that is not.

    A loss of 0 shows no such order: the Trainer leaves NaN out of a mean over steps.
    """
    before = [*itertools.takewhile(lambda line: math.isfinite(line.values.get("loss", 0)), log.usual)]
    with_norm = [line for line in before if "norm" in line.values]
    wrong = [*itertools.takewhile(lambda line: not math.isfinite(line.values["norm"]), reversed(with_norm))]
    if not wrong or len(before) == len(log.usual):
        return None
    last, first, lost = wrong[0], wrong[-1], log.usual[len(before)]
    if "loss" not in last.values and last.values.get("step") == lost.values.get("step"):
        return None  # its own norm, in a line above
    at = f" at {first.moment}" if first.moment else ""
    return sign("norm-nan-first", log.text, first.place, at=at)


def loss_is_nan(losses: Series) -> Seen | None:
    """A loss is not a number."""
    is_finite = [*map(math.isfinite, losses.values)]
    if all(is_finite):
        return None
    first = is_finite.index(False)
    since = " from the first line on" if len(is_finite) > 1 else ""
    if first:
        *norms, last = (line.values.get("norm", math.nan) for line in losses.lines[:first])
        since = " from some step on: it was finite before"
        if norms and last > EXPLODED * statistics.median(norms):
            since += f", with grad_norm {last:.3g} in the last line and {statistics.median(norms):.3g} until then"
    return losses.sign("loss-nan", first, since=since)


def loss_is_zero(losses: Series) -> Seen | None:
    """The loss is 0 at the end, and not because it is small."""
    values = losses.values
    if values[-1:] != [0]:
        return None
    norms = [line.values["norm"] for line in losses.lines if line.values["loss"] == 0 and "norm" in line.values]
    if values == [0] and not norms:
        return None  # one line says little
    if _is_rounded(values, norms):
        return None
    written = sorted({f"{norm:.4g}" for norm in norms})
    beside = f", with grad_norm {' or '.join(written)}" if len(written) in (1, 2) else ""
    first = values.index(0)
    before = [line.values.get("norm", 0.0) for line in losses.lines[:first]]
    wrong = [*itertools.takewhile(lambda norm: not math.isfinite(norm), reversed(before))]
    beside += f", after a line with grad_norm {wrong[-1]:g}" if wrong else ""
    return losses.sign("loss-zero", first - len(wrong), beside=beside)


def _is_rounded(losses: list[float], norms: list[float]) -> bool:
    """Whether a loss of 0 is a small one: all others are small, or each 0 has a usual norm beside it."""
    is_small = any(losses) and not max(losses) > SMALL_LOSS
    return is_small or (len(norms) == losses.count(0) and all(map(_is_usual, norms)))


def stands_still(id: str, series: Series) -> Seen | None:
    """All of many lines have the same value, which is not 0."""
    values = series.values
    if len(values) < MANY or len({*values}) > 1 or not 0 < abs(values[0]) < math.inf:
        return None
    return series.sign(id, 0, beside=f", {values[0]:g} in each of {len(values)} lines")


def norm_is_a_mark(norms: Series) -> Seen | None:
    """The last norm is the root of a number of groups."""
    counts = [*map(marked_groups, norms.values)]
    if not counts or not counts[-1]:
        return None
    # The root of two, twice, is a mark by itself. Others are usual norms, unless the loss is 0 beside them.
    if counts[-2:] != [2, 2] and norms.lines[-1].values.get("loss") != 0:
        return None
    return norms.sign("norm-sqrt2", counts.index(counts[-1]), norm=norms.values[-1], count=counts[-1])


def norm_is_nan(norms: Series) -> Seen | None:
    """The last two norms are not finite."""
    wrong = [*itertools.takewhile(lambda norm: not math.isfinite(norm), reversed(norms.values))]
    return norms.sign("norm-nan", -len(wrong)) if len(wrong) > 1 else None


def evaluation_stands_still(log: Log) -> Seen | None:
    """Each evaluation has the same loss, to the last digit."""
    losses = [loss for _, loss in log.evaluations]
    if len(losses) < FEW or len({*losses}) > 1 or len(losses[0].lstrip("0.").replace(".", "")) < DIGITS:
        return None
    return sign(
        "loss-evaluated-same", log.text, log.evaluations[0][0], beside=f" is {losses[0]} in each of {len(losses)}"
    )


def norm_is_zero(log: Log, vocabulary: int | None) -> Seen | None:
    """The norm is 0 in all lines."""
    if len(log.norms.values) < FEW or any(log.norms.values):
        return None
    words = uniform(log.losses.values, vocabulary)
    beside = f"; the loss is ln({words:,}), as of words that are all alike" if words else ""
    return log.norms.sign("norm-zero", 0, beside=beside)


def uniform(losses: list[float], vocabulary: int | None) -> int | None:
    """Return the vocabulary of which all losses are the logarithm, as of an output that knows nothing."""
    if not losses:
        return None
    of_words, far = ([vocabulary], NEAR) if vocabulary else (VOCABULARIES, ALIKE)
    middle = statistics.median(losses)
    nearest = min(of_words, key=lambda words: abs(math.log(words) - middle))
    return nearest if all(abs(loss - math.log(nearest)) < far for loss in losses) else None


def norm_is_scaled(norms: Series) -> Seen | None:
    """The norm is as large as if it were multiplied by a loss scale."""
    finite = [*filter(math.isfinite, norms.values)]
    if len(finite) < FEW:
        return None
    middle = statistics.median(finite)
    if not 0.01 * SCALE < middle < 1000 * SCALE:
        return None
    return norms.sign("norm-scaled", 0, value=middle)


def steps_overflow(log: Log) -> Seen | None:
    """Steps are skipped, more than the ten or so with which fp16 begins: its first scale is too high."""
    count, first, last, low = 0, 0, 0, math.inf
    for match in OVERFLOW.finditer(log.text):
        scale = float(match[1] or 0)
        count = count + 1 if scale <= low else 1  # a scale that rose in between had steps that were taken
        first = match.start() if count == 1 else first
        last, low = match.start(), float(match[2] or match[1] or 0)
    # A norm or a rate of 0 in all lines, up to the last of them: no step was taken between.
    are_zero = [each.lines for each in (log.norms, log.rates) if len(each.values) >= FEW and not any(each.values)]
    is_still = any(lines[-2].place < last for lines in are_zero)
    if count > MOST_OVERFLOWS or (count and (is_still or 0 < low <= 1)):
        return sign("overflow-skips", log.text, first, count=count)
    for _, step, skipped, _ in log.progress[-1:]:
        if skipped > max(MOST_OVERFLOWS, step / 2):
            return sign("overflow-skips", log.text, log.progress[0][0], count=skipped)
    of_megatron = [(int(match[1]), match.start()) for match in SKIPPED.finditer(log.text)]
    at_end = [*itertools.takewhile(lambda each: each[0], reversed(of_megatron))]
    count = sum(skipped for skipped, _ in at_end)
    return sign("overflow-skips", log.text, at_end[-1][1], count=count) if count > MOST_OVERFLOWS else None


def rate_ends(rates: Series) -> Seen | None:
    """The learning rate is 0 in all lines, or in more of the last ones than a schedule has."""
    is_zero = [not rate for rate in rates.values]
    zeros = len([*itertools.takewhile(bool, reversed(is_zero))])
    ended = len(is_zero) - zeros
    if zeros < FEW or ended >= SHARE * len(is_zero):
        return None
    if ended == 0:
        return rates.sign("rate-zero", 0)
    return rates.sign("rate-ends-early", ended, count=zeros, lines=len(is_zero))


def steps_slow_down(log: Log) -> Seen | None:
    """Steps become slower: steadily, or all from one on. What the next file of a text says is of another run."""
    steps, by = timed(log)
    ends = [match.start() for match in re.finditer(BETWEEN_TEXTS, log.text)]
    for _, each in itertools.groupby(steps, key=lambda step: bisect.bisect(ends, step[0])):
        of_file = [*each]
        seconds = [row[1] for row in of_file]
        if slower := _steadily(seconds) or (_late if by == "bar" else _from_one_on)(seconds):
            at, early, late = slower
            beside = f" ({late:.3g} s, and {early:.3g} s before)" if by != "rate" else ""
            return sign("steps-slow-down", log.text, of_file[at][0], factor=late / early, beside=beside)
    return None


def steps_stop(log: Log) -> Seen | None:
    """Steps at regular places take many times the others. A bar's seconds are means over several."""
    steps, by = timed(log)
    seconds = [row[1] for row in steps]
    if by == "bar" or not seconds or BETWEEN_TEXTS in log.text[steps[0][0] : steps[-1][0]]:
        return None
    usual = statistics.median(seconds)
    stops = [number for number in range(1, len(seconds)) if seconds[number] > STOPS * usual]  # the first compiles
    gaps = [after - before for before, after in itertools.pairwise(stops)]
    if len(stops) < FEW or 2 * gaps.count(period := statistics.mode(gaps)) <= len(gaps) or period == 1:
        return None
    late = statistics.median(seconds[number] for number in stops)
    share = sum(seconds[number] - usual for number in stops) / sum(seconds)
    beside = f" ({late:.3g} s, and {usual:.3g} s)" if by != "rate" else ""
    values = {"period": period, "factor": late / usual, "beside": beside, "share": share}
    return sign("steps-stop", log.text, steps[stops[0]][0], **values) if share > LOST else None


def timed(log: Log) -> tuple[list[tuple[int, float]], Literal["bar", "seconds", "rate"]]:
    """Return the places and the seconds of steps, and by what: a rate has the inverse of its unit in their place."""
    bars = [*BAR.finditer(log.text)]
    total = statistics.mode(each[2] for each in bars) if bars else ""  # others load, or evaluate
    of_bars = [(each.start(), _seconds(each)) for each in bars if each[2] == total]
    seconds = [(line.place, line.values["seconds"]) for line in log.lines if line.values.get("seconds")]
    if of_bars or seconds:
        return of_bars or _of_one_rank(log.text, seconds), "bar" if of_bars else "seconds"
    found = [(each.start(), each[1] or each[3], each[2] or each[4] or "") for each in RATE.finditer(log.text)]
    rates = [(place, float(rate.replace(",", "")) * THOUSANDS[of.upper()]) for place, rate, of in found]
    return _of_one_rank(log.text, [(place, 1 / rate) for place, rate in rates if rate]), "rate"


def _of_one_rank(text: str, steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the steps of one rank, where each prints them: its first step is one, and not as many as ranks."""
    matches = [RANK.match(text, text.rfind("\n", 0, place) + 1) for place, _ in steps]
    ranks = [match[0] if match else "" for match in matches]
    usual = statistics.mode(ranks) if ranks else ""
    return [step for step, rank in zip(steps, ranks, strict=True) if rank == usual]


def _steadily(seconds: list[float]) -> tuple[int, float, float] | None:
    """Return where the last of eight parts begins, and the seconds of the second and the last, if all but one rise.

    The first step compiles, or a rate counts it wrongly: the second part says whether they grow.
    """
    part, middles = _medians(seconds, 8)
    rises = sorted(after - RISES * before for before, after in itertools.pairwise(middles))
    if len(seconds) <= 4 or rises[1] <= 0 or middles != sorted(middles) or middles[-1] <= GROWN * middles[1]:
        return None
    return len(seconds) - part, middles[1], middles[-1]


def _late(seconds: list[float]) -> tuple[int, float, float] | None:
    """Return the same where the last quarter is much slower than the second. Bars are too noisy for single steps."""
    part = len(seconds) // 4
    if len(seconds) < 3 * MANY:
        return None
    early, late = statistics.median(seconds[part : 2 * part]), statistics.median(seconds[-part:])
    return (len(seconds) - part, early, late) if late > SLOWER[2] * early else None


def _from_one_on(seconds: list[float]) -> tuple[int, float, float] | None:
    """Return where slower steps begin, and the median seconds before and after. One step in eight may differ."""
    part, middles = _medians(seconds, PARTS)
    largest, slower = 0.0, None
    for at in range(2, len(middles) - 1):
        first = 1 if at > 2 else 0  # the first step compiles
        early, late = sorted(middles[first:at]), sorted(middles[at:])
        least = next(times for count, times in SLOWER.items() if count <= min(at, len(late)))
        ratio = late[len(late) // MANY] / early[-1 - len(early) // MANY]
        if ratio > max(least, largest):
            largest, slower = ratio, (at * part, statistics.median(early), statistics.median(late))
    return slower


def _medians(seconds: list[float], parts: int) -> tuple[int, list[float]]:
    part = max(1, len(seconds) // parts)
    return part, [statistics.median(seconds[at : at + part]) for at in range(0, len(seconds) - part + 1, part)]


def _seconds(bar: re.Match) -> float:
    """Return the seconds of a step by a progress bar."""
    number = float(bar[3])
    return number if bar[4] == "s/it" else 1 / max(number, 1e-9)


def ranks_save_apart(text: str) -> Seen | None:
    """Ranks save one checkpoint to folders whose names differ by seconds. Steps have folders of their own."""
    saves = [*SAVING.finditer(text)]
    folders = sorted({match[1] for match in saves})
    moments = {re.sub(r"\d{1,2}$", "", folder) for folder in folders}
    if not 1 < len(folders) < len(saves) or len(moments) > 1:
        return None
    first, second = folders[0][-40:], folders[1][-40:]
    return sign("ranks-save-apart", text, saves[0].start(), count=len(folders), first=first, second=second)


def marked_groups(norm: float) -> int:
    """Return of how many groups of parameters a norm is DeepSpeed's mark, -1 for each. A norm of 2 or 3 is usual."""
    if not 1 < norm < MOST_GROUPS**0.5 + 0.1:
        return 0
    count = round(norm**2)
    is_whole = math.isqrt(count) ** 2 == count
    return 0 if is_whole or abs(norm - count**0.5) >= 1e-3 else count


def _is_usual(norm: float) -> bool:
    """Whether gradients may have this norm."""
    return 0 < norm < math.inf and not marked_groups(norm)
