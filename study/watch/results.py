"""The results of a watched loop: the measurements of its ranks, the sections of the record, and the printed summary."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from study.core import arms
from study.core.errors import Stop
from study.core.numbers import number_of, size
from study.core.tables import wrapped
from study.measure import roles
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records.schema import (
    Collective,
    Components,
    Loss,
    Memory,
    Observed,
    RankComponents,
    RankMemory,
    Record,
    Section,
    Time,
    Traffic,
)
from study.watch.diagnosis import diagnose
from study.watch.findings import ordered
from study.watch.steps import in_words
from study.watch.trends import Column, Table, findings, seconds

if TYPE_CHECKING:
    from study.watch.training import Training

SHOWN = 4  # components, the largest first
STATES = ("weights", "gradients", "master", "moments")
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

    Return the first step without a finite loss.
    """
    seen = record.observed
    seen.held_parameters_per_rank = _each(ranks, "held_parameters")
    record.watched.host_freed_bytes = _each(ranks, "host_freed_bytes")
    record.watched.inputs_per_rank = _each(ranks, "inputs")
    components = Components(
        per_rank=_each(ranks, "components"), optimizer_home=seen.offload_optimizer, weights_home=seen.offload_param
    )
    record.memory = Memory(per_rank=[rank.memory for rank in ranks], components=components)
    record.traffic = Traffic(per_rank=_each(ranks, "traffic"))
    seen.steps = 0
    if len(tables) < len(ranks):
        return None
    steps = np.stack([table[: min(map(len, tables))] for table in tables])  # a row for each rank
    timed = _fill_times(record, steps, after)
    if len(ranks) < (seen.ranks or 1):
        return None  # sums over ranks would be too small
    _fill_sizes(record, steps, timed)
    if not all(rank.knows_losses for rank in ranks):
        return None
    finite = np.logical_and.accumulate(np.isfinite(steps["loss"]).all(axis=0))  # up to the first that is not
    record.loss = Loss(train=steps["loss"].mean(axis=0)[finite].tolist())
    return None if finite.all() else int(steps["step"][0][~finite][0])


def _fill_times(record: Record, steps: Table, after: int) -> np.ndarray:
    """Fill in what every rank's steps show. Return which steps are timed.

    Those are the ones after the instruments, or in a short loop those before them but the first.
    """
    seen = record.observed
    number = steps["step"][0]
    seen.steps = len(number)
    seen.accumulation = _usual(steps["passes"][0])
    rates = steps["rate"][0]
    seen.learning_rates = [] if np.isnan(rates).any() else rates.tolist()
    clean = np.all(steps["clean"] > 0, axis=0)
    timed = clean & (number > after)
    if not timed.any():
        timed = clean & (number > 1)
    known = timed | np.isin(number, record.watched.looked_at)
    record.watched.not_timed = number[~known].astype(int).tolist()
    step_s = seconds(steps)[:, timed]
    if timed.any():  # a step takes as long as its slowest rank
        record.time = Time(step_s=step_s.max(axis=0).tolist(), window_s=step_s.sum(axis=1).max())
    return timed


def _fill_sizes(record: Record, steps: Table, timed: np.ndarray) -> None:
    """Fill in the rows and tokens of a step, and those of the timed steps, of which some may be smaller."""
    rows = steps["rows"]
    tokens = steps["tokens"].sum(axis=0)
    record.observed.rows_per_step = _usual(rows.sum(axis=0))
    if np.all(tokens == tokens[0]):  # not with padded rows
        record.observed.tokens_per_step = int(tokens[0])
    record.watched.timed_rows = _whole(rows[:, timed].sum())
    record.watched.timed_tokens = _whole(tokens[timed].sum())
    usual = [_usual(each) for each in rows]
    if all(np.mean(each == number) >= STEADY for each, number in zip(rows, usual, strict=True)):
        record.watched.rows_per_rank = [number for number in usual if number is not None]


def _usual(values: Column) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if a value is unknown."""
    return None if np.isnan(values).any() else int(statistics.mode(values.tolist()))


def _whole(number: float) -> int | None:
    return int(number) if number > 0 else None  # NaN is not


def _each(ranks: list[RankMeasurements], name: str) -> list:
    """Return a value of all ranks, or an empty list if one is missing: a position in the list is a rank."""
    values = [getattr(rank, name) for rank in ranks]
    return [] if None in values else values


def arm_of(seen: Observed, fsdp_version: int | None) -> str | None:
    """Return the name of the arm that the prepared objects are. None for ranks that do not train together."""
    if seen.stage is not None:
        return _zero_arm(seen)
    if seen.fsdp is not None:
        sharding = "hsdp" if any(len(mesh) == 2 for mesh in seen.fsdp["mesh"]) else "fsdp2"
        kept = "" if seen.fsdp["units_resharded_after_forward"] else "_grad_op"
        return sharding + kept + ("_cpu" if seen.fsdp["offloads"] else "")
    if fsdp_version is not None:
        return f"fsdp{fsdp_version}"
    if seen.bucket_bytes is not None:
        return "ddp"
    return "single" if seen.ranks == 1 else None


def _zero_arm(seen: Observed) -> str:
    """Return the study's arm with this stage and these homes and groups, or a name made of stage and homes."""
    homes = seen.stage, seen.offload_optimizer, seen.offload_param
    groups = [seen.second_partition_ranks, seen.sequence_ranks, seen.tensor_ranks]
    for name in arms.NAMES:
        arm = arms.load_arm(name)
        theirs = arm.divides_ranks, arm.sequence_ranks > 1, arm.tensor_ranks > 1
        if homes == (arm.stage, arm.offload_optimizer, arm.offload_param) and theirs == tuple(map(bool, groups)):
            return name
    return "zero{}_{}_{}".format(*homes)


def reason(error: BaseException, where: str, training: "Training") -> Stop:
    """Return why a user's training ended, as one sentence with a remedy."""
    text = str(error).partition("\n")[0]
    if device_is_full(error):
        remedy = "take fewer rows per pass or activation checkpointing; `study advise` predicts what fits"
        return Stop(f"the device ran out of memory ({text}){_states(training)}", remedy, "oom", where)
    if host_is_full(error):
        remedy = "take fewer rows per pass or fewer ranks"
        return Stop(f"the host refused more memory ({text}){_states(training)}", remedy, "host_oom", where)
    if lost_connection(error):
        return Stop("another rank died", "look in the launcher's output for which one, and why", "failed", where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "interrupted", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", "failed", where)


def _states(training: "Training") -> str:
    tensors = roles.tensors_by_role(training.model, training.optimizer)
    held = ", ".join(f"{role} {size(sum(each.nbytes for each in tensors[role]))}" for role in STATES if tensors[role])
    return f"; this rank then held {held}, and activations and buffers besides"


def summary(record: Record, folder: Path, tables: dict[int, Table]) -> list[str]:
    """Return a summary of a record, of its steps and of what was found in them."""
    seen = record.observed
    about = f"{number_of(seen.ranks or 1, 'ranks')} ({seen.device}), {number_of(seen.steps or 0, 'steps')}"
    lines = [f"study.watch: {seen.arm or seen.wrapper} on {about}"]
    if record.error:
        lines += wrapped(f"{record.status}: {record.error.message}", "    ", "  ")
    elif not seen.steps:
        lines.append("  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop.")
    elif not record.watched.looked_at:
        lines.append("  The loop ended before the instruments looked: give watch a smaller `after`.")
    clean = [table[table["clean"] > 0] for table in tables.values()]
    if clean and len(clean[0]):
        lines.append(f"  {in_words(clean[0])}")
    if per_rank := record.memory.components.per_rank:
        fullest = max(per_rank, key=lambda rank: rank.tracked_peak_bytes)
        largest = sorted((fullest.at_peak or {}).items(), key=lambda item: -item[1])[:SHOWN]
        detail = ", ".join(f"{name.replace('_', ' ')} {size(role_bytes)}" for name, role_bytes in largest)
        lines.append(f"  {size(fullest.tracked_peak_bytes)} of tensors at the peak of a rank: {detail}")
    for kind, each in next(iter(record.traffic.per_rank), {}).items():
        lines.append(f"  {kind}: {size(each.bytes)} in {number_of(each.calls, 'calls')} of a step")
    for finding in ordered((*findings(tables), *diagnose(record))):
        lines += wrapped(f"{finding.sentence}. What to do: {finding.remedy}.", "    ", "  - ")
    return [*lines, f"  {folder / 'record.json'}"]
