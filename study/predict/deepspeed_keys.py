"""Keys of a DeepSpeed config on which a rank's memory depends: which are predicted, and which are not."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from study.core.arms import Arm, zero_optimization
from study.core.files import value_at
from study.core.library_defaults import library_defaults
from study.core.text import comparable, count, is_number, short
from study.predict.placement import FP32, GRADIENTS_KEPT_IN

Keys = tuple[tuple[str, Any], ...]  # dotted paths with their values

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
REDUCED, PREFETCHED = (f"{ZERO}.{name}" for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size"))
PERSISTENT = f"{ZERO}.stage3_param_persistence_threshold"
AUTO = "auto"
# The engines read these. Where states are, and the stage, are the arm's.
SWITCHES = (
    f"{ZERO}.overlap_comm", f"{ZERO}.use_multi_rank_bucket_allreduce", f"{ZERO}.offload_param.pin_memory",
    f"{ZERO}.offload_optimizer.pin_memory",
)  # fmt: skip
COUNTED = (
    GRADIENTS_KEPT_IN, *SWITCHES, REDUCED, PREFETCHED, PERSISTENT, f"{ZERO}.sub_group_size",
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


def counted(config: dict | None, hidden: int, *, buckets: int | None = None) -> Keys:
    """Return all keys that are predicted, as a config has them: what it leaves out is DeepSpeed's default.

    `hidden` is the model's, by which Accelerate and the Trainer fill in what is auto. `buckets` that are given replace
    those of the config. Without a config nothing is said.
    """
    if not config:
        return ()
    keys = _defaults() | _filled(config, hidden) | dict(_written(config, COUNTED))
    return tuple((path, value) for path, value in keys.items() if not (buckets and path in (REDUCED, PREFETCHED)))


def _defaults() -> dict[str, Any]:
    """Return DeepSpeed's own values of the keys that are predicted. None: the stage decides."""
    known = library_defaults("deepspeed")
    at = {path: path.rpartition(".") for path in COUNTED}
    return {path: known[section][key] for path, (section, _, key) in at.items()}


def _filled(config: dict, hidden: int) -> dict[str, Any]:
    """Return what Accelerate (accelerator.py, _prepare_deepspeed) and the Trainer (deepspeed.py) make of auto."""
    sizes = {REDUCED: hidden**2, PREFETCHED: int(0.9 * hidden**2), PERSISTENT: 10 * hidden}
    return {path: size for path, size in sizes.items() if size and value_at(config, path) == AUTO}


def with_keys(arm: Arm, keys: Keys) -> Arm:
    """Return an arm of DeepSpeed with such keys; others have none."""
    if arm.deepspeed is None:
        return arm
    content = arm.deepspeed
    for path, value in keys:
        content = _with_value(content, path.split("."), value)
    return replace(arm, deepspeed=content)


def _with_value(content: dict, path: list[str], value: Any) -> dict:
    name, *rest = path
    return content | {name: _with_value(content.get(name) or {}, rest, value) if rest else value}


def in_words(config: dict, stage: int | None, *, is_arm: bool) -> list[str]:
    """Say which keys change a rank's memory: those that are counted, and those that are not."""
    seen = {path: value for path, value in _changed(config, COUNTED) if path != REDUCED}  # it is told as --buckets
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


def of_stage_3(zero: dict) -> list[str]:
    """Name what decides how much a rank of stage 3 gathers: DeepSpeed's defaults, or what an arm or a config has."""
    keys = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters")
    return [f"{key} {count(zero[key])}" for key in keys if zero["stage"] == 3]


def _written(config: dict, paths: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        value = value_at(config, path)
        if value not in (None, AUTO) and (path not in COUNTED or _is_taken(path, value)):
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
    defaults = library_defaults("deepspeed") | {ZERO: zero_optimization({ZERO: {"stage": value_at(config, STAGE)}})}
    for path, value in _written(config, paths):
        section, _, key = path.rpartition(".")
        is_usual = path == OPTIMIZER and str(value).lower() in ADAM
        if not is_usual and comparable(value) != comparable(defaults.get(section, {}).get(key)):
            yield path, value
