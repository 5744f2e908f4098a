"""The values of a record that the rules of `diagnosis.py` use."""

from typing import Any, TypeVar

from study.records import metrics
from study.records.metrics import ELEMENT_BYTES
from study.records.schema import Collective, Record

T = TypeVar("T")


class Unknown(Exception):
    """The record lacks a value that a rule needs. Nothing is guessed."""


def required(value: T | None) -> T:
    """Return the value. Raise Unknown if it is None."""
    if value is None:
        raise Unknown
    return value


class Facts:
    """A record and values derived from it. A property raises Unknown if the record does not hold its value."""

    def __init__(self, record: Record):
        self.record = record
        self.observed = record.observed
        self.promised = record.promised

    @property
    def stage(self) -> int:
        """ZeRO's stage; 0 without ZeRO. Unknown if the prepared objects were not read back."""
        required(self.observed.wrapper)
        return self.observed.stage or 0

    @property
    def sharded(self) -> bool:
        return bool(self.observed.stage) or "FSDP" in f"{self.observed.wrapper} {self.observed.distributed_type}"

    @property
    def ranks(self) -> int:
        return required(self.observed.ranks)

    @property
    def parameters(self) -> int:
        return required(self.observed.parameters)

    @property
    def weights(self) -> str:
        """The dtype of the weights; several are separated by spaces."""
        return required(self.observed.dtypes.get("weights"))

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights, and of the reduced gradients."""
        return required(max((ELEMENT_BYTES.get(dtype, 0) for dtype in self.weights.split()), default=0) or None)

    @property
    def weights_bytes(self) -> int:
        return self.parameters * self.element_bytes

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by component at the peak of the rank that holds most."""
        return required(metrics.components(self.record) or None)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def traffic(self) -> dict[str, Collective]:
        """The collectives of the first rank in a step."""
        return required(next(iter(self.record.traffic.per_rank), None))

    def moved_bytes(self, *kinds: str) -> int:
        return sum(each.bytes for kind, each in self.traffic.items() if kind in kinds)

    def requested_home(self, part: str) -> str:
        """Return where the optimizer states or the weights should be offloaded to."""
        return getattr(self.promised, part) or self.zero(part).get("device") or "none"

    def zero(self, name: str) -> dict[str, Any]:
        """Return a section of `zero_optimization` in the config that the engine resolved."""
        zero = (self.observed.deepspeed or {}).get("zero_optimization") or {}
        section = zero.get(name)
        return section if isinstance(section, dict) else {}
