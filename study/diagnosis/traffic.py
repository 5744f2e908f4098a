"""What is moved more often than a step needs, by the collectives that were counted in one step."""

from study.diagnosis.facts import REDUCING, Facts, Finding
from study.text.numbers import short, size


def gathers(facts: Facts) -> list[Finding] | None:
    if facts.zero < 3:
        return [] if facts.is_known else None
    passes = facts.observed.accumulation
    if None in (facts.traffic, facts.whole_bytes, passes):
        return None
    moved = facts.moved_bytes("all_gather")
    times = moved / facts.whole_bytes
    if passes == 1 or times < 1.5:
        return []
    return [
        Finding(
            f"Stage 3 gathers all weights {short(round(times, 1))} times in a step ({size(moved)}) because "
            f"accumulation is {passes}: each pass gathers again what was released",
            "take more rows per pass and fewer passes, or use stage 1 or 2, which gather once in a step",
            "P1-20",
        )
    ]


def reductions(facts: Facts) -> list[Finding] | None:
    if facts.zero < 2:
        return [] if facts.is_known else None
    passes = facts.observed.accumulation
    if None in (facts.traffic, facts.whole_bytes, passes):
        return None
    moved = facts.moved_bytes(*REDUCING)
    times = moved / facts.whole_bytes
    if passes == 1 or times < 1.5:
        return []
    return [
        Finding(
            f"Stage {facts.zero} reduces all gradients {short(round(times, 1))} times in a step ({size(moved)}): "
            f"after each of the {passes} passes, where stage 1 and DDP do so once",
            "use stage 1, which waits for the last pass, or take more rows per pass and fewer passes",
            "L-34",
        )
    ]


def second_copy(facts: Facts) -> list[Finding] | None:
    """hpZ's copy serves the backward pass; what stage 3 does not release is not gathered there."""
    seen = facts.observed
    if facts.zero < 3 or seen.second_partition_ranks is None:
        return [] if facts.is_known else None
    if None in (facts.traffic, seen.second_partition_parameters, facts.whole_bytes):
        return None
    gathers = facts.traffic.get("all_gather")
    if seen.second_partition_ranks >= seen.ranks or (gathers and gathers.bytes_by_group):
        return []
    held_bytes = seen.second_partition_parameters * facts.whole_bytes // seen.parameters
    return [
        Finding(
            f"hpZ makes a second copy of the weights, {size(held_bytes)} on each rank, and nothing is gathered from "
            "it: stage 3 releases only what exceeds stage3_max_live_parameters, a billion parameters by default",
            "set stage3_max_live_parameters and stage3_max_reuse_distance to a fraction of the model's parameters, or "
            "leave zero_hpz_partition_size out",
            "P4-14",
        )
    ]
