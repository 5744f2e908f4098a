"""What DeepSpeed's ZeRO stages have in common (0.19.8): flat states, a bucket of gradients, and offloading."""

from collections.abc import Iterable

from study.predict.engines.base import Engine
from study.predict.trace.tape import Tensor
from study.predict.training import Training

FOLLOWED = "0.19.8"  # DeepSpeed's release, in whose order all is allocated
OPTIMIZER_ROLES = ("master", "moments", "swap", "host_gradients", "host_staging")
NORM_BYTES = 8  # DeepSpeed takes norms in fp64, one tensor at a time (zero/utils.py, get_norm_dtype)


class Zero(Engine):
    """A rank updates its part of the states, which is one vector."""

    def __init__(self, training: Training):
        super().__init__(training)
        self.zero = zero = self.placement.zero
        # DeepSpeed's Ulysses sums in fp32 by default (engine.py, seq_parallel_communication_data_type).
        if self.placement.sequence_ranks > 1:
            self.reduced_bytes = 4
        # Of an element of a state. ZeRO's stages keep a master copy in this type, even of weights that have it. For
        # weights in fp32 the copy is redundant: on one process with a model of 27.8M parameters it is a part of 28
        # bytes a parameter at the peak of stages 1 and 2, where plain PyTorch has 16.6 (measured on a CPU).
        self.state_bytes = self.recipe.moment_bytes
        # Of an element of the gradients that are kept: that of the weights, unless the config says fp32 (engine.py,
        # get_data_types).
        self.kept_in_fp32 = self.placement.keeps_gradients_in_fp32 and self.weight_bytes == 2
        self.sum_bytes = 4 if self.kept_in_fp32 else self.weight_bytes
        # Of an element of a gradient that is copied to the type of the states. 0: it has that type.
        self.copied_bytes = 0 if self.sum_bytes == self.state_bytes else self.state_bytes
        self.bucket_elements = int(zero["reduce_bucket_size"])
        self.optimizer_home, self.weights_home = map(self.home, (zero["offload_optimizer"], zero["offload_param"]))
        self.offloads = self.optimizer_home != "none"
        # Its states and gradients on the host: by default since 0.19.5, and not before.
        self.pins = self.offloads and zero["offload_optimizer"].get("pin_memory", True)
        self.updates_here = not self.offloads  # else the last pass takes norms, and the update uses standing buffers
        self.on_host = [*OPTIMIZER_ROLES] if self.offloads else []
        if self.weights_home != "none":
            self.on_host.append("weights")
        self.part = self.part_elements()
        self.pieces = [Tensor("", (self.part,), "")]
        self.master_bytes = self.state_bytes * self.part

    def home(self, offload: dict | None) -> str:
        return (offload or {}).get("device") or "none"

    def part_elements(self) -> int:
        """The elements that a rank updates."""
        raise NotImplementedError


def pinned_beyond_bytes(sizes: Iterable[int]) -> int:
    """What pinned host memory takes beyond its content, on a GPU. Read in the sources, not measured."""
    # PyTorch rounds each piece up to a power of two (CachingHostAllocator.h).
    return sum((1 << (size - 1).bit_length()) - size for size in sizes)


class Bucket:
    """The gradients in the bucket that fills, until the next one has no room in it."""

    def __init__(self, engine: Zero):
        self.w = engine.weight_bytes
        self.most_elements = engine.bucket_elements
        self.bucket: list[Tensor] = []
        self.filled = self.large = 0  # elements of the bucket, and of gradients that are larger than a bucket

    def is_full(self, tensor: Tensor) -> bool:
        """Whether the next gradient has no room in the bucket."""
        # An empty bucket takes any gradient. One that is larger than the bucket is not copied: it stays where autograd
        # made it, and is reduced by itself (extra_large_param_to_reduce in stage_1_and_2.py).
        return bool(self.bucket) and self.filled + tensor.elements > self.most_elements

    def take(self, tensor: Tensor) -> None:
        self.bucket.append(tensor)
        self.filled += tensor.elements
        if tensor.elements > self.most_elements:
            self.large += tensor.elements
