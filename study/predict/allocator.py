"""The three numbers that people read as a GPU's memory: allocated, reserved, and what the driver shows.

Reserved memory is what PyTorch's caching allocator holds: three steps are replayed on it. It is less certain than
allocated memory. The driver shows reserved memory and what is outside PyTorch.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from study.core.gpus import Gpu
from study.predict.engines.base import Blocks, Engine
from study.predict.estimate import Estimate
from study.predict.trace.tape import Tape
from study.predict.training import Training

# Sizes of PyTorch's caching allocator (CUDACachingAllocator.h): kSmallSize and kMinLargeAlloc.
MIB = 2**20
SMALL = MIB
MIDDLE = 10 * MIB


def rounded(size: int) -> int:
    """The bytes of the block that a tensor of `size` bytes gets."""
    # kMinBlockSize (c10/core/AllocatorConfig.h).
    return -(-size // 512) * 512 if size > 512 else 512


def segment_bytes(size: int) -> int:
    """The bytes that a new block of `size` bytes requests from the driver."""
    # kSmallBuffer, the default large_segment_size and kRoundLarge (c10/core/AllocatorConfig.h). One block of 1.1 MiB
    # reserves 20 MiB: in small models reserved memory says little about allocated memory.
    if size <= SMALL:
        return 2 * MIB
    return 20 * MIB if size < MIDDLE else -(-size // (2 * MIB)) * 2 * MIB


# A piece of a segment: whether it is small, its size, and the place of its first byte. Small blocks and large ones
# share no segment, and segments lie in the order in which they are requested. Free blocks are searched in the order of
# tuples: the smallest first, then the one requested first. An answer makes a million: those of a class take longer.
Block = tuple[bool, int, int]


class Allocator:
    """Counts bytes for tensors, and in total. At `capacity_bytes` it gives back free segments, then it fails."""

    def __init__(self, capacity_bytes: float = inf):
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._segments: dict[int, int] = {}  # bytes of each, by its place
        self._next_place = 0
        self.free: list[Block] = []  # sorted
        self._ending: dict[int, Block] = {}  # by each end. Free neighbours are joined at once: no two share an end

    def take(self, size: int) -> Block:
        """Return the smallest free block that is large enough, or one of a new segment."""
        size = rounded(size)
        small = size <= SMALL
        index = bisect_left(self.free, (small, size))
        if index < len(self.free) and self.free[index][0] == small:
            block = self._out(index)
        else:
            block = self._new_segment(small, size)
        _, whole, place = block
        left = whole - size
        if left >= 512 if small else left > SMALL:  # what is left of a large block is not split off to be a small one
            self._in((small, left, place + size))
            block, whole = (small, size, place), size
        self.allocated += whole
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def give(self, block: Block) -> None:
        """Free a block and join it with free neighbours."""
        small, size, place = block
        self.allocated -= size
        before, after = self._ending.get(place), self._ending.get(place + size)
        for neighbour in (before, after):
            if neighbour:
                self._out(bisect_left(self.free, neighbour))
                size += neighbour[1]
        self._in((small, size, before[2] if before else place) if before or after else block)

    def take_all(self, sizes: Sequence[int]) -> list[Block]:
        return [self.take(size) for size in sizes if size]

    def give_all(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.give(block)

    def _new_segment(self, small: bool, size: int) -> Block:
        size = segment_bytes(size)
        if self.reserved + size > self.capacity_bytes:  # what is free is given back
            for block in [each for each in self.free if each[1] == self._segments.get(each[2])]:
                self._out(bisect_left(self.free, block))
                self.reserved -= block[1]
        if self.reserved + size > self.capacity_bytes:
            raise MemoryError
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        place = self._next_place
        self._segments[place] = size
        self._next_place += size + 1  # segments do not touch: blocks of two are never joined
        return small, size, place

    def _in(self, block: Block) -> None:
        insort(self.free, block)
        _, size, place = block
        self._ending[place] = self._ending[place + size] = block

    def _out(self, index: int) -> Block:
        """Take a block from those that are free, by its index among them."""
        block = self.free.pop(index)
        _, size, place = block
        del self._ending[place], self._ending[place + size]
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
    """Bytes of a GPU at the peak: of tensors, of PyTorch's caching allocator, and as nvidia-smi shows them."""

    allocated: int
    reserved: int
    driver: int


def outside_bytes(training: Training) -> float:
    """Bytes that a process takes of a GPU outside PyTorch's allocator."""
    placement = training.placement
    context = OLD_CONTEXT_BYTES if training.loop.torch_major == 1 else CONTEXT_BYTES
    return context + outside_of_group(0 if placement.is_alone else placement.ranks, placement.stage)


def outside_of_group(ranks: int, stage: int | None) -> float:
    """Bytes of NCCL for so many ranks, 0 without a group, and of ZeRO's stage."""
    outside = NCCL_BYTES[min(ranks, 3)] if ranks else 0.0
    if stage in (1, 2):
        outside += STAGES_1_AND_2_BYTES
    return outside


def reserve_bytes(gpu: Gpu) -> float:
    """Bytes of a GPU that an advice keeps free, because allocated bytes do not include them."""
    return OUTSIDE_AT_MOST_BYTES + FRAGMENTATION * gpu.memory_bytes


def headroom_bytes(gpu: Gpu, peak_bytes: float) -> float:
    """What a peak leaves of a GPU beside the reserve; negative if it does not fit."""
    return gpu.memory_bytes - reserve_bytes(gpu) - peak_bytes


def kinds_of(engine: Engine, whole: Estimate, gpu: Gpu | None) -> MemoryKinds:
    """The three numbers. With a GPU, PyTorch gives back unused memory near the GPU's limit."""
    outside = int(outside_bytes(engine.training))
    reserved = reserved_bytes(engine, whole, gpu.memory_bytes - outside if gpu else inf)
    return MemoryKinds(whole.peak_bytes, reserved, reserved + outside)


def reserved_bytes(engine: Engine, whole: Estimate, capacity_bytes: float = inf) -> int:
    """The most that the caching allocator holds in the first steps."""
    training, blocks = engine.training, blocks_of(engine, whole)
    others = [*blocks.in_other_streams]
    if blocks.gathers is not None:
        others.append(gathered_reserved_bytes(blocks.gathers))
    streams = sum(map(segment_bytes, map(rounded, others)))
    # The tape is that of transformers' own kernels, so what fused ones spare is taken off the result.
    beside = streams - int(training.traced.profile.kept - training.profile.kept)
    allocator = Allocator(capacity_bytes - beside)
    try:
        replay(engine, blocks, allocator)
    except MemoryError:  # it does not fit, or only with the tensors in another order: the GPU is full
        return int(capacity_bytes)
    # The replay leaves out what an engine allocates only briefly, so it can end below the allocated bytes.
    return int(min(max(allocator.peak_reserved + beside, whole.peak_bytes), capacity_bytes))


def blocks_of(engine: Engine, whole: Estimate) -> Blocks:
    """The engine's blocks. What is on a host is not included."""
    states = dict(whole.after_step)
    moments = [states.pop("moments", 0) // 2] * 2
    return engine.blocks(states, moments)


def gathered_reserved_bytes(gathers: Sequence[tuple[object, int]]) -> int:
    """What the stream of stage 3's gathers reserves (partitioned_param_coordinator.py, __allgather_stream).

    It shares no memory with the stream of the passes. With it four runs on an H200 are within 1.2 % that were 5 to 23 %
    too low. Three others stay 4 to 16 % too low, perhaps because a host gathers ahead of a slower GPU.
    """
    allocator = Allocator()
    for _ in range(2):  # steps: the second finds what the first has left
        whole: dict[object, Block] = {}
        for name, size in gathers:
            if size:
                whole[name] = allocator.take(size)
            else:
                allocator.give(whole.pop(name))
        allocator.give_all([*whole.values()])
    return allocator.peak_reserved


def replay(engine: Engine, blocks: Blocks, allocator: Allocator) -> None:
    """Let the allocator take and give what the first steps make and free."""
    training = engine.training
    whole = training.model.tape(training.trace_options, training.batch.rows)
    tape = [entry for entry in whole if entry[0] in ("made", "freed", "gradient")]
    gradients: list[Block] = []
    made_once = allocator.take_all(blocks.made_once)
    allocator.take_all(blocks.standing)
    allocator.give_all(made_once)
    steady: list[Block] | None = None  # free blocks that a pass leaves as it has found them: the next does the same
    for step in range(STEPS):
        kept: list[Block] = []
        for _ in range(min(engine.passes, 2)):  # a third pass does what the second did
            # The tape knows no engine. Its blocks are taken before a pass and given back after it, though in a run they
            # come and go between activations: one reason why reserved memory is less certain.
            kept += allocator.take_all(blocks.until_update)
            engine_blocks = allocator.take_all(blocks.in_pass)
            found = [*allocator.free]
            if found != steady:
                gradients += _pass(tape, allocator, engine.leaves_gradients and not gradients)
                steady = found if allocator.free == found else None
            allocator.give_all(engine_blocks)
        if step == 0:
            allocator.take_all(blocks.moments)
        allocator.give_all(allocator.take_all(blocks.update))
        allocator.give_all(kept)
        if training.loop.torch_major > 1:  # PyTorch 1 sets them to zero
            allocator.give_all(gradients)
            gradients = []


def _pass(tape: Tape, allocator: Allocator, keeps_gradients: bool) -> list[Block]:
    """A forward and a backward pass. Return the blocks of the gradients that stay."""
    live: dict[int, Block] = {}  # by the number of the tensor
    made = 0
    kept = set()
    for entry in tape:  # `match` is slow
        kind = entry[0]
        if kind == "made":
            live[made] = allocator.take(entry[1])
            made += 1
        elif kind == "freed" and entry[1] not in kept:
            allocator.give(live.pop(entry[1]))
        elif kind == "gradient" and keeps_gradients:
            kept.add(entry[1])
    gradients = [live.pop(number) for number in kept]
    allocator.give_all([*live.values()])  # such as the loss
    return gradients
