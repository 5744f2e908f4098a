"""Findings in the dynamics of a watched training: its rates, its mode, what trains, what is clipped, and its losses."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from study.known.findings import Finding, finding
from study.watch.trends import Column, Table, stacked

FEWEST = 10  # steps that are judged
FEWEST_LOSSES = 20
OFTEN = 0.2  # of the steps: what is wrong in fewer may be meant
MOST = 0.5
ALIKE = 0.9
ALMOST = 0.999  # of a rate that is computed in another way
LOW = 0.1  # of the largest rate: the end of a schedule
RISEN = 0.5  # of the first loss
FALLEN = 0.2  # of the first loss
BEGINNING = 5  # steps
TINY = 1e-8  # a rate: Adam moves no weight by more, and of a weight above 0.2 fp32 rounds that away
STRAIGHT = 1e-3  # of the largest rate: a warm-up rises by equal parts, and a search for a rate does not

Steps = NDArray[np.bool_]


@np.errstate(all="ignore")  # what a stranger's numbers give is no number, and then no finding
def findings(tables: dict[int, Table], is_over: bool = True) -> list[Finding]:
    """Return what the steps of all ranks show, in the order of the rules. `is_over`: no more steps come."""
    if not tables:
        return []
    steps = stacked(list(tables.values()))
    if steps.shape[1] < FEWEST:
        return []
    rules = (_rates, *[_warm_up] * is_over, _mode, _trained, _clipping, _schedule, _passes, _losses, _apart)
    return [each for rule in rules for each in rule(steps)]


def _first(steps: Table, wrong: Steps) -> int:
    return int(steps["step"][0, np.argmax(wrong)])


def _rates(steps: Table) -> Iterator[Finding]:
    """Name a rate that is 0 before the training ends, that rises again, or that a group does not have."""
    groups = steps["rates"][0]  # ranks with other rates have a finding of their own
    known = groups[:, np.isfinite(groups).all(axis=0)]
    if not known.size:
        return
    rates = known.max(axis=1)
    zero = rates == 0
    count = len(rates)
    if zero[1:].mean() >= LOW and zero.sum() > 1:
        first, last = _longest(zero)
        numbers = steps["step"][0].astype(int)
        yield finding("rate_is_zero", zero=int(zero.sum()), count=count, first=numbers[first], last=numbers[last])
        return
    if rates[0] == rates.max() < TINY:  # one that rises may become larger
        yield finding("rate_too_small", rate=rates[0])
    for group in np.flatnonzero((known == 0).all(axis=0)):
        yield finding("group_without_rate", group=int(group))
    if (turn := _turn(rates)) is not None:
        yield finding("rate_rises_again", step=int(steps["step"][0, turn]), count=count)


def _longest(wrong: Steps) -> tuple[int, int]:
    """Return the first and the last place of the longest stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wrong.astype(int), [0]])))
    begins, ends = edges[::2], edges[1::2]
    longest = np.argmax(ends - begins)
    return int(begins[longest]), int(ends[longest]) - 1


def _warm_up(steps: Table) -> Iterator[Finding]:
    """Name a rate that still rises at the end."""
    rates = steps["rates"][0, :, 0]
    parts = np.diff(rates)
    if parts.min() > 0 and np.ptp(parts) <= STRAIGHT * rates[-1]:
        yield finding("warmup_unfinished", count=len(rates), first=rates[0], last=rates[-1])


def _turn(rates: Column) -> int | None:
    """Return where rates have fallen to the end of a schedule, and then rise little by little. A restart is at once."""
    largest = rates.max()
    after = rates[np.argmax(rates > ALMOST * largest) :]
    low = np.flatnonzero(after <= LOW * largest)
    if len(low) == 0 or low[0] + 1 >= len(after):
        return None
    later = after[low[0] :]
    risen = later.max() - later[0]
    if risen < MOST * largest or np.diff(later).max() > risen / 2:
        return None
    return len(rates) - len(later)


def _mode(steps: Table) -> Iterator[Finding]:
    """Name a model that trains in evaluation mode, as a whole or in its layers of dropout."""
    for id, wrong in (
        ("eval_while_training", steps["training"] == 0),
        ("dropout_off", (steps["training"] == 1) & (steps["dropouts_off"] > 0)),
    ):
        often = wrong.mean(axis=1)
        if often.max() >= OFTEN:
            row = wrong[np.argmax(often)]
            layers = np.nanmax(steps["dropouts_off"])
            yield finding(id, share=float(often.max()), first=_first(steps, row), layers=layers)


def _trained(steps: Table) -> Iterator[Finding]:
    """Name weights that stop training on the way."""
    shares = steps["trained"][0]
    lost = shares < MOST * shares.max()
    if lost[-1]:
        least, most = float(shares[-1]), float(shares.max())
        yield finding("frozen_on_the_way", first=_first(steps, lost), most=most, least=least)


def _clipping(steps: Table) -> Iterator[Finding]:
    """Name clipping before all gradients of a step are there, or after its update."""
    clipped_in, passes = steps["clipped_in"][0], steps["passes"][0]
    early = (clipped_in > 0) & (clipped_in < passes)
    if early.mean() >= MOST:
        yield finding("clipped_in_each_pass", passes=int(np.median(passes)), share=float(early.mean()))
    late = clipped_in == 0
    if late.mean() >= MOST:
        yield finding("clipped_after_the_update", share=float(late.mean()))


def _schedule(steps: Table) -> Iterator[Finding]:
    scheduled = steps["scheduled"][0]
    if (scheduled > 1).mean() >= MOST:
        yield finding("schedule_in_each_pass", times=int(np.median(scheduled)))


def _passes(steps: Table) -> Iterator[Finding]:
    usual = np.median(steps["passes"], axis=1)
    if usual.min() != usual.max():
        yield finding("unequal_passes", least=int(usual.min()), most=int(usual.max()), rank=int(np.argmin(usual)))


def _losses(steps: Table) -> Iterator[Finding]:
    """Name losses that do not change, or rise."""
    losses = steps["loss"].mean(axis=0)
    if not np.isfinite(losses).all():
        return
    if np.ptp(steps["loss"], axis=1).max() == 0:
        yield finding("loss_constant", loss=losses[0], count=len(losses))
    first, last = losses[0], losses[-(len(losses) // 4) :]
    if len(losses) >= FEWEST_LOSSES and last.min() > first + RISEN * abs(first):
        yield finding("loss_rises", first=first, last=last.mean())


def _apart(steps: Table) -> Iterator[Finding]:
    """Name a rank whose loss does not fall while those of all others do: its rows teach nothing, or what is wrong."""
    losses = steps["loss"]
    if len(losses) == 1 or losses.shape[1] < FEWEST_LOSSES or not np.isfinite(losses).all():
        return
    quarter = losses.shape[1] // 4
    first, last = losses[:, :BEGINNING].mean(axis=1), losses[:, -quarter:].mean(axis=1)
    rank = int(np.argmin(first - last))
    others = np.delete(losses, rank, axis=0)
    fallen = np.delete((first - last) / abs(first), rank).min()
    is_apart = (losses[rank] > others.max(axis=0))[-quarter:].mean() >= ALIKE
    if fallen >= FALLEN and (first - last)[rank] < FALLEN * fallen * abs(first[rank]) and is_apart:
        yield finding("rank_learns_nothing", rank=rank, first=first[rank], last=last[rank], fallen=fallen)
