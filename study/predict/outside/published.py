"""Measurements that others published: a row each, and the sources that the rows come from. Unknown values are None."""

import csv
import functools
import io
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from study.core import files
from study.core.arms import ROOT
from study.core.errors import nearest
from study.core.gpus import GPUS, LINKS
from study.core.ignored_keys import OFFLOADS
from study.core.library_defaults import known_libraries
from study.core.settings import MOST
from study.predict.architecture import MOST_WANTED
from study.predict.loop import Logits
from study.predict.optimizer_states import Optimizer
from study.predict.question import GPUS_AT_MOST, MOST_ROWS, Precision
from study.predict.training import Frozen, Loss, Quantized, Recomputation

FOLDER = ROOT / "reports" / "outside"
FILE = FOLDER / "measurements.csv"
KNOWN = "known"  # the set of the rows that the predictor met first
MemoryKind = Literal["allocated", "reserved", "driver"]
Quantity = Literal["memory", "time"]
Form = TypeVar("Form", bound=BaseModel)
NUMBER: TypeAdapter = TypeAdapter(bool | int)  # of a Recomputation: a CSV has words alone
MOST_BYTES = 16 * 2**20  # of a CSV file: ours has 2
Count = Annotated[int, Field(ge=1, le=MOST)] | None
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)] | None
Gpus = Annotated[int, Field(ge=1, le=GPUS_AT_MOST)]
Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Text = str | None


def one_of(known: dict, text: str | None) -> str | None:
    if text is not None and text not in known:
        begun = [name for name in known if name.lower().startswith(text.lower())]
        remedy = nearest(text, begun or known, most=3)
        raise ValueError(f"must be a name of the study's (got {text!r:.80}): {remedy}")
    return text


def zero_section(text: str | None) -> dict | None:
    """ZeRO's section of a DeepSpeed config, as DeepSpeed reads it. People also paste it with its name around it."""
    section = files.from_json(text or "null")
    if isinstance(section, dict) and [*section] == ["zero_optimization"]:
        section = section["zero_optimization"]
    if section is None:
        return None
    taken = checked("zero_optimization", section)
    return taken | {part: checked(f"zero_optimization.{part}", taken[part]) for part in OFFLOADS if taken.get(part)}


def checked(path: str, section: Any) -> dict:
    """The values of a section of a DeepSpeed config in its types."""
    if not isinstance(section, dict):
        raise ValueError(f"{path} must be a table (got {section!r:.80})")
    if "zero_optimization" in section:
        raise ValueError("must be zero_optimization alone: columns such as dtype and grad_acc say the rest of a config")
    types = known_libraries()["deepspeed"]["types"][path]
    values = {}
    for key, value in section.items():
        if key not in types:
            raise ValueError(f"{path} has no {key:.80}; {nearest(key, types)}")
        try:
            values[key] = SchemaValidator(types[key]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{path}.{key} {files.sentence(error)}") from None
    return values


class FactsOfModel(BaseModel, frozen=True):
    """The columns that identify a measurement: its source says them."""

    source: str
    url_or_path: Text = None  # with the commit where there is one
    model: Text = None
    gpu: Text = None
    n_gpus: Gpus | None = None
    arm: Text = None  # as the source names it
    precision: Text = None
    seq: Count = None  # tokens of a row
    micro_batch: Rows = None  # rows per GPU and pass
    grad_acc: Rows = None  # passes per step
    activation_checkpointing: Text = None
    memory_GB: Measured = None  # 10^9 bytes
    tokens_per_s_per_gpu: Measured = None
    step_time_s: Measured = None
    notes: Text = None


class PublishedRow(FactsOfModel, frozen=True):
    """One published measurement. reports/outside/README.md says what the columns mean."""

    set: str = KNOWN  # or the frozen set that first saw the row, such as lora_2
    params: Measured = None
    # Our reading: the training that the row describes.
    config: Text = None  # a name in configs.json, or a built-in shape. None: the row is not predicted
    dtype: Precision | None = None
    deepspeed: Annotated[dict | None, BeforeValidator(zero_section)] = None  # zero_optimization of its config
    fsdp: Literal["full_shard", "shard_grad_op"] | None = None
    fsdp_offload: bool = False
    group: Gpus | None = None
    sequence_ranks: Gpus = 1
    tensor_ranks: Gpus = 1
    checkpointing: Annotated[Recomputation, BeforeValidator(NUMBER.validate_python)] = Recomputation.NONE
    attention: Literal["sdpa", "eager"] = "sdpa"
    loss: Loss = "whole"
    logits: Logits = "fp32"
    optimizer: Optimizer = "adamw"
    quantized: Quantized | None = None
    frozen: Frozen = "as_weights"
    keeps_logits: bool = False
    reentrant: bool = False  # recomputation, outside of FSDP's units
    fused_kernels: bool = False  # of norms, activation functions and rotations
    torch_major: Annotated[int, Field(ge=1, le=2)] = 2
    gpu_name: Annotated[Text, BeforeValidator(functools.partial(one_of, GPUS))] = None
    gpus_per_node: Gpus | None = None
    network: Annotated[Text, BeforeValidator(functools.partial(one_of, LINKS))] = None
    tf32: bool = False
    products_8_bits: bool = False
    kernel_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    attention_kernel: Literal["fa2", "fa3", "sdpa", "xformers", "te", "flex", "eager"] | None = None
    experts: Literal["loop", "grouped"] | None = None
    timed_seq: Count = None  # tokens of the rows that took the time, if they are padded to the longest of a pass
    kind: MemoryKind | None = None  # None: the source does not say which memory it read
    not_predicted: Text = None  # why the row is not predicted
    memory_not_predicted: Text = None
    time_not_predicted: Text = None
    adapter: Literal["lora", "rslora", "dora"] | None = None
    adapter_rank: Annotated[int, Field(ge=1, le=MOST_WANTED["lora_rank"])] | None = None
    adapter_targets: Text = None
    adapter_dropout: bool = False
    trained_too: Text = None
    seq_mean: Measured = None
    rows_are: Literal["packed", "padded", "padded_to_seq"] | None = None
    parallel: Text = None

    @property
    def key(self) -> str:  # by what its source says, and not by our reading of it
        return sha256(repr([getattr(self, name) for name in FactsOfModel.model_fields]).encode()).hexdigest()[:12]

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
def rows() -> tuple[PublishedRow, ...]:
    return tuple(read(FILE, PublishedRow))


def set_number(name: str) -> int:
    """The number of a set: 0 of the known rows, 1 of `lora`, 2 of `lora_2`."""
    number = name.rpartition("_")[2]
    if name == KNOWN:
        return 0
    return int(number) if number.isdigit() else 1


def lines(path: Path) -> csv.DictReader:
    """The lines of a CSV file, as texts by column."""
    return csv.DictReader(io.StringIO(files.text_of(files.read(path, MOST_BYTES), "strict"), newline=""))


def filled(form: type[Form], line: dict[str, str]) -> Form:
    """A form whose fields are columns. Other columns are ignored."""
    # An empty field is unknown. It means the default, which is None where a column has none.
    return form(**{name: text for name, text in line.items() if text})


def read(path: Path, form: type[Form]) -> list[Form]:
    return [filled(form, line) for line in lines(path)]
