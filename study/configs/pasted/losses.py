"""Read the losses, norms and rates that trainers print: what is zero, not a number, constant, or ends too early.

Lines of the Hugging Face Trainer and what stands on it, of DeepSpeed, Accelerate's examples, Lightning, torchtitan and
progress bars. A healthy training has none of these signs; GRPO's loss begins at 0, and fp16 skips its first steps.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from study.configs.pasted.tracebacks import Seen, rows, sign
from study.configs.pasted.words import Sentence, meets

NUMBER = r"[\"']?\s*[:=]?\s*[\"']?(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(?![\w.%])"
VALUES = {
    "loss": re.compile(rf"(?<![\w/.-])(?:train[_/ ])?loss{NUMBER}", re.IGNORECASE),
    "norm": re.compile(rf"(?<![\w.-])(?:train/|actor/)?(?:grad(?:ient)?[_ ]?norm|gnorm){NUMBER}", re.IGNORECASE),
    "rate": re.compile(rf"(?<![\w.-])(?:learning[_ ]rate|lr){NUMBER}", re.IGNORECASE),
    "epoch": re.compile(rf"(?<![\w.-])epoch{NUMBER}", re.IGNORECASE),
    "step": re.compile(rf"(?<![\w.-])(?:global[_ ])?(?:step|iter(?:ation)?){NUMBER}", re.IGNORECASE),
}
OVERFLOW = re.compile(r"OVERFLOW! Rank \d+ Skipping step\. Attempted loss scale: ([\d.e+]+)")
SAVING = re.compile(r"[Ss]aving [^\n]{0,40}?to (\S{1,200}?\d{6})\b")
BAR = re.compile(r"\|\s*(\d+)/(\d+) \[[\d:]+<[\d:?]+,\s*([\d.]+)(s/it|it/s)")
WORDS = re.compile("loss|norm", re.IGNORECASE)
OTHER = re.compile(r"eval_loss|\bFile \"|Traceback|Error")
LONGEST = 2000  # characters of a line
MOST_GROUPS = 16
SCALE = 65_536
FEW, MANY = 3, 8  # lines that are a sign
MOST_LINES = 20_000
FALLS = 0.9  # of the first losses
SMALL_LOSS = 0.05  # lower ones may be rounded to 0
MOST_OVERFLOWS = 20
RANDOM = math.log(262_144)  # the loss of random weights with the largest vocabulary
BROKEN = 3  # times that: no weights have such a loss
USUAL_PASSES = 32  # of an update, where the text says none: some releases of the Trainer print their sum
SHARE = 0.9  # of the steps: a rate that is 0 after them is as it should be
OF_PAIRS = re.compile(r"rewards/(?:chosen|rejected|margins)\b")  # DPO and the like, whose loss is not of tokens


@dataclass(frozen=True)
class Line:
    """What one line of a trainer says."""

    place: int
    values: dict[str, float]  # by the names of VALUES
    is_reinforced: bool  # GRPO and the like, where a loss of 0 is usual
    is_of_pairs: bool  # DPO and the like, whose loss is not of tokens


@dataclass(frozen=True)
class Series:
    """The lines that say one value, and the values, in their order."""

    text: str
    lines: list[Line]
    values: list[float]

    @classmethod
    def of(cls, name: str, text: str, lines: list[Line]) -> Self:
        """Return the lines that say a value of this name."""
        lines = [line for line in lines if name in line.values]
        return cls(text, lines, [line.values[name] for line in lines])

    @property
    def is_constant(self) -> bool:
        """Whether many lines say the same value."""
        return len(self.values) >= MANY and len({*self.values}) == 1

    def sign(self, id: str, number: int, **values: Any) -> Seen:
        """Return the sign that the line of this number shows."""
        return sign(id, self.text, self.lines[number].place, **values)


@dataclass(frozen=True)
class Log:
    """What the lines of a trainer say in a text."""

    text: str
    lines: list[Line]  # with a loss or a norm
    usual: list[Line]  # of these: a loss of 0 is none of a training that is well
    losses: Series
    norms: Series
    rates: Series

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the lines of a trainer out of a text."""
        lines = [*itertools.islice(_lines(text), MOST_LINES)]
        usual = [line for line in lines if not line.is_reinforced]
        losses, norms = Series.of("loss", text, usual), Series.of("norm", text, usual)
        return cls(text, lines, usual, losses, norms, Series.of("rate", text, lines))

    @property
    def falls(self) -> bool:
        """Whether the last quarter of the losses is lower than the first."""
        losses = self.losses.values
        part = len(losses) // 4
        return len(losses) >= MANY and statistics.median(losses[-part:]) < FALLS * statistics.median(losses[:part])


def _lines(text: str) -> Iterator[Line]:
    """Yield the lines with a loss or a norm."""
    end = 0
    for row in text.splitlines(keepends=True):
        place, end = end, end + len(row)
        values = _values(row)
        if "loss" in values or "norm" in values:
            is_of_pairs = bool(OF_PAIRS.search(row))
            yield Line(place, values, is_reinforced="reward" in row and not is_of_pairs, is_of_pairs=is_of_pairs)


def _values(row: str) -> dict[str, float]:
    """Return what a line says, by the names of VALUES; nothing, if it is no line of a trainer."""
    if len(row) > LONGEST or not WORDS.search(row) or OTHER.search(row):
        return {}
    matches = {name: pattern.search(row) for name, pattern in VALUES.items()}
    return {name: float(match[1]) for name, match in matches.items() if match}


def signs(log: Log, has_marks: bool, passes: int = USUAL_PASSES) -> list[Seen]:
    """Return what the lines of a trainer show. A mark comes first: it says why a loss is 0.

    `has_marks`: DeepSpeed may have written the norms. `passes`: those of an update.
    """
    mark = norm_is_a_mark(log.norms) if has_marks else None
    found = [
        mark,
        forward_is_broken(log.losses, passes),
        gradients_are_nan_first(log),
        loss_is_nan(log.losses),
        loss_is_zero(log.losses),
        loss_stands_still(log.losses),
        norm_is_nan(log.norms),
        norm_is_zero(log.norms),
        None if mark else norm_is_constant(log.norms),
        norm_is_scaled(log.norms),
        steps_overflow(log.text),
        rate_ends(log.rates),
        steps_slow_down(log.text),
        ranks_save_apart(log.text),
    ]
    return [seen for seen in found if seen]


def signs_in_words(text: str, words: Sequence[Sentence], has_marks: bool = True) -> list[Seen]:
    """Return what a person says of such lines, the cause first."""
    found = []
    for id, row in rows().items():
        if id == "norm-sqrt2" and not has_marks:
            continue
        if sentence := meets(row.said, words):
            found.append(sign(id, text, max(text.find(sentence), 0), since="", beside="", norm=2**0.5, count=2))
    return sorted(found, key=lambda each: each.id != "norm-sqrt2")


def guesses_by_words(text: str, words: Sequence[Sentence]) -> list[Seen]:
    """Return what a person's words alone may mean, where nothing else was found."""
    found = []
    for id, row in rows().items():
        if sentence := meets(row.alone, words):
            seen = sign(id, text, max(text.find(sentence), 0), beside="")
            found.append(replace(seen, sure="possible"))
    return found


# --- Each check returns one sign of signs.toml, or None


def forward_is_broken(losses: Series, passes: int) -> Seen | None:
    """The first loss is far above that of random weights, and the next is 0 or NaN, with no usual norm beside it."""
    first, second, *_ = [*losses.values, 0.0, 0.0]
    if len(losses.values) < 2 or not BROKEN * RANDOM * passes < first < math.inf:
        return None
    if (math.isfinite(second) and second != 0) or _is_usual(losses.lines[1].values.get("norm", math.nan)):
        return None
    return losses.sign("forward-broken", 0, first=first, random=RANDOM)


def gradients_are_nan_first(log: Log) -> Seen | None:
    """A norm is not finite in the steps right before the first loss that is not.

    A loss of 0 shows no such order: the Trainer leaves NaN out of a mean over steps.
    """
    is_nan = [not math.isfinite(line.values.get("loss", 0)) for line in log.usual]
    of_loss = is_nan.index(True) if any(is_nan) else 0
    before = [line for line in log.usual[:of_loss] if "norm" in line.values]
    is_finite = [math.isfinite(line.values["norm"]) for line in before]
    if not before or is_finite[-1]:
        return None
    step = log.usual[of_loss].values.get("step")
    if "loss" not in before[-1].values and before[-1].values.get("step") == step:  # its own norm, in a line above
        return None
    first = before[len(is_finite) - is_finite[::-1].index(True) if True in is_finite else 0]
    at = next((f" at {name} {first.values[name]:g}" for name in ("step", "epoch") if name in first.values), "")
    return sign("norm-nan-first", log.text, first.place, at=at)


def loss_is_nan(losses: Series) -> Seen | None:
    """A loss is not a number."""
    is_finite = [*map(math.isfinite, losses.values)]
    if all(is_finite):
        return None
    first = is_finite.index(False)
    return losses.sign("loss-nan", first, since=" from some step on: it was finite before" if first else "")


def loss_is_zero(losses: Series) -> Seen | None:
    """The loss is 0 at the end, and not because it is small."""
    values = losses.values
    if values[-1:] != [0]:
        return None
    zeros = Series.of("norm", losses.text, [line for line in losses.lines if line.values["loss"] == 0])
    if values == [0] and not zeros.values:
        return None  # one line says little
    if _is_rounded(values, zeros.values):
        return None
    norms = sorted({f"{norm:.4g}" for norm in zeros.values})
    beside = f", with grad_norm {' or '.join(norms)}" if len(norms) in (1, 2) else ""
    return losses.sign("loss-zero", values.index(0), beside=beside)


def _is_rounded(losses: list[float], norms: list[float]) -> bool:
    """Whether a loss of 0 is a small one: all others are small, or each 0 has a usual norm beside it."""
    is_small = any(losses) and not max(losses) > SMALL_LOSS
    return is_small or (len(norms) == losses.count(0) and all(map(_is_usual, norms)))


def loss_stands_still(losses: Series) -> Seen | None:
    """The loss is the same in all lines."""
    if not losses.is_constant or losses.values[0] == 0:
        return None
    return losses.sign("loss-stands-still", 0, beside=f", {losses.values[0]:g} in each of {len(losses.values)} lines")


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
    last = norms.values[-2:]
    if len(last) < 2 or any(map(math.isfinite, last)):
        return None
    return norms.sign("norm-nan", -1)


def norm_is_zero(norms: Series) -> Seen | None:
    """The norm is 0 in all lines."""
    if len(norms.values) < FEW or any(norms.values):
        return None
    return norms.sign("norm-zero", 0)


def norm_is_constant(norms: Series) -> Seen | None:
    """The norm is the same in all lines."""
    if not norms.is_constant or not 0 < abs(norms.values[0]) < math.inf:
        return None
    return norms.sign("norm-constant", 0, beside=f", {norms.values[0]:g} in each of {len(norms.values)} lines")


def norm_is_scaled(norms: Series) -> Seen | None:
    """The norm is as large as if it were multiplied by a loss scale."""
    finite = [*filter(math.isfinite, norms.values)]
    if len(finite) < FEW:
        return None
    middle = statistics.median(finite)
    if not 0.01 * SCALE < middle < 1000 * SCALE:
        return None
    return norms.sign("norm-scaled", 0, value=middle)


def steps_overflow(text: str) -> Seen | None:
    """DeepSpeed skips steps, more than the ten or so with which fp16 begins: its first scale is too high."""
    overflows = [*OVERFLOW.finditer(text)]
    if not overflows:
        return None
    last = overflows[-1]
    if len(overflows) <= MOST_OVERFLOWS and float(last[1]) > 1:
        return None
    return sign("overflow-skips", text, last.start(), count=len(overflows))


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


def steps_slow_down(text: str) -> Seen | None:
    """The last quarter of the steps takes much longer than the second."""
    bars = [*BAR.finditer(text)]
    if len(bars) < 3 * MANY:
        return None
    seconds = [*map(_seconds, bars)]
    part = len(bars) // 4
    early, late = statistics.median(seconds[part : 2 * part]), statistics.median(seconds[-part:])
    if late <= 3 * early:
        return None
    return sign("steps-slow-down", text, bars[-part].start(), late=late, early=early)


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
