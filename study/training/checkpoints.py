"""Saves checkpoints between windows of steps, and continues from the last, by Accelerate's save_state and load_state.

`checkpoints/step-00000040` is complete, because it was written as `step-00000040.part` and then renamed. It has digests
of its files, which are compared before it is loaded. The losses before it are in `steps.jsonl`.
"""

import os
from pathlib import Path
from shutil import rmtree

from study.core import digests
from study.core.errors import Stop
from study.core.files import flat
from study.core.settings import PATHS
from study.core.text import number_of
from study.records import store
from study.records.schema import Record
from study.training.run import History, OpenRun

FREE = {*PATHS, "config_file", "save_every"}  # settings that change no loss
SEEN = {"arm", "ranks", "steps", "data_checksum"}
CONFIGS = ("deepspeed", "fsdp")  # of the arm, as the engine took them: its files may have changed
KEPT = 2  # checkpoints: if the last is damaged, there is one before it
AGAIN = "name the folder of a run with --save-every, and give its settings; or start without --resume"


def save_if_due(run: OpenRun, step: int) -> None:
    """Write a checkpoint beside the last two, and then remove the first of three. After the last step none is due."""
    every = run.settings.save_every
    if not every or step % every or step == run.steps:
        return
    run.heartbeat.beat(f"the checkpoint after step {step}")
    folder = run.folder / "checkpoints" / f"step-{step:08}"
    part = folder.with_suffix(".part")
    run.accelerator.save_state(str(part))
    os.sync()  # on each machine: otherwise the new name may be on the disk before the content
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        digests.write(part)  # the others wait for at most ten minutes: at 0.8 GB/s of one core, 480 GB
        part.rename(folder)
        for older in {*folder.parent.iterdir()} - {*store.checkpoints(run.folder)[-KEPT:]}:
            rmtree(older)


def begin(run: OpenRun, history: History) -> int:
    """Continue the run that --resume names from its last checkpoint. Return the number of its steps; 0 without one."""
    scaler = getattr(run.optimizer.optimizer, "torch_autocast_gradscaler", None)
    if scaler:  # DeepSpeed 0.19.8 leaves it out (reproductions/checkpoint_without_its_loss_scale.py)
        run.accelerator.register_for_checkpointing(scaler)
    earlier = run.settings.resume
    if not earlier:
        return 0
    before = store.load(earlier)
    folders = store.checkpoints(earlier)
    if not folders:
        raise Stop(f"--resume {earlier} has no checkpoint", AGAIN)
    if run.accelerator.is_main_process:  # which has the record
        refuse_another(before, run.record)
        refuse_damaged(folders)
    run.accelerator.wait_for_everyone()  # no rank loads what is not checked
    folder = folders[-1]
    # --- what is in no checkpoint
    step = int(folder.name.removeprefix("step-"))
    lines = [line for line in store.read_steps(earlier) if line["step"] <= step]
    history.losses = before.loss.train[:step]
    history.rates = [line["lr"] for line in lines if "loss" in line]
    history.evals = [each for each in before.loss.eval if each.step <= step]
    # --- what is
    run.accelerator.load_state(str(folder))
    # Accelerate only logs that it could not restore the random states, and then has not restored its count of passes.
    if (run.accelerator.step, len(history.rates)) != (step * run.settings.accumulation, step):
        raise Stop(f"--resume {earlier} has lost random states, or lines of steps.jsonl", AGAIN)
    if run.accelerator.is_main_process:
        for line in lines:
            store.append_step(run.folder, line)
        run.record.checkpoints = {"resumes": [{"run_id": before.run_id, "step": step}]}
        run.keep()
    return step


def refuse_another(before: Record, record: Record) -> None:
    """Raise Stop for a run that is not the same training: the libraries would continue it without an error."""
    then, now = map(_decides, (before, record))
    wrong = [
        f"{name} was {then.get(name)} and is {now.get(name)}" for name in now | then if now.get(name) != then.get(name)
    ]
    if wrong:
        raise Stop(f"--resume {before.run_id} is another training: {'; '.join(wrong)}", AGAIN)


def _decides(record: Record) -> dict[str, object]:
    """Return by name what decides the losses of a run."""
    values = record.software | record.requested.model_dump(exclude=FREE) | record.observed.model_dump(include=SEEN)
    return values | flat({name: getattr(record.observed, name) for name in CONFIGS})


def refuse_damaged(folders: list[Path]) -> None:
    """Raise Stop if the last of these checkpoints is not what was written."""
    wrong = digests.damaged(folders[-1])
    if not wrong:
        return
    remedy = "start without --resume"
    if len(folders) > 1:
        remedy = f"remove it, and the run continues from {folders[-2].name}"
    what = f"the checkpoint {folders[-1]} is damaged: {number_of(len(wrong), 'files')}"
    raise Stop(f"{what} not as written, such as {wrong[0]}", remedy)
