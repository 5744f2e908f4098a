"""The process around the trainer: from the command line to the record, also when something fails."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import tyro
from accelerate.utils import DummyOptim
from transformers import PreTrainedModel

from study.errors import Stop
from study.machine import disk as nvme
from study.machine import operators, software
from study.measure import hardware, readback
from study.measure.collectives import Heartbeat
from study.measure.hardware import CUDA
from study.models.build import freeze
from study.records.schema import Observed, Record, Time
from study.spec import arms
from study.spec import optimizers as combinations
from study.spec.arms import Arm
from study.spec.options import OPTIONS, with_plain_help
from study.spec.settings import Flags, Settings, as_dict, check, check_steps, resolve
from study.training import checkpoints, ending, finish, models, patches, setup
from study.training.data import load_data
from study.training.launch import (
    Launch,
    cap_memory,
    describe_machines,
    find_launch,
    has_surplus_ranks,
    set_threads,
    shrink_group,
)
from study.training.run import Run, quiet

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

Train = Callable[[Run], Callable[[], object]]  # returns a function that takes one more step


@dataclass
class Opened:
    """The launch and the run folder of this process, as soon as they are known."""

    launch: Launch | None
    folder: Path | None = None


def main(train: Train, launch: Launch | None = None) -> None:
    """Run the trainer, and leave a record however it ends. `launch` is looked up unless it is given."""
    rank = int(os.environ.get("RANK", 0))
    parent = os.getppid()
    flags = read_flags(train, rank)
    ending.interrupt_on_signals(parent)
    software.put_programs_on_path()
    if not CUDA:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints a warning
    opened = Opened(launch)
    code = 1
    with contextlib.ExitStack() as stack:
        try:
            run_to_the_end(train, flags, rank, opened, stack)
            code = 0
        except BaseException as error:
            ending.fail(opened.folder, rank, error, opened.launch)
    ending.leave(code)


def read_flags(train: Train, rank: int) -> Flags:
    """Read the flags from the command line. Only the first rank prints help or a mistake."""
    text = sys.modules[train.__module__].__doc__
    try:
        return tyro.cli(
            with_plain_help(Flags), prog="train.py", description=text, console_outputs=rank == 0, registry=OPTIONS
        )
    except SystemExit as error:
        if rank != 0 and error.code:
            time.sleep(ending.LINGER_S)  # rank 0 prints the mistake; torchrun must see it end first
        raise


def run_to_the_end(train: Train, flags: Flags, rank: int, opened: Opened, stack: contextlib.ExitStack) -> None:
    """Check what was asked for, open the run folder, and train. `stack` closes what this opens."""
    launch = opened.launch = opened.launch or find_launch()
    arm = arms.read(arms.find(launch.config_file))
    if flags.virtual_ranks and rank != 0:
        os._exit(0)
    if has_surplus_ranks(arm, launch):
        shrink_group()
    settings = resolve(flags, CUDA)
    folder, record = setup.open_folder(settings, arm, launch, rank)
    opened.folder = folder
    end = functools.partial(ending.end_if_unresponsive, folder, rank, launch)
    heartbeat = Heartbeat(folder, rank, on_other_signal=end)
    stack.callback(heartbeat.close)
    check(settings)
    combinations.check(settings, arm)
    if settings.virtual_ranks:
        arms.check_virtual(arm, settings.init)
    set_threads(settings.threads, settings.hosts)
    disk = setup.claim_disk(settings, arm, launch, folder)
    stack.callback(nvme.empty, disk)
    started = time.perf_counter()
    run = open_run(settings, arm, folder, record, disk, heartbeat)
    run.source = checkpoints.find(run)
    values = patches.without_values(arm.fsdp is not None) if settings.init == "none" else contextlib.nullcontext()
    with values:
        in_step = train_and_inspect(train, run, started)
    finish.print_summary(run)
    if in_step and settings.log_with:
        run.accelerator.end_training()  # lets the trackers finish, and ends the process group
    if in_step and dist.is_initialized():  # out of step, this call could wait for another rank
        dist.destroy_process_group()


def train_and_inspect(train: Train, run: Run, started: float) -> bool:
    """Prepare the model, train it, and run the instruments. Returns whether all ranks reached the end together."""
    cap = cap_memory(run.settings.memory_cap_gib)
    if CUDA and run.arm.deepspeed:
        patches.deepspeed_sees_free_memory(cap)
    try:
        prepare(run)
        run.record.observed.memory_cap = cap
        run.record.time = Time(setup_s=time.perf_counter() - started)
        step_again = train(run)
    except Exception as error:
        if stop := ending.without_cuda(run.arm, error):
            raise stop from error
        raise
    return finish.after_training(run, step_again)


def open_run(
    settings: Settings, arm: Arm, folder: Path, record: Record, disk: Path | None, heartbeat: Heartbeat
) -> Run:
    """Open the accelerator, load the rows, and check that they are enough for the steps."""
    if arm.deepspeed is not None:
        setup.load_operators(operators.needed_by(arm, torch.cuda.device_count()), folder)
    with quiet():
        accelerator = setup.open_accelerator(settings, arm, disk, folder)
    # After Accelerate, which turns TF32 on for a compiled model.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    if accelerator.is_main_process:
        setup.announce(settings, arm, accelerator.num_processes, folder)
    with accelerator.main_process_first():  # the first rank prepares the rows, the others find them in the cache
        data = load_data(settings)
    run = Run(settings, arm, folder, record, accelerator, data, disk, heartbeat=heartbeat)
    run.at("preparing the model")
    record.machines = describe_machines(run)
    needed = run.rows_taken_per_step
    if needed > data.train_rows:
        remedy = "give a smaller --micro-batch or --accumulation, or more --train-rows"
        raise Stop(f"one step needs {needed} rows, and there are {data.train_rows}", remedy)
    of_epochs = int(settings.epochs * (data.train_rows // needed))
    run.steps = settings.steps or max(settings.warmup_steps + 1, of_epochs)
    check_steps(settings, run.steps)
    return run


def prepare(run: Run) -> None:
    """Build the model, pass it to Accelerate, and check that the result is what the arm promises."""
    settings = run.settings
    accelerator = run.accelerator
    model = _build(run)
    built_in_parts = all(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    has_weights = settings.init != "in_place" and not run.is_virtual
    checksum = readback.weights_checksum(accelerator, model) if has_weights else None
    shapes = readback.shapes(model)
    _wrap(run, model)
    seen = run.record.observed = _observed(run)
    seen.built_in_parts = built_in_parts
    if has_weights:
        seen.weights_checksum = readback.weights_checksum(accelerator, run.model)
    if settings.log_with is not None:
        _start_trackers(run)
    run.keep()
    if wrong := readback.mismatches(run.arm, settings, seen, int(os.environ.get("WORLD_SIZE", 1))):
        what = f"{run.arm.name}: the prepared objects do not match the arm's config: {'; '.join(wrong)}"
        raise Stop(what, "fix the arm's files", where="prepare")
    # FSDP separates tied weights; PyTorch itself reports that in the first pass.
    if seen.weights_checksum != checksum or (not run.arm.fsdp and readback.shapes(run.model) != shapes):
        what = f"{run.arm.name} does not train the weights that were loaded: preparing the model changed them"
        raise Stop(
            what,
            "find the feature in the arm's files that does this, such as ZenFlow of DeepSpeed 0.19.8",
            where="prepare",
        )
    if run.arm.for_cuda_alone == "DeepCompile":
        _refuse_without_deepcompile(run)


def _build(run: Run) -> PreTrainedModel:
    """Return the model with its starting weights, on the device unless DeepSpeed moves it there."""
    settings = run.settings
    accelerator = run.accelerator
    config = models.model_config(settings, run.data.vocabulary)
    if settings.init == "random":
        with accelerator.main_process_first():
            models.drawn_weights(settings, config)
    model = models.build_model(settings, config, accelerator.device)
    torch.manual_seed(settings.seed)  # so that adapters are the same, whether weights were drawn or loaded
    freeze(model, settings.lora_rank, settings.train_only)
    if run.arm.deepspeed is None:
        model.to(accelerator.device)  # before the optimizer, which may take copies of the weights
    return model


def _wrap(run: Run, model: PreTrainedModel) -> None:
    """Give the model and its optimizer to Accelerate, and apply the patches to what comes back."""
    settings = run.settings
    accelerator = run.accelerator
    with_master = settings.precision == "bf16_cast" and run.arm.deepspeed is None
    if run.arm.fsdp:
        patches.name_layers(accelerator, model)
    if "optimizer" in (run.arm.deepspeed or {}):
        optimizer = DummyOptim(model.parameters(), settings.lr, settings.weight_decay)  # Accelerate fills in "auto"
    else:
        optimizer = models.build_optimizer(settings, model, with_master and run.arm.fsdp is None)
    with quiet(), patches.ddp_on_one_gpu(run.arm):
        run.model, run.optimizer = accelerator.prepare(model, optimizer)
    if with_master and run.arm.fsdp:
        # Accelerate looks for the model's own parameters in the optimizer, so it gets an optimizer without copies. The
        # copies are of the parts that this rank holds, which exist only now.
        run.optimizer.optimizer = models.build_optimizer(settings, run.model, with_master)
    if run.is_virtual:
        patches.reduce_in_python(run.model)
        patches.compare_no_rows(run.model)
    if settings.save and run.arm.stage == 3 and not engine(run).zero_gather_16bit_weights_on_model_save():
        remedy = "set stage3_gather_16bit_weights_on_model_save in the arm's json"
        raise Stop("the weights are spread over the ranks, and DeepSpeed may not gather them", remedy)
    if settings.precision == "fp16" and run.arm.deepspeed:
        patches.lower_loss_scale_on_overflow(run.optimizer.optimizer)


def engine(run: Run) -> "DeepSpeedEngine":
    """Return the prepared model of an arm with DeepSpeed."""
    return cast("DeepSpeedEngine", run.model)


def _observed(run: Run) -> Observed:
    """Return what the prepared objects really are."""
    settings = run.settings
    accelerator = run.accelerator
    seen = readback.distribution(accelerator, run.model, run.optimizer)
    seen.ranks_counted = readback.count_ranks(accelerator)
    seen.arm = run.arm.name
    seen.steps = run.steps
    seen.virtual_ranks = settings.virtual_ranks
    row_groups = accelerator.num_processes // run.arm.row_ranks
    seen.rows_per_step = settings.micro_batch * settings.accumulation * row_groups
    seen.tokens_per_step = seen.rows_per_step * settings.sequence
    if settings.hosts:
        seen.network = hardware.describe_network(run.gathered(hardware.network_limits()))
    seen.held_parameters_per_rank = run.gathered(seen.held_parameters)
    seen.data_checksum = run.data.checksum
    seen.data_source = run.data.source
    seen.patches = sorted(patches.applied)
    return seen


def _start_trackers(run: Run) -> None:
    config = {name: value for name, value in as_dict(run.settings).items() if value is not None}
    options = {tracker: {"name": run.folder.name} for tracker in ("trackio", "wandb")}
    run.accelerator.init_trackers("zero-study", config | {"arm": run.arm.name}, options)
    run.record.observed.trackers = [tracker.name for tracker in run.accelerator.trackers]


def _refuse_without_deepcompile(run: Run) -> None:
    """Raise Stop if DeepCompile is not active: DeepSpeed 0.19.8 trains without it and prints nothing."""
    from deepspeed.compile.util import is_deepcompile_supported

    if not engine(run).is_deepcompile_active():
        supported = is_deepcompile_supported()
        what = f"{run.arm.name} trains without DeepCompile: DeepSpeed's is_deepcompile_supported() is {supported}"
        remedy = "give --compile" if supported else "use an NVIDIA GPU"
        raise Stop(what, remedy, "failed" if supported else "unavailable", "prepare")
