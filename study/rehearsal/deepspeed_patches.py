"""How DeepSpeed runs as rank 0 of N without a GPU."""

from pathlib import Path
from typing import Any

import torch

from study.rehearsal.libraries import Patch, Rehearsal
from study.rehearsal.nothing import Nothing

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
        with rehearsal.count.watch.updating():
            result = take_step(this, *args, **kwargs)
        if this.global_steps != before:
            rehearsal.count.end_update()
        return result

    engine.step = step
    save, load = engine.save_checkpoint, engine.load_checkpoint
    saved: dict[Path, dict] = {}  # by the folder: what the script gave beside its weights

    def save_checkpoint(this, save_dir, tag=None, client_state=None, *args, **kwargs):
        saved[Path(save_dir).resolve()] = client_state or {}
        return save(this, save_dir, tag, client_state or {}, *args, **kwargs)

    def load_checkpoint(this, load_dir, *args, **kwargs):
        if Path(load_dir).resolve() in saved:  # the parts of the other ranks are not there
            return load_dir, saved[Path(load_dir).resolve()]
        return load(this, load_dir, *args, **kwargs)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    if not rehearsal.request.real:
        get_accelerator().pin_memory = lambda tensor, *_, **__: tensor
        get_accelerator().is_fp16_supported = lambda: True  # few CPUs say so
        TORCH.Tensor.record_stream = lambda *_, **__: None


def comm(rehearsal: Rehearsal, module) -> None:
    module.build_shm_op = lambda: None  # for neighbours on a CPU


def copies_for_saving(rehearsal: Rehearsal, module) -> None:
    """What DeepSpeed clones to be saved goes to the host, unless it is told another device."""
    clone = module.clone_tensors_for_torch_save

    def clone_to(item, device=None):
        if device is not None:
            return clone(item, device)
        with rehearsal.count.moments.made_on_host():
            return clone(item)

    module.clone_tensors_for_torch_save = clone_to


def coordinator(rehearsal: Rehearsal, module) -> None:
    module.assert_ints_same_as_other_ranks = lambda *_, **__: None
    rehearsal.shapes.wrap_all(module.PartitionedParameterCoordinator)


def partition(rehearsal: Rehearsal, module) -> None:
    rehearsal.shapes.wrap_all(module.Init)
    for owner in ("AllGatherHandle", "AllGatherCoalescedHandle", "MultipleAllGatherHandles", "GatheredParameters"):
        rehearsal.shapes.wrap_all(getattr(module, owner))


def builder(rehearsal: Rehearsal, module) -> None:
    """Build no operator: those of optimizers work in place."""
    module.OpBuilder.load = lambda *_, **__: Nothing()


def builder_without_cpu(rehearsal: Rehearsal, module) -> None:
    """An operator that DeepSpeed has for GPUs alone, such as FusedLamb's."""
    module.NotImplementedBuilder.load = lambda *_, **__: Nothing()


def stages_1_and_2(rehearsal: Rehearsal, module) -> None:
    owner = module.DeepSpeedZeroOptimizer
    rehearsal.shapes.wrap_all(owner)
    if not hasattr(owner, "setup_buckets"):  # an old release
        return
    make = owner.setup_buckets

    def make_and_sort(this) -> None:
        make(this)
        rehearsal.count.watch.sort_again()  # a bucket is often the peak, and is in its list only now

    owner.setup_buckets = make_and_sort


def without_values(class_name: str) -> Patch:
    """Return a patch by which new tensors of every method of a class have no values."""
    return lambda rehearsal, module: rehearsal.shapes.wrap_all(getattr(module, class_name))


PATCHES: dict[str, Patch] = {
    "deepspeed.checkpoint.utils": copies_for_saving,
    "deepspeed.runtime.engine": engine,
    "deepspeed.runtime.zero.partitioned_param_coordinator": coordinator,
    "deepspeed.runtime.zero.partition_parameters": partition,
    "deepspeed.runtime.zero.stage_1_and_2": stages_1_and_2,
    "deepspeed.runtime.zero.stage3": without_values("DeepSpeedZeroOptimizer_Stage3"),
    "deepspeed.runtime.zero.parameter_offload": without_values("DeepSpeedZeRoOffload"),
    "deepspeed.runtime.bf16_optimizer": without_values("BF16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": without_values("FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.fused_optimizer": without_values("FP16_Optimizer"),
    "deepspeed.comm.torch": comm,
}
WITHOUT_VALUES: dict[str, Patch] = {  # beside them, unless values are real
    "deepspeed.ops.op_builder.builder": builder,
    "deepspeed.ops.op_builder.cpu.no_impl": builder_without_cpu,
}
