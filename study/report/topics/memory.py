"""Memory: what a rank holds at its peak, part by part, and on how many ranks; and what changes the 16 bytes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from study.bench.prediction import predicted
from study.io.numbers import size
from study.io.words import joined
from study.predictor import papers
from study.records.groups import by, groups, lines
from study.records.runs import FIRST_OPTIMIZER, Run, Runs
from study.report import style
from study.report.grouping import SETTINGS, columns, each, largest, largest_groups, parts, split_by_ranks, sums
from study.report.style import FAINT, OPEN, colour, conditions
from study.report.topics import bars
from study.spec import arms

PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("master", "moments", "swap"),
    "buckets": ("buckets", "staging"),
    "gathered weights": ("gathered_weights",),
    "activations": ("activations",),
    "other": ("temporaries", "constants", "other"),
}
PAPER = "ZeRO paper, states"
COMPONENTS = ("weights", "gradients", "master", "moments", "staging")
APART = 0.3  # of a point's ranks, from the first arm to the last: equal points would hide each other
ONE_MEMORY = " Without a GPU, host and device are one memory: a bar has what is offloaded as well."
RANKS = tuple(2**power for power in range(1, 11))


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank holds at its peak, by part: measured, predicted, and states by the ZeRO paper."""
    rows = []
    for place, run, n in _largest(runs):
        rows += stack(place, "measured", part_bytes(run.components), n)
        rows += stack(place, "predicted", predicted_parts(run), n)
        rows += stack(place, PAPER, _of_paper(run), n)
    return pd.DataFrame(rows)


def predicted_parts(run: Run) -> dict[str, float]:
    """Return the parts of the peak that is predicted for a run; none without a prediction."""
    estimate = predicted(run.record)
    return part_bytes(estimate.at_peak) if estimate else {}


def _of_paper(run: Run) -> dict[str, float]:
    """Return the states by the ZeRO paper's formula; none for what it does not describe: FSDP2, other optimizers."""
    recipe = papers.OF_PRECISION.get(run.precision or "")
    trains_all_with_adam = (
        run.requested.optimizer in (None, FIRST_OPTIMIZER)
        and not run.requested.lora_rank
        and not run.requested.train_only
    )
    if not (recipe and run.parameters and trains_all_with_adam) or run.record.observed.fsdp:
        return {}
    return papers.states_bytes(run.parameters, run.stage or 0, run.ranks or 1, recipe)


def buckets(runs: Runs) -> pd.DataFrame:
    """Return what each stage holds with buckets of DDP's size and with DeepSpeed's, measured or predicted."""
    rows: list[dict] = []
    for place, run, n in _largest(runs):
        arm = run.arm.removesuffix("_default")
        if arm not in ("zero1", "zero2", "zero3"):
            continue
        line = place["line"].replace(run.arm, f"{arm}, {'default' if run.arm != arm else 'small'} buckets")
        rows += stack(place | {"line": line}, "measured", part_bytes(run.components), n)
        default = arms.read(arms.all_paths()[f"{arm}_default"]).deepspeed
        if run.arm == arm and (estimate := predicted(run.record, deepspeed=default)):
            held = part_bytes(estimate.at_peak)
            rows += stack(place | {"line": f"{arm}, default buckets"}, "predicted", held, 0)
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).sort_values(["group", "line"], kind="stable", ignore_index=True)


def _largest(runs: Runs) -> Iterator[tuple[dict, Run, int]]:
    """Yield for each line of each group the run with the highest peak, and the number of runs."""
    known = split_by_ranks(groups([run for run in runs.done if run.components], only=SETTINGS), with_lone=True)
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = max(repeats, key=held_bytes)
            yield {"group": group, "line": line} | _about(run), run, len(repeats)


def _about(run: Run) -> dict:
    return columns(run, "arm", "ranks", "kind", "parameters", "device")


def held_bytes(run: Run) -> int:
    """Return the bytes of all components at the peak."""
    return sum(run.components.values())


def stack(place: dict, source: str, held: Mapping[str, float], n: int) -> list[dict]:
    """Return the parts of one bar as rows."""
    return [place | {"source": source, "part": part, "bytes": size, "n": n} for part, size in held.items()]


def part_bytes(components: Mapping[str, float]) -> dict[str, float]:
    """Return components summed up into the few parts that a figure shows."""
    name_of = {role: part for part, roles in PARTS.items() for role in roles}
    sizes: dict[str, float] = defaultdict(int)
    for role, size_bytes in components.items():
        sizes[name_of.get(role, "other")] += size_bytes
    return {part: sizes[part] for part in PARTS if part in sizes}


def sentence(rows: pd.DataFrame, most: int = 2) -> str:
    """Return which arms have the lowest and the highest peak, and how good the formulas are.

    It covers the `most` groups that are drawn.
    """
    sentences = [_of_group(mine) for mine in largest_groups(rows, most)]
    errors = _errors(rows)
    if len(errors):
        median = f"{_percent(errors.median())} in the median over {len(errors)} peaks"
        sentences.append(f"The error of the formulas is {median}, and {_percent(errors.max())} at worst.")
    return " ".join(sentences)


def _of_group(mine: pd.DataFrame) -> str:
    measured = mine[mine["source"] == "measured"]
    held = sums(measured, "line", "bytes")
    lowest, highest = extremes(held)
    part = largest(measured[measured["line"] == highest], "bytes")
    if held[lowest] < held[highest]:
        lead = f"{lowest} has the lowest peak ({size(held[lowest])}), {highest} the highest ({size(held[highest])})"
        whose = f" of {highest}'s peak"
    else:
        lead = f"{joined(list(held))} {'holds' if len(held) == 1 else 'hold'} {size(held[lowest])} at the peak"
        whose = ""
    share = part["bytes"] / held[highest]
    where = conditions(mine["group"].iloc[0])
    return f"In {where}, **{lead}**; the largest part{whose} is {part['part']} ({share:.0%})."


def _errors(rows: pd.DataFrame) -> pd.Series:
    """Return the relative errors of the predicted peaks."""
    if rows.empty:
        return pd.Series(dtype=float)
    totals = rows.groupby(["group", "line", "source"])["bytes"].sum().unstack("source")
    if "predicted" not in totals:
        return pd.Series(dtype=float)
    return (totals["predicted"] / totals["measured"] - 1).abs().dropna()


def extremes(values: dict[str, float]) -> tuple[str, str]:
    """Return the names of the smallest and of the largest value, the first of equal ones."""
    return min(values, key=lambda name: values[name]), max(values, key=lambda name: values[name])


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 1e-3 else "less than 0.1%"


def title(rows: pd.DataFrame) -> str:
    """Return what the measured bars say; without any, what the predicted ones say."""
    sources = list(parts(rows, "source"))
    source = next((name for name in sources if name.startswith("measured")), sources[0])
    held = sums(rows[rows["source"] == source], "line", "bytes")
    least, most = extremes(held)
    tail = "" if source.startswith("measured") else f" ({source})"
    if held[least] == held[most]:
        return f"A rank of {least} holds {size(held[least])}{tail}"
    return f"{least} holds the least ({size(held[least])}), {most} the most ({size(held[most])}){tail}"


@style.figure
def figure(rows: pd.DataFrame, per_parameter: bool = False) -> Figure:
    """Peak memory of a rank, by what its tensors are for: measured, predicted and published."""
    scale, unit = bars.scale(rows.groupby(["line", "source"])["bytes"].sum().max())
    lengths = rows["bytes"] / (rows["parameters"] if per_parameter else scale)
    measured = rows[rows["source"].str.startswith("measured")]
    text = f"Measured: the run with the highest peak, {style.counted(measured)}." if len(measured) else "Not measured."
    text += " Pale: predicted or published." if len(measured) < len(rows) else ""
    if rows["source"].str.startswith("ZeRO paper").any():
        text += " ZeRO paper: weights, gradients and optimizer states alone."
    if (measured["kind"] != "real").any():
        text += " Hatched: virtual ranks, or an emulated smaller device."
    if "device" in rows and (rows["device"] == "cpu").any() and rows["arm"].str.contains("_cpu|_nvme").any():
        text += ONE_MEMORY
    words = "bytes per parameter" if per_parameter else unit
    stacks = bars.Stacks(
        part="part",
        colours=style.PARTS,
        solid="measured",
        unit="bytes" if per_parameter else unit,
        label=f"peak memory of a rank ({words})",
        title=title(rows),
        note=text,
    )
    return bars.draw(rows.assign(length=lengths), stacks)


# --- against the number of ranks -----------------------------------------------------------------------------------


def peaks(runs: Runs, ranks: Iterable[int] = RANKS, most: int | None = None) -> pd.DataFrame:
    """Return the peak memory of a rank against the number of ranks: measured, and by formulas.

    `most` limits it to the groups with the most arms, because each prediction takes a part of a second.
    """
    rows = []
    known = [run for run in runs.done if run.tracked_bytes and run.kind != "capped"]
    by_arms = sorted(groups(known, only=SETTINGS).items(), key=lambda item: -len({run.arm for run in item[1]}))
    for group, members in by_arms[:most]:
        for repeats in by(members, "arm", "ranks", "kind").values():
            largest = {"source": "seen", "bytes": max(run.tracked_bytes for run in repeats), "n": len(repeats)}
            rows.append({"group": group} | columns(repeats[0], "arm", "ranks", "kind") | largest)
        for (arm,), mine in by([run for run in members if run.ranks and run.ranks > 1], "arm").items():
            estimates = {count: predicted(mine[0].record, ranks=count) for count in ranks}
            about = {"group": group, "arm": arm, "kind": "predicted", "source": "predicted", "n": 0}
            rows += [about | {"ranks": count, "bytes": ours.peak_bytes} for count, ours in estimates.items() if ours]
    return pd.DataFrame(rows)


def title_of_peaks(rows: pd.DataFrame) -> str:
    last = rows[(rows["ranks"] == rows["ranks"].max()) & (rows["source"] == "predicted")]
    held = sums(last, "arm", "bytes")
    if len(held) < 2:
        return "Peak memory of a rank as ranks are added"
    least, most = extremes(held)
    ranks = rows["ranks"].max()
    return f"On {ranks} ranks, {least} is predicted to hold {size(held[least])}, {most} {size(held[most])}"


@style.figure
def figure_of_peaks(rows: pd.DataFrame) -> Figure:
    """Peak memory of a rank against the number of ranks: formulas as lines, measurements as points."""
    drawing, (ax,) = style.panels([3.5])
    scale, unit = bars.scale(rows["bytes"].max())
    order = style.ordered(rows["arm"])
    seen = rows[rows["source"] == "seen"]
    ends = {}
    for arm, mine in parts(rows[rows["source"] == "predicted"], "arm").items():
        sizes = list(mine["bytes"] / scale)
        number = order.index(arm)
        dashes = (5 * number, (9, 6)) if number else "-"
        (line,) = ax.plot(mine["ranks"], sizes, color=colour(arm), linestyle=dashes)
        style.tell(line, arm, f"{arm}, predicted: {sizes[0]:.3g} to {sizes[-1]:.3g} {unit}")
        ends[arm] = sizes[-1]
    for row in each(seen):
        offset = 1 + APART * (order.index(row.arm) / max(1, len(order) - 1) - 0.5)
        style.point(ax, row.ranks * offset, row, row.bytes / scale, zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="number of ranks", ylabel=f"peak memory of a rank ({unit})")
    ax.set_xticks([2**power for power in range(0, 11, 2)], [str(2**power) for power in range(0, 11, 2)])
    ax.xaxis.set_minor_formatter(NullFormatter())
    style.plain(ax.yaxis)
    style.name_ends(ax, ends)
    style.headed(ax, title_of_peaks(rows), rows["group"].iloc[0])
    marks = {"predicted": {"color": FAINT}, "measured": {"color": FAINT, "marker": "o", "linestyle": ""}}
    if (seen["kind"] == "virtual").any():
        marks["virtual rank"] = OPEN
    text = "Points of one number of ranks are drawn side by side. Lines: from formulas and the arm's config alone."
    without_line = rows[~rows["arm"].isin(list(ends))]["arm"]
    note = f"Points: the largest measured peak, {style.counted(seen)}. {text}"
    return style.finished(drawing, style.keys(without_line, marks), note)


# --- what changes the 16 bytes -------------------------------------------------------------------------------------


def of_optimizers(runs: Runs) -> Runs:
    """Return the runs of the protocol for which the table of states was made."""
    return replace(runs, runs=tuple(run for run in runs if run.record.cell.protocol == "optimizers"))


def states(runs: Runs) -> pd.DataFrame:
    """Return the bytes of each component per parameter, as claimed, predicted and measured.

    On the first rank between two steps. Claims about gradients are left out: after a step, stages 1 and 2 and FSDP2
    hold none, and DDP's buckets all.
    """
    rows = []
    for repeats in _alike(run for run in runs.done if run.components and run.parameters):
        run = repeats[0]
        held = run.record.memory.components.per_rank[0].after_step
        theory = predicted(run.record)
        of_papers = claimed(run)
        parameters = run.parameters or math.nan
        for component in COMPONENTS:
            numbers = {"claimed": of_papers.get(component)}
            numbers["predicted"] = theory.after_step.get(component, 0) / parameters if theory else None
            numbers["measured"] = held.get(component, 0) / parameters
            if any(numbers.values()):
                rows.append(_place(run) | {"component": component} | numbers | {"n": len(repeats)})
    return pd.DataFrame(rows)


def claimed(run: Run) -> dict[str, float]:
    """Return what papers count per parameter: no states for frozen weights, a share of what a stage divides.

    They count a master copy of 16-bit weights alone, and nothing that an engine keeps beside the moments.
    """
    recipe = papers.recipe_of(run.precision or "fp32", run.requested.optimizer or FIRST_OPTIMIZER)
    weights, _, whole_states = papers.RECIPES[recipe]
    master = 4 if run.precision == "bf16_cast" else 0
    observed = run.record.observed
    stage = 3 if observed.fsdp else observed.stage or 0
    divided_by = run.ranks or 1
    share = 1.0
    if observed.trained_parameters and run.parameters:
        share = observed.trained_parameters / run.parameters
    share /= divided_by if stage else 1
    whole = {"weights": weights / (divided_by if stage == 3 else 1), "master": master * share}
    return whole | {"moments": (whole_states - master) * share, "staging": 0}


def what_changes(run: Run) -> str:
    """Return the optimizer of a run, and which part of the model trains."""
    part = f", only {run.requested.train_only}" if run.requested.train_only else ""
    part = f", LoRA of rank {run.requested.lora_rank}" if run.requested.lora_rank else part
    return f"{run.requested.optimizer or FIRST_OPTIMIZER}{part}"


def _place(run: Run) -> dict:
    return {"what": what_changes(run)} | columns(run, "precision", "arm", "ranks", "kind")


def _alike(runs: Iterable[Run]) -> list[list[Run]]:
    """Return runs of equal settings, in the order of the table."""
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        members.setdefault((*_place(run).values(), run.model), []).append(run)
    return [members[key] for key in sorted(members, key=str)]
