"""Turns a published row into a setup, or into a sentence that says why there is none.

Words are read as the sources write them, so rows of others in the same style can be read, too. If a row does not say
something, its source may say it; else the libraries' default applies and is listed as assumed.
"""

import re
from dataclasses import dataclass, replace

from study.errors import Stop
from study.machine.gpus import GPUS, gpu_named
from study.predictor.estimate import estimate
from study.predictor.outside import sources
from study.predictor.outside.models import Model, Unknown, model_of
from study.predictor.outside.rows import Row
from study.predictor.outside.sources import Says
from study.predictor.setup import Setup
from study.spec import arms

# What is not predicted here, by the words that sources use for it in an arm, a precision or a note.
NOT_MODELLED = {
    r"(?:tp|pp|cp|ep)[ =]?(?:[2-9]|1\d)": "tensor, pipeline, context or expert parallelism",
    r"tensor.parallel|pipeline.parallel|sequence.parallel|ulysses": "tensor, pipeline or sequence parallelism",
    r"float8|fp8|mxfp8": "8-bit products",
    r"deepcompile|thunder": "a compiler that schedules its own collectives",
    r"zero\+\+|hpz|qwz|mics": "ZeRO++ and MiCS",
    r"zenflow|superoffload|twin": "offloading other than ZeRO-Offload and ZeRO-Infinity",
    r"lora|peft|gptq|nf4": "adapters over frozen or quantized weights",
    r"muon|lion|lamb|adafactor|galore|sgd": "an optimizer other than Adam",
    r"optimizer in backward|fused backward": "an update during the backward pass",
}
NOT_MODELLED_IN_NOTES = {r"8-bit optim|8-bit adam|paged": "an optimizer with 8-bit or paged states"}
# Families whose loss transformers 4.45 to 4.48, which made these rows, computed in the type of the weights.
LOSS_IN_HALF = ("gpt_bigcode",)
# Families that keep their cache of keys and values in transformers 4.48 if activations are recomputed. Others switch it
# off (modeling_gpt_bigcode.py, GPTBigCodeModel.forward).
KEEPS_CACHE = ("gpt_bigcode",)
# Families for which fms-acceleration only fuses the loss: its kernels for norms and rotations are for Llama-like models
# (plugins/fused-ops-and-kernels, models/gpt_bigcode.py).
LOSS_ALONE_FUSED = ("gpt_bigcode",)
STAGE = re.compile(r"zero[- _]?(?:stage)?[- _]?([0-3])(?!\d)|stage[- _]?([0-3])")


class NoSetup(Exception):
    """Why a row gives no setup: a sentence without its full stop."""


@dataclass(frozen=True)
class Machine:
    """What a row says of its GPUs that matters for the time of a step."""

    gpu: str  # a name in GPUS
    gpus: int
    gpus_per_node: int
    fused_kernels: bool  # by torch.compile, or written by hand
    network: str | None = None  # between nodes. None: the usual one of such machines


@dataclass(frozen=True)
class Training:
    """A row as theory sees it."""

    setup: Setup
    machine: Machine | None
    no_machine: str | None  # why the machine is not known
    assumed: tuple[str, ...]  # what neither the row nor its source says, if it matters for memory and time
    assumed_of_machine: tuple[str, ...]  # the same, if it matters for time alone


def training_of(row: Row) -> Training:
    """The training that a row describes. `NoSetup` says why there is none."""
    _refuse_what_is_not_modelled(row)
    source = sources.own().get(row.source)
    says, assumed = source.says_of(row) if source else Says(where=""), []
    gpus = _gpus(row)
    if "unpacked" in (row.arm or "").lower():
        raise NoSetup("the tokens of a row are not said: rows are not packed")
    sequence, micro_batch = _needed(row.seq, "the tokens of a row"), _needed(row.micro_batch, "the micro-batch")
    try:
        model = model_of(row.model, row.params, sequence)
    except (Unknown, Stop) as reason:
        raise NoSetup(str(reason)) from None
    if model.positions and sequence > model.positions:
        assumed.append(f"rows are cut to the model's {model.positions} tokens")
        sequence = model.positions
    way = _way(row, gpus, says, assumed)
    way["group"] = _group(row, gpus, way, says, assumed)
    setup = Setup(
        model=model,
        ranks=gpus,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=_accumulation(row, assumed),
        precision=_precision(row, way, assumed),
        checkpointing=_checkpointing(row, says, assumed),
        attention=_attention(row, model, says, assumed),
        optimizer=says.optimizer or ("fused" if way.get("deepspeed") else "foreach"),
        loss=_loss(_words(row)),
        logits=says.logits or ("as_computed" if model.family in LOSS_IN_HALF else "fp32"),
        device="cuda",
        **way,
    )
    if setup.checkpointing and model.family in KEEPS_CACHE:
        setup = replace(setup, keeps_cache=True)
    if fused := says.kernels == "fused" or fused_kernels(row, model):
        assumed.append("fused kernels for norms and rotations hold what transformers' own do")
    compiled = bool(re.search(r"\bcompile|\+compile", (row.arm or "").lower()))
    of_machine: list[str] = []
    if compiled:
        assumed.append("torch.compile changes no memory")
    try:
        machine, why = _machine(row, gpus, compiled or fused, says, of_machine), None
    except NoSetup as reason:
        machine, why = None, str(reason)
    if machine and not row.memory_GB and "activations are not recomputed" in assumed:
        setup = _recomputed_if_too_large(setup, machine.gpu, assumed)
    return Training(setup, machine, why, tuple(assumed), tuple(of_machine))


def _recomputed_if_too_large(setup: Setup, gpu: str, assumed: list[str]) -> Setup:
    """If the activations would not fit, the training must have recomputed them, even if its source does not say so."""
    if estimate(setup).peak_bytes < GPUS[gpu].memory_bytes:
        return setup
    assumed.remove("activations are not recomputed")
    assumed.append("activations are recomputed: kept, they would not fit")
    return replace(setup, checkpointing=True)


def _loss(words: str) -> str:
    if re.search(r"liger|chunked", words):
        return "chunked"
    return "in_place" if "fast-kernels" in words else "whole"


def fused_kernels(row: Row, model: Model) -> bool:
    """Whether the source replaces the kernels of norms, activation functions and rotations."""
    return bool(re.search(r"fast-kernels|liger", _words(row))) and model.family not in LOSS_ALONE_FUSED


def _words(row: Row) -> str:
    return " ".join(filter(None, (row.model, row.arm, row.precision, row.notes))).lower()


def _refuse_what_is_not_modelled(row: Row) -> None:
    arm = " ".join(filter(None, (row.model, row.arm, row.precision))).lower()
    for words, patterns in ((arm, NOT_MODELLED), (_words(row), NOT_MODELLED_IN_NOTES)):
        for pattern, what in patterns.items():
            if match := re.search(pattern, words):
                raise NoSetup(f"{what} ({match[0]}) is not modelled")


def _needed(count: int | str | None, what: str) -> int:
    if count is None:
        raise NoSetup(f"{what} is not said")
    if isinstance(count, str):
        raise NoSetup(f"{what} is {count!r}, no number")
    return count


def _gpus(row: Row) -> int:
    if row.n_gpus is None and "single" in (row.arm or "").lower():
        return 1
    return _needed(row.n_gpus, "the number of GPUs")


def _accumulation(row: Row, assumed: list[str]) -> int:
    if row.grad_acc is None:
        assumed.append("one pass per step")
        return 1
    return _needed(row.grad_acc, "the number of passes")


def _way(row: Row, gpus: int, says: Says, assumed: list[str]) -> dict:
    """How the training is distributed, as fields of a setup."""
    words = (row.arm or "").lower()
    stage = STAGE.search(words)
    if "fsdp" in words or "hsdp" in words:
        if "offload" in words:
            raise NoSetup("FSDP with offloading is not modelled")
        return {"fsdp": "shard_grad_op" if re.search(r"grad_op|zero-?2", words) else "full_shard"}
    if stage or "distributed optimizer" in words:
        number = int(stage[1] or stage[2]) if stage else 1
        if number == 0:
            return {}
        if "distributed optimizer" not in words and says.zero is None:
            assumed.append("DeepSpeed's default bucket sizes")
        return {"deepspeed": _deepspeed(number, words, says.zero or {})}
    if "offload" in words:
        raise NoSetup(f"the stage is not said ({row.arm})")
    if re.search(r"ddp|data parallel|\bdp\d+", words) or (gpus == 1 and re.search(r"single|one gpu|baseline", words)):
        return {}
    raise NoSetup(f"how the training is distributed is not known ({row.arm})" if words else "the arm is not said")


def _group(row: Row, gpus: int, way: dict, says: Says, assumed: list[str]) -> int | None:
    """Size of the groups that hybrid sharding shards within: a node, if the row does not say it. None: no hybrid."""
    words = (row.arm or "").lower()
    if not re.search(r"hsdp|hybrid", words):
        return None
    if way.get("deepspeed", {}).get("zero_optimization", {}).get("stage", 1) != 1:
        raise NoSetup(f"sharding within groups of ranks ({row.arm}) is not modelled")
    if said := re.search(r"of (\d+) gpus", words):
        return int(said[1])
    if says.gpus_per_node is None:
        assumed.append("weights are sharded within nodes of 8 GPUs")
    return min(gpus, says.gpus_per_node or 8)


def _deepspeed(stage: int, words: str, known: dict) -> dict:
    """The DeepSpeed config of a stage: the known settings, and DeepSpeed's defaults for the rest."""
    zero = arms.load_arm(f"zero{stage}_default").deepspeed["zero_optimization"] | known
    if "offload" not in words:
        return {"zero_optimization": zero}
    device = "nvme" if "nvme" in words else "cpu"
    offloaded = words.split("offload", 1)[1]
    parts = [part for part in ("optimizer", "param") if part in offloaded] or ["optimizer"]
    if stage < 3 and ("param" in parts or device == "nvme"):
        raise NoSetup(f"stage {stage} offloads no more than optimizer states to the host")
    return {"zero_optimization": zero | {f"offload_{part}": {"device": device} for part in parts}}


def _precision(row: Row, way: dict, assumed: list[str]) -> str:
    words = (row.precision or "").lower()
    if not words:
        raise NoSetup("the precision is not said")
    if re.search(r"int8|8-bit|4-bit|int4", words):
        raise NoSetup(f"the precision {row.precision} is not modelled")
    if "not stated" in words:
        assumed.append(f"precision: {row.precision}")
    if "pure bf16" in words or "bf16 master" in (row.arm or "").lower():
        return "bf16_pure"
    half = "bf16" if re.search(r"bf16|bfloat16", words) else "fp16" if re.search(r"fp16|float16|half", words) else None
    if half is None:
        if not re.search(r"fp32|float32|tf32", words):
            raise NoSetup(f"the precision {row.precision} is not known")
        return "fp32"
    # Megatron and DeepSpeed keep 16-bit weights and fp32 masters. bf16 and fp16 need the same bytes and time.
    if way.get("deepspeed") or re.search(r"megatron|zero-?0|fp32 master", f"{row.arm} {words}".lower()):
        return "bf16_cast"
    if not re.search(r"autocast|amp|/|fp32", words):
        assumed.append(f"{half} is autocast over fp32 weights")
    return half


def _checkpointing(row: Row, says: Says, assumed: list[str]) -> bool:
    words = (row.activation_checkpointing or "").lower()
    if "not stated" in words or not words:
        if says.checkpointing is None:
            assumed.append("activations are not recomputed")
        words = says.checkpointing or "none"
    if "offload" in words or "offload" in (row.arm or "").lower().split("activation", 1)[1:]:
        raise NoSetup("offloaded activations are not modelled")
    if re.match(r"full|true|yes|on\b", words):
        return True
    if re.match(r"no|false|off\b", words):
        return False
    raise NoSetup(f"recomputation of selected activations ({row.activation_checkpointing}) is not modelled")


def _attention(row: Row, model: Model, says: Says, assumed: list[str]) -> str:
    words = _words(row)
    if not model.has_fused_attention or "eager" in words:
        return "eager"
    if re.search(r"flash|sdpa|fused attention", words):
        return "sdpa"
    if says.attention is None:
        assumed.append("attention is fused")
    return says.attention or "sdpa"


def _machine(row: Row, gpus: int, fused: bool, says: Says, assumed: list[str]) -> Machine:
    text = re.sub(r"\(.*?\)", "", row.gpu or "").strip()
    name = _gpu(text, assumed)
    said = re.search(r"(\d+) (?:on|in|per) (?:one|a|each)? ?node", f"{row.gpu} {row.notes}")
    per_node = int(said[1]) if said else says.gpus_per_node
    if per_node is None:
        per_node = next(count for count in range(GPUS[name].per_node, 0, -1) if gpus % count == 0)
        if gpus > per_node:
            assumed.append(f"{per_node} GPUs in a node, and between nodes {GPUS[name].network}")
    return Machine(name, gpus, min(gpus, per_node), fused, says.network)


def _gpu(text: str, assumed: list[str]) -> str:
    if not text or "not stated" in text:
        raise NoSetup("the GPU is not said")
    try:
        name = gpu_named(text)
        # Several GPUs that differ in memory and bandwidth may share the name.
        several = sum(known.startswith(f"{text}-") for known in GPUS) > 1
    except Stop:
        try:
            name, several = gpu_named(re.split(r"[-_ ]", text)[0]), True
        except Stop:
            raise NoSetup(f"the GPU {text} is not known") from None
    if several:
        assumed.append(f"{text} is as {GPUS[name].name}")
    return name
