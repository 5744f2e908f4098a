"""The values of a record that the checks use: what was promised, what was observed, and memory at the peak."""

import functools

from study.errors import Stop
from study.records import explain
from study.records.metrics import ELEMENT_BYTES
from study.records.schema import Collective, Promised, Record
from study.spec import arms
from study.spec.settings import AUTOCAST

REDUCING = ("all_reduce", "reduce", "reduce_scatter")


class Facts:
    """A record and values derived from it. Unknown is None."""

    def __init__(self, record: Record):
        self.record, self.observed = record, record.observed

    @functools.cached_property
    def promised(self) -> Promised:
        """What was asked for: by a user's script and files, or by an arm and settings of this study."""
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
            precision=wanted.precision if wanted.precision in AUTOCAST else None,
            optimizer="AdamW",
            checkpointing=wanted.checkpointing,
        )

    @property
    def source(self) -> str:
        return self.promised.source or "the script"

    @property
    def name(self) -> str:
        """A short name for how the training is distributed."""
        seen = self.observed
        return f"ZeRO stage {seen.stage}" if seen.stage else seen.wrapper or seen.distributed_type or "the training"

    @property
    def is_known(self) -> bool:
        """Whether the prepared objects were read back."""
        return self.observed.wrapper is not None or self.observed.stage is not None

    @property
    def zero(self) -> int:
        """ZeRO's stage; 0 without ZeRO."""
        return self.observed.stage or 0

    @property
    def sharded(self) -> bool:
        return (
            self.zero > 0 or "FSDP" in (self.observed.wrapper or "") or "FSDP" in (self.observed.distributed_type or "")
        )

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of an element of the weights, and of the reduced gradients."""
        kinds = (self.observed.dtypes.get("weights") or "").split()
        return max((ELEMENT_BYTES[kind] for kind in kinds if kind in ELEMENT_BYTES), default=None)

    @property
    def whole_bytes(self) -> int | None:
        """Bytes of all weights of the model."""
        if None in (self.observed.parameters, self.weight_bytes):
            return None
        return self.observed.parameters * self.weight_bytes

    @functools.cached_property
    def peak(self) -> dict[str, int] | None:
        """Bytes by component at the peak of the rank that holds most."""
        try:
            return explain.peak(self.record).components
        except Stop:
            return None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.peak is None else sum(self.peak.values())

    @property
    def traffic(self) -> dict[str, Collective] | None:
        """The collectives of the first rank in a step. None if they were not counted."""
        counted = self.record.traffic.per_rank
        return counted[0] if counted else None

    def moved_bytes(self, *kinds: str) -> int:
        return sum(self.traffic[kind].bytes for kind in kinds if kind in self.traffic)
