"""Runs the published script of document S002: three trainings in one process, as published or with its faults repaired.

accelerate launch --config_file accelerate_configs/single.yaml reproductions/as_printed.py --repair none

The published script gives the arguments their DeepSpeed settings only after it has created them, trains one model
object three times, and reads a peak counter that it never resets. This program records the effect of the first two,
and the peak of each training alone.
"""

import gc
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

sys.path[0] = str(Path(__file__).resolve().parents[1])

import datasets
import torch
import transformers
import tyro
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from study.core import arms, machine
from study.core.errors import Stop
from study.core.settings import Repair, Settings, TrainerFlags, check, resolve
from study.measure import memory
from study.measure.hardware import CUDA
from study.records import store
from study.records.schema import Record
from study.records.sections import Evaluation, Loss, Memory, Observed, ScriptTraining, Time
from study.training import ending, models, setup
from study.training.data import Data, load_data
from study.training.display import quiet, say
from study.training.launch import NO_LAUNCH, find_launch, set_threads

DEVICE = torch.device("cuda" if CUDA else "cpu")
RUNS = (("standard", 1), ("zero", 1), ("zero", 2))  # the name of each training, and its batch over that of the first
AS_PUBLISHED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
NEEDED_TO_ENGAGE = {"train_micro_batch_size_per_gpu": "auto"}  # without it DeepSpeed refuses to start
LOGGING_STEPS = 10  # as published
EVAL_STEPS = 50


def main(repair: Repair, settings: Annotated[TrainerFlags, tyro.conf.arg(name="")]) -> None:
    """Train three times as the published script does.

    Args:
        repair: none: as published. fresh_model: every training starts from the same weights. engaged: as fresh_model,
            and the arguments get their DeepSpeed settings when they are created.
        settings: The trainer's settings. --micro-batch is the batch of the first two trainings; the third has twice it.
    """
    ending.interrupt_on_signals(os.getppid())
    machine.put_programs_on_path()
    folder = ending.NO_FOLDER
    launch = NO_LAUNCH
    code = 1
    try:
        launch = find_launch()
        arm = arms.read(arms.find(launch.config_file))
        if arm.deepspeed is not None or "LOCAL_RANK" in os.environ:
            raise Stop("the published script sets up DeepSpeed by itself, on one device", "launch it with arm `single`")
        settings = resolve(settings, CUDA)
        folder, record = setup.open_folder(settings, arm, launch, rank=0)
        check(settings)
        set_threads(settings.threads)
        run_to_the_end(settings, repair, folder, record)
        code = 0
    except BaseException as error:
        ending.fail(folder, int(os.environ.get("RANK", 0)), error, launch)
    ending.leave(code)


def run_to_the_end(settings: Settings, repair: Repair, folder: Path, record: Record) -> None:
    started = time.perf_counter()
    record.requested.repair = repair
    data = load_data(settings)
    calls = count_initialize()
    if repair == "engaged":
        setup.load_operators(["cpu_adam"] if CUDA else ["deepspeed_shm_comm", "cpu_adam"], folder)
        # DeepSpeed needs a process group of one rank, as in transformers' documentation for notebooks.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        torch.distributed.init_process_group("nccl" if CUDA else "gloo")
    model = new_model(settings, data)
    ends = {weights_digest(model): "the initial weights"}
    runs: list[ScriptTraining] = []
    setup_s = time.perf_counter() - started
    for number, (name, factor) in enumerate(RUNS, start=1):
        if number > 1 and repair != "none":
            del model  # first free the last model and its trainer
            gc.collect()
            model = new_model(settings, data)
        calls.clear()
        weights_from = ends.get(weights_digest(model))
        run = train(settings, model, data, name, settings.micro_batch * factor, repair, folder)
        run.weights_from = weights_from
        run.deepspeed_initialize_calls = len(calls)
        runs.append(run)
        if repair != "engaged":
            ends[weights_digest(model)] = f"the end of training {number}"
        text = f"  {name} batch {run.batch}: {run.training_s:.1f} s, loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, "
        text += f"deepspeed.initialize called {len(calls)} times, started from {weights_from}"
        say(folder, text)
    record.observed = Observed(arm="single", ranks=1, runs=runs, logging_steps=LOGGING_STEPS)
    record.observed.data_source = data.source
    record.observed.data_checksum = data.checksum
    if CUDA:
        record.observed.tf32 = torch.backends.cuda.matmul.allow_tf32  # as published: PyTorch's own
    losses = [loss for run in runs for loss in run.losses]
    evals = [Evaluation.model_validate(line) for line in runs[-1].evals]
    record.loss = Loss(train=losses, eval=evals)
    record.time = Time(setup_s=setup_s)
    record.memory = Memory(per_rank=[memory.peaks()])
    record.status = "done"
    record.finished_utc = store.now_utc()
    store.keep(folder, record)
    say(folder, f"done: {folder / 'record.json'}")


def count_initialize() -> list:
    """Return a list that gets an entry with every call of deepspeed.initialize."""
    if not CUDA:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints a warning
    import deepspeed

    calls: list[float] = []
    initialize = deepspeed.initialize

    def counted(*args, **kwargs):
        calls.append(time.perf_counter())
        return initialize(*args, **kwargs)

    deepspeed.initialize = counted
    return calls


def new_model(settings: Settings, data: Data) -> torch.nn.Module:
    unset_hf_deepspeed_config()  # the last training's stage 3 would partition the weights while they are loaded
    transformers.set_seed(settings.seed)
    return models.build_model(settings, models.model_config(settings, data.vocabulary), DEVICE)


def weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def train(settings: Settings, model, data: Data, name: str, batch: int, repair: Repair, folder: Path) -> ScriptTraining:
    """Train as one call of the published `train_model` does."""
    engaged = name == "zero" and repair == "engaged"
    if CUDA:
        torch.cuda.empty_cache()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "results"),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        num_train_epochs=settings.epochs,
        max_steps=settings.steps or -1,
        learning_rate=settings.lr,
        eval_strategy="steps",
        logging_strategy="steps",
        logging_steps=LOGGING_STEPS,
        eval_steps=EVAL_STEPS,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=not CUDA and not engaged,
        deepspeed=AS_PUBLISHED | NEEDED_TO_ENGAGE if engaged else None,
    )
    if name == "zero" and not engaged:
        arguments.deepspeed = AS_PUBLISHED  # as published: after the arguments were created
    sets = {"train_dataset": as_dataset(data.train), "eval_dataset": as_dataset(data.eval)}
    trainer = transformers.Trainer(model=model, args=arguments, **sets)
    trainer.remove_callback(transformers.PrinterCallback)
    memory.reset_peaks()
    started = time.perf_counter()
    with quiet():
        trainer.train()
    training_s = time.perf_counter() - started
    peaks = memory.peaks()
    history = trainer.state.log_history
    shutil.rmtree(folder / "results", ignore_errors=True)
    return ScriptTraining(
        name=name,
        batch=batch,
        optimizer=type(trainer.optimizer).__name__,
        steps=trainer.state.global_step,
        training_s=training_s,  # as published: includes evaluations and the saving of a checkpoint
        peak_bytes=peaks.peak_allocated_bytes or peaks.host_peak_bytes,
        losses=[line["loss"] for line in history if "loss" in line],
        evals=[{"step": line["step"], "eval_loss": line["eval_loss"]} for line in history if "eval_loss" in line],
    )


def as_dataset(rows: dict[str, torch.Tensor]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: values.tolist() for name, values in rows.items()})


if __name__ == "__main__":
    tyro.cli(main, prog="as_printed.py", description=__doc__)
