"""Finds the effective settings of a config or a record, with the same names for all kinds of files.

Defaults are those of DeepSpeed 0.19.8, Accelerate 1.15.0 and Transformers 5.23.0. Settings that a file leaves to the
script are not included.
"""

from dataclasses import dataclass
from typing import Any

from study.records.schema import Record
from study.watcher.sources import ACCELERATE, DEEPSPEED, RECORD, TRAINER, Source

AUTO, DEFAULT = "auto", "DeepSpeed's default"
CLIPS = "not written: DeepSpeed's default is 1.0 since June 2026 (PR 8068), and was 0"
ZERO = {  # keys of zero_optimization with DeepSpeed's defaults
    "stage": 0,
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "round_robin_gradients": False,
    "contiguous_gradients": True,
    "use_multi_rank_bucket_allreduce": True,
}
STAGE_3 = "stage3_"
CAST, AUTOCAST = "cast to", "autocast to"


@dataclass(frozen=True)
class Said:
    """A value, and its origin if it is not written in the file."""

    value: Any
    why: str = ""


Settings = dict[str, Said]


def settings(source: Source) -> Settings:
    """The effective settings, by our names."""
    if source.kind == RECORD:
        values = _of_record(source.record)
    elif source.kind == DEEPSPEED:
        values = _of_deepspeed(source.content)
    elif source.kind == ACCELERATE:
        values = _of_accelerate(source)
    else:  # files of other programs often use the Trainer's names
        values = _of_trainer(source)
    return {name: said for name, said in values.items() if said.value is not None}


def _written(content: dict, names: dict[str, str]) -> Settings:
    """The values in the content, under our names. "auto" and null count as absent."""
    return {name: Said(content[key]) for key, name in names.items() if content.get(key) not in (None, AUTO, "None")}


def _part(content: dict, name: str) -> dict:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _of_deepspeed(config: dict) -> Settings:
    zero = of_zero(config)
    values = {"engine": Said("DeepSpeed"), "clipping": Said(1.0, CLIPS)}
    for name, default in ZERO.items():
        why = "from the hidden size" if zero.get(name) == AUTO else ""
        values[name] = Said(zero[name], why) if name in zero else Said(default, DEFAULT)
    stage = values["stage"].value if "stage" in values else None
    if stage != 3:
        values = {name: said for name, said in values.items() if not name.startswith(STAGE_3)}
    overlap = zero.get("overlap_comm")
    values["overlap_comm"] = Said(stage == 3, DEFAULT) if overlap is None else Said(overlap)
    for part in ("offload_optimizer", "offload_param"):
        section = _part(zero, part)
        device = section.get("device", "cpu" if zero.get(part) is not None else "none")
        why = "stages 1 and 2 take nvme for cpu" if device == "nvme" and stage != 3 else ""
        values[part] = Said("cpu" if why else device, why)
    values |= _written(
        config,
        {
            "gradient_clipping": "clipping",
            "gradient_accumulation_steps": "accumulation",
            "train_micro_batch_size_per_gpu": "rows per pass and rank",
            "train_batch_size": "rows per step",
            "communication_data_type": "dtype of reduced gradients",
            "prescale_gradients": "prescale_gradients",
            "seed": "seed",
            "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
        },
    )
    if config.get("gradient_clipping") == AUTO:
        values["clipping"] = Said(1.0, "auto: Accelerate fills in 1.0, the Trainer its max_grad_norm")
    return values | _deepspeed_precision(config) | _deepspeed_optimizer(config)


def of_zero(config: dict) -> dict:
    """The section `zero_optimization`, with what DeepSpeed makes of its older forms: true, "3", cpu_offload."""
    if config.get("zero_optimization") is True:
        return {"stage": 1}
    zero = dict(_part(config, "zero_optimization"))
    if str(zero.get("stage")) in ("0", "1", "2", "3"):
        zero["stage"] = int(zero["stage"])
    for part, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        if zero.get(old) is True:
            zero[part] = {"device": "cpu"}
    return zero


def _deepspeed_precision(config: dict) -> Settings:
    autocast, values = _part(config, "torch_autocast"), {"precision": Said("fp32", "no section switches another on")}
    if autocast.get("enabled") is True:
        values["precision"] = Said(f"{AUTOCAST} {autocast.get('dtype', 'bfloat16')}")
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        section = _part(config, name)
        if section.get("enabled") is True:
            values["precision"] = Said(f"{CAST} {dtype}", "DeepSpeed casts the weights")
        elif section.get("enabled") == AUTO and values["precision"].value == "fp32":
            values["precision"] = Said(None)
    fp16 = _part(config, "fp16")
    if fp16.get("enabled") is True:
        scale = fp16.get("loss_scale", 0)
        first, window = fp16.get("initial_scale_power", 16), fp16.get("loss_scale_window", 1000)
        fixed = f"fixed at {scale}" if scale else f"from 2^{first}, doubled after {window} steps"
        values["loss scale"] = Said(fixed)
    return values | {
        "dtype of accumulated gradients": Said(_part(config, "data_types").get("grad_accum_dtype")),
    }


def _deepspeed_optimizer(config: dict) -> Settings:
    section, scheduler = _part(config, "optimizer"), _part(config, "scheduler")
    values, params = {}, _part(section, "params")
    if kind := section.get("type"):
        adamw = params.get("adam_w_mode", True)
        is_adam = str(kind).lower() == "adam"
        named = f"{kind} ({'decoupled decay: AdamW' if adamw else 'L2 decay'})" if is_adam else kind
        values["optimizer"] = Said(named, "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if is_adam else "")
    values |= _written(params, {"lr": "learning rate", "betas": "betas", "eps": "eps", "weight_decay": "weight decay"})
    if kind := scheduler.get("type"):
        values["schedule"] = Said(kind)
        inner = _part(scheduler, "params")
        values |= _written(inner, {"warmup_num_steps": "warm-up steps", "total_num_steps": "steps"})
    return values


def _of_accelerate(source: Source) -> Settings:
    config, section = source.content, _part(source.content, "deepspeed_config")
    kind = config.get("distributed_type")
    kind = "NO" if kind is False else str(kind or "NO")  # yaml reads an unquoted NO as false
    ranks = config.get("num_processes")
    names = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}
    values = {}
    precision = str(config.get("mixed_precision") or "no")
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
    if kind == "DEEPSPEED" and source.named:
        values = _of_deepspeed(source.named.content)
    elif kind == "DEEPSPEED":
        values = _of_deepspeed(of_yaml(section))
        clipping = section.get("gradient_clipping")
        if clipping == 0:
            values["clipping"] = Said(1.0, "the yaml says 0: Accelerate drops it, and DeepSpeed's default is 1.0")
        elif clipping is None and not source.unread:
            values["clipping"] = Said(1.0, CLIPS)
        if source.unread:
            values = {"engine": values["engine"]}
    if precision != "no" and values.get("precision", Said(None)).value in (None, "fp32"):
        values["precision"] = Said(f"{CAST if kind == 'DEEPSPEED' else AUTOCAST} {half}")
    elif kind != "DEEPSPEED":
        values["precision"] = Said("fp32", "as the model was loaded")
    values["engine"] = Said(names.get(kind, kind))
    values |= _written({"ranks": ranks}, {"ranks": "ranks"})
    if "gradient_accumulation_steps" in config and kind != "DEEPSPEED":
        values |= _written(config, {"gradient_accumulation_steps": "accumulation"})
    fsdp = _fsdp(_part(config, "fsdp_config"), precision) if kind == "FSDP" else {}
    return values | fsdp | _compiled(config)


def of_yaml(section: dict) -> dict:
    """The DeepSpeed config that Accelerate makes of the keys in its yaml."""
    zero: dict = {"stage": section.get("zero_stage", 2)}
    for part in ("offload_optimizer", "offload_param"):
        if (device := section.get(f"{part}_device")) not in (None, "none"):
            zero[part] = {"device": device}
    config = {"zero_optimization": zero}
    for name in ("gradient_clipping", "gradient_accumulation_steps"):
        if section.get(name) is not None:
            config[name] = section[name]
    return config


def _fsdp(section: dict, precision: str) -> Settings:
    names = {
        "fsdp_version": "fsdp_version",
        "fsdp_sharding_strategy": "sharding",
        "fsdp_reshard_after_forward": "sharding",
        "fsdp_offload_params": "offload_param",
        "fsdp_activation_checkpointing": "checkpointing",
        "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    }
    values = _written(section, names)
    for name, words in (("sharding", ("SHARD_GRAD_OP", "FULL_SHARD")), ("offload_param", ("none", "cpu"))):
        if name in values and type(values[name].value) is bool:
            values[name] = Said(words[values[name].value])
    if section and precision != "no":
        values["weights"] = Said("float32", "FSDP's mixed precision upcasts what is trained")
    return values


def _compiled(config: dict) -> Settings:
    dynamo = _part(config, "dynamo_config").get("dynamo_backend")
    return {"compiled": Said(str(dynamo).upper() != "NO")} if dynamo else {}


def _of_trainer(source: Source) -> Settings:
    arguments = source.content
    is_trainer = source.kind == TRAINER
    values: Settings = {}
    if source.named:
        values = _of_deepspeed(source.named.content)
        if source.named.content.get("gradient_clipping") == AUTO:
            values["clipping"] = Said(arguments.get("max_grad_norm", 1.0), "max_grad_norm, as the json says auto")
    elif is_trainer and not arguments.get("deepspeed"):
        values["clipping"] = Said(1.0, "the Trainer's default")
        values |= _written(arguments, {"max_grad_norm": "clipping"})
        values["engine"] = Said("FSDP" if arguments.get("fsdp") else "DDP, or one process")
    half = "bfloat16" if arguments.get("bf16") is True else "float16" if arguments.get("fp16") is True else None
    if half and values.get("precision", Said(None)).value in (None, "fp32"):
        deepspeed = bool(source.named or arguments.get("deepspeed"))
        values["precision"] = Said(f"{CAST if deepspeed else AUTOCAST} {half}")
    elif is_trainer and "precision" not in values:
        values["precision"] = Said("fp32", "the Trainer's default")
    names = {
        "per_device_train_batch_size": "rows per pass and rank",
        "gradient_accumulation_steps": "accumulation",
        "learning_rate": "learning rate",
        "weight_decay": "weight decay",
        "adam_epsilon": "eps",
        "optim": "optimizer",
        "lr_scheduler_type": "schedule",
        "warmup_steps": "warm-up steps",
        "warmup_ratio": "warm-up ratio",
        "seed": "seed",
        "data_seed": "seed of the data",
        "gradient_checkpointing": "checkpointing",
        "torch_compile": "compiled",
        "tf32": "TF32",
        "neftune_noise_alpha": "noise on embeddings",
        "use_liger_kernel": "fused kernels (Liger)",
        "label_smoothing_factor": "label smoothing",
        "average_tokens_across_devices": "average_tokens_across_devices",
    }
    written = _written(arguments, names)
    for name in ("rows per pass and rank", "accumulation"):
        if name in written and name in values and values[name].value != written[name].value:
            why = f"the json says {values[name].value}: the Trainer refuses the pair"
            written[name] = Said(written[name].value, why)
    if str(arguments.get("optim", "")).startswith("adamw_torch"):
        written["optimizer"] = Said("AdamW")
    if "optimizer" in values:  # the json's counts
        written.pop("optimizer", None)
    values |= written
    betas = [arguments.get("adam_beta1"), arguments.get("adam_beta2")]
    return values | ({} if None in betas else {"betas": Said(betas)}) | _steps(arguments)


def _steps(arguments: dict) -> Settings:
    if (arguments.get("max_steps") or -1) > 0:
        return {"steps": Said(arguments["max_steps"])}
    return _written(arguments, {"num_train_epochs": "epochs"})


def _of_record(record: Record) -> Settings:
    seen, wanted = record.observed, record.requested
    engine = {"DEEPSPEED": "DeepSpeed", "NO": "one process"}.get(seen.distributed_type or "")
    if engine is None and seen.distributed_type:
        engine = "FSDP" if "FSDP" in seen.distributed_type else "DDP"
    values = _of_deepspeed(seen.deepspeed) if seen.deepspeed else {}
    weights = seen.dtypes.get("weights")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(seen.autocast or "")
    precision = f"{AUTOCAST} {dtype}" if dtype else "fp32" if weights == "float32" else weights and f"{CAST} {weights}"
    group = seen.optimizer_settings
    rows = seen.rows_per_step
    own = {
        "engine": engine,
        "stage": seen.stage,
        "ranks": seen.ranks,
        "clipping": seen.clipping,
        "precision": precision,
        "weights": weights,
        "accumulation": seen.accumulation,
        "rows per step": rows,
        "rows per pass and rank": wanted.micro_batch,
        "sequence": wanted.sequence,
        "learning rate": wanted.lr,
        "warm-up steps": wanted.lr_warmup_steps,
        "steps": seen.steps,
        "optimizer": seen.optimizer,
        "betas": group.get("betas"),
        "eps": group.get("eps"),
        "weight decay": group.get("weight_decay"),
        "dropout": wanted.dropout,
        "seed": wanted.seed,
        "reduce_bucket_size": seen.bucket_elements,
        "DDP's bucket in bytes": seen.bucket_bytes,
        "overlap_comm": seen.overlap if seen.stage is not None else None,
        "offload_optimizer": seen.offload_optimizer if seen.stage is not None else None,
        "offload_param": seen.offload_param if seen.stage is not None else None,
        "checkpointing": seen.checkpointing,
        "attention": seen.attention,
        "compiled": seen.compiled,
        "TF32": seen.tf32,
        "loss scale": seen.loss_scale,
        "parameters": seen.parameters,
        "weights at the start": seen.weights_checksum,
        "data": seen.data_checksum,
        "device": seen.device,
    }
    # The values that were read back from the prepared objects take precedence over the config.
    return values | {name: Said(value) for name, value in own.items() if value is not None} | _versions(record)


def _versions(record: Record) -> Settings:
    return {f"version of {name}": Said(value) for name, value in record.software.items()}
