"""Lines over the number of rows of all that a pass holds and does, from the tapes of two row counts.

Every tensor's size is a constant plus a constant for each row, and so are the bytes held at a moment. The most that is
held between two moments is the largest of several such lines. Layers repeat: a section of a tape (`repeating.py`) is
read once, and stands for all layers that do the same.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from study.predictor.tracing.repeating import Alike, Place, followed, models_of, repeat
from study.predictor.tracing.tape import Tape

Line = tuple[int, ...]  # for each number: its value at no rows, and its slope for each row
Held = tuple[int, int, int, int]  # lines of the bytes that the forward pass keeps, and that the backward pass has made
NOTHING: Held = (0, 0, 0, 0)
Kernels = list[tuple[str, Line]]


@dataclass
class Span:
    """The part of a section up to an event. Bytes are those since the section's begin."""

    event: str | None  # None: the section ends here
    gradient: int  # bytes of the gradient that is complete
    now: Held
    most: list[Held]  # the highest lines since the event before it
    kernels: Kernels


@dataclass
class Section:
    """What one layer does in one phase, or what happens around the layers."""

    copies: int  # layers that do this; none for a layer that was followed only to be compared
    spans: list[Span] = field(default_factory=list)


class _Reader:
    """Reads the tapes of two row counts entry by entry."""

    def __init__(self, tapes: list[Tape], rows: tuple[int, ...], alike: Alike):
        self.rows = rows
        self.sections: dict[Place, Section] = {}
        self.flops = self.inputs = (0, 0)
        self._copies = Counter((stack, like[0]) for stack, groups in alike.items() for like in groups)
        self._tensors: list[tuple[int, int, bool, Place]] = []
        self._lines: dict[tuple[int, int], tuple[int, int]] = {}
        self._around = 0
        self._begin(Place("around", None, 0))
        following = self._place
        readers = {"made": self._allocated, "freed": self._freed, "kernel": self._kernel}
        readers |= {"event": self._event, "inputs": self._input, "gradient": lambda first, second: None}
        for first, second in zip(tapes[0], tapes[-1], strict=True):
            kind = first[0]
            if kind != second[0]:
                raise AssertionError(f"a pass over {rows[0]} rows does other operations than one over {rows[-1]}")
            if kind == "layer":
                following = self._following(first)
                continue
            if following != self._place and kind != "freed":  # a layer's inputs are freed after it has returned
                self._end(None, 0)
                self._begin(following)
            readers[kind](first, second)
        self._end(None, 0)

    def _following(self, entry: tuple) -> Place:
        self._around += entry[2] is None
        return Place(*entry[1:]) if entry[2] else Place("around", None, self._around)

    def _begin(self, place: Place) -> None:
        self._place = place
        self._held = [0, 0, 0, 0]
        self._since: list[Held] = []
        self._kernels: Kernels = []
        self.sections[place] = Section(self._copies[place.stack, place.layer] if place.stack else 1)

    def _end(self, event: str | None, gradient: int) -> None:
        a, b, c, d = self._held
        span = Span(event, gradient, (a, b, c, d), highest(self._since, self.rows[0]), self._kernels)
        self.sections[self._place].spans.append(span)
        self._since = []
        self._kernels = []

    def _line(self, first: int, second: int) -> tuple[int, int]:
        """Return a line through the numbers of both row counts."""
        if (first, second) not in self._lines:
            slope = (second - first) // (self.rows[-1] - self.rows[0]) if len(self.rows) > 1 else 0
            self._lines[first, second] = (first - slope * self.rows[0], slope)
        return self._lines[first, second]

    def _allocated(self, first: tuple, second: tuple) -> None:
        at, slope = self._line(first[1], second[1])
        self._tensors.append((at, slope, first[2], self._place))
        self._held[2 * first[2]] += at
        self._held[2 * first[2] + 1] += slope

    def _freed(self, first: tuple, second: tuple) -> None:
        at, slope, in_backward, made_in = self._tensors[first[1]]
        copies = 1
        if made_in.stack is not None and made_in.stack != self._place.stack:  # it is freed for all layers at once
            copies = self._copies[made_in.stack, made_in.layer]
        self._held[2 * in_backward] -= copies * at
        self._held[2 * in_backward + 1] -= copies * slope

    def _kernel(self, first: tuple, second: tuple) -> None:
        if not (copies := self.sections[self._place].copies):
            return
        a, b, c, d = self._held
        self._since.append((a, b, c, d))
        at, slope = self._line(first[2], second[2])
        self.flops = (self.flops[0] + copies * at, self.flops[1] + copies * slope)
        if first[1]:
            pairs = zip(first[1][1], second[1][1], strict=True)
            self._kernels.append((first[1][0], tuple(n for pair in pairs for n in self._line(*pair))))

    def _event(self, first: tuple, second: tuple) -> None:
        self._end(first[1], first[2])

    def _input(self, first: tuple, second: tuple) -> None:
        self.inputs = self._line(first[1], second[1])


def lines(tapes: list[Tape], rows: tuple[int, ...], alike: Alike, blocks: Mapping[str, str]) -> dict:
    """Return the pass as lines, from the tapes of two row counts; or of one, without slopes.

    What is freed at once is in order on all tapes: see `tape.in_order`. `blocks` has the block of each tensor by name.
    """
    read = _Reader(tapes, rows, alike)
    seen: dict = {"at_use": {}, "before_use": {}, "gradients": [], "flops": read.flops, "inputs": read.inputs}
    work = _Work(blocks)
    start = NOTHING
    layers = {stack: {layer: n for n, layer in enumerate(followed(groups))} for stack, groups in alike.items()}
    until_gradient: list[Held] = []
    since: list[Held] = []
    for place, model in models_of(read.sections, alike).items():
        for span in read.sections[model].spans:
            since += [_moved(each, start) for each in span.most]
            now = _moved(span.now, start)
            work.since.append(span.kernels)
            if span.event is None:
                start = now
                continue
            kind, _, name = _name(span.event, place, model, layers).partition(" ")
            work.take(kind, name)
            if not seen["gradients"]:
                until_gradient += since
            if kind == "use":
                seen["at_use"][name] = now[:2]
                seen["before_use"] |= {name: highest(since, rows[0])} if since else {}
            elif kind == "gradient":
                seen["gradients"].append((name, span.gradient, highest(since, rows[0]), now))
            else:  # the end of the forward pass
                seen["kept"] = now[:2]
            since = []
    return seen | {"most": highest(until_gradient, rows[0]), "work": work.entries()}


def _moved(live_bytes: Held, start: Held) -> Held:
    return live_bytes[0] + start[0], live_bytes[1] + start[1], live_bytes[2] + start[2], live_bytes[3] + start[3]


def _name(event: str, place: Place, model: Place, layers: dict[str, dict[int, int]]) -> str:
    """Return the name of an event in a section that repeats that of another layer. `layers` counts those followed."""
    if place.stack is None:
        return event
    head, stack, tail = event.partition(f" {model.stack}.")
    number, _, rest = tail.partition(".")
    if not stack or not number.isdigit():
        return event
    distance = layers[place.stack][int(number)] - layers[place.stack][model.layer]
    return f"{head}{stack}{place.layer + distance}.{rest}"


class _Work:
    """The kernels of each phase of each block."""

    def __init__(self, blocks: Mapping[str, str]):
        self.blocks = blocks
        self.phase = "forward"
        self.block = next(iter(blocks.values()))
        self.since: list[Kernels] = []  # since the event before
        self.taken: dict[tuple[str, str], list[Kernels]] = defaultdict(list)

    def take(self, kind: str, name: str) -> None:
        """Take the kernels before an event. Those before a gradient are of its block, others of the last block."""
        if kind == "gradient":
            self.phase = "backward"
            self.block = self.blocks[name]
        self.taken[self.phase, self.block] += [kernels for kernels in self.since if kernels]
        self.since = []
        if kind == "use":
            self.block = self.blocks[name]

    def entries(self) -> list[list]:
        """Return (phase, block, kind, count, line). Equal products are one entry; others are summed by kind."""
        summed: dict[tuple[int, ...], list[tuple]] = {}
        rows: list[list] = []
        for key, parts in self.taken.items():
            same = tuple(map(id, parts))  # layers that do the same have the same lists
            if same not in summed:
                summed[same] = _summed(kernel for kernels in parts for kernel in kernels)
            rows += [[*key, *entry] for entry in summed[same]]
        return rows


def _summed(kernels: Iterable[tuple[str, Line]]) -> list[tuple]:
    products: Counter[Line] = Counter()
    others: dict[str, list[int]] = {}
    for kind, line in kernels:
        if kind == "product":
            products[line] += 1
        else:
            entry = others.setdefault(kind, [0, 0, 0])
            entry[:] = [a + b for a, b in zip(entry, (1, *line), strict=True)]
    return [("product", count, *line) for line, count in products.items()] + [(kind, *n) for kind, n in others.items()]


def allocations(tapes: list[Tape], rows: tuple[int, ...], alike: Alike) -> dict:
    """Return the order in which all tensors are made and freed, as in `Transformer.allocations`, and their sizes."""
    whole = [repeat(tape, alike) for tape in tapes]
    numbers = {"made": lambda number: 0, "freed": lambda number: number + 1, "gradient": lambda number: -number - 1}
    log = [numbers[kind](what) for kind, what, *_ in whole[-1] if kind in numbers]
    sizes = [[entry[1] for entry in tape if entry[0] == "made"] for tape in whole]
    slopes = [(b - a) // (rows[-1] - rows[0] or 1) for a, b in zip(sizes[0], sizes[-1], strict=True)]
    tensor_lines = [n for a, slope in zip(sizes[0], slopes, strict=True) for n in (a - slope * rows[0], slope)]
    return {"log": log, "made": tensor_lines}


def highest(points: list[Held], least: int) -> list[Held]:
    """Return the lines whose sum is the highest somewhere from `least` rows on."""
    best: list[Held] = []
    for point in sorted(points, key=lambda p: (p[1] + p[3], p[0] + p[2])):
        at = point[0] + point[2]
        slope = point[1] + point[3]
        while best:
            last_at = best[-1][0] + best[-1][2]
            last_slope = best[-1][1] + best[-1][3]
            if at + slope * least >= last_at + last_slope * least:
                best.pop()  # never the higher one from here on
                continue
            if len(best) > 1:
                before_at = best[-2][0] + best[-2][2]
                before_slope = best[-2][1] + best[-2][3]
                # The last line is needed only if it crosses the one before it earlier than the new line does.
                if (before_at - at) * (last_slope - before_slope) <= (before_at - last_at) * (slope - before_slope):
                    best.pop()
                    continue
            break
        best.append(point)
    return best
