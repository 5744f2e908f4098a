"""Why an advice names this arm and not a faster or simpler one, and what its alternative gives."""

from dataclasses import replace

from study.core import arms
from study.core.text import times
from study.predict.front import FASTER, ORDER, Advice, Row, advise
from study.report.rows import duration, seconds, unit_of, weights, why_tight


def reason_for(advice: Advice, choice: Row) -> str:
    # What was chosen among: `study.predict.advise` prefers arms that do not fit only just, and do not offload.
    alike = [row for row in advice.rows if row.fits and row.is_tight <= choice.is_tight]
    kept = [row for row in alike if not row.offloads]
    tight = [row for row in advice.rows if row.fits and row.is_tight and not row.offloads]
    quickest = min(tight, key=lambda row: row.seconds, default=choice)
    why = "Why: "
    others = "arms"
    if choice.offloads and kept:
        slower = min(kept, key=lambda row: row.seconds)
        why += f"it is nearly twice as fast as without offloading ({slower.arm}: {seconds(slower, unit_of(advice))}); "
    elif tight and not choice.is_tight and (choice.offloads or quickest.seconds < choice.seconds):
        why += f"without offloading {quickest.arm} fits only just ({why_tight(quickest)}); "
        if not choice.offloads:  # it is one of those that are compared
            others = "others"
    among = [row for row in alike if row.offloads == choice.offloads]
    with_or_without = "with" if choice.offloads else "without"
    fastest = min(among, key=lambda row: row.seconds)
    if fastest is not choice:
        faster = times(choice.seconds / fastest.seconds)
        # What is chosen comes first in ORDER, which begins with the simplest.
        if faster == times(1):
            why += f"{fastest.arm} is as fast; {choice.arm} is simpler."
        else:
            why += (
                f"{fastest.arm} would be {faster} as fast; {choice.arm} is simpler, which counts up to {FASTER} times."
            )
    elif len(among) == 1 and others == "arms":
        leaves_room = any(row.fits and row.offloads == choice.offloads for row in advice.rows if row is not choice)
        why += f"no other row {'leaves room' if leaves_room else 'fits'} {with_or_without} offloading."
    else:
        why += f"of the {others} that fit {with_or_without} offloading, it is the fastest"
        why += f"{_beside_simpler(among, choice)}."
    return why + _why_not_offloading(advice, alike, choice)


def _beside_simpler(among: list[Row], choice: Row) -> str:
    """Say of the fastest arm whether simpler ones take long enough to lose."""
    simpler = [row for row in among if ORDER.index(row.arm) < ORDER.index(choice.arm)]
    if not simpler:
        return " and the simplest"
    quickest = min(simpler, key=lambda row: row.seconds)
    longer = times(quickest.seconds / choice.seconds)
    in_fp32 = weights(quickest) == "fp32" != weights(choice)
    how = f" with fp32 weights, where {choice.arm} has {weights(choice)}" if in_fp32 else ""
    return f"; {quickest.arm} is simpler, but takes {longer} as long{how}, which counts from {FASTER} times on"


def _why_not_offloading(advice: Advice, alike: list[Row], choice: Row) -> str:
    """Name the quickest arm that offloads, if it is much faster than the choice or keeps the weights whole."""
    divides = {row.arm: arm.stage == 3 or bool(arm.fsdp) for row in alike for arm in [arms.load_arm(row.arm)]}
    others = [
        row
        for row in alike
        if row.offloads and (FASTER * row.seconds <= choice.seconds or divides[choice.arm] > divides[row.arm])
    ]
    if choice.offloads or not others:
        return ""
    quickest = min(others, key=lambda row: row.seconds)
    step = duration(quickest.seconds, unit=unit_of(advice))
    return (
        f" {quickest.arm} ({step}) fits as well, but how long offloading takes depends on the "
        "host, so it is preferred only where it is nearly twice as fast."
    )


def by_precision(advice: Advice, choice: Row) -> str:
    """Say so if an arm is preferred to DDP or one process, or shown as faster, only because these run in autocast."""
    simplest = advice.rows[0]
    quickest = min(choice, advice.alternative or choice, key=lambda row: row.seconds)
    if simplest.precision != quickest.precision:
        alike = advise(replace(advice.question, precision=quickest.precision)).choice
        if alike and alike.arm == simplest.arm:
            step = seconds(alike, unit_of(advice))
            fp16 = "" if alike.gpu.has_bf16 else f", which is fp16 on a {alike.gpu.kind},"
            return (
                f" Precision decides that: by default {alike.arm} runs in autocast and "
                f"{quickest.arm} does not. With --precision {alike.precision}{fp16} use {alike.arm}, {step}."
            )
    return ""


def why_second(other: Row, choice: Row) -> str:
    """What the alternative is, or gives, that the choice does not."""
    longer = other.seconds / choice.seconds
    reason = f"{times(1 / longer)} as fast" if longer < 1 else f"{times(longer)} as long"
    if reason.startswith("1.0"):
        reason = "as fast"
    keeps_all = choice.offloads and not other.offloads
    just = other.is_tight and not choice.is_tight
    if keeps_all:
        reason += ", and without offloading, as published trainings mostly are"
    if just:
        reason += f", but it fits only just ({why_tight(other)})"
    if longer < 1 and reason != "as fast" and not (keeps_all or just):  # why it is not the choice
        reason += ", with offloading" if other.offloads and not choice.offloads else f"; {choice.arm} is simpler"
    return reason if keeps_all or just else f"the simplest of the next fastest: {reason}"
