"""Bytes that a rank holds at each moment of the last backward pass of a step, as DeepSpeed 0.19.8 and DDP do it.

The pass is followed tensor by tensor, last first. Each moment is a dict from component to bytes; the components are
those of a record. Comments name the DeepSpeed file that a step follows; sizes were seen in runs.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from math import ceil

from study.predict.memory.engine import Engine
from study.predict.memory.fetches import Visit, Whole, leaf_modules, reads_out_by_embeddings
from study.predict.memory.profile import Held, Profile, Tensor

NORM_BYTES = 8  # DeepSpeed takes norms in fp64, one tensor at a time (zero/utils.py, get_norm_dtype)


def backward(engine: Engine, profile: Profile) -> Iterator[dict]:
    """The moments of the last backward pass of a step."""
    return {0: _keep, 1: _bucket, 2: _bucket, 3: _scatter}[engine.stage](engine, profile)


def kept_gradients(engine: Engine) -> int:
    """Return the elements of the gradients of one process or DDP when they are complete, with DDP's buckets."""
    return engine.elements * (1 if engine.ranks == 1 or engine.setup.library.bucket_view else 2)


def _keep(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Without DeepSpeed: gradients pile up, or move into DDP's buckets, or are added to those that are there."""
    w = engine.weight_bytes
    library = engine.setup.library
    in_buckets = engine.ranks > 1 and library.bucket_view
    # Gradients of earlier microbatches are not in DDP's buckets, nor are PyTorch 1's zeros.
    waits = engine.accumulation > 1 or (library.torch_major == 1 and not in_buckets)
    ready = engine.elements * ((engine.ranks > 1) + waits)  # DDP's buckets, and what waits outside them
    most = kept_gradients(engine)
    kept, in_use = profile.most
    yield {"activations": kept, "temporaries": in_use, "gradients": ready * w}
    piles_up = ready < most
    for tensor, (kept, in_use), _ in profile.gradients:
        ready = ready + tensor.elements if piles_up else max(most, ready - tensor.elements)
        new = 0 if piles_up else tensor.elements * w
        yield {"activations": kept, "gradients": ready * w, "temporaries": in_use + new}


def _bucket(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stages 1 and 2 (stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads)."""
    state = Buckets(engine)
    kept, in_use = profile.most
    buckets = state.buckets if state.waiting else 0  # of earlier microbatches; else they come with the first gradient
    yield {"activations": kept, "temporaries": in_use, "gradients": state.waiting + state.kept, "buckets": buckets}
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
        self.engine = engine
        ends = accumulate(tensor.elements for tensor in engine.tensors)
        # The ranks that own a tensor's first and last element. DeepSpeed flattens a bucket of several a second time.
        self.ranks = {
            tensor.name: {(end - tensor.elements) // engine.part, (end - 1) // engine.part}
            for tensor, end in zip(engine.tensors, ends, strict=True)
        }
        accumulates = engine.accumulation > 1
        # Stage 1 collects whole gradients until the last microbatch. Its buckets stay until the step ends
        # (setup_buckets, reduce_gradients).
        self.waiting = engine.elements * engine.weight_bytes if engine.stage == 1 and accumulates else 0
        self.kept = engine.owned_whole_bytes if engine.stage == 2 and accumulates and not engine.offloads else 0
        self.most_kept = engine.owned_whole_bytes + self.kept
        self.buckets = (2 if engine.zero["overlap_comm"] else 1) * engine.bucket_elements * engine.reduced_bytes
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
        owned = max(self.engine.owned.get(tensor.name, 0) for tensor in self.bucket)
        if owned and self.engine.offloads:
            yield self.moment(complete, next_bytes + NORM_BYTES * owned)
        elif owned and self.kept < self.most_kept:
            self.kept += self.engine.owned_whole_bytes
            yield self.moment(complete, next_bytes)
        if self.engine.stage == 2 or owned:
            self.large = 0
        self.bucket = []
        self.filled = 0


def _scatter(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stage 3 (stage3.py, __add_grad_to_ipg_bucket, __avg_scatter_grads; coalesced_collectives.py)."""
    state = Scattering(engine)
    yield from state.forward(profile)
    yield state.moment(profile.most, 0)
    leaves = leaf_modules(engine.setup.model)
    ends = {leaves.get(each.tensor.name): each.tensor for each in profile.gradients}
    delayed: list[Tensor] = []  # until the backward pass of a mixture of experts ends (reduce_leaf_module_grads)
    for tensor, most, complete in profile.gradients:
        state.reach(tensor)
        delayed.append(tensor)
        whole = sum(each.elements for each in delayed)
        yield state.moment(most, whole * engine.weight_bytes)
        if tensor.name in leaves and tensor != ends[leaves[tensor.name]]:
            continue
        for each in delayed:
            if state.bucket and state.filled + each.elements > engine.bucket_elements:
                yield state.reduce(complete, whole)
            state.take(each)
            whole -= each.elements
        delayed = []
    if state.bucket:
        yield state.reduce(Held(0, 0), 0)


class Scattering:
    """The gathered weights of stage 3, and its gradients in the bucket that fills."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.w = engine.weight_bytes
        self.hold(engine.fetches.turn.running)
        self.released = engine.fetches.turn.released
        self.stay = {tensor.name for tensor in engine.persistent}
        self.in_graph: Counter[str] = Counter()  # bytes of weights, by the tensor whose gradient comes when they go
        if not engine.setup.has_own_linear:
            self.keep_views(engine)
        self.all_stay = engine.fetches.turn.running.weights == engine.all_elements and engine.refetched == 0
        self.bucket: list[Tensor] = []
        self.filled = self.large = 0  # elements of the bucket, and of gradients that are larger than a bucket

    def keep_views(self, engine: Engine) -> None:
        """Count the bytes of released weights that PyTorch's linear layers keep in the graph, as views of them.

        Frozen ones are there, too. They are gone when the gradient of the trained tensor before them is complete.
        """
        setup = engine.setup
        trained = ""
        for tensor in setup.tensors if setup.model.family != "gpt2" else ():  # whose Conv1D keeps no view
            trained = tensor.name if tensor.trains else trained
            is_kept = tensor.name in engine.fetches.released and len(tensor.shape) == 2 and not tensor.packed
            if is_kept and tensor.block != "embeddings" and not setup.computes_again(tensor.block):
                self.in_graph[trained] += tensor.elements * self.w * engine.gathers
        first = setup.tensors[0]
        if reads_out_by_embeddings(setup.model) and first.name in engine.fetches.released:
            self.in_graph[engine.tensors[-1].name] += first.elements * self.w * engine.gathers

    def hold(self, whole: Whole) -> None:
        self.alive = whole.weights * self.w * self.engine.gathers
        self.flat = whole.flat * self.w * (self.engine.ranks > 1)  # bytes of the buffers from which weights were made

    def forward(self, profile: Profile) -> Iterator[dict]:
        """The moments of the forward pass: when a module has waited for its weights, and while modules run."""
        last: Visit | None = None
        for name, kept in profile.at_use.items() if self.engine.ranks > 1 else ():
            visit = self.engine.fetches.forward[name]
            if name in profile.before_use:
                self.hold(visit.running if visit is last else visit.before)
                yield self.moment(profile.before_use[name], 0)
            if visit is not last:
                self.hold(visit.waiting)
                yield self.moment(Held(kept, 0), 0)
            last = visit
        self.hold(self.engine.fetches.turn.running)
        self.flat = 0

    def reach(self, tensor: Tensor) -> None:
        """Gather what the backward pass needs for a tensor."""
        if tensor.name in self.stay or self.all_stay or not self.engine.gathers:
            return
        visit = self.engine.fetches.backward[tensor.name]
        self.hold(max(visit.waiting, visit.running, key=sum))
        self.released = visit.released

    def moment(self, activations: Held, extra: int) -> dict:
        states = {"activations": activations.kept, "gathered_weights": self.alive, "gradients": self.large * self.w}
        temporaries = activations.in_use + extra + self.flat + sum(self.in_graph.values())
        return states | {"temporaries": temporaries} | self.engine.second_copy(self.released)

    def reduce(self, complete: Held, next_elements: int) -> dict:
        """Empty the bucket. `next_elements` are those of complete gradients that are not in it."""
        engine = self.engine
        w = self.w
        in_place = len(self.bucket) == 1 and self.bucket[0].elements % engine.ranks == 0
        norm = NORM_BYTES * max(ceil(each.elements / engine.ranks) for each in self.bucket) * engine.offloads
        if engine.optimizer_home == "nvme" and w == 2:  # on their way to the disk, in fp32
            norm = max(norm, 4 * ceil(self.filled / engine.ranks))
        copies = (not in_place) + (self.large > 0 and engine.reduced_bytes != w)  # a large one is not in the bucket
        now = self.moment(complete, self.filled * copies * engine.reduced_bytes + norm + next_elements * w)
        self.bucket = []
        self.filled = self.large = 0
        return now

    def take(self, tensor: Tensor) -> None:
        """Put a complete gradient into the bucket."""
        elements = tensor.elements
        del self.in_graph[tensor.name]
        self.bucket.append(tensor)
        self.filled += elements
        self.large += elements if elements > self.engine.bucket_elements else 0
        # The backward hook of the embeddings comes after the last reduce.
        if tensor.name not in self.stay and self.all_stay and tensor.block != "embeddings":
            self.alive = max(self.alive - elements * self.w, self.engine.stay_bytes)
            self.released += elements
