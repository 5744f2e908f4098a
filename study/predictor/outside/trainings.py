"""What we predict of a published row, and how far that is from the measurement."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.described import NotPredicted, Training, timed_setup, training_of
from study.predictor.outside.published import Quantity, Row
from study.predictor.timing.steptime import step_time

FLAT = "flat 40 % MFU"
FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
OFF_BY = {"memory": 0.1, "time": 0.3}  # a prediction that is off by more has missed, and needs an explanation
MANY_ROWS = 100  # fewer are predicted in one process
ROWS_AT_ONCE = 10
MOST_PROCESSES = 8  # each has traces of its own in memory
NOTHING = "neither memory nor time was published"


@dataclass(frozen=True)
class Compared:
    """One number of a row, predicted and measured: bytes, or seconds of a step."""

    quantity: Quantity
    predicted: float
    measured: float
    interval: tuple[float, float] | None = None
    others: dict[str, float] = field(default_factory=dict)  # the predictions of simpler methods

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def off(self) -> float:
        return abs(self.error)

    @property
    def missed(self) -> bool:
        return self.off > OFF_BY[self.quantity]

    @property
    def inside(self) -> bool | None:
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


@dataclass(frozen=True)
class ComparedRow:
    """A row with its quantities. `reason` says why a measured quantity has no prediction."""

    row: Row
    quantities: tuple[Compared, ...]
    reason: str | None

    @property
    def complete(self) -> bool:
        """Return whether nothing was assumed."""
        return not self.row.assumptions

    def why_off(self, compared: Compared) -> str | None:
        """Return why a prediction missed, if that is known."""
        return self.row.origin.why_off(self.row, compared.quantity) if compared.missed else None

    def as_json(self) -> dict:
        row = self.row.model_dump(exclude={"memory_GB", "mfu", "assumed", "not_predicted"}, exclude_none=True)
        ours = {"key": key_of(self.row), "role": self.row.role, "assumed": self.row.assumptions, "reason": self.reason}
        return row | ours | {"quantities": [asdict(compared) for compared in self.quantities]}


def key_of(row: Row) -> str:
    """Return the identity of a row: it changes whenever the row changes."""
    return sha256(row.model_dump_json(exclude_none=True).encode()).hexdigest()[:12]


def compare_all(members: Sequence[Row]) -> list[ComparedRow]:
    """Predict rows, in several processes if they are many. Neighbours are often of one model, and share its traces."""
    if len(members) < MANY_ROWS or "torch" in sys.modules:  # whose threads a fork would lack
        return [*map(compare, members)]
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        return [*pool.map(compare, members, chunksize=ROWS_AT_ONCE)]


def compare(row: Row) -> ComparedRow:
    """Predict the quantities of a row."""
    if row.memory_bytes is None and row.step_s is None:
        return ComparedRow(row, (), NOTHING)
    try:
        training = training_of(row)
    except (NotPredicted, Stop) as reason:
        return ComparedRow(row, (), str(reason))
    compared: list[Compared] = []
    reasons = []
    for quantity, predict in (("memory", _memory), ("time", _time)):
        try:
            compared += predict(training)
        except (NotPredicted, Stop) as reason:
            reasons.append(f"{quantity}: {reason}")
    return ComparedRow(row, tuple(compared), "; ".join(reasons) or None)


def _memory(training: Training) -> list[Compared]:
    """Compare the bytes that a GPU holds at the peak. A row without a kind: allocated, up to the driver's."""
    row = training.row
    if row.memory_bytes is None:
        return []
    if row.products and "torchao" not in row.libraries:  # torchao keeps what 16-bit products keep
        raise NotPredicted("what is kept of 8-bit products depends on the library")
    if training.setup.fsdp and training.setup.tensor_ranks > 1:
        raise NotPredicted("what ranks hold that also divide layers is not known for FSDP")
    measured = _short(row.memory_bytes)
    if row.kind == "allocated":
        return [Compared("memory", _short(estimate(training.setup).peak_bytes), measured)]
    gpu = training.machine.gpu if training.machine else None
    kinds = memory_kinds(training.setup, gpu)
    predicted = getattr(kinds, row.kind or "allocated")
    if predicted is None:
        raise NotPredicted(f"{row.kind} memory is not known for ranks that divide a model")
    interval = None
    if row.kind is None and (most := kinds.driver or (gpu and GPUS[gpu].memory_bytes)):
        interval = (_short(kinds.allocated), _short(most))  # the source may have read any of the three
    return [Compared("memory", _short(predicted), measured, interval)]


def _time(training: Training) -> list[Compared]:
    """Compare the seconds of a step."""
    row = training.row
    if row.step_s is None:
        return []
    setup = timed_setup(training)
    if training.machine is None:
        raise NotPredicted(row.not_predicted or f"the GPU {row.gpu_name or row.gpu} is not known")
    if row.deterministic:
        raise NotPredicted("how much slower deterministic algorithms are is not known")
    step = step_time(setup, training.machine)
    peak = GPUS[training.machine.gpu].flops_per_s(not setup.has_half_products)
    sharing = setup.sequence_ranks * setup.tensor_ranks
    flops = setup.model.flops_per_row(setup.sequence) * setup.micro_batch * setup.accumulation / sharing
    others = {FLAT: _short(flops / (FLAT_MFU * peak))}
    interval = (_short(step.low_s), _short(step.high_s))
    return [Compared("time", _short(step.seconds), _short(row.step_s), interval, others)]


def _short(value: float) -> float:
    """Return six significant digits, so that the file of predictions stays small."""
    return float(f"{value:.6g}")
