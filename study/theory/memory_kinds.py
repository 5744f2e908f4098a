"""The three numbers that people read as a GPU's memory: allocated, reserved, and what the driver shows.

Allocated are the tensors (`estimate`). Reserved is what PyTorch's caching allocator holds for them: three steps are
replayed on it, the tensors of a pass as they were seen when the model was looked at. What the engine holds beside them
(buckets, gathered weights) is taken as one block of a size for the length of a pass, so reserved is less sure than
allocated. The driver shows reserved, and what is outside PyTorch.
"""

import functools
from dataclasses import dataclass
from math import ceil

from study.machine.gpus import GPUS, Gpu
from study.text.numbers import size
from study.theory import estimate as estimates
from study.theory import moments
from study.theory.allocator import Allocator, Block, rounded, segment_bytes
from study.theory.deepspeed_memory import Engine
from study.theory.estimate import estimate
from study.theory.fsdp_memory import Sharding
from study.theory.setup import Setup
from study.theory.transformer import Transformer

# A CUDA context with PyTorch's kernels: 300 MB where they are loaded as they are needed, since CUDA 11.7, more than
# 1 GB before (a maintainer in pytorch#107667). It grows with the kernels: 0.4 GB is assumed.
CONTEXT_BYTES = 0.4e9
# NCCL's buffers, measured by a user on A100 with NVLink (NVIDIA/nccl#964): a group of two, and a larger one.
NCCL_BYTES = {"two": 544 * 2**20, "more": 688 * 2**20}
# What an advice keeps free of a GPU is more, to be safe: the context of an older CUDA and NCCL, and a share for blocks
# that do not fit what is asked for. On an A100 that is 7.3 % of 85.9 GB. The least that is known to have been enough is
# 6.5 %: Llama-3-8B was trained with 80.3 GB allocated, on one GPU and on two (fms-acceleration, a100_80gb_liger.csv).
OUTSIDE_AT_MOST_BYTES, FRAGMENTATION = 2e9, 0.05
STEPS = 3  # after the first the optimizer's states lie between the activations; the third finds nothing new, mostly


@dataclass(frozen=True)
class MemoryKinds:
    """Bytes of a GPU at the peak. None where nothing is known of the tensors of a pass, as of numbers alone."""

    allocated: int
    reserved: int | None
    driver: int | None


def outside_bytes(ranks: int) -> float:
    """What a process takes of a GPU besides what PyTorch's allocator holds."""
    return CONTEXT_BYTES + (0 if ranks == 1 else NCCL_BYTES["two" if ranks == 2 else "more"])


def reserve_bytes(gpu: Gpu) -> float:
    """Memory of a GPU that is kept free, because allocated bytes do not count it."""
    return OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * gpu.memory_bytes


def memory_kinds(setup: Setup, gpu: str | None = None) -> MemoryKinds:
    """The three numbers. A GPU (a name in GPUS) has an end: near it, PyTorch gives back what it holds in vain."""
    allocated, outside = estimate(setup).peak_bytes, int(outside_bytes(setup.ranks))
    capacity = GPUS[gpu].memory_bytes - outside if gpu else None
    reserved = reserved_bytes(setup, capacity)
    return MemoryKinds(allocated, reserved, None if reserved is None else reserved + outside)


def in_words(kinds: MemoryKinds) -> str:
    """The three numbers in a sentence."""
    tensors = f"allocated {size(kinds.allocated)} (what PyTorch's tensors take)"
    if kinds.reserved is None:
        return f"{tensors}; reserved and what nvidia-smi shows are known for models with a config alone."
    if kinds.reserved < kinds.allocated:
        return f"{tensors}, more than the {size(kinds.reserved)} that a process can have of this GPU: it does not fit."
    reserved = f"reserved {size(kinds.reserved)} (what its allocator holds: replayed)"
    return f"{tensors}; {reserved}; nvidia-smi shows {size(kinds.driver)} (with the CUDA context and NCCL)."


@functools.cache
def reserved_bytes(setup: Setup, capacity_bytes: int | None = None) -> int | None:
    """The most that the caching allocator holds in the first steps. None for a model that was not looked at."""
    if not isinstance(setup.model, Transformer) or not setup.on_gpu:
        return None
    streams = sum(segment_bytes(rounded(size)) for size in _other_streams(setup))
    replay = _Replay(setup, Allocator((capacity_bytes or float("inf")) - streams))
    try:
        replay.run()
    except MemoryError:  # it does not fit, or only in an order that is not known here: the GPU is full
        return capacity_bytes
    return replay.allocator.peak_reserved + streams


class _Replay:
    """The first steps of a training on an allocator."""

    def __init__(self, setup: Setup, allocator: Allocator):
        self.setup, self.allocator = setup, allocator
        self.made, self.log = setup.model.allocations(setup.way, setup.micro_batch)
        self.single = not setup.fsdp and not setup.deepspeed and setup.ranks == 1
        self.beside, self.update = _beside(setup), _update(setup)

    def run(self) -> None:
        standing, moments = _standing(self.setup)
        self._take(standing)
        for step in range(STEPS):
            gradients: list[Block] = []
            for number in range(min(self.setup.accumulation, 2)):
                self._pass(gradients, keeps=self.single and number == 0)
            if step == 0:
                self._take(moments)
            self._give(self._take(self.update))
            self._give(gradients)

    def _pass(self, gradients: list[Block], keeps: bool) -> None:
        """A forward and a backward pass. Gradients that no engine takes stay until the update."""
        beside, blocks = self._take(self.beside), []
        sizes, kept = iter(self.made), set()
        for entry in self.log:
            if entry == 0:
                blocks.append(self.allocator.take(next(sizes)))
            elif entry < 0:
                kept |= {-entry - 1} if keeps else set()
            elif entry - 1 not in kept:
                self.allocator.give(blocks[entry - 1])
                blocks[entry - 1] = None
        gradients += [blocks[number] for number in kept]
        self._give([block for number, block in enumerate(blocks) if block and number not in kept])  # such as the loss
        self._give(beside)

    def _take(self, sizes: list[int]) -> list[Block]:
        return [self.allocator.take(size) for size in sizes]

    def _give(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.allocator.give(block)


def _standing(setup: Setup) -> tuple[list[int], list[int]]:
    """Sizes of what is there before the first step, and of the moments, which come with the first update."""
    if setup.deepspeed:  # flat; what is on the host is not in it
        states = dict(estimate(setup).after_step)
        moment = states.pop("moments", 0) // 2
        return [*states.values()], [moment, moment] if moment else []
    if setup.fsdp_offload:
        return [], []
    share = setup.sharing_ranks if setup.fsdp else 1
    weights = [(ceil(t.elements / share), t.trains) for t in setup.model.tensors]
    sizes = [elements * (setup.stored_bytes if trains else setup.frozen_bytes) for elements, trains in weights]
    if not setup.fsdp and setup.ranks > 1:
        sizes.append(sum(elements for elements, trains in weights if trains) * setup.weight_bytes)  # DDP's buckets
    trained = [elements for elements, trains in weights if trains]
    master = [elements * setup.state_bytes for elements in trained if setup.precision == "bf16_cast"]
    shares = ((t, (ceil(t.elements / share),) if share > 1 else None) for t in setup.model.tensors if t.trains)
    pieces = [moments.piece(tensor, shape) for tensor, shape in shares]
    held = [moments.held_bytes(setup.optimizer, [each], setup.state_bytes) for each in pieces]
    return sizes + master, [each // 2 for each in held for _ in range(2)]


def _beside(setup: Setup) -> list[int]:
    """Sizes of what an engine holds in a pass beside its states, each as one block, as at the backward's peak."""
    if setup.fsdp:  # whole gradients of the root, of the layer that runs, and of the one that is reduced
        sharding = Sharding(setup)
        layers = max(sharding.gradient(unit) for unit in sharding.units if unit not in sharding.late)
        return [*map(sharding.gradient, sharding.late), layers, layers]
    if not setup.deepspeed:
        return []
    moments = estimates.moments(Engine(setup), estimates.profile(setup))
    most = max((now for when, now in moments if when == "backward"), key=lambda now: sum(now.values()))
    return [int(most[name]) for name in ("gradients", "buckets", "gathered_weights") if most.get(name)]


def _update(setup: Setup) -> list[int]:
    """Sizes of the copies that an update makes at once."""
    if setup.deepspeed:
        moments = estimates.moments(Engine(setup), estimates.profile(setup))
        parts = [int(size) for when, now in moments if when == "update" for size in now.values()]
        return [max(parts, default=0)]
    if setup.optimizer != "foreach" or setup.fsdp_offload:
        return []
    share = setup.sharing_ranks if setup.fsdp else 1
    return [ceil(t.elements / share) * setup.state_bytes for t in setup.model.tensors if t.trains]


def _other_streams(setup: Setup) -> list[int]:
    """Sizes of what FSDP holds in its own streams, which share no memory with that of the passes.

    Whole weights: the root's, the layer's that runs, the next one's, and those whose reader may not be done. Parts of
    gradients: they stay until the next forward pass (FSDP1, Accelerate's default).
    """
    if not setup.fsdp:
        return []
    sharding = Sharding(setup)
    layers = [unit for unit in sharding.units if unit not in sharding.stay | sharding.late]
    gathered = [max(map(sharding.whole, layers))] * 3 if sharding.releases else []
    gathered += [sharding.whole(unit) for unit in sharding.late - sharding.stay for _ in range(2)]
    parts = [] if setup.fsdp_offload else map(sharding.gradient_part, sharding.units)
    return [*map(sharding.whole, sharding.stay), *gathered, *parts]
