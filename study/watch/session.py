"""`with watch(...)` around a user's own training loop: the loop stays as it is, and leaves a record.

A failure in here must not end the user's training. It ends the watch, and the record says why.
"""

import contextlib
import datetime
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from study.configs.asked import intended_settings
from study.core.errors import Stop
from study.core.text import say
from study.measure import hardware, readback, roles
from study.measure.heartbeat import CollectiveLog
from study.measure.memory import peaks
from study.records import store
from study.records.schema import Record
from study.records.sections import Watched
from study.watch import results, trends
from study.watch.instruments import Instruments
from study.watch.loop import WatchedLoop
from study.watch.results import RankMeasurements
from study.watch.steps import StepLog
from study.watch.weights import Weights, tie_is_lost

ADAPTERS = "(?i)lora_|adapter|prompt|prefix|ia3"  # in names of weights that train beside frozen ones, on purpose
WITHIN_S = 60  # how long a rank waits for what another one sends


class Watch:
    """The context manager around a loop. It catches every error of its own."""

    ranks: "WatchedRanks"  # once it is entered

    def __init__(
        self,
        accelerator=None,
        model=None,
        optimizer=None,
        *,
        run_dir: str | Path = "runs/watched",
        arguments=None,
    ):
        """Record what a training loop really does: `with watch(accelerator, model, optimizer): ...`, after `prepare`.

        Args:
            accelerator: The Accelerator. Leave it out in a loop without Accelerate.
            model: The model that the loop calls: a prepared model, a DDP or FSDP model, or a DeepSpeed engine.
            optimizer: The optimizer that the loop calls. Leave it out with a DeepSpeed engine, which has its own.
            run_dir: The folder for the record. If it holds a run already, a number is added to its name.
            arguments: Those of a Trainer.
        """
        if not isinstance(model, torch.nn.Module):
            what = f"watch needs the prepared model, not {type(model).__name__}"
            raise Stop(what, "call watch(accelerator, model, optimizer), or watch(model=model, optimizer=optimizer)")
        if optimizer is None and not roles.is_engine(model):
            raise Stop("watch needs the optimizer as well", "call watch(model=model, optimizer=optimizer)")
        self.accelerator = accelerator
        self.model: Any = model
        self.optimizer = optimizer or self.model.optimizer
        self.arguments = arguments
        self.run_dir = Path(run_dir)
        self.folder: Path | None = None  # of the record, once the ranks have agreed on it
        self.loop: WatchedLoop | None = None  # while it is followed
        self._open = contextlib.ExitStack()  # what works until the record is completed

    def __enter__(self) -> "Watch":
        try:
            self._begin()
        except Exception as error:
            self.give_up(error)
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Complete the record. A second call does nothing."""
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if self.loop and self.folder:
            try:
                if self.loop.active:
                    self._complete(self.loop, self.folder, error)
            except Exception as mistake:  # a device that has failed may not answer
                self.give_up(mistake)
            self.loop.detach()
        # The model may be large, and a watch outlives its loop.
        self.accelerator = self.model = self.optimizer = self.loop = None

    def give_up(self, error: Exception) -> None:
        """Let the training go on without the watch, and record why. The hooks stay for now, as one may be running."""
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"study.watch has stopped, which does not affect your training: {what}\n")
        if self.loop:
            self.loop.active = False
        with contextlib.suppress(Exception):
            self._open.close()
        if self.folder:
            stop = Stop(f"study.watch raised {what}; your training was not affected", "report it")
            store.end_badly(self.folder, stop, type(error).__name__)

    def _begin(self) -> None:
        # --- where the record is, and what it says before the loop
        self.ranks = ranks = WatchedRanks()
        self.folder = folder = ranks.agree_on_folder(self.run_dir)
        if folder is None:
            return  # this rank is in no group with the first
        record = new_record(folder.name, self.accelerator, self.model, self.optimizer, self.arguments)
        if ranks.rank == 0:
            store.write(folder, record)
        # --- what works during the loop, in the order in which it may fail
        log = StepLog(folder, ranks.rank)
        self._open.callback(log.flush, wait=True)
        if ranks.count > 1:
            self._open.enter_context(CollectiveLog(folder, ranks.rank))
        instruments = Instruments(self.model, self.optimizer, record.observed.device or "cpu")
        self._open.callback(instruments.stop)
        weights = Weights(self.model)
        weights.describe(record.watched)
        self.loop = WatchedLoop(
            self.model, self.optimizer, self.accelerator, record, log, instruments, weights, self.give_up
        )
        self.loop.attach()

    def _complete(self, loop: WatchedLoop, folder: Path, error: BaseException | None) -> None:
        """Complete the record. `error` ended the loop."""
        rank = self.ranks.rank
        record = loop.record
        watched = record.watched
        watched.moments_lost = loop.moments_lost
        watched.passes_without_update = loop.step.backwards
        watched.largest_decay = loop.decay
        watched.orders_repeated = loop.loaders.orders_repeated
        watched.evaluated_on_trained = loop.loaders.evaluated_on_trained
        weights_sum = None
        if error is None:
            self._open.close()
            weights_sum = loop.weights.describe_end(watched)
            watched.units_alike = loop.weights.alike()
        else:  # the reason first, in case the rest fails as well
            where = f"rank {rank}, step {loop.log.count + 1}"
            store.end_badly(folder, results.reason(error, where), type(error).__name__)
            self._open.__exit__(type(error), error, None)  # the log of collectives stays then, and says where
        mine = measurements(loop, weights_sum)
        if rank != 0:
            self.ranks.send(f"measurements/{rank}", mine.model_dump_json())
            return
        measured = [mine]
        if error is None:  # the others may have died of one, and are not waited for
            measured += self._received()
        # --- what was measured
        watched.tie_lost |= tie_is_lost(loop.model)
        watched.looked_at = loop.instruments.looked_at
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            record.observed.dtypes = roles.dtypes(loop.model, loop.optimizer)
        tables = [table for rank, table in trends.load(folder).items() if rank < len(measured)]
        diverged_in = results.fill(record, measured, tables)
        # --- how it ended
        if error is None:
            record.status = "done"
            record.finished_utc = store.now_utc()
            if diverged_in is not None:
                remedy = "look at the sequences of that step, give a lower learning rate, or clip gradients"
                stop = Stop(f"the loss is not finite in step {diverged_in}", remedy, "diverged", f"step {diverged_in}")
                record = store.ended(record, stop, "Stop")
        store.keep(folder, record)
        say(*results.summary(store.load(folder), folder, trends.load(folder)))

    def _received(self) -> Iterator[RankMeasurements]:
        """Return what the other ranks measured, up to the first that does not send it in time."""
        for rank in range(1, self.ranks.count):
            text = self.ranks.receive(f"measurements/{rank}")
            if text is None:
                return  # a position in the record is a rank, so those after it are left out, too
            yield RankMeasurements.model_validate_json(text)


def measurements(loop: WatchedLoop, weights_sum: float | None) -> RankMeasurements:
    """Return what this rank measured."""
    divided = getattr(loop.accelerator, "parallelism_config", None)
    has_own_rows = getattr(divided, "non_data_parallel_size", 1) == 1  # others share a model or a sequence
    return RankMeasurements(
        memory=peaks(),
        components=loop.instruments.components,
        traffic=loop.instruments.counts,
        inputs=loop.inputs if has_own_rows else None,
        gradient=loop.between.gradient if has_own_rows else None,
        rate=loop.rate,
        weights_sum=weights_sum,
        knows_losses=loop.log.knows_losses,
    )


class WatchedTraining:
    """What the callbacks of trainers have in common: a watch, from where a training begins to where it ends."""

    def __init__(self, run_dir: str | Path = "runs/watched"):
        self.run_dir = Path(run_dir)
        self.watch: Watch | None = None

    def _begin(self, *prepared, arguments=None) -> WatchedLoop | None:
        """Begin a watch of what a trainer has prepared. Return the loop that it follows, if it can."""
        self.watch = Watch(*prepared, run_dir=self.run_dir, arguments=arguments)
        self.watch.__enter__()
        return self._loop

    @property
    def _loop(self) -> WatchedLoop | None:
        return self.watch.loop if self.watch else None

    def _leave_out(self, *_, **__) -> None:
        """Do not time the step in progress, because it contains more than training."""
        if self._loop:
            self._loop.step.evaluated = True

    def _end(self, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.end(error)
            self.watch = None


def new_record(name: str, accelerator, model, optimizer, arguments=None) -> Record:
    """Return a record of the machine, of what was asked for, and of what was prepared."""
    record = store.new(name, sys.argv)
    config = None
    if roles.is_engine(model) and accelerator is None:
        config = model.config
    record.promised = intended_settings(config, arguments)
    kind = type(roles.base_model(model)).__name__.removeprefix("FSDP")  # fully_shard makes a class of its own
    record.watched = Watched(script=Path(sys.argv[0]).name or None, model=kind)
    record.watched.is_trainer = arguments is not None
    record.watched.tie_lost = tie_is_lost(model)
    names = [name for name, _ in model.named_parameters()]
    record.watched.has_adapters = any(re.search(ADAPTERS, name) for name in names)
    if not roles.is_engine(model):
        groups = roles.inner_optimizer(optimizer).param_groups
        # By their memory: who shards by hand gives the optimizer another tensor for a part of each weight.
        updated = {tensor.untyped_storage()._cdata for group in groups for tensor in group["params"]}
        storages = [tensor.untyped_storage()._cdata for tensor in model.parameters()]
        record.watched.optimized_tensors = sum(storage in updated for storage in storages)
    record.observed = readback.distribution(accelerator, model, optimizer)
    record.observed.arm = results.arm_of(record.observed)
    if roles.fsdp_version(model) == 1:
        # It is in fully_sharded_data_parallel.py:1074, and Accelerate calls it for FSDP1 alone (accelerator.py:3020).
        record.observed.clipping = None  # unknown: FSDP1 has a function of its own
    record.hardware = hardware.describe()
    record.software = hardware.versions()
    return record


watch = Watch
_count = itertools.count()  # numbers the watches of this process, in the same way on every rank


class WatchedRanks:
    """This rank and the others of its process group. They meet in its store, which no collective of theirs uses."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = 1
        self._store: dist.Store = dist.HashStore()  # without a group: nobody else reads it
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()
            self._store = dist.PrefixStore(f"study.watch/{next(_count)}", _get_default_store())

    def send(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def receive(self, name: str) -> str | None:
        """Return the text that another rank sent under this name; None if it does not arrive in time."""
        try:
            # The store and no collective: a rank that has died would let a collective wait for 30 minutes with gloo,
            # PyTorch's default, and one more collective would shift the numbers by which hangs are explained.
            self._store.wait([name], datetime.timedelta(seconds=WITHIN_S))
            return self._store.get(name).decode()
        except RuntimeError:  # it is late, or gone
            return None

    def agree_on_folder(self, run_dir: Path) -> Path | None:
        """Return a folder without a run, which the first rank chooses. None on a rank that cannot reach it."""
        if self.rank != 0:
            name = self.receive("folder") if self.count > 1 else None
            return Path(name) if name else None
        folder = run_dir.resolve()
        number = 1
        while (folder / store.RECORD).exists():
            number += 1
            folder = run_dir.resolve().with_name(f"{run_dir.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        finally:  # if that fails, the others do not wait for the name, and cannot write into the folder either
            self.send("folder", str(folder))
        return folder
