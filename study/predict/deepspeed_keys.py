"""Keys of a DeepSpeed config on which a rank's memory depends: which are predicted, and which are not."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from study.core.arms import Arm
from study.core.files import value_at
from study.core.library_defaults import library_defaults
from study.core.text import comparable, is_number, short
from study.predict.placement import FP32, GRADIENTS_KEPT_IN

Keys = tuple[tuple[str, Any], ...]  # dotted paths with their values

ZERO = "zero_optimization"
PREFETCHED = f"{ZERO}.stage3_prefetch_bucket_size"
# The engines read these. Where states are, and the stage, are the arm's.
SWITCHES = (f"{ZERO}.overlap_comm", f"{ZERO}.use_multi_rank_bucket_allreduce")
COUNTED = (
    GRADIENTS_KEPT_IN, *SWITCHES, PREFETCHED, f"{ZERO}.sub_group_size", f"{ZERO}.stage3_param_persistence_threshold",
    f"{ZERO}.stage3_max_live_parameters", f"{ZERO}.stage3_max_reuse_distance",
)  # fmt: skip
OPTIMIZER, ADAM = "optimizer.type", ("adam", "adamw")  # an option says the others
NOT_COUNTED = (
    OPTIMIZER,
    f"{ZERO}.contiguous_gradients", f"{ZERO}.round_robin_gradients", f"{ZERO}.zenflow", f"{ZERO}.mics_shard_size",
    f"{ZERO}.stage3_model_persistence_threshold", f"{ZERO}.stage3_module_granularity_threshold",
    f"{ZERO}.stage3_allgather_sequential", f"{ZERO}.leaf_module", f"{ZERO}.offload_optimizer.ratio",
    f"{ZERO}.offload_optimizer.super_offload", f"{ZERO}.zero_quantized_nontrainable_weights",
    "communication_data_type", "seq_parallel_communication_data_type", "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states", "bf16.immediate_grad_update", "fp16.fp16_master_weights_and_grads",
    "compile.deepcompile", "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing", "activation_checkpointing.contiguous_memory_optimization",
)  # fmt: skip
# Predicted, or refused, in the file of an arm. To the nearest arm of another config they do not come along.
OF_AN_ARM = (
    f"{ZERO}.memory_efficient_linear", f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.zero_quantized_weights",
    f"{ZERO}.zero_quantized_gradients", "sequence_parallel_size", "tensor_parallel.autotp_size",
)  # fmt: skip


def counted(config: dict, *, buckets: int | None = None) -> Keys:
    """Return what a config writes of the keys that are predicted. `buckets` that are given replace its own."""
    return tuple(each for each in _written(config, COUNTED) if not (buckets and each[0] == PREFETCHED))


def with_keys(arm: Arm, keys: Keys) -> Arm:
    """Return an arm of DeepSpeed with such keys; others have none."""
    content = arm.deepspeed
    if content is None:
        return arm
    for path, value in keys:
        section, _, key = path.partition(".")
        content = content | {section: content.get(section, {}) | {key: value}}
    return replace(arm, deepspeed=content)


def in_words(config: dict, stage: int | None, *, is_arm: bool) -> list[str]:
    """Say which keys change a rank's memory: those that are counted, and those that are not."""
    seen = dict(_changed(config, COUNTED))
    uncounted = [path for path, _ in _changed(config, NOT_COUNTED if is_arm else NOT_COUNTED + OF_AN_ARM)]
    if stage == 1 and seen.get(GRADIENTS_KEPT_IN) in FP32:  # bf16_optimizer.py, fp32_groups_gradients_flat
        del seen[GRADIENTS_KEPT_IN]
        uncounted.insert(0, f"{GRADIENTS_KEPT_IN} (with stage 1 each rank then keeps all gradients in fp32)")
    words = []
    if seen and not is_arm:
        words.append(f"Counted of the config: {', '.join(f'{path} {short(value)}' for path, value in seen.items())}.")
    if uncounted:
        words.append(f"Not counted, though memory depends on it: {', '.join(uncounted)}.")
    return words


def _written(config: dict, paths: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        value = value_at(config, path)
        if value not in (None, "auto") and (path not in COUNTED or _is_taken(path, value)):
            yield path, value if isinstance(value, bool) else comparable(value)


def _is_taken(path: str, value: Any) -> bool:
    """Whether DeepSpeed takes such a value; the mistake is told elsewhere, and the default is predicted."""
    if path == GRADIENTS_KEPT_IN:
        return value in FP32  # other types are that of 16-bit weights
    if path in SWITCHES or isinstance(value, bool):
        return path in SWITCHES and isinstance(value, bool)
    return is_number(number := comparable(value)) and 0 <= number < inf


def _changed(config: dict, paths: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield what is not DeepSpeed's default."""
    known = library_defaults("deepspeed")
    of_zero = known[ZERO] | {
        "overlap_comm": value_at(config, f"{ZERO}.stage") == 3
    }  # of DeepSpeedZeroConfig's validator
    defaults = known | {ZERO: of_zero}
    for path, value in _written(config, paths):
        section, _, key = path.rpartition(".")
        is_usual = path == OPTIMIZER and str(value).lower() in ADAM
        if not is_usual and comparable(value) != comparable(defaults.get(section, {}).get(key)):
            yield path, value
