"""The bytes of a checkpoint, and which rank writes them. The formulas follow what `save_state` of each library saves.

In fp32, a parameter has 4 bytes of weight and 8 of AdamW's moments: 12, however they are divided. Stages 1 and 2 also
keep a master copy, even of fp32 weights, and save both: 16. With bf16 weights that is 2 + 4 + 8 = 14. Stage 3 saves
only its copy, from which it makes the weights: 12.
"""

from study.predictor.setup import Setup


def checkpoint_bytes(setup: Setup, parameters: int) -> list[float]:
    """Bytes that each rank writes of a complete training state, for a model whose parameters all train.

    Names, sizes and padding of the files are not included.
    """
    master_bytes = setup.state_bytes if setup.deepspeed is not None or setup.stored_bytes < 4 else 0
    states = (master_bytes + 2 * setup.state_bytes) * parameters
    weights = setup.stored_bytes * parameters
    ranks = setup.ranks
    if setup.fsdp:  # states that several groups hold are written once, spread over their ranks
        return [(weights + states) / ranks] * ranks
    if setup.stage == 0:  # every rank holds all of it, and the first one writes
        return [weights + states, *[0.0] * (ranks - 1)]
    shares = [states / setup.sharing_ranks] * ranks
    if setup.stage < 3:
        shares[0] += weights
    return shares
