"""Reads back what the prepared objects really are, and finds differences from what the arm promises.

Nothing here copies a request. A value that cannot be read is None.
"""

import contextlib
import hashlib
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from study.core import optimizers
from study.core.arms import Arm
from study.core.settings import AUTOCAST, HALF_WEIGHTS, Settings
from study.measure import roles
from study.measure.hardware import CUDA
from study.measure.roles import inner_optimizer, plain_model, zero_optimizer
from study.records.sections import Observed

if TYPE_CHECKING:  # a bare loop needs no Accelerate, and should not wait for its import
    from accelerate import Accelerator

OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay", "fused", "amsgrad", "momentum")


def distribution(accelerator: "Accelerator | None", model, optimizer) -> Observed:
    """Return how training is distributed, read from the engine, the optimizer and the process group.

    A loop without Accelerate has no accelerator. Values that only an accelerator has are then None.
    """
    inner = inner_optimizer(optimizer)
    group = inner.param_groups[0]
    plain = plain_model(model)
    mixed = getattr(accelerator, "mixed_precision", "no")
    seen = Observed(
        distributed_type=str(accelerator.distributed_type.value) if accelerator else None,
        device=(accelerator.device if accelerator else device_of(model)).type,
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        backend=dist.get_backend() if dist.is_initialized() else None,
        wrapper=type(model).__name__,
        optimizer=type(inner).__name__,
        optimizer_settings={name: _plain(group.get(name)) for name in OPTIMIZER_SETTINGS},
        offload_optimizer="none",
        offload_param="none",
        clipping=0.0,
        accumulation=getattr(accelerator, "gradient_accumulation_steps", None),
        attention=getattr(getattr(plain, "config", None), "_attn_implementation", None),
        checkpointing=getattr(plain, "is_gradient_checkpointing", None),
        compiled=getattr(model, "is_compiled", False) or isinstance(model, torch._dynamo.OptimizedModule),
        threads=torch.get_num_threads(),
        autocast=mixed if mixed != "no" else None,
        tf32=torch.backends.cuda.matmul.allow_tf32 if CUDA else None,
    ).model_copy(update=_sizes(model))
    if hasattr(model, "zero_optimization_stage"):
        return seen.model_copy(update=_engine(model, zero_optimizer(optimizer)))
    if roles.fsdp_version(model) == 2:
        sharding = roles.describe_fsdp(model)
        home = "cpu" if sharding["offloads"] else "none"
        seen = seen.model_copy(update={"fsdp": sharding, "offload_optimizer": home, "offload_param": home})
    if hasattr(model, "bucket_bytes_cap"):
        seen.bucket_bytes = model.bucket_bytes_cap
        seen.overlap = True  # DDP always overlaps
    return seen


def device_of(model) -> torch.device:
    """Return the device on which a model computes. Its parameters may be elsewhere, as with offloading."""
    for known in (getattr(model, "device", None), getattr(model, "compute_device", None)):
        if isinstance(known, torch.device):
            return known
    return next(model.parameters()).device


def _sizes(model) -> dict[str, int]:
    """Return parameters of the model, those that this rank holds, and those that train."""
    whole = held_parameters = trained = 0
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            size = parameter.ds_numel
            part = parameter.ds_tensor.numel()
        else:
            size = _shape(parameter).numel()
            part = getattr(parameter, "_local_tensor", parameter).numel()
        whole += size
        held_parameters += part
        trained += size * parameter.requires_grad
    if roles.fsdp_version(model) == 1:
        return roles.fsdp_sizes(model)
    return {"parameters": whole, "held_parameters": held_parameters, "trained_parameters": trained}


def _engine(engine, zero) -> dict:
    config = engine.config if isinstance(engine.config, dict) else {}
    # Stages 1 and 2 silently treat `nvme` as `cpu`: `cpu_offload` is what they do, not what the config asks for.
    on_disk = bool(getattr(zero, "swap_optimizer", False))
    on_host = bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))
    home = "cpu" if on_host else "none"
    if on_disk:
        home = "nvme"
    on_param = getattr(engine.zero_offload_param(), "device", None) if getattr(zero, "offload_param", False) else None
    autocast = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
    second = [getattr(parameter, "ds_secondary_tensor_group_size", 1) for parameter in engine.parameters()]
    return {
        "stage": engine.zero_optimization_stage(),
        "offload_optimizer": home,
        "offload_param": str(getattr(on_param, "value", on_param)) if on_param else "none",
        "clipping": float(engine.gradient_clipping()),
        "accumulation": engine.gradient_accumulation_steps(),
        "bucket_elements": int(engine.zero_reduce_bucket_size()),
        "overlap": bool(engine.zero_overlap_comm()),
        # Ranks that share the second copy of hpZ. DeepSpeed stores the number in each parameter.
        "second_partition_ranks": max(second) if engine.zero_hpz_partition_size() > 1 else None,
        "sequence_ranks": size if (size := getattr(engine, "sequence_parallel_size", 1)) > 1 else None,
        "tensor_ranks": size if (size := engine.autotp_size()) > 1 else None,
        "linear_parameters_kept": _linear_parameters_kept(engine) if engine.zero_optimization_stage() == 3 else None,
        "autocast": autocast.get(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else None,
        "deepspeed": _plain(config),
    }


def _linear_parameters_kept(engine) -> int:
    """Return the elements of gathered weights that the graph of PyTorch's own linear layers keeps.

    DeepSpeed replaces `functional.linear` for good. Before 0.19.4 it did so only within zero.Init (its PR 8189).
    """
    if torch.nn.functional.linear is not torch._C._nn.linear:
        return 0
    layers = [module for module in engine.modules() if isinstance(module, torch.nn.Linear)]
    weights: dict = {id(layer.weight): layer.weight for layer in layers}
    return sum(weight.ds_numel for weight in weights.values() if not weight.ds_persist)


def second_partition_parameters(model) -> int | None:
    """Elements of hpZ's second copy that this rank holds now. Each part is made when its parameter is released."""
    parts = [getattr(parameter, "ds_secondary_tensor", None) for parameter in model.parameters()]
    return sum(part.numel() for part in parts if part is not None) or None


def _plain(value):
    """Return a config as JSON can hold it. Infinity, DeepSpeed's default for "never", becomes that word."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value == math.inf:
        return "never"
    is_plain = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    return value if is_plain else str(value)


def count_ranks(accelerator: "Accelerator") -> int | None:
    """Return the number of ranks in a real collective, which no setting can fake. None if collectives move no data."""
    if not dist.is_initialized():
        return 1
    if dist.get_backend() == "fake":
        return None
    ones = torch.ones(1, device=accelerator.device)
    dist.all_reduce(ones)
    return int(ones.item())


def mismatches(arm: Arm, settings: Settings, seen: Observed, ranks_launched: int) -> list[str]:
    """Return a text for each difference between what was observed and what the arm and the settings promise."""
    promised = _promises(arm, settings, seen, ranks_launched)
    differences = _differences({name: (value, getattr(seen, name)) for name, value in promised.items()})
    classes = optimizers.classes(settings.optimizer, arm)
    if seen.optimizer not in classes:
        differences.append(f"optimizer: promised {' or '.join(sorted(classes))}, observed {seen.optimizer}")
    if (settings.lora_rank or settings.train_only) and seen.trained_parameters == seen.parameters:
        differences.append(f"frozen weights: {seen.trained_parameters} of {seen.parameters} parameters train")
    # Without a GPU, Accelerate calls MULTI_GPU so.
    if seen.distributed_type not in (arm.distributed_type, arm.distributed_type.replace("GPU", "CPU")):
        differences.append(f"distributed_type: promised {arm.distributed_type}, observed {seen.distributed_type}")
    if arm.distributed_type == "MULTI_GPU" and seen.bucket_bytes is None:
        differences.append(f"wrapper: promised DDP, observed {seen.wrapper}")
    if arm.fsdp is not None:
        differences += _sharded_otherwise(arm, arm.fsdp, settings, seen)
    return differences


def _promises(arm: Arm, settings: Settings, seen: Observed, ranks_launched: int) -> dict[str, object]:
    """Return the values that the arm and the settings promise, by the names of `Observed`."""
    return {
        "ranks": ranks_launched,
        "ranks_counted": None if settings.virtual_ranks else ranks_launched,
        "stage": arm.stage,
        "second_partition_ranks": arm.second_partition(seen.ranks or ranks_launched),
        "sequence_ranks": arm.sequence_ranks if arm.sequence_ranks > 1 else None,
        "tensor_ranks": arm.tensor_ranks if arm.tensor_ranks > 1 else None,
        "offload_optimizer": arm.offload_optimizer,
        "offload_param": arm.offload_param,
        "clipping": float(arm.clipping),
        "accumulation": settings.accumulation,
        "autocast": settings.precision if settings.precision in (*AUTOCAST, "fp8") else None,
        "checkpointing": settings.checkpointing,
        "compiled": settings.compile,
        "tf32": settings.tf32 if seen.device == "cuda" else None,
    }


def _differences(pairs: dict[str, tuple]) -> list[str]:
    return [f"{name}: promised {a!r}, observed {b!r}" for name, (a, b) in pairs.items() if a != b]


def _sharded_otherwise(arm: Arm, config: dict, settings: Settings, seen: Observed) -> list[str]:
    """Differences of FSDP2 from what the arm promises. Accelerate may train without it and print nothing."""
    if seen.fsdp is None:
        return [f"wrapper: promised FSDP2, observed {seen.wrapper}, not sharded"]
    half = AUTOCAST.get(settings.precision)
    sharing = arm.sharing_ranks(seen.ranks or 1)
    expected = {
        "mesh": [[arm.replicas, sharing] if arm.replicas > 1 else [sharing]],
        "reshards after forward": config["fsdp_reshard_after_forward"],
        "gather_dtype": half,
        "reduce_dtype": half,
    }
    observed = seen.fsdp | {"reshards after forward": seen.fsdp["units_resharded_after_forward"] > 0}
    return _differences({name: (value, observed[name]) for name, value in expected.items()})


def dtype_mismatches(settings: Settings, seen: dict[str, str | None]) -> list[str]:
    """Weights or moments in another dtype than the recipe's, as when fp32 parameters on disk become bf16."""
    expected = {"weights": {"bfloat16" if settings.precision in HALF_WEIGHTS else "float32"}}
    if seen["moments"] is not None:  # None: they are on the disk
        expected["moments"] = optimizers.moments_dtypes(settings.optimizer, settings.precision)
    wrong = {role: " or ".join(sorted(dtypes)) for role, dtypes in expected.items() if seen[role] not in dtypes}
    how = f"{settings.precision} with {settings.optimizer}"
    return [f"{role}: {how} promises {promised}, observed {seen[role]}" for role, promised in wrong.items()]


def loss_scale(accelerator: "Accelerator", optimizer) -> float | None:
    """Return the current loss scale of fp16: 65536, halved for each step that overflowed. None without a scaler."""
    scaler = getattr(optimizer.optimizer, "torch_autocast_gradscaler", None) or accelerator.scaler
    return scaler.get_scale() if scaler else None


def weights_checksum(accelerator: "Accelerator", model) -> str | None:
    """Return a digest of all parameters in order, the same however they are partitioned. Every rank must call it."""
    digest = hashlib.sha256()
    for name, parameter in plain_model(model).named_parameters():
        with _whole(parameter, accelerator.device) as values:
            if accelerator.is_main_process:
                digest.update(name.encode())
                digest.update(values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16] if accelerator.is_main_process else None


def shapes(model) -> list[tuple[tuple[int, ...], bool]]:
    """Return the shape of each whole parameter, however it is partitioned, and whether it trains."""
    return [
        (tuple(getattr(each, "ds_shape", _shape(each))), each.requires_grad) for each in plain_model(model).parameters()
    ]


def _shape(parameter) -> torch.Size:
    """Return the shape of a whole parameter. AutoTP leaves a part on each rank, and notes the original shape."""
    noted = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return torch.Size(noted.get("original_shape") or parameter.shape)


@contextlib.contextmanager
def _whole(parameter, device: torch.device):
    """Gather a parameter with all its values for a while."""
    if hasattr(parameter, "full_tensor"):  # FSDP2's; what is offloaded is gathered on the device
        yield parameter.detach().to(device).full_tensor()
    elif getattr(parameter, "ds_is_replaced_module", False):
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        with GatherReplacedLayerParams([parameter], None):
            yield parameter
    elif not hasattr(parameter, "ds_tensor"):
        yield parameter
    else:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
