"""The kinds of evidence. Each computes the number that a claim's sentence names, so that a test can compare the two."""

import ast
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.core.arms import ROOT, load_arm
from study.core.files import load
from study.core.gpus import GPUS
from study.core.recipes import RECIPES
from study.core.settings import Optimizer
from study.core.text import is_number, number_of, short
from study.predict.front import (
    AttentionKernel,
    Batch,
    Hardware,
    Placement,
    Recomputation,
    Training,
    Wanted,
    asked_for,
    estimate,
    papers,
    step_time,
    with_buckets,
)
from study.records import metrics
from study.records.compare import paired
from study.records.runs import Run, Runs

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
REPORTS = ROOT / "reports"
MAX_BYTES = 4 * 2**20
UNITS = {"GB": 1e9, "%": 0.01}
Value = float | int | str | bool | None
MOVED = ("volume", "tensors")  # quantities of a record's collectives
SENT = (*MOVED, "socket_bytes")  # a rank alone sends nothing
TRAINING = "training"  # in a selection: which training of the script of document S002
# Every document trains all weights. Other runs count only if the selection names the setting. Optimizers are not here:
# a sentence about losses is also one about Adafactor, of which ZeRO changes them.
# A number of a CPU and one of a GPU are never one: evidence of GPUs names them. An article's script records no device.
USUAL: dict[str, tuple] = {"lora_rank": (None,), "train_only": (None,), "device": ("cpu", None)}
OF_ESTIMATE = {"parameters": "--params", "ranks": "--gpus"}  # flags of `study estimate` with other names
ABOUT_THE_VALUE = {"kind", "value", "unit", "tolerance", "note", "most"}  # fields that do not say what it is of
SETTING = ("model", "micro_batch", "accumulation", "sequence", "precision", "ranks")  # of a run, as cards count them


class Piece(BaseModel):
    """A piece of evidence: the value that the claim's sentence names, in its unit."""

    model_config = STRICT

    kind: str
    value: Value
    unit: Literal["", "GB", "%"] = ""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.005  # a share: the rounding of the sentence
    note: str = ""

    def raw(self) -> Value:
        """The value that the evidence gives now. In its unit: `computed`."""
        raise NotImplementedError

    def computed(self, runs: Sequence[Run]) -> Value:
        """The value in its unit; None if there are no runs that give it."""
        value = self.raw()
        return value / UNITS[self.unit] if self.unit and is_number(value) else value

    def agrees(self, value: Value) -> bool:
        if is_number(value) and is_number(self.value):
            # The last term is for a claimed 0, of which a share is nothing.
            return abs(value - self.value) <= self.tolerance * abs(self.value) + 1e-12
        # In Python True equals 1: a claimed "yes" must not agree with a count of one.
        return type(value) is type(self.value) and value == self.value

    @property
    def what(self) -> str:  # the value is of
        given = self.model_dump(exclude_unset=True, exclude=ABOUT_THE_VALUE)
        return ", ".join(f"{name} {words(value)}" for name, value in given.items())

    @property
    def shown(self) -> str:
        return "" if self.value is None else f"{in_full(self.value)} {self.unit}".rstrip()


def in_full(value: Value) -> str:
    """Return a value with all digits that the ledger has: four make 0.99998 a 1."""
    text = short(value)
    is_cut = isinstance(value, float) and float(text) != value
    return f"{value:.12g}" if is_cut else text


def words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {words(each)}" for name, each in value.items())
    if isinstance(value, list):  # any of these
        return " or ".join(map(str, value))
    return short(value)


def in_words(quantity: str) -> str:
    """A quantity as cards name it. A ratio to DDP is another one where an all-reduce counts once."""
    named = quantity.rpartition(".")[2].replace("_", " ")
    return f"{named} (an all-reduce counts twice)" if quantity == "volume" else named


class OfRuns(Piece):
    """Measured: a quantity of each run that has some facts, or its ratio to that of another run of the same seed."""

    kind: Literal["runs", "virtual"]
    where: dict
    quantity: str
    n: Annotated[int, Field(gt=0)]  # runs, or pairs of runs, that give a value
    settings: Annotated[int, Field(gt=0)] = 1  # different ones of them: byte counts repeat, and are no sample
    models: Annotated[int, Field(gt=0)] = 1
    most: float | None = None  # the largest of their values, if they differ; `value` is the least then
    over: dict | None = None  # what differs on the other side of a ratio
    per: str | None = None  # divides within each run
    collectives: list[str] | None = None
    node_ranks: int | None = None

    @property
    def what(self) -> str:
        text = in_words(self.quantity)
        if self.collectives:
            text += f" by {words(self.collectives)}"
        if self.node_ranks:
            text += f" between nodes of {self.node_ranks} ranks"
        if self.per:
            text += f" per {self.per.rpartition('.')[2]}"
        text += f" of {words(self.where)}"
        if self.over:
            text += f", over that of {words(self.over)}"
        return f"{text}, in {self.counted}"

    @property
    def counted(self) -> str:
        runs = number_of(self.n, "pairs" if self.over else "runs")
        return runs if self.n == 1 else f"{runs}: {distinct(self.settings, self.models)}"

    def values_with_runs(self, runs: Sequence[Run]) -> list[tuple[Any, tuple[Run, ...]]]:
        """The value of each run or pair, in its unit, with its runs: a median would hide those that differ."""
        ours = self._chosen(runs, self.where)
        valued: list[tuple[Any, tuple[Run, ...]]]
        if self.over is None:
            valued = [(self._value(run, self.where), (run,)) for run in ours]
        else:
            where = self.where | self.over
            valued = [
                (metrics.over(self._value(above, self.where), self._value(below, where)), (above, below))
                for several, others in paired(ours, self._chosen(runs, where), {*self.over} - {TRAINING})
                for above, below in itertools.product(several, others)
                if "seed" in self.over or above.facts["seed"] == below.facts["seed"]
            ]
        return [(value / UNITS[self.unit] if self.unit else value, of) for value, of in valued if value is not None]

    def values(self, runs: Sequence[Run]) -> list:
        return [value for value, _ in self.values_with_runs(runs)]

    def computed(self, runs: Sequence[Run]) -> Value:
        return middle(self.values(runs))

    def agrees(self, value: Value) -> bool:
        if is_number(value) and is_number(self.value) and self.most is not None:
            return self.value * (1 - self.tolerance) <= value <= self.most * (1 + self.tolerance)
        return super().agrees(value)

    def _chosen(self, runs: Sequence[Run], where: dict) -> list[Run]:
        """The finished runs that have these facts, and are evidence of this kind. A list means any of its values."""
        wanted = {name: value for name, value in where.items() if name != TRAINING}
        chosen = []
        for run in Runs(tuple(runs)).select(**(USUAL | wanted)).done:
            # A rank that runs alone, or weights without values, are evidence of another kind.
            is_virtual = run.record.is_virtual or run.record.requested.init == "none"
            sends_nothing = self.quantity in SENT and run.record.observed.ranks == 1 and "ranks" not in self.where
            if is_virtual == (self.kind == "virtual") and not sends_nothing:
                chosen.append(run)
        return chosen

    def _value(self, run: Run, where: dict) -> Any:
        if self.quantity == "states_bytes" and self.per and not metrics.value(run.record, "component.gradients"):
            return None  # its peak is before the gradients, where all stages that keep them hold the same
        value = metrics.value(run.record, self.quantity, where.get(TRAINING))
        if self.quantity in MOVED:
            value = metrics.moved(run.record, self.collectives, self.quantity, self.node_ranks)
        # A run that does not know by what to divide has no value.
        return value if self.per is None else metrics.over(value, metrics.value(run.record, self.per))


def settings_and_models(valued: Sequence[tuple[Any, tuple[Run, ...]]]) -> tuple[int, int]:
    """How many settings and models the runs of some values have; of a pair the first counts."""
    facts = [of[0].facts for _, of in valued]
    return len({tuple(each[name] for name in SETTING) for each in facts}), len({each["model"] for each in facts})


def distinct(settings: int, models: int) -> str:
    return number_of(settings, "settings") + (f" of {models} models" if models > 1 else "")


def middle(values: Sequence) -> Value:
    """The median of values; a text that all share, or "several". None without values."""
    if values and is_number(values[0]):
        return median(values)
    # Texts and truth values have no median.
    if len(set(values)) > 1:
        return "several"
    return values[0] if values else None


class Reproduction(Piece):
    kind: Literal["reproduction"]
    script: str

    @property
    def what(self) -> str:
        return f"{self.script}.py finds"

    def raw(self) -> Value:
        return kept_answers()[self.script]


@cache
def kept_answers() -> dict[str, Value]:
    answers: dict[str, Value] = {}
    for path in sorted(REPORTS.glob("*/trials.json")):
        for row in load(path, list, what="valid", remedy="restore it from the history", most_bytes=MAX_BYTES):
            # Other trials are of settings of the libraries, and have more conditions.
            if row["trial"].keys() == {"what", "name"}:
                answers.setdefault(row["trial"]["name"], row["found"])
    return answers


class OfSource(Piece):
    """A quote, as somebody read it: nothing is computed."""

    kind: Literal["source"]
    value: Value = None
    quote: str
    address: str

    @property
    def what(self) -> str:
        return f"“{self.quote}” ({self.address})"

    def computed(self, runs: Sequence[Run]) -> Value:
        return self.value


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


class Arithmetic(Piece):
    kind: Literal["arithmetic", "formula"]
    expression: str

    @property
    def what(self) -> str:
        return self.expression

    @property
    def is_of_states(self) -> bool:
        """Whether it computes with the ZeRO paper's formula."""
        return any(isinstance(each, ast.Call) for each in ast.walk(ast.parse(self.expression)))

    def raw(self) -> Value:
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
            # Bytes of model states by the ZeRO paper, for parameters, stage, ranks, precision and optimizer.
            held = papers.states_bytes(*map(_value, given))
            return (held | {"states": sum(held.values())})[name]
    raise TypeError("numbers, + - * / **, and states, weights, gradients or optimizer of a stage are allowed")


def flags(given: dict[str, Any]) -> str:
    """Settings of a prediction as flags of `study estimate`."""
    named = {OF_ESTIMATE.get(name, f"--{name}").replace("_", "-"): value for name, value in given.items()}
    return " ".join(flag if value is True else f"{flag} {in_full(value)}" for flag, value in named.items())


class OfPrediction(Piece):
    """A quantity that our predictor gives for a training, or its ratio to that of another training."""

    kind: Literal["prediction"]
    arm: str
    model: str | None = None  # by its name; else by parameters, layers and hidden
    parameters: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ranks: int = 1
    precision: str  # no default: what a sentence says of memory and time depends on it
    optimizer: Optimizer = "adamw"
    micro_batch: int = 1
    accumulation: int = 1
    buckets: int | None = None  # elements; else as the arm's file says
    sequence: int = 1024
    checkpointing: bool = False
    attention_kernel: AttentionKernel = "sdpa"
    gpu: str = ""  # of a peak: that on which it has to fit, where this decides the verdict
    link: str | None = None
    tf32: bool = True  # as our trainer has it for products in fp32; PyTorch's default is off
    quantity: str
    over: dict | None = None  # what differs in the other training

    @property
    def what(self) -> str:
        """The command that predicts it."""
        given = self.model_dump(exclude_defaults=True, exclude={*ABOUT_THE_VALUE, "quantity", "over", "tf32"})
        # An estimate has other defaults.
        given |= {"ranks": self.ranks, "sequence": self.sequence}
        text = f"{in_words(self.quantity)} by study estimate {flags(given)}"
        if not self.tf32:
            text += " (without TF32, which no flag sets)"
        return f"{text}, over that with {flags(self.over)}" if self.over else text

    def raw(self) -> Value:
        value = self._predicted()
        if self.over is not None:
            value /= self.model_copy(update=self.over)._predicted()
        return value

    @property
    def training(self) -> Training:
        # Without a name: a GPT-2 of this size, with as many layers and as wide.
        wanted = Wanted(model=self.model, params=self.parameters, layers=self.layers, hidden=self.hidden)
        model = asked_for(wanted, self.sequence)
        batch = Batch(self.micro_batch, self.accumulation, self.sequence, Recomputation(self.checkpointing))
        placement = Placement.of(with_buckets(load_arm(self.arm), self.buckets), self.ranks, "cuda")
        return Training(model, RECIPES[self.precision], batch, placement, self.optimizer, self.attention_kernel)

    def _predicted(self) -> float:
        training = self.training
        if self.quantity == "tokens_per_s":
            tokens = self.ranks * self.micro_batch * self.accumulation * self.sequence
            return tokens / step_time(training, Hardware(gpu=GPUS[self.gpu], link=self.link, tf32=self.tf32)).seconds
        prediction = estimate(training)
        known = vars(prediction) | {f"component.{role}": size for role, size in prediction.at_peak.items()}
        # As the papers count volume, an all-reduce moves its tensor twice.
        # This is also why DeepSpeed's stages 1 and 2 have 1.5 times DDP's volume and not the paper's 1: they all-reduce
        # gradients and then gather weights, measured (reproductions/reduce_scatter_is_all_reduce.py).
        known["volume"] = sum(prediction.traffic.values()) + prediction.traffic.get("all_reduce", 0)
        return known[self.quantity]


Evidence = Annotated[OfRuns | Reproduction | OfSource | Arithmetic | OfPrediction, Field(discriminator="kind")]
