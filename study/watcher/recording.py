"""The record of a user's loop while it runs: begun after `prepare`, filled step by step, completed at the end."""

import contextlib
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from study.errors import Stop
from study.measure import hardware, readback, roles
from study.measure.collectives import CollectiveLog
from study.measure.memory import peaks
from study.records import store
from study.records.schema import Record, Watched
from study.spec.settings import AUTOCAST
from study.watcher import monitor, results
from study.watcher.effective import intended_settings
from study.watcher.loop import History, Instruments, Loop, Step
from study.watcher.results import RankMeasurements

FOLDER_WITHIN_S = 60  # how long a rank waits for the first rank's folder
MEASUREMENTS_WITHIN_S = 30  # how long the first rank waits for the others' measurements

_count = itertools.count()  # numbers the watches of this process, in the same way on every rank


class Ranks:
    """This rank and the others of its process group. They exchange texts through the store of the group.

    A collective could hang, because all ranks would have to call it.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = 1
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()
        self._store = distributed_c10d._get_default_store() if self.count > 1 else None
        self._prefix = f"study.watch/{next(_count)}"

    def send(self, name: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{name}", text)

    def receive(self, name: str, timeout_s: float) -> str | None:
        """Return the text that another rank sent under this name; None if it does not arrive in time."""
        if self._store is None:
            return None
        key = f"{self._prefix}/{name}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=timeout_s))
            return self._store.get(key).decode()
        except RuntimeError:  # it is late, or gone
            return None

    def agree_on_folder(self, run_dir: Path) -> Path | None:
        """Return the folder without a run that the first rank has made. None on a rank that cannot reach the first."""
        if self.rank != 0:
            name = self.receive("folder", FOLDER_WITHIN_S)
            return Path(name) if name else None
        folder = run_dir.resolve()
        number = 1
        while (folder / store.RECORD).exists() or (folder.exists() and not folder.is_dir()):
            number += 1
            folder = run_dir.resolve().with_name(f"{run_dir.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        self.send("folder", str(folder))
        return folder


@dataclass(frozen=True)
class Training:
    """The objects of a user's training. `arguments` are those of a Trainer, and `loop` is its class."""

    accelerator: Any
    model: torch.nn.Module
    optimizer: Any
    arguments: Any = None
    loop: str | None = None


class Recording:
    """The record of a loop. Every method but `abandon` and `dismiss_monitor` may raise."""

    def __init__(self, training: Training, ranks: Ranks, folder: Path, after: int, on_step: Callable[[Step], None]):
        self.training = training
        self.ranks = ranks
        self.folder = folder
        self.after = after
        self.record = _new_record(training, folder, describe=ranks.rank == 0)
        device = self.record.observed.device or "cpu"
        self.instruments = Instruments(training.model, training.optimizer, device, after)
        self.loop = Loop(training.accelerator, training.model, training.optimizer, on_step)
        self.history = History()
        self._log: CollectiveLog | None = None
        self._monitor: subprocess.Popen | None = None
        self._not_clean: set[int] = set()  # the step after the instruments

    def begin(self) -> None:
        if self.ranks.rank == 0:
            store.write(self.folder, self.record)
        if self.ranks.count > 1:
            self._log = CollectiveLog(self.folder, self.ranks.rank)
        self._monitor = monitor.start(self.folder, self.ranks.rank)
        self.loop.attach()
        self.history = History()  # times count from here

    def add(self, step: Step) -> None:
        self.history.add(step)
        if self.record.watched.rows_per_pass is None and step.rows:
            self.record.watched.rows_per_pass = step.rows[0]
        if self.instruments.are_over():
            return
        number = len(self.history.steps)
        self.instruments.step_ended(number, step.evaluated)
        if self.instruments.are_over():
            self._not_clean.add(number + 1)
            if self.ranks.rank == 0:  # in case its process is killed later
                self._fill([self._measurements(losses=[])])
                store.keep(self.folder, self.record)

    def end(self, error: BaseException | None) -> None:
        """Complete the record. `error` ended the loop."""
        if error is not None:  # first, in case the rest fails as well
            where = f"rank {self.ranks.rank}, step {len(self.history.steps) + 1}"
            store.end_badly(self.folder, results.reason(error, where), type(error).__name__)
        self.instruments.stop()
        if self._log is not None:
            self._log.__exit__(error and type(error), error, None)
        if error is not None:
            with contextlib.suppress(Exception):  # a device that has failed may not answer
                self._fill([self._measurements(self.history.losses())])
        elif self.ranks.rank == 0:
            self._complete()
        else:
            measured = self._measurements(self.history.losses())
            self.ranks.send(f"measurements/{self.ranks.rank}", measured.model_dump_json())
        if self.ranks.rank == 0:
            store.keep(self.folder, self.record)
            self._write_steps()
            sys.stdout.write("\n".join(results.summary(store.load(self.folder), self.folder)) + "\n")
            sys.stdout.flush()

    def abandon(self, error: Exception) -> None:
        """Switch the instruments off, and record why the watch has ended before the training."""
        why = f"{type(error).__name__}: {error}"
        stop = Stop(f"study.watch raised {why}; your training was not affected", "report it")
        closings: list[Callable[[], Any]] = [
            self.instruments.stop,
            self.dismiss_monitor,
            lambda: store.explain_what_failed(self.folder, "instruments_failed", why),
            lambda: store.end_badly(self.folder, stop, type(error).__name__),
        ]
        if self._log is not None:
            closings.append(self._log.close)
        for close in closings:
            with contextlib.suppress(Exception):
                close()

    def dismiss_monitor(self) -> None:
        monitor.dismiss(self._monitor)

    def _complete(self) -> None:
        ranks = [self._measurements(self.history.losses())]
        until_s = time.monotonic() + MEASUREMENTS_WITHIN_S
        for rank in range(1, self.ranks.count):  # up to the first that does not arrive in time
            text = self.ranks.receive(f"measurements/{rank}", max(0.1, until_s - time.monotonic()))
            if text is None:
                break
            ranks.append(RankMeasurements.model_validate_json(text))
        self._fill(ranks)
        self.record.status = "done"
        self.record.finished_utc = store.now_utc()
        if stop := results.divergence(ranks):
            self.record = store.ended(self.record, stop, "Stop")

    def _measurements(self, losses: list[float]) -> RankMeasurements:
        """Return the measurements of this rank."""
        return RankMeasurements(
            **self.history.measured(losses, self._timed()),
            memory=peaks(),
            held_parameters=self.record.observed.held_parameters,
            components=self.instruments.components,
            traffic=self.instruments.counts,
            written_bytes=self.instruments.written_bytes,
        )

    def _timed(self) -> list[int]:
        """The steps whose times count: those after the instruments, or in a short loop those before but the first."""
        without = {*self.instruments.looked_at, *self._not_clean}
        numbered = enumerate(self.history.steps, start=1)
        clean = [number for number, step in numbered if not step.evaluated and number not in without]
        return [number for number in clean if number > self.after] or clean[1:]

    def _fill(self, ranks: list[RankMeasurements]) -> None:
        """Fill in what the ranks measured, and what only the loop shows."""
        watched = self.record.watched
        seen = self.record.observed
        known = {*self._timed(), *self.instruments.looked_at}
        watched.looked_at = self.instruments.looked_at
        watched.not_timed = [step for step in range(1, len(self.history.steps) + 1) if step not in known]
        watched.clip_grad_norm = self.loop.wants_clipping
        seen.accumulation = self.history.passes_per_step or seen.accumulation
        if seen.stage is None:
            seen.clipping = None if seen.arm == "fsdp1" else self.loop.clipped_at or 0.0  # FSDP1 has its own function
        if seen.autocast is None and self.loop.autocast is not None:
            names = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
            seen.autocast = names.get(self.loop.autocast)
        rates = [step.rate for step in self.history.steps]
        seen.learning_rates = [rate for rate in rates if rate is not None] if None not in rates else []
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            seen.dtypes = roles.dtypes(self.training.model, self.training.optimizer)
        seen.dtypes |= self.instruments.dtypes
        results.fill(self.record, ranks)

    def _write_steps(self) -> None:
        """Write a line for each step, as the study's own trainer does."""
        pairs = itertools.zip_longest(self.history.steps, self.record.loss.train)
        rows = [{"step": step, "loss": loss, "lr": counts.rate} for step, (counts, loss) in enumerate(pairs, start=1)]
        (self.folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _new_record(training: Training, folder: Path, describe: bool) -> Record:
    """Return a record of what was asked for and what was prepared; with the machine if `describe`."""
    record = store.new(folder.name, sys.argv)
    config = None
    kind = "torch" if training.accelerator is None else "accelerate"
    if training.accelerator is None and hasattr(training.model, "zero_optimization_stage"):
        kind = "deepspeed"
        config = getattr(training.model, "config", None)
    record.promised = intended_settings(config if isinstance(config, dict) else None, training.arguments)
    version = roles.fsdp_version(training.model)
    name = type(roles.plain_model(training.model)).__name__
    if version == 2:  # fully_shard makes a class of its own
        name = name.removeprefix("FSDP")
    record.watched = Watched(script=Path(sys.argv[0]).name or None, loop=training.loop or kind, model=name)
    record.observed = readback.distribution(training.accelerator, training.model, training.optimizer)
    record.observed.arm = results.arm_of(record.observed, version)
    if describe:
        record.hardware = hardware.describe(folder)
        record.software = hardware.versions()
    return record
