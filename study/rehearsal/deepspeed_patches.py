"""How DeepSpeed runs as rank 0 of N without a GPU."""

import types
from typing import Any

import torch

from study.rehearsal.libraries import Patch, Rehearsal

TORCH: Any = torch  # whose parts are replaced


def engine(rehearsal: Rehearsal, module) -> None:
    from deepspeed.accelerator import get_accelerator

    engine = module.DeepSpeedEngine
    for name in ("__init__", "allreduce_gradients", "save_checkpoint", "load_checkpoint", "save_16bit_model"):
        setattr(engine, name, rehearsal.shapes.wrap(getattr(engine, name)))
    rehearsal.count.moments.wrap(engine, "save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")
    take_step = rehearsal.shapes.wrap(engine.step)

    def step(this, *args, **kwargs):
        before = this.global_steps
        rehearsal.count.engine = this
        result = take_step(this, *args, **kwargs)
        if this.global_steps != before:
            rehearsal.count.end_update()
        return result

    engine.step = step
    if not rehearsal.request.real:
        get_accelerator().pin_memory = lambda tensor, *_, **__: tensor
        TORCH.Tensor.record_stream = lambda *_, **__: None


def comm(rehearsal: Rehearsal, module) -> None:
    module.build_shm_op = lambda: None  # it would be compiled, for neighbours that do not exist


def coordinator(rehearsal: Rehearsal, module) -> None:
    module.assert_ints_same_as_other_ranks = lambda *_, **__: None
    rehearsal.shapes.wrap_all(module.PartitionedParameterCoordinator)


def partition(rehearsal: Rehearsal, module) -> None:
    rehearsal.shapes.wrap_all(module.Init)
    for owner in ("AllGatherHandle", "AllGatherCoalescedHandle", "MultipleAllGatherHandles", "GatheredParameters"):
        rehearsal.shapes.wrap_all(getattr(module, owner))


def cpu_adam(rehearsal: Rehearsal, module) -> None:
    if rehearsal.request.real:
        return

    def nothing(*_, **__) -> None:
        pass

    operator = types.SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
    module.CPUAdamBuilder = lambda: types.SimpleNamespace(load=lambda: operator)


def without_values(class_name: str) -> Patch:
    """Return a patch by which new tensors of every method of a class have no values."""
    return lambda rehearsal, module: rehearsal.shapes.wrap_all(getattr(module, class_name))


PATCHES: dict[str, Patch] = {
    "deepspeed.runtime.engine": engine,
    "deepspeed.runtime.zero.partitioned_param_coordinator": coordinator,
    "deepspeed.runtime.zero.partition_parameters": partition,
    "deepspeed.runtime.zero.stage_1_and_2": without_values("DeepSpeedZeroOptimizer"),
    "deepspeed.runtime.zero.stage3": without_values("DeepSpeedZeroOptimizer_Stage3"),
    "deepspeed.runtime.zero.parameter_offload": without_values("DeepSpeedZeRoOffload"),
    "deepspeed.runtime.bf16_optimizer": without_values("BF16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": without_values("FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.fused_optimizer": without_values("FP16_Optimizer"),
    "deepspeed.ops.adam.cpu_adam": cpu_adam,
    "deepspeed.comm.torch": comm,
}
