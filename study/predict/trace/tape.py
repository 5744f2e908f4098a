"""A tape: the list of all that a pass over a model makes and frees, and of its kernels. And what a tape says.

An entry of a tape is a tuple:

    ("made", bytes, whether in the backward pass)   tensors are numbered in this order
    ("freed", number of the tensor)
    ("gradient", number of the tensor)              it is complete
    ("kernel", kind and sizes or None, operations)  operations of matrix products; None if it moves nothing
    ("event", name, bytes of a complete gradient)   "use <tensor>", "gradient <tensor>" or "end of forward"
    ("inputs", bytes)                               the inputs of the model
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

Tape = list[tuple]


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor. `block` is "embeddings", "layer.<i>" or "head". Frozen tensors have no gradient."""

    name: str
    shape: tuple[int, ...]
    block: str
    trains: bool = True
    packed: bool = False  # quantized: its shape is that of the packed weights

    @functools.cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


class Held(NamedTuple):
    """Bytes of activations at a moment: from the forward pass, and made by the backward pass."""

    kept: float
    in_use: float

    def beside(self, engine: dict, extra: float = 0) -> dict:
        """Return the components of this moment: what an engine holds, and more temporaries."""
        return {"activations": self.kept} | engine | {"temporaries": self.in_use + extra}


class TapeMoment(NamedTuple):
    """An event of a tape, and what is held and was done until then."""

    event: str  # "use", "gradient" or "end"
    name: str  # of the tensor
    gradient_bytes: int  # of its complete gradient
    now: Held
    most: Held | None  # since the event before, while a kernel ran: the last of several. None: none ran
    last: Held  # while the last kernel ran that moves bytes
    kernels: list[tuple]  # that ran since the event before

    def without_gradient(self, held: Held) -> Held:
        """What is held besides the gradient itself, which is the engine's."""
        return held._replace(in_use=held.in_use - self.gradient_bytes)


class Gradient(NamedTuple):
    """Bytes that are held until a tensor's gradient is complete. The gradient itself is not included."""

    tensor: Tensor
    most: Held  # the most since the gradient before it
    complete: Held  # when it is complete, and the engine takes it


@dataclass(frozen=True)
class Profile:
    """Bytes of activations from moment to moment of both passes. All that the engine holds comes on top."""

    kept: int  # at the end of the forward pass
    most: Held  # the most until the first gradient is complete: forward pass, loss, gradient of the logits
    at_use: Mapping[str, float]  # kept when the forward pass reaches a tensor
    before_use: Mapping[str, Held]  # the most until the forward pass reaches a module, by its first tensor
    gradients: tuple[Gradient, ...]  # in the order of the backward pass
    at_first_gradient: Held  # while the kernel runs that makes it


class Product(NamedTuple):
    """`number` products of an m x k with a k x n matrix."""

    number: int
    m: int
    n: int
    k: int
    element_bytes: int | None = None  # of the factors; None: as the recipe says


@dataclass
class Work:
    """The kernels of the forward or the backward pass of a microbatch, with what is computed again."""

    products: Counter[Product] = field(default_factory=Counter)
    attention_flops: float = 0  # of fused kernels; written-out attention is products and moved bytes
    moved_bytes: float = 0  # read and written by all other kernels
    kernels: int = 0  # that the host launches, and Python that takes as long
    moving_kernels: int = 0  # of these, those that fusing replaces
    dequantized_bytes: float = 0  # moved to make whole weights of quantized ones: no fusing spares them

    @classmethod
    def of(cls, kernels: Counter[tuple]) -> "Work":
        """The work of kernels, given as their kind and sizes, each with how often it runs."""
        work = cls()
        for (kind, sizes), count in kernels.items():
            work.kernels += count
            if kind == "product":
                work.products[Product(*sizes)] += count
            elif kind == "attention":
                work.attention_flops += count * sizes[0]
            else:
                work.moved_bytes += count * sizes[0]
                work.moving_kernels += count
        return work


@dataclass(frozen=True)
class Pass:
    """What a forward and a backward pass over a microbatch hold and do."""

    profile: Profile
    forward: Work
    backward: Work
    flops: int  # of matrix products, including those of recomputed layers
    inputs_bytes: int  # of a microbatch: token ids, masks, images, sound


def read(tape: Tape, tensors: tuple[Tensor, ...]) -> Pass:
    """Follow a tape. Kernels before a gradient are of the backward pass, also those that run a layer again."""
    by_name = {tensor.name: tensor for tensor in tensors}
    forward, backward = Counter[tuple](), Counter[tuple]()
    kept = 0
    before: list[Held] = []  # the most until each moment, up to the first gradient
    at_use: dict[str, float] = {}
    before_use: dict[str, Held] = {}
    gradients: list[Gradient] = []
    at_first_gradient = Held(0, 0)
    for moment in _moments(tape):
        if moment.most and not gradients:
            before.append(moment.most)
        if moment.event == "gradient":
            backward.update(moment.kernels)
            if not gradients:
                at_first_gradient = moment.without_gradient(moment.last)
            most = moment.without_gradient(moment.most or moment.now)
            gradients.append(Gradient(by_name[moment.name], most, moment.without_gradient(moment.now)))
            continue
        forward.update(moment.kernels)
        if moment.event == "end":
            kept = int(moment.now.kept)
            continue
        at_use[moment.name] = moment.now.kept
        if moment.most:
            before_use[moment.name] = moment.most
    until_gradient = max(reversed(before), key=sum)  # of equal ones the last
    return Pass(
        profile=Profile(kept, until_gradient, at_use, before_use, tuple(gradients), at_first_gradient),
        forward=Work.of(forward),
        backward=Work.of(backward),
        flops=sum([entry[2] for entry in tape if entry[0] == "kernel"]),
        inputs_bytes=sum([entry[1] for entry in tape if entry[0] == "inputs"]),
    )


def _moments(tape: Tape) -> Iterator[TapeMoment]:
    held = [0, 0]  # made in the forward pass, and in the backward pass
    made: list[tuple[int, bool]] = []
    most: list[int] | None = None
    most_bytes = 0
    last = [0, 0]
    kernels: list[tuple] = []
    for entry in tape:  # an answer reads a million: `match` is slower
        kind = entry[0]
        if kind == "kernel":
            held_bytes = held[0] + held[1]
            if most is None or held_bytes >= most_bytes:
                most, most_bytes = [*held], held_bytes
            if kernel := entry[1]:
                last = [*held]
                kernels.append(kernel)
        elif kind == "made":
            _, size, in_backward = entry
            made.append((size, in_backward))
            held[in_backward] += size
        elif kind == "freed":
            size, in_backward = made[entry[1]]
            held[in_backward] -= size
        elif kind == "event":
            _, words, gradient_bytes = entry
            event, _, name = words.partition(" ")
            peak = Held(*most) if most else None
            yield TapeMoment(event, name, gradient_bytes, Held(*held), peak, Held(*last), kernels)
            most = None
            kernels = []


def compact(tape: Tape) -> Tape:
    """Return a tape that says the same in fewer entries, and in one order.

    Of kernels that run one after the other the same is held, so those that move nothing are left out but the first.
    Consecutive "freed" entries are sorted: autocast drops copies of weights in any order.
    """
    entries: Tape = []
    for kind, group in groupby(tape, key=itemgetter(0)):
        alike = [*group]
        if kind == "freed":
            alike.sort()
        elif kind == "kernel":
            alike[1:] = [kernel for kernel in alike[1:] if kernel[1]]
        entries += alike
    return entries


def in_tuples(kept: Any) -> Any:
    return tuple(map(in_tuples, kept)) if isinstance(kept, list) else kept


def at_rows(tapes: list[Tape], counts: tuple[int, ...], rows: int) -> Tape:
    """Return the tape of a pass over `rows` rows, from that of as many, or from those of two successive numbers."""
    # A single tape is its own second one, and all numbers are equal.
    return [_on_line(*both, rows - counts[0]) for both in zip(tapes[0], tapes[-1], strict=True)]


def _on_line(first: Any, second: Any, more_rows: int) -> Any:
    """Return a part of an entry, whose numbers are `first` on the first tape, and `second` with one row more."""
    if first == second:
        return first
    if isinstance(first, tuple):
        return tuple([_on_line(*both, more_rows) for both in zip(first, second, strict=True)])
    return first + more_rows * (second - first)  # text raises an error: the passes do other operations
