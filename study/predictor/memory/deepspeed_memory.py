"""Bytes that a rank holds at each moment of the last backward pass of a step, as DeepSpeed 0.19.8 and DDP do it.

The pass is followed tensor by tensor, last first. Each moment is a dict from component to bytes; the components are
those of a record. Comments name the DeepSpeed file that a step follows; sizes were seen in runs.
"""

from collections.abc import Iterator
from math import ceil

from study.predictor.memory import moments, muon
from study.predictor.memory.engine import (
    Engine,
    all_elements,
    first_part,
    owned_whole,
    owners,
    second_copy,
    stays_gathered,
)
from study.predictor.memory.profile import Held, Profile, Tensor

NORM_BYTES = 8  # DeepSpeed takes norms in fp64, one tensor at a time (zero/utils.py, get_norm_dtype)


def backward(engine: Engine, profile: Profile) -> Iterator[dict]:
    """The moments of the last backward pass of a step."""
    kept, in_use = profile.most
    yield {"activations": kept, "temporaries": in_use} | _at_start(engine)
    yield from {0: _keep, 1: _bucket, 2: _bucket, 3: _scatter}[engine.stage](engine, profile)


def _at_start(engine: Engine) -> dict:
    """Return what the engine holds when the backward pass begins."""
    gradients = engine.elements * engine.weight_bytes
    accumulates = engine.accumulation > 1
    if engine.stage == 3:
        second = second_copy(engine, engine.fetches.released_at_turn)
        return second | {"gathered_weights": gathered(engine)}
    if engine.stage == 0 and engine.ranks > 1:
        # DDP's buckets, in which the gradients are; those of earlier microbatches are not in them yet.
        return {"gradients": gradients * (2 if accumulates else 1)}
    if engine.stage == 0 and accumulates:
        return {"gradients": gradients}  # this is not the first microbatch of its step
    if engine.stage == 1 and accumulates:  # its buckets stay until the step ends (setup_buckets, reduce_gradients)
        return {"gradients": gradients, "buckets": buckets_bytes(engine)}
    if engine.stage == 2 and accumulates and not engine.offloads:
        return {"gradients": owned_whole(engine) * engine.weight_bytes}
    return {}


def buckets_bytes(engine: Engine) -> int:
    """Return the bytes of the buckets of stages 1 and 2, which come with the first gradient."""
    return (2 if engine.overlap else 1) * engine.bucket_elements * engine.weight_bytes


def _keep(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Without DeepSpeed: gradients pile up, or are in DDP's buckets from the start."""
    w = engine.weight_bytes
    ready = 0
    in_buckets = _at_start(engine).get("gradients", 0) // w
    for tensor, (kept, in_use), _ in profile.gradients:
        if in_buckets:
            ready = in_buckets = max(engine.elements, in_buckets - tensor.elements)
        else:
            ready += tensor.elements
        new = tensor.elements * w if in_buckets else 0
        yield {"activations": kept, "gradients": ready * w, "temporaries": in_use + new}


def _bucket(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stages 1 and 2 (stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads)."""
    state = Buckets(engine)
    if engine.optimizer == "muon" and not engine.offloads:
        yield state.multiplied()
    for tensor, most, complete in profile.gradients:
        size = tensor.elements * engine.weight_bytes
        if state.bucket:  # the buckets are made with the first gradient
            yield state.moment(most, size)
        if state.bucket and state.filled + tensor.elements > engine.bucket_elements:
            yield from state.reduce(complete, size)
        yield state.moment(complete, size)
        state.take(tensor)
    state.ended = True
    if state.bucket:
        yield from state.reduce(Held(0, 0), 0)


class Buckets:
    """The gradients of stages 1 and 2: in the bucket that fills, or kept because this rank owns some of them."""

    def __init__(self, engine: Engine):
        w = engine.weight_bytes
        self.engine = engine
        self.owned = first_part(engine)
        self.ranks = owners(engine)
        self.owned_bytes = owned_whole(engine) * w
        accumulated = _at_start(engine).get("gradients", 0)
        # Stage 1 collects whole gradients until the last microbatch.
        self.waiting = accumulated if engine.stage == 1 else 0
        self.kept = accumulated - self.waiting
        self.most_kept = self.owned_bytes + (accumulated if engine.stage == 2 else 0)
        self.buckets = buckets_bytes(engine)
        self.large = 0  # elements of gradients that are larger than a bucket
        self.bucket: list[Tensor] = []
        self.filled = 0  # elements in the bucket
        self.ended = False  # the pass

    def moment(self, activations: Held, extra: float) -> dict:
        gradients = max(0, self.waiting) + self.kept + self.large * self.engine.weight_bytes
        now = {"buckets": self.buckets, "gradients": gradients}
        if self.ended:  # autograd is done, and records count what is allocated then as activations
            return now | {"activations": activations.total + extra}
        return now | {"activations": activations.kept, "temporaries": activations.in_use + extra}

    def multiplied(self) -> dict:
        """Return what is held when Muon multiplies. The buckets are still there at the end of the pass."""
        engine = self.engine
        multiplied = [moments.multiplied_bytes(each, engine.on_gpu) for each in muon.owned_matrices(engine)]
        gradients = engine.part * engine.weight_bytes
        return {"buckets": self.buckets, "gradients": gradients, "activations": max(multiplied, default=0)}

    def take(self, tensor: Tensor) -> None:
        """Put a complete gradient into the bucket."""
        if self.waiting:
            self.waiting -= tensor.elements * self.engine.weight_bytes
        if tensor.elements > self.engine.bucket_elements:
            self.large += tensor.elements
        self.bucket.append(tensor)
        self.filled += tensor.elements

    def reduce(self, complete: Held, next_bytes: int) -> Iterator[dict]:
        """Empty the bucket. `next_bytes` is the size of the gradient that comes next."""
        several = len({rank for tensor in self.bucket for rank in self.ranks[tensor.name]}) > 1
        flattened = self.filled * self.engine.weight_bytes if several else 0
        yield self.moment(complete, flattened + next_bytes)
        owned = max(self.owned.get(tensor.name, 0) for tensor in self.bucket)
        if owned and self.engine.offloads:
            yield self.moment(complete, next_bytes + NORM_BYTES * owned)
        elif owned and self.kept < self.most_kept:
            self.kept += self.owned_bytes
            yield self.moment(complete, next_bytes)
        if self.engine.stage == 2 or owned:
            self.large = 0
        self.bucket = []
        self.filled = 0


def _scatter(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stage 3 (stage3.py, __add_grad_to_ipg_bucket, __avg_scatter_grads; coalesced_collectives.py)."""
    w = engine.weight_bytes
    limit = engine.bucket_elements
    alive = gathered(engine)
    stay = {tensor.name for tensor in engine.persistent}
    stay_bytes = stays_gathered(engine)
    bucket: list[Tensor] = []
    filled = large = 0  # elements of the bucket, and of gradients that are larger than a bucket
    released = engine.fetches.released_at_turn
    all_stay = engine.fetches.at_turn == all_elements(engine) and refetched(engine) == 0
    for last, flat in last_fetches(engine):
        states = {"activations": profile.at_use[last.name], "gathered_weights": alive, "temporaries": flat * w}
        yield states | second_copy(engine, released)

    def moment(activations: Held, extra: int) -> dict:
        states = {"activations": activations.kept, "gathered_weights": alive, "gradients": large * w}
        return states | {"temporaries": activations.in_use + extra} | second_copy(engine, released)

    def reduced(complete: Held, next_elements: int) -> dict:
        in_place = len(bucket) == 1 and bucket[0].elements % engine.ranks == 0
        norm = NORM_BYTES * max(ceil(each.elements / engine.ranks) for each in bucket) * engine.offloads
        if engine.optimizer_home == "nvme" and w == 2:  # on their way to the disk, in fp32
            norm = max(norm, 4 * ceil(filled / engine.ranks))
        return moment(complete, filled * (not in_place) * w + norm + next_elements * w)

    for tensor, most, complete in profile.gradients:
        elements = tensor.elements
        if bucket and filled + elements > limit:
            yield reduced(complete, elements)
            bucket = []
            filled = large = 0
        if tensor.name not in stay and not all_stay and engine.gathers:
            alive = engine.fetches.backward[tensor.name] * w
            released = engine.fetches.released[tensor.name]
        yield moment(most, elements * w)
        bucket.append(tensor)
        filled += elements
        large += elements if elements > limit else 0
        # The backward hook of the embeddings comes after the last reduce.
        if tensor.name not in stay and all_stay and tensor.block != "embeddings":
            alive = max(alive - elements * w, stay_bytes)
            released = released + elements
    if bucket:
        yield reduced(Held(0, 0), 0)


# --- stage 3's gathered weights ------------------------------------------------------------------------------------


def gathered(engine: Engine) -> int:
    """Bytes of whole weights at the end of a forward pass, including those on their way."""
    return engine.fetches.at_turn * engine.weight_bytes if engine.gathers else 0


def last_fetches(engine: Engine) -> list[tuple[Tensor, int]]:
    """The last all-gathers of a forward pass: for each, its last tensor and its number of elements.

    The flat buffer stays beside the weights made from it until the last of them is used (AllGatherCoalescedHandle).
    The first module is fetched when it is needed. From then on, each fetch ahead takes at least as much as the prefetch
    bucket holds (fetch_sub_module). A single tensor is gathered in place.
    """
    if not engine.gathers:
        return []
    queue = [tensor for tensor in engine.all_tensors if tensor.elements > engine.persistent_elements]
    module = queue[0].name.rpartition(".")[0] if queue else ""
    queue = [tensor for tensor in queue if tensor.name.rpartition(".")[0] != module]
    batches = []
    while queue and engine.prefetch_elements:
        batch: list[Tensor] = []
        while queue and sum(tensor.elements for tensor in batch) < engine.prefetch_elements:
            batch.append(queue.pop(0))
        batches.append(batch)
    return [(batch[-1], sum(tensor.elements for tensor in batch)) for batch in batches[-2:] if len(batch) > 1]


def refetched(engine: Engine) -> int:
    """Elements that the backward pass gathers again because the forward pass has released them."""
    always = sum(tensor.elements for tensor in engine.persistent)
    return engine.fetches.fetched - (all_elements(engine) - always) if engine.gathers else 0
