"""What the libraries' own estimators of memory say.

Neither knows activations. Accelerate's knows no sharding, and DeepSpeed's no stage 1.
"""

from accelerate.commands.estimate import estimate_training_usage


def accelerate_bytes(elements: int, precision: str | None) -> float:
    """Return the largest number that `accelerate estimate-memory` prints for a training with Adam."""
    usage = estimate_training_usage(4 * elements, "float32" if precision == "fp32" else "bfloat16")
    return max(usage.values())


def deepspeed_bytes(
    sizes: list[int], stage: int | None, ranks: int, local: int, homes: tuple[str | None, str | None]
) -> tuple[float, float] | None:
    """Return a rank's bytes, and a node's bytes on the host, for the sizes of tensors; None without stage 2 or 3.

    `homes` says where optimizer states and weights are offloaded to.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs  # takes seconds
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    options = {"num_gpus_per_node": local, "num_nodes": ranks // local, "additional_buffer_factor": 1}
    options["cpu_offload"] = homes[0] != "none"
    if stage == 2:
        host, device = estimate_zero2_model_states_mem_needs(sum(sizes), **options)
    elif stage == 3:
        options["cpu_offload_params"] = homes[1] != "none"
        host, device, _ = estimate_zero3_model_states_mem_needs(sum(sizes), max(sizes), **options)
    else:
        return None
    return device, host
