"""A DeepSpeed engine, or DDP, as memory and traffic depend on it: its settings, and the part of each rank."""

import functools
from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from study.predictor.memory import moments
from study.predictor.memory.fetches import Fetches, Limits, fetches
from study.predictor.memory.moments import Piece
from study.predictor.memory.profile import Tensor
from study.predictor.memory.tensor import tensors_of_a_rank
from study.predictor.setup import Setup
from study.spec import library_defaults


class Engine:
    """The settings that decide how a rank's memory changes. A silent config means DeepSpeed's default.

    Stage 0 is one process or DDP.
    """

    def __init__(self, setup: Setup):
        zero = library_defaults.zero_optimization(setup.deepspeed)
        # If ranks divide layers, those with the same part of the layers share its states.
        self.model = setup.model
        self.stage = setup.stage
        self.ranks = setup.sharing_ranks // setup.tensor_ranks
        self.divides_layers = setup.tensor_ranks > 1
        if self.divides_layers:
            self.all_tensors = tensors_of_a_rank(setup.model, setup.tensor_ranks)
        else:
            self.all_tensors = setup.tensors
        self.tensors = tuple(tensor for tensor in self.all_tensors if tensor.trains)
        self.elements = sum(tensor.elements for tensor in self.tensors)
        frozen = [tensor for tensor in self.all_tensors if not tensor.trains]
        # A rank's part of the flat weights; in stage 3, of each tensor. Frozen weights have no optimizer state and no
        # gradient; only stage 3 partitions them.
        self.part = self.part_of(self.tensors)
        ranks = self.ranks if self.stage == 3 else 1
        parts = {tensor: ceil(tensor.elements / ranks) for tensor in frozen}
        self.frozen_part = sum(parts.values())
        self.frozen_bytes = setup.scales_bytes + sum(setup.kept_bytes(each) * part for each, part in parts.items())
        self.second_ranks = setup.second_partition
        self.weight_bytes = setup.weight_bytes  # of an element of the weights, and of the gradients when reduced
        self.state_bytes = setup.state_bytes
        self.master = setup.precision == "bf16_cast"  # without DeepSpeed: the optimizer keeps an fp32 copy
        self.optimizer = setup.optimizer
        self.on_gpu = setup.on_gpu
        self.accumulation = setup.accumulation
        self.bucket_elements = int(zero["reduce_bucket_size"])
        overlap = zero["overlap_comm"]
        self.overlap = self.stage == 3 if overlap is None else bool(overlap)
        self.reduces_by_all_reduce = zero["use_multi_rank_bucket_allreduce"]  # stages 1 and 2
        # ZeRO++ sends weights in 8 bits and gradients in 4. Its scales are left out.
        self.gathered_bytes = 1 if zero["zero_quantized_weights"] else self.weight_bytes
        self.quantizes_gradients = bool(zero["zero_quantized_gradients"])
        self.prefetch_elements = int(zero["stage3_prefetch_bucket_size"])
        self.persistent_elements = int(zero["stage3_param_persistence_threshold"])
        self.persistent = [tensor for tensor in self.all_tensors if tensor.elements <= self.persistent_elements]
        self.live_elements = int(zero["stage3_max_live_parameters"])
        self.reuse_elements = min(int(zero["stage3_max_reuse_distance"]), self.live_elements)
        homes = [(zero[f"offload_{part}"] or {}).get("device") or "none" for part in ("optimizer", "param")]
        if self.stage < 3:  # stages 1 and 2 take nvme for cpu
            homes = ["cpu" if home == "nvme" else home for home in homes]
        self.optimizer_home, self.weights_home = homes
        self.offloads = self.optimizer_home != "none"
        # By default, stage 3 pins each parameter's part by itself before all are copied into one piece.
        self.pins_parts = self.weights_home == "cpu" and bool(zero["offload_param"].get("pin_memory", True))
        # Stage 3 makes whole weights of the parts, except a single rank that holds them on its device.
        self.gathers = self.ranks > 1 or (setup.on_gpu and self.weights_home != "none")

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """The tensors as the optimizer has them: with a stage, one vector of this rank's parts; with Muon, two."""
        if self.stage == 0:
            return [moments.piece(tensor) for tensor in self.tensors]
        if self.optimizer != "muon":
            return [Piece((self.part_of(self.tensors),))]
        halves = {of_muon: [t for t in self.tensors if moments.is_for_muon(t) is of_muon] for of_muon in (True, False)}
        return [Piece((self.part_of(half),), of_muon) for of_muon, half in halves.items()]

    def part_of(self, group: Sequence[Tensor]) -> int:
        """Elements of the first rank's part of tensors that are one group of the optimizer."""
        if self.stage == 3:
            return sum(ceil(tensor.elements / self.ranks) for tensor in group)
        return padded(sum(tensor.elements for tensor in group), self.ranks) // self.ranks

    @property
    def made_bytes(self) -> int:
        """Bytes that an update makes beside weights, gradients and moments."""
        return moments.made_bytes(self.optimizer, self.pieces, self.state_bytes)

    @functools.cached_property
    def fetches(self) -> Fetches:
        limits = Limits(self.persistent_elements, self.prefetch_elements, self.live_elements, self.reuse_elements)
        return fetches(self.model, self.all_tensors, limits)


def padded(elements: int, ranks: int) -> int:
    """Stages 1 and 2 pad the flat weights to a multiple of 2 N, so that parts start at 4 bytes (stage_1_and_2.py)."""
    return ceil(elements / (2 * ranks)) * 2 * ranks


def all_elements(engine: Engine) -> int:
    """Elements of all weights, whether they train or not."""
    return sum(tensor.elements for tensor in engine.all_tensors)


def first_part(engine: Engine) -> dict[str, int]:
    """Elements of each tensor that the first rank owns in stages 1 and 2."""
    left = engine.part
    owned = {}
    for tensor in engine.tensors:
        if left > 0:
            owned[tensor.name] = min(left, tensor.elements)
            left -= tensor.elements
    return owned


def owned_whole(engine: Engine) -> int:
    """Elements of the tensors, each counted whole, of which the first rank owns something."""
    owned = first_part(engine)
    return sum(tensor.elements for tensor in engine.tensors if tensor.name in owned)


def second_copy(engine: Engine, released: int) -> dict[str, int]:
    """hpZ's second copy of the released elements: made when a weight is released, dropped after the update.

    With several passes in a step, earlier passes have released everything but the small weights that stay whole
    (stage3.py, _post_step).
    """
    if not engine.second_ranks:
        return {}
    stay = sum(tensor.elements for tensor in engine.persistent)
    elements = max(released, all_elements(engine) - stay) if engine.accumulation > 1 else released
    return {"weights": ceil(elements / engine.second_ranks) * engine.weight_bytes}


def stays_gathered(engine: Engine) -> int:
    """Bytes of the small weights that stay whole from step to step."""
    return sum(tensor.elements for tensor in engine.persistent) * engine.weight_bytes * engine.gathers


def owners(engine: Engine) -> dict[str, set[int]]:
    """For each tensor, the ranks that own its first and its last element.

    If the gradients of a bucket belong to several ranks, DeepSpeed flattens the bucket a second time to reduce it.
    """
    part = engine.part
    ends = accumulate(tensor.elements for tensor in engine.tensors)
    return {
        tensor.name: {(end - tensor.elements) // part, (end - 1) // part}
        for tensor, end in zip(engine.tensors, ends, strict=True)
    }
