"""The kinds of evidence. Each computes the number that a claim's sentence names, so that a test can compare the two."""

import csv
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import load
from study.core.text import is_number, parsed_unit, short
from study.ledger import selection
from study.ledger.expressions import FORMULAS, FUNCTIONS, computed
from study.ledger.selection import MOVED, Quantity
from study.predict.front import Estimate, Machine, Setup, Transformer, estimate, generic, named, step_time
from study.records.runs import Run

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
REPORTS = ROOT / "reports"
MAX_BYTES = 4 * 2**20
STATES = ("weights", "gradients", "master", "moments")
Value = float | int | str | bool | None


class Piece(BaseModel):
    """A piece of evidence: the value that the claim's sentence names, in its unit."""

    model_config = STRICT

    kind: str
    value: Value
    unit: str = ""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.005  # a share: the rounding of the sentence
    note: str = ""

    def computed(self, runs: Sequence[Run]) -> Value:
        """Return the value that the evidence gives now; None if nothing is computed, or if there are no such runs."""
        raise NotImplementedError

    @property
    def what(self) -> str:
        """Return what the value is of, in words."""
        given = self.model_dump(
            by_alias=True, exclude_unset=True, exclude={"kind", "value", "unit", "tolerance", "note"}
        )
        return ", ".join(f"{name} {_words(value)}" for name, value in given.items())

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {short(self.value)} {self.unit}".rstrip()
        return f"{self.kind}: {self.what}{value}" + (f" ({self.note})" if self.note else "")

    def in_unit(self, value: Value) -> Value:
        return value / parsed_unit(self.unit)[1] if self.unit and is_number(value) else value

    def agrees(self, value: Value) -> bool:
        """Return whether a computed value is the one that the sentence names."""
        if is_number(value) and is_number(self.value):
            return abs(value - self.value) <= self.tolerance * abs(self.value) + 1e-12
        return type(value) is type(self.value) and value == self.value


def _words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_words(each)}" for name, each in value.items())
    return " or ".join(map(str, value)) if isinstance(value, (list, tuple)) else short(value)


class OfRuns(Piece):
    kind: Literal["runs", "virtual"]
    where: dict
    quantity: str
    over: dict | None = None  # what differs on the other side of a ratio
    per: str | None = None  # divides within each run
    take: Literal["median", "least", "most"] = "median"
    collectives: list[str] | None = None
    node_ranks: int | None = None

    def computed(self, runs: Sequence[Run]) -> Value:
        runs = [run for run in runs if _is_virtual(run) == (self.kind == "virtual")]
        if self.quantity in MOVED and "ranks" not in self.where:
            runs = [run for run in runs if run.record.observed.ranks != 1]  # a single rank sends nothing
        quantity = Quantity(self.quantity, self.per, self.collectives, self.node_ranks)
        if self.over is None:
            return self.in_unit(selection.of_runs(runs, self.where, quantity, self.take))
        return self.in_unit(selection.ratio(runs, self.where, self.over, quantity, self.take))


def _is_virtual(run: Run) -> bool:
    """Return whether a run moved no data between ranks, or its weights had no values."""
    return run.record.is_virtual or run.record.requested.init == "none"


class Reproduction(Piece):
    kind: Literal["reproduction"]
    script: str

    def computed(self, runs: Sequence[Run]) -> Value:
        return self.in_unit(kept_answer(self.script))


def kept_answer(script: str) -> Value:
    """Return what a script of reproductions/ found when its answer was kept. Raise ValueError without an answer."""
    for row in _answers():
        if row["trial"] == {"what": "reproduction", "name": script}:
            return row["found"]
    raise ValueError(f"no answer of reproductions/{script}.py is kept in reports/")


@cache
def _answers() -> list[dict]:
    return [row for path in sorted(REPORTS.glob("*/trials.json")) for row in _json(path)]


@cache
def _json(path) -> Any:
    return load(path, Any, what="valid", remedy="restore it from the history", most_bytes=MAX_BYTES)


class Source(Piece):
    """What a source says, as somebody read it: nothing is computed."""

    kind: Literal["source"]
    value: Value = None
    quote: str
    address: str

    def computed(self, runs: Sequence[Run]) -> Value:
        return self.value


class Arithmetic(Piece):
    kind: Literal["arithmetic", "formula"]
    expression: str

    def computed(self, runs: Sequence[Run]) -> Value:
        return self.in_unit(computed(self.expression, FORMULAS if self.kind == "formula" else FUNCTIONS))


class Training(BaseModel):
    """A training as our predictor takes it."""

    model_config = STRICT

    arm: str
    model: str | None = None
    parameters: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ranks: int = 1
    precision: str = "bf16_cast"
    micro_batch: int = 1
    accumulation: int = 1
    sequence: int = 1024
    attention: str = "sdpa"
    checkpointing: bool = False
    gpu: str | None = None
    link: str | None = None

    def quantity(self, name: str) -> float:
        given = self.model_dump(exclude={"arm", "model", "parameters", "layers", "hidden", "gpu", "link"})
        setup = Setup.of_arm(self._transformer(), self.arm, device="cuda", **given)
        if name not in ("seconds", "tokens_per_s"):
            return _predicted(estimate(setup), name)
        if self.gpu is None:
            raise Stop("seconds need a GPU", 'give gpu = "H100-80GB", for example')
        seconds = step_time(setup, Machine(gpu=self.gpu, link=self.link)).seconds
        tokens = self.ranks * self.micro_batch * self.accumulation * self.sequence
        return seconds if name == "seconds" else tokens / seconds

    def _transformer(self) -> Transformer:
        if self.model:
            return named(self.model)
        if self.parameters is None or self.layers is None or self.hidden is None:
            raise Stop("no model is given", "give model, or parameters, layers and hidden")
        return generic(self.parameters, self.layers, self.hidden)


def _predicted(prediction: Estimate, name: str) -> float:
    """Return a quantity of a prediction of memory and traffic."""
    if name.startswith("component."):
        return prediction.at_peak.get(name.removeprefix("component."), 0)
    if name == "states_bytes":
        return sum(prediction.at_peak.get(role, 0) for role in STATES)
    if name == "volume":  # as in the papers, an all-reduce moves its tensor twice
        return sum(prediction.traffic.values()) + prediction.traffic.get("all_reduce", 0)
    if name == "tensors":
        return sum(prediction.traffic.values())
    return getattr(prediction, name)


class Prediction(Piece, Training):
    kind: Literal["prediction"]
    quantity_of: str = Field(alias="quantity")
    over: dict | None = None

    def computed(self, runs: Sequence[Run]) -> Value:
        given = self.model_dump(include={*Training.model_fields})
        value = Training(**given).quantity(self.quantity_of)
        if self.over is not None:
            value /= Training(**given | self.over).quantity(self.quantity_of)
        return self.in_unit(value)


class Conform(Piece):
    """Whether a property holds with an adapter: the kept results of `study conform`."""

    kind: Literal["conform"]
    adapter: str
    property: str
    release: str  # such as deepspeed-0.17.6

    def computed(self, runs: Sequence[Run]) -> Value:
        package, _, version = self.release.partition("-")
        asked = {"adapter": self.adapter, "property": self.property, package: version}
        (row,) = [row for row in _conform() if asked.items() <= row.items()]
        return row["answer"] == "holds"


@cache
def _conform() -> list[dict[str, str]]:
    with (REPORTS / "conform" / "answers.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


Evidence = Annotated[OfRuns | Reproduction | Source | Arithmetic | Prediction | Conform, Field(discriminator="kind")]
