"""Reads back what the prepared objects really are, and finds differences from what the arm promises.

Nothing here copies a request. A value that cannot be read is None.
"""

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any

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
# DeepSpeed's flags, the strongest first. Stages 1 and 2 silently treat `nvme` as `cpu`: so they do, whatever is asked.
HOMES = {"swap_optimizer": "nvme", "cpu_offload": "cpu", "offload_optimizer": "cpu"}


def distribution(accelerator: "Accelerator | None", model, optimizer) -> Observed:
    """How training is distributed, read from the engine, the optimizer and the process group.

    A loop without Accelerate has no accelerator. Values that only an accelerator has are then None.
    """
    inner = inner_optimizer(optimizer)
    group = inner.param_groups[0]  # all groups share these settings: the study makes more than one for Muon alone
    is_compiled = getattr(model, "is_compiled", False)  # DeepSpeed's engine compiles itself
    values: dict[str, Any] = {
        "device": getattr(accelerator, "device", device_of(model)).type,
        "ranks": 1,
        "wrapper": type(model).__name__,
        "optimizer": type(inner).__name__,
        "optimizer_settings": {name: _plain(group.get(name)) for name in OPTIMIZER_SETTINGS},
        "offload_optimizer": "none",
        "offload_param": "none",
        "clipping": 0.0,
        "attention": getattr(getattr(plain_model(model), "config", None), "_attn_implementation", None),
        "checkpointing": getattr(plain_model(model), "is_gradient_checkpointing", None),
        "compiled": is_compiled or isinstance(model, torch._dynamo.OptimizedModule),
        "threads": torch.get_num_threads(),
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
    if hasattr(model, "zero_optimization_stage"):
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
        part = getattr(parameter, "ds_tensor", None)  # under stage 3 the parameter itself is empty
        if part is None:
            part = getattr(parameter, "_local_tensor", parameter)  # of FSDP2's DTensor
        size = getattr(parameter, "ds_numel", _shape(parameter).numel())
        whole += size
        held += part.numel()
        trained += size * parameter.requires_grad
    return {"parameters": whole, "held_parameters": held, "trained_parameters": trained}


def _engine(engine, zero) -> dict:
    """Return what a DeepSpeed engine does, by the names of `Observed`."""
    offload_param = None
    if getattr(zero, "offload_param", False):
        offload_param = getattr(engine.zero_offload_param(), "device", None)
    values = {
        "stage": engine.zero_optimization_stage(),
        "offload_optimizer": next((home for name, home in HOMES.items() if getattr(zero, name, False)), "none"),
        "offload_param": str(getattr(offload_param, "value", offload_param or "none")),
        "clipping": float(engine.gradient_clipping()),
        "accumulation": engine.gradient_accumulation_steps(),
        "bucket_elements": int(engine.zero_reduce_bucket_size()),
        "overlap": bool(engine.zero_overlap_comm()),
        "sequence_ranks": _if_several(getattr(engine, "sequence_parallel_size", 1)),
        "tensor_ranks": _if_several(engine.autotp_size()),
        "autocast": None,  # DeepSpeed's own: Accelerate's is off in its arms
        "deepspeed": _plain(engine.config) if isinstance(engine.config, dict) else {},
    }
    if engine.torch_autocast_enabled():
        names = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
        values["autocast"] = names.get(engine.torch_autocast_dtype())
    if engine.zero_hpz_partition_size() > 1:
        # Ranks that share the second copy of hpZ. DeepSpeed stores the number in each parameter.
        sharing = [getattr(parameter, "ds_secondary_tensor_group_size", 1) for parameter in engine.parameters()]
        values["second_partition_ranks"] = max(sharing)
    if values["stage"] == 3:
        values["linear_parameters_kept"] = _linear_parameters_kept(engine)
    return values


def _if_several(ranks: int) -> int | None:
    """Return a number of ranks that share something; None if none share it."""
    return ranks if ranks > 1 else None


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
    words = {"Infinity": "never"}
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: words.get(name, name))


def count_ranks(accelerator: "Accelerator") -> int | None:
    """Return the number of ranks in a real collective, which no setting can fake. None if collectives move no data."""
    if not dist.is_initialized():
        return 1
    if dist.get_backend() == "fake":
        return None
    ones = torch.ones(1, device=accelerator.device)
    dist.all_reduce(ones)  # a sum
    return int(ones.item())


def mismatches(arm: Arm, settings: Settings, seen: Observed, ranks_launched: int) -> list[str]:
    """Return a text for each difference between what was observed and what the arm and the settings promise."""
    # Accelerate may train without a wrapper and print nothing: see reproductions/fsdp_on_a_cpu_is_none.py.
    observed = dict(seen) | {"DDP": seen.bucket_bytes is not None, "FSDP2": seen.fsdp is not None} | (seen.fsdp or {})
    ranks = seen.ranks or ranks_launched
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
        "autocast": None if settings.precision in (*HALF_WEIGHTS, "fp32") else settings.precision,
        "checkpointing": settings.checkpointing,
        "compiled": settings.compile,
        "tf32": {"cuda": settings.tf32}.get(str(seen.device)),
    }
    if arm.fsdp is not None:
        observed["reshards after forward"] = observed.get("units_resharded_after_forward", 0) > 0
        mesh = [arm.replicas, arm.sharing_ranks(ranks)]
        promised |= {
            "mesh": [mesh if arm.replicas > 1 else mesh[1:]],
            "reshards after forward": arm.fsdp["fsdp_reshard_after_forward"],
            "gather_dtype": AUTOCAST.get(settings.precision),  # None: the parameters' own
            "reduce_dtype": AUTOCAST.get(settings.precision),
        }
    if settings.lora_rank or settings.train_only:
        observed["frozen weights"] = seen.trained_parameters != seen.parameters
        promised["frozen weights"] = True
    # --- what differs, where one of several values may be right
    allowed = {name: [value] for name, value in promised.items()}
    allowed["optimizer"] = sorted(optimizers.classes(settings.optimizer, arm))
    # Without a GPU, Accelerate calls MULTI_GPU so.
    allowed["distributed_type"] = sorted({arm.distributed_type, arm.distributed_type.replace("GPU", "CPU")})
    return [
        f"{name}: promised {' or '.join(map(str, values))}, observed {observed.get(name)}"
        for name, values in allowed.items()
        if observed.get(name) not in values
    ]


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
    """Return a digest of all parameters in order, the same however they are partitioned. Every rank must call it.

    It shows that two arms start from the same weights, and that preparing a model changes none of them.
    """
    digest = hashlib.sha256()
    for name, parameter in plain_model(model).named_parameters():
        with _whole(parameter, accelerator.device) as values:  # a collective of all ranks
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
