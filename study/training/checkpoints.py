"""Saves checkpoints between windows of steps, and continues from the last, by Accelerate's save_state and load_state.

`checkpoints/step-00000040` is complete, because it was written as `step-00000040.part` and then renamed. The losses
before it are in `steps.jsonl`.
"""

import os
from shutil import rmtree

from study.core.errors import Stop
from study.core.settings import PATHS
from study.records import store
from study.records.schema import Record
from study.training.run import History, OpenRun

FREE = {*PATHS, "config_file", "save_every"}  # settings that change no loss
SEEN = {"arm", "ranks", "steps", "data_checksum"}
AGAIN = "name the folder of a run with --save-every, and give its settings; or start without --resume"


def save_if_due(run: OpenRun, step: int) -> None:
    """Write a checkpoint beside the last one, and then remove that. After the last step none is due."""
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
        part.rename(folder)
        for older in {*folder.parent.iterdir()} - {folder}:
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
    folder = store.checkpoint(earlier)
    if not folder:
        raise Stop(f"--resume {earlier} has no checkpoint", AGAIN)
    if run.accelerator.is_main_process:  # which has the record
        refuse_another(before, run.record)
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
    then, now = (
        each.software | each.requested.model_dump(exclude=FREE) | each.observed.model_dump(include=SEEN)
        for each in (before, record)
    )
    wrong = [f"{name} was {then.get(name)} and is {now[name]}" for name in now if now[name] != then.get(name)]
    if wrong:
        raise Stop(f"--resume {before.run_id} is another training: {'; '.join(wrong)}", AGAIN)
