"""The papers' formulas: bytes of model states, bytes moved, seconds of a step. Nothing here is measured.

P1: ZeRO (arXiv 1910.02054v3). P2: ZeRO-Offload (2101.06840).
"""

import math
from collections.abc import Mapping

from study.core.errors import Stop

# Bytes per parameter of the weights (and of the gradients), and of an fp32 master copy (P1 3.1). "mixed" is bf16_cast.
WEIGHTS = {"fp32": (4, 0), "mixed": (2, 4), "bf16": (2, 0)}
# Of the moments, in the type of the states: fp32, or bf16 with "bf16". Scales, an Adafactor's rows and columns, and
# the tensors that keep Adam's moments under Muon are left out.
MOMENTS = {"adam": (8, 4), "adam-8bit": (2, 2), "sgd-momentum": (4, 2), "adafactor": (0, 0), "muon": (4, 2)}
# Bytes per parameter of the weights, the gradients, and what only the optimizer needs (P1's K).
RECIPES = {
    f"{precision}-{optimizer}": (weights, weights, master + held[precision == "bf16"])
    for precision, (weights, master) in WEIGHTS.items()
    for optimizer, held in MOMENTS.items()
}
OF_PRECISION = {
    **dict.fromkeys(("fp32", "bf16", "fp16"), "fp32-adam"),
    "bf16_cast": "mixed-adam",
    "bf16_pure": "bf16-adam",
}
OF_OPTIMIZER = {"adamw_8bit": "adam-8bit", "sgd": "sgd-momentum", "adafactor": "adafactor", "muon": "muon"}
# P2 table 4, on a DGX-2's host: CPU-Adam takes 0.22, 0.51, 1.03, 2.41 and 2.57 s for 1, 2, 4, 8 and 10 billion.
CPU_ADAM_S_PER_BILLION = 0.26


def recipe_of(precision: str, optimizer: str) -> str:
    """The recipe of a precision with an optimizer, both by the names that a setup uses."""
    weights = OF_PRECISION[precision].removesuffix("-adam")
    return f"{weights}-{OF_OPTIMIZER.get(optimizer, 'adam')}"


def states_bytes(parameters: float, stage: int, ranks: float, recipe: str = "mixed-adam") -> dict[str, float]:
    """Model states of a rank, P1 section 5, figure 1. Only the states that the stage partitions are divided by N."""
    if stage not in (0, 1, 2, 3):
        raise Stop(f"stage must be 0, 1, 2 or 3 (got {stage})", "give one of these")
    # Infinitely many ranks are allowed: they show the limit of a stage.
    if not 0 < parameters < math.inf or ranks <= 0:
        what = f"parameters and ranks must be above 0 (got {parameters:g} parameters on {ranks} ranks)"
        raise Stop(what, "give numbers above 0")
    weights, gradients, optimizer = RECIPES[recipe]
    return {
        "weights": weights * parameters / (ranks if stage >= 3 else 1),  # P1 5.3
        "gradients": gradients * parameters / (ranks if stage >= 2 else 1),  # P1 5.2
        "optimizer": optimizer * parameters / (ranks if stage >= 1 else 1),  # P1 5.1
    }


def wire_bytes(traffic: Mapping[str, float], ranks: int) -> float:
    """Bytes that a rank sends in rings, for collectives over tensors of these sizes. An all-reduce takes two rounds."""
    share = (ranks - 1) / ranks
    return sum(size * share * (2 if kind == "all_reduce" else 1) for kind, size in traffic.items())
