"""The record of a user's loop while it runs: begun after `prepare`, filled step by step, completed at the end."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from study.errors import Stop
from study.measure import hardware, readback, roles
from study.measure.collectives import CollectiveLog
from study.measure.memory import peaks
from study.records import store
from study.records.schema import Record, Watched
from study.spec.settings import AUTOCAST
from study.watcher import measurements, monitor
from study.watcher.history import History
from study.watcher.instruments import Instruments
from study.watcher.intent import intended_settings
from study.watcher.loop import Loop, Step
from study.watcher.measurements import RankMeasurements
from study.watcher.ranks import Ranks
from study.watcher.summary import divergence, reason, summary

FOLDER_WITHIN_S = 60  # how long a rank waits for the first rank's folder
MEASUREMENTS_WITHIN_S = 30  # how long the first rank waits for the others' measurements


@dataclass(frozen=True)
class Training:
    """The objects of a user's training. `arguments` are those of a Trainer, and `loop` is its class."""

    accelerator: Any
    model: torch.nn.Module
    optimizer: Any
    arguments: Any = None
    loop: str | None = None

    @property
    def is_engine(self) -> bool:
        return hasattr(self.model, "zero_optimization_stage")


def agree_on_folder(ranks: Ranks, run_dir: Path) -> Path | None:
    """Return the folder that the first rank has made. None on a rank that cannot reach the first."""
    if ranks.first:
        folder = _new_folder(run_dir)
        ranks.send("folder", str(folder))
        return folder
    name = ranks.receive("folder", FOLDER_WITHIN_S) if ranks.together else None
    return Path(name) if name else None


def _new_folder(run_dir: Path) -> Path:
    """Make a folder without a run. If `run_dir` has one, a number is added to its name."""
    folder = run_dir.resolve()
    number = 1
    while (folder / store.RECORD).exists() or (folder.exists() and not folder.is_dir()):
        number += 1
        folder = run_dir.resolve().with_name(f"{run_dir.name}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Recording:
    """The record of a loop. Every method but `abandon` may raise."""

    def __init__(self, training: Training, ranks: Ranks, folder: Path, after: int, on_step: Callable[[Step], None]):
        self.training = training
        self.ranks = ranks
        self.folder = folder
        self.after = after
        self.record = _new_record(training, folder, describe=ranks.first)
        device = self.record.observed.device or "cpu"
        self.instruments = Instruments(training.model, training.optimizer, device, after)
        self.loop = Loop(training.accelerator, training.model, training.optimizer, on_step)
        self.history = History()
        self._log: CollectiveLog | None = None
        self._monitor: subprocess.Popen | None = None
        self._after_instruments: set[int] = set()

    def begin(self) -> None:
        if self.ranks.first:
            store.write(self.folder, self.record)
        if self.ranks.together:
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
        was_looking = self.instruments.looking
        self.instruments.step_ended(self.history.steps, step.evaluated)
        if was_looking and self.instruments.are_over():
            self._after_instruments.add(self.history.steps + 1)
            if self.ranks.first:  # in case its process is killed later
                self._fill([self._measurements(losses=[])])
                store.keep(self.folder, self.record)

    def end(self, error: BaseException | None) -> None:
        """Complete the record. `error` ended the loop."""
        if error is not None:  # first, in case the rest fails as well
            where = f"rank {self.ranks.rank}, step {self.history.steps + 1}"
            store.end_badly(self.folder, reason(error, where), type(error).__name__)
        self.instruments.stop()
        if self._log is not None:
            self._log.__exit__(error and type(error), error, None)
        if error is not None:
            with contextlib.suppress(Exception):  # a device that has failed may not answer
                self._fill([self._measurements(self.history.losses())])
        elif self.ranks.first:
            self._complete()
        else:
            self.ranks.send(
                f"measurements/{self.ranks.rank}", self._measurements(self.history.losses()).model_dump_json()
            )
        if self.ranks.first:
            store.keep(self.folder, self.record)
            self._write_steps()
            sys.stdout.write("\n".join(summary(store.load(self.folder), self.folder)) + "\n")
            sys.stdout.flush()

    def abandon(self, error: Exception) -> None:
        """Switch the instruments off, and record why the watch has ended before the training."""
        why = f"{type(error).__name__}: {error}"
        what = f"study.watch raised {why}; your training was not affected"
        closings: list[Callable[[], Any]] = [
            self.instruments.stop,
            self.dismiss_monitor,
            self._close_log,
            lambda: store.explain_what_failed(self.folder, "instruments_failed", why),
            lambda: store.end_badly(self.folder, Stop(what, "report it"), type(error).__name__),
        ]
        for close in closings:
            with contextlib.suppress(Exception):
                close()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def dismiss_monitor(self) -> None:
        with contextlib.suppress(Exception):
            monitor.dismiss(self._monitor)

    def _complete(self) -> None:
        ranks = [self._measurements(self.history.losses()), *self._other_ranks()]
        self._fill(ranks)
        self.record.status = "done"
        self.record.finished_utc = store.now_utc()
        if stop := divergence(ranks):
            self.record = store.ended(self.record, stop, "Stop")

    def _other_ranks(self) -> list[RankMeasurements]:
        """Return the measurements of the other ranks in order, up to the first that does not arrive in time."""
        others = []
        until_s = time.monotonic() + MEASUREMENTS_WITHIN_S
        for rank in range(1, self.ranks.count):
            text = self.ranks.receive(f"measurements/{rank}", max(0.1, until_s - time.monotonic()))
            if text is None:
                break
            others.append(RankMeasurements.model_validate_json(text))
        return others

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
        without = {*self.instruments.looked_at, *self.history.evaluated, *self._after_instruments}
        clean = [step for step in range(1, self.history.steps + 1) if step not in without]
        return [step for step in clean if step > self.after] or clean[1:]

    def _fill(self, ranks: list[RankMeasurements]) -> None:
        watched = self.record.watched
        known = {*self._timed(), *self.instruments.looked_at}
        watched.looked_at = self.instruments.looked_at
        watched.not_timed = [step for step in range(1, self.history.steps + 1) if step not in known]
        watched.clip_grad_norm = self.loop.wants_clipping
        self._observe()
        measurements.fill(self.record, ranks)

    def _observe(self) -> None:
        """Fill in what only the loop shows."""
        seen = self.record.observed
        seen.accumulation = self.history.passes_per_step or seen.accumulation
        if seen.stage is None:
            seen.clipping = None if seen.arm == "fsdp1" else self.loop.clipped_at or 0.0  # FSDP1 has its own function
        names = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
        if seen.autocast is None and self.loop.autocast is not None:
            seen.autocast = names.get(self.loop.autocast)
        rates = [rate for rate in self.history.rates if rate is not None]
        seen.learning_rates = rates if len(rates) == self.history.steps else []
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            seen.dtypes = roles.dtypes(self.training.model, self.training.optimizer)
        seen.dtypes |= self.instruments.dtypes

    def _write_steps(self) -> None:
        """Write a line for each step, as the study's own trainer does."""
        losses = [*self.record.loss.train, *repeat(None, self.history.steps)]
        pairs = enumerate(zip(losses, self.history.rates, strict=False), start=1)
        lines = [json.dumps({"step": step, "loss": loss, "lr": rate}) + "\n" for step, (loss, rate) in pairs]
        (self.folder / "steps.jsonl").write_text("".join(lines))


def _new_record(training: Training, folder: Path, describe: bool) -> Record:
    """Return a record of what was asked for and what was prepared; with the machine if `describe`."""
    record = store.new(folder.name, sys.argv)
    is_bare_engine = training.is_engine and training.accelerator is None
    config = getattr(training.model, "config", None) if is_bare_engine else None
    record.promised = intended_settings(config if isinstance(config, dict) else None, training.arguments)
    version = roles.fsdp_version(training.model)
    name = type(roles.plain_model(training.model)).__name__
    if version == 2:  # fully_shard makes a class of its own
        name = name.removeprefix("FSDP")
    loop = "deepspeed" if is_bare_engine else "torch"
    if training.accelerator is not None:
        loop = "accelerate"
    record.watched = Watched(script=Path(sys.argv[0]).name or None, loop=training.loop or loop, model=name)
    record.observed = readback.distribution(training.accelerator, training.model, training.optimizer)
    record.observed.arm = measurements.arm_of(record.observed, version)
    if describe:
        record.hardware = hardware.describe(folder)
        record.software = hardware.versions()
    return record
