"""The user's own code: which frames are its, which of its lines reads a value, and what --value says of that one."""

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

# This package and Python's own modules: the folder of a script may be above them.
INSTALLED = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")


class NoValue(Exception):
    """The script needs a value that does not exist here: of a weight, or of what one has touched."""


class UnknownNumber(float):
    """A number of a tensor without values, as a script gets it. Where the script compares it, it decides by it."""

    note: Callable[[], None]  # that it is compared

    def __lt__(self, other: float) -> bool:
        self.note()
        return super().__lt__(other)

    def __le__(self, other: float) -> bool:
        self.note()
        return super().__le__(other)

    def __gt__(self, other: float) -> bool:
        self.note()
        return super().__gt__(other)

    def __ge__(self, other: float) -> bool:
        self.note()
        return super().__ge__(other)


def line_of(frame: FrameType) -> str:
    """Return what stands in the line that a frame runs."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


class Script:
    """The user's own code: the folder of the script, without what is installed below it."""

    def __init__(self, path: Path, values: dict[str, float]):
        self.path = path
        self.decides: dict[str, str] = {}  # by each place: the line that compares a number that does not exist here
        self.folder = str(path.parent)
        self.values = values

    def owns(self, file: str) -> bool:
        if not file.startswith(f"{self.folder}/") or re.search("(site|dist)-packages", file.removeprefix(self.folder)):
            return False
        # A module that is rehearsed may be installed itself.
        return not any(file.startswith(f"{each}/") for each in INSTALLED if each.startswith(f"{self.folder}/"))

    def place_of(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the last line of the script's own code on the way to an error, and what stands there."""
        mine = [frame for frame in traceback.extract_tb(error.__traceback__) if self.owns(frame.filename)]
        if not mine:
            return None, None
        return f"{Path(mine[-1].filename).relative_to(self.folder)}:{mine[-1].lineno}", mine[-1].line

    def place(self) -> str | None:
        """Return the line of the script that runs now. None if no frame is the script's."""
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            if self.owns(frame.f_code.co_filename):
                return f"{Path(frame.f_code.co_filename).relative_to(self.folder)}:{line}"
        return None

    def reader(self) -> FrameType | None:
        """Return the frame of the script that asks for a value. None if a library does."""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            file = frame.f_code.co_filename
            if self.owns(file):
                return frame
            inside_torch = "/torch/" in file or "/study/" in file or file.startswith("<")
            if not inside_torch:
                break
        return None

    def named_value(self) -> float | None:
        """Return what --value says of a variable in the line of the script that runs now. None if it says nothing."""
        frame = self.reader()
        if frame is None or not self.values:
            return None
        for name, value in self.values.items():
            if re.search(rf"\b{re.escape(name)}\b", line_of(frame)):
                return value
        return None

    def unknown(self, value: float) -> UnknownNumber:
        """Return a number that was read, and note where the script itself compares it."""
        number = UnknownNumber(value)
        number.note = self._decide
        return number

    def _decide(self) -> None:
        if (frame := self.reader()) is not None:
            self.decides[self.place() or ""] = line_of(frame)

    def value_of(self, tensor: torch.Tensor) -> float:
        """Return the value that a read gives: what --value says of the variable, or 0 for a number that is shown."""
        value = self.named_value()
        frame = self.reader()
        if value is None and frame is not None and tensor.dtype == torch.bool:
            where = f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
            raise NoValue(f"{where} decides by a value that a weight has touched: {line_of(frame)}")
        return value or 0.0
