"""The watch as a callback of transformers.Trainer and its subclasses."""

import atexit
import sys
from pathlib import Path

import transformers

from study.watcher.watch import AFTER, Watch


class WatchCallback(transformers.TrainerCallback):
    """Records the training of a Trainer: `Trainer(callbacks=[WatchCallback("runs/mine")])`."""

    def __init__(self, run_dir="runs/watched", after: int = AFTER):
        self.run_dir, self.after = Path(run_dir), after
        self.watch: Watch | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._end(RuntimeError("the training began again before it had ended"))  # as in a search for a batch size
        trainer = _trainer_above()
        if trainer is None:
            sys.stderr.write("study.watch has not started: no Trainer called this callback\n")
            return
        self.watch = Watch(
            trainer.accelerator,
            trainer.model_wrapped,
            trainer.optimizer,
            self.run_dir,
            self.after,
            arguments=args,
            loop=type(trainer).__name__,
        )
        self.watch.__enter__()
        atexit.register(self._ended_early)

    def on_evaluate(self, args, state, control, **kwargs):
        self._leave_out()

    def on_predict(self, args, state, control, **kwargs):
        self._leave_out()

    def on_save(self, args, state, control, **kwargs):
        self._leave_out()

    def on_train_end(self, args, state, control, **kwargs):
        self._end(None)

    def _leave_out(self) -> None:
        if self.watch is not None:
            self.watch.leave_out()

    def _end(self, error: BaseException | None) -> None:
        atexit.unregister(self._ended_early)
        if self.watch is not None:
            self.watch.end(error)
            self.watch = None

    def _ended_early(self) -> None:
        """Python exits before the training has ended. `sys` still has an exception that nobody caught."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._end(error or RuntimeError("the script ended before its training did"))


def _trainer_above() -> transformers.Trainer | None:
    """The Trainer that calls this callback. Callbacks get the model, but not the prepared one."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), transformers.Trainer):
            return trainer
        frame = frame.f_back
    return None
