"""The values of a record that the rules use: what was promised, what was observed, and memory at the peak."""

import functools
from typing import Literal, TypeVar

from study.errors import Stop
from study.records import explain
from study.records.metrics import ELEMENT_BYTES
from study.records.schema import Collective, Promised, Record
from study.spec import arms

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
T = TypeVar("T")


class Unknown(Exception):
    """The record lacks a value that a rule needs. Nothing is guessed."""


def known(value: T | None) -> T:
    """Return the value. Raise Unknown if it is None."""
    if value is None:
        raise Unknown
    return value


def _autocast(precision: str | None) -> Literal["bf16", "fp16"] | None:
    """Return the precision if it is one of autocast."""
    if precision == "bf16":
        return "bf16"
    return "fp16" if precision == "fp16" else None


class Facts:
    """A record and values derived from it. A property raises Unknown if the record does not hold its value."""

    def __init__(self, record: Record):
        self.record = record
        self.observed = record.observed

    @functools.cached_property
    def promised(self) -> Promised:
        """The settings that were asked for: by a user's script and files, or by an arm and settings of this study."""
        if self.record.promised or self.record.is_script:
            return self.record.promised
        wanted = self.record.requested
        if wanted.arm not in arms.all_paths():
            return Promised()
        arm = arms.load_arm(wanted.arm)
        zero = arm.deepspeed is not None
        return Promised(
            source=f"{wanted.arm}.yaml",
            deepspeed=zero,
            stage=arm.stage,
            offload_optimizer=arm.offload_optimizer if zero else None,
            offload_param=arm.offload_param if zero else None,
            clipping=arm.clipping,
            accumulation=wanted.accumulation,
            precision=_autocast(wanted.precision),
            optimizer="AdamW",
            checkpointing=wanted.checkpointing,
        )

    @property
    def source(self) -> str:
        return self.promised.source or "the script"

    @property
    def stage(self) -> int:
        """ZeRO's stage; 0 without ZeRO. Unknown if the prepared objects were not read back."""
        if self.observed.stage is None:
            known(self.observed.wrapper)
        return self.observed.stage or 0

    @property
    def sharded(self) -> bool:
        names = (self.observed.wrapper or "", self.observed.distributed_type or "")
        return bool(self.observed.stage) or any("FSDP" in name for name in names)

    @property
    def ranks(self) -> int:
        return known(self.observed.ranks)

    @property
    def parameters(self) -> int:
        return known(self.observed.parameters)

    @property
    def weights(self) -> str:
        """The dtype of the weights; several are separated by spaces."""
        return known(self.observed.dtypes.get("weights"))

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights, and of the reduced gradients."""
        dtypes = [ELEMENT_BYTES.get(dtype) for dtype in (self.observed.dtypes.get("weights") or "").split()]
        return known(max((size for size in dtypes if size), default=None))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights of the model."""
        return self.parameters * self.element_bytes

    @functools.cached_property
    def components(self) -> dict[str, int] | None:
        """Bytes by component at the peak of the rank that holds most. None if they were not measured."""
        try:
            return explain.peak(self.record).components
        except Stop:
            return None

    @property
    def peak(self) -> dict[str, int]:
        return known(self.components)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def traffic(self) -> dict[str, Collective]:
        """The collectives of the first rank in a step."""
        counted = self.record.traffic.per_rank
        return known(counted[0] if counted else None)

    def moved_bytes(self, *kinds: str) -> int:
        return sum(self.traffic[kind].bytes for kind in kinds if kind in self.traffic)
