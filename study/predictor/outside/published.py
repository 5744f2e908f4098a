"""Measurements that others published: a row each, and the sources that the rows come from. Unknown values are None."""

import csv
import functools
import io
import itertools
import math
import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from study.errors import Stop
from study.io import files
from study.io.load import load
from study.io.validation import sentence
from study.predictor.setup import Fsdp, Loss, Quantized
from study.spec.arms import ROOT

FOLDER = ROOT / "reports" / "outside"
MAX_BYTES = 64 * 2**20  # so that a wrong path does not fill the memory
MAX_ROWS = 100_000
KNOWN = "known"  # the set of the rows that the predictor met first
MemoryKind = Literal["allocated", "reserved", "driver"]
Quantity = Literal["memory", "time"]
Form = TypeVar("Form", bound=BaseModel)


def _count(text: object) -> object:
    """Return a whole number, or the source's words if it is none."""
    try:
        number = float(str(text))
    except ValueError:
        return text
    return int(number) if number.is_integer() and number > 0 else text


Count = Annotated[int | str | None, BeforeValidator(_count)]
Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Text = str | None


class Row(BaseModel, frozen=True):
    """One published measurement. The names are the columns of the file: first the source's, then our reading of it."""

    set: str  # the frozen set that first saw the row, such as lora_2; or KNOWN
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
    notes: Text
    # Our reading: the setup that the row describes.
    config: Text  # a name in configs.json, or a built-in shape. None: the row is not predicted
    dtype: Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"] | None  # the trainer's name of the precision
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
    network: Text  # between nodes: a name in study.machine.gpus.LINKS
    fused_kernels: bool | None  # of norms, activation functions and rotations
    kind: MemoryKind | None  # None: the source does not say which memory it read
    not_predicted: Text  # why the row is not predicted; or its time, if gpu_name is empty
    # Conditions that few rows have: reports/outside/README.md says what they mean.
    adapter: Literal["lora", "rslora", "dora"] | None = None
    adapter_rank: int | None = None
    adapter_targets: Text = None
    adapter_dtype: Literal["fp32", "bf16"] | None = None
    quantized: Quantized | None = None
    products: Text = None
    recompute_part: Text = None
    seq_mean: Measured = None
    rows_are: Literal["packed", "padded", "padded_to_seq"] | None = None
    offload: Text = None
    optimizer_name: Text = None
    parallel: Text = None
    compiled: bool | None = None
    kernels: Text = None
    experts: Text = None
    fp32_modules: Text = None
    attention_kernel: Text = None
    fsdp_version: int | None = None
    fsdp_units: Literal["layers_and_ends"] | None = None
    versions: Text = None
    host_pace: float | None = None  # if its host is one of those that constants were fitted to
    # The source's own prediction of the row, if it is a simulator.
    simulated_memory_GB: Measured
    simulated_step_s: Measured

    @property
    def key(self) -> str:
        """Return the identity of a row: what its source says, and not our reading of it."""
        return sha256(repr([getattr(self, name) for name in FACTS]).encode()).hexdigest()[:12]

    @property
    def measured(self) -> dict[Quantity, float]:
        """Return the bytes of a GPU and the seconds of a step, as far as they are known."""
        both: dict[Quantity, float | None] = {"memory": self.memory_bytes, "time": self.step_s}
        return {name: value for name, value in both.items() if value}

    @property
    def simulated(self) -> dict[Quantity, float | None]:
        """Return the source's own predictions, if it is a simulator."""
        memory_bytes = self.simulated_memory_GB and self.simulated_memory_GB * 1e9
        return {"memory": memory_bytes, "time": self.simulated_step_s}

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_GB is None else self.memory_GB * 1e9

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a step: as printed, or from the tokens per second. No passes mean one."""
        if self.step_time_s is not None or self.tokens_per_s_per_gpu is None:
            return self.step_time_s
        if self.together is None:
            return None
        tokens = self.seq_mean if self.rows_are == "padded" else self.seq
        counts = (self.micro_batch, self.grad_acc or 1, tokens)
        known = [count for count in counts if isinstance(count, (int, float))]
        return math.prod(known) / self.together / self.tokens_per_s_per_gpu if len(known) == len(counts) else None

    @property
    def together(self) -> int | None:
        """Return the number of GPUs that have the same rows. None: not known here, because stages divide the model."""
        parallel = self.parallel or "tp1"
        if parallel.startswith("sp"):  # micro_batch counts the rows that they share
            return 1
        return int(parallel[2:]) if re.fullmatch(r"tp\d+", parallel) else None

    @property
    def rows_per_s(self) -> float | None:
        """Return the rows a second and GPU. No passes mean one."""
        if not self.step_s or not self.together or not isinstance(self.micro_batch, int):
            return None
        passes = self.grad_acc if isinstance(self.grad_acc, int) else 1
        return self.micro_batch * passes / self.together / self.step_s

    @property
    def origin(self) -> "Source":
        return sources().get(self.source, UNKNOWN)

    @property
    def libraries(self) -> str:
        """Return the libraries with their releases, as the row or its source says them."""
        return self.versions or self.origin.versions


FACTS = (
    *("source", "url_or_path", "model", "gpu", "n_gpus", "arm", "precision", "seq", "micro_batch", "grad_acc"),
    *("activation_checkpointing", "memory_GB", "tokens_per_s_per_gpu", "step_time_s", "notes"),
)


class Source(BaseModel, extra="forbid", frozen=True):
    """One source of rows."""

    name: str
    address: str
    licence: str  # of the text and data that the rows come from; rows are facts and figures, no text is kept
    what: str
    read: str  # how its rows were read
    unsaid: str
    settings: tuple[str, ...] = ()  # what its scripts and text say of all its rows, and where
    adapter_dropout: float = 0.0  # of an adapter's inputs
    not_modelled: str | None = None  # why none of its rows is predicted
    keeps_logits: bool = False  # its loop keeps the model's outputs until the backward pass has ended
    versions: str = ""  # of libraries, if its rows say none
    sorted_passes: int = 1  # rows that are padded are sorted by their length, within so many passes


UNKNOWN = Source.model_construct()  # of a row whose source has no entry


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows."""
    return tuple(read(FOLDER / "measurements.csv", Row))


def known() -> tuple[Row, ...]:
    """Return the rows that no frozen set has."""
    return tuple(row for row in rows() if row.set == KNOWN)


@functools.cache
def sources() -> dict[str, Source]:
    """Return the sources of the rows, by name."""
    return read_sources(FOLDER / "sources.toml")


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
        header = reader.fieldnames or []
        lines = [(reader.line_num, line) for line in itertools.islice(reader, MAX_ROWS + 1)]
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name a CSV file of measurements") from None
    if len(lines) > MAX_ROWS:
        raise Stop(f"{path} has more than {MAX_ROWS:,} rows", "divide it into several files")
    needed = [name for name, field in form.model_fields.items() if field.is_required()]
    if missing := [name for name in needed if name not in header]:
        remedy = f"give the columns {', '.join(form.model_fields)}"
        raise Stop(f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}", remedy)
    return [_line(path, number, line, form) for number, line in lines]


def _line(path: Path, number: int, line: dict[str, str], form: type[Form]) -> Form:
    given = {name: (line.get(name) or "").strip() or None for name in form.model_fields}
    fields = form.model_fields
    try:
        return form.model_validate({name: text for name, text in given.items() if text or fields[name].is_required()})
    except ValidationError as error:
        raise Stop(f"{path}, line {number}: {sentence(error)}", "correct the line; an unknown value is empty") from None


def read_sources(path: Path) -> dict[str, Source]:
    remedy, names = f"correct {path.name}", Source.model_fields
    form = dict[Literal["source"], tuple[Source, ...]]
    read = load(path, form, what="a file of sources", remedy=remedy, most_bytes=MAX_BYTES, links=True, known=names)
    return {source.name: source for source in read.get("source", ())}
