"""Reads a pickle of a stranger as plain values. It is never loaded: its instructions are read one by one.

Only instructions for dicts, lists, tuples, strings, numbers, booleans and None are followed. Any other, such as one
that names a function or a class, is refused before anything is made of it.
"""

import pickletools
from collections.abc import Callable
from typing import Any

MOST_INSTRUCTIONS = 15_000_000
KEYS = (str, int, float, type(None))  # a nested tuple as a key would overflow the stack of Python itself
MARK = object()
LITERALS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"),
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME"}


def from_pickle(content: bytes) -> Any:
    """Return the plain value of a pickle. Every fault, and everything that is not plain, is a ValueError."""
    reader = _Reader()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {MOST_INSTRUCTIONS:,} instructions")
            if instruction.name == "STOP":
                return reader.stack.pop()
            reader.follow(instruction.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    raise ValueError("it has no end")


class _Reader:
    """The stack and the memory of a pickle's instructions."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        if name in VALUES:
            self.stack.append(argument)
        elif name in LITERALS:
            self.stack.append(LITERALS[name])
        elif name in EMPTY:
            self.stack.append(EMPTY[name]())
        elif name == "MARK":
            self.stack.append(MARK)
        elif name in TUPLES:
            values = [self.stack.pop() for _ in range(TUPLES[name])]
            self.stack.append(tuple(reversed(values)))
        elif name not in IGNORED and not self._remember(name, argument):
            self._fill(name)

    def _remember(self, name: str, argument: Any) -> bool:
        """Follow an instruction of the memory. Return whether it is one."""
        if name == "MEMOIZE":
            self.memory[len(self.memory)] = self.stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memory[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memory[argument])
        else:
            return False
        return True

    def _fill(self, name: str) -> None:
        """Follow an instruction that puts values into a list, a dict or a tuple."""
        if name == "APPEND":
            value = self.stack.pop()
            self._last(list).append(value)
        elif name == "SETITEM":
            value = self.stack.pop()
            key = self.stack.pop()
            self._last(dict).update(_dict([key, value]))
        elif name in ("APPENDS", "SETITEMS", "TUPLE", "LIST", "DICT"):
            values = self._since_mark()
            if name == "APPENDS":
                self._last(list).extend(values)
            elif name == "SETITEMS":
                self._last(dict).update(_dict(values))
            else:
                self.stack.append(MADE_OF_VALUES[name](values))
        else:
            raise ValueError(f"it is not plain: it has the instruction {name}, which is not followed")

    def _last(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self.stack.pop()) is not MARK:
            values.append(value)
        return values[::-1]


def _dict(values: list[Any]) -> dict[Any, Any]:
    """Return the dict of keys and values that alternate."""
    if not all(isinstance(key, KEYS) for key in values[::2]):
        raise TypeError
    return dict(zip(values[::2], values[1::2], strict=True))


MADE_OF_VALUES: dict[str, Callable[[list[Any]], Any]] = {"TUPLE": tuple, "LIST": list, "DICT": _dict}
