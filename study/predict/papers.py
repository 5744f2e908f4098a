"""The papers' formulas; nothing here is measured. P1: ZeRO (arXiv 1910.02054v3). P2: ZeRO-Offload (2101.06840)."""

from collections.abc import Mapping

from study.core.recipes import RECIPES

MOMENTS = {"sgd": 1, "muon": 1, "adafactor": 0}  # of a matrix; 2 of others
# P2 table 4, on a DGX-2's host: CPU-Adam takes 0.22, 0.51, 1.03, 2.41 and 2.57 s for 1, 2, 4, 8 and 10 billion.
CPU_ADAM_S_PER_BILLION = 0.26


def states_of_a_parameter(precision: str, optimizer: str = "adamw") -> tuple[int, int, int]:
    """Bytes of a parameter's weight, of its gradient, and of what only the optimizer needs (P1's K)."""
    # Scales, an Adafactor's rows and columns, and the tensors that keep Adam's moments under Muon are left out.
    recipe = RECIPES[precision]
    moments_bytes = 2 if optimizer == "adamw_8bit" else MOMENTS.get(optimizer, 2) * recipe.moment_bytes
    # In mixed precision: 2, 2 and 12, the 16 bytes of P1 3.1.
    return recipe.weight_bytes, recipe.gradient_bytes, recipe.master_bytes + moments_bytes


def states_bytes(
    parameters: float, stage: int, ranks: float, precision: str = "bf16_cast", optimizer: str = "adamw"
) -> dict[str, float]:
    """Model states of a rank, P1 section 5, figure 1. Only the states that the stage partitions are divided by N."""
    held = {}
    from_stages = {"weights": 3, "gradients": 2, "optimizer": 1}  # P1 5.3, 5.2, 5.1: from which on each is divided
    sizes = states_of_a_parameter(precision, optimizer)
    for (states, from_stage), size in zip(from_stages.items(), sizes, strict=True):
        held[states] = size * parameters
        if stage >= from_stage:
            held[states] /= ranks
    return held


def wire_bytes(traffic: Mapping[str, float], ranks: int) -> float:
    """Bytes that a rank sends in rings, for collectives over tensors of these sizes. An all-reduce takes two rounds."""
    # P1 7.1: an all-reduce is a reduce-scatter and an all-gather.
    rounds = {"all_reduce": 2}
    return sum(size * (ranks - 1) / ranks * rounds.get(kind, 1) for kind, size in traffic.items())
