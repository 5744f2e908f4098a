"""What a pass holds and does, from its tape. A section of the tape is read once for all layers that repeat it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from study.predictor.memory.profile import Gradient, Held, Profile, Tensor
from study.predictor.tracing.repeating import Name, Place, Sections, Stack
from study.predictor.tracing.tape import Tape

Kernels = list[tuple[str, tuple[int, ...]]]  # kind and sizes
Work = dict[tuple[str, str], list[tuple[str, int, list[int]]]]  # of a phase of a block: kind, number, sizes


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass over a microbatch."""

    profile: Profile
    work: Work
    flops: int  # of matrix products, including those of recomputed layers
    inputs_bytes: int


class Span(NamedTuple):
    """The part of a section up to an event. Bytes are those since the section's begin."""

    event: str | Name | None  # None: the section ends here
    gradient: int  # bytes of the gradient that is complete
    now: Held
    most: Held | None  # the most while a kernel ran; None if none did
    kernels: Kernels


class Moment(NamedTuple):
    """An event of the whole pass, and what there was since the event before it."""

    kind: str  # "use", "gradient", or that of the end of the forward pass
    name: str  # of the tensor
    gradient: int
    now: Held
    since: list[Held]  # the most of each span
    kernels: list[Kernels]  # of each span; layers that do the same have the same lists


def read(tape: Tape, stacks: list[Stack], tensors: tuple[Tensor, ...]) -> Pass:
    sections = Sections(tape, stacks)
    moments = [*_moments(sections)]
    by_name = {tensor.name: tensor for tensor in tensors}
    entries = [
        (len(sections.copies[place]), entry) for place, each in sections.followed.items() for entry in each.entries
    ]
    return Pass(
        profile=_profile(moments, by_name),
        work=_work(moments, by_name),
        flops=sum(number * entry[2] for number, entry in entries if entry[0] == "kernel"),
        inputs_bytes=sum(entry[1] for _, entry in entries if entry[0] == "inputs"),
    )


def _moments(sections: Sections) -> Iterator[Moment]:
    spans = {place: _spans(sections, place) for place in set(sections.models.values())}
    start = Held(0, 0)  # of the section
    since: list[Held] = []
    kernels: list[Kernels] = []
    for place, model in sections.models.items():
        for span in spans[model]:
            since += [_plus(span.most, start)] if span.most else []
            kernels += [span.kernels] if span.kernels else []
            now = _plus(span.now, start)
            if span.event is None:
                start = now
                continue
            event = span.event.at(place.layer) if isinstance(span.event, Name) else span.event
            kind, _, name = event.partition(" ")
            yield Moment(kind, name, span.gradient, now, since, kernels)
            since, kernels = [], []


def _spans(sections: Sections, place: Place) -> list[Span]:
    spans = []
    held = [0, 0]
    running: list[tuple[int, int]] = []
    kernels: Kernels = []
    for kind, what, *rest in [*sections.followed[place].entries, ("event", None, 0)]:
        if kind == "made":
            held[rest[0]] += what
        elif kind == "freed":
            size, in_backward = what.allocation
            copies = 1 if what.near else len(sections.copies[what.place])  # those of all layers are freed at once
            held[in_backward] -= size * copies
        elif kind == "kernel":
            running.append((held[0], held[1]))
            kernels += [what] if what else []
        elif kind == "event":
            spans.append(Span(what, rest[0], Held(*held), _most(running) if running else None, kernels))
            running, kernels = [], []
    return spans


def _most(held: Sequence[tuple[float, float]]) -> Held:
    """Return the last of those with the most bytes."""
    return Held(*max(reversed(held), key=sum))


def _plus(held: Held, more: Held) -> Held:
    return Held(held.kept + more.kept, held.in_use + more.in_use)


def _profile(moments: list[Moment], tensors: dict[str, Tensor]) -> Profile:
    kept = 0
    at_use: dict[str, float] = {}
    before_use: dict[str, Held] = {}
    gradients: list[Gradient] = []
    until_gradient: list[Held] = []
    for kind, name, size, now, since, _ in moments:
        if not gradients:
            until_gradient += since
        if kind == "use":
            at_use[name] = now.kept
            before_use |= {name: _most(since)} if since else {}
        elif kind == "gradient":
            held = [Held(each.kept, each.in_use - size) for each in (_most(since), now)]
            gradients.append(Gradient(tensors[name], *held))
        else:
            kept = int(now.kept)
    return Profile(kept, _most(until_gradient), at_use, before_use, tuple(gradients))


def _work(moments: list[Moment], tensors: dict[str, Tensor]) -> Work:
    """Kernels before a gradient are of its block, others of the last block that was reached."""
    phase = "forward"
    block = next(iter(tensors.values())).block
    taken: dict[tuple[str, str], list[Kernels]] = defaultdict(list)
    for moment in moments:
        if moment.kind == "gradient":
            phase, block = "backward", tensors[moment.name].block
        taken[phase, block] += moment.kernels
        if moment.kind == "use":
            block = tensors[moment.name].block
    summed: dict[tuple[int, ...], list] = {}
    for parts in taken.values():
        same = tuple(map(id, parts))
        if same not in summed:
            summed[same] = _summed(kernel for kernels in parts for kernel in kernels)
    return {key: summed[tuple(map(id, parts))] for key, parts in taken.items()}


def _summed(kernels: Iterable[tuple[str, tuple[int, ...]]]) -> list[tuple[str, int, list[int]]]:
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
