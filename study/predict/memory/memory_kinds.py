"""The three numbers that people read as a GPU's memory: allocated, reserved, and what the driver shows.

Reserved memory is what PyTorch's caching allocator holds: three steps are replayed on it. It is less certain than
allocated memory. The driver shows reserved memory and what is outside PyTorch.
"""

import functools
import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from study.core.gpus import GPUS, Gpu
from study.predict.estimate import estimate, outputs, profile
from study.predict.estimate import moments as moments_of
from study.predict.memory.engine import Engine
from study.predict.memory.fsdp_memory import Sharding
from study.predict.setup import Setup
from study.predict.trace.tape import Tape

# Sizes of PyTorch's caching allocator (CUDACachingAllocator.h): kSmallSize and kMinLargeAlloc.
MIB = 2**20
SMALL = MIB
MIDDLE = 10 * MIB


def rounded(size: int) -> int:
    """Return the bytes of the block that a tensor of `size` bytes gets."""
    # kMinBlockSize (c10/core/AllocatorConfig.h).
    return max(512, -(-size // 512) * 512)


def segment_bytes(size: int) -> int:
    """Return the bytes that a new block of `size` bytes requests from the driver."""
    # kSmallBuffer, the default large_segment_size and kRoundLarge (c10/core/AllocatorConfig.h). One block of 1.1 MiB
    # reserves 20 MiB: in small models reserved memory says little about allocated memory.
    if size <= SMALL:
        return 2 * MIB
    return 20 * MIB if size < MIDDLE else -(-size // (2 * MIB)) * 2 * MIB


class Block(NamedTuple):
    """A piece of a segment. Free ones are searched in this order: the smallest first, then the one requested first."""

    small: bool  # small blocks and large ones never share a segment
    size: int
    segment: int
    place: int


class Allocator:
    """Counts bytes for tensors, and in total. At `capacity_bytes` it gives back free segments, then it fails."""

    def __init__(self, capacity_bytes: float = inf):
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._segments: list[int] = []  # bytes of each
        self._free: list[Block] = []  # sorted
        # By segment and place of each end. Free neighbours are joined at once, so no two of them share an end.
        self._ending: dict[tuple[int, int], Block] = {}

    def take(self, size: int) -> Block:
        """Return the smallest free block that is large enough, or one of a new segment."""
        size = rounded(size)
        small = size <= SMALL
        place = bisect_left(self._free, (small, size))
        if place < len(self._free) and self._free[place].small == small:
            block = self._out(self._free[place])
        else:
            block = self._new_segment(small, size)
        left = block.size - size
        if left >= 512 if small else left > SMALL:  # what is left of a large block is not split off to be a small one
            self._in(Block(small, left, block.segment, block.place + size))
            block = block._replace(size=size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Free a block and join it with free neighbours."""
        self.allocated -= block.size
        for end in (block.place, block.place + block.size):
            if neighbour := self._ending.get((block.segment, end)):
                self._out(neighbour)
                place = min(block.place, neighbour.place)
                block = block._replace(size=block.size + neighbour.size, place=place)
        self._in(block)

    def take_all(self, sizes: Sequence[int]) -> list[Block]:
        return [self.take(size) for size in sizes if size]

    def give_all(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.give(block)

    def _new_segment(self, small: bool, size: int) -> Block:
        size = segment_bytes(size)
        if self.reserved + size > self.capacity_bytes:  # what is free is given back
            for block in [each for each in self._free if each.size == self._segments[each.segment]]:
                self._out(block)
                self.reserved -= block.size
        if self.reserved + size > self.capacity_bytes:
            raise MemoryError
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments.append(size)
        return Block(small, size, len(self._segments) - 1, 0)

    def _in(self, block: Block) -> None:
        insort(self._free, block)
        for end in (block.place, block.place + block.size):
            self._ending[block.segment, end] = block

    def _out(self, block: Block) -> Block:
        del self._free[bisect_left(self._free, block)]
        for end in (block.place, block.place + block.size):
            del self._ending[block.segment, end]
        return block


# A CUDA context with the kernels that a training loads: 0.79 to 0.80 GB in 15 trainings on an H200 (reports/h200, CUDA
# 13.0). Before CUDA 11.7 it had all kernels.
CONTEXT_BYTES = 0.8e9
OLD_CONTEXT_BYTES = 1.3e9  # of PyTorch 1 on a V100, as transformers' documentation of 2022 measures it
# NCCL's buffers and kernels: a group of one (on the H200), of two, and a larger one (on A100 with NVLink, by a user in
# NVIDIA/nccl#964). Under stages 1 and 2 the H200 shows 0.4 GB more, for a reason that is not known.
NCCL_BYTES = {1: 0.6e9, 2: 544 * 2**20, 3: 688 * 2**20}
STAGES_1_AND_2_BYTES = 0.4e9
# An advice keeps more of a GPU free, to be safe: for an older CUDA and NCCL, and for fragmentation. On an A100 that is
# 7.3 % of 85.9 GB; 6.5 % was enough for Llama-3-8B, on one GPU and on two (fms-acceleration, a100_80gb_liger.csv).
OUTSIDE_AT_MOST_BYTES = 2e9
FRAGMENTATION = 0.05
STEPS = 3  # from the second on, the optimizer's states lie between activations; the third rarely changes anything


@dataclass(frozen=True)
class MemoryKinds:
    allocated: int
    reserved: int
    driver: int


def outside_bytes(setup: Setup) -> float:
    """Return the bytes that a process takes of a GPU outside PyTorch's allocator."""
    outside = OLD_CONTEXT_BYTES if setup.library.torch_major == 1 else CONTEXT_BYTES
    if setup.ranks > 1 or setup.deepspeed or setup.fsdp or setup.in_ddp:
        outside += NCCL_BYTES[min(setup.ranks, 3)]
    if setup.stage in (1, 2):
        outside += STAGES_1_AND_2_BYTES
    return outside


def reserve_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU that an advice keeps free, because allocated bytes do not include them."""
    return OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * gpu.memory_bytes


def memory_kinds(setup: Setup, gpu: str | None = None) -> MemoryKinds:
    """Return the three numbers. With a GPU, PyTorch gives back unused memory near the GPU's limit."""
    outside = int(outside_bytes(setup))
    reserved = reserved_bytes(setup, GPUS[gpu].memory_bytes - outside if gpu else inf)
    return MemoryKinds(estimate(setup).peak_bytes, reserved, reserved + outside)


@functools.cache
def reserved_bytes(setup: Setup, capacity_bytes: float = inf) -> int:
    """Return the most that the caching allocator holds in the first steps."""
    sizes = sizes_of(setup)
    streams = sum(map(segment_bytes, map(rounded, sizes.in_other_streams)))
    # The tape is that of transformers' own kernels, so what fused ones spare is taken off the result.
    unfused = replace(setup, library=replace(setup.library, fused_layers=False))
    beside = streams - int(profile(unfused).kept - profile(setup).kept)
    allocator = Allocator(capacity_bytes - beside)
    try:
        replay(setup, sizes, allocator)
    except MemoryError:  # it does not fit, or only with the tensors in another order: the GPU is full
        return int(capacity_bytes)
    # The replay leaves out what an engine allocates only briefly, so it can end below the allocated bytes.
    return int(min(max(allocator.peak_reserved + beside, estimate(setup).peak_bytes), capacity_bytes))


class Sizes(NamedTuple):
    """Sizes of the blocks that a training takes beside the tensors of a pass."""

    standing: list[int]  # the states before the first step
    moments: list[int]  # they come with the first update
    in_pass: list[int]  # what an engine holds during a pass besides its states, as at the peak of the backward
    update: list[int]  # the copies that an update makes at once
    in_other_streams: list[int]  # they share no memory with the stream of the passes
    until_update: Sequence[int] = ()  # that each pass leaves to the update
    made_once: Sequence[int] = ()  # while the states are made. The cache keeps its memory, in pieces


def sizes_of(setup: Setup) -> Sizes:
    """Return two moments of each tensor, and one block for each kind of state that comes before the first step."""
    states = dict(estimate(setup).after_step)
    moments_bytes = states.pop("moments", 0)
    if setup.deepspeed:  # its states are flat vectors. The host's part is not included
        return _of_deepspeed(setup, [*states.values()], moments_bytes)
    in_pass, in_other_streams = _of_units(setup) if setup.fsdp else ([], [])
    # The tensors as this rank has their moments. With offloading the host has them, and updates.
    pieces = [*setup.trained]
    if setup.fsdp:
        states.pop("gradients", 0)  # they are in another stream
        pieces = [
            replace(each, shape=(ceil(each.elements / setup.state_ranks),)) for each in pieces if not setup.fsdp_offload
        ]
    if setup.library.keeps_cache and setup.library.keeps_logits:
        in_pass += outputs(setup)
    # Copies of an update: gradients in fp32 for the master copy, and the roots of all second moments at once.
    update = [setup.recipe.master_bytes * piece.elements for piece in pieces if setup.recipe.master_bytes]
    if setup.optimizer == "foreach":
        update += [setup.recipe.moment_bytes * piece.elements for piece in pieces]
    moments = [setup.moments_bytes([piece]) // 2 for piece in pieces for _ in range(2)]
    return Sizes([*states.values()], moments, in_pass, update, in_other_streams)


def _of_deepspeed(setup: Setup, standing: list[int], moments_bytes: int) -> Sizes:
    engine = Engine(setup)
    moments = [moments_bytes // 2] * 2
    if setup.stage in (1, 2):
        return _of_stages_1_and_2(engine, standing, moments)
    times = [*moments_of(engine, profile(setup))]
    in_pass = max((now for when, now in times if when == "backward"), key=lambda held: sum(held.values()))
    update_bytes = max((max(now.values()) for when, now in times if when == "update"), default=0)
    held = [int(in_pass.get(name, 0)) for name in ("gradients", "buckets", "gathered_weights")]
    return Sizes(standing, moments, held, [int(update_bytes)], [])


def _of_stages_1_and_2(engine: Engine, standing: list[int], moments: list[int]) -> Sizes:
    flat_bytes = engine.part * engine.weight_bytes
    # The single weights, which are copied into a flat vector; and a copy of the own part, before it is converted to the
    # type of the master copy or goes to the host (stage_1_and_2.py, __init__). The master copy's first gradient
    # (initialize_optimizer_states) is left out: with it five of seven trainings on an H200 come out worse.
    once = [each.elements * engine.weight_bytes for each in engine.tensors]
    if engine.offloads or engine.copied_bytes:
        once.append(flat_bytes)
    in_pass = [engine.bucket_elements * engine.reduced_bytes]
    kept = update = []
    if not engine.offloads:
        kept, update = [engine.owned_whole_bytes], [flat_bytes, engine.part * engine.copied_bytes]
    if engine.stage == 1:  # it has its own part of the gradients from the last pass on
        return Sizes(standing, moments, in_pass + kept, kept + update, [], (), once)
    return Sizes(standing, moments, in_pass, update, [], kept, once)


def _of_units(setup: Setup) -> tuple[list[int], list[int]]:
    sharding = Sharding(setup)
    # Whole gradients are those of the root, of the layer that runs, and of the one that is reduced.
    in_pass = [unit.gradient for unit in sharding.late]
    others = [unit.gradient for unit in sharding.units if not unit.is_late]
    in_pass += others if sharding.keeps_whole_gradients else 2 * [max(others)]
    # Whole weights are those of the root, of the running layer, of the next one, and of one that may still be read.
    in_other_streams = [unit.whole for unit in sharding.units if unit.stays]
    in_other_streams += 2 * [unit.whole for unit in sharding.late if not unit.stays]
    released = [unit.whole for unit in sharding.units if not (unit.stays or unit.is_late)]
    in_other_streams += 3 * sorted(released)[-1:]
    # Parts of gradients stay until the next forward pass (FSDP1, Accelerate's default).
    if not setup.fsdp_offload:
        in_other_streams += [unit.part * setup.recipe.gradient_bytes for unit in sharding.units]
    return in_pass, in_other_streams


def replay(setup: Setup, sizes: Sizes, allocator: Allocator) -> None:
    """Let the allocator take and give what the first steps make and free."""
    tape = setup.model.tape(setup.trace_options, setup.micro_batch)
    # Without an engine gradients stay until the update. DDP's buckets take only those of the last pass of a step.
    in_buckets = (setup.ranks > 1 or setup.in_ddp) and setup.accumulation == 1 and setup.library.bucket_view
    collects = setup.stage == 1 and setup.accumulation > 1
    keeps_gradients = collects or not (setup.fsdp or setup.deepspeed or in_buckets)
    gradients: list[Block] = []
    made_once = allocator.take_all(sizes.made_once)
    allocator.take_all(sizes.standing)
    allocator.give_all(made_once)
    for step in range(STEPS):
        kept: list[Block] = []
        for _ in range(min(setup.accumulation, 2)):  # a third pass does what the second did
            # The tape knows no engine. Its blocks are taken before a pass and given back after it, though in a run they
            # come and go between activations: one reason why reserved memory is less certain.
            kept += allocator.take_all(sizes.until_update)
            engine_blocks = allocator.take_all(sizes.in_pass)
            gradients += _pass(tape, allocator, keeps_gradients and not gradients)
            allocator.give_all(engine_blocks)
        if step == 0:
            allocator.take_all(sizes.moments)
        allocator.give_all(allocator.take_all(sizes.update))
        allocator.give_all(kept)
        if setup.library.torch_major > 1:  # PyTorch 1 sets them to zero
            allocator.give_all(gradients)
            gradients = []


def _pass(tape: Tape, allocator: Allocator, keeps_gradients: bool) -> list[Block]:
    """A forward and a backward pass. Return the blocks of the gradients that stay."""
    live: dict[int, Block] = {}  # by the number of the tensor
    numbers = itertools.count()
    kept = set()
    for kind, what, *_ in tape:
        if kind == "made":
            live[next(numbers)] = allocator.take(what)
        elif kind == "gradient" and keeps_gradients:
            kept.add(what)
        elif kind == "freed" and what not in kept:
            allocator.give(live.pop(what))
    gradients = [live.pop(number) for number in kept]
    allocator.give_all([*live.values()])  # such as the loss
    return gradients
