"""What a GPU would show of a rehearsal: its tensors replayed on PyTorch's caching allocator. Needs no torch."""

from dataclasses import dataclass

from study.predict.front import CONTEXT_BYTES, Allocator, Block, outside_of_group
from study.rehearsal.request import Answer


@dataclass(frozen=True)
class OnGpu:
    """Bytes of one GPU at the peak, and of the host's memory for this rank."""

    peak: int  # of tensors, as `max_memory_allocated` counts them but for its blocks of 512 bytes
    reserved: int  # predicted: all in one stream
    driver: int  # predicted: what nvidia-smi shows
    host: int


def on_gpu(answer: Answer, ranks: int, stage: int | None) -> OnGpu:
    """Replay what was taken and given back, without what offloading keeps on the host."""
    on_host = set(answer.host)
    allocator = Allocator()
    blocks: dict[int, Block] = {}
    sizes: dict[int, int] = {}
    held = peak = host = 0
    for place, (number, size) in enumerate(answer.log):
        if number in on_host:
            host += size - sizes.get(number, 0)
            sizes[number] = size
            continue
        held += size - sizes.get(number, 0)
        sizes[number] = size
        if number in blocks:
            allocator.give(blocks.pop(number))
        if size:
            blocks[number] = allocator.take(size)
        if place >= answer.first_step_at:
            peak = max(peak, held)
    outside = CONTEXT_BYTES + outside_of_group(ranks if ranks > 1 else 0, stage)
    return OnGpu(peak, allocator.peak_reserved, int(allocator.peak_reserved + outside), host)
