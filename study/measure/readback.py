"""Reads back what the prepared objects really are, and says where that differs from what the arm promised.

Nothing here copies a request. What cannot be read is None.
"""

import contextlib
import hashlib
import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from study.measure import fsdp, memory
from study.measure.hardware import CUDA
from study.records.schema import Network, Observed, RankComponents
from study.spec import optimizers
from study.spec.arms import Arm
from study.spec.settings import AUTOCAST, HALF_WEIGHTS, Settings

if TYPE_CHECKING:  # a bare loop does without it, and need not wait for its import
    from accelerate import Accelerator

# Where DeepSpeed 0.19's optimizers keep what plays each role, by attribute. Found by reading and by looking; a test
# fails when a large tensor of an arm has no role.
ROLES = {
    "weights": "bit16_groups_flat fp16_partitioned_groups_flat lp_param_buffer param_groups_fp16_flat_cpu_memory",
    "master": "single_partition_of_fp32_groups fp32_partitioned_groups_flat",
    "gradients": "averaged_gradients all_grad_tensors grad_partitions_flat_buffer offload_gradient_dict "
    "accumulated_grads_in_cpu lp_grad_partitions_flat_pin_buffers",
    "buckets": "ipg_buckets",
    "staging": "_muon_pending_momentum _muon_allgather_buffers "
    "param_buffer_of_bit16_for_cpu_offload_groups temp_grad_buffer_for_cpu_offload "
    "temp_grad_buffer_for_gpu_offload lp_param_contiguous_pin_buffer hp_params_pin_buffers",
    "swap": "optimizer_swapper",
}

OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay", "fused", "amsgrad", "momentum")
LOOKS = 2  # the first misses the components at the peak if its step peaks lower than the step before

PROMISED_TYPES = {  # what Accelerate may call an arm's distributed_type once it runs, with a GPU or without
    "NO": {"NO"},
    "MULTI_GPU": {"MULTI_GPU", "MULTI_CPU"},
    "DEEPSPEED": {"DEEPSPEED"},
    "FSDP": {"FSDP"},
}


def inner_optimizer(optimizer) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic, below the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_optimizer(optimizer):
    """DeepSpeed's optimizer around the one that does the arithmetic. None without one, as under its stage 0 in fp32."""
    while hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.startswith("deepspeed."):
            return optimizer
        optimizer = optimizer.optimizer
    return None


def plain_model(model) -> torch.nn.Module:
    """The model below the wrappers of DDP, DeepSpeed and torch.compile.

    Accelerate's `unwrap_model` does the same, but imports DeepSpeed even for arms without it.
    """
    while wrapped := getattr(model, "_orig_mod", None) or getattr(model, "module", None):
        model = wrapped
    return model


def tensors_in(value, depth: int = 0) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, and in DeepSpeed's buckets and swap buffers."""
    if isinstance(value, torch.Tensor):
        return [getattr(value, "_local_tensor", value)]  # of FSDP2's, what this rank holds
    if depth > 6:
        return []
    if type(value).__name__.startswith("IPGBucket"):
        value = [value.buffer]
    if type(value).__name__.endswith("OptimizerSwapper"):
        value = value.swap_buffer_manager.all_buffers
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item, depth + 1)]
    return []


def tensors_by_role(model, optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors that hold the training state now: weights, gathered weights, gradients, master, moments, buckets."""
    zero = zero_optimizer(optimizer)
    tensors: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def add(role: str, value) -> None:
        tensors[role] += tensors_in(value)

    inner = inner_optimizer(optimizer)
    for state in inner.state.values():
        add("moments", [value for name, value in state.items() if name != "step"])
    add("master", getattr(inner, "master", []))
    for role, names in ROLES.items():
        for name in names.split():
            add(role, getattr(zero, name, None))
    add("gradients", [tensor.grad for tensor in tensors["master"]])
    in_parts = fsdp.version(model) is not None  # the model's parameters are then whole ones while they are in use
    for role, value in fsdp.tensors(model) if in_parts else ():
        add(role, value)
    for parameter in model.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        add("weights" if partition is None and not in_parts else "gathered_weights", parameter.data)
        add("weights", [partition, getattr(parameter, "ds_secondary_tensor", None)])
        add("gradients", parameter.grad)
    add("constants", list(model.buffers()))
    return tensors


def claimed_storages(model, optimizer) -> dict[int, str]:
    """Each storage with a role, by the address of its C++ object, to the role. The first to claim one keeps it."""
    claimed, by_role = {}, tensors_by_role(model, optimizer)
    order = ("moments", "master", "swap", "weights", "buckets", "gradients", "staging", "gathered_weights", "constants")
    for role in order:
        for tensor in by_role[role]:
            if tensor.numel() and tensor.device.type != "meta" and tensor.layout == torch.strided:
                claimed.setdefault(tensor.untyped_storage()._cdata, role)
    return claimed


def dtypes(model, optimizer) -> dict[str, str | None]:
    """The dtype each part of the training state really has; None for a part that does not exist now."""
    by_role = tensors_by_role(model, optimizer)
    result = {}
    for role in ("weights", "gradients", "master", "moments"):
        numbers = [tensor for tensor in by_role[role] if tensor.is_floating_point() or tensor.dtype == torch.uint8]
        kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in numbers}
        result[role] = " ".join(sorted(kinds)) or None
    return result


def distribution(accelerator: "Accelerator | None", model, optimizer) -> Observed:
    """How training is distributed, read from the engine, the optimizer and the process group.

    A loop without Accelerate has no accelerator; what only that would say is then None.
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
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        autocast=mixed if mixed != "no" else None,
        tf32=torch.backends.cuda.matmul.allow_tf32 if CUDA else None,
        **_sizes(model),
    )
    if hasattr(model, "zero_optimization_stage"):
        return seen.model_copy(update=_engine(model, zero_optimizer(optimizer)))
    if fsdp.version(model) == 2:
        seen.fsdp = fsdp.describe(model)
        seen.offload_optimizer = seen.offload_param = "cpu" if seen.fsdp["offloads"] else "none"
    if hasattr(model, "bucket_bytes_cap"):
        seen.bucket_bytes, seen.overlap = model.bucket_bytes_cap, True  # DDP cannot do otherwise
    return seen


def device_of(model) -> torch.device:
    """Where a model computes: its parameters may be elsewhere, as under offloading."""
    for known in (getattr(model, "device", None), getattr(model, "compute_device", None)):
        if isinstance(known, torch.device):
            return known
    return next(model.parameters()).device


def _sizes(model) -> dict[str, int]:
    """Parameters of the model, those that this rank holds, and those that train."""
    whole = held = trained = 0
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            size, part = parameter.ds_numel, parameter.ds_tensor.numel()
        else:
            size, part = _shape(parameter).numel(), getattr(parameter, "_local_tensor", parameter).numel()
        whole, held, trained = whole + size, held + part, trained + size * parameter.requires_grad
    if fsdp.version(model) == 1:
        return fsdp.sizes(model)
    return {"parameters": whole, "held_parameters": held, "trained_parameters": trained}


def _engine(engine, zero) -> dict:
    config = engine.config if isinstance(engine.config, dict) else {}
    # Stages 1 and 2 silently treat `nvme` as `cpu`: `cpu_offload` says what they do, not what the config asks for.
    on_disk = bool(getattr(zero, "swap_optimizer", False))
    on_host = bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))
    on_param = getattr(engine.zero_offload_param(), "device", None) if getattr(zero, "offload_param", False) else None
    autocast = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
    return {
        "stage": engine.zero_optimization_stage(),
        "offload_optimizer": "nvme" if on_disk else "cpu" if on_host else "none",
        "offload_param": str(getattr(on_param, "value", on_param)) if on_param else "none",
        "clipping": float(engine.gradient_clipping()),
        "accumulation": engine.gradient_accumulation_steps(),
        "bucket_elements": int(engine.zero_reduce_bucket_size()),
        "overlap": bool(engine.zero_overlap_comm()),
        "second_partition_ranks": _second_partition_ranks(engine),
        "sequence_ranks": size if (size := getattr(engine, "sequence_parallel_size", 1)) > 1 else None,
        "tensor_ranks": size if (size := engine.autotp_size()) > 1 else None,
        "autocast": autocast.get(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else None,
        "deepspeed": _plain(config),
    }


def _second_partition_ranks(engine) -> int | None:
    """Ranks that share the second copy of hpZ. DeepSpeed notes it in each parameter, also without hpZ: with 1 rank."""
    ranks = {getattr(parameter, "ds_secondary_tensor_group_size", 1) for parameter in engine.parameters()}
    return max(ranks, default=1) if engine.zero_hpz_partition_size() > 1 else None


def second_partition_parameters(model) -> int | None:
    """Elements that this rank holds now of hpZ's second copy: each is made when its parameter is released."""
    parts = [getattr(parameter, "ds_secondary_tensor", None) for parameter in model.parameters()]
    held = sum(part.numel() for part in parts if part is not None)
    return held or None


def _plain(value):
    """A config as JSON can hold it: infinity, DeepSpeed's default for "never", becomes that word."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value == math.inf:
        return "never"
    is_plain = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    return value if is_plain else str(value)


def count_ranks(accelerator: "Accelerator") -> int | None:
    """The ranks that take part in a real collective, which no setting can fake. None where collectives move no data."""
    if not dist.is_initialized():
        return 1
    if dist.get_backend() == "fake":
        return None
    ones = torch.ones(1, device=accelerator.device)
    dist.all_reduce(ones)
    return int(ones.item())


def mismatches(arm: Arm, settings: Settings, seen: Observed, ranks_launched: int) -> list[str]:
    """Every way in which what was observed is not what the arm and the settings promised, in words."""
    expected = {
        "ranks": ranks_launched,
        "ranks_counted": None if settings.virtual_ranks else ranks_launched,
        "stage": arm.stage,
        "second_partition_ranks": arm.second_partition(seen.ranks),
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
    pairs = {name: (value, getattr(seen, name)) for name, value in expected.items()}
    differences = [f"{name}: promised {a!r}, observed {b!r}" for name, (a, b) in pairs.items() if a != b]
    if seen.optimizer not in (promised := optimizers.classes(settings.optimizer, arm)):
        differences.append(f"optimizer: promised {' or '.join(sorted(promised))}, observed {seen.optimizer}")
    if (settings.lora_rank or settings.train_only) and seen.trained_parameters == seen.parameters:
        differences.append(f"frozen weights: {seen.trained_parameters} of {seen.parameters} parameters train")
    if seen.distributed_type not in PROMISED_TYPES[arm.distributed_type]:
        differences.append(f"distributed_type: promised {arm.distributed_type}, observed {seen.distributed_type}")
    if arm.distributed_type == "MULTI_GPU" and seen.bucket_bytes is None:
        differences.append(f"wrapper: promised DDP, observed {seen.wrapper}")
    if settings.hosts:
        differences += other_network(settings, seen.network)
    if arm.fsdp:
        differences += _sharded_otherwise(arm, settings, seen)
    return differences


def other_network(settings: Settings, seen: Network) -> list[str]:
    """Where the emulated network is not what was asked for. tc keeps a rate in whole bytes a second."""
    promised = None if settings.bandwidth_mbit in (None, "unlimited") else round(settings.bandwidth_mbit, 3)
    observed = seen.bandwidth_mbit and round(seen.bandwidth_mbit, 3)
    pairs = {"hosts": (settings.hosts, seen.hosts), "bandwidth in Mbit/s": (promised, observed)}
    return [f"{name}: promised {a!r}, observed {b!r}" for name, (a, b) in pairs.items() if a != b]


def _sharded_otherwise(arm: Arm, settings: Settings, seen: Observed) -> list[str]:
    """Where FSDP2 is not what the arm promises. Accelerate may train without it, and say nothing."""
    if seen.fsdp is None:
        return [f"wrapper: promised FSDP2, observed {seen.wrapper}, not sharded"]
    half, sharing = AUTOCAST.get(settings.precision), arm.sharing_ranks(seen.ranks)
    expected = {
        "mesh": [[arm.replicas, sharing] if arm.replicas > 1 else [sharing]],
        "reshards after forward": arm.fsdp["fsdp_reshard_after_forward"],
        "gather_dtype": half,
        "reduce_dtype": half,
    }
    observed = seen.fsdp | {"reshards after forward": seen.fsdp["units_resharded_after_forward"] > 0}
    pairs = {name: (value, observed[name]) for name, value in expected.items()}
    return [f"{name}: promised {a!r}, observed {b!r}" for name, (a, b) in pairs.items() if a != b]


def dtype_mismatches(settings: Settings, seen: dict[str, str | None]) -> list[str]:
    """Weights or moments that are not held in the recipe's dtype, as when fp32 parameters on disk become bf16."""
    expected = {"weights": {"bfloat16" if settings.precision in HALF_WEIGHTS else "float32"}}
    if seen["moments"] is not None:  # else they are on the disk now
        expected["moments"] = optimizers.moments_dtypes(settings.optimizer, settings.precision)
    wrong = {role: " or ".join(sorted(dtypes)) for role, dtypes in expected.items() if seen[role] not in dtypes}
    how = f"{settings.precision} with {settings.optimizer}"
    return [f"{role}: {how} promises {promised}, observed {seen[role]}" for role, promised in wrong.items()]


def loss_scale(accelerator: "Accelerator", optimizer) -> float | None:
    """fp16's loss scale now: 65536, halved once for each step that overflowed. None without one."""
    scaler = getattr(optimizer.optimizer, "torch_autocast_gradscaler", None) or accelerator.scaler
    return scaler.get_scale() if scaler else None


def weights_checksum(accelerator: "Accelerator", model) -> str | None:
    """A digest of all parameters in order, the same however they are partitioned. Every rank must call it."""
    digest = hashlib.sha256()
    for name, parameter in plain_model(model).named_parameters():
        with _whole(parameter, accelerator.device) as values:
            if accelerator.is_main_process:
                digest.update(name.encode())
                digest.update(values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16] if accelerator.is_main_process else None


def shapes(model) -> list[tuple[tuple[int, ...], bool]]:
    """The shape of each parameter, however it is partitioned, and whether it trains."""
    return [
        (tuple(getattr(each, "ds_shape", _shape(each))), each.requires_grad) for each in plain_model(model).parameters()
    ]


def _shape(parameter) -> torch.Size:
    """Of the whole of a parameter, of which AutoTP leaves each rank a part, and notes what it was."""
    noted = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return torch.Size(noted.get("original_shape") or parameter.shape)


@contextlib.contextmanager
def _whole(parameter, device: torch.device):
    """Within it: a parameter with all its values."""
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


@contextlib.contextmanager
def before_each_update(optimizer, call):
    """Within it `call` runs before each step of the optimizer that does the arithmetic."""
    hook = inner_optimizer(optimizer).register_step_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        hook.remove()


class ComponentLook:
    """Memory at the peak of a step and after it, by role: what `MemoryWatch` sees of STEPS untimed steps in a row.

    `exact` collects garbage and resets the allocator's peak counters, so that a step's own peak is known; a loop of
    somebody else keeps its own, and does not wait.
    """

    STEPS = 1 + LOOKS

    def __init__(self, model, optimizer, device_type: str, exact: bool = True):
        self.mode = memory.MemoryWatch(device_type, lambda: claimed_storages(model, optimizer), collect=exact)
        # At the update every gradient exists; DDP's buckets stay when the gradients in them are gone.
        self._marking = before_each_update(optimizer, self._mark)
        self._exact, self._looks, self._peak_before, self._after = exact, [], None, {}

    def __enter__(self) -> "ComponentLook":
        self._marking.__enter__()
        self.mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.mode.__exit__(*error)
        self._marking.__exit__(*error)

    def _mark(self) -> None:
        try:
            self.mode.mark()
        except Exception as error:  # in the middle of somebody's update
            self.mode.failed = self.mode.failed or error

    def step_ended(self) -> None:
        """To be called after each of the steps, which are as many on every rank."""
        if self._peak_before is not None:
            allocated = memory.peaks().peak_allocated_bytes if self._exact else None
            self._looks.append((self.mode.at_peak, self.mode.peak, self._peak_before, allocated))
        self._peak_before, self._after = self.mode.peak, self.mode.by_role()
        if len(self._looks) < LOOKS:
            self.mode.look_again()
            if self._exact:
                memory.reset_peaks()

    def components(self) -> RankComponents | None:
        """What was seen. None if no step was looked at to its end, as where a loop ends early."""
        if self._peak_before is None:
            return None
        looks = self._looks or [(None, self._peak_before, None, None)]
        at_peak, peak, peak_before, allocated = max(looks, key=lambda look: (look[0] is not None, look[1]))
        return RankComponents(
            at_peak=at_peak,
            after_step=self._after,
            tracked_peak_bytes=peak,
            tracked_peak_step_before_bytes=peak_before,
            allocator_peak_bytes=allocated,  # of the same step, by the allocator itself: includes what libraries take
            tracked_mean_bytes=self.mode.mean if len(self._looks) == LOOKS else None,
            gloo_copy_bytes=self.mode.gloo_copy_bytes,
        )


def memory_by_component(step, model, optimizer, device_type: str) -> RankComponents:
    """Memory at the peak of a step and after it, by role. Takes three untimed steps, on every rank."""
    with ComponentLook(model, optimizer, device_type) as look:
        for _ in range(look.STEPS):
            step()
            look.step_ended()
    if look.mode.failed:
        raise look.mode.failed
    return look.components()
