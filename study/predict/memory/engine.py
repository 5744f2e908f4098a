"""A DeepSpeed engine, or DDP, as memory and traffic depend on it: its settings, and the part of each rank."""

import functools
from math import ceil

from study.core import library_defaults
from study.predict.memory import moments
from study.predict.memory.fetches import Fetches, Limits, fetches
from study.predict.memory.profile import Tensor
from study.predict.setup import Setup


class Engine:
    """The settings that decide how a rank's memory changes. A silent config means DeepSpeed's default.

    Stage 0 is one process or DDP.
    """

    def __init__(self, setup: Setup):
        zero = library_defaults.zero_optimization(setup.deepspeed)
        self.setup = setup
        self.zero = zero
        self.stage = setup.stage
        self.ranks = setup.state_ranks
        self.tensors = tuple(tensor for tensor in setup.tensors if tensor.trains)
        self.elements = sum(tensor.elements for tensor in self.tensors)
        self.part = padded(self.elements, self.ranks) // self.ranks  # the first rank's part of the flat weights
        if self.stage == 3:  # of each tensor
            self.part = sum(ceil(tensor.elements / self.ranks) for tensor in self.tensors)
        # Frozen weights have no optimizer state and no gradient. Only stage 3 partitions them.
        among = self.ranks if self.stage == 3 else 1
        frozen = {tensor: ceil(tensor.elements / among) for tensor in setup.tensors if not tensor.trains}
        self.frozen_part = sum(frozen.values())
        self.frozen_bytes = setup.scales_bytes + sum(setup.kept_bytes(each) * part for each, part in frozen.items())
        self.weight_bytes = setup.weight_bytes  # of an element of the weights, and of their gradients
        self.reduced_bytes = setup.reduced_bytes  # of an element of a gradient in a bucket, and on its way
        self.state_bytes = setup.state_bytes
        self.master = setup.precision == "bf16_cast"  # without DeepSpeed: the optimizer keeps an fp32 copy
        self.accumulation = setup.accumulation
        self.bucket_elements = int(zero["reduce_bucket_size"])
        self.reduce_kind = "all_reduce" if zero["use_multi_rank_bucket_allreduce"] else "reduce"  # until stage 2
        most = int(zero["stage3_param_persistence_threshold"])
        self.persistent = [tensor for tensor in setup.tensors if tensor.elements <= most]
        self.stay_elements = sum(tensor.elements for tensor in self.persistent)
        self.all_elements = sum(tensor.elements for tensor in setup.tensors)  # whether they train or not
        self.limits = Limits(
            persistent=most,
            prefetch=int(zero["stage3_prefetch_bucket_size"]),
            live=int(zero["stage3_max_live_parameters"]),
            reuse=int(min(zero["stage3_max_reuse_distance"], zero["stage3_max_live_parameters"])),
        )
        self.optimizer_home, self.weights_home = map(self._home, (zero["offload_optimizer"], zero["offload_param"]))
        self.offloads = self.optimizer_home != "none"
        # By default, stage 3 pins each parameter's part by itself before all are copied into one piece.
        self.pins_parts = self.weights_home == "cpu" and bool(zero["offload_param"].get("pin_memory", True))
        # Stage 3 makes whole weights of the parts, except a single rank that holds them on its device.
        self.gathers = self.ranks > 1 or (setup.on_gpu and self.weights_home != "none")

    def _home(self, offload: dict | None) -> str:
        device = (offload or {}).get("device") or "none"
        return "cpu" if device == "nvme" and self.stage < 3 else device  # stages 1 and 2 take nvme for cpu

    @functools.cached_property
    def pieces(self) -> tuple[Tensor, ...]:
        """The tensors as the optimizer has them: with a stage, one vector of this rank's parts."""
        return (Tensor("", (self.part,), ""),) if self.stage else self.tensors

    @functools.cached_property
    def sub_groups(self) -> list[int]:
        """Elements that stage 3 updates at a time: of whole tensors (stage3.py, _create_fp16_sub_groups)."""
        sizes = [0]
        for tensor in self.tensors:
            if sizes[-1] >= self.zero["sub_group_size"]:
                sizes.append(0)
            sizes[-1] += ceil(tensor.elements / self.ranks)
        return sizes

    @property
    def made_bytes(self) -> int:
        """Bytes that an update makes beside weights, gradients and moments."""
        return moments.made_bytes(self.setup.optimizer, self.pieces, self.state_bytes)

    @functools.cached_property
    def fetches(self) -> Fetches:
        return fetches(self.setup.model, self.setup.tensors, self.limits)

    @functools.cached_property
    def owned(self) -> dict[str, int]:
        """Elements of each tensor that the first rank owns in stages 1 and 2."""
        left = self.part
        owned = {}
        for tensor in self.tensors:
            if left > 0:
                owned[tensor.name] = min(left, tensor.elements)
                left -= tensor.elements
        return owned

    @functools.cached_property
    def owned_whole_bytes(self) -> int:
        """Bytes of the tensors, each counted whole, of which the first rank owns something."""
        return sum(tensor.elements for tensor in self.tensors if tensor.name in self.owned) * self.weight_bytes

    @property
    def stay_bytes(self) -> int:
        """Bytes of the small weights that stay whole from step to step in stage 3."""
        return self.stay_elements * self.weight_bytes * self.gathers

    @property
    def refetched(self) -> int:
        """Elements that stage 3 gathers again for the backward pass because the forward pass has released them."""
        return self.fetches.fetched - (self.all_elements - self.stay_elements) if self.gathers else 0

    def second_copy(self, released: int) -> dict[str, int]:
        """hpZ's second copy of the released elements: made when a weight is released, dropped after the update.

        With several passes in a step, earlier passes have released everything but the small weights that stay whole
        (stage3.py, _post_step).
        """
        among = self.setup.second_partition
        if self.accumulation > 1:
            released = max(released, self.all_elements - self.stay_elements)
        return {"weights": ceil(released / among) * self.weight_bytes} if among else {}


def padded(elements: int, ranks: int) -> int:
    """Stages 1 and 2 pad the flat weights to a multiple of 2 N, so that parts start at 4 bytes (stage_1_and_2.py)."""
    return ceil(elements / (2 * ranks)) * 2 * ranks
