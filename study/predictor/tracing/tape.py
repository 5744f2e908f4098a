"""A tape: the list of all that a pass over a model makes and frees, and of its kernels; and lines through two tapes.

An entry of a tape is a tuple:

    ("made", bytes, whether in the backward pass)   tensors are numbered in this order
    ("freed", number of the tensor)
    ("gradient", number of the tensor)              it is complete
    ("kernel", kind and sizes or None, operations)  operations of matrix products; None if it moves nothing
    ("event", name, bytes of a complete gradient)   "use <tensor>", "gradient <tensor>" or "end of forward"
    ("layer", phase, stack, index)                  a layer begins; without a stack: the layers are done
    ("inputs", bytes)                               the inputs of the model
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

Tape = list[tuple]


@dataclass
class Event:
    """A moment of the pass: the bytes held then, and at all times since the event before it."""

    name: str
    kept: int
    in_use: int
    gradient: int  # bytes of the gradient that is complete
    since: list[tuple[int, int]] = field(default_factory=list)
    work: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # the kernels since the event before it


def in_order(tape: Tape) -> Tape:
    """The tape with consecutive "freed" entries sorted by number.

    Autocast drops its copies of weights in an order that differs from run to run.
    """
    ordered, freed = [], []
    for entry in tape:
        if entry[0] == "freed":
            freed.append(entry)
        else:
            ordered += sorted(freed)
            freed = []
            ordered.append(entry)
    return ordered + sorted(freed)


def _events(tape: Tape) -> list[Event]:
    events, since, work, tensors = [], [], [], []
    held = [0, 0]  # from the forward pass, and made by the backward pass
    for kind, *values in tape:
        if kind == "made":
            tensors.append(values)
            held[values[1]] += values[0]
        elif kind == "freed":
            size, backward = tensors[values[0]]
            held[backward] -= size
        elif kind == "kernel":
            since.append(tuple(held))
            work += [values[0]] if values[0] else []
        elif kind == "event":
            events.append(Event(values[0], *held, values[1], since, work))
            since, work = [], []
    return events


def _log(tape: Tape) -> list[int]:
    """The "made", "freed" and "gradient" entries as the numbers of `Transformer.allocations`."""
    return [
        0 if kind == "made" else number + 1 if kind == "freed" else -number - 1
        for kind, number, *_ in tape
        if kind in ("made", "freed", "gradient")
    ]


def lines(tapes: list[Tape], rows: tuple[int, ...], blocks: Mapping[str, str]) -> dict:
    """The pass as lines over the number of rows, from the tapes of two row counts; or of one, without slopes.

    Every tensor's size is a constant plus a constant for each row, and so are the bytes held at a moment. The most that
    is held between two moments is the largest of several such lines. `blocks` has the block of each tensor by name.
    """
    if len(rows) == 1:  # no slope is known, and none is needed
        tapes, rows = tapes * 2, (0, 1)
    events = [_events(tape) for tape in tapes]
    alike = [[(event.name, event.gradient, len(event.since)) for event in each] for each in events]
    if alike[0] != alike[1]:
        raise AssertionError(f"a pass over {rows[0]} rows does other operations than one over {rows[1]}")

    def line(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
        """For each number: its value at no rows, and its slope for each row."""
        slopes = [(b - a) // (rows[1] - rows[0]) for a, b in zip(first, second, strict=True)]
        return [n for a, slope in zip(first, slopes, strict=True) for n in (a - slope * rows[0], slope)]

    def highest(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[list[int]]:
        return _envelope([line(*pair) for pair in zip(first, second, strict=True)], rows[0])

    seen = {"at_use": {}, "gradients": [], "log": _log(tapes[-1]), "made": [], "work": _work(events, line, blocks)}
    sizes = ([entry[1] for entry in tape if entry[0] == "made"] for tape in tapes)
    seen["made"] = [n for first, second in zip(*sizes, strict=True) for n in line((first,), (second,))]
    before: tuple[list, list] = ([], [])
    for first, second in zip(*events, strict=True):
        kind, _, name = first.name.partition(" ")
        now = line((first.kept, first.in_use), (second.kept, second.in_use))
        if not seen["gradients"]:
            before[0].extend(first.since)
            before[1].extend(second.since)
        if kind == "use":
            seen["at_use"][name] = now[:2]
        elif kind == "gradient":
            seen["gradients"].append([name, first.gradient, highest(first.since, second.since), now])
        elif first.name == "end of forward":
            seen["kept"] = now[:2]
    operations = [sum(entry[2] for entry in tape if entry[0] == "kernel") for tape in tapes]
    inputs_bytes = [sum(entry[1] for entry in tape if entry[0] == "inputs") for tape in tapes]
    ends = {"flops": operations, "inputs": inputs_bytes}
    return seen | {"most": highest(*before)} | {key: line(*([each] for each in two)) for key, two in ends.items()}


def _work(events: list[list[Event]], line, blocks: Mapping[str, str]) -> list[list]:
    """Kernels as [phase, block, kind, count, line]. Equal products are one entry; other kernels are summed by kind."""
    counts, moved, phase, block = Counter(), {}, "forward", next(iter(blocks.values()))
    for first, second in zip(*events, strict=True):
        kind, _, name = first.name.partition(" ")
        if kind == "gradient":
            phase, block = "backward", blocks[name]
        for (what, sizes), (_, more) in zip(first.work, second.work, strict=True):
            numbers = line(sizes, more)
            if what == "product":
                counts[phase, block, what, *numbers] += 1
            else:
                entry = moved.setdefault((phase, block, what), [0, 0, 0])
                entry[:] = [a + b for a, b in zip(entry, (1, *numbers), strict=True)]
        if kind == "use":
            block = blocks[name]
    products = [[*key[:3], count, *key[3:]] for key, count in counts.items()]
    return products + [[*key, *entry] for key, entry in moved.items()]


def _envelope(points: list[list[int]], least: int) -> list[list[int]]:
    """The lines that are the highest ones somewhere from `least` rows on."""
    best: list[list[int]] = []
    for point in sorted(points, key=lambda p: (p[1] + p[3], p[0] + p[2])):
        at, slope = point[0] + point[2], point[1] + point[3]
        while best:
            last_at, last_slope = best[-1][0] + best[-1][2], best[-1][1] + best[-1][3]
            if at + slope * least >= last_at + last_slope * least:
                best.pop()  # never the higher one from here on
                continue
            if len(best) > 1:
                before_at, before_slope = best[-2][0] + best[-2][2], best[-2][1] + best[-2][3]
                # The last line is needed only if it crosses the one before it earlier than the new line does.
                if (before_at - at) * (last_slope - before_slope) <= (before_at - last_at) * (slope - before_slope):
                    best.pop()
                    continue
            break
        best.append(point)
    return best
