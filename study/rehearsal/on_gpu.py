"""What a GPU would show of a rehearsal: its tensors replayed on PyTorch's caching allocator. Needs no torch."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from study.core.gpus import Gpu
from study.predict.front import CONTEXT_BYTES, Allocator, Block, fits_on, outside_of_group
from study.rehearsal.request import Answer, Moment


@dataclass(frozen=True)
class OnGpu:
    """Bytes of one GPU at the peak, and of the host's memory for this rank."""

    peak: int  # of tensors, as `max_memory_allocated` counts them but for its blocks of 512 bytes
    reserved: int  # predicted: all in one stream, on a GPU that is large enough
    driver: int  # predicted: what nvidia-smi shows there
    host: int
    fits: str | None = None  # None: no kind of GPU is named
    training: int = 0  # the peak of the updates, without evaluation and saving
    evaluation: int | None = None  # None: it did not evaluate
    saving: int | None = None
    whole_evaluation: int | None = None  # extrapolated, if batches were left out and each one leaves more


def on_gpu(answer: Answer, ranks: int, stage: int | None, gpu: Gpu | None = None) -> OnGpu:
    """Replay what was taken and given back, without what offloading keeps on the host."""
    outside = int(CONTEXT_BYTES + outside_of_group(ranks if ranks > 1 else 0, stage))
    capacity = gpu.memory_bytes - outside if gpu else inf
    replayed = Replay(answer, capacity)
    peaks = [max(replayed.held[max(each.begin - 1, 0) : each.end], default=0) for each in answer.moments]
    in_moments = {place for each in answer.moments for place in range(each.begin, each.end)}
    from_begin = range(answer.first_step_at, len(replayed.held))
    training = max((replayed.held[place] for place in from_begin if place not in in_moments), default=0)
    of_kind = {
        kind: max((peak for peak, each in zip(peaks, answer.moments, strict=True) if each.kind == kind), default=None)
        for kind in ("evaluation", "saving")
    }
    whole = whole_evaluation(answer.moments, peaks)
    seen = max([training, *peaks])
    peak = max(seen, whole or 0)
    reserved = replayed.allocator.peak_reserved + peak - seen
    fits = None
    if gpu:
        fits = "no" if reserved > capacity else fits_on(gpu, peak, reserved + outside)
    return OnGpu(
        peak=peak,
        reserved=reserved,
        driver=reserved + outside,
        host=replayed.host,
        fits=fits,
        training=training,
        whole_evaluation=whole,
        **of_kind,
    )


def whole_evaluation(moments: list[Moment], peaks: list[int]) -> int | None:
    """Return the peak of an evaluation of which batches were left out, if each batch that was run raised it."""
    found: list[int] = []
    for loader in {each.loader for each in moments if each.batches_left}:
        mine = [place for place, each in enumerate(moments) if each.loader == loader]
        left = max(moments[place].batches_left or 0 for place in mine)
        batches = [peaks[place] for place in mine if not moments[place].batches_left]
        rises = [after - before for before, after in zip(batches[1:], batches[2:], strict=False)]
        if rises and min(rises) > 0:
            rise, highest = sum(rises) // len(rises), max(peaks[place] for place in mine)
            # The last stretch has one more batch, and what joins all of them: a copy of what each has left.
            joins = highest > batches[-1] + 2 * rise
            found.append(highest + left * rise * (2 if joins else 1))
    return max(found, default=None)


class Replay:
    """The allocator after a log, and what was held after each of its entries."""

    def __init__(self, answer: Answer, capacity_bytes: float):
        on_host, never_there = set(answer.host), only_loaded(answer, capacity_bytes)
        self.allocator = Allocator(capacity_bytes)
        self.held: list[int] = []
        self.host = 0
        blocks: dict[int, Block] = {}
        sizes: dict[int, int] = {}
        held = 0
        for number, size in answer.log:
            more = size - sizes.get(number, 0)
            sizes[number] = size
            if number in on_host:
                self.host += more
            elif number not in never_there:
                held += more
                if more:  # a storage is logged again with each new tensor that is made of it
                    self._move(blocks, number, size)
            self.held.append(held)

    def _move(self, blocks: dict[int, Block], number: int, size: int) -> None:
        """Give a storage back, and take it anew if it has a size."""
        if number in blocks:
            self.allocator.give(blocks.pop(number))
        if not size:
            return
        try:
            blocks[number] = self.allocator.take(size)
        except MemoryError:  # what it would need is what a larger GPU reserves
            self.allocator.capacity_bytes = inf
            blocks[number] = self.allocator.take(size)


def only_loaded(answer: Answer, capacity_bytes: float) -> set[int]:
    """Return the numbers of weights that were loaded and replaced before the first step, and that a GPU never sees.

    They are loaded on the host. What they are cast to for the training is what goes to the GPU (DeepSpeed 0.19.8,
    `_configure_distributed_model`). Those that need no cast go there themselves. Stages 1 and 2 flatten them there,
    and the cache keeps their memory in pieces; or on the host, if both do not fit (stage_1_and_2.py,
    flatten_on_accelerator).
    """
    loading = answer.log[: answer.first_step_at]
    first, last = dict(reversed(loading)), dict(loading)
    replaced = {each for begin, end in answer.loaded for each in range(begin + 1, end + 1) if last.get(each) == 0}
    # The copy of one weight is made just before that is given back. A flat vector is larger than each of its weights.
    cast = {each for (new, size), (each, left) in pairwise(loading) if not left and new > each and size <= first[each]}
    sent = replaced - cast
    return replaced & cast if 2 * sum(first[each] for each in sent) <= capacity_bytes else replaced
