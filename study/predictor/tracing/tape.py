"""A tape: the list of all that a pass over a model makes and frees, and of its kernels.

An entry of a tape is a tuple:

    ("made", bytes, whether in the backward pass)   tensors are numbered in this order
    ("freed", number of the tensor)
    ("gradient", number of the tensor)              it is complete
    ("kernel", kind and sizes or None, operations)  operations of matrix products; None if it moves nothing
    ("event", name, bytes of a complete gradient)   "use <tensor>", "gradient <tensor>" or "end of forward"
    ("layer", phase, stack, index)                  a layer begins; without a stack: the layers are done
    ("inputs", bytes)                               the inputs of the model
"""

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


def in_order(tape: Tape) -> Tape:
    """The tape with consecutive "freed" entries sorted by number.

    Autocast drops its copies of weights in an order that differs from run to run.
    """
    ordered = []
    freed = []
    for entry in tape:
        if entry[0] == "freed":
            freed.append(entry)
        else:
            ordered += sorted(freed)
            freed = []
            ordered.append(entry)
    return ordered + sorted(freed)


def events(tape: Tape) -> list[Event]:
    """Return the events of a tape."""
    event_list: list[Event] = []
    since: list[tuple[int, int]] = []
    tensors: list[tuple[int, bool]] = []
    live_bytes = [0, 0]  # from the forward pass, and made by the backward pass
    for kind, *values in tape:
        if kind == "made":
            size, backward = values
            tensors.append((size, backward))
            live_bytes[backward] += size
        elif kind == "freed":
            size, backward = tensors[values[0]]
            live_bytes[backward] -= size
        elif kind == "kernel":
            since.append((live_bytes[0], live_bytes[1]))
        elif kind == "event":
            event_list.append(Event(values[0], live_bytes[0], live_bytes[1], values[1], since))
            since = []
    return event_list
