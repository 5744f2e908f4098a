"""The training that a published row describes, by its columns and what its source says of all its rows."""

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from study.predict.architecture import named
from study.predict.library import Library
from study.predict.outside.published import FOLDER, Row
from study.predict.setup import Setup
from study.predict.step_time import Machine
from study.predict.trace.transformer import SELECTIVE, Transformer

# A pager moves nothing while states fit on the GPU. None: AdamW, whose implementation another column says.
OPTIMIZERS: dict[str | None, str | None] = {
    "adamw": None,
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": None,
}
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
    if row.config is None or row.dtype is None or (row.not_predicted and row.gpu_name):
        raise NotPredicted(row.not_predicted)
    model = model_of(row.config)
    if row.adapter:
        targets = () if row.adapter_targets == "all-linear" else tuple((row.adapter_targets or "").split())
        model = replace(model, lora_rank=row.adapter_rank, lora_targets=targets, dora=row.adapter == "dora")
        model = replace(model, adapter_dropout=bool(row.origin.adapter_dropout))
    setup = _setup(row, model)
    if row.gpu_name is None:
        return Training(row, setup, None)
    machine = Machine(
        gpu=row.gpu_name,
        gpus_per_node=min(setup.ranks, row.gpus_per_node or setup.ranks),
        network=row.network,
        tf32="TF32" in f"{row.precision} {row.libraries}" or (1, 7) <= _version(row) < (1, 12),
        fused_kernels=bool(row.fused_kernels),
        products_8_bits=row.products is not None,
        kernel_s=0.0 if row.compiled else row.host_pace and row.host_pace * MEGATRON_KERNEL_S,
    )
    return Training(row, setup, machine)


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a name in configs.json, of another known name, or of a config as JSON."""
    if name.startswith("{"):
        return Transformer.of(json.loads(name), "a config of the row")
    if name not in configs():
        return named(name)
    config = dict(configs()[name])
    dropout = config.pop("dropout", None)
    return Transformer.of(config, name, dropout=dropout)


def _setup(row: Row, model: Transformer) -> Setup:
    """Return the setup that the columns say. What they do not say is as usual."""
    same = ("fsdp", "group", "quantized", "micro_batch", "loss", "attention")
    given: dict[str, Any] = {name: getattr(row, name) for name in same}
    given |= {
        "ranks": row.n_gpus,
        "accumulation": row.grad_acc,
        "sequence": row.seq,
        "checkpointing": bool(row.recompute),
    }
    given |= {"fsdp_offload": row.offload is not None, "precision": row.dtype} | _types(row)
    given["optimizer"] = OPTIMIZERS.get(row.optimizer_name, row.optimizer_name) or row.optimizer
    if row.attention == "megatron":
        given["attention"] = "eager"
    if row.deepspeed:
        given["deepspeed"] = {"zero_optimization": json.loads(row.deepspeed)}
    if row.parallel:
        given["sequence_ranks" if row.parallel.startswith("sp") else "tensor_ranks"] = int(row.parallel[2:])
    if row.recompute_part == "ops:torchtitan":
        given["checkpointing"] = SELECTIVE
    elif row.recompute_part:  # every n-th layer
        given["checkpointing"] = int(row.recompute_part.removeprefix("layers/"))
    given = {name: value for name, value in given.items() if value is not None}
    return Setup(model=model, device="cuda", library=library_of(row), **given)


def _types(row: Row) -> dict[str, str]:
    """Return the precision, and the type of frozen weights, where adapters change them.

    PEFT keeps adapters in fp32 beside a base in bf16 (since 0.12). Its prepare_model_for_kbit_training keeps all that
    is not quantized in fp32. With 4 bits under bf16 TRL converts embeddings and head back (0.9.6 to 0.13.0,
    peft_module_casting_to_bf16). Without autocast, the values between products are as the weights.
    """
    autocast = "autocast" in (row.precision or "") or row.kernels == "unsloth"  # whose adapters compute in 16 bits
    if row.fp32_modules == "norm":
        return {"precision": "bf16", "frozen": "bf16_except_norms"}
    if row.fp32_modules:
        return {"precision": "bf16" if autocast else "fp32"}
    in_fp32 = row.adapter_dtype == "fp32" or (row.adapter_dtype is None and "peft" in row.libraries)
    if row.dtype == "bf16_pure" and in_fp32:
        return {"precision": "bf16", "frozen": "bf16" if autocast else "bf16_without_autocast"}
    return {}


def library_of(row: Row) -> Library:
    """Return what a row's libraries do otherwise than today's."""
    return Library(
        fused_layers=bool(row.fused_kernels),
        logits=row.logits or "fp32",
        keeps_logits=row.origin.keeps_logits or row.keeps_cache == "with_outputs",
        keeps_cache=bool(row.keeps_cache),
        torch_major=1 if _version(row)[:1] == (1,) else 2,
        bucket_view=row.deepspeed is not None,
    )


def _version(row: Row) -> tuple[int, ...]:
    """Return the numbers of PyTorch's release; none if it is not said."""
    found = re.search(r"\btorch (\d+(?:\.\d+)*)", row.libraries)
    return tuple(map(int, found[1].split("."))) if found else ()


def timed_setup(training: Training) -> Setup:
    """Return the setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
    row, setup = training.row, training.setup
    if row.rows_are != "padded":
        return setup
    if row.seq_mean is None:
        raise NotPredicted("rows are padded, and their mean is not said")
    # The longest row of a pass, if rows are sorted within some passes. Lengths are assumed to be exponential: of n
    # rows, the k-th longest is longer than the next one by 1/k of the mean.
    passes = row.origin.sorted_passes
    count = setup.micro_batch * passes
    firsts = range(1, count + 1, setup.micro_batch)  # of the longest rows of the passes
    over_mean = sum(1 / each for first in firsts for each in range(first, count + 1)) / passes
    return replace(setup, sequence=min(setup.sequence, round(row.seq_mean * over_mean)))
