"""The papers' formulas; we measured nothing here. P1: ZeRO (arXiv 1910.02054v3). P2: ZeRO-Offload (2101.06840)."""

from collections.abc import Mapping

from study.core.recipes import RECIPES, Recipe

# By arm: the stage by which the formulas divide its states. Of groups of ranks and of offloading they say less.
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
MOMENTS = {"sgd": 1, "muon": 1, "adafactor": 0}  # of a matrix; 2 of others
# P2 table 4, on a DGX-2's host: CPU-Adam takes 0.22, 0.51, 1.03, 2.41 and 2.57 s for 1, 2, 4, 8 and 10 billion.
CPU_ADAM_S_PER_BILLION = 0.26


def optimizer_bytes(recipe: Recipe, optimizer: str) -> int:
    """Bytes of a parameter that only the optimizer needs (P1's K)."""
    # Scales, an Adafactor's rows and columns, and the tensors that keep Adam's moments under Muon are left out.
    moments_bytes = 2 if optimizer == "adamw_8bit" else MOMENTS.get(optimizer, 2) * recipe.moment_bytes
    return recipe.master_bytes + moments_bytes


def states_bytes(
    parameters: float, stage: int, ranks: float, precision: str = "bf16_cast", optimizer: str = "adamw"
) -> dict[str, float]:
    """Model states of a rank, P1 section 5, figure 1. Only the states that the stage partitions are divided by N."""
    # In mixed precision: 2, 2 and 12, the 16 bytes of P1 3.1.
    recipe = RECIPES[precision]
    sizes = {
        "weights": (recipe.weight_bytes, 3),  # from stage 3 on it is divided (P1 5.3)
        "gradients": (recipe.gradient_bytes, 2),  # P1 5.2
        "optimizer": (optimizer_bytes(recipe, optimizer), 1),  # P1 5.1
    }
    held = {}
    for states, (size, from_stage) in sizes.items():
        held[states] = size * parameters
        if stage >= from_stage:
            held[states] /= ranks
    return held


def wire_bytes(traffic: Mapping[str, float], ranks: int) -> float:
    """Bytes that a rank sends in rings, for collectives over tensors of these sizes. An all-reduce takes two rounds."""
    # P1 7.1: an all-reduce is a reduce-scatter and an all-gather.
    rounds = {"all_reduce": 2}
    return sum(size * (ranks - 1) / ranks * rounds.get(kind, 1) for kind, size in traffic.items())
