"""What a pass holds and does, from its tape."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from study.predict.memory.profile import Gradient, Held, Profile, Tensor
from study.predict.trace.tape import Tape

Kernel = tuple[str, tuple[int, ...]]  # kind and sizes
Work = dict[tuple[str, str], list[tuple[str, int, list[int]]]]  # of a phase of a block: kind, number, sizes


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass over a microbatch."""

    profile: Profile
    work: Work
    flops: int  # of matrix products, including those of recomputed layers
    inputs_bytes: int


class Moment(NamedTuple):
    """An event of the pass, and what there was since the event before it."""

    kind: str  # "use", "gradient", or that of the end of the forward pass
    name: str  # of the tensor
    gradient: int  # bytes of the gradient that is complete
    now: Held
    most: Held | None  # the most while a kernel ran, the last of those; None if none did
    kernels: list[Kernel]


def read(tape: Tape, tensors: tuple[Tensor, ...]) -> Pass:
    moments = [*_moments(tape)]
    by_name = {tensor.name: tensor for tensor in tensors}
    return Pass(
        profile=_profile(moments, by_name),
        work=_work(moments, by_name),
        flops=sum(entry[2] for entry in tape if entry[0] == "kernel"),
        inputs_bytes=sum(entry[1] for entry in tape if entry[0] == "inputs"),
    )


def _moments(tape: Tape) -> Iterator[Moment]:
    held = [0, 0]  # made in the forward pass, and in the backward pass
    now = 0
    made: list[tuple[int, bool]] = []
    most = (-1, 0, 0)  # bytes while a kernel ran, and which of them are whose
    kernels: list[Kernel] = []
    for kind, what, *rest in tape:
        if kind == "made":
            held[rest[0]] += what
            now += what
            made.append((what, rest[0]))
        elif kind == "freed":
            size, in_backward = made[what]
            held[in_backward] -= size
            now -= size
        elif kind == "kernel":
            if now >= most[0]:
                most = (now, held[0], held[1])
            if what:
                kernels.append(what)
        elif kind == "event":
            event, _, name = what.partition(" ")
            yield Moment(event, name, rest[0], Held(*held), None if most[0] < 0 else Held(*most[1:]), kernels)
            most, kernels = (-1, 0, 0), []


def _profile(moments: list[Moment], tensors: dict[str, Tensor]) -> Profile:
    kept = 0
    at_use: dict[str, float] = {}
    before_use: dict[str, Held] = {}
    gradients: list[Gradient] = []
    until_gradient: list[Held] = []
    for kind, name, size, now, most, _ in moments:
        if most and not gradients:
            until_gradient.append(most)
        if kind == "use":
            at_use[name] = now.kept
            before_use |= {name: most} if most else {}
        elif kind == "gradient":
            held = [Held(each.kept, each.in_use - size) for each in (most or now, now)]
            gradients.append(Gradient(tensors[name], *held))
        else:
            kept = int(now.kept)
    return Profile(kept, max(reversed(until_gradient), key=sum), at_use, before_use, tuple(gradients))


def _work(moments: list[Moment], tensors: dict[str, Tensor]) -> Work:
    """Kernels before a gradient are of its block, others of the last block that was reached."""
    phase = "forward"
    block = next(iter(tensors.values())).block
    taken: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for moment in moments:
        if moment.kind == "gradient":
            phase, block = "backward", tensors[moment.name].block
        taken[phase, block] += moment.kernels
        if moment.kind == "use":
            block = tensors[moment.name].block
    return {key: _summed(kernels) for key, kernels in taken.items()}


def _summed(kernels: Iterable[Kernel]) -> list[tuple[str, int, list[int]]]:
    """Return kinds with numbers and sizes of kernels. Equal products are one entry; others are summed by kind."""
    products: Counter[tuple[int, ...]] = Counter()
    others: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kind, sizes in kernels:
        if kind == "product":
            products[sizes] += 1
        else:
            others[kind][0] += 1
            others[kind][1] += sizes[0]
    entries = [("product", number, [*sizes]) for sizes, number in products.items()]
    return entries + [(kind, number, [size]) for kind, (number, size) in others.items()]
