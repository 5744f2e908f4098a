"""Arms with the sizes that an advice chooses."""

from dataclasses import replace
from typing import Literal

from study.core.arms import Arm
from study.core.errors import Stop

Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]  # of the trainer
BUCKET_ELEMENTS = 50_000_000  # 100 MB in 16 bits: messages of that size come near a link's speed. Assumed
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def zero_of(arm: Arm) -> dict:
    """Return the section zero_optimization of an arm's DeepSpeed config; empty without DeepSpeed."""
    return (arm.deepspeed or {}).get("zero_optimization", {})


def with_zero(arm: Arm, settings: dict) -> Arm:
    return replace(arm, deepspeed=(arm.deepspeed or {}) | {"zero_optimization": zero_of(arm) | settings})


def settled_arm(arm: Arm, gpus: int, local: int, bucket_elements: int | None = None) -> Arm:
    """Return an arm with groups as large as nodes, and such buckets. None: its own."""
    if bucket_elements is not None and bucket_elements < 1:
        raise Stop(f"buckets must have at least 1 element (got {bucket_elements})", "give 1 or more")
    if arm.replicas > 1:
        arm = replace(arm, replicas=max(2, gpus // local))
    elif arm.divides_ranks and gpus > local:
        arm = with_zero(arm, {"zero_hpz_partition_size": local})
    return with_buckets(arm, bucket_elements) if bucket_elements else arm


def with_buckets(arm: Arm, elements: int = BUCKET_ELEMENTS) -> Arm:
    """Return an arm with buckets of this size, if it has buckets."""
    buckets = {name: elements for name in BUCKETS if name in zero_of(arm)}
    return with_zero(arm, buckets) if buckets else arm


def usual_precision(arm: Arm) -> Precision:
    """DeepSpeed keeps fp32 master copies of 16-bit weights. Without it Accelerate keeps the weights in fp32."""
    return "bf16_cast" if arm.deepspeed else "bf16"
