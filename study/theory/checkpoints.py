"""The bytes of a checkpoint, and which rank writes them. Written from what `save_state` of each library saves.

In fp32, a parameter is 4 bytes of weight and 8 of AdamW's moments: 12, however they are divided. Stages 1 and 2 keep a
copy of the weights to update, also where the weights are fp32 already, and save both: 16. With weights of bf16 that is
2 + 4 + 8 = 14, and 12 under stage 3, which saves its copy alone and makes the weights from it.
"""

from dataclasses import dataclass

from study.theory.setup import Setup

MOMENTS = 2  # AdamW's


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes that each rank writes, and of all of them. Without names, sizes and paddings of the files."""

    per_rank: list[float]

    @property
    def total(self) -> float:
        return sum(self.per_rank)


def checkpoint_bytes(setup: Setup, parameters: int) -> CheckpointBytes:
    """What a whole training state takes on the disk, of a model with so many parameters, all of which train."""
    master_bytes = setup.state_bytes if setup.deepspeed is not None or setup.stored_bytes < 4 else 0
    states = (master_bytes + MOMENTS * setup.state_bytes) * parameters
    weights = setup.stored_bytes * parameters
    ranks, sharing = setup.ranks, setup.sharing_ranks
    if setup.fsdp:  # what several groups hold is written once, spread over their ranks
        return CheckpointBytes([(weights + states) / ranks] * ranks)
    if setup.stage == 0:  # every rank holds all of it, and the first one writes
        return CheckpointBytes([weights + states, *[0.0] * (ranks - 1)])
    shares = [states / sharing] * ranks
    if setup.stage < 3:
        shares[0] += weights
    return CheckpointBytes(shares)
