"""The bytes of a checkpoint, and which rank writes them. The formulas follow what `save_state` of each library saves.

In fp32, a parameter has 4 bytes of weight and 8 of AdamW's moments: 12, however they are divided. Stages 1 and 2 also
keep a master copy, even of fp32 weights, and save both: 16. With bf16 weights that is 2 + 4 + 8 = 14. Stage 3 saves
only its copy, from which it makes the weights: 12.
"""

from dataclasses import dataclass

from study.predictor.setup import Setup

MOMENTS = 2  # AdamW's


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes that each rank writes, and their sum. Names, sizes and padding of the files are not included."""

    per_rank: list[float]

    @property
    def total(self) -> float:
        return sum(self.per_rank)


def checkpoint_bytes(setup: Setup, parameters: int) -> CheckpointBytes:
    """Bytes of a complete training state on disk, for a model whose parameters all train."""
    master_bytes = setup.state_bytes if setup.deepspeed is not None or setup.stored_bytes < 4 else 0
    states = (master_bytes + MOMENTS * setup.state_bytes) * parameters
    weights = setup.stored_bytes * parameters
    ranks = setup.ranks
    sharing = setup.sharing_ranks
    if setup.fsdp:  # states that several groups hold are written once, spread over their ranks
        return CheckpointBytes([(weights + states) / ranks] * ranks)
    if setup.stage == 0:  # every rank holds all of it, and the first one writes
        return CheckpointBytes([weights + states, *[0.0] * (ranks - 1)])
    shares = [states / sharing] * ranks
    if setup.stage < 3:
        shares[0] += weights
    return CheckpointBytes(shares)
