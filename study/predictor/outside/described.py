"""The training that a published row describes, by its columns and what its source says of all its rows."""

import functools
import json
import re
from dataclasses import dataclass, replace

from study.io import parsing as texts
from study.machine.gpus import GPUS
from study.predictor.architecture import named
from study.predictor.library import Library
from study.predictor.outside.published import FOLDER, Row
from study.predictor.setup import Optimizer, Setup
from study.predictor.step_time import Machine
from study.predictor.tracing.transformer import SELECTIVE, Transformer

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
# PEFT's prepare_model_for_kbit_training keeps all three in fp32. With 4 bits under bf16 TRL converts the last two back
# (0.9.6 to 0.13.0, peft_module_casting_to_bf16).
FP32_MODULES = ("norm embed_tokens lm_head", "norm")
MEGATRON_KERNEL_S = 5.07e-5  # of the host of vTrain's rows, fitted to them; `host_pace` is over it


class NotPredicted(Exception):
    """The reason why a row, or a quantity of it, is not predicted: a sentence without its full stop."""


@dataclass(frozen=True)
class Training:
    """A row with its setup, and its machine if that is known."""

    row: Row
    setup: Setup
    machine: Machine | None


def training_of(row: Row) -> Training:
    """Return the training of a row, or raise NotPredicted."""
    if row.not_predicted and row.gpu_name:
        raise NotPredicted(row.not_predicted)
    if row.config is None or row.dtype is None:
        raise NotPredicted(row.not_predicted or "the columns config and dtype are empty")
    if row.origin.not_modelled:
        raise NotPredicted(row.origin.not_modelled)
    if row.experts == "loop" and row.quantized:
        raise NotPredicted("experts that are linear layers in few bits, as in transformers 4, are not modelled")
    model = _adapted(row, model_of(row.config))
    setup = _setup(row, model, row.dtype)
    return Training(row, setup, _machine(row, setup.ranks))


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a name in configs.json, of another known name, or of a config as JSON."""
    if name.startswith("{"):
        try:
            return Transformer.of(texts.from_json(name), "a config of the row")
        except ValueError as error:
            raise NotPredicted(f"the column config is no JSON ({error})") from None
    if name not in configs():
        return named(name)
    config = dict(configs()[name])
    dropout = config.pop("dropout", None)
    return Transformer.of(config, name, dropout=dropout)


def _adapted(row: Row, model: Transformer) -> Transformer:
    """Return a row's model with its adapters."""
    if row.adapter is None:
        return model
    model = replace(model, lora_rank=row.adapter_rank, lora_targets=_targets(row, model))
    return replace(model, dora=row.adapter == "dora", adapter_dropout=bool(row.origin.adapter_dropout))


def _targets(row: Row, model: Transformer) -> tuple[str, ...]:
    """Return the model's names of the linear layers with adapters. Empty: all of them."""
    if row.adapter_targets in (None, "all-linear"):
        return ()
    own = {tensor.name.split(".")[-2] for tensor in model.tensors if "." in tensor.name}
    names = []
    for name in row.adapter_targets.split():
        names.append(next((each for each in (name, *NAMES.get(name, ())) if each in own), name))
    return tuple(dict.fromkeys(names))


def _setup(row: Row, model: Transformer, dtype: str) -> Setup:
    sequence = _count(row, "seq")
    learned = any(re.search("wpe|position", tensor.name) for tensor in model.tensors)  # rotary positions have no end
    given = {name: getattr(row, name) for name in ("fsdp", "group", "quantized", "attention", "optimizer", "loss")}
    given = {name: value for name, value in given.items() if value is not None}
    if name := OPTIMIZERS[row.optimizer_name or "adamw"]:
        given["optimizer"] = name
    if row.attention == "megatron":
        given["attention"] = "eager"
    return Setup(
        model=model,
        ranks=_count(row, "n_gpus"),
        sequence=min(sequence, (learned and model.positions) or sequence),
        micro_batch=_count(row, "micro_batch"),
        accumulation=1 if row.grad_acc is None else _count(row, "grad_acc"),
        checkpointing=_every(row, model),
        device="cuda",
        library=library_of(row),
        **given | _division(row) | _types(row, dtype),
    )


def _count(row: Row, name: str) -> int:
    value = getattr(row, name)
    if not isinstance(value, int):
        raise NotPredicted(f"{name} is {value!r}, no number")
    return value


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
    layers = len({tensor.block for tensor in model.tensors if tensor.block.startswith("layer.")})
    if count == 0 or layers % count:
        raise NotPredicted(f"recomputation of {count} of {layers} layers is not modelled")
    return layers // count


def _division(row: Row) -> dict:
    """Return how ranks share states, layers and rows."""
    try:
        zero = {"zero_optimization": json.loads(row.deepspeed)} if row.deepspeed else None
    except ValueError:
        raise NotPredicted(f"the column deepspeed is no JSON: {row.deepspeed:.60}") from None
    division = {"deepspeed": zero, "fsdp_offload": bool(row.fsdp and row.offload)}
    if row.parallel is None:
        return division
    shared = "sequence_ranks" if row.parallel.startswith("sp") else "tensor_ranks"
    return division | {shared: int(row.parallel[2:])}


def _types(row: Row, dtype: str) -> dict:
    """Return a setup's precision, and the type of its frozen weights.

    PEFT keeps adapters in fp32 beside a base in bf16 (since 0.12). DeepSpeed makes both bf16, with fp32 copies. Of a
    base that is prepared for training on few bits, all that is not quantized is in fp32; without autocast, so are the
    values between products.
    """
    autocast = "autocast" in (row.precision or "") or row.kernels == "unsloth"  # whose adapters compute in 16 bits
    if row.fp32_modules == "norm":
        return {"precision": "bf16", "frozen": "bf16_except_norms"}
    if row.fp32_modules:
        return {"precision": "bf16" if autocast else "fp32"}
    by_peft = row.adapter_dtype is None and "peft" in row.libraries
    if dtype != "bf16_pure" or row.deepspeed or not (row.adapter_dtype == "fp32" or by_peft):
        return {"precision": dtype}
    return {"precision": "bf16", "frozen": "bf16" if autocast else "bf16_without_autocast"}


def library_of(row: Row) -> Library:
    """Return what a row's libraries do otherwise than today's."""
    return Library(
        fused_layers=bool(row.fused_kernels),
        logits=row.logits or "fp32",
        keeps_logits=row.origin.keeps_logits or row.keeps_cache == "with_outputs",
        keeps_cache=bool(row.keeps_cache),
        torch_major=1 if _version(row, "torch")[:1] == (1,) else 2,
        bucket_view=row.deepspeed is not None,
    )


def _version(row: Row, library: str) -> tuple[int, ...]:
    """Return the numbers of a library's release; none if it is not said."""
    found = re.search(rf"\b{library} (\d+(?:\.\d+)*)", row.libraries)
    return tuple(map(int, found[1].split("."))) if found else ()


def _machine(row: Row, ranks: int) -> Machine | None:
    """Return the machine of a row."""
    if row.gpu_name is None or row.gpu_name not in GPUS:
        return None
    return Machine(
        gpu=row.gpu_name,
        gpus_per_node=min(ranks, row.gpus_per_node or ranks),
        network=row.network,
        tf32="TF32" in f"{row.precision} {row.libraries}" or (1, 7) <= _version(row, "torch") < (1, 12),
        fused_kernels=bool(row.fused_kernels),
        products_8_bits=row.products is not None,
        kernel_s=0.0 if row.compiled else row.host_pace and row.host_pace * MEGATRON_KERNEL_S,
    )


def timed_setup(training: Training) -> Setup:
    """Return the setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
    row, setup = training.row, training.setup
    if row.rows_are != "padded":
        return setup
    if row.seq_mean is None:
        raise NotPredicted("rows are padded, and their mean is not said")
    longest = row.seq_mean * longest_over_mean(setup.micro_batch, row.origin.sorted_passes)
    return replace(setup, sequence=min(setup.sequence, round(longest)))


def longest_over_mean(micro_batch: int, passes: int) -> float:
    """Return the longest row of a pass over the mean of all rows, if rows are sorted within some passes.

    Lengths are assumed to be exponential: of n rows, the k-th longest is longer than the next one by 1/k of the mean.
    """
    rows = micro_batch * passes
    ranks = range(1, rows + 1, micro_batch)  # of the longest rows of the passes
    return sum(1 / each for first in ranks for each in range(first, rows + 1)) / passes
