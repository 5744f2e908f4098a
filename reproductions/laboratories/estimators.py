"""Writes what the libraries' own estimators of memory say of the published rows, into predictions.csv.

python reproductions/laboratories/estimators.py

Neither knows activations. Accelerate's knows no sharding, and DeepSpeed's no stage 1.
"""

import contextlib

from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from study.core.errors import Stop
from study.core.text import say
from study.predict.outside import published, scores
from study.predict.outside.predicting import training_of
from study.predict.setup import Setup


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


def _of_setup(setup: Setup) -> dict[str, float]:
    sizes = [tensor.elements for tensor in setup.model.tensors]
    estimates = {"accelerate": accelerate_bytes(sum(sizes), setup.precision)}
    zero = (setup.deepspeed or {}).get("zero_optimization", {})
    optimizer, weights = (zero.get(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param"))
    local = min(8, setup.ranks)
    states = deepspeed_bytes(sizes, setup.stage, setup.ranks, local, (optimizer, weights)) if setup.deepspeed else None
    return estimates | ({"deepspeed": states[0]} if states else {})


def main() -> None:
    """Predict the rows with a memory, and store the columns of both libraries."""
    rows = {row.key: row for row in published.rows()}
    lines = []
    for each in scores.numbers():
        estimates: dict[str, float] = {}
        with contextlib.suppress(Stop):
            training = training_of(rows[each.key])
            if training and each.quantity == "memory":
                estimates = _of_setup(training.setup)
        lines.append(each.model_copy(update=estimates))
    scores.store(lines)
    say(*(f"{name}: {sum(getattr(each, name) is not None for each in lines)} numbers" for name in scores.RIVALS))


if __name__ == "__main__":
    main()
