"""Measurements that others published: a row each, and the sources that the rows come from. Unknown values are None."""

import csv
import functools
import io
import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Literal

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
NEEDED = ("config", "dtype")  # without them no row is predicted
MemoryKind = Literal["allocated", "reserved", "driver"]
Quantity = Literal["memory", "time"]
Role = Literal["fit", "interval", "test"]  # what step times decide: constants, the width of the interval, or neither


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
NO_DROPOUT = "adapters drop none of their inputs, as is PEFT's default"


class Row(BaseModel, frozen=True):
    """One published measurement. The names are the columns of the file: first the source's, then our reading of it."""

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
    assumed: Text  # what neither the row nor its source says, separated by " | "
    not_predicted: Text  # why the row, or its time, is not predicted
    # Conditions that few rows have: reports/outside/README.md says what they mean. A file may lack them.
    adapter: Literal["lora", "rslora", "dora"] | None = None
    adapter_rank: int | None = None
    adapter_targets: Text = None
    adapter_dtype: Literal["fp32", "bf16"] | None = None
    adapter_dropout: float | None = None  # of an adapter's inputs
    trained_too: Text = None
    quantized: Quantized | None = None
    products: Text = None
    recompute_part: Text = None
    seq_mean: Measured = None
    rows_are: Literal["packed", "padded", "padded_to_seq"] | None = None
    offload: Text = None
    optimizer_name: Text = None
    parallel: Text = None
    compiled: bool | None = None
    deterministic: bool | None = None
    kernels: Text = None
    experts: Text = None
    fp32_modules: Text = None
    attention_kernel: Text = None
    fsdp_version: int | None = None
    fsdp_units: Literal["layers_and_ends"] | None = None
    versions: Text = None
    # The source's own prediction of the row, if it is a simulator.
    simulated_memory_GB: Measured
    simulated_step_s: Measured

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

    @property
    def drops(self) -> float | None:
        """Return the dropout of adapters, as the row or its source says it."""
        return self.origin.adapter_dropout if self.adapter_dropout is None else self.adapter_dropout

    @property
    def assumptions(self) -> tuple[str, ...]:
        stated = tuple(self.assumed.split(" | ")) if self.assumed else ()
        return (*stated, NO_DROPOUT) if self.adapter and self.drops is None else stated

    @property
    def role(self) -> Role | None:
        return self.origin.part_of(self).role

    @property
    def host_pace(self) -> float | None:
        return self.origin.part_of(self).host_pace or self.origin.host_pace


class Part(BaseModel, extra="forbid", frozen=True):
    """Some rows of a source whose times have another role than those of its other rows."""

    about: str  # a regular expression over a row's model, GPU and address
    role: Role
    why: str
    host_pace: float | None = None


class Miss(BaseModel, extra="forbid", frozen=True):
    """The reason why predictions of some rows have missed: an explanation, not a correction."""

    about: str = ""  # a regular expression over a row's model, GPU, arm and notes
    quantity: Quantity
    why: str


class Source(BaseModel, extra="forbid", frozen=True):
    """One source of rows."""

    name: str
    address: str
    licence: str  # of the text and data that the rows come from; rows are facts and figures, no text is kept
    what: str
    read: str  # how its rows were read
    unsaid: str
    settings: tuple[str, ...] = ()  # what its scripts and text say of all its rows, and where
    role: Role | None = None  # for the model of time; None: not used
    part: tuple[Part, ...] = ()  # the first one that matches a row decides the row's role
    miss: tuple[Miss, ...] = ()  # the first one that matches a row counts
    own_error: dict[Quantity, float] = {}  # a simulator's own figure: the mean of absolute errors
    host_pace: float | None = None  # if its host is one of those that constants were fitted to
    adapter_dropout: float | None = None  # as in its rows, if its scripts say one for all of them
    not_modelled: str | None = None  # why none of its rows is predicted
    keeps_logits: bool = False  # its loop keeps the model's outputs until the backward pass has ended
    outside_zero_init: bool = False  # its models are built outside DeepSpeed's zero.Init
    adapter_units: bool = False  # adapters' matrices are units of its FSDP1, as they are with PEFT
    fsdp_waits: bool = False  # its FSDP2 sums whole gradients in fp32, and reduces them in the last pass only
    versions: str = ""  # of libraries, if its rows say none
    sorted_passes: int = 1  # rows that are padded are sorted by their length, within so many passes

    def why_off(self, row: Row, quantity: Quantity) -> str | None:
        """Return why a prediction of a row missed, if that is known."""
        words = f"{row.model} on {row.gpu}, {row.arm}, {row.notes}"
        matching = (miss for miss in self.miss if miss.quantity == quantity and re.search(miss.about, words))
        return next((miss.why for miss in matching), None)

    def part_of(self, row: Row) -> "Part | Source":
        words = f"{row.model} on {row.gpu}, {row.url_or_path}"
        return next((part for part in self.part if re.search(part.about, words)), self)


UNKNOWN = Source.model_construct()  # of a row whose source has no entry


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return the rows that the project keeps."""
    return tuple(read_rows(FOLDER / "measurements.csv"))


@functools.cache
def sources() -> dict[str, Source]:
    """Return the sources of the project's own rows, by name."""
    return read_sources(FOLDER / "sources.toml")


def read_rows(path: Path, settings: dict | None = None) -> list[Row]:
    """Return the rows of a file with the columns of measurements.csv. Other columns are ignored.

    `settings` are values by column, for fields that the file leaves empty.
    """
    settings = settings or {}
    try:
        content = files.read(path, MAX_BYTES).decode().removeprefix("\ufeff")
        reader = csv.DictReader(io.StringIO(content, newline=""))
        header = reader.fieldnames or []
        lines = [(reader.line_num, line) for line in itertools.islice(reader, MAX_ROWS + 1)]
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name a CSV file of measurements") from None
    if len(lines) > MAX_ROWS:
        raise Stop(f"{path} has more than {MAX_ROWS:,} rows", "divide it into several files")
    required = [name for name, field in Row.model_fields.items() if field.is_required()]
    if missing := [name for name in required if name not in (*header, *settings)]:
        what = f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        if unknown := [name for name in header if name not in Row.model_fields]:
            what += f"; unknown: {', '.join(unknown):.200}"
        raise Stop(what, f"give the columns of {FOLDER.name}/measurements.csv")
    read = [_row(path, number, line, settings) for number, line in lines]
    for name in NEEDED:
        if read and not any(getattr(row, name) or row.not_predicted for row in read):
            raise Stop(f"no row of {path} has a value for {name}", "fill it in: no row is predicted without it")
    return read


def _row(path: Path, number: int, line: dict[str, str], settings: dict) -> Row:
    given = {name: (line.get(name) or "").strip() for name in Row.model_fields}
    try:
        return Row.model_validate({name: text or settings.get(name) for name, text in given.items()})
    except ValidationError as error:
        raise Stop(f"{path}, line {number}: {sentence(error)}", "correct the line; an unknown value is empty") from None


def read_sources(path: Path) -> dict[str, Source]:
    remedy, names = f"correct {path.name}", Source.model_fields
    form = dict[Literal["source"], tuple[Source, ...]]
    read = load(path, form, what="a file of sources", remedy=remedy, most_bytes=MAX_BYTES, links=True, known=names)
    return {source.name: source for source in read.get("source", ())}
