"""ZeRO's stages 1 and 2: each rank has all weights, and a part of the flat vector of all states.

The last backward pass is followed tensor by tensor, as DeepSpeed 0.19.8 does it. Comments name the file that a step
follows.
"""

from collections.abc import Iterator
from math import ceil

from study.predict.engines.base import Blocks, Sent, elements_of
from study.predict.engines.zero import NORM_BYTES, Bucket, Zero, pinned_beyond_bytes
from study.predict.trace.tape import Held, Profile, Tensor
from study.predict.training import Training


class Stages1And2(Zero):
    python = "stages_1_and_2"

    def __init__(self, training: Training):
        super().__init__(training)
        self.stage = self.placement.stage
        self.leaves_gradients = self.stage == 1 and self.passes > 1
        # Without overlap_comm, DeepSpeed's default, the hooks of stage 1 make the buckets and reduce nothing
        # (stage_1_and_2.py, process_gradients): reduce_gradients does it after the pass. Virtual ranks hold the same.
        self.reduces_after_pass = self.stage == 1 and not self.zero["overlap_comm"]
        # By tensor, the elements that the first rank owns. Parts are equal pieces of the vector, and end anywhere in a
        # tensor: the last one may be owned in part.
        self.owned: dict[str, int] = {}
        self.owners: dict[str, set[int]] = {}  # by tensor, the ranks that own its first and last element
        start = 0
        for tensor in self.tensors:
            end = start + tensor.elements
            self.owners[tensor.name] = {start // self.part, (end - 1) // self.part}
            if start < self.part:
                self.owned[tensor.name] = min(tensor.elements, self.part - start)
            start = end
        # copy_grads_in_partition adds the elements of each tensor in the part, also of one that continues in the next.
        self.owned_whole_bytes = elements_of(self.tensors[: len(self.owned)]) * self.weight_bytes
        # Gradients in fp32 have one vector, also of what is offloaded (_build_compact_grad_partition_buffer).
        self.kept_bytes = self.part * self.sum_bytes if self.kept_in_fp32 else self.owned_whole_bytes
        self.keeps_here = self.kept_in_fp32 or not self.offloads
        self.largest_bytes = max(tensor.elements for tensor in self.tensors) * self.weight_bytes

    def home(self, offload: dict | None) -> str:
        # They test only that the device is not none (stage_1_and_2.py, __init__). Asked for nvme they run, and write no
        # file (measured).
        device = super().home(offload)
        return "cpu" if device == "nvme" else device

    def part_elements(self) -> int:
        # The flat weights are padded to a multiple of 2 N, so that parts start at 4 bytes (stage_1_and_2.py).
        return 2 * ceil(self.elements / (2 * self.ranks))

    @property
    def standing(self) -> dict[str, int]:
        states = super().standing
        states["weights"] += (self.part * self.ranks - self.elements) * self.weight_bytes
        if self.offloads:
            collected = self.master_bytes  # on the host: gradients in the type of the states
            if (
                self.passes > 1 and self.stage == 2 and not self.kept_in_fp32
            ):  # whole tensors (async_accumulate_grad_in_cpu_via_gpu)
                collected += self.owned_whole_bytes
            # temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload: one for the largest tensor on each
            # side. On the host also the updated weights on their way up.
            states["host_staging"] = self.part * self.weight_bytes + self.largest_bytes
            states |= {"staging": self.largest_bytes, "host_gradients": collected}
        return states

    @property
    def beside_on_host(self) -> dict[str, int]:
        # Updated weights, master, gradients, a gradient on its way.
        part = self.part
        pieces = [part * self.weight_bytes, 4 * part, 4 * part, self.largest_bytes] if self.pins else []
        if self.weights_home != "none":
            pieces.append(part * self.weight_bytes)
        return {"pinned": pinned_beyond_bytes(pieces)}

    def blocks(self, states: dict[str, int], moments: list[int]) -> Blocks:
        flat_bytes = self.part * self.weight_bytes
        # The single weights, which are copied into a flat vector; and a copy of the own part, before it is converted to
        # the type of the master copy or goes to the host (stage_1_and_2.py, __init__). The master copy's first gradient
        # (initialize_optimizer_states) is left out: with it five of seven trainings on an H200 come out worse.
        once = [tensor.elements * self.weight_bytes for tensor in self.tensors]
        if self.offloads or self.weight_bytes != self.state_bytes:
            once.append(flat_bytes)
        in_pass = [self.bucket_elements * self.reduced_bytes]
        kept = [self.kept_bytes] if self.keeps_here else []
        update = []
        if not (self.offloads or self.kept_in_fp32):
            update = [flat_bytes, self.part * self.copied_bytes]
        standing = [*states.values()]
        if self.stage == 1:  # it has its own part of the gradients from the last pass on
            return Blocks(standing, moments, in_pass + kept, kept + update, made_once=once)
        return Blocks(standing, moments, in_pass, update, until_update=kept, made_once=once)

    def sent(self) -> Iterator[Sent]:
        # The paper counts a reduce-scatter and an all-gather, as many bytes as DDP's all-reduce (P1 7.2). DeepSpeed
        # reduces by an all-reduce and gathers besides: measured on two ranks, 3 times the weights on the wire instead
        # of 2.
        reductions = self.passes if self.stage == 2 else 1  # stage 1 collects until the last pass of a step
        kind = "all_reduce" if self.zero["use_multi_rank_bucket_allreduce"] else "reduce"
        yield Sent("backward", kind, self.elements * self.reduced_bytes * reductions, self.placement.ranks)
        yield Sent("update", "all_gather", self.part * self.ranks * self.weight_bytes, self.ranks)
        yield from self.sent_to_host(reductions)

    def in_pass(self, profile: Profile) -> Iterator[dict]:
        return Buckets(self).instants(profile)

    def in_update(self) -> Iterator[dict]:
        part, whole = self.part, self.kept_bytes
        # Records of measure version 3 count these as activations, because DeepSpeed makes them with autograd on.
        yield {"gradients": whole, "temporaries": NORM_BYTES * max(self.owned.values())}
        # step() flattens the averaged gradients, converts the vector to the type of the master copy, and only then
        # deletes it: the whole gradients, the vector and its copy are there at once. A single tensor is its own vector.
        # In fp32 they are one vector of that type already.
        flat = part * self.weight_bytes if len(self.owned) > 1 and not self.kept_in_fp32 else 0
        yield {"gradients": whole, "temporaries": flat + self.copied_bytes * part}
        yield {"temporaries": self.state_bytes * part + self.made_bytes}  # the whole gradients are freed by now


# --- the backward pass (stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads)


class Buckets(Bucket):
    """The gradients: in the bucket that fills, or kept because this rank owns some of them."""

    def __init__(self, engine: Stages1And2):
        super().__init__(engine)
        self.engine = engine
        self.waiting = self.kept = 0
        self.most_kept = engine.kept_bytes
        # With one pass nothing is there before its first gradient. With several, the stages differ: only stage 2
        # reduces in each pass (engine.py, allreduce_gradients).
        if engine.passes > 1 and engine.stage == 1:
            # Stage 1 collects whole gradients until the last microbatch. Its buckets stay until the step ends.
            self.waiting = engine.elements * self.w
        elif engine.passes > 1 and engine.keeps_here:
            # Stage 2 has a list of the sums so far (all_grad_tensors), and copies what a pass brings into a new buffer
            # (grads_in_partition) before it adds that to the list. So owned gradients are there twice, but for those in
            # fp32: a pass adds to their vector.
            self.kept = self.most_kept
            self.most_kept *= 1 if engine.kept_in_fp32 else 2
        # setup_buckets allocates whole buckets, however small the model is. With DeepSpeed's default of 5e8 elements, a
        # model of 27.8M parameters in fp32 on two ranks had peaks of 86 to 90 bytes a parameter where DDP had 20.6, and
        # 158 with overlap_comm (measured on a CPU, DeepSpeed 0.19.8).
        together = 2 if engine.zero["overlap_comm"] else 1  # one fills while the other is reduced
        self.buckets = together * engine.bucket_elements * engine.reduced_bytes

    def instants(self, profile: Profile) -> Iterator[dict]:
        buckets = self.buckets if self.waiting else 0  # of earlier passes; else they come with the first gradient
        # _release_ipg_buffers drops the buckets after a reduction: in stage 1 after the last pass only.
        yield self.instant(profile.most, 0) | {"buckets": buckets}
        if self.engine.reduces_after_pass:
            yield from self.collected(profile)
            return
        if self.waiting and self.engine.passes > 2:  # between the first and the last pass stage 1 frees nothing
            for tensor, most, _ in profile.gradients:
                yield self.instant(most, tensor.elements * self.w)
        for tensor, most, complete in profile.gradients:
            if self.bucket:
                yield self.instant(most, tensor.elements * self.w)
            yield from self.reduced(tensor, complete)
        yield from self.reduce(Held(0, 0), 0)

    def collected(self, profile: Profile) -> Iterator[dict]:
        """Whole gradients until the last pass is over; then one after the other, in the order of the parameters."""
        comes_first = not self.waiting
        for tensor, most, _ in profile.gradients:
            yield self.instant(most, tensor.elements * self.w)
            if comes_first:
                self.waiting += tensor.elements * self.w
        for tensor in self.engine.tensors:
            yield from self.reduced(tensor, Held(0, 0))
        yield from self.reduce(Held(0, 0), 0)

    def reduced(self, tensor: Tensor, complete: Held) -> Iterator[dict]:
        """Put a gradient into the bucket."""
        size = tensor.elements * self.w
        # The full bucket is reduced before the new gradient is copied. For this moment both are there, and what the
        # reduction makes. A gradient that waits has been counted.
        if self.is_full(tensor):
            yield from self.reduce(complete, 0 if self.engine.reduces_after_pass else size)
        yield self.instant(complete, 0 if self.engine.reduces_after_pass else size)
        # Once its content is in the bucket, a gradient's own memory is free: its data is pointed at the bucket.
        self.waiting -= size
        self.take(tensor)

    def instant(self, activations: Held, extra: float) -> dict:
        # If nothing waits, the count goes below 0, since each gradient is subtracted once.
        gradients = max(0, self.waiting) + self.kept + self.large * self.w
        return activations.beside({"buckets": self.buckets, "gradients": gradients}, extra)

    def reduce(self, complete: Held, next_bytes: int) -> Iterator[dict]:
        """Empty the bucket. `next_bytes` is the size of the gradient that comes next."""
        engine = self.engine
        owners = set().union(*(engine.owners[tensor.name] for tensor in self.bucket))
        # average_tensor merges neighbouring slices of one owner, so a bucket of one owner is a single slice and is
        # reduced where it is. Slices of several owners are flattened into one message (allreduce_bucket).
        flattened = self.filled * self.w if len(owners) > 1 else 0
        yield self.instant(complete, flattened + next_bytes)
        # The largest alone counts: set_norm_for_param_grad_in_gpu converts one owned slice to fp64, and frees the copy.
        owned = max(engine.owned.get(tensor.name, 0) for tensor in self.bucket)
        if owned and engine.offloads:
            yield self.instant(complete, next_bytes + NORM_BYTES * owned)
        # The first owned gradient allocates the buffer for all of them (copy_grads_in_partition).
        if owned and engine.keeps_here and self.kept < self.most_kept:
            self.kept += engine.kept_bytes
            yield self.instant(complete, next_bytes)
        if owned and engine.kept_in_fp32:  # each slice is converted, and added to the vector
            yield self.instant(complete, flattened + next_bytes + 4 * owned)
        # Stage 1 clears no gradient that others own. One that this rank owns has just been copied, so its first memory
        # is free in both stages (reduce_ipg_grads). A large one is alone in its bucket.
        if self.filled > self.most_elements and (engine.stage == 2 or owned):
            self.large -= self.filled
        self.bucket = []
        self.filled = 0
