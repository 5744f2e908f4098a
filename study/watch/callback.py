"""The watch as a callback of transformers.Trainer and its subclasses."""

import atexit
import sys
import traceback

import transformers

from study.watch.session import WatchedTraining


class WatchCallback(WatchedTraining, transformers.TrainerCallback):
    """Records the training of a Trainer: `Trainer(callbacks=[WatchCallback("runs/mine")])`."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin a watch, once the Trainer has prepared its model and optimizer."""
        # With `auto_find_batch_size` the Trainer runs its inner loop again after an error about memory
        # (trainer.py:1570), and does not call on_train_end in between, which is the last call of that loop
        # (trainer.py:2030).
        self._end(RuntimeError("the training began again before it had ended"))  # as in a search for a batch size
        # A callback gets neither the Accelerator nor the prepared model (transformers 5.23.0), only the plain model.
        # The Trainer that calls it has both.
        callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
        trainer = next(caller for caller in callers if isinstance(caller, transformers.Trainer))
        loop = self._begin(trainer.accelerator, trainer.model_wrapped, trainer.optimizer, arguments=args)
        if loop:  # a processor of images has no such token
            loop.special.unknown = getattr(kwargs.get("processing_class"), "unk_token_id", None)
            loop.resumed(state.global_step)
        atexit.register(self._end_at_exit)

    def on_train_end(self, args, state, control, **kwargs):
        """Complete the record. The Trainer does not call this after an error."""
        self._end(None)

    # Evaluations are seen by the model's mode as well, but the writing of a checkpoint is not.
    on_evaluate = on_predict = on_save = WatchedTraining._leave_out

    def _end(self, error: BaseException | None) -> None:
        atexit.unregister(self._end_at_exit)
        super()._end(error)

    def _end_at_exit(self) -> None:
        """Python exits before the training has ended. `sys` still has an exception that nobody caught."""
        self._end(getattr(sys, "last_value", None) or RuntimeError("the script ended before its training did"))
