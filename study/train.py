"""The trainer. `accelerate launch` starts it; it trains one model under one arm, measures, and writes a run folder.

accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py

accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py --help
"""

import functools
import gc
import math
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the launcher puts study/ there, not the repository
    gc.disable()  # imported objects stay alive; searching them for garbage takes 0.5 s of the 3.5 s of imports

import numpy as np
import torch
from accelerate.utils import set_seed

from study.core.errors import Stop
from study.core.settings import learning_rate
from study.measure.clock import Clock
from study.measure.memory import io_bytes, peaks, reset_peaks
from study.measure.roles import inner_optimizer
from study.records.sections import Evaluation
from study.training import checkpoints, finish, tasks
from study.training.data import Rows
from study.training.display import report
from study.training.main import main
from study.training.run import History, OpenRun, arrange, show, windows


def train(run: OpenRun) -> Callable[[], object]:
    """Train in windows of uninterrupted steps, and do everything else between them. Returns a call of one more step."""
    # No evaluation before the first step: stage 3 would learn its order of fetches from it, and then fetch almost twice
    # what training needs for the rest of the run (deepspeed 0.19.8, see reports/log.md).
    # From here on all arms draw the same dropout masks. Ranks that divide layers draw the same masks as each other.
    set_seed(run.settings.seed + run.accelerator.process_index // run.arm.tensor_ranks)
    history = History()
    start = checkpoints.begin(run, history)  # 0, unless it continues an earlier run
    run.timed_from = min(start + run.settings.warmup_steps, run.steps - 1)
    for window in windows(run, start, run.timed_from):  # warm-up: losses count, times and peaks do not
        train_window(run, window, history)
    history.clock = Clock()
    history.io_before = io_bytes()
    reset_peaks()
    for window in windows(run, run.timed_from, run.steps):
        train_window(run, window, history)
    if run.has_values:
        history.peaks = peaks()
    evaluate(run, history, run.steps)
    finish.finish(run, history)
    return functools.partial(optimizer_step, run, history.last_batch)


def train_window(run: OpenRun, window: range, history: History) -> None:
    """Train some steps without a pause. Then show their losses, and evaluate and save if it is time."""
    batches = arrange(run, window)
    losses = []
    with history.clock.window(run.accelerator.wait_for_everyone) as tick:
        # --- timed: nothing but training ------------------------------------------------------------------------------
        for step, microbatches in zip(window, batches, strict=True):
            for group in inner_optimizer(run.optimizer).param_groups:
                group["lr"] = learning_rate(run.settings, step, run.steps)
            losses.append(optimizer_step(run, microbatches))
            history.rates.append(run.optimizer.param_groups[0]["lr"])  # as the wrapped optimizer has it
            tick()
        # --- end of timed ---------------------------------------------------------------------------------------------
    history.last_batch = batches[-1]
    show(run, window, history, losses)
    every = run.settings.eval_every
    if every and window.stop % every == 0 and window.stop < run.steps:  # after the last step it is done anyway
        evaluate(run, history, window.stop)
    checkpoints.save_if_due(run, window.stop)


def optimizer_step(run: OpenRun, microbatches: Rows) -> torch.Tensor:
    """One update from `accumulation` microbatches. Returns the loss on the device, because reading it would wait."""
    losses = []
    for i in range(run.settings.accumulation):
        batch = {name: rows[i].to(run.accelerator.device, non_blocking=True) for name, rows in microbatches.items()}
        with run.accelerator.accumulate(run.model):
            loss = tasks.row_losses(run.settings, run.model, batch)[0].mean()
            run.accelerator.backward(loss)  # under DeepSpeed this also takes the optimizer step
            run.optimizer.step()
            run.optimizer.zero_grad()
        losses.append(loss.detach())
    return sum(losses[1:], start=losses[0]) / run.settings.accumulation


@torch.no_grad()
def evaluate(run: OpenRun, history: History, step: int) -> None:
    """Add loss and metric over the evaluation rows, which the ranks share. A virtual rank has no loss."""
    if run.is_virtual:
        return
    accelerator = run.accelerator
    rows = run.data.eval
    run.heartbeat.beat(f"the evaluation after step {step}")
    run.model.eval()
    count = len(rows["input_ids"])
    groups = accelerator.num_processes // run.arm.tensor_ranks  # ranks that divide layers see the same rows
    share = run.settings.micro_batch * groups
    order = torch.arange(math.ceil(count / share) * share) % count  # the last batch is filled with repeated rows
    batches = order.view(-1, groups, run.settings.micro_batch)[:, accelerator.process_index // run.arm.tensor_ranks]
    outputs = []
    for rows_of_batch in batches:
        batch = {name: values[rows_of_batch].to(accelerator.device) for name, values in rows.items()}
        outputs.append(torch.stack([x.double() for x in tasks.row_losses(run.settings, run.model, batch)]))
    # Ranks, batches, (loss, prediction), rows.
    gathered = accelerator.gather(torch.stack(outputs).unsqueeze(0))[:: run.arm.tensor_ranks]
    row_losses, predictions = gathered.permute(2, 1, 0, 3).flatten(1)[:, :count].cpu().numpy()
    run.model.train()
    if not np.isfinite(row_losses).all():
        raise Stop(f"the evaluation loss is not finite at step {step}", "give a lower --lr", "diverged", "evaluate")
    if accelerator.is_main_process:  # which writes the record
        metric = tasks.metric(run.settings, row_losses, predictions, rows)
        history.evals.append(Evaluation(step=step, eval_loss=float(row_losses.mean()), **metric))
        report(run, history.evals[-1])


if __name__ == "__main__":
    gc.freeze()  # later collections skip the imported objects; nothing of the run exists yet
    gc.enable()
    main(train)
