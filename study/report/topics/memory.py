"""Memory: what a rank holds at its peak, part by part; and what changes the 16 bytes."""

import functools
from collections import defaultdict
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from study.core.text import size
from study.predict.front import papers
from study.records import metrics
from study.records.groups import by, groups, lines
from study.records.runs import FIRST_OPTIMIZER, Run, Runs
from study.report import grouping, style
from study.report.grouping import SETTINGS, columns, split_by_ranks
from study.report.of_record import predicted

PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("master", "moments", "swap"),
    "buckets": ("buckets", "staging"),
    "gathered weights": ("gathered_weights",),
    "activations": ("activations",),
    "other": ("temporaries", "constants", "other"),
}
PAPER = "ZeRO paper"  # of weights, gradients and optimizer states alone
COMPONENTS = ("weights", "gradients", "master", "moments", "staging")
ONE_MEMORY = "Offloading without a GPU: host and GPU memory are one"


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank holds at its peak, by part: measured, predicted, and states by the ZeRO paper."""
    rows = []
    known = split_by_ranks(groups([run for run in runs.done if metrics.components(run.record)], only=SETTINGS))
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = max(repeats, key=held_bytes)
            place = {"group": group, "panel": ONE_MEMORY if has_one_memory(run) else group, "line": line}
            place |= columns(run, "arm", "ranks", "kind", "parameters")
            rows += stack(place, "measured", part_bytes(metrics.components(run.record)), len(repeats))
            rows += stack(place, "predicted", predicted_parts(run), len(repeats))
            rows += stack(place, PAPER, _of_paper(run), len(repeats))
    return pd.DataFrame(rows)


def stack(place: dict, source: str, bytes_by_part: Mapping[str, float], n: int = 0) -> list[dict]:
    """Return the parts of one bar as rows."""
    return [place | {"source": source, "part": part, "bytes": size, "n": n} for part, size in bytes_by_part.items()]


@functools.cache  # notebooks of a report share their runs
def predicted_parts(run: Run) -> dict[str, float]:
    """Return the parts of the peak that is predicted for a run; none without a prediction."""
    estimate = predicted(run.record)
    return part_bytes(estimate.at_peak) if estimate else {}


def _of_paper(run: Run) -> dict[str, float]:
    """Return the states by the ZeRO paper's formula; none for what it does not describe: FSDP2, other optimizers."""
    requested = run.record.requested
    is_partial = requested.lora_rank or requested.train_only or requested.optimizer not in (None, FIRST_OPTIMIZER)
    seen = run.record.observed
    if requested.precision in (None, "fp8") or not seen.parameters or is_partial or seen.fsdp:
        return {}
    return papers.states_bytes(seen.parameters, seen.stage or 0, seen.ranks or 1, requested.precision)


def has_one_memory(run: Run) -> bool:
    """Return whether an arm offloads, and the machine has no GPU: what it holds on a GPU cannot be told apart."""
    observed = run.record.observed
    places = {observed.offload_optimizer, observed.offload_param} - {None, "none"}
    return run.record.observed.device == "cpu" and bool(places or (observed.fsdp and observed.fsdp["offloads"]))


def held_bytes(run: Run) -> int:
    """Return the bytes of all components at the peak."""
    return sum(metrics.components(run.record).values())


def part_bytes(components: Mapping[str, float]) -> dict[str, float]:
    """Return components summed up into the few parts that a figure shows."""
    name_of = {role: part for part, roles in PARTS.items() for role in roles}
    sizes: dict[str, float] = defaultdict(int)
    for role, size_bytes in components.items():
        sizes[name_of.get(role, "other")] += size_bytes
    return {part: sizes[part] for part in PARTS if part in sizes}


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the peak of each line as measured, predicted, and by others; those first that are predicted worst."""
    wide = grouping.wide(rows, "bytes")
    named = wide.rename(columns=lambda source: f"{source}_bytes")
    if {"predicted", "measured"} <= {*wide}:
        named["predicted over measured"] = wide["predicted"] / wide["measured"]
        off = (named["predicted over measured"] - 1).abs()
        named = named.loc[off.sort_values(ascending=False, kind="stable").index]
    return named.reset_index()


@style.figure
def figure(rows: pd.DataFrame, per_parameter: bool = False) -> Figure:
    """Peak memory of a rank, by what its tensors are for; marks are the sums that others give."""
    note = f"Bars: the run with the highest peak, {style.counted(rows)}; pale: predicted; hatched: virtual ranks or an"
    note += " emulated smaller device. The ZeRO paper counts weights, gradients and optimizer states alone. Without a"
    note += " GPU, host and device are one memory, so the split of what is offloaded is predicted."
    lengths = rows["bytes"] / (rows["parameters"] if per_parameter else 1)
    words = (lambda number: f"{number:.3g}") if per_parameter else size
    drawing = style.stacks(rows.assign(length=lengths), "part", style.PARTS, words, note)
    unit = " (bytes per parameter)" if per_parameter else ""
    drawing.axes[-1].set_xlabel(f"peak memory of a rank{unit}", loc="right")
    return drawing


# --- what changes the 16 bytes -------------------------------------------------------------------------------------


def states(runs: Runs) -> pd.DataFrame:
    """Return the bytes of each component per parameter, predicted and measured on the first rank between two steps."""
    rows = []
    known = [run for run in runs.done if metrics.components(run.record) and run.record.observed.parameters]
    for repeats in by(known, "optimizer", "lora_rank", "train_only", "precision", "arm", "ranks", "model").values():
        run = repeats[0]
        parameters = run.record.observed.parameters or 1
        after_step = run.record.memory.components.per_rank[0].after_step
        theory = predicted(run.record)
        place = columns(run, "optimizer", "lora_rank", "train_only", "precision", "arm", "ranks")
        for component in COMPONENTS:
            ours = theory.after_step.get(component, 0) / parameters if theory else None
            seen = after_step.get(component, 0) / parameters
            if ours or seen:
                rows.append(place | {"component": component, "predicted": ours, "measured": seen, "n": len(repeats)})
    return pd.DataFrame(rows).dropna(axis="columns", how="all")
