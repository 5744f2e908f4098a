"""ZeRO's stage 3: each rank has a part of every tensor, and passes gather whole weights.

Forward and backward pass are followed tensor by tensor, as DeepSpeed 0.19.8 does it. Comments name the file that a step
follows.
"""

import functools
from collections.abc import Iterator
from math import ceil

from study.core.errors import Stop
from study.predict.engines.base import Blocks, Sent, elements_of
from study.predict.engines.fetches import Fetches, Limits, Visit, Whole, fetches, leaf_modules
from study.predict.engines.zero import NORM_BYTES, Bucket, Zero, pinned_beyond_bytes
from study.predict.trace.tape import Held, Profile, Tensor
from study.predict.training import Training

SWAPPED_FROM_BYTES = 2**20  # smaller parts stay in memory (swap_tensor/utils.py, MIN_AIO_BYTES)
SWAP_BUFFERS = 4  # offload_config.py, buffer_count: master, two moments and the gradient
ALIGNED_BYTES = 1024  # swap_tensor/utils.py, AIO_ALIGNED_BYTES


class Stage3(Zero):
    python = "stage_3"

    def __init__(self, training: Training):
        super().__init__(training)
        # It makes whole weights of the parts, except a single rank that holds them on its device.
        self.gathers = self.ranks > 1 or (self.placement.on_gpu and self.weights_home != "none")
        # DeepSpeed 0.19.8's defaults: 1e5, 5e7, 1e9 and 1e9 elements (zero/config.py). They count elements of whole
        # tensors, not of parts.
        self.limits = Limits(
            int(self.zero["stage3_param_persistence_threshold"]),
            int(self.zero["stage3_prefetch_bucket_size"]),
            int(self.zero["stage3_max_live_parameters"]),
            int(self.zero["stage3_max_reuse_distance"]),
        )
        # The small weights, which stay whole from step to step. A second limit, stage3_model_persistence_threshold,
        # bounds the sum of them. Its default is sys.maxsize, so it is left out here.
        self.persistent = [tensor for tensor in training.tensors if tensor.elements <= self.limits.persistent]
        self.stay_elements = elements_of(self.persistent)
        self.stay_bytes = self.stay_elements * self.weight_bytes if self.gathers else 0
        # On a disk: master and two moments, but no gradients. Measured with bf16 weights on the disk as well: 13.3
        # bytes read and 14.7 written for each parameter of a part. A part below 262,144 elements never leaves the
        # memory, so runs of tiny models do not show the disk at all.
        if self.optimizer_home == "nvme" and 4 * self.part >= SWAPPED_FROM_BYTES:
            self.swapped_bytes = 12 * self.part

    def share(self, tensor: Tensor) -> int:
        return ceil(tensor.elements / self.ranks)

    def part_elements(self) -> int:
        return sum(map(self.share, self.tensors))

    @property
    def handled(self) -> dict[str, float]:
        tensors = self.training.tensors
        # What is computed again is gathered again.
        again = sum(self.training.computes_again(tensor.block) for tensor in tensors)
        return {"forward": len(tensors), "backward": len(tensors) + again}

    @functools.cached_property
    def sub_groups(self) -> list[int]:
        """Elements that are updated at a time: of whole tensors (stage3.py, _create_fp16_sub_groups)."""
        sizes = [0]
        # A tensor is never cut, so a group may exceed the size by almost one tensor.
        for tensor in self.tensors:
            if sizes[-1] >= self.zero["sub_group_size"]:
                sizes.append(0)
            sizes[-1] += self.share(tensor)
        return sizes

    @functools.cached_property
    def fetches(self) -> Fetches:
        return fetches(self.training.model, self.training.tensors, self.limits)

    @functools.cached_property
    def refetched(self) -> int:
        """Elements that are gathered again for the backward pass because the forward pass has released them."""
        return self.fetches.fetched - (self.all_elements - self.stay_elements) if self.gathers else 0

    @functools.cached_property
    def refetched_frozen(self) -> int:
        """Elements of frozen weights in recomputed layers that their backward pass gathers once more.

        Recomputation has released them. Seen with adapters, DeepSpeed 0.19.8 and recomputation that is not reentrant,
        on virtual ranks and an H200: 44.28 GB in a step of Llama-3-8B, and 30.32 with the other. A model that is small
        enough to stay whole was not looked at.
        """
        if not self.refetched:
            return 0
        again = 0
        for tensor in self.training.tensors:
            stays = tensor.trains or tensor.elements <= self.limits.persistent
            if not stays and self.training.computes_again(tensor.block):
                again += self.share(tensor)
        return again * self.ranks

    def second_copy(self, released: int) -> dict[str, int]:
        """hpZ's second copy of the released elements, which is dropped after the update."""
        # The copy is written when a weight is released, and dropped in _post_step (invalidate_secondary_tensor).
        among = self.placement.second_partition
        if among is None:
            return {}
        if self.passes > 1:  # earlier passes have released all but what stays whole (stage3.py, _post_step)
            released = max(released, self.all_elements - self.stay_elements)
        return {"weights": ceil(released / among) * self.weight_bytes}

    @property
    def standing(self) -> dict[str, int]:
        states = super().standing
        # It allocates its part of the gradients and its bucket once, before the first step, and keeps both: they are
        # there in forward passes, too (grad_partitions_flat_buffer; ipg_buckets).
        gradients = "host_gradients" if self.offloads else "gradients"
        states[gradients] = self.part * self.sum_bytes
        states["buckets"] = self.bucket_elements * self.reduced_bytes
        if self.optimizer_home == "cpu":
            # Beside the part that passes add to, each sub-group has a gradient in the type of the states
            # (_offload_grad_partition_at_boundary).
            states["host_gradients"] += self.master_bytes
        if self.swapped_bytes:
            swap = SWAP_BUFFERS * ceil(4 * max(self.sub_groups) / ALIGNED_BYTES) * ALIGNED_BYTES
            states |= {"master": 0, "moments": 0, "swap": swap}
        return states

    @property
    def after_step(self) -> dict[str, int]:
        # The small weights are released before the update and gathered after it (_post_step), so they are whole between
        # steps.
        return {"gathered_weights": self.stay_bytes}

    @property
    def beside_on_host(self) -> dict[str, int]:
        # All weights are in one piece (_create_param_groups_fp16_flat_cpu_memory). By default each parameter's part is
        # pinned by itself before.
        w = self.weight_bytes
        pieces = [self.part * w] if self.pins else []
        parts: list[int] = []
        if self.pins and self.optimizer_home == "cpu":
            pieces += [4 * size for size in self.sub_groups]
        if self.weights_home != "none":
            pieces.append(self.part * w)
        if self.weights_home == "cpu" and self.zero["offload_param"].get("pin_memory", True):
            parts = [self.share(tensor) * w for tensor in self.tensors]
        return {"weights": sum(parts), "pinned": pinned_beyond_bytes([*pieces, *parts])}

    def blocks(self, states: dict[str, int], moments: list[int]) -> Blocks:
        roles = ["gradients", "buckets"]
        if self.ranks == 1:
            return self.blocks_of_vectors(states, moments, [*roles, "gathered_weights"])
        gathers = [(name, elements * self.weight_bytes) for name, elements in self.fetches.buffers]
        return self.blocks_of_vectors(states, moments, roles)._replace(gathers=gathers)

    def sent(self) -> Iterator[Sent]:
        reduced_bytes = self.part * self.ranks * self.reduced_bytes * self.passes
        yield Sent("backward", "reduce_scatter", reduced_bytes, self.placement.ranks)
        # Small weights are gathered once in a step, after the update; the others in each forward pass. What was
        # released then is gathered again: with limits of 0 all of it, which makes the paper's 3 times (P1 7.2;
        # measured).
        whole = sum(map(self.share, self.training.tensors)) * self.ranks
        stay = sum(map(self.share, self.persistent)) * self.ranks
        first_bytes = (whole - stay) * self.passes * self.weight_bytes
        again_bytes = (self.refetched + self.refetched_frozen) * self.passes * self.weight_bytes
        if self.ranks > 1:
            yield Sent("forward", "all_gather", first_bytes, self.ranks)
            # Again from few ranks, if there is hpZ's second copy of what was released.
            yield Sent("backward", "all_gather", again_bytes, self.placement.second_partition or self.ranks)
            yield Sent("update", "all_gather", stay * self.weight_bytes, self.ranks)
        if self.weights_home != "none":
            yield Sent("forward", "host", first_bytes / self.ranks)
            yield Sent("backward", "host", again_bytes / self.ranks)
        yield from self.sent_to_host(self.passes)

    def in_pass(self, profile: Profile) -> Iterator[dict]:
        if self.gathers and not self.placement.has_own_linear:
            what = "what PyTorch's linear layers keep of gathered weights with stage 3 is not predicted"
            raise Stop(what, "leave memory_efficient_linear on, as it is by default", "unavailable")
        return Scattering(self).instants(profile)

    def in_update(self) -> Iterator[dict]:
        # hpZ's copy, and not the small weights: all are released first (_partition_all_parameters).
        stay = self.second_copy(self.all_elements)
        yield stay | {"temporaries": NORM_BYTES * max(map(self.share, self.tensors))}
        # Gradients are flattened, then copied to fp32, one group at a time (_prepare_fp32_grad_for_sub_group).
        group = max(self.sub_groups)
        yield stay | {"temporaries": group * (self.sum_bytes + self.copied_bytes)}
        made_bytes = self.made_bytes * group // self.part
        yield stay | {"temporaries": self.state_bytes * group + made_bytes}  # _release_sub_group frees them


# --- both passes (stage3.py, __add_grad_to_ipg_bucket, __avg_scatter_grads; coalesced_collectives.py)


class Scattering(Bucket):
    """The gathered weights, and the gradients in the bucket that fills."""

    def __init__(self, engine: Stage3):
        super().__init__(engine)
        self.engine = engine
        self.stay = {tensor.name for tensor in engine.persistent}
        turn = engine.fetches.turn
        self.released_elements = turn.released_elements
        # By default weights that are used again within 1e9 elements are not released. So in a smaller model all weights
        # are whole at the turn, as in stage 2 (stage3_max_reuse_distance).
        self.all_stay = turn.running.weights == engine.all_elements and engine.refetched == 0
        self.gathers_again = engine.gathers and not self.all_stay
        self.alive_bytes = 0  # of gathered weights
        self.flat_bytes = 0  # of the buffers from which they were made

    def instants(self, profile: Profile) -> Iterator[dict]:
        if self.engine.ranks > 1:
            yield from self.forward(profile)
        self.hold(self.engine.fetches.turn.running)
        self.flat_bytes = 0  # the buffers of the forward pass are gone
        yield self.instant(profile.most, 0)
        leaves = leaf_modules(self.engine.training.model)
        ends = {leaves.get(gradient.tensor.name): gradient.tensor for gradient in profile.gradients}
        delayed: list[Tensor] = []  # until the backward pass of a mixture of experts ends (reduce_leaf_module_grads)
        for tensor, most, complete in profile.gradients:
            self.reach(tensor)
            delayed.append(tensor)
            whole = sum(each.elements for each in delayed)
            yield self.instant(most, whole * self.w)
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
        """The instants of the forward pass: when a module has waited for its weights, and while modules run."""
        last: Visit | None = None
        for name, kept in profile.at_use.items():
            visit = self.engine.fetches.forward[name]
            if name in profile.before_use:
                self.hold(visit.running if visit is last else visit.before)
                yield self.instant(profile.before_use[name], 0)
            if visit is not last:
                self.hold(visit.waiting)
                yield self.instant(Held(kept, 0), 0)
            last = visit

    def hold(self, whole: Whole) -> None:
        if self.engine.gathers:
            self.alive_bytes = whole.weights * self.w
        if self.engine.ranks > 1:
            self.flat_bytes = whole.flat * self.w

    def reach(self, tensor: Tensor) -> None:
        if self.gathers_again and tensor.name not in self.stay:
            visit = self.engine.fetches.backward[tensor.name]
            # Either may be larger: waiting has the flat buffer beside the weights made from it, running what it
            # has fetched ahead.
            self.hold(max(visit.waiting, visit.running, key=sum))
            self.released_elements = visit.released_elements

    def instant(self, activations: Held, extra: int) -> dict:
        states = {"gathered_weights": self.alive_bytes, "gradients": self.large * self.w}
        now = activations.beside(states, extra + self.flat_bytes)
        return now | self.engine.second_copy(self.released_elements)

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
        now = self.instant(complete, beside + next_elements * self.w)
        self.bucket = []
        self.filled = self.large = 0
        return now

    def take(self, tensor: Tensor) -> None:
        super().take(tensor)
        # The backward hook of the embeddings comes after the last reduce.
        if self.all_stay and tensor.name not in self.stay and tensor.block != "embeddings":
            self.alive_bytes = max(self.alive_bytes - tensor.elements * self.w, self.engine.stay_bytes)
            self.released_elements += tensor.elements
