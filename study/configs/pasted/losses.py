"""Read the losses, norms and rates that trainers print: what is zero, not a number, constant, or ends too early.

Lines of the Hugging Face Trainer and what stands on it, of DeepSpeed, Accelerate's examples, Lightning, torchtitan and
progress bars. A healthy training has none of these signs; GRPO's loss begins at 0, and fp16 skips its first steps.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
SHARE = 0.9  # of the steps: a rate that is 0 after them is as it should be


@dataclass(frozen=True)
class Line:
    """What one line of a trainer says. None: it does not say that."""

    place: int
    loss: float | None
    norm: float | None
    rate: float | None
    is_reinforced: bool  # GRPO and the like, where a loss of 0 is usual


def lines(text: str) -> list[Line]:
    """Return the lines with a loss or a norm, in their order."""
    found: list[Line] = []
    end = 0
    for row in text.splitlines(keepends=True):
        place, end = end, end + len(row)
        if len(row) > LONGEST or not WORDS.search(row) or OTHER.search(row):
            continue
        values = {name: _value(pattern, row) for name, pattern in VALUES.items()}
        if values["loss"] is not None or values["norm"] is not None:
            found.append(Line(place, is_reinforced="reward" in row, **values))
        if len(found) == MOST_LINES:
            break
    return found


def falls(text: str) -> bool:
    """Whether the losses of a log fall: the last quarter is lower than the first."""
    losses = [line.loss for line in lines(text) if line.loss is not None]
    part = len(losses) // 4
    return len(losses) >= MANY and statistics.median(losses[-part:]) < FALLS * statistics.median(losses[:part])


def _value(pattern: re.Pattern, row: str) -> float | None:
    match = pattern.search(row)
    return float(match[1]) if match else None


def signs(text: str, words: Sequence[Sentence] = ()) -> list[Seen]:
    """Return what the lines of a trainer show, or else a person's words about them."""
    told = lines(text)
    found = [*_losses(text, told), *_norms(text, told), *_overflows(text), *_rates(text, told)]
    found += [*_seconds(text), *_folders(text)]
    if not found and len(told) < FEW:  # where a log has more, a person's words say less
        for id, row in rows().items():
            if sentence := meets(row.get("said", ()), words):
                found.append(sign(id, text, max(text.find(sentence), 0), since="", beside="", norm=2**0.5, count=2))
    return sorted(found, key=lambda each: each.id != "norm-sqrt2")  # it says why a loss is 0: NaN


def _losses(text: str, told: list[Line]) -> Iterator[Seen]:
    with_loss = [line for line in told if line.loss is not None and not line.is_reinforced]
    losses = [line.loss for line in with_loss if line.loss is not None]
    if not losses:
        return
    if bad := [line for line in with_loss if line.loss is not None and not abs(line.loss) < float("inf")]:
        since = "" if bad[0] == with_loss[0] else " from some step on: it was finite before"
        yield sign("loss-nan", text, bad[0].place, since=since)
    zeros = [line for line in with_loss if line.loss == 0]
    # A loss that is rounded to 0 has a usual norm beside it.
    odd = [line for line in zeros if line.norm is None or not 0 < line.norm < float("inf") or _groups(line.norm)]
    alone = len(zeros) == len(losses) and (len(zeros) > 1 or zeros[0].norm is not None)
    if zeros and losses[-1] == 0 and odd and (max(losses) > 0.05 or alone):
        norms = sorted({f"{line.norm:.4g}" for line in zeros if line.norm is not None})
        beside = f", with grad_norm {' or '.join(norms)}" if 0 < len(norms) <= 2 else ""
        yield sign("loss-zero", text, zeros[0].place, beside=beside)
    if len(losses) >= MANY and len({*losses}) == 1 and losses[0] != 0:
        yield sign("loss-stands-still", text, with_loss[0].place, value=losses[0], count=len(losses))


def _norms(text: str, told: list[Line]) -> Iterator[Seen]:
    with_norm = [line for line in told if line.norm is not None and not line.is_reinforced]
    norms = [line.norm for line in with_norm if line.norm is not None]
    count = _groups(norms[-1]) if norms else None
    of_marks = [line for line in with_norm if count and _groups(line.norm) == count]
    # The root of two, twice, is a mark by itself. Others are usual norms, unless the loss is 0 beside them.
    is_twice = count == 2 and len(norms) > 1 and _groups(norms[-2]) == 2
    if of_marks and (is_twice or with_norm[-1].loss == 0):
        yield sign("norm-sqrt2", text, of_marks[0].place, norm=norms[-1], count=count)
    if len(norms) < 2:
        return
    finite = [norm for norm in norms if abs(norm) < float("inf")]
    if not any(abs(norm) < float("inf") for norm in norms[-2:]):
        yield sign("norm-nan", text, with_norm[-1].place)
    if len(norms) >= FEW and not any(norms):
        yield sign("norm-zero", text, with_norm[0].place)
    if len(norms) >= MANY and len({*norms}) == 1 and norms[0] and not _groups(norms[0]) and finite:
        yield sign("norm-constant", text, with_norm[0].place, value=norms[0], count=len(norms))
    if len(finite) >= FEW and 0.01 * SCALE < statistics.median(finite) < 1000 * SCALE:
        yield sign("norm-scaled", text, with_norm[0].place, value=statistics.median(finite))


def _overflows(text: str) -> Iterator[Seen]:
    overflows = [*OVERFLOW.finditer(text)]
    # fp16 begins with a scale that is too high, and halves it: some ten steps at first are usual.
    if len(overflows) > 20 or (overflows and float(overflows[-1][1]) <= 1):
        yield sign("overflow-skips", text, overflows[-1].start(), count=len(overflows))


def _rates(text: str, told: list[Line]) -> Iterator[Seen]:
    rated = [line for line in told if line.rate is not None]
    rates = [line.rate for line in rated if line.rate is not None]
    ended = next((number for number in range(len(rates)) if not any(rates[number:])), len(rates))
    if len(rates) >= FEW and ended == 0:
        yield sign("rate-zero", text, rated[0].place)
    elif len(rates) - ended >= FEW and 0 < ended < SHARE * len(rates):
        yield sign("rate-ends-early", text, rated[ended].place, count=len(rates) - ended, lines=len(rates))


def _seconds(text: str) -> Iterator[Seen]:
    steps = [(float(m[3]) if m[4] == "s/it" else 1 / max(float(m[3]), 1e-9), m.start()) for m in BAR.finditer(text)]
    if len(steps) < 3 * MANY:
        return
    part = len(steps) // 4
    early = statistics.median(seconds for seconds, _ in steps[part : 2 * part])
    late = statistics.median(seconds for seconds, _ in steps[-part:])
    if late > 3 * early:
        yield sign("steps-slow-down", text, steps[-part][1], late=late, early=early)


def _folders(text: str) -> Iterator[Seen]:
    saves = [*SAVING.finditer(text)]
    # Steps have folders of their own: those of one moment differ by a second or two in a time.
    named = sorted({match[1] for match in saves})
    if 1 < len(named) < len(saves) and len({re.sub(r"\d{1,2}$", "", name) for name in named}) == 1:
        values = {"count": len(named), "first": named[0][-40:], "second": named[1][-40:]}
        yield sign("ranks-save-apart", text, saves[0].start(), **values)


def _groups(norm: float | None) -> int | None:
    """Return of how many groups of parameters a norm is DeepSpeed's mark, -1 for each. A norm of 2 or 3 is usual."""
    count = round(norm**2) if norm is not None and 1 < norm < MOST_GROUPS**0.5 + 0.1 else 0
    is_mark = count > 1 and count**0.5 % 1 and norm is not None and abs(norm - count**0.5) < 1e-3
    return count if is_mark else None
