"""The part of a record that each rank measures, and the record that the first rank makes of all parts."""

import statistics
from collections.abc import Iterable

from study.records.schema import (
    Collective,
    Components,
    Loss,
    Memory,
    RankComponents,
    RankMemory,
    Record,
    Section,
    Time,
    Traffic,
)
from study.spec import arms


class Part(Section):
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


def fill(record: Record, parts: list[Part]) -> None:
    """Fill in the measured sections of a record, from the parts of the ranks that sent theirs, in order."""
    seen = record.observed
    whole = len(parts) == seen.ranks  # otherwise sums over ranks would be too small
    seen.steps = parts[0].steps
    seen.held_parameters_per_rank = _all(part.held_parameters for part in parts)
    record.time = _times([part.step_s for part in parts])
    if whole:
        seen.rows_per_step = _sum(part.rows_per_step for part in parts)
        seen.tokens_per_step = _sum(part.tokens_per_step for part in parts)
        record.watched.timed_rows = _sum(part.timed_rows for part in parts)
        record.watched.timed_tokens = _sum(part.timed_tokens for part in parts)
        # Only up to the first step in which a rank has no finite loss.
        train = [statistics.fmean(losses) for losses in zip(*(p.losses for p in parts), strict=False)]
        record.loss = Loss(train=train)
    homes = {"optimizer_home": seen.offload_optimizer, "weights_home": seen.offload_param}
    components = Components(per_rank=_all(part.components for part in parts), **homes)
    record.memory = Memory(per_rank=[part.memory for part in parts], components=components)
    if counts := _all(part.traffic for part in parts):
        written = [part.written_bytes for part in parts]
        record.traffic = Traffic(per_rank=counts, kernel_bytes_written=written)


def _times(ranks_step_s: list[dict[int, float]]) -> Time:
    """The times of the steps that all ranks timed, each by its slowest rank."""
    steps = sorted(set.intersection(*(set(step_s) for step_s in ranks_step_s)))
    if not steps:
        return Time()
    step_s = [max(each[step] for each in ranks_step_s) for step in steps]
    window_s = max(sum(each[step] for step in steps) for each in ranks_step_s)
    return Time(step_s=step_s, window_s=window_s)


def _all(values: Iterable) -> list:
    """The values of all ranks, or an empty list if one is missing: a position in the list is a rank."""
    values = list(values)
    return [] if None in values else values


def _sum(values: Iterable[int | None]) -> int | None:
    return sum(known) if (known := _all(values)) else None


def arm_of(seen, fsdp: int | None) -> str | None:
    """The name of the arm that the prepared objects are. None for ranks that do not train together."""
    if seen.stage is not None:
        homes = (seen.stage, seen.offload_optimizer, seen.offload_param)
        for name in arms.NAMES:
            arm, second = arms.read(arms.all_paths()[name]), seen.second_partition_ranks is not None
            promised = (arm.stage, arm.offload_optimizer, arm.offload_param, arm.divides_ranks, arm.sequence_ranks > 1)
            shared = (seen.sequence_ranks is not None, seen.tensor_ranks is not None)
            if (*promised, arm.tensor_ranks > 1) == (*homes, second, *shared):
                return name
        parts = [
            f"{part}_{home}" for part, home in zip(("optimizer", "param"), homes[1:], strict=True) if home != "none"
        ]
        return "_".join([f"zero{seen.stage}", *parts])
    if seen.fsdp is not None:
        kept = "" if seen.fsdp["units_resharded_after_forward"] else "_grad_op"
        groups = any(len(mesh) == 2 for mesh in seen.fsdp["mesh"])
        return ("hsdp" if groups else "fsdp2") + kept + ("_cpu" if seen.fsdp["offloads"] else "")
    if fsdp is not None:
        return f"fsdp{fsdp}"
    if seen.bucket_bytes is not None:
        return "ddp"
    return "single" if seen.ranks == 1 else None
