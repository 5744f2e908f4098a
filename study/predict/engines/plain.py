"""One process, or DDP: each rank has all states. So it is in DeepSpeed's stage 0 (0.19.8)."""

from collections.abc import Iterator

from study.predict.engines.base import Blocks, Engine, Sent
from study.predict.trace.tape import Profile
from study.predict.training import Training


class PlainEngine(Engine):
    """Gradients pile up, or move into DDP's buckets, or are added to those that are there."""

    def __init__(self, training: Training):
        super().__init__(training)
        self.in_buckets = self.ranks > 1 or self.placement.in_ddp
        self.python = "ddp" if self.in_buckets else None
        # DDP's buckets take only the gradients of the last pass of a step.
        in_buckets_alone = self.in_buckets and self.passes == 1 and training.loop.bucket_view
        self.leaves_gradients = not (self.placement.deepspeed or in_buckets_alone)
        self.pieces = self.tensors
        self.part = self.elements
        self.gradients_bytes = self.elements * self.weight_bytes
        self.master_bytes = self.recipe.master_bytes * self.elements
        # PyTorch's DDP keeps gradients beside its buckets by default. Measured on two CPU ranks in fp32: a peak of 20.6
        # bytes a parameter by default, 16.6 with gradient_as_bucket_view.
        copies = 2 if self.in_buckets and not training.loop.bucket_view else 1
        self.complete_bytes = copies * self.gradients_bytes

    @property
    def after_step(self) -> dict[str, int]:
        # DDP's reducer owns its buckets in C++, so clearing the gradients does not free them: they are there from step
        # to step, also in a forward pass.
        return {"gradients": self.gradients_bytes} if self.in_buckets else {}

    def blocks(self, states: dict[str, int], moments: list[int]) -> Blocks:
        if self.placement.deepspeed:  # stage 0 has flat vectors
            return self.blocks_of_vectors(states, moments, ("gradients", "buckets", "gathered_weights"))
        return self.blocks_of_tensors(states)

    def sent(self) -> Iterator[Sent]:
        if self.in_buckets:
            yield Sent("backward", "all_reduce", self.gradients_bytes, self.ranks)

    def in_pass(self, profile: Profile) -> Iterator[dict]:
        if self.training.optimizer_in_backward:  # each gradient is freed after the update of its tensor
            yield profile.most.beside({})
            for tensor, most, _ in profile.gradients:
                yield most.beside({"gradients": tensor.elements * self.weight_bytes}, self.made_bytes)
            return
        ready = self.gradients_bytes if self.in_buckets else 0
        # Gradients of earlier microbatches are not in DDP's buckets, nor are PyTorch 1's zeros.
        if self.passes > 1 or (self.training.loop.torch_major == 1 and self.complete_bytes != ready):
            ready += self.gradients_bytes
        yield profile.most.beside({"gradients": ready})
        # They pile up in one process, and in DDP whose gradients are not views of its buckets. Otherwise all of the
        # memory that gradients end in is there already.
        piles_up = ready < self.complete_bytes
        for tensor, most, _ in profile.gradients:
            size = tensor.elements * self.weight_bytes
            if piles_up:
                ready += size
                size = 0
            elif self.passes < 3:  # DDP moves gradients in the last pass alone; others add to those that are there
                ready = max(self.complete_bytes, ready - size)
            yield most.beside({"gradients": ready}, size)

    def in_update(self) -> list[dict]:
        if self.training.optimizer_in_backward:
            return []
        gradients_bytes, made_bytes = self.complete_bytes, self.made_bytes
        if self.master_bytes:  # there are also the gradients in fp32
            gradients_bytes += 4 * self.elements
            if self.placement.deepspeed:  # which flattens them (fused_optimizer.py)
                # The list of all fp32 gradients is still there while one vector is made of it.
                made_bytes = max(made_bytes, 4 * self.elements)
        return [{"gradients": gradients_bytes, "temporaries": made_bytes}]
