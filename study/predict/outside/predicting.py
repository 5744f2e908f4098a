"""Predicts what others measured: the bytes of a GPU at the peak, and the seconds of a step."""

import functools
import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import cast

from study.core import cache, files
from study.core.arms import PACKAGE
from study.core.errors import Stop, nearest
from study.core.gpus import GPUS, Gpu
from study.core.ignored_keys import OFFLOADS
from study.core.library_defaults import library_defaults
from study.core.recipes import RECIPES
from study.core.settings import cache_home
from study.core.shapes import config_of, model_of_name, models
from study.predict.architecture import check_config
from study.predict.loop import Loop
from study.predict.outside.published import FOLDER, MemoryKind, PublishedRow, Quantity
from study.predict.placement import Fsdp, Placement
from study.predict.prediction import estimate, memory_kinds, step_time
from study.predict.step_time import AttentionKernel, Hardware, Host, kind_of_interval
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Training

KERNELS: dict[str, AttentionKernel] = {"fa2": "flash2", "fa3": "flash3", "te": "cudnn"}  # by the names of the table
NEW_AT_MOST_S = 2.5e-05  # for a kernel
DECIDES = ("config", "dtype", "n_gpus", "seq", "micro_batch")  # without these nothing is predicted
# Keys of ZeRO that the engines read, and then those that change neither memory nor time by much. Another value than
# DeepSpeed's own of any other key is refused.
TAKEN = """
stage reduce_bucket_size use_multi_rank_bucket_allreduce overlap_comm device sub_group_size
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters
stage3_max_reuse_distance memory_efficient_linear pin_memory nvme_path buffer_count buffer_size
contiguous_gradients reduce_scatter allgather_partitions allgather_bucket_size round_robin_gradients
stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
load_from_fp32_weights elastic_checkpoint ignore_unused_parameters pipeline_loading_checkpoint
override_module_apply log_trace_cache_warnings enable_sanity_checks pipeline_read pipeline_write
fast_init cpuadam_cores_perc
""".split()  # noqa: SIM905  a column of 33 names is no plainer


@dataclass(frozen=True)
class Reading:
    """How we read a row."""

    training: Training
    timed: Training  # whose step took the time: padded rows have fewer tokens
    machine: Hardware | None  # None: the time cannot be predicted


def why_not(row: PublishedRow, quantity: Quantity | None = None) -> str | None:
    """Why a quantity of a row, or all of it, is not predicted; None: it is, unless the predictor refuses it."""
    own = {"memory": row.memory_not_predicted, "time": row.time_not_predicted, None: None}
    if why := row.not_predicted or own[quantity]:
        return why
    if unsaid := [name for name in DECIDES if getattr(row, name) is None]:
        return f"unsaid: {', '.join(unsaid)}"
    if row.tensor_ranks > 1:
        return "tensor parallelism is not predicted"
    if row.trained_too:
        return f"what trains beside adapters is not predicted (trained_too {row.trained_too})"
    if quantity != "time":
        return None
    if row.gpu_name is None:
        return "unsaid: gpu_name"
    zero = row.deepspeed or {}
    on_disk = "nvme" in [(zero.get(part) or {}).get("device") for part in OFFLOADS]
    return "the time depends on the disk, and no column says its speed" if on_disk else None


def reading_of(row: PublishedRow) -> Reading | None:
    """Our reading of a row; None: it is not predicted. Raise Stop for columns that contradict each other."""
    if why_not(row) or not (row.config and row.dtype and row.n_gpus and row.seq and row.micro_batch):  # mypy asks again
        return None
    model = model_of(row.config)
    _check_adapter(row)
    if row.adapter:
        model = replace(
            model,
            lora_rank=row.adapter_rank,
            lora_targets=tuple((row.adapter_targets or "").split()),
            dora=row.adapter == "dora",
            adapter_dropout=row.adapter_dropout,
        )
    _check_placement(row, row.n_gpus)
    placement = Placement(
        ranks=row.n_gpus,
        device="cuda",
        deepspeed=None if row.deepspeed is None else {"zero_optimization": row.deepspeed},
        fsdp=Fsdp(reshards=row.fsdp == "full_shard", offloads=row.fsdp_offload) if row.fsdp else None,
        group=row.group,
        sequence_ranks=row.sequence_ranks,
    )
    training = Training(
        model,
        RECIPES[row.dtype],
        Batch(row.micro_batch, row.grad_acc or 1, row.seq, row.checkpointing),
        placement,
        optimizer=row.optimizer,
        attention=row.attention,
        frozen=row.frozen,
        quantized=row.quantized,
        loss=row.loss,
        loop=Loop(
            logits=row.logits,
            fused_layers=row.fused_kernels,
            keeps_logits=row.keeps_logits,
            reentrant=row.reentrant,
            torch_major=row.torch_major,
            # Others' DDP keeps gradients beside its buckets, which is PyTorch's default; DeepSpeed has no such buckets.
            bucket_view=row.deepspeed is not None,
        ),
    )
    timed = replace(training, batch=replace(training.batch, tokens=row.timed_seq or row.seq))
    return Reading(training, timed, machine_of(row, row.n_gpus))


def machine_of(row: PublishedRow, ranks: int) -> Hardware | None:
    """The machine of a row; None: the time cannot be predicted."""
    if row.gpu_name is None or row.time_not_predicted:
        return None
    return Hardware(
        gpu=GPUS[row.gpu_name],
        gpus_per_node=min(ranks, row.gpus_per_node or ranks),
        network=row.network,
        tf32=row.tf32,
        fused_kernels=row.fused_kernels,
        products_8_bits=row.products_8_bits,
        attention=KERNELS.get(row.attention_kernel or "", "sdpa"),
        host=host_of(row),
        loops_over_experts=row.experts == "loop",
    )


def _check_adapter(row: PublishedRow) -> None:
    if row.adapter and row.adapter_rank is None:
        raise Stop(f"the rank of {row.adapter} is unsaid", "give adapter_rank")
    if row.adapter is None and (row.adapter_rank or row.adapter_targets or row.adapter_dropout):
        raise Stop("adapter_rank, adapter_targets and adapter_dropout are of adapters", "give adapter, such as lora")


def _check_placement(row: PublishedRow, ranks: int) -> None:
    if row.deepspeed is not None and row.fsdp:
        raise Stop("deepspeed and fsdp are both given", "leave one of them empty")
    if row.fsdp_offload and not row.fsdp:
        raise Stop("fsdp_offload is without fsdp", "give fsdp, or write offload_optimizer into deepspeed")
    if row.group and row.deepspeed is None and not row.fsdp:
        raise Stop("group is without deepspeed and fsdp", "give one of them")
    for name in ("group", "sequence_ranks", "gpus_per_node"):
        part = getattr(row, name) or 1
        # More than all is an error of a group, but not of a node that is larger.
        if ranks % (min(ranks, part) if name == "gpus_per_node" else part):
            raise Stop(f"{name} {part} does not divide {ranks} GPUs", "correct one of them")
    if row.parallel and row.parallel != f"sp{row.sequence_ranks}":
        raise Stop(f"parallel {row.parallel} is not predicted, but only sp", "write sp4, and 4 into sequence_ranks")
    _check_zero(row.deepspeed or {})


def _check_zero(section: dict, path: str = "zero_optimization") -> None:
    """Raise Stop for a key that would change what is predicted, and that the engines do not read."""
    usual = library_defaults("deepspeed")[path]
    for name, value in section.items():
        if name in OFFLOADS:
            _check_zero(value or {}, f"{path}.{name}")
        elif name not in TAKEN and (value or None) != (usual[name] or None):
            raise Stop(f"{path}.{name} {value!r} is not predicted", "leave the row out")


def host_of(row: PublishedRow) -> Host:
    """The class of the host: new if somebody measured a quick one; none if a compiler launches the kernels."""
    if row.kernel_s == 0:
        return "none"
    return "new" if row.kernel_s and row.kernel_s <= NEW_AT_MOST_S else "unsaid"


@functools.cache
def model_of(name: str) -> Transformer:
    """The model of a name in configs.json, of another known name, or of a config as JSON."""
    remedy = "give a name of reports/outside/configs.json, one that study estimate knows, or a config.json's content"
    if name.startswith("{"):
        try:
            config = files.from_json(name)
        except ValueError as error:
            raise Stop(f"config is no JSON ({files.why(error)})", remedy) from None
        check_config(config, "config")
        parts = [each for each in config if each.endswith("_config") and "model_type" in (config[each] or {})]
        if len(parts) > 1:
            raise Stop(f"config is of several models ({', '.join(parts)}), and which of them trains is unsaid", remedy)
        return Transformer.of(config, "a config of the row")
    configs = json.loads(
        (FOLDER / "configs.json").read_text(encoding="utf-8")
    )  # published dimensions: nothing is downloaded
    if name in configs:
        dropout = configs[name].pop("dropout", None)
        return Transformer.of(configs[name], name, dropout=dropout)
    known = model_of_name(name)
    if known is None:
        raise Stop(f"config {name!r:.80} is not known", nearest(name, [*configs, *models()], otherwise=remedy))
    return Transformer.of(config_of(known), known)


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, and the ends of their interval. None: refused."""

    ours: float | None = None
    low: float | None = None
    high: float | None = None
    limit: str | None = None  # of a step: gpu, host or links
    why: str | None = None  # it is refused


@functools.cache
def code() -> str:
    """A digest of all that decides a prediction."""
    digest = sha256()
    for path in sorted(path for room in ("predict", "core") for path in (PACKAGE / room).rglob("*.*")):
        if path.suffix in (".py", ".toml", ".json", ".zip"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def once(row: PublishedRow) -> dict[Quantity, Predicted]:
    """As `of_row`, from the cache folder if this code has predicted the row before: a scoring that ended goes on."""
    folder = cache_home().expanduser() / "scored"
    name = cache.fingerprint([code(), row.model_dump(mode="json")])
    known = cache.answer(folder, name)
    if known is None:
        known = {quantity: asdict(each) for quantity, each in of_row(row).items()}
        cache.keep(folder, name, known)
    return {quantity: Predicted(**each) for quantity, each in known.items()}


def of_row(row: PublishedRow) -> dict[Quantity, Predicted]:
    """The predictions of what a row measured, or why they are refused."""
    predicted = {}
    for quantity in row.measured:
        try:
            predicted[quantity] = _of_quantity(row, quantity)
        except Stop as stop:
            predicted[quantity] = Predicted(why=f"{stop.what}: {stop.remedy}")
    return predicted


def _of_quantity(row: PublishedRow, quantity: Quantity) -> Predicted:
    reading = reading_of(row)
    if reading is None or why_not(row, quantity):
        return Predicted(why=why_not(row, quantity))
    if quantity == "memory":
        return memory(reading.training, row.kind, GPUS.get(row.gpu_name or ""))
    step = step_time(reading.timed, cast(Hardware, reading.machine))  # why_not has looked for a machine
    return Predicted(step.seconds, step.low_s, step.high_s, kind_of_interval(step.limit))


def memory(training: Training, kind: MemoryKind | None, gpu: Gpu | None) -> Predicted:
    """The bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind == "allocated":  # the others take a replay of the allocator
        return Predicted(estimate(training).peak_bytes)
    kinds = memory_kinds(training, gpu)
    if kind:
        return Predicted(getattr(kinds, kind))
    # From what tensors take to what nvidia-smi shows.
    return Predicted(kinds.allocated, kinds.allocated, kinds.driver)
