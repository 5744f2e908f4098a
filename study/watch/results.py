"""The results of a watched loop: the measurements of its ranks, the sections of the record, and the printed summary."""

import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from study.core import arms
from study.core.errors import Stop
from study.core.numbers import short, size
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records import metrics
from study.records.hangs import Finding
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
from study.watch.trends import Column, Table, seconds

SHOWN = 4  # components, the largest first
STATES = ("weights", "gradients", "master", "moments")
STEADY = 0.75  # of the steps
COLUMNS = 98


class RankMeasurements(Section):
    """The measurements of one rank. Steps count from 1."""

    steps: int
    step_s: dict[int, float]  # of the timed steps
    losses: list[float]  # of all steps up to the first that is not finite; empty if one is unknown
    diverged_in: int | None = None  # the first step whose loss is not finite
    rows_per_step: int | None = None
    tokens_per_step: int | None = None
    timed_rows: int | None = None
    timed_tokens: int | None = None
    memory: RankMemory = RankMemory()
    held_parameters: int | None = None
    components: RankComponents | None = None
    traffic: dict[str, Collective] | None = None
    written_bytes: int | None = None
    host_freed_bytes: int | None = None
    rows_of_most_steps: int | None = None
    inputs: list[str] | None = None


def of_steps(table: Table, timed: list[int], knows_losses: bool) -> dict[str, Any]:
    """Return the fields of RankMeasurements that the steps of a rank give."""
    losses = table["loss"].tolist() if knows_losses else []
    finite = list(itertools.takewhile(math.isfinite, losses))
    chosen = table[np.isin(table["step"], timed)]
    step_s = seconds(chosen).tolist()
    tokens = typical(table["tokens"])
    rows = typical(table["rows"])
    return {
        "steps": len(table),
        "step_s": dict(zip(timed, step_s, strict=True)),
        "losses": finite,
        "diverged_in": len(finite) + 1 if len(finite) < len(losses) else None,
        "rows_per_step": rows,
        "rows_of_most_steps": rows if np.sum(table["rows"] == rows) >= STEADY * len(table) else None,
        "tokens_per_step": tokens if np.all(table["tokens"] == tokens) else None,  # not with padded rows
        "timed_rows": _total(chosen["rows"]),
        "timed_tokens": _total(chosen["tokens"]),
    }


def typical(values: Column) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if a value is unknown."""
    return None if np.isnan(values).any() or not len(values) else int(statistics.mode(values.tolist()))


def _total(values: Column) -> int | None:
    return None if np.isnan(values).any() else int(values.sum())


def fill(record: Record, ranks: list[RankMeasurements]) -> None:
    """Fill in the measured sections of a record, from the measurements of the ranks that sent theirs, in order."""
    seen = record.observed
    watched = record.watched
    seen.steps = ranks[0].steps
    seen.held_parameters_per_rank = _each(ranks, "held_parameters")
    watched.host_freed_bytes = _each(ranks, "host_freed_bytes")
    watched.rows_per_rank = _each(ranks, "rows_of_most_steps")
    watched.inputs_per_rank = _each(ranks, "inputs")
    record.time = _time(ranks)
    if len(ranks) == seen.ranks:  # otherwise sums over ranks would be too small
        seen.rows_per_step = sum(_each(ranks, "rows_per_step")) or None
        seen.tokens_per_step = sum(_each(ranks, "tokens_per_step")) or None
        watched.timed_rows = sum(_each(ranks, "timed_rows")) or None
        watched.timed_tokens = sum(_each(ranks, "timed_tokens")) or None
        # Only up to the first step in which a rank has no finite loss.
        losses = zip(*(rank.losses for rank in ranks), strict=False)
        record.loss = Loss(train=[statistics.fmean(losses_of_ranks) for losses_of_ranks in losses])
    components = Components(
        per_rank=_each(ranks, "components"), optimizer_home=seen.offload_optimizer, weights_home=seen.offload_param
    )
    record.memory = Memory(per_rank=[rank.memory for rank in ranks], components=components)
    if counts := _each(ranks, "traffic"):
        record.traffic = Traffic(per_rank=counts, kernel_bytes_written=[rank.written_bytes for rank in ranks])


def _time(ranks: list[RankMeasurements]) -> Time:
    """Return the times of the steps that all ranks timed, by the slowest rank; nothing without such steps."""
    timed = sorted(set.intersection(*(set(rank.step_s) for rank in ranks)))
    if not timed:
        return Time()
    step_s = [max(rank.step_s[step] for rank in ranks) for step in timed]
    return Time(step_s=step_s, window_s=max(sum(rank.step_s[step] for step in timed) for rank in ranks))


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
    groups = [seen.second_partition_ranks, seen.sequence_ranks, seen.tensor_ranks]
    observed = (seen.stage, seen.offload_optimizer, seen.offload_param, *(group is not None for group in groups))
    for name in arms.NAMES:
        arm = arms.read(arms.all_paths()[name])
        homes = (arm.stage, arm.offload_optimizer, arm.offload_param)
        if (*homes, arm.divides_ranks, arm.sequence_ranks > 1, arm.tensor_ranks > 1) == observed:
            return name
    named = {"optimizer": seen.offload_optimizer, "param": seen.offload_param}
    return "_".join([f"zero{seen.stage}", *(f"{part}_{home}" for part, home in named.items() if home != "none")])


# --- why a run failed ----------------------------------------------------------------------------------------------


def reason(error: BaseException, where: str, states: dict[str, int]) -> Stop:
    """Return why a user's training ended, as one sentence with a remedy. `states` are the bytes that it held."""
    text = str(error).partition("\n")[0]
    states_words = ", ".join(f"{role} {size(nbytes)}" for role, nbytes in states.items() if nbytes)
    states_words = f"; this rank then held {states_words}, and activations and buffers besides" if states_words else ""
    if device_is_full(error):
        remedy = "take fewer rows per pass or activation checkpointing; `study advise` predicts what fits"
        return Stop(f"the device ran out of memory ({text}){states_words}", remedy, "oom", where)
    if host_is_full(error):
        remedy = "take fewer rows per pass or fewer ranks"
        return Stop(f"the host refused more memory ({text}){states_words}", remedy, "host_oom", where)
    if lost_connection(error):
        return Stop("another rank died", "look in the launcher's output for which one, and why", "failed", where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "interrupted", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", "failed", where)


def divergence(ranks: list[RankMeasurements]) -> Stop | None:
    """Return the Stop for a run whose loss is no longer finite; None for any other run."""
    steps = [(each.diverged_in, rank) for rank, each in enumerate(ranks) if each.diverged_in]
    if not steps:
        return None
    step, rank = min(steps)
    remedy = "look at the rows of that step, give a lower learning rate, or clip gradients"
    return Stop(f"the loss is not finite in step {step}", remedy, "diverged", f"rank {rank}, step {step}")


# --- the summary ---------------------------------------------------------------------------------------------------


def summary(record: Record, folder: Path, steps: str | None = None, findings: Sequence[Finding] = ()) -> list[str]:
    """Return a summary of a record, of its steps and of what was found in them, in lines of at most 100 columns."""
    seen = record.observed
    ranks = f"{seen.ranks} {'rank' if seen.ranks == 1 else 'ranks'}"
    lines = [f"study.watch: {seen.arm or seen.wrapper} on {ranks} ({seen.device}), {seen.steps or 0} steps"]
    if record.error:
        lines += _wrapped(f"{record.status}: {record.error.message}", "  ")
    lines += [*_measured(record), *([f"  {steps}"] if steps else []), *_hints(record)]
    for finding in ordered((*findings, *diagnose(record))):
        lines += _wrapped(f"{finding.sentence}. What to do: {finding.remedy}.", "  - ")
    return [*lines, f"  {folder / 'record.json'}"]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent="    ", break_long_words=False)


def _measured(record: Record) -> list[str]:
    lines = []
    if step_s := metrics.median_step_s(record):
        speed = metrics.tokens_per_s(record)
        lines.append(f"  {short(step_s)} s per step (median){f', {short(speed)} tokens/s' if speed else ''}")
    if per_rank := record.memory.components.per_rank:
        fullest = max(per_rank, key=lambda rank: rank.tracked_peak_bytes)
        largest = sorted((fullest.at_peak or {}).items(), key=lambda item: -item[1])[:SHOWN]
        detail = ", ".join(f"{name.replace('_', ' ')} {size(role_bytes)}" for name, role_bytes in largest)
        lines.append(f"  {size(fullest.tracked_peak_bytes)} of tensors at the peak of a rank{detail and f': {detail}'}")
    if record.traffic.per_rank:
        kinds = [f"{kind} {size(each.bytes)} in {each.calls}" for kind, each in record.traffic.per_rank[0].items()]
        lines.append(f"  collectives of a step: {', '.join(kinds) or 'none'}")
    return lines


def _hints(record: Record) -> list[str]:
    """Return what to change in the call of watch if something could not be measured."""
    steps = record.observed.steps
    hints = []
    if not steps and not record.error:
        hints.append("  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop.")
    elif not record.time.step_s and set(record.watched.not_timed) - {1}:
        hints.append("  No step is timed: in each the model also ran outside training, as for an evaluation.")
    if steps and not record.watched.looked_at:
        hints.append("  The loop ended before the instruments looked: give watch a smaller `after`.")
    return hints
