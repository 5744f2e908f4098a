"""What a pass holds and does, from its tape."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


def read(tape: Tape, tensors: tuple[Tensor, ...]) -> Pass:
    """Kernels before a gradient are of its block, others of the last block that was reached."""
    by_name = {tensor.name: tensor for tensor in tensors}
    kept = 0
    until_gradient = Held(0, 0)  # the most until the first gradient is complete, the last of those
    at_use: dict[str, float] = {}
    before_use: dict[str, Held] = {}
    gradients: list[Gradient] = []
    phase = "forward"
    block = tensors[0].block
    taken: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for event, name, gradient_bytes, now, most, kernels in _moments(tape):
        if most and not gradients:
            until_gradient = max(most, until_gradient, key=sum)
        if event == "gradient":
            phase, block = "backward", by_name[name].block
            held = [Held(each.kept, each.in_use - gradient_bytes) for each in (most or now, now)]
            gradients.append(Gradient(by_name[name], *held))
        taken[phase, block] += kernels
        if event == "use":
            block = by_name[name].block
            at_use[name] = now.kept
            before_use |= {name: most} if most else {}
        elif event == "end":
            kept = int(now.kept)
    return Pass(
        profile=Profile(kept, until_gradient, at_use, before_use, tuple(gradients)),
        work={key: _summed(kernels) for key, kernels in taken.items()},
        flops=sum(entry[2] for entry in tape if entry[0] == "kernel"),
        inputs_bytes=sum(entry[1] for entry in tape if entry[0] == "inputs"),
    )


def _moments(tape: Tape) -> Iterator[tuple[str, str, int, Held, Held | None, list[Kernel]]]:
    """Yield each event: "use", "gradient" or "end"; the name of the tensor; and the bytes of its complete gradient.

    Then what is held now, the most since the event before while a kernel ran, and these kernels. The most is that of
    the last moment with as much, and None if no kernel ran.
    """
    held = [0, 0]  # made in the forward pass, and in the backward pass
    made: list[tuple[int, bool]] = []
    most: Held | None = None
    kernels: list[Kernel] = []
    for kind, what, *rest in tape:
        if kind == "made":
            made.append((what, rest[0]))
            held[rest[0]] += what
        elif kind == "freed":
            size, in_backward = made[what]
            held[in_backward] -= size
        elif kind == "kernel":
            if most is None or sum(held) >= sum(most):
                most = Held(*held)
            if what:
                kernels.append(what)
        elif kind == "event":
            event, _, name = what.partition(" ")
            yield event, name, rest[0], Held(*held), most, kernels
            most, kernels = None, []


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
