"""PyTorch's caching allocator for CUDA, without CUDA: which memory it would request from the driver, and keep.

These are the default rules of `c10/cuda/CUDACachingAllocator.cpp` for one stream. Sizes are rounded up to 512 bytes.
Blocks of at most 1 MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger blocks have
their own segment, rounded up to 2 MiB. The allocator takes the smallest free block that is large enough, and splits it
if enough is left. It gives a segment back only if the driver has no more memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

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
