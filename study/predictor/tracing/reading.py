"""What a pass holds and does, from its tape. A section of the tape is read once for all layers that repeat it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from study.predictor.memory.profile import Gradient, Held, Profile, Tensor
from study.predictor.tracing.repeating import Name, Place, Section, Sections, Stack
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


def read(tape: Tape, stacks: list[Stack], tensors: tuple[Tensor, ...]) -> Pass:
    sections = Sections(tape, stacks)
    copies = Counter(sections.models.values())
    spans = {place: _spans(sections.followed[place], copies) for place in copies}
    reader = _Reader(tensors)
    for place, model in sections.models.items():
        for span in spans[model]:
            reader.take(span, place)
    entries = [(number, entry) for place, number in copies.items() for entry in sections.followed[place].entries]
    return Pass(
        profile=reader.profile(),
        work=reader.work(),
        flops=sum(number * entry[2] for number, entry in entries if entry[0] == "kernel"),
        inputs_bytes=sum(entry[1] for _, entry in entries if entry[0] == "inputs"),
    )


def _spans(section: Section, copies: Counter[Place]) -> list[Span]:
    spans = []
    held = [0, 0]
    running: list[tuple[int, int]] = []
    kernels: Kernels = []
    for kind, what, *rest in section.entries:
        if kind == "made":
            held[rest[0]] += what
        elif kind == "freed":
            size, in_backward = what.allocation
            held[in_backward] -= size if what.near else size * copies[what.place]  # at once for all layers
        elif kind == "kernel":
            running.append((held[0], held[1]))
            kernels += [what] if what else []
        elif kind == "event":
            spans.append(Span(what, rest[0], Held(*held), _most(running) if running else None, kernels))
            running, kernels = [], []
    return [*spans, Span(None, 0, Held(*held), _most(running) if running else None, kernels)]


def _most(held: Sequence[tuple[float, float]]) -> Held:
    """Return the last of those with the most bytes."""
    return Held(*max(reversed(held), key=sum))


def _plus(held: Held, more: Held) -> Held:
    return Held(held.kept + more.kept, held.in_use + more.in_use)


class _Reader:
    """Reads the spans of the whole model in their order."""

    def __init__(self, tensors: tuple[Tensor, ...]):
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.kept = 0
        self.at_use: dict[str, float] = {}
        self.before_use: dict[str, Held] = {}
        self.gradients: list[Gradient] = []
        self._until_gradient: list[Held] = []
        self._start = Held(0, 0)  # of the section
        self._since: list[Held] = []  # since the event before
        self._kernels: list[Kernels] = []
        self._taken: dict[tuple[str, str], list[Kernels]] = defaultdict(list)
        self._phase = "forward"
        self._block = tensors[0].block

    def take(self, span: Span, place: Place) -> None:
        self._since += [_plus(span.most, self._start)] if span.most else []
        self._kernels += [span.kernels] if span.kernels else []
        now = _plus(span.now, self._start)
        if span.event is None:
            self._start = now
            return
        event = span.event.at(place.layer) if isinstance(span.event, Name) else span.event
        kind, _, name = event.partition(" ")
        if not self.gradients:
            self._until_gradient += self._since
        if kind == "use":
            self._use(name, now)
        elif kind == "gradient":
            self._gradient(name, now, span.gradient)
        else:
            self.kept = int(now.kept)
            self._take_kernels()
        self._since = []

    def _use(self, name: str, now: Held) -> None:
        self.at_use[name] = now.kept
        if self._since:
            self.before_use[name] = _most(self._since)
        self._take_kernels()
        self._block = self.tensors[name].block

    def _gradient(self, name: str, now: Held, size: int) -> None:
        held = [Held(each.kept, each.in_use - size) for each in (_most(self._since), now)]
        self.gradients.append(Gradient(self.tensors[name], *held))
        self._phase, self._block = "backward", self.tensors[name].block
        self._take_kernels()

    def _take_kernels(self) -> None:
        """Take the kernels before an event. Those before a gradient are of its block, others of the last block."""
        self._taken[self._phase, self._block] += self._kernels
        self._kernels = []

    def profile(self) -> Profile:
        return Profile(self.kept, _most(self._until_gradient), self.at_use, self.before_use, tuple(self.gradients))

    def work(self) -> Work:
        """Return the kernels of each phase of each block. Layers that do the same have the same lists of them."""
        summed: dict[tuple[int, ...], list] = {}
        work: Work = {}
        for key, parts in self._taken.items():
            same = tuple(map(id, parts))
            if same not in summed:
                summed[same] = _summed(kernel for kernels in parts for kernel in kernels)
            work[key] = summed[same]
        return work


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
