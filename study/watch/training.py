"""`with watch(...)` around a user's own training loop: the loop stays as it is, and leaves a record.

A failure in here must not end the user's training. It ends the watch, and the record says why.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from study.core.errors import Stop
from study.watch.ranks import Ranks
from study.watch.recording import Recording, Training
from study.watch.steps import Step

AFTER = 5  # steps before the instruments look: stage 3 learns its order of fetches in them, and DDP its buckets


def watch(
    accelerator=None, model=None, optimizer=None, *, run_dir="runs/watched", after: int = AFTER, live: bool = True
) -> "Watch":
    """Record what a training loop really does: `with watch(accelerator, model, optimizer): ...`, after `prepare`.

    Args:
        accelerator: The Accelerator. Leave it out in a loop without Accelerate.
        model: The model that the loop calls: a prepared model, a DDP or FSDP model, or a DeepSpeed engine.
        optimizer: The optimizer that the loop calls. Leave it out with a DeepSpeed engine, which has its own.
        run_dir: The folder for the record. If it holds a run already, a number is added to its name.
        after: The instruments look at the four steps after so many steps. They do not slow down any other step.
        live: Show a line on the steps, if the standard error is a terminal.
    """
    if not isinstance(model, torch.nn.Module):
        raise Stop(
            f"watch needs the prepared model, not {type(model).__name__}",
            "call watch(accelerator, model, optimizer), or without Accelerate watch(model=model, optimizer=optimizer)",
        )
    if optimizer is None:
        if not hasattr(model, "zero_optimization_stage"):
            raise Stop("watch needs the optimizer as well", "call watch(model=model, optimizer=optimizer)")
        optimizer = model.optimizer
    return Watch(Training(accelerator, model, optimizer, live=live), Path(run_dir), after)


class Watch:
    """The context manager around a loop. It catches every error of its recording."""

    def __init__(self, training: Training, run_dir: Path, after: int):
        self.run_dir = run_dir
        self.after = after
        self.active = False
        self._training: Training | None = training
        self._recording: Recording | None = None

    def __enter__(self) -> "Watch":
        training = self._training
        self._training = None  # the model may be large, and a watch outlives its loop
        if training is None:
            return self
        ranks = None
        try:
            ranks = Ranks()
            folder = ranks.agree_on_folder(self.run_dir)
            if folder is not None:  # otherwise this rank is in no group with the first
                self._recording = Recording(training, ranks, folder, self.after, self._on_step, self._give_up)
                self._recording.begin()
                self.active = True
        except Exception as error:
            self._give_up(error)
            if ranks is not None:
                with contextlib.suppress(Exception):
                    ranks.send("folder", "")  # so that the others do not wait for it
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.end(error)

    def leave_out(self) -> None:
        """Do not time the step in progress, because it contains more than training."""
        if self.active and self._recording:
            self._recording.loop.step.evaluated = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the hooks for a while. Steps in it are not recorded."""
        recording = self._recording if self.active else None
        if recording is None:
            yield
            return
        recording.loop.detach()
        yield
        recording.loop.attach()
        recording.steps.begin()

    def end(self, error: BaseException | None = None) -> None:
        """Complete the record. A second call does nothing."""
        recording = self._recording
        if recording is None:
            return
        recording.loop.detach()
        if self.active:
            self.active = False
            if isinstance(error, SystemExit) and not error.code:
                error = None
            try:
                recording.end(error)
            except Exception as mistake:
                self._give_up(mistake)
            recording.dismiss_monitor()
        self._recording = None

    def _on_step(self, step: Step) -> None:
        if not (self.active and self._recording):
            return
        try:
            self._recording.add(step)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Let the training go on without the watch, and record why. The hooks stay for now, as one may be running."""
        self.active = False
        if self._recording is not None:
            self._recording.abandon(error)
        sys.stderr.write(f"study.watch has stopped, your training goes on: {type(error).__name__}: {error}\n")
