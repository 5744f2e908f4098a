"""The kinds of evidence. Each computes the number that a claim's sentence names, so that a test can compare the two."""

import ast
import csv
import operator
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import load
from study.core.text import is_number, short
from study.predict.front import Machine, Setup, estimate, generic, named, papers, step_time
from study.records import metrics
from study.records.compare import paired
from study.records.runs import Run, Runs

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
REPORTS = ROOT / "reports"
MAX_BYTES = 4 * 2**20
UNITS = {"GB": 1e9, "%": 0.01}
Value = float | int | str | bool | None
# Besides quantities of a record, what its collectives moved.
MOVED = ("volume", "tensors", "calls")
TRAINING = "training"  # in a selection: which training of the script of document 002
TAKE: dict[str, Callable] = {"median": median, "least": min, "most": max}
# What nearly every document takes for granted. Other runs count only if the selection names the setting.
USUAL: dict[str, tuple] = {"optimizer": (None, "adamw"), "lora_rank": (None,), "train_only": (None,)}
# Fields of a piece of evidence that do not say what its value is of.
ABOUT_THE_VALUE = {"kind", "value", "unit", "tolerance", "note"}


class Piece(BaseModel):
    """A piece of evidence: the value that the claim's sentence names, in its unit."""

    model_config = STRICT

    kind: str
    value: Value
    unit: Literal["", "GB", "%"] = ""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.005  # a share: the rounding of the sentence
    note: str = ""

    def raw(self, runs: Sequence[Run]) -> Value:
        """The value that the evidence gives now, before its unit; None if there are no such runs."""
        raise NotImplementedError

    def computed(self, runs: Sequence[Run]) -> Value:
        """The value that the evidence gives now, as the sentence names it."""
        value = self.raw(runs)
        if self.unit and is_number(value):
            return value / UNITS[self.unit]
        return value

    def agrees(self, value: Value) -> bool:
        """Whether a computed value is the one that the sentence names."""
        if is_number(value) and is_number(self.value):
            return abs(value - self.value) <= self.tolerance * abs(self.value) + 1e-12
        return type(value) is type(self.value) and value == self.value

    @property
    def what(self) -> str:
        """What the value is of, in words."""
        given = self.model_dump(exclude_unset=True, exclude=ABOUT_THE_VALUE)
        return ", ".join(f"{name} {_words(value)}" for name, value in given.items())

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {short(self.value)} {self.unit}".rstrip()
        return f"{self.kind}: {self.what}{value}" + (f" ({self.note})" if self.note else "")


def _words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_words(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return " or ".join(map(str, value))
    return short(value)


# --- measured: runs, or virtual ranks ------------------------------------------------------------------------------


class OfRuns(Piece):
    """A quantity of the runs that have some facts, or its ratio to that of other runs."""

    kind: Literal["runs", "virtual"]
    where: dict
    quantity: str
    over: dict | None = None  # what differs on the other side of a ratio
    per: str | None = None  # divides within each run
    take: Literal["median", "least", "most"] = "median"
    collectives: list[str] | None = None
    node_ranks: int | None = None

    def raw(self, runs: Sequence[Run]) -> Value:
        # A rank that runs alone, or weights without values, are evidence of another kind.
        is_virtual = self.kind == "virtual"
        runs = [run for run in runs if (run.record.is_virtual or run.record.requested.init == "none") == is_virtual]
        if self.quantity in MOVED and "ranks" not in self.where:
            runs = [run for run in runs if run.record.observed.ranks != 1]  # a single rank sends nothing
        if self.over is None:
            return self._one_value(self._values(chosen(runs, self.where), self.where))
        # --- a ratio, by pairs of equal cells on one machine
        theirs = self.where | self.over
        ratios = []
        for ours, others in paired(chosen(runs, self.where), chosen(runs, theirs), {*self.over} - {TRAINING}):
            above, below = self._values(ours, self.where), self._values(others, theirs)
            if above and below and median(below):
                ratios.append(median(above) / median(below))
        return self._one_value(ratios)

    def _one_value(self, values: list) -> Value:
        """The median, or the least or most; a text that all runs share. None without values."""
        if not values:
            return None
        if is_number(values[0]):
            return TAKE[self.take](values)
        if len(set(values)) > 1:
            raise ValueError(f"the runs disagree: {', '.join(sorted(set(map(str, values))))}")
        return values[0]

    def _values(self, runs: Sequence[Run], where: dict) -> list:
        """The quantity of each run that has it."""
        values = []
        for run in runs:
            record = run.record
            if self.quantity in MOVED:
                value: Any = metrics.moved(record, self.collectives, self.quantity, self.node_ranks)
            else:
                value = metrics.value(record, self.quantity, where.get(TRAINING))
            if self.per is not None and value is not None:
                in_bytes = self.per == "weight_bytes"
                divisor = metrics.weight_bytes(record) if in_bytes else metrics.value(record, self.per)
                value = value / divisor if divisor else None
            values.append(value)
        return [value for value in values if value is not None]


def chosen(runs: Sequence[Run], where: dict) -> list[Run]:
    """The runs that are done and have these facts. A list means any of its values."""
    wanted = {name: value for name, value in where.items() if name != TRAINING}
    return Runs(tuple(runs)).select(**(USUAL | wanted)).done


# --- kept: answers of the libraries, and of others -----------------------------------------------------------------


class Reproduction(Piece):
    kind: Literal["reproduction"]
    script: str

    def raw(self, runs: Sequence[Run]) -> Value:
        return kept_answer(self.script)


def kept_answer(script: str) -> Value:
    """What a script of reproductions/ found when its answer was kept. Raise ValueError without an answer."""
    for row in _answers():
        if row["trial"] == {"what": "reproduction", "name": script}:
            return row["found"]
    raise ValueError(f"no answer of reproductions/{script}.py is kept in reports/")


@cache
def _answers() -> list[dict]:
    how: dict[str, Any] = {"what": "valid", "remedy": "restore it from the history", "most_bytes": MAX_BYTES}
    return [row for path in sorted(REPORTS.glob("*/trials.json")) for row in load(path, list, **how)]


class Conform(Piece):
    """Whether a property holds with an adapter: the kept results of `study conform`."""

    kind: Literal["conform"]
    adapter: str
    property: str
    release: str  # such as deepspeed-0.17.6

    def raw(self, runs: Sequence[Run]) -> Value:
        package, _, version = self.release.partition("-")
        wanted = {"adapter": self.adapter, "property": self.property, package: version}
        with (REPORTS / "conform" / "answers.csv").open(encoding="utf-8", newline="") as file:
            (row,) = [row for row in csv.DictReader(file) if wanted.items() <= row.items()]
        return row["answer"] == "holds"


class Source(Piece):
    """What a source says, as somebody read it: nothing is computed."""

    kind: Literal["source"]
    value: Value = None
    quote: str
    address: str

    def computed(self, runs: Sequence[Run]) -> Value:
        return self.value


# --- computed: with the numbers of a document, by the formulas of the papers, by our predictor ---------------------

OPERATORS: dict[type, Callable] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.Pow: operator.pow, ast.USub: operator.neg},
}
# Bytes of model states by the ZeRO paper. They take: parameters, stage, ranks, precision and optimizer.
FORMULAS: dict[str, Callable] = {
    "states": lambda *given: sum(papers.states_bytes(*given).values()),
    "weights": lambda *given: papers.states_bytes(*given)["weights"],
    "gradients": lambda *given: papers.states_bytes(*given)["gradients"],
    "optimizer": lambda *given: papers.states_bytes(*given)["optimizer"],
}


class Arithmetic(Piece):
    kind: Literal["arithmetic", "formula"]
    expression: str

    def raw(self, runs: Sequence[Run]) -> Value:
        return calculated(self.expression)


def calculated(expression: str) -> float:
    """The value of an expression of numbers and the paper's formulas. Raise ValueError for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, TypeError, KeyError) as error:
        raise ValueError(f"{expression!r} cannot be computed: {error}") from None


def _value(node: ast.AST):
    # Not `eval`: texts of claims come from contributors.
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](_value(operand))
        case ast.Call(ast.Name(name), given, []):
            return FORMULAS[name](*map(_value, given))
    raise TypeError(f"numbers, + - * / ** and {', '.join(FORMULAS)} are allowed")


class Prediction(Piece):
    """A quantity that our predictor gives for a training, or its ratio to that of another training."""

    kind: Literal["prediction"]
    arm: str
    model: str | None = None  # by its name; else by parameters, layers and hidden
    parameters: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ranks: int = 1
    precision: str = "bf16_cast"
    micro_batch: int = 1
    accumulation: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    gpu: str | None = None
    link: str | None = None
    quantity: str
    over: dict | None = None  # what differs in the other training

    def raw(self, runs: Sequence[Run]) -> Value:
        value = self._predicted()
        if self.over is not None:
            value /= self.model_copy(update=self.over)._predicted()
        return value

    def _predicted(self) -> float:
        if self.model:
            model = named(self.model)
        elif self.parameters is None or self.layers is None or self.hidden is None:
            raise Stop("no model is given", "give model, or parameters, layers and hidden")
        else:
            model = generic(self.parameters, self.layers, self.hidden)
        how = self.model_dump(
            include={"ranks", "precision", "micro_batch", "accumulation", "sequence", "checkpointing"}
        )
        setup = Setup.of_arm(model, self.arm, device="cuda", **how)
        if self.quantity == "tokens_per_s":
            if self.gpu is None:
                raise Stop("seconds need a GPU", 'give gpu = "H100-80GB", for example')
            tokens = self.ranks * self.micro_batch * self.accumulation * self.sequence
            return tokens / step_time(setup, Machine(gpu=self.gpu, link=self.link)).seconds
        prediction = estimate(setup)
        at_peak, traffic = prediction.at_peak, prediction.traffic
        if self.quantity.startswith("component."):
            return at_peak.get(self.quantity.removeprefix("component."), 0)
        if self.quantity == "states_bytes":
            return sum(at_peak.get(role, 0) for role in metrics.STATES)
        if self.quantity == "volume":  # as in the papers, an all-reduce moves its tensor twice
            return sum(traffic.values()) + traffic.get("all_reduce", 0)
        return getattr(prediction, self.quantity)


Evidence = Annotated[OfRuns | Reproduction | Source | Arithmetic | Prediction | Conform, Field(discriminator="kind")]
