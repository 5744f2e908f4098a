"""The three numbers that people read as a GPU's memory: allocated, reserved, and what the driver shows.

Allocated memory is that of the tensors (`estimate`). Reserved memory is what PyTorch's caching allocator holds for it:
three steps are replayed on it, with the tensors of a pass from the trace of the model. Each thing that the engine holds
besides (buckets, gathered weights) is one block during a pass, so reserved memory is less certain than allocated. The
driver shows reserved memory and what is outside PyTorch.
"""

import functools
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from study.core.gpus import GPUS, Gpu
from study.predict.estimate import estimate, outputs, profile
from study.predict.estimate import moments as moments_of
from study.predict.memory.engine import Engine
from study.predict.memory.fsdp_memory import Sharding
from study.predict.setup import Setup

MIB = 2**20
SMALL = MIB
MIDDLE = 10 * MIB


def rounded(size: int) -> int:
    """Bytes of the block for a tensor of `size` bytes."""
    return max(512, -(-size // 512) * 512)


def segment_bytes(size: int) -> int:
    """Bytes that a new block of `size` bytes requests from the driver."""
    if size <= SMALL:
        return 2 * MIB
    return 20 * MIB if size < MIDDLE else -(-size // (2 * MIB)) * 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours."""

    size: int
    small: bool
    segment: int
    place: int = 0
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


class Allocator:
    """Counts bytes held for tensors, and in total. At `capacity_bytes` it gives back free segments, then it fails."""

    def __init__(self, capacity_bytes: float = float("inf")):
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, int, int, Block]]] = {True: [], False: []}  # by size, segment, place

    def take(self, size: int) -> Block:
        """A block for a tensor of `size` bytes."""
        size = rounded(size)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        block = self._out(free[place][-1]) if place < len(free) else self._segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > SMALL:
            rest = Block(left, small, block.segment, block.place + size, block, block.after)
            if block.after:
                block.after.before = rest
            block.size = size
            block.after = rest
            self._in(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Free a block and join it with free neighbours."""
        self.allocated -= block.size
        if block.before and block.before.free:
            block = self._join(self._out(block.before), block)
        if block.after and block.after.free:
            self._join(block, self._out(block.after))
        self._in(block)

    def _join(self, block: Block, after: Block) -> Block:
        block.size += after.size
        block.after = after.after
        if after.after:
            after.after.before = block
        return block

    def _segment(self, size: int, small: bool) -> Block:
        segment = segment_bytes(size)
        if self.reserved + segment > self.capacity_bytes:  # what is free is given back
            every = [each for free in self._free.values() for *_, each in free]
            for block in (each for each in every if not (each.before or each.after)):
                self._out(block)
                self.reserved -= block.size
        if self.reserved + segment > self.capacity_bytes:
            raise MemoryError
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments += 1
        return Block(segment, small, self._segments)

    def _in(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.segment, block.place, block))

    def _out(self, block: Block) -> Block:
        block.free = False
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.segment, block.place))]
        return block


# A CUDA context with PyTorch's kernels: 300 MB if kernels are loaded when needed (since CUDA 11.7), more than
# 1 GB before (a maintainer in pytorch#107667). It grows with the kernels: 0.4 GB is assumed.
CONTEXT_BYTES = 0.4e9
OLD_CONTEXT_BYTES = 1.3e9  # of PyTorch 1 on a V100, as transformers' documentation of 2022 measures it
# NCCL's buffers, measured by a user on A100 with NVLink (NVIDIA/nccl#964): a group of two, and a larger one.
NCCL_BYTES = {1: 0, 2: 544 * 2**20, 3: 688 * 2**20}
# An advice keeps more of a GPU free, to be safe: the context of an older CUDA and NCCL, and a share for fragmentation.
# On an A100 that is 7.3 % of 85.9 GB. The smallest share known to be enough is 6.5 %: Llama-3-8B was trained with
# 80.3 GB allocated, on one GPU and on two (fms-acceleration, a100_80gb_liger.csv).
OUTSIDE_AT_MOST_BYTES = 2e9
FRAGMENTATION = 0.05
STEPS = 3  # from the second on, the optimizer's states lie between activations; the third rarely changes anything


@dataclass(frozen=True)
class MemoryKinds:
    """Bytes of a GPU at the peak. None if ranks divide the model: only a pass over all of it was traced."""

    allocated: int
    reserved: int | None
    driver: int | None


def outside_bytes(ranks: int, torch_major: int = 2) -> float:
    """Bytes that a process takes of a GPU outside PyTorch's allocator."""
    context = OLD_CONTEXT_BYTES if torch_major == 1 else CONTEXT_BYTES
    return context + NCCL_BYTES[min(ranks, 3)]


def reserve_bytes(gpu: Gpu) -> float:
    """Bytes of a GPU that an advice keeps free, because allocated bytes do not include them."""
    return OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * gpu.memory_bytes


def memory_kinds(setup: Setup, gpu: str | None = None) -> MemoryKinds:
    """The three numbers. With a GPU (a name in GPUS), PyTorch gives back unused memory near the GPU's limit."""
    allocated = estimate(setup).peak_bytes
    outside = int(outside_bytes(setup.ranks, setup.library.torch_major))
    capacity = GPUS[gpu].memory_bytes - outside if gpu else None
    reserved = reserved_bytes(setup, capacity)
    return MemoryKinds(allocated, reserved, None if reserved is None else reserved + outside)


@functools.cache
def reserved_bytes(setup: Setup, capacity_bytes: int | None = None) -> int | None:
    """The most that the caching allocator holds in the first steps. None for a model that was not traced.

    The replay leaves out what an engine allocates only briefly, so it can end below the allocated bytes. Reserved
    memory is never less than those.
    """
    if not setup.on_gpu:
        return None
    streams = sum(segment_bytes(rounded(size)) for size in _other_streams(setup))
    unfused = replace(setup, library=replace(setup.library, fused_layers=False))
    spared = profile(unfused).kept - profile(setup).kept
    replay = _Replay(setup, Allocator((capacity_bytes or float("inf")) - streams + spared))
    try:
        replay.run()
    except MemoryError:  # it does not fit, or only with the tensors in another order: the GPU is full
        return capacity_bytes
    most_bytes = max(replay.allocator.peak_reserved + streams - spared, estimate(setup).peak_bytes)
    return min(most_bytes, capacity_bytes or most_bytes)


class _Replay:
    """The first steps of a training on an allocator."""

    def __init__(self, setup: Setup, allocator: Allocator):
        self.setup = setup
        self.allocator = allocator
        self.tape = setup.model.tape(setup.trace_options, setup.micro_batch)
        # DDP's buckets take gradients only in the last pass of a step. Those of earlier passes stay outside.
        in_buckets = setup.ranks > 1 and setup.accumulation == 1 and setup.library.bucket_view
        self.keeps_gradients = not (setup.fsdp or setup.deepspeed or in_buckets)
        self.sizes = _of_deepspeed(setup) if setup.deepspeed else _of_tensors(setup)

    def run(self) -> None:
        self._take(self.sizes.standing)
        gradients: list[Block] = []
        for step in range(STEPS):
            for _ in range(min(self.setup.accumulation, 2)):
                self._pass(gradients, keeps=self.keeps_gradients and not gradients)
            if step == 0:
                self._take(self.sizes.moments)
            self._give(self._take(self.sizes.update))
            if self.setup.library.torch_major > 1:
                self._give(gradients)
                gradients = []

    def _pass(self, gradients: list[Block], keeps: bool) -> None:
        """A forward and a backward pass. Without an engine, gradients stay until the update."""
        engine_blocks = self._take(self.sizes.in_pass)
        live: dict[int, Block] = {}  # by the number of the tensor
        tensor_count = 0
        kept = set()
        for kind, what, *_ in self.tape:
            if kind == "made":
                live[tensor_count] = self.allocator.take(what)
                tensor_count += 1
            elif kind == "gradient" and keeps:
                kept.add(what)
            elif kind == "freed" and what not in kept:
                self.allocator.give(live.pop(what))
        gradients += [live.pop(number) for number in kept]
        self._give([*live.values()])  # such as the loss
        self._give(engine_blocks)

    def _take(self, sizes: list[int]) -> list[Block]:
        return [self.allocator.take(size) for size in sizes]

    def _give(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.allocator.give(block)


class _Sizes(NamedTuple):
    """Sizes of the blocks that a training takes beside the tensors of a pass."""

    standing: list[int]  # the states before the first step
    moments: list[int]  # they come with the first update
    in_pass: list[int]  # what an engine holds during a pass besides its states, as at the peak of the backward
    update: list[int]  # the copies that an update makes at once


def _of_deepspeed(setup: Setup) -> _Sizes:
    """Return the flat vectors of DeepSpeed. The host's part is not included."""
    states = dict(estimate(setup).after_step)
    moment = states.pop("moments", 0) // 2
    times = [*moments_of(Engine(setup), profile(setup))]
    most = max((now for when, now in times if when == "backward"), key=lambda now: sum(now.values()))
    in_pass = [int(most[name]) for name in ("gradients", "buckets", "gathered_weights") if most.get(name)]
    made = [int(size) for when, now in times if when == "update" for size in now.values()]
    return _Sizes([*states.values()], [moment, moment] if moment else [], in_pass, [max(made, default=0)])


def _of_tensors(setup: Setup) -> _Sizes:
    """Return two moments of each tensor of one process or DDP, or of a rank's part of it under FSDP.

    Other states come before the first step and stay, so one block for each kind will do.
    """
    states = dict(estimate(setup).after_step)
    states.pop("moments", 0)
    in_pass: list[int] = []
    if setup.fsdp:
        states.pop("gradients", 0)  # they are in another stream
        in_pass = _of_units(Sharding(setup))
    if setup.library.keeps_cache and setup.library.keeps_logits:
        in_pass += outputs(setup)
    share = setup.state_ranks if setup.fsdp else 1
    trained = [] if setup.fsdp_offload else [tensor for tensor in setup.tensors if tensor.trains]
    pieces = trained if share == 1 else [replace(each, shape=(ceil(each.elements / share),)) for each in trained]
    update: list[int] = []
    if setup.precision == "bf16_cast":  # gradients in fp32 for the master copy
        update += [4 * piece.elements for piece in pieces]
    if setup.optimizer == "foreach":
        update += [setup.state_bytes * piece.elements for piece in pieces]
    held = [setup.moments_bytes([piece]) for piece in pieces]
    return _Sizes([*states.values()], [each // 2 for each in held for _ in range(2)], in_pass, update)


def _of_units(sharding: Sharding) -> list[int]:
    """Return FSDP's whole gradients: of the root, of the layer that runs, and of the one that is reduced."""
    if sharding.keeps_whole_gradients:
        return [*sharding.gradient.values()]
    layers = max(size for unit, size in sharding.gradient.items() if unit not in sharding.late)
    return [*(sharding.gradient[unit] for unit in sorted(sharding.late)), layers, layers]


def _other_streams(setup: Setup) -> list[int]:
    """Sizes of what FSDP holds in its own streams, which share no memory with the stream of the passes.

    Whole weights are those of the root, of the running layer, of the next one, and of one that may still be read. Parts
    of gradients stay until the next forward pass (FSDP1, Accelerate's default).
    """
    if not setup.fsdp:
        return []
    sharding = Sharding(setup)
    layers = [unit for unit in sharding.units if unit not in sharding.stay | sharding.late]
    gathered = [max(sharding.whole[unit] for unit in layers)] * 3 if sharding.releases else []
    gathered += [sharding.whole[unit] for unit in sharding.late - sharding.stay for _ in range(2)]
    parts = [] if setup.fsdp_offload else [size * setup.stored_bytes for size in sharding.trained_part.values()]
    return [*(sharding.whole[unit] for unit in sharding.stay), *gathered, *parts]
