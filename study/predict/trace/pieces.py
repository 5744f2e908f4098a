"""The tape of a pass with a chunked loss, from the kept tape of the same pass with a whole one. It needs no torch.

The two tapes differ only between the product that makes the logits and the gradients of its two factors. This part is
written anew, a piece of the tokens at a time, as a trace of `kernels._Chunked` shows it.
"""

import itertools
from collections.abc import Iterable, Iterator
from math import ceil
from typing import NamedTuple

from study.predict.trace.tape import Tape

END = ("event", "end of forward", 0)


def chunk_tokens(tokens: int, vocabulary: int, width: int) -> int:
    """Liger's size of a piece: its logits have about as many elements as the hidden states, in a power of two."""
    return 1 << (ceil(tokens / ceil(vocabulary / width)) - 1).bit_length()


class Head(NamedTuple):
    """The product that makes the logits."""

    tokens: int
    vocabulary: int
    width: int
    said: tuple[int, ...]  # bytes of an element of its factors, where a tape says it
    size: int  # the same
    trains: bool
    copied: tuple[int, ...]  # elements of the factors that autocast copies

    @property
    def hidden(self) -> int:
        return self.tokens * self.width

    @property
    def weight(self) -> int:
        return self.vocabulary * self.width

    def held_bytes(self, factor: int) -> int:
        """Bytes of a factor in the type of the model, as of its gradient. `factor`: its elements."""
        return factor * (4 if factor in self.copied else self.size)


class Rewritten:
    """A tape that is written from another one, in which tensors have other numbers."""

    def __init__(self) -> None:
        self.tape: Tape = []
        self.numbers: dict[int, int] = {}  # by those of the other tape
        self.made = 0

    def make(self, size: int, *moved_bytes: int, in_backward: bool = False) -> int:
        """Add a tensor, and the kernel that makes it unless that is a product. Return the tensor's number."""
        self.tape.append(("made", size, in_backward))
        for each in moved_bytes:
            self.move(each)
        self.made += 1
        return self.made - 1

    def move(self, moved_bytes: int) -> None:
        self.tape.append(("kernel", ("other", (moved_bytes,)), 0))

    def multiply(self, head: Head, m: int, n: int, k: int) -> int:
        number = self.make(m * n * head.size)
        self.tape.append(("kernel", ("product", (1, m, n, k, *head.said)), 2 * m * n * k))
        return number

    def free(self, *numbers: int) -> None:
        self.tape += [("freed", number) for number in sorted(numbers)]

    def follow(self, entries: Tape, first: int) -> None:
        """Add entries of the other tape. `first` is the number that its next tensor has there."""
        for entry in entries:
            kind, what, *_ = entry
            if kind == "made":
                self.numbers[first] = self.made
                first += 1
                self.made += 1
            self.tape.append((kind, self.numbers[what]) if kind in ("freed", "gradient") else entry)


def in_pieces(whole: Tape, rows: int) -> Tape | None:
    """Return the tape with a chunked loss. None: the copies of weights and of hidden states cannot be told apart."""
    end = whole.index(END)
    start, head = _head(whole, end)
    hidden_bytes = head.held_bytes(head.hidden)
    if head.tokens == head.vocabulary or hidden_bytes == head.held_bytes(head.weight):
        return None
    before = [size for kind, size, *_ in whole[:start] if kind == "made"]
    hidden = max(number for number, size in enumerate(before) if size == hidden_bytes)
    stop = _stop(whole, end, head)

    new = Rewritten()
    new.follow(whole[:start], 0)
    used = [new.numbers[hidden]]
    if head.hidden in head.copied:
        used.append(new.make(2 * head.hidden, 6 * head.hidden))
        new.free(used.pop(0))
    if head.weight in head.copied:
        used.append(new.make(2 * head.weight, 6 * head.weight))
    others = [entry[1] for entry in whole[start:end] if entry[0] == "freed" and entry[1] in range(len(before))]
    late = {entry[1] for entry in _last_freed(whole, end)}  # copies that autocast keeps until then
    new.free(*(new.numbers[number] for number in others if number not in late | {hidden}))
    used.append(new.make(8 * head.tokens, 8 * (2 * head.tokens - rows)))  # the labels
    gradients = _pieces(new, head)
    loss = len(before) + _made(whole[start:end]) - 1
    new.numbers[loss] = new.made - 1
    new.free(*used, *(new.numbers[number] for number in others if number in late - {hidden}))
    new.tape.append(END)
    new.numbers[loss + 1] = new.make(4, 8)  # the gradient of the loss
    _of_factors(new, head, gradients, whole[end:stop], loss + 1)
    new.follow(whole[stop:], loss + 1 + _made(whole[end:stop]))
    return new.tape


def _made(entries: Tape) -> int:
    return sum(entry[0] == "made" for entry in entries)


def _products(whole: Tape, begin: int, end: int) -> Iterator[int]:
    """Yield where products are."""
    for place in range(begin, end):
        kind, what, *_ = whole[place]
        if kind == "kernel" and what and what[0] == "product":
            yield place


def _last_freed(whole: Tape, end: int) -> Iterable[tuple]:
    """Return the entries right before a place that free a tensor."""
    return itertools.takewhile(lambda entry: entry[0] == "freed", reversed(whole[:end]))


def _head(whole: Tape, end: int) -> tuple[int, Head]:
    """Return where the head begins, with the copies of its factors, and the head."""
    product = max(_products(whole, 0, end))
    _, tokens, vocabulary, width, *said = whole[product][1][1]
    first_two = [whole[place][1][1][1:4] for place in itertools.islice(_products(whole, end, len(whole)), 2)]
    trains = (vocabulary, width, tokens) in first_two
    start = product - 1
    size = whole[start][1] // (tokens * vocabulary)
    copied = []
    while True:
        kind, what, *_ = whole[start - 1]
        elements = whole[start - 2][1] // 2 if whole[start - 2][0] == "made" else None
        if kind == "kernel" and what and elements and what == ("other", (6 * elements,)):
            copied.append(elements)
            start -= 2
        elif (kind == "kernel" and what is None) or (kind == "event" and what.startswith("use ")):
            start -= 1
        else:
            break
    return start, Head(tokens, vocabulary, width, tuple(said), size, trains, tuple(copied))


def _stop(whole: Tape, end: int, head: Head) -> int:
    """Return where the gradients of both factors are done, in the types of these, and the weight's is taken."""
    *_, last = itertools.islice(_products(whole, end, len(whole)), 2 if head.trains else 1)
    stop = last + 1
    while True:
        kind, what, *_ = whole[stop]
        if kind == "made":
            if whole[stop + 1] != ("kernel", ("other", (6 * what // 4,)), 0) or what // 4 not in head.copied:
                return stop
            stop += 2
        elif kind == "event":
            if whole[stop][2] not in (head.size * head.weight, 4 * head.weight):
                return stop
            stop += 1
        elif kind == "kernel" and what is not None:
            return stop
        else:
            stop += 1


def _pieces(new: Rewritten, head: Head) -> list[int]:
    """Add the loss of each piece with its gradients. Return the tensors of the gradients: the hidden states' first."""
    size, tokens, vocabulary, width = head.size, head.tokens, head.vocabulary, head.width
    gradients = [new.make(head.hidden * size, 2 * head.hidden * size)]
    if head.trains:
        gradients.append(new.make(head.weight * size, 2 * head.weight * size))
    losses = new.make(4 * tokens, 4 * tokens + head.hidden * size)
    last: list[int] = []
    chunk = chunk_tokens(tokens, vocabulary, width)
    for begin in range(0, tokens, chunk):
        count = min(chunk, tokens - begin)
        elements = count * vocabulary
        logits = new.multiply(head, count, vocabulary, width)
        if size < 4:
            computed, logits = logits, new.make(4 * elements, (size + 4) * elements)
            new.free(computed)
        softmax = new.make(4 * elements, 8 * elements)
        new.free(logits)
        if size < 4:
            logits, softmax = softmax, new.make(size * elements, (size + 4) * elements)
            new.free(logits)
        new.free(*last)
        labels = new.make(8 * count, 16 * count)
        chosen = new.make(size * count, size * elements + (8 + size) * count)
        new.free(labels)
        new.move((8 + size) * count)
        new.free(chosen)
        of_rows = new.multiply(head, count, width, vocabulary)
        new.move(3 * count * width * size)
        new.free(of_rows)
        if head.trains:
            new.move((2 * head.weight + elements + count * width) * size)
        last = [softmax]
    new.make(4, 4 * tokens + 4)
    new.free(losses, *last)
    return gradients


def _of_factors(new: Rewritten, head: Head, gradients: list[int], whole: Tape, first: int) -> None:
    """Add the gradients in the types of the factors, and say which tensors of the other tape they are."""
    made = [entry[1] for entry in whole if entry[0] == "made"]
    of_hidden, *of_weight = gradients
    for number in of_weight:
        if head.weight in head.copied:
            number = new.make(4 * head.weight, 6 * head.weight, in_backward=True)
            new.free(*of_weight)
        new.numbers[_last(made, head.held_bytes(head.weight)) + first] = number
    taken = [place for place, entry in enumerate(whole) if entry[0] == "event" and place]
    for place in taken:
        new.follow(whole[place : place + 3], 0)
    number = of_hidden
    if head.hidden in head.copied:
        number = new.make(4 * head.hidden, 6 * head.hidden, in_backward=True)
        new.free(of_hidden)
    new.numbers[_last(made, head.held_bytes(head.hidden)) + first] = number


def _last(sizes: list[int], size: int) -> int:
    return max(number for number, each in enumerate(sizes) if each == size)
