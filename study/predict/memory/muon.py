"""Bytes that DeepSpeed's Muon holds and makes beside its gradients and weights, in an engine with a stage (0.19.8).

Comments name the functions of stage_1_and_2.py and stage3.py that each formula follows.
"""

from itertools import accumulate

from study.predict.memory import moments
from study.predict.memory.engine import Engine
from study.predict.memory.profile import Tensor


def matrices(engine: Engine) -> list[Tensor]:
    """The tensors that Muon updates: none with another optimizer."""
    return [each for each in engine.tensors if engine.optimizer == "muon" and moments.is_for_muon(each)]


def owned_matrices(engine: Engine) -> list[Tensor]:
    """The matrices of which the first rank owns something in stages 1 and 2. It multiplies these, as whole matrices."""
    by_shape = sorted(matrices(engine), key=lambda tensor: tensor.shape, reverse=True)  # as MuonWithAuxAdam does
    begins = accumulate((tensor.elements for tensor in by_shape), initial=0)
    part = engine.part_of(by_shape)
    return [tensor for tensor, begin in zip(by_shape, begins, strict=False) if begin < part]


def moments_bytes(engine: Engine) -> int:
    """The moments of any optimizer. With Muon and a stage: its momentum, and AdamW's moments of what is no matrix."""
    if engine.optimizer != "muon" or engine.stage == 0:
        return moments.held_bytes(engine.optimizer, engine.pieces, engine.state_bytes)
    rest = [piece for piece in engine.pieces if not piece.of_muon]
    return moments.held_bytes("fused", rest, engine.state_bytes) + momentum_bytes(engine)


def momentum_bytes(engine: Engine) -> int:
    """The momentum has the type of the gradients. Stages 1 and 2 keep that of whole tensors (_muon_momentum_buffer)."""
    if engine.stage == 3:
        return engine.weight_bytes * engine.part_of(matrices(engine))
    return engine.weight_bytes * sum(tensor.elements for tensor in owned_matrices(engine))


def buffers_bytes(engine: Engine) -> int:
    """Return what DeepSpeed keeps for Muon from step to step beside its momentum.

    Stages 1 and 2: the momentum again, for steps that are skipped (_muon_staging_momentum). Stage 3: parts of gradients
    as they are sent, and whole ones as they come (_partitioned_buffers_all_gather), at most a bucket.
    """
    if engine.stage < 3:
        return momentum_bytes(engine)
    sent = [engine.part_of(group) for group in _in_buckets(engine)]
    return engine.weight_bytes * (engine.ranks + 1) * sum(dict.fromkeys(sent))


def gathered_elements(engine: Engine) -> int:
    """Elements that stage 3 gathers for an update beside the weights (_muon_update_sub_group).

    These are gradients and momenta as whole matrices, and both again once each rank has multiplied one of each round.
    """
    gathered = 0
    for group in _in_buckets(engine):
        sizes = [tensor.elements for tensor in group]
        rounds = [sizes[i : i + engine.ranks] for i in range(0, len(sizes), engine.ranks)]
        gathered += engine.ranks * (engine.part_of(group) + sum(map(max, rounds)))
    return 2 * gathered


def made_bytes(engine: Engine) -> int:
    """Bytes that stage 3 makes at most before an update, outside its buffers (_muon_update_sub_group).

    These are whole gradients and momenta of a bucket, and copies of this rank's parts. If the matrices of a round are
    not alike, both are copied again as they are sent and come. These copies and the rank's update stay while the next
    matrix is multiplied.
    """
    most = 0
    for group in _in_buckets(engine):
        bucket_bytes = engine.weight_bytes * (2 * sum(tensor.elements for tensor in group) + engine.part_of(group))
        left = 0  # of the round before
        for i in range(0, len(group), engine.ranks):
            each_rank = group[i : i + engine.ranks]
            unlike = len(each_rank) < engine.ranks or len({tensor.shape for tensor in each_rank}) > 1
            sent = max(tensor.elements for tensor in each_rank) * 2 * (1 + engine.ranks) * unlike
            most = max(most, bucket_bytes + left + moments.multiplied_bytes(each_rank[0], engine.setup.on_gpu))
            left = engine.weight_bytes * (sent + each_rank[0].elements)
            most = max(most, bucket_bytes + left)
    return most


def _in_buckets(engine: Engine) -> list[list[Tensor]]:
    """The matrices in their order, as many at a time as a bucket takes."""
    groups: list[list[Tensor]] = []
    for tensor in matrices(engine):
        if not groups or sum(each.elements for each in groups[-1]) + tensor.elements > engine.bucket_elements:
            groups.append([])
        groups[-1].append(tensor)
    return groups
