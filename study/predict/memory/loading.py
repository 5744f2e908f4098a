"""Predict the host memory of a node while its ranks load a model: private memory of all ranks, and the page cache.

Read in transformers 5.23, Accelerate 1.15, DeepSpeed 0.19.8 and PyTorch 2.13. A tensor of the files' own type stays in
the mapped file, in the page cache that all ranks share, until it is changed. A tensor of another type is a copy of each
rank. Without GPUs, a rank's weights and states are in the same memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from study.predict.trace.transformer import Transformer

HOST_PROCESS_BYTES = 4e9  # assumed, for each rank with a GPU: Python, PyTorch, CUDA's host side, a data loader
PUBLISHED_BYTES = 2  # of an element in published files
# plain: each rank loads the model (DDP, stages 1 and 2). zero3: stage 3, configured before from_pretrained (zero.Init);
# zero3_late: after it. fsdp2: each rank loads the model; fsdp2_efficient: with cpu_ram_efficient_loading. meta: rank 0
# loads, the others begin on the meta device.
Way = Literal["plain", "zero3", "zero3_late", "fsdp2", "fsdp2_efficient", "meta"]
# Private bytes of a process without its weights, once it has loaded and prepared a model of 1 MB. Counted on a CPU.
PROCESS_BYTES: dict[Way, tuple[float, float]] = {
    "plain": (301e6, 302e6),
    "zero3": (323e6, 366e6),
    "zero3_late": (312e6, 368e6),
    "fsdp2": (301e6, 316e6),
    "fsdp2_efficient": (301e6, 317e6),
    "meta": (300e6, 303e6),
}
BROADCAST_BYTES = 2 * 250 * 2**20  # DDP sends the weights of rank 0 in pieces, of which two are on their way
# Stage 3 before its first step, on a CPU: parts of the weights and their gradients, before and after they move, over
# all ranks; and what malloc keeps on each rank of freed tensors below 32 MiB, as shares of the weights. Both shares
# are fitted to the tuned half of the cells of `reproductions/laboratories/loading.py`.
STATES: dict[str, int] = {"zero3": 4, "zero3_late": 3}
MASTER = {2: 3}  # parts more, by the bytes of an element: 16-bit weights get a copy and a gradient in fp32
KEPT: dict[str, float] = {"zero3": 0.7, "zero3_late": 0.64}


@dataclass(frozen=True)
class Load:
    """A model, its files, and how the ranks of a node load it."""

    model: Transformer
    way: Way
    ranks: int
    saved_bytes: int  # of an element in the files
    weight_bytes: int  # of an element of the loaded weights
    reads_whole: bool = False  # the files are pickled in the form before PyTorch 1.6, which cannot be mapped

    @property
    def weights_bytes(self) -> int:
        return self.model.parameters * self.weight_bytes

    @property
    def read_bytes(self) -> int:
        """Private bytes of a rank that loads the model, at the peak. Stage 3 casts tensor by tensor."""
        read_bytes = 0
        if self.reads_whole:
            read_bytes += self.model.parameters * self.saved_bytes
        if self.saved_bytes != self.weight_bytes and self.way != "zero3":
            read_bytes += self.weights_bytes
        return read_bytes

    @property
    def copies(self) -> int:
        """Ranks that load the whole model."""
        return {"zero3": 1, "meta": 1}.get(self.way, self.ranks)


def on_gpus_bytes(model: Transformer, ranks: int, weight_bytes: int) -> float:
    """Return what a node with GPUs needs at most if each rank loads the model: a copy if its files have other types."""
    copied_bytes = 0
    if weight_bytes != PUBLISHED_BYTES:
        copied_bytes = model.parameters * weight_bytes
    return ranks * (HOST_PROCESS_BYTES + copied_bytes)


def peaks(load: Load) -> dict[str, float]:
    """Return the private bytes of a node without GPUs at the peak of each phase."""
    loaded, prepared = PROCESS_BYTES[load.way]
    return {
        "from_pretrained": load.ranks * loaded + loaded_bytes(load),
        "prepare": load.ranks * prepared + prepared_bytes(load),
    }


def loaded_bytes(load: Load) -> float:
    """Return the private bytes of all ranks for weights, at the peak of from_pretrained."""
    read_bytes = load.copies * load.read_bytes
    if load.way == "zero3":  # the ranks hold a part each, and what malloc keeps
        return read_bytes + (1 + load.ranks * KEPT["zero3"]) * load.weights_bytes
    return read_bytes


def prepared_bytes(load: Load) -> float:
    """Return the private bytes of all ranks for weights and states, at the peak of `prepare`."""
    whole = load.weights_bytes
    if load.way == "plain":  # Accelerate wraps a single rank in DDP too
        return load.ranks * (whole + min(whole, BROADCAST_BYTES))
    if load.way in STATES:
        parts = STATES[load.way] + MASTER.get(load.weight_bytes, 0)
        return (parts + load.ranks * KEPT[load.way]) * whole
    sent = whole if load.way == "fsdp2" else max(_sent(load))
    if load.read_bytes:  # the ranks that have loaded the model still hold their copies
        sent += load.copies * whole
    return sent


def _sent(load: Load) -> Iterator[float]:
    """Yield what all ranks hold when rank 0 has sent a tensor. The largest, a tied matrix, is sent twice.

    It has two names, so Accelerate makes another part of it. PyTorch pads rows that the ranks do not divide.
    """
    parts = 0
    for tensor in [*load.model.tensors, max(load.model.tensors, key=lambda tensor: tensor.elements)]:
        size = tensor.elements * load.weight_bytes
        if load.way != "meta" or parts < load.weights_bytes:
            parts += size
        copies = load.ranks - 1
        if load.way == "fsdp2_efficient" and tensor.shape[0] % load.ranks:  # a padded tensor is another one
            copies += 1
        yield parts + copies * size
