"""Checks for traffic that a step does not need, by the collectives that were counted in one step."""

from study.diagnosis.facts import REDUCING, Facts, Finding
from study.text.numbers import short, size


def gathers(facts: Facts) -> list[Finding] | None:
    sentence = (
        "Stage {stage} gathers all weights {times} times in a step ({moved}) because accumulation is {passes}: each "
        "pass gathers again what was released"
    )
    remedy = "take more rows per pass and fewer passes, or use stage 1 or 2, which gather once in a step"
    return _more_than_once(facts, 3, ("all_gather",), sentence, remedy, "P1-20")


def reductions(facts: Facts) -> list[Finding] | None:
    sentence = (
        "Stage {stage} reduces all gradients {times} times in a step ({moved}): after each of the {passes} passes, "
        "where stage 1 and DDP do so once"
    )
    remedy = "use stage 1, which waits for the last pass, or take more rows per pass and fewer passes"
    return _more_than_once(facts, 2, REDUCING, sentence, remedy, "L-34")


def _more_than_once(
    facts: Facts, from_stage: int, kinds: tuple[str, ...], sentence: str, remedy: str, evidence: str
) -> list[Finding] | None:
    """A finding if these collectives move the bytes of all weights more than once in a step."""
    if facts.zero < from_stage:
        return [] if facts.is_known else None
    passes = facts.observed.accumulation
    if None in (facts.traffic, facts.whole_bytes, passes):
        return None
    moved = facts.moved_bytes(*kinds)
    times = moved / facts.whole_bytes
    if passes == 1 or times < 1.5:
        return []
    values = {"stage": facts.zero, "times": short(round(times, 1)), "moved": size(moved), "passes": passes}
    return [Finding(sentence.format(**values), remedy, evidence)]


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
