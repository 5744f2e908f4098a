"""Saves checkpoints between windows of steps and resumes from them, with Accelerate's `save_state` and `load_state`.

Here is what the libraries leave out: the losses so far, whether a checkpoint is complete and of the same training, and
whether the random states were restored.
"""

import contextlib
import hashlib
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint.api import CheckpointException

from study.core import files
from study.core.errors import Stop
from study.core.settings import flag
from study.measure import readback
from study.measure.hardware import CUDA
from study.measure.memory import difference, disk_bytes, highest, peaks, reset_peaks, written_bytes
from study.records import checkpoints, store
from study.records.checkpoints import Progress
from study.records.schema import CheckpointSaved, RankMemory, Resume
from study.training import ending
from study.training.display import quiet, say
from study.training.run import History, Run

# The settings that decide the losses. The number of ranks may change, as long as a step has as many rows.
DECIDES = (
    *("task", "model", "tokenizer", "data", "init", "precision", "optimizer", "lora_rank", "train_only", "sequence"),
    *("train_rows", "eval_rows", "lr", "lr_warmup_steps", "weight_decay", "dropout", "seed"),
)


@dataclass
class Source:
    """The checkpoint to resume from."""

    run_folder: Path
    path: Path
    progress: Progress
    passed_over: list[str]


@dataclass
class Cost:
    """The memory, time and bytes that saving or loading took on one rank."""

    before: RankMemory
    peak: RankMemory | None = None
    seconds: float | None = None
    written_bytes: int | None = None


def save(run: Run, history: History, step: int) -> None:
    """Write a checkpoint beside the others. It gets its final name once it is complete."""
    part = checkpoints.part_of(run.folder, step)
    random_states = run.gathered(_random_states())
    size = 0
    try:
        with _outside_steps(history) as cost:
            run.accelerator.save_state(str(part))
            run.accelerator.wait_for_everyone()
        with _outside_steps(history) as sealing:
            weights_checksum = readback.weights_checksum(run.accelerator, run.model)
            if run.accelerator.is_main_process:
                progress = Progress(
                    run_id=run.folder.name,
                    arm=run.arm.name,
                    ranks=run.accelerator.num_processes,
                    requested=run.record.requested,
                    rows_per_step=run.rows_taken_per_step,
                    data_checksum=run.data.checksum,
                    step=step,
                    steps=run.steps,
                    losses=history.losses,
                    rates=history.rates,
                    evals=history.evals,
                    random_states=random_states,
                    weights_checksum=weights_checksum,
                    resumes=run.record.checkpoints.resumes,
                )
                files.write_below(part, checkpoints.PROGRESS, progress.model_dump_json().encode())
                size = checkpoints.seal(part)[1]
                checkpoints.forget_old(run.folder)
            run.accelerator.wait_for_everyone()
    except Exception as error:
        if ending.lost_another_rank(error):
            raise
        what = f"the checkpoint of step {step} could not be written ({_first_line(error)})"
        raise Stop(what, "make room on its disk, and --resume from the one before", where="checkpoint") from error
    costs = run.gathered(cost)
    run.record.checkpoints.saved.append(
        CheckpointSaved(
            step=step,
            bytes=size,  # of the first rank, whose record is written
            written_bytes_per_rank=[each.written_bytes for each in costs],
            save_s_per_rank=[each.seconds for each in costs],
            seal_s=sealing.seconds,
            peak_per_rank=[each.peak for each in costs],
        )
    )
    run.keep()


def die(run: Run) -> None:
    """Kill the first rank without a clean-up, as a machine failure would. The other ranks notice it themselves."""
    if run.accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _outside_steps(history: History) -> Iterator[Cost]:
    """Measure what belongs to no timed step, and keep its memory and disk traffic out of theirs."""
    history.peaks = highest(history.peaks, peaks())
    reset_peaks()
    cost = Cost(peaks())
    disk = disk_bytes()
    written = written_bytes()
    started = time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - started
    cost.peak = peaks()
    cost.written_bytes = difference(written_bytes(), written)
    reset_peaks()
    for name, after in disk_bytes().items():
        before = history.disk_before.get(name)
        moved = difference(after, disk[name])
        if before is not None and moved is not None:
            history.disk_before[name] = before + moved


def _random_states() -> str:
    """Return a digest of all generators that Accelerate saves."""
    numpys = np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002  Accelerate saves this one
    states = [random.getstate(), numpys, torch.get_rng_state().tolist()]
    states += [state.tolist() for state in torch.cuda.get_rng_state_all()] if CUDA else []
    return hashlib.sha256(pickle.dumps(states)).hexdigest()[:16]


def find(run: Run) -> Source | None:
    """Return the last good checkpoint of the run that --resume names. Call it before the model is prepared.

    Only the first rank verifies checkpoints, which takes a while; it sends the result to the others.
    """
    if run.settings.resume is None:
        return None
    if run.arm.uses_nvme:
        what = "DeepSpeed 0.19.8 does not restore optimizer states on a disk, and reports no error (study claims K-02)"
        raise Stop(what, "start again without --resume, or offload to the host (zero3_cpu)", "unavailable", "resume")
    answer = [checkpoints.last_good(run.settings.resume) if run.accelerator.is_main_process else None]
    path, passed_over = broadcast_object_list(answer)[0]
    if path is None:
        what = f"--resume {run.settings.resume} has no good checkpoint ({'; '.join(passed_over) or 'there is none'})"
        raise Stop(what, "start the run from its beginning, without --resume")
    source = Source(run.settings.resume, path, checkpoints.read_progress(path), passed_over)
    _refuse_another_training(run, source.progress)
    return source


def _is_elsewhere(run: Run, source: Source) -> bool:
    """Return whether the training resumes under another arm, or on another number of ranks."""
    return (source.progress.arm, source.progress.ranks) != (run.arm.name, run.accelerator.num_processes)


def _refuse_another_training(run: Run, progress: Progress) -> None:
    """Compare the checkpoint's training with this one: the libraries would resume another training without an error."""
    pairs = [(flag(name), getattr(progress.requested, name), getattr(run.settings, name)) for name in DECIDES]
    pairs += [("steps", progress.steps, run.steps)]
    pairs += [("rows in a step", progress.rows_per_step, run.rows_taken_per_step)]
    pairs += [("the data's checksum", progress.data_checksum, run.data.checksum)]
    if other := [f"{name} was {before} and is {now}" for name, before, now in pairs if before != now]:
        what = f"the checkpoint is of another training ({'; '.join(other)})"
        raise Stop(what, "give the settings of the run that --resume names")


def begin(run: Run, history: History) -> int:
    """Register what checkpoints have to contain, and resume if asked to. Returns the steps taken before."""
    if (scaler := getattr(run.optimizer.optimizer, "torch_autocast_gradscaler", None)) is not None:
        # DeepSpeed 0.19.8 leaves it out of its checkpoints, and would resume with the scale of the first step.
        run.accelerator.register_for_checkpointing(scaler)
    return 0 if run.source is None else _resume(run, history, run.source)


def _resume(run: Run, history: History, source: Source) -> int:
    progress = source.progress
    with _outside_steps(history) as cost:
        _load(run, source)
    weights = run.gathered(readback.weights_checksum(run.accelerator, run.model))[0]
    if weights != progress.weights_checksum:  # a library may load others without an error
        what = f"after loading {source.path.name}, {run.arm.name} does not have the weights that were saved"
        raise Stop(what, "start again without --resume, or resume under another arm", where="resume")
    history.peaks = None  # peaks count again after the warm-up, which is repeated
    history.losses = list(progress.losses)
    history.rates = list(progress.rates)
    history.evals = list(progress.evals)
    restored_here = progress.random_states[run.accelerator.process_index :][:1] == [_random_states()]
    restored = all(run.gathered(restored_here))
    if not restored and not _is_elsewhere(run, source):
        what = f"the random states of {source.path} were not restored, so dropout would differ"
        raise Stop(what, "resume with the versions of Python, torch and Accelerate that wrote it", where="resume")
    costs = run.gathered(cost)
    status, reached = checkpoints.how_it_ended(source.run_folder)
    resume = Resume(
        run_id=progress.run_id,
        status=status,
        reached=reached,
        step=progress.step,
        arm=progress.arm,
        ranks=progress.ranks,
        passed_over=source.passed_over,
        random_states=restored,
        peak_per_rank=[each.peak for each in costs],
    )
    run.record.checkpoints.resumes = [*progress.resumes, resume]
    if run.accelerator.is_main_process:
        _write_curve(run, progress)
        skipped = f"; passed over {'; '.join(source.passed_over)}" if source.passed_over else ""
        again = f", which had reached step {resume.reached}" if resume.reached else ""
        say(run.folder, f"  goes on after step {progress.step} of {progress.run_id}{again}{skipped}")
    run.keep()
    return progress.step


def _load(run: Run, source: Source) -> None:
    try:
        with quiet():
            run.accelerator.load_state(str(source.path))
    except (Exception, CheckpointException) as error:
        if ending.lost_another_rank(error) or not _is_elsewhere(run, source):
            raise
        before = source.progress
        what = f"a checkpoint of {before.arm} on {before.ranks} ranks does not load under {run.arm.name}"
        what += f" on {run.accelerator.num_processes} ({_first_line(error)})"
        raise Stop(what, "resume it under its own arm and ranks", "unavailable", "resume") from error


def _first_line(error: BaseException) -> str:
    """Return the type and first line of a library's error. PyTorch wraps those of several ranks with their traces."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _write_curve(run: Run, progress: Progress) -> None:
    """Write the steps and evaluations before the checkpoint into this run's own file."""
    steps = zip(progress.losses, progress.rates, strict=True)
    lines = [{"step": step, "loss": loss, "lr": rate} for step, (loss, rate) in enumerate(steps, 1)]
    lines += [each.model_dump(exclude_none=True) for each in progress.evals]
    for line in sorted(lines, key=lambda line: line["step"]):  # stable: an evaluation stands after its step
        store.append_step(run.folder, line)
