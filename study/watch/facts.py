"""The facts of a run's record, from which the rules of diagnosis judge. What the record lacks raises Unknown."""

from collections.abc import Iterator
from typing import Any, TypeVar

from study.core.files import value_at
from study.records import metrics
from study.records.metrics import ELEMENT_BYTES
from study.records.schema import Record

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
STATES = ("weights", "gradients", "master", "moments")

Results = Iterator[str | tuple[str, dict[str, Any]]]  # ids of findings, alone or with their values


T = TypeVar("T")


class Unknown(Exception):
    """The record lacks a value that a rule needs. Nothing is guessed."""


def required(value: T | None) -> T:
    """Return the value. Raise Unknown if it is None or empty."""
    if value is None or value in ([], {}):
        raise Unknown
    return value


class Facts:
    """A record, and values derived from it. Every attribute raises Unknown if the record does not hold its value."""

    def __init__(self, record: Record):
        self.record = record
        self.seen = record.observed
        self.promised = record.promised
        self.watched = record.watched

    def __getattr__(self, name: str) -> Any:
        """Return an observed value that is known."""
        return required(getattr(self.seen, name))

    @property
    def stage(self) -> int:
        """ZeRO's stage; 0 without ZeRO. Unknown if the prepared objects were not read back."""
        required(self.seen.wrapper)
        # Stage 0 is DeepSpeed, too: its engine reports 0, and plain training None. Neither shards anything.
        return self.seen.stage or 0

    @property
    def sharded(self) -> bool:
        """Whether ranks share any state: with neither ZeRO nor FSDP they are replicas."""
        return bool(self.seen.stage) or "FSDP" in f"{self.seen.wrapper} {self.seen.distributed_type}"

    @property
    def weights(self) -> str:
        """The dtype of the weights; several are separated by spaces."""
        return required(self.seen.dtypes.get("weights"))

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights, and of the reduced gradients."""
        # Measured: DDP under autocast reduces gradients of float32, DeepSpeed after its cast those of bfloat16, half
        # the bytes. Both have the dtype of the weights, so one number serves for weights and gradients.
        return required(max(ELEMENT_BYTES.get(dtype, 0) for dtype in self.weights.split()) or None)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, and so of a collective over all of them, as they are counted."""
        return self.parameters * self.element_bytes

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by component at the peak of the rank that holds most."""
        return required(metrics.components(self.record))

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def states_bytes(self) -> int:
        """Bytes of the model states at that peak, which the stages divide."""
        return sum(self.peak.get(role, 0) for role in STATES)

    def moved_bytes(self, *kinds: str) -> int:
        """Return what the first rank moves in a step by these collectives. Every rank moves as much."""
        counted = required(self.record.traffic.per_rank)[0]
        return sum(each.bytes for kind, each in counted.items() if kind in kinds)

    def requested_home(self, part: str) -> str:
        """Return where the optimizer states or the weights should be offloaded to."""
        # A run of this study's own has no promises: what the engine resolved is then what was asked for.
        resolved = value_at(self.seen.deepspeed, f"zero_optimization.{part}.device")
        return getattr(self.promised, part) or resolved or "none"
