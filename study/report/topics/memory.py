"""Memory: what a rank holds at its peak, part by part, and on how many ranks; and what changes the 16 bytes."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from study.core import arms
from study.core.numbers import size
from study.predict.front import papers
from study.records import metrics
from study.records.groups import by, groups, lines
from study.records.runs import FIRST_OPTIMIZER, Run, Runs
from study.report import style
from study.report.grouping import SETTINGS, columns, each, largest, largest_groups, parts, split_by_ranks, sums
from study.report.of_record import predicted
from study.report.style import FAINT, OPEN, colour, conditions

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
NEAR = 0.01  # a prediction that is off by less is called near
APART = 0.3  # of a point's ranks, from the first arm to the last: equal points would hide each other
OFFLOADED = "These arms offload. This machine has no GPU: its host and its GPU memory are one, and a bar has both."
RANKS = tuple(2**power for power in range(1, 11))


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank holds at its peak, by part: measured, predicted, and states by the ZeRO paper."""
    rows = []
    for place, run, n in _largest(runs):
        rows += stack(place, "measured", part_bytes(metrics.components(run.record)), n)
        rows += stack(place, "predicted", predicted_parts(run), n)
        rows += stack(place, PAPER, _of_paper(run), n)
    return pd.DataFrame(rows)


@functools.cache  # notebooks of a report share their runs
def predicted_parts(run: Run) -> dict[str, float]:
    """Return the parts of the peak that is predicted for a run; none without a prediction."""
    estimate = predicted(run.record)
    return part_bytes(estimate.at_peak) if estimate else {}


def _of_paper(run: Run) -> dict[str, float]:
    """Return the states by the ZeRO paper's formula; none for what it does not describe: FSDP2, other optimizers."""
    precision = run.record.requested.precision
    trains_all_with_adam = (
        run.record.requested.optimizer in (None, FIRST_OPTIMIZER)
        and not run.record.requested.lora_rank
        and not run.record.requested.train_only
    )
    seen = run.record.observed
    if precision in (None, "fp8") or not (seen.parameters and trains_all_with_adam) or seen.fsdp:
        return {}
    return papers.states_bytes(seen.parameters, seen.stage or 0, seen.ranks or 1, precision)


def buckets(runs: Runs) -> pd.DataFrame:
    """Return what each stage holds with buckets of DDP's size and with DeepSpeed's, measured or predicted."""
    rows: list[dict] = []
    defaults = {arm: arms.read(arms.all_paths()[f"{arm}_default"]).deepspeed for arm in ("zero1", "zero2", "zero3")}
    for place, run, n in _largest(runs):
        arm = run.record.arm.removesuffix("_default")
        if arm not in defaults:
            continue
        line = place["line"].replace(
            run.record.arm, f"{arm}, {'default' if run.record.arm != arm else 'small'} buckets"
        )
        rows += stack(place | {"line": line}, "measured", part_bytes(metrics.components(run.record)), n)
        if run.record.arm == arm and (estimate := predicted(run.record, deepspeed=defaults[arm])):
            bytes_by_part = part_bytes(estimate.at_peak)
            rows += stack(place | {"line": f"{arm}, default buckets"}, "predicted", bytes_by_part, 0)
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).sort_values(["group", "line"], kind="stable", ignore_index=True)


def _largest(runs: Runs) -> Iterator[tuple[dict, Run, int]]:
    """Yield for each line of each group the run with the highest peak, and the number of runs."""
    known = split_by_ranks(
        groups([run for run in runs.done if metrics.components(run.record)], only=SETTINGS), with_lone=True
    )
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = max(repeats, key=held_bytes)
            about = columns(run, "arm", "ranks", "kind", "parameters")
            about["panel"] = OFFLOADED if has_one_memory(run) else ""
            yield {"group": group, "line": line} | about, run, len(repeats)


def has_one_memory(run: Run) -> bool:
    """Return whether an arm offloads, and the machine has no GPU: what it holds on a GPU cannot be told apart."""
    observed = run.record.observed
    places = {observed.offload_optimizer, observed.offload_param} - {None, "none"}
    return run.record.observed.device == "cpu" and bool(places or (observed.fsdp and observed.fsdp["offloads"]))


def held_bytes(run: Run) -> int:
    """Return the bytes of all components at the peak."""
    return sum(metrics.components(run.record).values())


def stack(place: dict, source: str, bytes_by_part: Mapping[str, float], n: int) -> list[dict]:
    """Return the parts of one bar as rows."""
    return [place | {"source": source, "part": part, "bytes": size, "n": n} for part, size in bytes_by_part.items()]


def part_bytes(components: Mapping[str, float]) -> dict[str, float]:
    """Return components summed up into the few parts that a figure shows."""
    name_of = {role: part for part, roles in PARTS.items() for role in roles}
    sizes: dict[str, float] = defaultdict(int)
    for role, size_bytes in components.items():
        sizes[name_of.get(role, "other")] += size_bytes
    return {part: sizes[part] for part in PARTS if part in sizes}


def sentence(rows: pd.DataFrame, most: int = 2) -> str:
    """Return the least and the largest peak of the `most` groups that are drawn, and how good the formulas are.

    Arms whose GPU memory is not known are left out.
    """
    sentences = []
    for mine in largest_groups(rows, most):
        measured = mine[(mine["source"] == "measured") & (mine["panel"] == "")]
        sizes = sums(measured, "line", "bytes")
        if len(sizes) < 2:
            continue
        least, *_, most_of_all = sorted(sizes, key=lambda line: sizes[line])
        part = largest(measured[measured["line"] == most_of_all], "bytes")
        baseline = f"; ddp holds {size(sizes['ddp'])}" if "ddp" in sizes.keys() - {least, most_of_all} else ""
        text = f"In {conditions(mine['group'].iloc[0])}, **{least} holds the least ({size(sizes[least])}) and"
        text += f" {most_of_all} the most ({size(sizes[most_of_all])})**{baseline}. The largest part of {most_of_all}'s"
        sentences.append(f"{text} peak is {part['part']} ({part['bytes'] / sizes[most_of_all]:.0%}).")
    totals = rows.groupby(["group", "line", "source"])["bytes"].sum().unstack("source") if len(rows) else rows
    if "predicted" in totals:
        errors = (totals["predicted"] / totals["measured"] - 1).abs().dropna()
        near = (errors < NEAR).sum()
        text = f"Of {len(errors)} peaks, the formulas predict {near} within {NEAR:.0%}"
        if near < len(errors):
            off = largest(errors.rename("error").reset_index(), "error")
            text += f"; furthest off is {off['line']} in {conditions(off['group'])}, by {100 * off['error']:.2g} %"
        sentences.append(f"{text}.")
    return " ".join(sentences)


@style.figure
def figure(rows: pd.DataFrame, per_parameter: bool = False) -> Figure:
    """Peak memory of a rank, by what its tensors are for: measured, predicted and published."""
    measured = rows[rows["source"].str.startswith("measured")]
    notes = {
        f"Measured: the run with the highest peak, {style.counted(measured)}.": len(measured),
        "Not measured.": not len(measured),
        "Pale: predicted or published.": 0 < len(measured) < len(rows),
        f"{PAPER}: weights, gradients and optimizer states alone.": (rows["source"] == PAPER).any(),
        "Hatched: virtual ranks, or an emulated smaller device.": (measured["kind"] != "real").any(),
    }
    drawing = style.stacks(
        rows.assign(length=rows["bytes"] / (rows["parameters"] if per_parameter else 1)),
        part="part",
        colours=style.PARTS,
        solid="measured",
        words=(lambda number: f"{number:.3g}") if per_parameter else size,
        note=" ".join(text for text, is_shown in notes.items() if is_shown),
    )
    drawing.axes[-1].set_xlabel(f"peak memory of a rank{' (bytes per parameter)' * per_parameter}", loc="right")
    return drawing


# --- against the number of ranks -----------------------------------------------------------------------------------


def peaks(runs: Runs, ranks: Iterable[int] = RANKS, most: int | None = None) -> pd.DataFrame:
    """Return the peak memory of a rank against the number of ranks: measured, and by formulas.

    `most` limits it to the groups with the most arms, because each prediction takes a part of a second.
    """
    rows = []
    known = [run for run in runs.done if metrics.tracked_peak_bytes(run.record) and run.kind != "capped"]
    by_arms = sorted(groups(known, only=SETTINGS).items(), key=lambda item: -len({run.record.arm for run in item[1]}))
    for group, members in by_arms[:most]:
        for repeats in by(members, "arm", "ranks", "kind").values():
            seen = {
                "source": "seen",
                "bytes": max(metrics.tracked_peak_bytes(run.record) or 0 for run in repeats),
                "n": len(repeats),
            }
            rows.append({"group": group} | columns(repeats[0], "arm", "ranks", "kind") | seen)
        for (arm,), mine in by(
            [run for run in members if run.record.observed.ranks and run.record.observed.ranks > 1], "arm"
        ).items():
            estimates = {count: predicted(mine[0].record, ranks=count) for count in ranks}
            about = {"group": group, "arm": arm, "kind": "predicted", "source": "predicted", "n": 0}
            rows += [about | {"ranks": count, "bytes": ours.peak_bytes} for count, ours in estimates.items() if ours]
    return pd.DataFrame(rows)


def sentence_of_peaks(rows: pd.DataFrame) -> str:
    """Return what each arm is predicted to hold on the most ranks, in the group with the most arms."""
    if rows.empty:
        return ""
    mine = largest_groups(rows, 1)[0]
    last = mine[(mine["ranks"] == mine["ranks"].max()) & (mine["source"] == "predicted")]
    amounts = ", ".join(f"{row.arm} {size(row.bytes)}" for row in each(last))
    return f"On {mine['ranks'].max()} ranks, a rank is predicted to hold: {amounts}."


@style.figure
def figure_of_peaks(rows: pd.DataFrame) -> Figure:
    """Peak memory of a rank against the number of ranks: formulas as lines, measurements as points."""
    drawing, (ax,) = style.panels([3.5])
    order = style.ordered(rows["arm"])
    seen = rows[rows["source"] == "seen"]
    for arm, mine in parts(rows[rows["source"] == "predicted"], "arm").items():
        number = order.index(arm)
        dashes = (5 * number, (9, 6)) if number else "-"
        ax.plot(mine["ranks"], mine["bytes"], color=colour(arm), linestyle=dashes)
    for row in each(seen):
        offset = 1 + APART * (order.index(row.arm) / max(1, len(order) - 1) - 0.5)
        style.point(ax, row.ranks * offset, row, row.bytes, zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="number of ranks", ylabel="peak memory of a rank")
    ax.set_xticks([2**power for power in range(0, 11, 2)], [str(2**power) for power in range(0, 11, 2)])
    ax.xaxis.set_minor_formatter(NullFormatter())
    style.plain(ax.yaxis)
    ax.yaxis.set_major_formatter(lambda value, _: size(value))
    style.headed(ax, rows["group"].iloc[0])
    marks: dict[str, style.Look] = {
        "predicted": {"color": FAINT},
        "measured": {"color": FAINT, "marker": "o", "linestyle": ""},
    }
    if (seen["kind"] == "virtual").any():
        marks["virtual rank"] = OPEN
    text = "Points of one number of ranks are drawn side by side. Lines: from formulas and the arm's config alone."
    note = f"Points: the largest measured peak, {style.counted(seen)}. {text}"
    return style.finished(drawing, style.keys(order, marks), note)


# --- what changes the 16 bytes -------------------------------------------------------------------------------------


def states(runs: Runs) -> pd.DataFrame:
    """Return the bytes of each component per parameter, as claimed, predicted and measured.

    On the first rank between two steps. Claims about gradients are left out: after a step, stages 1 and 2 and FSDP2
    hold none, and DDP's buckets all.
    """
    members: dict[tuple, list[Run]] = {}
    for run in (run for run in runs.done if metrics.components(run.record) and run.record.observed.parameters):
        members.setdefault((*_place(run).values(), run.record.requested.model), []).append(run)
    rows = []
    for place in sorted(members, key=str):
        run = members[place][0]
        after_step = run.record.memory.components.per_rank[0].after_step
        theory = predicted(run.record)
        of_papers = claimed(run)
        parameters = run.record.observed.parameters or 1
        for component in COMPONENTS:
            numbers = {"claimed": of_papers.get(component)}
            numbers["predicted"] = theory.after_step.get(component, 0) / parameters if theory else None
            numbers["measured"] = after_step.get(component, 0) / parameters
            if any(numbers.values()):
                rows.append(_place(run) | {"component": component} | numbers | {"n": len(members[place])})
    return pd.DataFrame(rows)


def claimed(run: Run) -> dict[str, float]:
    """Return what papers count per parameter: no states for frozen weights, a share of what a stage divides.

    They count a master copy of 16-bit weights alone, and nothing that an engine keeps beside the moments.
    """
    requested = run.record.requested
    optimizer = requested.optimizer or FIRST_OPTIMIZER
    weights, _, whole_states = papers.states_of_a_parameter(requested.precision or "fp32", optimizer)
    master = 4 if requested.precision == "bf16_cast" else 0
    observed = run.record.observed
    stage = 3 if observed.fsdp else observed.stage or 0
    divided_by = run.record.observed.ranks or 1
    trained = 1.0
    if observed.trained_parameters and run.record.observed.parameters:
        trained = observed.trained_parameters / run.record.observed.parameters
    share = trained / (divided_by if stage else 1)
    whole = {"weights": weights / (divided_by if stage == 3 else 1), "master": master * share}
    return whole | {"moments": (whole_states - master) * share, "staging": 0}


def what_changes(run: Run) -> str:
    """Return the optimizer of a run, and which part of the model trains."""
    part = f", only {run.record.requested.train_only}" if run.record.requested.train_only else ""
    part = f", LoRA of rank {run.record.requested.lora_rank}" if run.record.requested.lora_rank else part
    return f"{run.record.requested.optimizer or FIRST_OPTIMIZER}{part}"


def _place(run: Run) -> dict:
    return {"what": what_changes(run)} | columns(run, "precision", "arm", "ranks", "kind")
