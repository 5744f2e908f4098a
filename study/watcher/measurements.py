"""The measurements of each rank, and the sections of a record that the first rank makes of them."""

import statistics
from collections.abc import Iterable
from typing import TypeVar

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
from study.spec import arms

T = TypeVar("T")


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


def fill(record: Record, ranks: list[RankMeasurements]) -> None:
    """Fill in the measured sections of a record, from the measurements of the ranks that sent theirs, in order."""
    seen = record.observed
    seen.steps = ranks[0].steps
    seen.held_parameters_per_rank = _all(rank.held_parameters for rank in ranks)
    record.time = _times([rank.step_s for rank in ranks])
    if len(ranks) == seen.ranks:  # otherwise sums over ranks would be too small
        seen.rows_per_step = _sum(rank.rows_per_step for rank in ranks)
        seen.tokens_per_step = _sum(rank.tokens_per_step for rank in ranks)
        record.watched.timed_rows = _sum(rank.timed_rows for rank in ranks)
        record.watched.timed_tokens = _sum(rank.timed_tokens for rank in ranks)
        # Only up to the first step in which a rank has no finite loss.
        losses = zip(*(rank.losses for rank in ranks), strict=False)
        record.loss = Loss(train=[statistics.fmean(of_ranks) for of_ranks in losses])
    components = Components(
        per_rank=_all(rank.components for rank in ranks),
        optimizer_home=seen.offload_optimizer,
        weights_home=seen.offload_param,
    )
    record.memory = Memory(per_rank=[rank.memory for rank in ranks], components=components)
    if counts := _all(rank.traffic for rank in ranks):
        record.traffic = Traffic(per_rank=counts, kernel_bytes_written=[rank.written_bytes for rank in ranks])


def _times(ranks_step_s: list[dict[int, float]]) -> Time:
    """Return the times of the steps that all ranks timed, each by its slowest rank."""
    steps = sorted(set.intersection(*(set(step_s) for step_s in ranks_step_s)))
    if not steps:
        return Time()
    step_s = [max(each[step] for each in ranks_step_s) for step in steps]
    window_s = max(sum(each[step] for step in steps) for each in ranks_step_s)
    return Time(step_s=step_s, window_s=window_s)


def _all(values: Iterable[T | None]) -> list[T]:
    """Return the values of all ranks, or an empty list if one is missing: a position in the list is a rank."""
    known = []
    for value in values:
        if value is None:
            return []
        known.append(value)
    return known


def _sum(values: Iterable[int | None]) -> int | None:
    known = _all(values)
    return sum(known) if known else None


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
        promised = (arm.stage, arm.offload_optimizer, arm.offload_param)
        if (*promised, arm.divides_ranks, arm.sequence_ranks > 1, arm.tensor_ranks > 1) == observed:
            return name
    homes = {"optimizer": seen.offload_optimizer, "param": seen.offload_param}
    return "_".join([f"zero{seen.stage}", *(f"{part}_{home}" for part, home in homes.items() if home != "none")])
