"""Bytes that a rank holds at each moment of the last backward pass of a step, as DeepSpeed 0.19.8 and DDP do it.

The pass is followed tensor by tensor, last first. Comments name the DeepSpeed file that a step follows.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from math import ceil

from study.predict.memory.engine import Engine
from study.predict.memory.fetches import Visit, Whole, leaf_modules, reads_out_by_embeddings
from study.predict.trace.tape import Held, Profile, Tensor

NORM_BYTES = 8  # DeepSpeed takes norms in fp64, one tensor at a time (zero/utils.py, get_norm_dtype)


def moments(engine: Engine, profile: Profile) -> Iterator[tuple[str, dict]]:
    """Yield the moments of a step's last backward pass and of its update, each with what is held besides the states."""
    if engine.stage == 0:
        backward, update = _keep(engine, profile), _update_whole(engine)
    elif engine.stage == 3:
        backward, update = Scattering(engine).moments(profile), _update_groups(engine)
    else:
        backward, update = Buckets(engine).moments(profile), _update_part(engine)
    yield from (("backward", now) for now in backward)
    if not engine.offloads:  # else norms are taken during the backward pass, and the update uses the standing buffers
        yield from (("update", now) for now in update)


def _keep(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Without DeepSpeed: gradients pile up, or move into DDP's buckets, or are added to those that are there."""
    setup = engine.setup
    whole = engine.elements * engine.weight_bytes
    # DDP's reducer owns its buckets in C++, so clearing the gradients does not free them: they are there from step to
    # step, also in a forward pass.
    ready = whole if engine.reduces else 0  # DDP's buckets
    # Gradients of earlier microbatches are not in DDP's buckets, nor are PyTorch 1's zeros.
    if setup.accumulation > 1 or (setup.library.torch_major == 1 and engine.complete_bytes != ready):
        ready += whole
    yield profile.most.beside({"gradients": ready})
    # They pile up in one process, and in DDP whose gradients are not views of its buckets. Otherwise all of the memory
    # that gradients end in is there already.
    piles_up = ready < engine.complete_bytes
    for tensor, most, _ in profile.gradients:
        size = tensor.elements * engine.weight_bytes
        if piles_up:
            ready += size
            size = 0
        else:  # the new gradient is there besides, until it is moved or added
            ready = max(engine.complete_bytes, ready - size)
        yield most.beside({"gradients": ready}, size)


def _update_whole(engine: Engine) -> Iterator[dict]:
    gradients_bytes, made_bytes = engine.complete_bytes, engine.made_bytes
    if engine.master_bytes:  # there are also the gradients in fp32
        gradients_bytes += 4 * engine.elements
        if engine.setup.deepspeed:  # which flattens them (fused_optimizer.py)
            # The list of all fp32 gradients is still there while one vector is made of it.
            made_bytes = max(made_bytes, 4 * engine.elements)
    yield {"gradients": gradients_bytes, "temporaries": made_bytes}


class Bucket:
    """The gradients in the bucket that fills, until the next one has no room in it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.w = engine.weight_bytes
        self.bucket: list[Tensor] = []
        self.filled = self.large = 0  # elements of the bucket, and of gradients that are larger than a bucket

    def is_full(self, tensor: Tensor) -> bool:
        """Whether the next gradient has no room in the bucket."""
        # An empty bucket takes any gradient. One that is larger than the bucket is not copied: it stays where autograd
        # made it, and is reduced by itself (extra_large_param_to_reduce in stage_1_and_2.py).
        return bool(self.bucket) and self.filled + tensor.elements > self.engine.bucket_elements

    def take(self, tensor: Tensor) -> None:
        self.bucket.append(tensor)
        self.filled += tensor.elements
        if tensor.elements > self.engine.bucket_elements:
            self.large += tensor.elements


# --- stages 1 and 2 (stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads) ---


class Buckets(Bucket):
    """The gradients of stages 1 and 2: in the bucket that fills, or kept because this rank owns some of them."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        ends = accumulate(tensor.elements for tensor in engine.tensors)
        # The ranks that own a tensor's first and last element. DeepSpeed flattens a bucket of several a second time.
        self.ranks = {
            tensor.name: {(end - tensor.elements) // engine.part, (end - 1) // engine.part}
            for tensor, end in zip(engine.tensors, ends, strict=True)
        }
        self.waiting = self.kept = 0
        self.most_kept = engine.owned_whole_bytes
        # With one pass nothing is there before its first gradient. With several, the stages differ: only stage 2
        # reduces in each pass (engine.py, allreduce_gradients).
        if engine.accumulation > 1 and engine.stage == 1:
            # Stage 1 collects whole gradients until the last microbatch. Its buckets stay until the step ends.
            self.waiting = engine.elements * self.w
        elif engine.accumulation > 1 and not engine.offloads:
            # Stage 2 has a list of the sums so far (all_grad_tensors), and copies what a pass brings into a new buffer
            # (grads_in_partition) before it adds that to the list. So owned gradients are there twice.
            self.kept = self.most_kept
            self.most_kept *= 2
        # setup_buckets allocates whole buckets, however small the model is. With DeepSpeed's default of 5e8 elements, a
        # model of 27.8M parameters in fp32 on two ranks had peaks of 86 to 90 bytes a parameter where DDP had 20.6, and
        # 158 with overlap_comm (measured on a CPU, DeepSpeed 0.19.8).
        together = 2 if engine.zero["overlap_comm"] else 1  # one fills while the other is reduced
        self.buckets = together * engine.bucket_elements * engine.reduced_bytes

    def moments(self, profile: Profile) -> Iterator[dict]:
        buckets = self.buckets if self.waiting else 0  # of earlier passes; else they come with the first gradient
        # _release_ipg_buffers drops the buckets after a reduction: in stage 1 after the last pass only.
        yield self.moment(profile.most, 0) | {"buckets": buckets}
        for tensor, most, complete in profile.gradients:
            size = tensor.elements * self.w
            if self.bucket:
                yield self.moment(most, size)
            # The full bucket is reduced before the new gradient is copied. For this moment both are there, and what the
            # reduction makes.
            if self.is_full(tensor):
                yield from self.reduce(complete, size)
            yield self.moment(complete, size)
            # Once its content is in the bucket, a gradient's own memory is free: its data is pointed at the bucket.
            self.waiting -= size
            self.take(tensor)
        for now in self.reduce(Held(0, 0), 0):  # autograd is done: records count what is allocated then as activations
            yield now | {"activations": now["temporaries"], "temporaries": 0}

    def moment(self, activations: Held, extra: float) -> dict:
        # If nothing waits, the count goes below 0, since each gradient is subtracted once.
        gradients = max(0, self.waiting) + self.kept + self.large * self.w
        return activations.beside({"buckets": self.buckets, "gradients": gradients}, extra)

    def reduce(self, complete: Held, next_bytes: int) -> Iterator[dict]:
        """Empty the bucket. `next_bytes` is the size of the gradient that comes next."""
        engine = self.engine
        owners = set().union(*(self.ranks[tensor.name] for tensor in self.bucket))
        # average_tensor merges neighbouring slices of one owner, so a bucket of one owner is a single slice and is
        # reduced where it is. Slices of several owners are flattened into one message (allreduce_bucket).
        flattened = self.filled * self.w if len(owners) > 1 else 0
        yield self.moment(complete, flattened + next_bytes)
        # The largest alone counts: set_norm_for_param_grad_in_gpu converts one owned slice to fp64, and frees the copy.
        owned = max(engine.owned.get(tensor.name, 0) for tensor in self.bucket)
        if owned and engine.offloads:
            yield self.moment(complete, next_bytes + NORM_BYTES * owned)
        # The first owned gradient allocates the buffer for all of them (copy_grads_in_partition).
        elif owned and self.kept < self.most_kept:
            self.kept += engine.owned_whole_bytes
            yield self.moment(complete, next_bytes)
        # Stage 1 clears no gradient that others own. One that this rank owns has just been copied, so its first memory
        # is free in both stages (reduce_ipg_grads).
        if engine.stage == 2 or owned:
            self.large = 0
        self.bucket = []
        self.filled = 0


def _update_part(engine: Engine) -> Iterator[dict]:
    part = engine.part
    whole = engine.owned_whole_bytes
    # Outside autograd, records count temporaries as activations.
    yield {"gradients": whole, "activations": NORM_BYTES * max(engine.owned.values())}
    # step() flattens the averaged gradients, converts the vector to the type of the master copy, and only then deletes
    # it: the whole gradients, the vector and its copy are there at once. A single tensor is its own vector.
    flat = part * engine.weight_bytes if len(engine.owned) > 1 else 0
    yield {"gradients": whole, "activations": flat + engine.copied_bytes * part}
    yield {"activations": engine.state_bytes * part + engine.made_bytes}  # the whole gradients are freed by now


# --- stage 3 (stage3.py, __add_grad_to_ipg_bucket, __avg_scatter_grads; coalesced_collectives.py) ---


class Scattering(Bucket):
    """The gathered weights of stage 3, and its gradients in the bucket that fills."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.stay = {tensor.name for tensor in engine.persistent}
        self.in_graph = Counter[str]()  # bytes of weights, by the tensor whose gradient comes when they go
        if engine.gathers and not engine.setup.has_own_linear:
            self.keep_views()
        turn = engine.fetches.turn
        self.released = turn.released
        # By default 1e9 elements may live, and weights that are used again within 1e9 elements are not released. So in
        # a smaller model all weights are whole at the turn, as in stage 2 (zero/config.py; stage3_max_live_parameters
        # and stage3_max_reuse_distance).
        self.all_stay = turn.running.weights == engine.all_elements and engine.refetched == 0
        self.gathers_again = engine.gathers and not self.all_stay
        self.alive = self.flat = 0  # bytes of gathered weights, and of the buffers from which they were made

    def keep_views(self) -> None:
        """Count the released weights, also frozen ones, that PyTorch's linear layers keep in the graph as views."""
        setup = self.engine.setup
        released = self.engine.fetches.released
        trained = ""
        # Frozen weights have no gradient of their own. The backward pass runs from the last tensor to the first, so the
        # next gradient after a frozen tensor is that of the trained tensor before it.
        for tensor in setup.tensors:
            if tensor.trains:
                trained = tensor.name
            is_linear = len(tensor.shape) == 2 and tensor.block != "embeddings" and not tensor.packed
            if is_linear and tensor.name in released and not setup.computes_again(tensor.block):
                self.in_graph[trained] += tensor.elements * self.w
        # Conv1D gives addmm the parameter itself, and no transposed view of it (transformers, pytorch_utils.py).
        if setup.model.family == "gpt2":  # whose Conv1D keeps none
            self.in_graph.clear()
        if reads_out_by_embeddings(setup.model) and setup.tensors[0].name in released:
            self.in_graph[self.engine.tensors[-1].name] += setup.tensors[0].elements * self.w

    def moments(self, profile: Profile) -> Iterator[dict]:
        if self.engine.ranks > 1:
            yield from self.forward(profile)
        self.hold(self.engine.fetches.turn.running)
        self.flat = 0  # the buffers of the forward pass are gone
        yield self.moment(profile.most, 0)
        leaves = leaf_modules(self.engine.setup.model)
        ends = {leaves.get(each.tensor.name): each.tensor for each in profile.gradients}
        delayed: list[Tensor] = []  # until the backward pass of a mixture of experts ends (reduce_leaf_module_grads)
        for tensor, most, complete in profile.gradients:
            self.reach(tensor)
            delayed.append(tensor)
            whole = sum(each.elements for each in delayed)
            yield self.moment(most, whole * self.w)
            if tensor.name in leaves and tensor != ends[leaves[tensor.name]]:
                continue
            for each in delayed:
                if self.is_full(each):
                    yield self.reduce(complete, whole)
                self.take(each)
                whole -= each.elements
            delayed = []
        yield self.reduce(Held(0, 0), 0)

    def forward(self, profile: Profile) -> Iterator[dict]:
        """The moments of the forward pass: when a module has waited for its weights, and while modules run."""
        last: Visit | None = None
        for name, kept in profile.at_use.items():
            visit = self.engine.fetches.forward[name]
            if name in profile.before_use:
                self.hold(visit.running if visit is last else visit.before)
                yield self.moment(profile.before_use[name], 0)
            if visit is not last:
                self.hold(visit.waiting)
                yield self.moment(Held(kept, 0), 0)
            last = visit

    def hold(self, whole: Whole) -> None:
        if self.engine.gathers:
            self.alive = whole.weights * self.w
        if self.engine.ranks > 1:
            self.flat = whole.flat * self.w

    def reach(self, tensor: Tensor) -> None:
        if self.gathers_again and tensor.name not in self.stay:
            visit = self.engine.fetches.backward[tensor.name]
            # Either may be larger: waiting has the flat buffer beside the weights made from it, running what it
            # has fetched ahead.
            self.hold(max(visit.waiting, visit.running, key=sum))
            self.released = visit.released

    def moment(self, activations: Held, extra: int) -> dict:
        states = {"gathered_weights": self.alive, "gradients": self.large * self.w}
        now = activations.beside(states, extra + self.flat + self.in_graph.total())
        return now | self.engine.second_copy(self.released)

    def reduce(self, complete: Held, next_elements: int) -> dict:
        """Empty the bucket. `next_elements` are those of complete gradients that are not in it."""
        engine = self.engine
        beside = 0
        if engine.offloads:
            beside = NORM_BYTES * max(map(engine.share, self.bucket))
        if engine.optimizer_home == "nvme" and self.w == 2:  # on their way to the disk, in fp32
            beside = max(beside, 4 * ceil(self.filled / engine.ranks))
        size = self.filled * engine.reduced_bytes
        # reduce_scatter_coalesced needs the parts of each rank side by side. It makes this order by a torch.cat of the
        # whole bucket, unless there is one tensor without padding.
        if len(self.bucket) > 1 or self.bucket[0].elements % engine.ranks:  # else it is reduced in place
            beside += size
        # Gradients in the bucket have the type of the communication already, others
        # are converted (__avg_scatter_grads).
        if self.large and engine.reduced_bytes != self.w:  # a large one is not in the bucket
            beside += size
        now = self.moment(complete, beside + next_elements * self.w)
        self.bucket = []
        self.filled = self.large = 0
        return now

    def take(self, tensor: Tensor) -> None:
        super().take(tensor)
        del self.in_graph[tensor.name]
        # The backward hook of the embeddings comes after the last reduce.
        if self.all_stay and tensor.name not in self.stay and tensor.block != "embeddings":
            self.alive = max(self.alive - tensor.elements * self.w, self.engine.stay_bytes)
            self.released += tensor.elements


def _update_groups(engine: Engine) -> Iterator[dict]:
    stay = engine.second_copy(engine.all_elements)  # all are released first (_partition_all_parameters)
    yield stay | {"temporaries": NORM_BYTES * max(map(engine.share, engine.tensors))}
    # Gradients are flattened, then copied to fp32, one group at a time (_prepare_fp32_grad_for_sub_group).
    group = max(engine.sub_groups)
    yield stay | {"temporaries": group * (engine.weight_bytes + engine.copied_bytes)}
    made_bytes = engine.made_bytes * group // engine.part
    yield stay | {"temporaries": engine.state_bytes * group + made_bytes}  # _release_sub_group frees them
