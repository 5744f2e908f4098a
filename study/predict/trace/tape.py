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

from itertools import groupby
from typing import Any

Tape = list[tuple]


def in_order(tape: Tape) -> Tape:
    """The tape with consecutive "freed" entries sorted by number.

    Autocast drops its copies of weights in an order that differs from run to run.
    """
    groups = groupby(tape, key=lambda entry: entry[0] == "freed")
    return [entry for freed, entries in groups for entry in (sorted(entries) if freed else entries)]


def in_tuples(kept: Any) -> Any:
    """Return what JSON has kept as lists."""
    return tuple(map(in_tuples, kept)) if isinstance(kept, list) else kept


def at_rows(tapes: list[Tape], counts: tuple[int, ...], rows: int) -> Tape:
    """Return the tape of a pass over `rows` rows: from that of as many, or from those of two successive numbers.

    Every size is a constant plus a constant for each row. What is freed at once is in order: see `in_order`.
    """
    both = zip(tapes[0], tapes[-1], strict=True)
    return [_on_line(*entries, rows - counts[0]) for entries in both]


def _on_line(first: Any, second: Any, more_rows: int) -> Any:
    """Return a part of an entry, whose numbers are `first` on the first tape, and `second` with one row more."""
    if first == second:
        return first
    if isinstance(first, tuple):
        return tuple([_on_line(*both, more_rows) for both in zip(first, second, strict=True)])
    return first + more_rows * (second - first)  # text raises an error: the passes do other operations
