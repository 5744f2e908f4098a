"""The process around the trainer: from the command line to the record, also when something fails."""

import contextlib
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from study.core import arms, machine, operators
from study.core import optimizers as combinations
from study.core.errors import Stop, exit_on_stop
from study.core.options import parsed
from study.core.settings import TrainerFlags, check, check_steps, resolve
from study.measure.hardware import CUDA
from study.measure.heartbeat import Heartbeat
from study.measure.virtual_rank import become_virtual_rank
from study.records.sections import Time
from study.training import ending, finish, patches, setup
from study.training.data import load_data
from study.training.display import announce, print_summary, quiet
from study.training.launch import NO_LAUNCH, Launch, cap_memory, find_launch, from_torchrun, set_threads, shrink_group
from study.training.run import OpenRun

Train = Callable[[OpenRun], Callable[[], object]]  # returns a function that takes one more step


def main(train: Train) -> None:
    """Run the trainer, and leave a record however it ends."""
    rank = from_torchrun("RANK", 0)
    parent = os.getppid()  # before anything that takes time: the launcher may die meanwhile
    flags = read_flags(train, rank)
    ending.interrupt_on_signals(parent)
    machine.put_programs_on_path()
    if not CUDA:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints a warning
    folder = ending.NO_FOLDER
    launch = NO_LAUNCH
    code = 1
    with contextlib.ExitStack() as stack:
        try:
            launch = find_launch()
            arm = arms.read(arms.find(launch.config_file))
            if flags.virtual_ranks and rank != 0:
                os._exit(0)  # they exist only as numbers
            shrink_group(arm, launch)
            settings = resolve(flags, CUDA)
            if rank == 0 and (lock := os.environ.get(machine.DEVICE_LOCK)):  # others wait for it in a collective
                if arm.deepspeed is not None:
                    import deepspeed  # noqa: F401  seconds, in which another training may have the device
                machine.take_device(lock)
            folder, record = setup.open_folder(settings, arm, launch, rank)  # from here on it says why a run ends
            heartbeat = Heartbeat(folder, rank, partial(ending.end_if_unresponsive, folder, rank, launch))
            stack.callback(heartbeat.close)
            # It lives until this process ends: DDP's reducer, freed as the last holder of a gloo group, may wait for
            # ever for a thread that waits for Python's lock (torch 2.13: `reports/log.md`).
            run = OpenRun(settings, arm, folder, record, heartbeat)
            run_to_the_end(train, run, launch, stack)
            code = 0
        except BaseException as error:
            ending.fail(folder, rank, error, launch)
            if isinstance(error, KeyboardInterrupt):  # as a shell says it: the launcher reports this code
                code = 128 + signal.Signals[str(error)]
    ending.leave(code)


def read_flags(train: Train, rank: int) -> TrainerFlags:
    """Read the flags from the command line. Only the first rank prints help or a mistake."""
    text = sys.modules[train.__module__].__doc__
    try:
        # Another rank may print into nothing, so that a mistake is told once.
        with contextlib.redirect_stderr(sys.stderr if rank == 0 else io.StringIO()), exit_on_stop():
            return parsed(TrainerFlags, prog="train.py", description=text, console_outputs=rank == 0)
    except SystemExit as error:
        if rank != 0 and error.code:
            time.sleep(ending.LINGER_S)  # rank 0 prints the mistake; torchrun must see it end first
        raise


def run_to_the_end(train: Train, run: OpenRun, launch: Launch, stack: contextlib.ExitStack) -> None:
    """Check what was asked for, and train. `stack` closes what this opens."""
    settings = run.settings
    arm = run.arm
    # --- checks that need no library
    check(settings)
    combinations.check(settings, arm)
    if settings.virtual_ranks:
        arms.check_virtual(arm, settings.init)
        become_virtual_rank(settings.virtual_ranks)
    set_threads(settings.threads)
    disk = setup.claim_disk(settings, arm, launch, run.folder)
    if disk:  # the folder above it stays, as it may be the user's own
        stack.callback(shutil.rmtree, disk, ignore_errors=True)
    # --- the libraries, the model and the training
    started = time.perf_counter()
    open_run(run, disk)
    if settings.init == "none":
        stack.enter_context(patches.without_values(arm.fsdp is not None))
    cap = cap_memory(settings.memory_cap_gib)
    if CUDA and arm.deepspeed:
        patches.deepspeed_sees_free_memory(cap)
    setup.prepare(run)
    run.record.observed.memory_cap = cap
    run.record.time = Time(setup_s=time.perf_counter() - started)
    step_again = train(run)
    in_step = finish.after_training(run, step_again)
    print_summary(run)
    if in_step and dist.is_initialized():  # out of step, this call could wait for another rank
        dist.destroy_process_group()


def open_run(run: OpenRun, disk: Path | None) -> None:
    """Open the accelerator, load the rows, and check that they are enough for the steps."""
    settings = run.settings
    arm = run.arm
    if arm.deepspeed is not None:
        setup.load_operators(operators.needed_by(arm, torch.cuda.device_count()), run.folder)
    with quiet():
        run.accelerator = setup.open_accelerator(settings, arm, disk)
    # After Accelerate, which turns TF32 on for a compiled model.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    announce(run)
    with run.accelerator.main_process_first():  # the first rank prepares the rows, the others find them in the cache
        run.data = load_data(settings)
    run.heartbeat.beat("preparing the model")
    run.record.machines = setup.describe_machines(run)
    needed = run.rows_taken_per_step
    if needed > run.data.train_rows:
        remedy = "give a smaller --micro-batch or --accumulation, or more --train-rows"
        raise Stop(f"one step needs {needed} sequences, and there are {run.data.train_rows}", remedy)
    of_epochs = int(settings.epochs * (run.data.train_rows // needed))
    run.steps = settings.steps or max(settings.warmup_steps + 1, of_epochs)
    check_steps(settings, run.steps)
