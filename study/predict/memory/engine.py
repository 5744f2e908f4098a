"""A DeepSpeed engine, or DDP: its settings, the part of each rank, what it holds all the time, and what it sends."""

import functools
from collections.abc import Iterable
from itertools import accumulate
from math import ceil

from study.predict.memory.fetches import Fetches, Limits, fetches
from study.predict.setup import Setup
from study.predict.trace.tape import Tensor

SWAPPED_FROM_BYTES = 2**20  # smaller parts stay in memory (swap_tensor/utils.py, MIN_AIO_BYTES)
SWAP_BUFFERS = 4  # offload_config.py, buffer_count: master, two moments and the gradient
OPTIMIZER_ROLES = ("master", "moments", "swap", "host_gradients", "host_staging")


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in tensors)


class Engine:
    """The settings that decide how a rank's memory changes. Stage 0 is one process or DDP."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.zero = zero = setup.zero
        self.stage = setup.stage
        self.ranks = setup.state_ranks
        self.reduces = self.ranks > 1 or setup.in_ddp  # in stage 0: in DDP's buckets
        self.accumulation = setup.accumulation
        self.weight_bytes = setup.weight_bytes  # of an element of the weights, and of their gradients
        self.reduced_bytes = setup.reduced_bytes  # of an element of a gradient in a bucket, and on its way
        self.state_bytes = setup.recipe.moment_bytes
        # Of an element of a gradient that is copied to the type of the states. 0: it has that type.
        self.copied_bytes = 0 if self.weight_bytes == self.state_bytes else self.state_bytes
        self.optimizer_home, self.weights_home = map(self._home, (zero["offload_optimizer"], zero["offload_param"]))
        self.offloads = self.optimizer_home != "none"
        # Stage 3 makes whole weights of the parts, except a single rank that holds them on its device.
        self.gathers = self.ranks > 1 or (setup.on_gpu and self.weights_home != "none")
        # --- what trains: `weights` are the elements of it that a rank holds, `part` those that it updates
        self.tensors = setup.trained
        self.elements = _elements(self.tensors)
        self.weights, self.part = self._divided()
        self.master_bytes = setup.master_bytes * self.part
        # The tensors as the optimizer has them: with a stage, one vector of this rank's parts.
        self.pieces = (Tensor("", (self.part,), ""),) if self.stage else self.tensors
        self.made_bytes = setup.made_bytes(self.pieces)
        frozen = [tensor for tensor in setup.tensors if not tensor.trains]
        self.frozen_part = sum(map(self.share, frozen))
        self.frozen_bytes = setup.scales_bytes + sum(setup.kept_bytes(each) * self.share(each) for each in frozen)
        self.bucket_elements = int(zero["reduce_bucket_size"])
        self.reduce_kind = "all_reduce" if zero["use_multi_rank_bucket_allreduce"] else "reduce"  # of stage 2
        # DeepSpeed 0.19.8's defaults: 1e5, 5e7, 1e9 and 1e9 elements (zero/config.py). They count
        # elements of whole tensors, not of parts.
        self.limits = Limits(
            int(zero["stage3_param_persistence_threshold"]),
            int(zero["stage3_prefetch_bucket_size"]),
            int(zero["stage3_max_live_parameters"]),
            int(zero["stage3_max_reuse_distance"]),
        )
        self.all_elements = _elements(setup.tensors)  # whether they train or not
        # A second limit, stage3_model_persistence_threshold, bounds the sum of them. Its default is sys.maxsize, so it
        # is left out here.
        self.persistent = [tensor for tensor in setup.tensors if tensor.elements <= self.limits.persistent]
        self.stay_elements = _elements(self.persistent)
        # Bytes of the small weights that stay whole from step to step.
        self.stay_bytes = self.stay_elements * self.weight_bytes if self.gathers else 0
        # --- on a disk: master and two moments, which a step reads and writes once, but no gradients
        is_swapped = self.optimizer_home == "nvme" and 4 * self.part >= SWAPPED_FROM_BYTES
        # Measured with bf16 weights on the disk as well: 13.3 bytes read and 14.7 written for each parameter of a part.
        # A part below 262,144 elements never leaves the memory, so runs of tiny models do not show the disk at all.
        self.swapped_bytes = 12 * self.part if is_swapped else 0

    def share(self, tensor: Tensor) -> int:
        """Return a rank's elements of a tensor: stage 3 divides each tensor by itself."""
        return ceil(tensor.elements / self.ranks) if self.stage == 3 else tensor.elements

    def _divided(self) -> tuple[int, int]:
        if self.stage in (1, 2):
            # The flat weights are padded to a multiple of 2 N, so that parts start at 4 bytes (stage_1_and_2.py).
            part = 2 * ceil(self.elements / (2 * self.ranks))
            return part * self.ranks, part
        part = sum(map(self.share, self.tensors))
        return part, part

    def _home(self, offload: dict | None) -> str:
        # Stages 1 and 2 test only that the device is not none (stage_1_and_2.py, __init__). Asked for nvme they run,
        # and write no file (measured).
        device = (offload or {}).get("device") or "none"
        return "cpu" if device == "nvme" and self.stage < 3 else device  # stages 1 and 2 take nvme for cpu

    @property
    def on_host(self) -> list[str]:
        """The roles whose bytes are on the host, or on a disk."""
        homes = dict.fromkeys(OPTIMIZER_ROLES, self.optimizer_home) | {"weights": self.weights_home}
        return [role for role, home in homes.items() if home != "none"]

    @functools.cached_property
    def sub_groups(self) -> list[int]:
        """Elements that stage 3 updates at a time: of whole tensors (stage3.py, _create_fp16_sub_groups)."""
        sizes = [0]
        # A tensor is never cut, so a group may exceed the size by almost one tensor.
        for tensor in self.tensors:
            if sizes[-1] >= self.zero["sub_group_size"]:
                sizes.append(0)
            sizes[-1] += self.share(tensor)
        return sizes

    @functools.cached_property
    def fetches(self) -> Fetches:
        return fetches(self.setup.model, self.setup.tensors, self.limits)

    @functools.cached_property
    def owned(self) -> dict[str, int]:
        """Elements of each tensor that the first rank owns in stages 1 and 2."""
        # Parts are equal pieces of one flat vector, and end anywhere in a tensor: the last one may be owned in part.
        starts = zip(self.tensors, accumulate((tensor.elements for tensor in self.tensors), initial=0), strict=False)
        return {each.name: min(each.elements, self.part - start) for each, start in starts if start < self.part}

    @functools.cached_property
    def owned_whole_bytes(self) -> int:
        """Bytes of the tensors, each counted whole, of which the first rank owns something."""
        # copy_grads_in_partition adds the elements of each tensor in the part, also of one that continues in the next.
        return _elements(self.tensors[: len(self.owned)]) * self.weight_bytes

    @functools.cached_property
    def refetched(self) -> int:
        """Elements that stage 3 gathers again for the backward pass because the forward pass has released them."""
        return self.fetches.fetched - (self.all_elements - self.stay_elements) if self.gathers else 0

    def second_copy(self, released: int) -> dict[str, int]:
        """Return hpZ's second copy of the released elements, which is dropped after the update."""
        # The copy is written when a weight is released, and dropped in _post_step (invalidate_secondary_tensor).
        among = self.setup.second_partition
        if among is None:
            return {}
        if self.accumulation > 1:  # earlier passes have released all but what stays whole (stage3.py, _post_step)
            released = max(released, self.all_elements - self.stay_elements)
        return {"weights": ceil(released / among) * self.weight_bytes}

    @property
    def standing(self) -> dict[str, int]:
        """Bytes that stay during the whole step. `host_`: what an offloading engine keeps with the optimizer states."""
        w = self.weight_bytes
        weights = {"weights": self.weights * w + self.frozen_bytes}
        states = {"master": self.master_bytes, "moments": self.setup.moments_bytes(self.pieces)}
        if self.stage == 0:
            return weights | states
        states |= weights
        collected = self.master_bytes  # on the host: gradients in the type of the states
        if self.stage == 3:
            # Stage 3 allocates its part of the gradients and its bucket once, before the first step, and keeps both:
            # they are there in forward passes, too (grad_partitions_flat_buffer; ipg_buckets).
            gradients = "host_gradients" if self.offloads else "gradients"
            states |= {gradients: self.part * w, "buckets": self.bucket_elements * self.reduced_bytes}
            if self.optimizer_home == "cpu":
                # Beside the part that passes add to, each sub-group has an fp32 gradient
                # (_offload_grad_partition_at_boundary).
                states["host_gradients"] += collected
            if self.swapped_bytes:
                # 1024 is AIO_ALIGNED_BYTES (swap_tensor/utils.py).
                swap = SWAP_BUFFERS * ceil(4 * max(self.sub_groups) / 1024) * 1024
                states |= {"master": 0, "moments": 0, "swap": swap}
        elif self.offloads:
            if self.accumulation > 1 and self.stage == 2:  # whole tensors (async_accumulate_grad_in_cpu_via_gpu)
                collected += self.owned_whole_bytes
            # temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload: one for the largest tensor on each
            # side.
            largest = max(tensor.elements for tensor in self.tensors)
            # updated weights on their way up, and a gradient on its way down
            states |= {"host_staging": (self.part + largest) * w, "staging": largest * w, "host_gradients": collected}
        return states

    @property
    def complete_bytes(self) -> int:
        """Bytes of all gradients without sharding. PyTorch's DDP keeps them beside its buckets by default."""
        # Measured on two CPU ranks in fp32: a peak of 20.6 bytes a parameter by default, 16.6 with
        # gradient_as_bucket_view.
        copies = 2 if self.reduces and not self.setup.library.bucket_view else 1
        return copies * self.elements * self.weight_bytes

    @property
    def after_step(self) -> dict[str, int]:
        """What stays until the next step, besides what is standing."""
        # The small weights are released before the update and gathered after it (_post_step), so they are whole between
        # steps.
        if self.stage == 3:
            return {"gathered_weights": self.stay_bytes}
        if self.stage or not self.reduces:
            return {}
        return {"gradients": self.elements * self.weight_bytes}  # DDP's buckets

    @property
    def beside_on_host_bytes(self) -> int:
        """Bytes that pinned host memory takes beyond its content, on a GPU. Read in the sources, not measured.

        PyTorch rounds each piece up to a power of two (CachingHostAllocator.h). Stage 3 has all weights in one piece
        (_create_param_groups_fp16_flat_cpu_memory). By default it pins each parameter's part by itself before.
        """
        w, part = self.weight_bytes, self.part
        pieces = [part * w]
        parts: list[int] = []
        if self.stage < 3:  # updated weights, master, gradients, a gradient on its way
            pieces += [4 * part, 4 * part, max(tensor.elements for tensor in self.tensors) * w]
        elif self.optimizer_home == "cpu":
            pieces += [4 * size for size in self.sub_groups]
        if self.weights_home != "none":
            pieces.append(part * w)
        if self.weights_home == "cpu" and self.zero["offload_param"].get("pin_memory", True):
            parts = [self.share(tensor) * w for tensor in self.tensors]
        return sum(parts) + sum((1 << (size - 1).bit_length()) - size for size in [*pieces, *parts])

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        w, passes = self.weight_bytes, self.accumulation
        if self.stage == 0:
            return {"all_reduce": self.elements * w} if self.reduces else {}
        if self.stage < 3:
            # The paper counts a reduce-scatter and an all-gather, as many bytes as DDP's all-reduce (P1 7.2). DeepSpeed
            # reduces by an all-reduce and gathers besides: measured on two ranks, 3 times the weights on the wire
            # instead of 2.
            reductions = passes if self.stage == 2 else 1
            reduced = {self.reduce_kind: self.elements * self.reduced_bytes * reductions}
            if self.setup.tensor_ranks > 1 and self.ranks == 1:  # it sums its gradients over itself alone
                return reduced
            return reduced | {"all_gather": self.weights * w}
        whole = self.part * self.ranks
        reduced = {"reduce_scatter": whole * self.reduced_bytes * passes}
        if self.ranks == 1:
            return reduced
        stay = sum(map(self.share, self.persistent)) * self.ranks
        # Small weights are gathered once in a step, after the update; the others in each forward pass. What was
        # released then is gathered again: with limits of 0 all of it, which makes the paper's 3 times (P1 7.2;
        # measured).
        gathered = (whole + self.frozen_part * self.ranks - stay + self.refetched) * passes + stay
        return reduced | {"all_gather": gathered * w}
