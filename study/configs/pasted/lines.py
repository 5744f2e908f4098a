"""Read the lines of trainers: losses, norms, rates, steps and epochs.

Lines of the Hugging Face Trainer and what stands on it, of DeepSpeed, Accelerate's examples, Lightning, torchtitan,
Megatron, nanotron and progress bars; and tables, as TensorBoard, W&B, Lightning and notebooks write them.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from study.configs.pasted.tracebacks import Seen, line_at, sign

# Lightning fills a number to five characters, so that nan is nan.0 (Tqdm.format_num).
NUMBER = r"[\"']?\s*[:=]?\s*[\"'\[]?(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(?:(?<=[nf])\.0)?(?![\w.%])"
VALUES = {
    "loss": re.compile(rf"(?<![\w/.-])(?:(?:train|lm)[_/ ])?loss(?:_step)?{NUMBER}", re.IGNORECASE),
    "norm": re.compile(rf"(?<![\w.-])(?:train/|actor/)?(?:grad(?:ient)?[_ ]?norm|gnorm){NUMBER}", re.IGNORECASE),
    "rate": re.compile(rf"(?<![\w.-])(?:learning[_ ]rate|lr){NUMBER}", re.IGNORECASE),
    "epoch": re.compile(rf"(?<![\w.-])epoch{NUMBER}", re.IGNORECASE),
    "step": re.compile(rf"(?<![\w.-])(?:global[_ ])?(?:step|iter(?:ation)?){NUMBER}", re.IGNORECASE),
}
MAY_BE_NAN = ("loss", "norm", "rate")
# Of a step. A time without a name may be that since the start, unless it is in milliseconds, as nanoGPT writes; its
# speedruns write that of all steps as train_time.
SECONDS = re.compile(
    r"(?i)(?<![\w.-])(?:(?:step|iter(?:ation)?)[_ ]time|time per (?:step|iteration))[\"']?(?P<of_ms> \(ms\))?"
    r"[\"']?\s*[:=]?\s*[\"']?(?P<named>\d+(?:\.\d*)?) ?s?(?![\w.%:])"
    r"|(?<![\w.-])(?<!train )(?<!total )(?!(?:train|total)[_ ]time)(?:\w+[_ ])?(?:time|dt)"
    r"[\"']?\s*[:=]?\s*(?P<ms>\d+(?:\.\d*)?) ?ms\b"
    r"|(?<![\w.])(?P<beside>\d+\.\d+) ?s(?:ec\w*)?/(?:step|iter\w*)\b(?!\s*[:=])"
)
# A line of DeepSpeed's own (engine.py, _report_progress), which counts skipped steps from the beginning.
PROGRESS = re.compile(rf"\bstep=(\d+), skipped=(\d+), lr{NUMBER}")
BAR = re.compile(r"\|\s*(\d+)/(\d+) \[[\d:]+<[\d:?]+,\s*([\d.]+)(s/it|it/s)")
WORDS = re.compile("loss|norm", re.IGNORECASE)
EVALUATED = re.compile(rf"(?<![\w.-])(?:eval(?:uation)?|val(?:idation)?)[_/ ]loss{NUMBER}", re.IGNORECASE)
OTHER = re.compile(r"eval_loss|\bFile \"|Traceback|Error")
# A table's head and cells: of CSV files, and of notebooks.
HEAD = re.compile(r"(?i)loss|^.?wall time\W+step\W+value")
NUMBER_ALONE = re.compile(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?")
HELD_OUT = re.compile(r"(?i)[\w /-]*\b(?:eval|val|test)")
LONGEST = 2000  # characters of a line
MOST_LINES = 20_000
FEW, MANY = 3, 8  # lines that are a sign
FALLS = 0.9  # of the first losses
OF_PAIRS = re.compile(r"rewards/(?:chosen|rejected|margins)\b")  # DPO and the like, whose loss is not of tokens


@dataclass(frozen=True)
class Line:
    """What one line of a trainer says."""

    place: int
    values: dict[str, float]  # by the names of VALUES
    is_reinforced: bool = False  # GRPO and the like, where a loss of 0 is usual
    is_of_pairs: bool = False  # DPO and the like, whose loss is not of tokens

    @property
    def moment(self) -> str:
        """Its step, or its epoch, as a sentence has it. Empty: it says neither."""
        return next((f"{name} {self.values[name]:g}" for name in ("step", "epoch") if name in self.values), "")


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
    evaluations: list[tuple[int, str]]  # places and losses, not those that bars repeat
    progress: list[tuple[int, int, int, float]]  # DeepSpeed's own lines: place, step, skipped steps, rate

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the lines of a trainer out of a text."""
        lines = [*itertools.islice(_lines(text), MOST_LINES)]
        usual = [line for line in lines if not line.is_reinforced]
        progress = [(each.start(), int(each[1]), int(each[2]), float(each[3])) for each in PROGRESS.finditer(text)]
        losses, norms = Series.of("loss", text, usual), Series.of("norm", text, usual)
        rates = Series.of("rate", text, lines)
        if not rates.lines:
            rates = Series.of("rate", text, [Line(place, {"rate": rate}) for place, *_, rate in progress])
        return cls(text, lines, usual, losses, norms, rates, [*_evaluations(text)], progress)

    @property
    def falls(self) -> bool:
        """Whether the last quarter of the losses is lower than the first."""
        losses = self.losses.values
        part = len(losses) // 4
        return len(losses) >= MANY and statistics.median(losses[-part:]) < FALLS * statistics.median(losses[:part])


def _lines(text: str) -> Iterator[Line]:
    """Yield the lines with a loss or a norm. Those of a table have their names above them."""
    end, names = 0, list[str]()
    is_of_loss = bool(re.search("loss", text, re.IGNORECASE))
    for row in text.splitlines(keepends=True):
        place, end = end, end + len(row)
        values = _values(row)
        cells = [cell.strip(' "') for cell in re.split("[,\t]", row.strip())] if len(row) <= LONGEST else []
        if len(cells) > 1 and len(cells) == len(names) and any(map(NUMBER_ALONE.fullmatch, cells)):
            pairs = [*zip(names, cells, strict=True)]
            row = " ".join(f"{name}: {cell}" for name, cell in pairs if not HELD_OUT.match(name))
            values = _values(row)
        elif HEAD.search(row) and not values:
            names = ["loss" if cell == "Value" and is_of_loss else cell for cell in cells]  # TensorBoard names it so
        else:
            names = []
        if "loss" in values or "norm" in values:
            is_of_pairs = bool(OF_PAIRS.search(row))
            yield Line(place, values, is_reinforced="reward" in row and not is_of_pairs, is_of_pairs=is_of_pairs)


def _evaluations(text: str) -> Iterator[tuple[int, str]]:
    """Yield the places and losses of evaluations. A bar repeats the last one until the next."""
    for match in EVALUATED.finditer(text):
        if not BAR.search(line_at(text, match.start())):
            yield match.start(), match[1]


def _values(row: str) -> dict[str, float]:
    """Return what a line says, by the names of VALUES; nothing, if it is no line of a trainer."""
    if len(row) > LONGEST or not WORDS.search(row) or OTHER.search(row):
        return {}
    matches = {name: pattern.search(row) for name, pattern in VALUES.items()}
    values = {name: float(match[1]) for name, match in matches.items() if match}
    values = {name: value for name, value in values.items() if name in MAY_BE_NAN or math.isfinite(value)}
    if match := SECONDS.search(row):
        is_ms = match["of_ms"] or match["ms"]
        values["seconds"] = float(match["named"] or match["ms"] or match["beside"]) / (1000 if is_ms else 1)
    return values
