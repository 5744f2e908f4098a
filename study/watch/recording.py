"""The record of a user's loop while it runs: begun after `prepare`, filled step by step, completed at the end."""

import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from study.core.errors import Stop
from study.core.settings import AUTOCAST
from study.measure import hardware, readback, roles
from study.measure.collectives import CollectiveLog
from study.measure.memory import freed_bytes, peaks
from study.records import store
from study.records.schema import Record, Watched
from study.watch import monitor, results, trends
from study.watch.instruments import Instruments
from study.watch.intended import intended_settings
from study.watch.live import Live
from study.watch.loop import Loop
from study.watch.ranks import Ranks
from study.watch.results import RankMeasurements
from study.watch.steps import Step, StepLog

MEASUREMENTS_WITHIN_S = 30  # how long the first rank waits for the others' measurements
SUMMARY = "summary.json"
TRACE = "trace.json"  # for Perfetto


@dataclass(frozen=True)
class Training:
    """The objects of a user's training. `arguments` are those of a Trainer, and `loop` is its class."""

    accelerator: Any
    model: torch.nn.Module
    optimizer: Any
    arguments: Any = None
    loop: str | None = None
    live: bool = True  # show a line in a terminal


class Recording:
    """The record of a loop. Every method but `abandon` and `dismiss_monitor` may raise."""

    def __init__(
        self,
        training: Training,
        ranks: Ranks,
        folder: Path,
        after: int,
        on_step: Callable[[Step], None],
        on_error: Callable[[Exception], None],
    ):
        self.training = training
        self.ranks = ranks
        self.folder = folder
        self.after = after
        self.record = _new_record(training, folder, describe=ranks.rank == 0)
        device = self.record.observed.device or "cpu"
        self.instruments = Instruments(training.model, training.optimizer, device, after)
        self.steps = StepLog(folder, ranks.rank)
        self.loop = Loop(training.accelerator, training.model, training.optimizer, self.steps, on_step, on_error)
        self._live = Live(self.steps, training.accelerator, training.live) if ranks.rank == 0 else None
        self._log: CollectiveLog | None = None
        self._monitor: subprocess.Popen | None = None
        self._freed_bytes = freed_bytes()  # before the loop

    def begin(self) -> None:
        if self.ranks.rank == 0:
            store.write(self.folder, self.record)
        if self.ranks.count > 1:
            self._log = CollectiveLog(self.folder, self.ranks.rank)
        self._monitor = monitor.start(self.folder, self.ranks.rank)
        self.loop.attach()
        self.steps.begin()

    def add(self, step: Step) -> None:
        number = self.steps.count + 1
        were_over = self.instruments.are_over()
        if not were_over:
            self.instruments.step_ended(number, step.evaluated)
        looked_at = self.instruments.looked_at  # the step after a look is slower, too
        step.clean = not (step.evaluated or number in looked_at or number - 1 in looked_at)
        self.steps.add(step)
        if self._live is not None:
            self._live.step_ended()
            if not were_over and self.instruments.are_over():  # in case its process is killed later
                self._fill([self._measurements()])
                store.keep(self.folder, self.record)

    def end(self, error: BaseException | None) -> None:
        """Complete the record. `error` ended the loop."""
        if error is not None:  # first, in case the rest fails as well
            where = f"rank {self.ranks.rank}, step {self.steps.count + 1}"
            store.end_badly(self.folder, results.reason(error, where, self._states()), type(error).__name__)
        self.instruments.stop()
        if self._live is not None:
            self._live.close()
        if self._log is not None:
            self._log.__exit__(error and type(error), error, None)
        if error is not None:
            with contextlib.suppress(Exception):  # a device that has failed may not answer
                self.steps.finish()
                self._fill([self._measurements()])
        elif self.ranks.rank == 0:
            self.steps.finish()
            self._complete()
        else:
            self.steps.finish()
            self.ranks.send(f"measurements/{self.ranks.rank}", self._measurements().model_dump_json())
        if self.ranks.rank == 0:
            store.keep(self.folder, self.record)
            self._write_steps()
            self._summarize()

    def _summarize(self) -> None:
        """Print what the run was, and write it, its findings and a trace of its last steps beside the record."""
        tables = trends.load(self.folder)
        trends.write_trace(self.folder / TRACE, tables)
        findings = trends.findings(tables)
        shares = {rank: trends.shares(table) for rank, table in trends.judged(tables).items()}
        values = {"steps": self.steps.count, "shares": shares, "findings": [each.sentence for each in findings]}
        (self.folder / SUMMARY).write_text(json.dumps(values, indent=1) + "\n")
        lines = results.summary(store.load(self.folder), self.folder, trends.in_words(tables), findings)
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    def _states(self) -> dict[str, int]:
        """Return the bytes of the training state that this rank holds now, by role. Empty if they cannot be read."""
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            tensors = roles.tensors_by_role(self.training.model, self.training.optimizer)
            return {role: sum(each.nbytes for each in tensors[role]) for role in results.STATES}
        return {}

    def abandon(self, error: Exception) -> None:
        """Switch the instruments off, and record why the watch has ended before the training."""
        why = f"{type(error).__name__}: {error}"
        stop = Stop(f"study.watch raised {why}; your training was not affected", "report it")
        self.steps.stopped = True
        closings: list[Callable[[], Any]] = [
            self.instruments.stop,
            self.steps.flush,
            self.dismiss_monitor,
            lambda: store.explain_what_failed(self.folder, "instruments_failed", why),
            lambda: store.end_badly(self.folder, stop, type(error).__name__),
        ]
        if self._log is not None:
            closings.append(self._log.close)
        if self._live is not None:
            closings.append(self._live.close)
        for close in closings:
            with contextlib.suppress(Exception):
                close()

    def dismiss_monitor(self) -> None:
        monitor.dismiss(self._monitor)

    def _complete(self) -> None:
        ranks = [self._measurements()]
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

    def _measurements(self) -> RankMeasurements:
        """Return the measurements of this rank."""
        return RankMeasurements(
            **results.of_steps(self.steps.table(), self._timed(), self.steps.knows_losses),
            memory=peaks(),
            held_parameters=self.record.observed.held_parameters,
            components=self.instruments.components,
            traffic=self.instruments.counts,
            written_bytes=self.instruments.written_bytes,
            host_freed_bytes=self._freed_bytes,
            inputs=self.loop.inputs if self._divides_rows() else None,
        )

    def _divides_rows(self) -> bool:
        """Return whether each rank has rows of its own. Ranks that divide a model or a sequence share theirs."""
        divided = getattr(self.training.accelerator, "parallelism_config", None)
        return getattr(divided, "non_data_parallel_size", 1) == 1

    def _timed(self) -> list[int]:
        """The steps whose times count: those after the instruments, or in a short loop those before but the first."""
        table = self.steps.table()
        clean = [int(number) for number in table["step"][table["clean"] > 0]]
        return [number for number in clean if number > self.after] or clean[1:]

    def _fill(self, ranks: list[RankMeasurements]) -> None:
        """Fill in what the ranks measured, and what only the loop shows."""
        watched = self.record.watched
        seen = self.record.observed
        known = {*self._timed(), *self.instruments.looked_at}
        watched.looked_at = self.instruments.looked_at
        watched.not_timed = [step for step in range(1, self.steps.count + 1) if step not in known]
        watched.clip_grad_norm = self.loop.wants_clipping
        watched.loss_parts = self.loop.loss_parts
        watched.loss_divisor = self.loop.loss_divisor
        watched.passes_cleared = statistics.mode(self.loop.cleared) if self.loop.cleared else None
        watched.rows_per_pass = results.typical(np.array([self.loop.rows_per_pass]))
        table = self.steps.table()
        seen.accumulation = results.typical(table["passes"]) or seen.accumulation
        if seen.stage is None:
            seen.clipping = None if seen.arm == "fsdp1" else self.loop.clipped_at or 0.0  # FSDP1 has its own function
        if seen.autocast is None and self.loop.autocast is not None:
            names = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
            seen.autocast = names.get(self.loop.autocast)
        seen.learning_rates = [] if np.isnan(table["rate"]).any() else table["rate"].tolist()
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            seen.dtypes = roles.dtypes(self.training.model, self.training.optimizer)
        seen.dtypes |= self.instruments.dtypes
        results.fill(self.record, ranks)

    def _write_steps(self) -> None:
        """Write a line for each step, as the study's own trainer does."""
        rates = [None if math.isnan(rate) else rate for rate in self.steps.table()["rate"].tolist()]
        pairs = enumerate(itertools.zip_longest(rates, self.record.loss.train), start=1)
        rows = [{"step": step, "loss": loss, "lr": rate} for step, (rate, loss) in pairs]
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
