"""Read the losses, norms and rates that trainers print: what is zero, not a number, constant, or ends too early.

Lines of the Hugging Face Trainer and what stands on it, of DeepSpeed, Accelerate's examples, Lightning, torchtitan and
progress bars. A healthy training has none of these signs; GRPO's loss begins at 0, and fp16 skips its first steps.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from study.configs.pasted.tracebacks import Seen, rows, sign
from study.configs.pasted.words import Sentence, meets

NUMBER = r"[\"']?\s*[:=]?\s*[\"']?(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(?![\w.%])"
VALUES = {
    "loss": re.compile(rf"(?<![\w/.-])(?:train[_/ ])?loss{NUMBER}", re.IGNORECASE),
    "norm": re.compile(rf"(?<![\w.-])(?:train/|actor/)?(?:grad(?:ient)?[_ ]?norm|gnorm){NUMBER}", re.IGNORECASE),
    "rate": re.compile(rf"(?<![\w.-])(?:learning[_ ]rate|lr){NUMBER}", re.IGNORECASE),
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
SHARE = 0.9  # of the steps: a rate that is 0 after them is as it should be


@dataclass(frozen=True)
class Line:
    """What one line of a trainer says."""

    place: int
    values: dict[str, float]  # by the names of VALUES
    is_reinforced: bool  # GRPO and the like, where a loss of 0 is usual


@dataclass(frozen=True)
class Series:
    """The lines that say one value, and the values, in their order."""

    lines: list[Line]
    values: list[float]

    @classmethod
    def of(cls, name: str, lines: list[Line]) -> Self:
        lines = [line for line in lines if name in line.values]
        return cls(lines, [line.values[name] for line in lines])

    @property
    def is_constant(self) -> bool:
        return len(self.values) >= MANY and len({*self.values}) == 1


@dataclass(frozen=True)
class Log:
    """What the lines of a trainer say in a text."""

    text: str
    lines: list[Line]  # with a loss or a norm
    losses: Series
    norms: Series
    rates: Series

    @classmethod
    def of(cls, text: str) -> Self:
        lines = [*itertools.islice(_lines(text), MOST_LINES)]
        usual = [line for line in lines if not line.is_reinforced]
        return cls(text, lines, Series.of("loss", usual), Series.of("norm", usual), Series.of("rate", lines))

    @property
    def falls(self) -> bool:
        """Whether the last quarter of the losses is lower than the first."""
        losses = Series.of("loss", self.lines).values
        part = len(losses) // 4
        return len(losses) >= MANY and statistics.median(losses[-part:]) < FALLS * statistics.median(losses[:part])

    def sign(self, id: str, line: Line, **values: Any) -> Seen:
        return sign(id, self.text, line.place, **values)


def _lines(text: str) -> Iterator[Line]:
    end = 0
    for row in text.splitlines(keepends=True):
        place, end = end, end + len(row)
        values = _values(row)
        if "loss" in values or "norm" in values:
            yield Line(place, values, is_reinforced="reward" in row)


def _values(row: str) -> dict[str, float]:
    if len(row) > LONGEST or not WORDS.search(row) or OTHER.search(row):
        return {}
    matches = {name: pattern.search(row) for name, pattern in VALUES.items()}
    return {name: float(match[1]) for name, match in matches.items() if match}


def signs(log: Log) -> list[Seen]:
    """Return what the lines of a trainer show."""
    return [seen for check in CHECKS if (seen := check(log))]


def signs_in_words(text: str, words: Sequence[Sentence]) -> list[Seen]:
    """Return what a person says of such lines, the cause first."""
    found = []
    for id, row in rows().items():
        if sentence := meets(row.get("said", ()), words):
            found.append(sign(id, text, max(text.find(sentence), 0), since="", beside="", norm=2**0.5, count=2))
    return sorted(found, key=lambda each: each.id != "norm-sqrt2")


# --- Each check returns one sign of signs.toml, or None


def norm_is_a_mark(log: Log) -> Seen | None:
    counts = [marked_groups(norm) for norm in log.norms.values]
    if not counts or not counts[-1]:
        return None
    # The root of two, twice, is a mark by itself. Others are usual norms, unless the loss is 0 beside them.
    if counts[-2:] == [2, 2] or log.norms.lines[-1].values.get("loss") == 0:
        first = log.norms.lines[counts.index(counts[-1])]
        return log.sign("norm-sqrt2", first, norm=log.norms.values[-1], count=counts[-1])
    return None


def loss_is_nan(log: Log) -> Seen | None:
    odd = [line for line in log.losses.lines if not math.isfinite(line.values["loss"])]
    if not odd:
        return None
    since = "" if odd[0] is log.losses.lines[0] else " from some step on: it was finite before"
    return log.sign("loss-nan", odd[0], since=since)


def loss_is_zero(log: Log) -> Seen | None:
    losses = log.losses.values
    zeros = [line for line in log.losses.lines if line.values["loss"] == 0]
    if not zeros or losses[-1] != 0:
        return None
    if len(zeros) < len(losses) and not max(losses) > SMALL_LOSS:
        return None  # it is rounded
    norms = Series.of("norm", zeros).values
    if len(losses) == 1 and not norms:
        return None  # one value says little
    if len(norms) == len(zeros) and all(map(_is_usual, norms)):
        return None  # it is rounded as well
    named = sorted({f"{norm:.4g}" for norm in norms})
    beside = f", with grad_norm {' or '.join(named)}" if len(named) in (1, 2) else ""
    return log.sign("loss-zero", zeros[0], beside=beside)


def loss_stands_still(log: Log) -> Seen | None:
    losses = log.losses
    if not losses.is_constant or losses.values[0] == 0:
        return None
    return log.sign("loss-stands-still", losses.lines[0], value=losses.values[0], count=len(losses.values))


def norm_is_nan(log: Log) -> Seen | None:
    last = log.norms.values[-2:]
    if len(last) < 2 or any(map(math.isfinite, last)):
        return None
    return log.sign("norm-nan", log.norms.lines[-1])


def norm_is_zero(log: Log) -> Seen | None:
    norms = log.norms
    if len(norms.values) < FEW or any(norms.values):
        return None
    return log.sign("norm-zero", norms.lines[0])


def norm_is_constant(log: Log) -> Seen | None:
    norms = log.norms
    if not norms.is_constant or not _is_usual(abs(norms.values[0])):
        return None
    return log.sign("norm-constant", norms.lines[0], value=norms.values[0], count=len(norms.values))


def norm_is_scaled(log: Log) -> Seen | None:
    finite = [norm for norm in log.norms.values if math.isfinite(norm)]
    if len(finite) < FEW:
        return None
    middle = statistics.median(finite)
    if not 0.01 * SCALE < middle < 1000 * SCALE:
        return None
    return log.sign("norm-scaled", log.norms.lines[0], value=middle)


def steps_overflow(log: Log) -> Seen | None:
    overflows = [*OVERFLOW.finditer(log.text)]
    if not overflows:
        return None
    # fp16 begins with a scale that is too high, and halves it: some ten steps at first are usual.
    last = overflows[-1]
    if len(overflows) <= MOST_OVERFLOWS and float(last[1]) > 1:
        return None
    return sign("overflow-skips", log.text, last.start(), count=len(overflows))


def rate_ends(log: Log) -> Seen | None:
    rates = log.rates.values
    ended = 1 + max((place for place, rate in enumerate(rates) if rate), default=-1)
    zeros = len(rates) - ended
    if zeros < FEW or ended >= SHARE * len(rates):
        return None
    if ended == 0:
        return log.sign("rate-zero", log.rates.lines[0])
    return log.sign("rate-ends-early", log.rates.lines[ended], count=zeros, lines=len(rates))


def steps_slow_down(log: Log) -> Seen | None:
    bars = [*BAR.finditer(log.text)]
    if len(bars) < 3 * MANY:
        return None
    seconds = [*map(_seconds, bars)]
    part = len(bars) // 4
    early, late = statistics.median(seconds[part : 2 * part]), statistics.median(seconds[-part:])
    if late <= 3 * early:
        return None
    return sign("steps-slow-down", log.text, bars[-part].start(), late=late, early=early)


def ranks_save_apart(log: Log) -> Seen | None:
    saves = [*SAVING.finditer(log.text)]
    named = sorted({match[1] for match in saves})
    if not 1 < len(named) < len(saves):
        return None
    # Steps have folders of their own: those of one moment differ by a second or two in a time.
    if len({re.sub(r"\d{1,2}$", "", name) for name in named}) > 1:
        return None
    values = {"count": len(named), "first": named[0][-40:], "second": named[1][-40:]}
    return sign("ranks-save-apart", log.text, saves[0].start(), **values)


# A mark says why a loss is 0.
CHECKS = (
    norm_is_a_mark, loss_is_nan, loss_is_zero, loss_stands_still, norm_is_nan, norm_is_zero, norm_is_constant,
    norm_is_scaled, steps_overflow, rate_ends, steps_slow_down, ranks_save_apart,
)  # fmt: skip


def marked_groups(norm: float) -> int:
    """Return of how many groups of parameters a norm is DeepSpeed's mark, -1 for each. A norm of 2 or 3 is usual."""
    if not 1 < norm < MOST_GROUPS**0.5 + 0.1:
        return 0
    count = round(norm**2)
    is_whole = math.isqrt(count) ** 2 == count
    return 0 if is_whole or abs(norm - count**0.5) >= 1e-3 else count


def _is_usual(norm: float) -> bool:
    return 0 < norm < math.inf and not marked_groups(norm)


def _seconds(bar: re.Match) -> float:
    number = float(bar[3])
    return number if bar[4] == "s/it" else 1 / max(number, 1e-9)
