"""The training that a published row describes, what we predict of it, and how far that is from the measurement."""

import functools
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256

from study.errors import Stop
from study.io import parsing as texts
from study.machine.gpus import GPUS
from study.predictor.architecture import named
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.published import FOLDER, Quantity, Role, Row, rows, sources
from study.predictor.parallel.layout import FORM, Layout, layers_of
from study.predictor.setup import Optimizer, Setup
from study.predictor.timing.steptime import Machine, step_time
from study.predictor.tracing.transformer import SELECTIVE, Transformer
from study.spec.shapes import config_of

FLAT = "flat 40 % MFU"
FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
OFF_BY = {"memory": 0.1, "time": 0.3}  # a prediction that is off by more has missed, and needs an explanation
# The optimizers of a row, as a setup's. None: AdamW, whose implementation another column says. While states fit on the
# GPU, a pager moves nothing.
OPTIMIZERS: dict[str, Optimizer | None] = {
    "adamw": None,
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": None,
    "sgd": "sgd",
    "adafactor": "adafactor",
    "muon": "muon",
}
# Other models' names of the linear layers that Llama calls so. Some join query, key and value, or gate and up.
NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj",)),
    "o_proj": ("out_proj", "dense", "c_proj"),
    "fc1": ("dense_h_to_4h", "c_fc"),
    "fc2": ("dense_4h_to_h", "c_proj"),
}
ALIKE = ("fsdp", "group", "quantized", "attention", "optimizer", "loss", "logits", "keeps_cache")  # as a setup's
MANY_ROWS = 100  # fewer are predicted in one process
ROWS_AT_ONCE = 10
MOST_PROCESSES = 8  # each has traces of its own in memory
# PEFT's prepare_model_for_kbit_training keeps all three in fp32. With 4 bits under bf16 TRL converts the last two back
# (0.9.6 to 0.13.0, peft_module_casting_to_bf16).
FP32_MODULES = ("norm embed_tokens lm_head", "norm")
NOTHING = "neither memory nor time was published"


class NotPredicted(Exception):
    """The reason why a row, or a quantity of it, is not predicted: a sentence without its full stop."""


@dataclass(frozen=True)
class Training:
    """A row with its setup, and its machine if that is known."""

    row: Row
    setup: Setup
    machine: Machine | None


@dataclass(frozen=True)
class Compared:
    """One number of a row, predicted and measured: bytes, or seconds of a step."""

    quantity: Quantity
    predicted: float
    measured: float
    interval: tuple[float, float] | None = None
    others: dict[str, float] = field(default_factory=dict)  # the predictions of simpler methods

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def off(self) -> float:
        return abs(self.error)

    @property
    def missed(self) -> bool:
        return self.off > OFF_BY[self.quantity]

    @property
    def inside(self) -> bool | None:
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


@dataclass(frozen=True)
class ComparedRow:
    """A row with its quantities. `reason` says why a measured quantity has no prediction."""

    row: Row
    quantities: tuple[Compared, ...]
    reason: str | None

    @property
    def complete(self) -> bool:
        """Return whether nothing was assumed."""
        return not self.row.assumptions

    def why_off(self, compared: Compared) -> str | None:
        """Return why a prediction missed, if that is known."""
        source = sources().get(self.row.source)
        return source.why_off(self.row, compared.quantity) if source and compared.missed else None

    def as_json(self) -> dict:
        row = self.row.model_dump(exclude={"memory_GB", "mfu", "assumed", "not_predicted"}, exclude_none=True)
        ours = {"key": key_of(self.row), "role": self.row.role, "assumed": self.row.assumptions, "reason": self.reason}
        return row | ours | {"quantities": [asdict(compared) for compared in self.quantities]}


def key_of(row: Row) -> str:
    """Return the identity of a row: it changes whenever the row changes."""
    return sha256(row.model_dump_json(exclude_none=True).encode()).hexdigest()[:12]


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a name in configs.json, of another known name, or of a config as JSON.

    A GPT-2 in configs.json lists what differs from GPT-2.
    """
    if name.startswith("{"):
        return Transformer.of(_config_of_text(name), "a config of the row")
    if name not in configs():
        return named(name)
    config = configs()[name]
    if config["model_type"] == "gpt2":
        config = config_of("gpt2") | config
        dropout = config.pop("dropout", None)
        return Transformer.of(config, name, dropout=dropout)
    return Transformer.of(config, name)


def _config_of_text(text: str) -> dict:
    try:
        return texts.from_json(text)
    except ValueError as error:
        raise NotPredicted(f"the column config is no JSON ({error})") from None


def training_of(row: Row) -> Training:
    """Return the training of a row, or raise NotPredicted."""
    if row.config is None or row.dtype is None:
        raise NotPredicted(row.not_predicted or "the columns config and dtype are empty")
    source = sources().get(row.source)
    litgpt = bool(source and source.litgpt)
    model = model_of(row.config)
    model = _adapted(row, _untied(model) if litgpt else model)
    _refuse_unknown(row)
    setup = replace(_setup(row, model, row.dtype), litgpt=litgpt)
    gpu = row.gpu_name if row.gpu_name in GPUS else None
    return Training(row, setup, _machine(row, gpu, setup.ranks) if gpu else None)


def _setup(row: Row, model: Transformer, dtype: str) -> Setup:
    sequence = _count(row, "seq")
    given = {name: getattr(row, name) for name in ALIKE if getattr(row, name) is not None}
    if name := OPTIMIZERS[row.optimizer_name or "adamw"]:
        given["optimizer"] = name
    if row.attention == "megatron":
        given |= {"attention": "eager", "one_row_as_two": True}
    return Setup(
        model=model,
        ranks=_count(row, "n_gpus"),
        sequence=min(sequence, _most_tokens(model) or sequence),
        micro_batch=_count(row, "micro_batch"),
        accumulation=1 if row.grad_acc is None else _count(row, "grad_acc"),
        checkpointing=_every(row, model),
        recomputes_whole_layers=row.recompute == "whole",
        experts_loop=row.experts == "loop",
        bucket_view=row.deepspeed is not None,
        torch_major=1 if re.search(r"torch 1\b", row.versions or "") else 2,
        old_bitsandbytes=_has_old_bitsandbytes(row),
        fused_layers=bool(row.fused_kernels),
        device="cuda",
        **given | _division(row) | _types(row, dtype),
    )


def _division(row: Row) -> dict:
    """Return how ranks share states, layers and rows."""
    zero = {"zero_optimization": json.loads(row.deepspeed)} if row.deepspeed else None
    division = {"deepspeed": zero, "fsdp_offload": bool(row.fsdp and row.offload)}
    division |= {"fsdp_ends": row.fsdp_units == "layers_and_ends", "keeps_inputs": _keeps_inputs(row)}
    words = row.parallel or ""
    if words.startswith("sp"):
        return division | {"sequence_ranks": int(words[2:])}
    if row.fsdp and words:
        return division | {"tensor_ranks": int(words[2:])}
    by_nanotron = "nanotron" in (row.versions or "")
    return division | {"layout": replace(Layout.of_words(words), by_nanotron=by_nanotron) if words else None}


def _keeps_inputs(row: Row) -> bool:
    """Return whether FSDP1 keeps inputs of frozen layers: until transformers 4.51, checkpointing is around units."""
    version = re.search(r"transformers (\d+)\.(\d+)", row.versions or "")
    around = version is not None and (int(version[1]), int(version[2])) < (4, 52)
    return around and row.fsdp_version == 1 and row.recompute == "whole"


def _types(row: Row, dtype: str) -> dict:
    """Return a setup's precision, and the type of its frozen weights.

    PEFT keeps adapters in fp32 beside a base in bf16 (since 0.12). DeepSpeed makes both bf16, with fp32 copies. Of a
    base that is prepared for training on few bits, all that is not quantized is in fp32.
    """
    if row.fp32_modules:
        return {"precision": "bf16", "frozen": "bf16_except_norms" if row.fp32_modules == "norm" else "as_weights"}
    by_peft = row.adapter_dtype is None and "peft" in (row.versions or "")
    if dtype != "bf16_pure" or row.deepspeed or not (row.adapter_dtype == "fp32" or by_peft):
        return {"precision": dtype}
    autocast = "autocast" in (row.precision or "")
    return {"precision": "bf16", "frozen": "bf16" if autocast else "bf16_without_autocast"}


def _has_old_bitsandbytes(row: Row) -> bool:
    """Return whether the row's bitsandbytes keeps the inputs of its products (`autograd/_functions.py`).

    The first releases that do not are 0.43.2 for 4 bits and 0.45.0 for 8 bits.
    """
    source = sources().get(row.source)
    version = re.search(r"bitsandbytes (\d+)\.(\d+)\.(\d+)", row.versions or (source.versions if source else ""))
    since = (0, 45, 0) if row.quantized == "int8" else (0, 43, 2)
    return version is not None and tuple(map(int, version.groups())) < since


def _machine(row: Row, gpu: str, ranks: int) -> Machine:
    """Return the machine of a row. The host's pace is 0 for compiled models, and None if it is not known."""
    source = sources().get(row.source)
    known_pace = source.host_pace_of(row) if source else None
    return Machine(
        gpu=gpu,
        gpus_per_node=min(ranks, row.gpus_per_node or ranks),
        network=row.network,
        fused_kernels=bool(row.fused_kernels),
        attention_kernel=_attention_kernel(row),
        casts=_casts(row),
        host_pace=0.0 if row.compiled else known_pace,
    )


def _casts(row: Row) -> str | None:
    """Return how factors become 8 bits: torchao's recipe, or Transformer Engine's way where nothing is compiled."""
    if row.products != "float8":
        return row.products
    if recipe := re.search("rowwise_with_gw_hp|rowwise", f"{row.arm} {row.precision}"):
        return recipe[0]
    return "tensorwise" if row.compiled or "torchao" in (row.versions or "") else "te"


def _refuse_unknown(row: Row) -> None:
    """Refuse the conditions of a row that no prediction takes into account."""
    known = {"recompute_part": r"layers[/=]\d+|ops:torchtitan", "experts": "grouped|loop", "products": "float8|mxfp8"}
    known |= {"optimizer_name": "|".join(OPTIMIZERS), "trained_too": "", "fp32_modules": "|".join(FP32_MODULES)}
    known |= {"offload": "params optimizer" if row.fsdp else "", "adapter": "lora|rslora|dora"}
    known |= {"parallel": r"tp\d+" if row.fsdp else rf"sp\d+|{FORM}"}
    for name, words in known.items():
        if not re.fullmatch(words, value := getattr(row, name) or "") and value:
            raise NotPredicted(f"{name} {value} is not modelled")
    if row.seq_mean and row.rows_are is None:
        raise NotPredicted("rows vary, and rows_are does not say how they are put together")


def _untied(model: Transformer) -> Transformer:
    """Return a model whose head is a tensor of its own, as it always is in litgpt."""
    return Transformer.of(model.dimensions | {"tie_word_embeddings": False}, model.name)


def _adapted(row: Row, model: Transformer) -> Transformer:
    """Return a row's model, with its adapters."""
    if row.adapter is None:
        return model
    targets = (row.adapter_targets or "all-linear").split()
    own = {tensor.name.split(".")[-2] for tensor in model.tensors if "." in tensor.name}
    named = [next((each for each in (name, *NAMES.get(name, ())) if each in own), name) for name in targets]
    chosen = () if targets == ["all-linear"] else tuple(dict.fromkeys(named))
    drops = bool(row.drops)
    rank = row.adapter_rank
    return replace(model, lora_rank=rank, lora_targets=chosen, dora=row.adapter == "dora", adapter_dropout=drops)


def _every(row: Row, model: Transformer) -> int:
    """Return which layers are computed again: none, all, every n-th, or the cheap operators of all.

    A number of layers is spread evenly, because which of them are meant hardly matters.
    """
    if row.recompute_part is None:
        return bool(row.recompute)
    if row.recompute_part == "ops:torchtitan":
        return SELECTIVE
    count = int(re.split("[/=]", row.recompute_part)[1])
    if "/" in row.recompute_part:
        return count
    layers = layers_of(model)
    if count == 0 or layers % count:
        raise NotPredicted(f"recomputation of {count} of {layers} layers is not modelled")
    return layers // count


def _most_tokens(model: Transformer) -> int | None:
    """Return the most tokens of a row, if positions are learned. Rotary ones have no end."""
    learned = any(re.search("wpe|position", tensor.name) for tensor in model.tensors)
    return model.positions if learned else None


def _attention_kernel(row: Row) -> str | None:
    """Return the kernel's name in pace.toml. PyTorch has FlashAttention-2 since 2.2, and FSDP2 since 2.4."""
    if row.attention_kernel in ("fa2", "fa3", "te"):
        return row.attention_kernel
    version = re.search(r"torch (\d+)\.(\d+)", row.versions or "")
    is_new = row.fsdp_version == 2 or (version is not None and (int(version[1]), int(version[2])) >= (2, 2))
    return "fa2" if is_new and (row.attention_kernel or row.attention) == "sdpa" else None


def _timed(training: Training) -> Setup:
    """Return the setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
    row, setup = training.row, training.setup
    if row.rows_are != "padded":
        return setup
    if row.seq_mean is None:
        raise NotPredicted("rows are padded, and their mean is not said")
    source = sources().get(row.source)
    longest = row.seq_mean * longest_over_mean(setup.micro_batch, source.sorted_passes if source else 1)
    return replace(setup, sequence=min(setup.sequence, round(longest)))


def longest_over_mean(micro_batch: int, passes: int) -> float:
    """Return the longest row of a pass over the mean of all rows, if rows are sorted within some passes.

    Lengths are assumed to be exponential: of n rows, the k-th longest is longer than the next one by 1/k of the mean.
    """
    rows = micro_batch * passes
    ranks = range(1, rows + 1, micro_batch)  # of the longest rows of the passes
    return sum(1 / each for first in ranks for each in range(first, rows + 1)) / passes


def _count(row: Row, name: str) -> int:
    value = getattr(row, name)
    if not isinstance(value, int):
        raise NotPredicted(f"{name} is {value!r}, no number")
    return value


def timed(role: Role) -> list[tuple[Training, Machine]]:
    """Return the rows of a role that have a step time and can be predicted."""
    measured = [training_of(row) for row in rows() if row.role == role and row.step_s is not None and row.config]
    return [(training, training.machine) for training in measured if training.machine]


def compare_all(members: Sequence[Row]) -> list[ComparedRow]:
    """Predict rows, in several processes if they are many. Neighbours are often of one model, and share its traces."""
    if len(members) < MANY_ROWS or "torch" in sys.modules:  # whose threads a fork would lack
        return [*map(compare, members)]
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        return [*pool.map(compare, members, chunksize=ROWS_AT_ONCE)]


def compare(row: Row) -> ComparedRow:
    """Predict the quantities of a row."""
    if row.memory_bytes is None and row.step_s is None:
        return ComparedRow(row, (), NOTHING)
    try:
        training = training_of(row)
    except (NotPredicted, Stop) as reason:
        return ComparedRow(row, (), str(reason))
    compared: list[Compared] = []
    reasons = []
    for quantity, predict in (("memory", _memory), ("time", _time)):
        try:
            compared += predict(training)
        except (NotPredicted, Stop) as reason:
            reasons.append(f"{quantity}: {reason}")
    return ComparedRow(row, tuple(compared), "; ".join(reasons) or None)


def _memory(training: Training) -> list[Compared]:
    """Compare the bytes that a GPU holds at the peak. A row without a kind: allocated, up to the driver's."""
    row = training.row
    if row.memory_bytes is None:
        return []
    if row.products and "torchao" not in (row.versions or ""):  # torchao keeps what 16-bit products keep
        raise NotPredicted("what is kept of 8-bit products depends on the library")
    if training.setup.fsdp and training.setup.tensor_ranks > 1:
        raise NotPredicted("what ranks hold that also divide layers is not known for FSDP")
    measured = _short(row.memory_bytes)
    if row.kind == "allocated":
        return [Compared("memory", _short(estimate(training.setup).peak_bytes), measured)]
    gpu = training.machine.gpu if training.machine else None
    kinds = memory_kinds(training.setup, gpu)
    predicted = getattr(kinds, row.kind or "allocated")
    if predicted is None:
        raise NotPredicted(f"{row.kind} memory is not known for ranks that divide a model")
    interval = None
    if row.kind is None and (most := kinds.driver or (gpu and GPUS[gpu].memory_bytes)):
        interval = (_short(kinds.allocated), _short(most))  # the source may have read any of the three
    return [Compared("memory", _short(predicted), measured, interval)]


def _time(training: Training) -> list[Compared]:
    """Compare the seconds of a step."""
    row = training.row
    if row.step_s is None:
        return []
    setup = _timed(training)
    if training.machine is None:
        raise NotPredicted(row.not_predicted or f"the GPU {row.gpu_name or row.gpu} is not known")
    if row.deterministic:
        raise NotPredicted("how much slower deterministic algorithms are is not known")
    step = step_time(setup, training.machine)
    gpu = GPUS[training.machine.gpu]
    peak = gpu.single_flops_per_s if setup.precision == "fp32" else gpu.half_flops_per_s
    together = setup.layout.ranks if setup.layout else setup.sequence_ranks  # GPUs that have the same rows
    flops = setup.model.flops_per_row(setup.sequence) * setup.micro_batch * setup.accumulation / together
    others = {FLAT: _short(flops / (FLAT_MFU * peak))}
    interval = (_short(step.low_s), _short(step.high_s))
    return [Compared("time", _short(step.seconds), _short(row.step_s), interval, others)]


def _short(value: float) -> float:
    """Return six significant digits, so that the file of predictions stays small."""
    return float(f"{value:.6g}")
