"""Checks for traffic that a step does not need, by the collectives that were counted in one step."""

from dataclasses import replace

from study.io.numbers import short, size
from study.records.findings import Finding
from study.watcher.facts import REDUCING, Facts


def gathers(facts: Facts) -> list[Finding] | None:
    finding = Finding(
        "Stage {stage} gathers all weights {times} times in a step ({moved}) because accumulation is {passes}: each "
        "pass gathers again what was released",
        "take more rows per pass and fewer passes, or use stage 1 or 2, which gather once in a step",
        "P1-20",
    )
    return _more_than_once(facts, 3, ("all_gather",), finding)


def reductions(facts: Facts) -> list[Finding] | None:
    finding = Finding(
        "Stage {stage} reduces all gradients {times} times in a step ({moved}): after each of the {passes} passes, "
        "where stage 1 and DDP do so once",
        "use stage 1, which waits for the last pass, or take more rows per pass and fewer passes",
        "L-34",
    )
    return _more_than_once(facts, 2, REDUCING, finding)


def _more_than_once(facts: Facts, from_stage: int, kinds: tuple[str, ...], finding: Finding) -> list[Finding] | None:
    """The finding with its numbers, if these collectives move the bytes of all weights more than once in a step."""
    if facts.zero < from_stage:
        return [] if facts.is_known else None
    passes = facts.observed.accumulation
    if None in (facts.traffic, facts.whole_bytes, passes):
        return None
    moved = facts.moved_bytes(*kinds)
    times = moved / facts.whole_bytes
    if passes == 1 or times < 1.5:
        return []
    numbers = {"stage": facts.zero, "times": short(round(times, 1)), "moved": size(moved), "passes": passes}
    return [replace(finding, sentence=finding.sentence.format(**numbers))]


def second_copy(facts: Facts) -> list[Finding] | None:
    """Weights that stage 3 does not release are not gathered in the backward pass, and then hpZ's copy is not used."""
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
