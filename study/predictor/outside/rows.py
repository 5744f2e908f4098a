"""The published measurements, one row each, as the source gives them. Unknown values are None."""

import csv
import functools
import io
import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from study.errors import Stop
from study.io import files
from study.spec.arms import ROOT
from study.spec.validation import sentence

FOLDER = ROOT / "reports" / "outside"
MAX_BYTES, MAX_ROWS = 64 * 2**20, 100_000  # so that a wrong path does not fill the memory
MemoryKind = Literal["allocated", "reserved", "driver"]
# The words of sources for each kind of memory. `active` is allocated memory plus what waits for another stream.
KINDS: dict[str, MemoryKind] = {
    r"nvidia-smi|nvml|driver|pynvml": "driver",
    r"reserved|cached": "reserved",
    r"alloc|active|cuda_memory_peak|max_memory": "allocated",
}


def _count(text):
    """A whole number, or the source's words if it is none. Words are no error: they are a reason not to predict."""
    try:
        number = float(text)
    except (TypeError, ValueError):
        return text
    return int(number) if number.is_integer() and number > 0 else text


Count = Annotated[int | str | None, BeforeValidator(_count)]
Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Text = str | None


class Row(BaseModel):
    """One published measurement. The names are the columns of the file."""

    model_config = ConfigDict(frozen=True)

    source: str
    url_or_path: Text  # with the commit where there is one
    model: Text
    params: Measured
    gpu: Text
    n_gpus: Count
    arm: Text  # as the source names it
    precision: Text
    seq: Count  # tokens of a row
    micro_batch: Count  # rows per GPU and pass
    grad_acc: Count  # passes per step
    activation_checkpointing: Text
    memory_GB: Measured  # 10^9 bytes
    memory_kind: Text  # what was read, in the source's words
    tokens_per_s_per_gpu: Measured
    step_time_s: Measured
    mfu: Measured  # per cent, as the source defines it
    tier: Literal["A", "B", "C"] | None
    notes: Text

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_GB is None else self.memory_GB * 1e9

    @property
    def kind(self) -> MemoryKind | None:
        """Which of PyTorch's or the driver's numbers the memory is; None if the source does not say it."""
        words = (self.memory_kind or "").lower()
        return next((kind for pattern, kind in KINDS.items() if re.search(pattern, words)), None)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: as printed, or from the tokens per second. If the row names no passes, there is one."""
        counts = (self.micro_batch, 1 if self.grad_acc is None else self.grad_acc, self.seq)
        if self.step_time_s is not None or self.tokens_per_s_per_gpu is None:
            return self.step_time_s
        return math.prod(counts) / self.tokens_per_s_per_gpu if all(isinstance(n, int) for n in counts) else None


def read(path: Path) -> list[Row]:
    """The rows of a file with these columns. Other columns are ignored."""
    try:
        content = files.read(path, MAX_BYTES).decode().removeprefix("\ufeff")
        reader = csv.DictReader(io.StringIO(content, newline=""))
        header = reader.fieldnames or []
        lines = [(reader.line_num, line) for line in itertools.islice(reader, MAX_ROWS + 1)]
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name a CSV file of measurements") from None
    if len(lines) > MAX_ROWS:
        raise Stop(f"{path} has more than {MAX_ROWS:,} rows", "divide it into several files")
    if missing := [name for name in Row.model_fields if name not in header]:
        what = f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise Stop(what, f"give the columns of {FOLDER.name}/measurements.csv")
    return [_row(path, number, line) for number, line in lines]


def _row(path: Path, number: int, line: dict) -> Row:
    try:
        return Row.model_validate({name: (line[name] or "").strip() or None for name in Row.model_fields})
    except ValidationError as error:
        raise Stop(f"{path}, line {number}: {sentence(error)}", "correct the line; an unknown value is empty") from None


@functools.cache
def own() -> tuple[Row, ...]:
    """The rows that the project keeps."""
    return tuple(read(FOLDER / "measurements.csv"))
