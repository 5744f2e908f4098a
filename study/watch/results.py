"""The results of a watched loop: the measurements of its ranks, the sections of the record, and the printed summary."""

import contextlib
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from study.core import arms
from study.core.errors import Stop
from study.core.text import size, wrapped
from study.measure import roles
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records import metrics, store
from study.records.schema import Record
from study.records.sections import (
    Collective,
    Components,
    Loss,
    Memory,
    Observed,
    RankComponents,
    RankMemory,
    Section,
    Time,
    Traffic,
)
from study.watch.diagnosis import diagnose
from study.watch.findings import ordered
from study.watch.steps import in_words
from study.watch.trends import Column, Table, findings, seconds, stacked

if TYPE_CHECKING:
    from study.watch.training import Training

STEADY = 0.75  # of the steps


class RankMeasurements(Section):
    """What one rank measured, besides its file of steps."""

    memory: RankMemory
    held_parameters: int | None
    components: RankComponents | None
    traffic: dict[str, Collective] | None
    host_freed_bytes: int | None
    inputs: list[str] | None
    knows_losses: bool  # of all steps


def fill(record: Record, ranks: list[RankMeasurements], tables: list[Table], after: int) -> int | None:
    """Fill in the measured sections of a record, from the ranks that sent theirs, in order.

    Return the first step without a finite loss. `after` is the number of steps before the instruments look. This is
    called once they have looked, with the first rank's alone, and again at the end of the loop.
    """
    # --- what the ranks sent
    seen = record.observed
    seen.held_parameters_per_rank = _each(ranks, "held_parameters")
    record.watched.host_freed_bytes = _each(ranks, "host_freed_bytes")
    record.watched.inputs_per_rank = _each(ranks, "inputs")
    components = Components(per_rank=_each(ranks, "components"))
    record.memory = Memory(per_rank=_each(ranks, "memory"), components=components)
    record.traffic = Traffic(per_rank=_each(ranks, "traffic"))
    # --- what they wrote into their files of steps
    seen.steps = 0
    if len(tables) < len(ranks):
        return None
    steps = stacked(tables)
    _fill_steps(record, steps, after)
    # --- the losses: the mean over ranks, so that of all of them
    if len(ranks) < (seen.ranks or 1) or not all(rank.knows_losses for rank in ranks):
        return None
    finite = np.logical_and.accumulate(np.isfinite(steps["loss"]).all(axis=0))  # up to the first that is not
    record.loss = Loss(train=steps["loss"].mean(axis=0)[finite].tolist())
    return next(iter(steps["step"][0, ~finite].astype(int).tolist()), None)


def _fill_steps(record: Record, steps: Table, after: int) -> None:
    """Fill in what the files of steps show: times, and sizes if all ranks have sent theirs."""
    # --- what is timed: steps after the instruments have looked, with nothing but training in them
    seen = record.observed
    watched = record.watched
    number = steps["step"][0]
    seen.steps = len(number)
    seen.accumulation = _usual(steps["passes"][0])
    clean = np.all(steps["clean"] > 0, axis=0)
    timed = clean & (number > after)
    if not timed.any():  # a short loop: the steps before the instruments, but the first
        timed = clean & (number > 1)
    if not timed.any():
        return
    step_s = seconds(steps)[:, timed]  # a step takes as long as its slowest rank
    record.time = Time(step_s=step_s.max(axis=0).tolist(), window_s=step_s.sum(axis=1).max())
    # --- sizes, which would be too small without all ranks
    if len(steps) == seen.ranks:
        seen.rows_per_step = _usual(steps["rows"].sum(axis=0))
        watched.timed_tokens = _whole(steps["tokens"][:, timed].sum())
        # Rows of unequal length, or a last batch, may differ now and then: most steps say what a rank has.
        usual = [_usual(rows) or 0 for rows in steps["rows"]]
        if np.mean(steps["rows"] == np.array(usual)[:, None]) >= STEADY:
            watched.rows_per_rank = usual


def _usual(values: Column) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if it is unknown."""
    return _whole(statistics.mode(values.tolist()))


def _whole(number: float) -> int | None:
    return None if np.isnan(number) else int(number)


def _each(ranks: list[RankMeasurements], name: str) -> list:
    """Return a value of all ranks, or an empty list if one is missing: a position in the list is a rank."""
    values = [getattr(rank, name) for rank in ranks]
    return [] if None in values else values


def arm_of(seen: Observed) -> str | None:
    """Return the name of the arm that the prepared objects are. None if no arm has their homes and groups.

    A user's loop has no arm of its own. With the name of one it can be compared with this study's runs.
    """
    fsdp = seen.fsdp or {"mesh": [], "units_resharded_after_forward": 0}
    # In this order, because an engine or an FSDP model may have one rank as well.
    kinds = {"DEEPSPEED": seen.stage is not None, "FSDP": seen.fsdp, "MULTI_GPU": seen.bucket_bytes}
    kinds["NO"] = seen.ranks == 1
    observed = (
        next((kind for kind, is_one in kinds.items() if is_one), None),
        seen.stage,
        seen.offload_optimizer,
        seen.offload_param,
        seen.second_partition_ranks is not None or 2 in map(len, fsdp["mesh"]),
        seen.sequence_ranks is not None,
        seen.tensor_ranks is not None,
        fsdp["units_resharded_after_forward"] > 0,
    )
    for name in arms.NAMES:
        arm = arms.load_arm(name)
        promised = (
            arm.distributed_type,
            arm.stage,
            arm.offload_optimizer,
            arm.offload_param,
            arm.divides_ranks,
            arm.sequence_ranks > 1,
            arm.tensor_ranks > 1,
            (arm.fsdp or {}).get("fsdp_reshard_after_forward", False),
        )
        if observed == promised:
            return name
    return None


FEWER_ROWS = "take fewer rows per pass, fewer ranks or activation checkpointing; `study advise` predicts what fits"


def reason(error: BaseException, where: str, training: "Training") -> Stop:
    """Return why a user's training ended, as one sentence with a remedy."""
    # Of a CUDA error only the first line says something. What is held tells states from activations.
    text = str(error).partition("\n")[0]
    held = f"({text}); this rank then held {_held(training)}"
    if device_is_full(error):
        return Stop(f"the device ran out of memory {held}", FEWER_ROWS, "oom", where)
    if host_is_full(error):
        return Stop(f"the host refused more memory {held}", FEWER_ROWS, "host_oom", where)
    if lost_connection(error):
        return Stop("another rank died", "look in the launcher's output for which one, and why", "failed", where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "interrupted", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", "failed", where)


def _held(training: "Training") -> str:
    """Return what a rank holds of the training state, by role."""
    held = ["activations"]
    with contextlib.suppress(Exception):  # after a crash tensors may be unreadable
        tensors = roles.tensors_by_role(training.model, training.optimizer).items()
        held = [f"{role} {size(sum(tensor.nbytes for tensor in each))}" for role, each in tensors if each] + held
    return ", ".join(held)


def summary(record: Record, folder: Path, tables: dict[int, Table]) -> list[str]:
    """Return a summary of a record, of its steps and of what was found in them."""
    seen = record.observed
    # --- how it ended
    lines = [f"study.watch: {seen.arm or seen.wrapper} on {seen.ranks} x {seen.device}, steps: {seen.steps or 0}"]
    if record.error:
        lines += wrapped(f"{record.status}: {record.error.message}", "    ", "  ")
    elif not seen.steps:
        lines.append("  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop.")
    elif not record.watched.looked_at:
        lines.append("  The loop ended before the instruments looked: give watch a smaller `after`.")
    # --- what a step took, held and moved
    if record.time.step_s:
        lines.append(f"  {in_words(tables[0][tables[0]['clean'] > 0])}")
    if held := metrics.components(record):
        shown = ", ".join(f"{role} {size(nbytes)}" for role, nbytes in held.items())
        lines += wrapped(f"at the peak: {shown}", "    ", "  ")
    if record.traffic.per_rank:
        counts = record.traffic.per_rank[0]
        moved = ", ".join(f"{kind} {size(each.bytes)} in {each.calls}" for kind, each in counts.items())
        lines.append(f"  collectives of a step: {moved or 'none'}")
    # --- what is wrong or costly
    for finding in ordered([*findings(tables), *diagnose(record)]):
        lines += wrapped(f"{finding.sentence}. What to do: {finding.remedy}.", "    ", "  - ")
    return [*lines, f"  {folder / store.RECORD}"]
