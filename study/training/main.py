"""The process around the trainer: from the command line to the record, also when something fails."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from study.core import arms, machine
from study.core import optimizers as combinations
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.options import parsed
from study.core.settings import Flags, Settings, check, check_steps, resolve
from study.measure.collectives import Heartbeat
from study.measure.hardware import CUDA
from study.records.schema import Record
from study.records.sections import Time
from study.training import ending, finish, patches, setup
from study.training.data import load_data
from study.training.display import announce, print_summary, quiet
from study.training.launch import (
    NO_LAUNCH,
    Launch,
    cap_memory,
    describe_machines,
    find_launch,
    set_threads,
    shrink_group,
)
from study.training.run import Run

Train = Callable[[Run], Callable[[], object]]  # returns a function that takes one more step


@dataclass
class Opened:
    """The launch and the run folder of this process, as soon as they are known."""

    launch: Launch
    folder: Path = ending.NO_FOLDER


def main(train: Train, launch: Launch = NO_LAUNCH) -> None:
    """Run the trainer, and leave a record however it ends. `launch` is looked up unless it is given."""
    rank = int(os.environ.get("RANK", 0))
    parent = os.getppid()  # before anything that takes time: the launcher may die meanwhile
    flags = read_flags(train, rank)
    ending.interrupt_on_signals(parent)
    machine.put_programs_on_path()
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
        return parsed(Flags, prog="train.py", description=text, console_outputs=rank == 0)
    except SystemExit as error:
        if rank != 0 and error.code:
            time.sleep(ending.LINGER_S)  # rank 0 prints the mistake; torchrun must see it end first
        raise


def run_to_the_end(train: Train, flags: Flags, rank: int, opened: Opened, stack: contextlib.ExitStack) -> None:
    """Check what was asked for, open the run folder, and train. `stack` closes what this opens."""
    if opened.launch is NO_LAUNCH:
        opened.launch = find_launch()
    launch = opened.launch
    arm = arms.read(arms.find(launch.config_file))
    if flags.virtual_ranks and rank != 0:
        os._exit(0)  # they exist only as numbers
    shrink_group(arm, launch)
    settings = resolve(flags, CUDA)
    folder, record = setup.open_folder(settings, arm, launch, rank)
    opened.folder = folder  # from here on the record says why a run ends
    end = functools.partial(ending.end_if_unresponsive, folder, rank, launch)
    heartbeat = Heartbeat(folder, rank, on_other_signal=end)
    stack.callback(heartbeat.close)
    # --- checks that need no library
    check(settings)
    combinations.check(settings, arm)
    if settings.virtual_ranks:
        arms.check_virtual(arm, settings.init)
    set_threads(settings.threads)
    disk = setup.claim_disk(settings, arm, launch, folder)
    stack.callback(machine.remove_swap_folder, disk)
    # --- the libraries, the model and the training
    started = time.perf_counter()
    run = open_run(settings, arm, folder, record, disk, heartbeat)
    if settings.init == "none":
        stack.enter_context(patches.without_values(arm.fsdp is not None))
    cap = cap_memory(settings.memory_cap_gib)
    if CUDA and arm.deepspeed:
        patches.deepspeed_sees_free_memory(cap)
    try:
        setup.prepare(run)
        run.record.observed.memory_cap = cap
        run.record.time = Time(setup_s=time.perf_counter() - started)
        step_again = train(run)
    except Exception as error:
        if CUDA or arm.for_cuda_alone is None or isinstance(error, Stop):
            raise
        line = str(error).strip().partition("\n")[0]
        what = f"{arm.for_cuda_alone} of {arm.name} needs an NVIDIA GPU ({type(error).__name__}: {line})"
        raise Stop(what, f"use one; study estimate --arm {arm.name} predicts it", where="prepare") from error
    in_step = finish.after_training(run, step_again)
    print_summary(run)
    if in_step and dist.is_initialized():  # out of step, this call could wait for another rank
        dist.destroy_process_group()


def open_run(
    settings: Settings, arm: Arm, folder: Path, record: Record, disk: Path | None, heartbeat: Heartbeat
) -> Run:
    """Open the accelerator, load the rows, and check that they are enough for the steps."""
    if arm.deepspeed is not None:
        from study.core import doctor  # other arms need none

        setup.load_operators(doctor.needed_by(arm, torch.cuda.device_count()), folder)
    with quiet():
        accelerator = setup.open_accelerator(settings, arm, disk)
    # After Accelerate, which turns TF32 on for a compiled model.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    if accelerator.is_main_process:
        announce(settings, arm, accelerator.num_processes, folder)
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
