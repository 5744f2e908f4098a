"""Measurements that others published: a row each, and the sources that the rows come from. Unknown values are None."""

import csv
import functools
import io
import re
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from study.core import files
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.validation import sentence
from study.predict.setup import Fsdp, Loss, Quantized

FOLDER = ROOT / "reports" / "outside"
MAX_BYTES = 64 * 2**20  # so that a wrong path does not fill the memory
KNOWN = "known"  # the set of the rows that the predictor met first
Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]
MemoryKind = Literal["allocated", "reserved", "driver"]
Quantity = Literal["memory", "time"]
Form = TypeVar("Form", bound=BaseModel)
Count = Annotated[int, Field(ge=1)]
Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Text = str | None


class Facts(BaseModel, frozen=True):
    """What a source says of a measurement, in the columns that identify it."""

    source: str
    url_or_path: Text  # with the commit where there is one
    model: Text
    gpu: Text
    n_gpus: Count | None
    arm: Text  # as the source names it
    precision: Text
    seq: Count | None  # tokens of a row
    micro_batch: Count | None  # rows per GPU and pass
    grad_acc: Count | None  # passes per step
    activation_checkpointing: Text
    memory_GB: Measured  # 10^9 bytes
    tokens_per_s_per_gpu: Measured
    step_time_s: Measured
    notes: Text


class Row(Facts, frozen=True):
    """One published measurement. The names are the columns of the file: the source's, and our reading of them.

    reports/outside/README.md says what the columns mean, and has some more for the reader.
    """

    set: str  # the frozen set that first saw the row, such as lora_2; or KNOWN
    params: Measured
    # Our reading: the setup that the row describes.
    config: Text  # a name in configs.json, or a built-in shape. None: the row is not predicted
    dtype: Precision | None
    deepspeed: Text  # zero_optimization of the DeepSpeed config, as JSON
    fsdp: Fsdp | None
    group: int | None  # ranks that share the states, if not all
    recompute: bool | Literal["whole"] | None  # whole: all of a layer, also what no gradient needs
    attention: Literal["sdpa", "eager", "megatron"] | None  # megatron: eager, also one row as two
    loss: Loss | None
    logits: Literal["fp32", "as_computed"] | None  # of the loss
    optimizer: Literal["fused", "foreach", "single_tensor"] | None
    keeps_cache: bool | Literal["with_outputs"] | None  # of keys and values: until the loss, or until the next one
    gpu_name: Text  # a name in GPUS. None: the time is not predicted
    gpus_per_node: int | None
    network: Text  # between nodes: a name in study.core.gpus.LINKS
    fused_kernels: bool | None  # of norms, activation functions and rotations
    kind: MemoryKind | None  # None: the source does not say which memory it read
    not_predicted: Text  # why the row is not predicted; or its time, if gpu_name is empty
    # Conditions that few rows have.
    adapter: Literal["lora", "rslora", "dora"] | None
    adapter_rank: int | None
    adapter_targets: Text
    adapter_dtype: Literal["fp32", "bf16"] | None
    quantized: Quantized | None
    products: Text
    recompute_part: Text
    seq_mean: Measured
    rows_are: Text
    offload: Text
    optimizer_name: Text
    parallel: Text
    compiled: bool | None
    kernels: Text
    fp32_modules: Text
    versions: Text
    host_pace: float | None  # if its host is one of those that constants were fitted to

    @property
    def key(self) -> str:
        """Return the identity of a row: what its source says, and not our reading of it."""
        return sha256(repr([getattr(self, name) for name in Facts.model_fields]).encode()).hexdigest()[:12]

    @property
    def measured(self) -> dict[Quantity, float]:
        """Return the bytes of a GPU and the seconds of a step, as far as they are known."""
        both: dict[Quantity, float | None] = {"memory": self.memory_bytes, "time": self.step_s}
        return {name: value for name, value in both.items() if value}

    @property
    def memory_bytes(self) -> float | None:
        return self.memory_GB and self.memory_GB * 1e9

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a step: as printed, or from the tokens per second."""
        tokens = self.seq_mean if self.rows_are == "padded" else self.seq
        if self.step_time_s or not (self.tokens_per_s_per_gpu and self.rows_of_a_gpu and tokens):
            return self.step_time_s
        return self.rows_of_a_gpu * tokens / self.tokens_per_s_per_gpu

    @property
    def rows_of_a_gpu(self) -> float | None:
        """Return the rows of a step over the GPUs that work at them. No passes mean one.

        None: not known here, because stages divide the model.
        """
        together = re.fullmatch(r"(?:sp\d+|tp(\d+))?", self.parallel or "")  # micro_batch counts rows that sp shares
        if together is None or self.micro_batch is None:
            return None
        return self.micro_batch * (self.grad_acc or 1) / int(together[1] or 1)

    @property
    def origin(self) -> "Source":
        return sources()[self.source]

    @property
    def libraries(self) -> str:
        """Return the libraries with their releases, as the row or its source says them."""
        return self.versions or self.origin.versions


class Source(BaseModel, frozen=True):
    """What is true of all rows of a source. sources.toml says more of it, for the reader."""

    name: str
    licence: str  # of the text and data that the rows come from; rows are facts and figures, no text is kept
    adapter_dropout: float = 0.0  # of an adapter's inputs
    keeps_logits: bool = False  # its loop keeps the model's outputs until the backward pass has ended
    versions: str = ""  # of libraries, if its rows say none
    sorted_passes: int = 1  # rows that are padded are sorted by their length, within so many passes


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows."""
    return tuple(read(FOLDER / "measurements.csv", Row))


@functools.cache
def sources() -> dict[str, Source]:
    """Return the sources of the rows, by name."""
    return {each["name"]: Source(**each) for each in tomllib.loads((FOLDER / "sources.toml").read_text())["source"]}


def set_number(name: str) -> int:
    """Return the number of a set: 0 of the known rows, 1 of `lora`, 2 of `lora_2`."""
    if name == KNOWN:
        return 0
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else 1


def read(path: Path, form: type[Form]) -> list[Form]:
    """Return the lines of a CSV file, each as a form whose fields are columns. Other columns are ignored."""
    try:
        content = files.read(path, MAX_BYTES).decode().removeprefix("\ufeff")
        reader = csv.DictReader(io.StringIO(content, newline=""))
        return [_line(path, reader.line_num, line, form) for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name a CSV file of measurements") from None


def _line(path: Path, number: int, line: dict[str, str | None], form: type[Form]) -> Form:
    given = {}
    for name, field in form.model_fields.items():
        text = (line.get(name) or "").strip()
        if text or (name in line and field.is_required()):
            given[name] = text or None
    try:
        return form(**given)
    except ValidationError as error:
        raise Stop(f"{path}, line {number}: {sentence(error)}", "correct the line; an unknown value is empty") from None
