"""Measurements that others published: a row each, and the sources that the rows come from. Unknown values are None."""

import csv
import functools
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, Json, TypeAdapter

from study.core.arms import ROOT
from study.predict.optimizer_states import Optimizer
from study.predict.outside.loops import Logits
from study.predict.question import Precision
from study.predict.training import Frozen, Loss, Quantized, Recomputation

FOLDER = ROOT / "reports" / "outside"
KNOWN = "known"  # the set of the rows that the predictor met first
MemoryKind = Literal["allocated", "reserved", "driver"]
Quantity = Literal["memory", "time"]
Form = TypeVar("Form", bound=BaseModel)
NUMBER: TypeAdapter = TypeAdapter(bool | int)  # of a Recomputation: a CSV has words alone
Count = Annotated[int, Field(ge=1)] | None
Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Text = str | None


class Facts(BaseModel, frozen=True):
    """The columns that identify a measurement: its source says them."""

    source: str
    url_or_path: Text = None  # with the commit where there is one
    model: Text = None
    gpu: Text = None
    n_gpus: Count = None
    arm: Text = None  # as the source names it
    precision: Text = None
    seq: Count = None  # tokens of a row
    micro_batch: Count = None  # rows per GPU and pass
    grad_acc: Count = None  # passes per step
    activation_checkpointing: Text = None
    memory_GB: Measured = None  # 10^9 bytes
    tokens_per_s_per_gpu: Measured = None
    step_time_s: Measured = None
    notes: Text = None


class Row(Facts, frozen=True):
    """One published measurement. reports/outside/README.md says what the columns mean."""

    set: str = KNOWN  # or the frozen set that first saw the row, such as lora_2
    params: Measured = None
    # Our reading: the training that the row describes.
    config: Text = None  # a name in configs.json, or a built-in shape. None: the row is not predicted
    dtype: Precision | None = None
    deepspeed: Json | None = None  # zero_optimization of the DeepSpeed config
    fsdp: Literal["full_shard", "shard_grad_op"] | None = None
    fsdp_offload: bool = False
    group: int | None = None
    sequence_ranks: int = 1
    tensor_ranks: int = 1
    checkpointing: Annotated[Recomputation, BeforeValidator(NUMBER.validate_python)] = Recomputation.NONE
    attention: Literal["sdpa", "eager"] = "sdpa"
    loss: Loss = "whole"
    logits: Logits = "fp32"
    optimizer: Optimizer = "adamw"
    quantized: Quantized | None = None
    frozen: Frozen = "as_weights"
    keeps_logits: bool = False
    fused_kernels: bool = False  # of norms, activation functions and rotations
    torch_major: int = 2
    gpu_name: Text = None  # a name in GPUS
    gpus_per_node: int | None = None
    network: Text = None
    tf32: bool = False
    products_8_bits: bool = False
    kernel_s: float | None = None
    attention_kernel: Text = None
    experts: Literal["loop", "grouped"] | None = None
    timed_seq: int | None = None  # tokens of the rows that took the time, if they are padded to the longest of a pass
    kind: MemoryKind | None = None  # None: the source does not say which memory it read
    not_predicted: Text = None  # why the row is not predicted
    memory_not_predicted: Text = None
    time_not_predicted: Text = None
    adapter: Literal["lora", "rslora", "dora"] | None = None
    adapter_rank: int | None = None
    adapter_targets: Text = None
    adapter_dropout: bool = False
    seq_mean: Measured = None
    rows_are: Text = None
    parallel: Text = None

    @property
    def key(self) -> str:  # by what its source says, and not by our reading of it
        return sha256(repr([getattr(self, name) for name in Facts.model_fields]).encode()).hexdigest()[:12]

    @property
    def measured(self) -> dict[Quantity, float]:
        both: dict[Quantity, float] = {}
        if self.memory_GB:
            both["memory"] = self.memory_GB * 1e9
        if self.step_s:
            both["time"] = self.step_s
        return both

    @property
    def step_s(self) -> float | None:
        # Where rows are padded to the longest of a pass, sources count the tokens of the text.
        tokens = self.seq_mean if self.rows_are == "padded" else self.seq
        if self.step_time_s or not (self.tokens_per_s_per_gpu and self.rows_of_a_gpu and tokens):
            return self.step_time_s
        return self.rows_of_a_gpu * tokens / self.tokens_per_s_per_gpu

    @property
    def rows_of_a_gpu(self) -> float | None:
        """The rows of a step over the GPUs that work at them. None: not known, because stages divide the model."""
        divided = self.parallel and self.sequence_ranks == self.tensor_ranks == 1
        if divided or self.micro_batch is None:
            return None
        return self.micro_batch * (self.grad_acc or 1) / self.tensor_ranks


@functools.cache
def rows() -> tuple[Row, ...]:
    return tuple(read(FOLDER / "measurements.csv", Row))


def set_number(name: str) -> int:
    """The number of a set: 0 of the known rows, 1 of `lora`, 2 of `lora_2`."""
    number = name.rpartition("_")[2]
    if name == KNOWN:
        return 0
    return int(number) if number.isdigit() else 1


def read(path: Path, form: type[Form]) -> list[Form]:
    """The lines of a CSV file, each as a form whose fields are columns. Other columns are ignored."""
    with path.open(encoding="utf-8", newline="") as file:
        # An empty field is unknown. It means the default, which is None where a column has none.
        return [form(**{name: text for name, text in line.items() if text}) for line in csv.DictReader(file)]
