"""Compares a published row with its prediction, and with simpler ways to predict."""

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.architecture import flops_per_row
from study.predictor.outside import predict, sources
from study.predictor.outside.rows import FOLDER, Row
from study.predictor.outside.setups import NoSetup, Training, training_of

FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
OFF_BY = {"memory": 0.1, "time": 0.3}  # a prediction that is off by more has missed, and needs an explanation
NOTHING = "neither memory nor time was published"


@dataclass(frozen=True)
class Quantity:
    """One number of a row, predicted and measured: bytes, or seconds of a step."""

    quantity: Literal["memory", "time"]
    predicted: float
    measured: float
    interval: tuple[float, float] | None
    others: dict[str, float] = field(default_factory=dict)  # the predictions of simpler ways

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def missed(self) -> bool:
        return abs(self.error) > OFF_BY[self.quantity]

    @property
    def inside(self) -> bool | None:
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


@dataclass(frozen=True)
class Compared:
    """A row with its quantities. `reason` says why a measured quantity has no prediction."""

    row: Row
    quantities: tuple[Quantity, ...]
    reason: str | None
    assumed: tuple[str, ...]  # because neither the row nor its source says it

    @property
    def role(self) -> str | None:
        source = sources.own().get(self.row.source)
        return source and source.role_of(self.row)

    def why_off(self, quantity: Quantity) -> str | None:
        """Why a prediction missed, if that is known."""
        source = sources.own().get(self.row.source)
        return source and source.why_off(self.row, quantity.quantity) if quantity.missed else None

    def as_json(self) -> dict:
        row = self.row.model_dump(exclude={"memory_GB", "mfu"})
        said = {"key": key_of(self.row), "role": self.role, "reason": self.reason, "assumed": self.assumed}
        return row | said | {"quantities": [asdict(quantity) for quantity in self.quantities]}


def compared(row: Row) -> Compared:
    if row.memory_bytes is None and row.step_s is None:
        return Compared(row, (), NOTHING, ())
    try:
        training = training_of(row)
    except (NoSetup, Stop) as reason:
        return Compared(row, (), str(reason), ())
    quantities, reasons = [], []
    for name, measured in (("memory", row.memory_bytes), ("time", row.step_s)):
        if measured is None:
            continue
        try:
            quantities.append(_quantity(name, measured, row, training))
        except (NoSetup, Stop) as reason:
            reasons.append(f"{name}: {reason}")
    assumed = training.assumed + (training.assumed_of_machine if row.step_s is not None else ())
    if row.memory_bytes is not None and row.kind is None:
        assumed += ("memory is what PyTorch allocated",)
    return Compared(row, tuple(quantities), "; ".join(reasons) or None, assumed)


def _quantity(name: Literal["memory", "time"], measured: float, row: Row, training: Training) -> Quantity:
    if name == "memory":
        predicted, others = predict.memory(training, row.kind), {}
    else:
        predicted, others = predict.step(training), {"flat 40 % MFU": _short(_flat_s(training))}
        if (earlier_s := _earlier().get(key_of(row))) is not None:
            others["earlier middle"] = earlier_s
    interval = predicted.interval and tuple(map(_short, predicted.interval))
    return Quantity(name, _short(predicted.value), _short(measured), interval, others)


def _short(value: float) -> float:
    """Six significant digits, so that the file of predictions stays small."""
    return float(f"{value:.6g}")


def _flat_s(training: Training) -> float:
    if training.machine is None:
        raise NoSetup(training.no_machine)
    setup, gpu = training.setup, GPUS[training.machine.gpu]
    peak = gpu.single_flops_per_s if setup.precision == "fp32" else gpu.half_flops_per_s
    flops = flops_per_row(setup.model, setup.sequence) * setup.micro_batch * setup.accumulation
    return flops / (FLAT_MFU * peak)


@functools.cache
def _earlier() -> dict[str, float]:
    """Seconds of a step of own rows, from before the model of time: the middle of the interval of `advise`."""
    return json.loads((FOLDER / "earlier.json").read_text())


def simulated(row: Row) -> list[Quantity]:
    """What a simulator predicts of its own rows, from their notes. Empty if the source is no simulator."""
    quantities = []
    if (match := re.search(r"says (\d+\.\d+)", row.memory_kind or "")) and row.memory_GB:
        quantities.append(Quantity("memory", float(match[1]) * 2**30, row.memory_bytes, None))
    if (match := re.search(r"predicts (\d+\.\d+) ms", row.notes or "")) and row.step_s:
        quantities.append(Quantity("time", float(match[1]) / 1e3, row.step_s, None))
    return quantities


def key_of(row: Row) -> str:
    """The identity of a row: it changes whenever the row changes."""
    return hashlib.sha256(row.model_dump_json().encode()).hexdigest()[:12]
