"""The watch as a callback of Lightning's Trainer."""

import importlib
import importlib.util
from typing import Any

from study.core.errors import Stop
from study.measure.roles import is_engine
from study.watch.session import WatchedTraining

# Two names of one library; a Trainer takes callbacks of its own alone.
NAMES = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)]
if not NAMES:
    raise Stop("Lightning is not installed", "pip install lightning")
pytorch: Any = importlib.import_module("lightning.pytorch" if NAMES[0] == "lightning" else NAMES[0])


class LightningCallback(WatchedTraining, pytorch.Callback):
    """Records the training of a Trainer: `Trainer(callbacks=[LightningCallback("runs/mine")])`."""

    def on_train_start(self, trainer, pl_module) -> None:
        """Begin a watch, once the strategy has prepared the model and the optimizer. Of several it is the first."""
        model = trainer.strategy.model
        optimizer = None if is_engine(model) else trainer.optimizers[0]
        self._begin(None, model, optimizer)

    def on_train_end(self, trainer, pl_module) -> None:
        """Complete the record."""
        self._end(None)

    def on_exception(self, trainer, pl_module, exception: BaseException) -> None:
        """Complete the record of a training that ended with an error."""
        self._end(exception)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Note the inputs: on one rank Lightning calls `training_step`, and not the model that a watch follows."""
        if self._loop:
            self._loop.note_inputs(batch)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        """Note that this batch is evaluated."""
        if self._loop:
            self._loop.loaders.ran(trains=False, has_gradients=False)

    # A step that evaluates or saves as well does not count for the times.
    on_validation_start = on_save_checkpoint = WatchedTraining._leave_out
