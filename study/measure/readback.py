"""Reads back what the prepared objects really are, and never copies a request. A value that cannot be read is None."""

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from study.core.arms import Arm
from study.core.recipes import AUTOCAST
from study.core.settings import Settings
from study.measure import roles
from study.measure.hardware import CUDA
from study.measure.roles import inner_optimizer, plain_model, zero_optimizer
from study.records.sections import Observed

if TYPE_CHECKING:  # a bare loop needs no Accelerate, and should not wait for its import
    from accelerate import Accelerator

OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay", "fused", "amsgrad", "momentum")
# Of the transformers that have both, the second warns.
RECOMPUTES = ("is_activation_checkpointing", "is_gradient_checkpointing")
# DeepSpeed's flags, the strongest first. Stages 1 and 2 silently treat `nvme` as `cpu`: so they do, whatever is asked.
HOMES = {"swap_optimizer": "nvme", "cpu_offload": "cpu", "offload_optimizer": "cpu"}
AUTOCAST_NAMES = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
CLASSES = {
    "adamw": "AdamW",
    "adamw_8bit": "AdamW8bit",
    "sgd": "SGD",
    "adafactor": "Adafactor",
    "muon": "MuonWithAuxAdam",
}


def distribution(accelerator: "Accelerator | None", model, optimizer) -> Observed:
    """Return how training is distributed, read from the engine, the optimizer and the process group."""
    inner = inner_optimizer(optimizer)
    group = inner.param_groups[0]  # all groups share these settings: the study makes more than one for Muon alone
    plain = plain_model(model)
    values: dict[str, Any] = {
        "device": getattr(accelerator, "device", device_of(model)).type,
        "ranks": 1,
        "wrapper": type(model).__name__,
        "optimizer": type(inner).__name__,
        "optimizer_settings": {name: _plain(group.get(name)) for name in OPTIMIZER_SETTINGS},
        "offload_optimizer": "none",
        "offload_param": "none",
        "clipping": 0.0,
        "attention": getattr(getattr(plain, "config", None), "_attn_implementation", None),
        "checkpointing": next((getattr(plain, name) for name in RECOMPUTES if hasattr(plain, name)), None),
        # DeepSpeed's engine compiles itself.
        "compiled": getattr(model, "is_compiled", False) or isinstance(model, torch._dynamo.OptimizedModule),
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }
    if accelerator is not None:
        values["distributed_type"] = str(accelerator.distributed_type.value)
        values["accumulation"] = accelerator.gradient_accumulation_steps
        if accelerator.mixed_precision != "no":
            values["autocast"] = accelerator.mixed_precision
    if dist.is_initialized():
        values |= {"ranks": dist.get_world_size(), "backend": dist.get_backend()}
    if CUDA:
        values["tf32"] = torch.backends.cuda.matmul.allow_tf32
    if roles.is_engine(model):
        values |= _engine(model, zero_optimizer(optimizer))
    elif roles.fsdp_version(model) == 2:
        sharding = roles.describe_fsdp(model)
        home = "cpu" if sharding["offloads"] else "none"
        values |= {"fsdp": sharding, "offload_optimizer": home, "offload_param": home}
    elif hasattr(model, "bucket_bytes_cap"):
        values |= {"bucket_bytes": model.bucket_bytes_cap, "overlap": True}  # DDP always overlaps
    return Observed(**values | _sizes(model))


def device_of(model) -> torch.device:
    """Return the device on which a model computes. Its parameters may be elsewhere, as with offloading."""
    for known in (getattr(model, "device", None), getattr(model, "compute_device", None)):
        if isinstance(known, torch.device):
            return known
    return next(model.parameters()).device


def _sizes(model) -> dict[str, int]:
    """Return parameters of the model, those that this rank holds, and those that train."""
    if roles.fsdp_version(model) == 1:
        return roles.fsdp_sizes(model)  # how many of them train is not kept there
    whole = held = trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", _shape(parameter).numel())
        whole += size
        held += roles.part_of(parameter).numel()
        trained += size * parameter.requires_grad
    return {"parameters": whole, "held_parameters": held, "trained_parameters": trained}


def _engine(engine, zero) -> dict:
    """Return what a DeepSpeed engine does, by the names of `Observed`."""
    values = {
        "stage": engine.zero_optimization_stage(),
        "clipping": float(engine.gradient_clipping()),
        "accumulation": engine.gradient_accumulation_steps(),
        "bucket_elements": int(engine.zero_reduce_bucket_size()),
        "overlap": bool(engine.zero_overlap_comm()),
        "sequence_ranks": _if_several(getattr(engine, "sequence_parallel_size", 1)),
        "tensor_ranks": _if_several(engine.autotp_size()),
        "autocast": None,  # DeepSpeed's own: Accelerate's is off in its arms
        "deepspeed": _plain(engine._config._param_dict),
    }
    values["offload_optimizer"] = next((home for flag, home in HOMES.items() if getattr(zero, flag, False)), "none")
    if getattr(zero, "offload_param", False):
        device = engine.zero_offload_param().device
        values["offload_param"] = getattr(device, "value", device)
    if engine.torch_autocast_enabled():
        values["autocast"] = AUTOCAST_NAMES.get(engine.torch_autocast_dtype())
    if engine.zero_hpz_partition_size() > 1:
        # Ranks that share the second copy of hpZ. DeepSpeed stores the number in each parameter.
        values["second_partition_ranks"] = max(each.ds_secondary_tensor_group_size for each in engine.parameters())
    return values


def _if_several(ranks: int) -> int | None:
    return ranks if ranks > 1 else None


def _plain(value):
    """Return a config as JSON can hold it. Infinity is DeepSpeed's default for "never"."""
    text = json.dumps(value, default=str)
    return json.loads(text, parse_constant=lambda name: "never" if name == "Infinity" else name)


def count_ranks(accelerator: "Accelerator") -> int | None:
    """Return the number of ranks in a real collective, which no setting can fake. None if collectives move no data."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        return None
    return int(accelerator.reduce(torch.ones(1, device=accelerator.device)).item())


def mismatches(arm: Arm, settings: Settings, seen: Observed, ranks_launched: int) -> list[str]:
    """Return a text for each difference between what was observed and what the arm and the settings promise."""
    # Accelerate may train without a wrapper and print nothing: see reproductions/fsdp_on_a_cpu_is_none.py.
    observed = dict(seen) | {"DDP": seen.bucket_bytes is not None, "FSDP2": seen.fsdp is not None} | (seen.fsdp or {})
    ranks = seen.ranks or ranks_launched
    recipe = settings.recipe
    promised: dict[str, object] = {
        "ranks": ranks_launched,
        "ranks_counted": None if settings.virtual_ranks else ranks_launched,
        "DDP": arm.distributed_type == "MULTI_GPU",
        "FSDP2": arm.fsdp is not None,
        "stage": arm.stage,
        "second_partition_ranks": arm.second_partition(ranks),
        "sequence_ranks": _if_several(arm.sequence_ranks),
        "tensor_ranks": _if_several(arm.tensor_ranks),
        "offload_optimizer": arm.offload_optimizer,
        "offload_param": arm.offload_param,
        "clipping": float(arm.clipping),  # Accelerate takes a yaml's 0.0 for none given, and DeepSpeed clips at 1.0
        "accumulation": settings.accumulation,
        "autocast": settings.precision if recipe.casts else None,
        "checkpointing": settings.checkpointing,
        "compiled": settings.compile,
        "tf32": settings.tf32 if str(seen.device) == "cuda" else None,
    }
    if arm.fsdp is not None:
        observed["reshards after forward"] = observed.get("units_resharded_after_forward", 0) > 0
        mesh = [arm.replicas, arm.sharing_ranks(ranks)]
        promised |= {
            "mesh": [mesh if arm.replicas > 1 else mesh[1:]],
            "reshards after forward": arm.fsdp["fsdp_reshard_after_forward"],
            "gather_dtype": recipe.autocast,  # None: the parameters' own
            "reduce_dtype": recipe.autocast,
        }
    if settings.lora_rank:
        observed["frozen weights"] = seen.trained_parameters != seen.parameters
        promised["frozen weights"] = True
    # --- what differs, where one of several values may be right
    allowed: dict[str, list] = {name: [value] for name, value in promised.items()}
    allowed["optimizer"] = sorted(_classes(settings.optimizer, arm))
    # Without a GPU, Accelerate calls MULTI_GPU so.
    allowed["distributed_type"] = sorted({arm.distributed_type, arm.distributed_type.replace("GPU", "CPU")})
    return _differences(allowed, observed)


def _classes(optimizer: str, arm: Arm) -> set[str]:
    """Return the classes that a prepared optimizer may have: with or without a master copy, or an offloaded one."""
    if arm.deepspeed and arm.offload_optimizer != "none":
        return {"DeepSpeedCPUAdam"}
    name = CLASSES[optimizer]
    return {name, f"Master{name}"}


def dtype_mismatches(settings: Settings, seen: dict[str, str | None]) -> list[str]:
    """Return weights or moments in another dtype than the recipe's, as when fp32 parameters on disk become bf16."""
    allowed = {"weights": ["bfloat16" if settings.recipe.weight_bytes == 2 else "float32"]}
    if seen["moments"] is not None:  # None: they are on the disk
        allowed["moments"] = _moments_dtypes(settings)
    return _differences(allowed, seen)


def _moments_dtypes(settings: Settings) -> list[str]:
    """Return the dtypes that the moments may have."""
    # 8-bit moments have fp32 scales; those of small tensors stay in fp32. DeepSpeed's Muon keeps its momentum in the
    # dtype of the gradients, and the moments of its AdamW in fp32.
    if settings.optimizer == "adamw_8bit":
        return ["float32 uint8"]
    if settings.recipe.moment_bytes == 2:
        return ["bfloat16"]
    if settings.optimizer == "muon" and settings.recipe.master_bytes:
        return ["bfloat16 float32", "float32"]
    return ["float32"]


def _differences(allowed: dict[str, list], observed: dict) -> list[str]:
    return [
        f"{name}: promised {' or '.join(map(str, values))}, observed {observed.get(name)}"
        for name, values in allowed.items()
        if observed.get(name) not in values
    ]


def loss_scale(accelerator: "Accelerator", optimizer) -> float | None:
    """Return the current loss scale of fp16: 65536, halved for each step that overflowed. None without a scaler."""
    scaler = getattr(optimizer.optimizer, "torch_autocast_gradscaler", None) or accelerator.scaler
    return scaler.get_scale() if scaler else None


def weights_checksum(accelerator: "Accelerator", model) -> str:
    """Return a digest of all parameters in order, the same however they are partitioned; of nothing on other ranks."""
    digest = hashlib.sha256()
    for name, parameter in plain_model(model).named_parameters():
        with _whole(parameter, accelerator.device) as values:  # a collective of all ranks
            if accelerator.is_main_process:
                digest.update(name.encode())
                digest.update(values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def shapes(model) -> list[tuple[tuple[int, ...], bool]]:
    """Return the shape of each whole parameter, however it is partitioned, and whether it trains."""
    parameters = plain_model(model).parameters()
    return [(tuple(getattr(each, "ds_shape", _shape(each))), each.requires_grad) for each in parameters]


def _shape(parameter) -> torch.Size:
    """Return the shape of a whole parameter. AutoTP leaves a part on each rank, and notes the original shape."""
    noted = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return torch.Size(noted.get("original_shape") or parameter.shape)


@contextlib.contextmanager
def _whole(parameter, device: torch.device):
    if hasattr(parameter, "full_tensor"):  # FSDP2's; what is offloaded is gathered on the device
        yield parameter.detach().to(device).full_tensor()
    elif getattr(parameter, "ds_is_replaced_module", False):  # AutoTP's
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        with GatherReplacedLayerParams([parameter], None):
            yield parameter
    elif hasattr(parameter, "ds_tensor"):  # stage 3's
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter
