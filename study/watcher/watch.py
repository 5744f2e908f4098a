"""`with watch(...)` around a user's own training loop: the loop stays as it is, and leaves a record.

A failure in here must not end the user's training. It ends the watch, and the record says why.
"""

import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

from study.errors import Stop
from study.measure import hardware, readback, roles
from study.measure.clock import Marks
from study.measure.collectives import CollectiveLog
from study.measure.memory import peaks
from study.records import store
from study.records.schema import Record, Watched
from study.watcher import parts, promises, witness
from study.watcher.looks import Looks
from study.watcher.loop import Loop, Step
from study.watcher.parts import Part
from study.watcher.ranks import Ranks
from study.watcher.words import divergence, reason, summary

AFTER = 5  # steps before the instruments look: stage 3 learns its order of fetches in them, and DDP its buckets
FOLDER_WITHIN_S, PARTS_WITHIN_S = 60, 30  # how long ranks wait for each other's texts
CHUNK = 256  # losses that are kept one by one


def watch(accelerator=None, model=None, optimizer=None, *, run_dir="runs/watched", after: int = AFTER) -> "Watch":
    """Record what a training loop really does: `with watch(accelerator, model, optimizer): ...`, after `prepare`.

    Args:
        accelerator: The Accelerator. Leave it out in a loop without Accelerate.
        model: The model that the loop calls: a prepared model, a DDP or FSDP model, or a DeepSpeed engine.
        optimizer: The optimizer that the loop calls. Leave it out with a DeepSpeed engine, which has its own.
        run_dir: The folder for the record. If it holds a run already, a number is added to its name.
        after: The instruments look at the four steps after so many steps. No other step is slowed down.
    """
    if not isinstance(model, torch.nn.Module):
        raise Stop(
            f"watch needs the prepared model, not {type(model).__name__}",
            "call watch(accelerator, model, optimizer), or without Accelerate watch(model=model, optimizer=optimizer)",
        )
    if optimizer is None and not hasattr(model, "zero_optimization_stage"):
        raise Stop("watch needs the optimizer as well", "call watch(model=model, optimizer=optimizer)")
    return Watch(accelerator, model, optimizer, Path(run_dir), after)


class Watch:
    """What `watch` returns: a context manager around a loop."""

    def __init__(
        self, accelerator, model, optimizer, run_dir: Path, after: int, arguments=None, loop: str | None = None
    ):
        self.accelerator, self.model, self.run_dir, self.after = accelerator, model, run_dir, after
        self.optimizer = model.optimizer if optimizer is None else optimizer
        self.arguments, self.loop_name = arguments, loop
        self.folder: Path | None = None
        self.active = False

    def __enter__(self) -> "Watch":
        try:
            self._begin()
        except Exception as error:
            with contextlib.suppress(Exception):
                self.ranks.send("folder", "")  # so that the others do not wait for it
            self._give_up(error)
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.end(error)

    def leave_out(self) -> None:
        """Do not time the step in progress, because it contains more than training."""
        if self.active:
            self._loop.step.evaluated = True

    # --- the beginning -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.ranks = Ranks()
        if self.ranks.first:
            self.folder = _new_folder(self.run_dir)
            self.ranks.send("folder", str(self.folder))
        elif self.ranks.together:
            folder = self.ranks.receive("folder", FOLDER_WITHIN_S)
            self.folder = Path(folder) if folder else None
        if self.folder is None:
            return  # this rank is in no group with the first
        self._record = self._new_record()
        self._steps, self._passes, self._rows, self._tokens, self._rates = 0, [], [], [], []
        self._recent, self._losses, self._all_losses = [], [], True
        self._evaluated: set[int] = set()
        self._after_looks: set[int] = set()
        device = self._record.observed.device
        self._looks = Looks(self.model, self.optimizer, device, self.after)
        self._loop = Loop(self.accelerator, self.model, self.optimizer, self._on_step)
        if self.ranks.first:
            store.write(self.folder, self._record)
        self._log = CollectiveLog(self.folder, self.ranks.rank) if self.ranks.together else None
        self._witness = witness.start(self.folder, self.ranks.rank)
        self._loop.attach()
        self.active = True
        self._marks = Marks()

    def _new_record(self) -> Record:
        record = store.new(self.folder.name, sys.argv)
        is_engine = hasattr(self.model, "zero_optimization_stage")
        config = getattr(self.model, "config", None) if is_engine and self.accelerator is None else None
        record.promised = promises.promised(config if isinstance(config, dict) else None, self.arguments)
        loop = "accelerate" if self.accelerator is not None else "deepspeed" if is_engine else "torch"
        plain, version = roles.plain_model(self.model), roles.fsdp_version(self.model)
        name = type(plain).__name__.removeprefix("FSDP" if version == 2 else "")  # fully_shard makes a class of its own
        record.watched = Watched(script=Path(sys.argv[0]).name or None, loop=self.loop_name or loop, model=name)
        seen = record.observed = readback.distribution(self.accelerator, self.model, self.optimizer)
        seen.arm = parts.arm_of(seen, version)
        if self.ranks.first:
            record.hardware, record.software = hardware.describe(self.folder), hardware.versions()
        return record

    # --- each step -----------------------------------------------------------------------------------------------

    def _on_step(self, step: Step) -> None:
        if not self.active:
            return
        try:
            self._note(step)
        except Exception as error:
            self._give_up(error)

    def _note(self, step: Step) -> None:
        self._marks.tick()
        self._steps += 1
        if step.evaluated:
            self._evaluated.add(self._steps)
        self._passes.append(step.passes)
        self._rows.append(None if None in step.rows or not step.rows else sum(step.rows))
        self._tokens.append(step.tokens or None)
        self._rates.append(step.rate)
        if self._record.watched.rows_per_pass is None and step.rows:
            self._record.watched.rows_per_pass = step.rows[0]
        self._all_losses = self._all_losses and (loss := step.loss) is not None
        if self._all_losses:
            self._recent.append(loss.float())
            if len(self._recent) == CHUNK:  # one small tensor in place of many
                self._losses.append(torch.stack(self._recent))
                self._recent = []
        if not self._looks.over:
            looking = self._looks.looking
            self._looks.step_ended(self._steps, step.evaluated)
            if looking and self._looks.over:
                self._after_looks.add(self._steps + 1)
                self._keep_looks()

    def _keep_looks(self) -> None:
        """Write what the first rank has seen so far, in case its process is killed."""
        if self.ranks.first:
            self._fill([self._part(losses=[])])
            store.keep(self.folder, self._record)

    # --- the end -------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """Complete the record. A second call does nothing."""
        if not self.active:
            return self._detach()
        self.active = False
        try:
            self._end(None if isinstance(error, SystemExit) and not error.code else error)
        except Exception as mistake:
            self._give_up(mistake)
        finally:
            with contextlib.suppress(Exception):
                witness.dismiss(self._witness)
            self.model = self.optimizer = self.accelerator = self._loop = self._looks = None  # they may be large

    def _end(self, error: BaseException | None) -> None:
        if error is not None:  # first, in case the rest fails as well
            where = f"rank {self.ranks.rank}, step {self._steps + 1}"
            store.end_badly(self.folder, reason(error, where), type(error).__name__)
        self._detach()
        self._looks.stop()
        if self._log is not None:
            self._log.__exit__(error and type(error), error, None)
        if error is not None:
            with contextlib.suppress(Exception):  # a device that has failed may not answer
                self._fill([self._part(self._read_losses())])
        elif self.ranks.first:
            all_parts = [self._part(self._read_losses()), *self._other_parts()]
            self._fill(all_parts)
            self._record.status, self._record.finished_utc = "done", store.now_utc()
            if stop := divergence(all_parts):
                self._record = store.ended(self._record, stop, "Stop")
        else:
            self.ranks.send(f"part/{self.ranks.rank}", self._part(self._read_losses()).model_dump_json())
        if self.ranks.first:
            store.keep(self.folder, self._record)
            self._write_steps()
            sys.stdout.write("\n".join(summary(store.load(self.folder), self.folder)) + "\n")
            sys.stdout.flush()

    def _detach(self) -> None:
        with contextlib.suppress(AttributeError):  # the watch did not begin, or has ended
            self._loop.detach()

    def _part(self, losses: list[float]) -> Part:
        """The measurements of this rank."""
        finite = list(itertools.takewhile(math.isfinite, losses))
        step_s = self._marks.read()
        timed = self._timed()
        timed_rows = [self._rows[step - 1] for step in timed]
        timed_tokens = [self._tokens[step - 1] for step in timed]
        return Part(
            steps=self._steps,
            step_s={step: step_s[step - 1] for step in timed},
            losses=finite,
            diverged_in=len(finite) + 1 if len(finite) < len(losses) else None,
            rows_per_step=_typical(self._rows),
            tokens_per_step=self._tokens[0] if len(set(self._tokens)) == 1 else None,  # not with padded rows
            timed_rows=None if None in timed_rows else sum(timed_rows),
            timed_tokens=None if None in timed_tokens else sum(timed_tokens),
            memory=peaks(),
            held_parameters=self._record.observed.held_parameters,
            components=self._looks.components,
            traffic=self._looks.counts,
            written_bytes=self._looks.written_bytes,
        )

    def _timed(self) -> list[int]:
        """The steps whose times count: those after the looks, or in a short loop those before, without the first."""
        without = {*self._looks.looked_at, *self._evaluated, *self._after_looks}
        clean = [step for step in range(1, self._steps + 1) if step not in without]
        return [step for step in clean if step > self.after] or clean[1:]

    def _other_parts(self) -> list[Part]:
        """The parts of the other ranks in order, up to the first that does not arrive in time."""
        others, until = [], time.monotonic() + PARTS_WITHIN_S
        for rank in range(1, self.ranks.count):
            text = self.ranks.receive(f"part/{rank}", max(0.1, until - time.monotonic()))
            if text is None:
                break
            others.append(Part.model_validate_json(text))
        return others

    def _fill(self, all_parts: list[Part]) -> None:
        record, seen, loop = self._record, self._record.observed, self._loop
        record.watched.looked_at = self._looks.looked_at
        skipped = {*self._timed(), *self._looks.looked_at}
        record.watched.not_timed = [step for step in range(1, self._steps + 1) if step not in skipped]
        record.watched.clip_grad_norm = loop.wants_clipping
        seen.accumulation = _typical(self._passes) or seen.accumulation
        if seen.stage is None:
            seen.clipping = None if seen.arm == "fsdp1" else loop.clipped_at or 0.0  # FSDP1 has a function of its own
        if seen.autocast is None and loop.autocast is not None:
            seen.autocast = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(loop.autocast)
        seen.learning_rates = [] if None in self._rates else self._rates
        with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
            seen.dtypes = roles.dtypes(self.model, self.optimizer)
        seen.dtypes |= self._looks.dtypes
        parts.fill(record, all_parts)

    def _read_losses(self) -> list[float]:
        if not self._all_losses:
            return []
        recent = [torch.stack(self._recent)] if self._recent else []
        with contextlib.suppress(RuntimeError):  # after a failure of the device
            return torch.cat([*self._losses, *recent]).tolist() if self._losses or recent else []
        return []

    def _write_steps(self) -> None:
        """A line for each step, as the study's own trainer writes them."""
        losses = itertools.chain(self._record.loss.train, itertools.repeat(None))
        pairs = enumerate(zip(losses, self._rates, strict=False), start=1)
        lines = [json.dumps({"step": step, "loss": loss, "lr": rate}) + "\n" for step, (loss, rate) in pairs]
        (self.folder / "steps.jsonl").write_text("".join(lines))

    def _give_up(self, error: Exception) -> None:
        """Let the training go on without the watch, and record why. The hooks stay for now, as one may be running."""
        self.active = False
        why = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            self._looks.stop()
        with contextlib.suppress(Exception):
            witness.dismiss(self._witness)
        with contextlib.suppress(Exception):
            self._log.close()
        with contextlib.suppress(Exception):
            store.explain_what_failed(self.folder, "instruments_failed", why)
            what = f"study.watch raised {why}; your training was not affected"
            store.end_badly(self.folder, Stop(what, "report it"), type(error).__name__)
        sys.stderr.write(f"study.watch has stopped, your training goes on: {why}\n")


def _typical(values: list[int | None]) -> int | None:
    """The most frequent value, as the last batch of an epoch may be smaller. None if a value is unknown."""
    return statistics.mode(values) if values and None not in values else None


def _new_folder(run_dir: Path) -> Path:
    """A folder without a run. If `run_dir` has one, a number is added to its name."""
    folder, number = run_dir.resolve(), 1
    while (folder / store.RECORD).exists() or (folder.exists() and not folder.is_dir()):
        number += 1
        folder = run_dir.resolve().with_name(f"{run_dir.name}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
