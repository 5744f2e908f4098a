"""Everything before the first step: the run folder, the folder for offloading, the Accelerator, model and optimizer."""

import contextlib
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from transformers import PreTrainedModel

from study.core import arms, machine, operators
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.models.build import freeze
from study.core.settings import Settings, as_dict
from study.measure import hardware, readback
from study.measure.hardware import CUDA
from study.records import collectives, store
from study.records.schema import Record
from study.records.sections import Machine, Requested
from study.training import models, patches
from study.training.display import log_to, quiet, say
from study.training.launch import Launch, from_torchrun
from study.training.optimizers import build_optimizer
from study.training.run import OpenRun

BACKEND = "nccl" if CUDA else "gloo"
BUCKET_MIB = 25  # DDP's default; buckets in the fair arms' DeepSpeed configs also have 25 MiB in fp32
# Accelerate 1.15 leaves out what equals its default, and the default of its class is NCCL's 10 minutes: with gloo
# PyTorch would then wait for half an hour.
WAIT = datetime.timedelta(minutes=10, seconds=1)


def open_folder(settings: Settings, arm: Arm, launch: Launch, rank: int) -> tuple[Path, Record]:
    """Return the run folder and its record, whose status is running. Every rank names it; the first one writes it."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(launch.started))
    name = f"{when}-{arm.name}-{settings.task}-{Path(settings.model).name}-s{settings.seed}-{launch.pid}"
    folder = (settings.run_dir or safe_join(Path("runs"), name)).resolve()
    if rank != 0:
        log_to(None)
        return folder, Record(run_id=folder.name, started_utc=store.now_utc())
    first = [folder / "output.txt", *collectives.paths(folder)]  # of a sweep, and of ranks that wrote no record
    if taken := sorted(path.name for path in folder.glob("*") if path not in first):
        raise Stop(f"--run-dir {folder} already holds {', '.join(taken[:3])}", "give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_to(folder)
        record = store.new(folder.name, sys.argv)
        # The settings are checked once there is a record to say what is wrong with them.
        record.requested = Requested(**as_dict(settings), arm=arm.name, config_file=launch.config_file)
        record.hardware = hardware.describe()
        record.software = hardware.versions()
        store.write(folder, record)
    except OSError as error:
        raise Stop(f"--run-dir {folder} cannot be written ({error.strerror})", "give another folder") from None
    return folder, record


def claim_disk(settings: Settings, arm: Arm, launch: Launch, folder: Path) -> Path | None:
    """Return the folder for offloading, for arms that use it, if its disk has room for the ranks of this machine."""
    if not arm.uses_nvme:
        return None
    model = models.on_meta(settings, models.model_config(settings, vocabulary=None))
    all_bytes = model.num_parameters() * machine.BYTES_PER_PARAMETER
    needed_bytes = all_bytes * from_torchrun("LOCAL_WORLD_SIZE") // from_torchrun("WORLD_SIZE")
    base = (settings.nvme_dir or folder.parent / "nvme").resolve()
    disk = base / f"{folder.name}-{launch.pid}"  # another run may have this name and this disk
    machine.make_swap_folder(disk, needed_bytes)
    return disk


def describe_machines(run: OpenRun) -> list[Machine]:
    """Return the machines of a run with their ranks, in order. Empty for a single machine."""
    machines: dict[int, Machine] = {}
    if from_torchrun("GROUP_WORLD_SIZE") > 1:
        versions = hardware.versions()
        mine = from_torchrun("GROUP_RANK"), Machine(hardware=hardware.describe()), versions
        for rank, (number, described, theirs) in enumerate(run.gathered(mine)):
            differ = ", ".join(sorted(name for name in versions if versions[name] != theirs.get(name)))
            if differ:
                remedy = "install the same versions on each"
                raise Stop(f"the machines have different versions of {differ}", remedy, where="prepare")
            machines.setdefault(number, described).ranks.append(rank)
    return list(machines.values())


def load_operators(names: list[str], folder: Path) -> None:
    """Load DeepSpeed's operators before DeepSpeed does: it prints messages, and trusts a lock that can be stale."""

    def tell(text: str) -> None:  # that one is compiled, or waited for
        if from_torchrun("LOCAL_RANK", 0) == 0:
            with contextlib.redirect_stdout(sys.__stdout__):
                say(folder, text)

    with quiet():  # DeepSpeed prints while it is imported
        operators.load(names, torch.cuda.device_count(), tell)


# --- the Accelerator -------------------------------------------------------------------------------------------------


def open_accelerator(settings: Settings, arm: Arm, disk: Path | None) -> Accelerator:
    """Return the Accelerator that the arm's yaml describes, with the run's precision, batch and disk folder."""
    sharing_ranks = arm.sharing_ranks(from_torchrun("WORLD_SIZE"))  # a Stop if the ranks do not fill the arm's groups
    compiler = "inductor"
    if not settings.compile:
        compiler = "no"
        # This also saves each rank 0.9 s: every stage imports DeepSpeed's Muon, whose torch.compile decorators would
        # import the whole compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"  # given below: Accelerate cannot read `auto`
    # DDP with the least memory and traffic: gradients are in the buckets, and constant buffers are not broadcast.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=BUCKET_MIB)
    recipe = settings.recipe
    # "no" is said as well: otherwise `accelerate launch --mixed_precision` would count.
    mixed_precision = settings.precision if recipe.casts else "no"
    # Without DeepSpeed, Accelerate itself chooses the backend, or takes the group of a virtual rank.
    backend = None
    if arm.deepspeed is not None:
        backend = "fake" if settings.virtual_ranks else BACKEND
        if recipe.autocast:  # which is in its own config
            mixed_precision = "no"
    options: dict[str, Any] = {
        "gradient_accumulation_steps": settings.accumulation,
        "dynamo_backend": compiler,
        "kwargs_handlers": [InitProcessGroupKwargs(backend=backend, timeout=WAIT), ddp],
        "mixed_precision": mixed_precision,
    }
    if arm.deepspeed is None:
        return _open_without_deepspeed(settings, arm, sharing_ranks, options)
    if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(arms.find(file, arm.path.parent))
    plugin = DeepSpeedPlugin()
    _fill_in(plugin.deepspeed_config, settings, arm, disk)
    if arm.sequence_ranks > 1:
        options["parallelism_config"] = _sequence(settings, arm)
    return Accelerator(deepspeed_plugin=plugin, **options)


def _open_without_deepspeed(settings: Settings, arm: Arm, sharing_ranks: int, options: dict) -> Accelerator:
    if settings.recipe.scales_loss and not CUDA:
        what = f"--precision fp16 needs a GPU under {arm.name}: Accelerate scales the loss only on a GPU"
        raise Stop(what, "give bf16")
    groups = None
    if arm.replicas > 1:
        groups = ParallelismConfig(arm.replicas, sharing_ranks)
    if arm.fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()  # from what the launcher read in the yaml
    if CUDA:
        return Accelerator(parallelism_config=groups, **options)
    accelerator = Accelerator(cpu=True, **options)  # cpu=False would give independent trainings
    if arm.fsdp:
        patches.fsdp_without_a_gpu(options["fsdp_plugin"], accelerator.mixed_precision, groups)
    return accelerator


def _fill_in(config: dict, settings: Settings, arm: Arm, disk: Path | None) -> None:
    """Add the run's batch, precision, optimizer and disk folder to an arm's DeepSpeed config."""
    config["train_micro_batch_size_per_gpu"] = settings.micro_batch
    config["gradient_accumulation_steps"] = settings.accumulation
    config["timers"] = {"throughput": {"enabled": False}}  # it waits for the device before and after every pass
    recipe = settings.recipe
    if recipe.autocast:
        config["torch_autocast"] = {"enabled": True, "dtype": recipe.autocast, "lower_precision_safe_modules": []}
    elif recipe.weight_bytes == 2:
        pure = not recipe.master_bytes
        config["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": pure,
            "bf16_optimizer_states": pure,
            "check_grad_overflow": False,  # DDP does not skip a step on overflow either
        }
    if settings.optimizer != "adamw":
        config["zero_allow_untested_optimizer"] = True
    zero = config["zero_optimization"]
    if settings.optimizer == "muon" and arm.stage == 3:
        zero["reduce_scatter"] = False  # else it raises: Muon takes whole gradients
    for part in arms.OFFLOADS:
        if zero.get(part, {}).get("device") == "nvme":
            zero[part]["nvme_path"] = str(disk)


def _sequence(settings: Settings, arm: Arm) -> ParallelismConfig:
    """Return Accelerate's config of sequence parallelism, for rows of equal length."""
    if settings.sequence % arm.sequence_ranks:
        what = f"{arm.name} cuts sequences into {arm.sequence_ranks} equal parts (got --sequence {settings.sequence})"
        raise Stop(what, f"give a multiple of {arm.sequence_ranks}")
    rows = DeepSpeedSequenceParallelConfig(settings.sequence, False, settings.attention)  # which refuses eager
    # The same attention as in the other arms, which it would not take.
    rows.sp_attn_implementation = models.model_config(settings, vocabulary=None)._attn_implementation
    # Accelerate 1.15 counts a step's rows by the number of groups, and takes it for 1 if it is not given.
    groups = from_torchrun("WORLD_SIZE") // arm.sequence_ranks
    return ParallelismConfig(dp_shard_size=groups, sp_size=arm.sequence_ranks, sp_backend="deepspeed", sp_handler=rows)


# --- the model -------------------------------------------------------------------------------------------------------


def prepare(run: OpenRun) -> None:
    """Build the model, pass it to Accelerate, and check that the result is what the arm promises."""
    settings = run.settings
    arm = run.arm
    model = _starting_model(run)
    # --- what it is before Accelerate has it, and after
    has_weights = settings.init != "in_place" and not run.is_virtual  # that other arms have as well
    checksum = readback.weights_checksum(run.accelerator, model) if has_weights else None
    shapes = readback.shapes(model)  # virtual ranks and tensors without values have no checksum
    built_in_parts = all(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    _wrap(run, model)
    seen = run.record.observed = readback.distribution(run.accelerator, run.model, run.optimizer)
    seen.ranks_counted = readback.count_ranks(run.accelerator)
    seen.arm = arm.name
    seen.steps = run.steps
    seen.virtual_ranks = settings.virtual_ranks
    row_groups = run.accelerator.num_processes // arm.row_ranks  # all, not only those that exist
    seen.rows_per_step = settings.micro_batch * settings.accumulation * row_groups
    seen.tokens_per_step = seen.rows_per_step * settings.sequence
    seen.held_parameters_per_rank = run.gathered(seen.held_parameters)
    seen.data_checksum = run.data.checksum
    seen.data_source = run.data.source
    seen.patches = sorted(patches.applied)
    seen.built_in_parts = built_in_parts
    if has_weights:
        seen.weights_checksum = readback.weights_checksum(run.accelerator, run.model)
    run.keep()
    # --- whether that is what was asked for
    wrong = readback.mismatches(arm, settings, seen, from_torchrun("WORLD_SIZE"))
    # FSDP separates tied weights; PyTorch itself reports that in the first pass.
    if seen.weights_checksum != checksum or (not arm.fsdp and readback.shapes(run.model) != shapes):
        wrong.append("weights: preparing the model changed them")
    if wrong:
        what = f"{arm.name}: the prepared objects do not match the arm's config: {'; '.join(wrong)}"
        raise Stop(what, "fix the arm's files", where="prepare")


def _starting_model(run: OpenRun) -> PreTrainedModel:
    """Return the model with its starting weights, on the device unless DeepSpeed moves it there."""
    settings = run.settings
    config = models.model_config(settings, run.data.vocabulary)
    if settings.init == "random":
        with run.accelerator.main_process_first():
            if run.accelerator.is_main_process:  # the others find them, and each checks what it loads
                models.drawn_weights(settings, config)
    model = models.build_model(settings, config, run.accelerator.device)
    torch.manual_seed(settings.seed)  # so that adapters are the same, whether weights were drawn or loaded
    freeze(model, settings.lora_rank)
    if run.arm.deepspeed is None:
        model.to(run.accelerator.device)  # before the optimizer, which may take copies of the weights
    return model


def _wrap(run: OpenRun, model: PreTrainedModel) -> None:
    """Give the model and its optimizer to Accelerate, and apply the patches to what comes back."""
    settings = run.settings
    arm = run.arm
    recipe = settings.recipe
    with_master = bool(recipe.master_bytes) and arm.deepspeed is None  # DeepSpeed has its own
    if arm.fsdp:
        patches.name_layers(run.accelerator, model)
    optimizer = build_optimizer(settings, model, with_master and not arm.fsdp)
    with quiet(), patches.ddp_on_one_gpu(arm):
        run.model, run.optimizer = run.accelerator.prepare(model, optimizer)
    if with_master and arm.fsdp:
        # Only now: the copies are of the parts that this rank holds, and Accelerate looks for the model's parameters.
        run.optimizer.optimizer = build_optimizer(settings, run.model, with_master)
    if run.is_virtual:
        patches.stand_alone(run.model)
    if recipe.scales_loss and arm.deepspeed:
        patches.lower_loss_scale_on_overflow(run.optimizer.optimizer)
