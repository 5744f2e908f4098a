"""Memory: what a rank holds at its peak, part by part, measured and predicted."""

from collections import Counter
from collections.abc import Iterator

from matplotlib.figure import Figure

from study.bench.prediction import predicted
from study.io.numbers import size
from study.io.words import joined
from study.predictor import papers
from study.records import stats
from study.records.groups import by, groups, lines
from study.records.runs import FIRST_OPTIMIZER, Run, Runs
from study.report import stacked, style
from study.report.grouping import SETTINGS, columns, largest_groups, split_by_ranks
from study.report.style import conditions
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


def table(runs: Runs) -> list[dict]:
    """What a rank holds at its peak, by part: measured, predicted, and the model states by the ZeRO paper's formula."""
    rows = []
    for place, run, n in _largest(runs):
        ours = predicted(run.record)
        rows += stack(place, "measured", parts(run.components), n)
        rows += stack(place, "predicted", parts(ours.at_peak) if ours else {}, n)
        rows += stack(place, "ZeRO paper, states", _of_paper(run), n)
    return rows


def _of_paper(run: Run) -> dict[str, float]:
    """The model states by the ZeRO paper's formula; none for what it does not describe: FSDP2, other optimizers."""
    recipe = papers.OF_PRECISION.get(run.precision)
    trains_all_with_adam = run.optimizer in (None, FIRST_OPTIMIZER) and not run.lora_rank and not run.train_only
    if not (recipe and run.parameters and trains_all_with_adam) or run.record.observed.fsdp:
        return {}
    return papers.states_bytes(run.parameters, run.stage or 0, run.ranks, recipe)


def buckets(runs: Runs) -> list[dict]:
    """What each stage holds with buckets of DDP's size and with DeepSpeed's default ones, measured or predicted."""
    rows = []
    for place, run, n in _largest(runs):
        arm = run.arm.removesuffix("_default")
        if arm not in ("zero1", "zero2", "zero3"):
            continue
        line = place["line"].replace(run.arm, f"{arm}, {'default' if run.arm != arm else 'small'} buckets")
        rows += stack(place | {"line": line}, "measured", parts(run.components), n)
        default = arms.read(arms.all_paths()[f"{arm}_default"]).deepspeed
        if run.arm == arm and (ours := predicted(run.record, deepspeed=default)):
            rows += stack(place | {"line": f"{arm}, default buckets"}, "predicted", parts(ours.at_peak), 0)
    return sorted(rows, key=lambda row: (row["group"], row["line"]))


def _largest(runs: Runs) -> Iterator[tuple[dict, Run, int]]:
    """For each line of each group: the run with the highest peak, and the number of runs."""
    known = split_by_ranks(groups([run for run in runs.done if run.components], only=SETTINGS), with_lone=True)
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = max(repeats, key=held_bytes)
            yield {"group": group, "line": line} | columns(run, "arm", "ranks", "kind", "parameters"), run, len(repeats)


def held_bytes(run: Run) -> int:
    return sum(run.components.values())


def stack(place: dict, source: str, held: dict[str, float], n: int) -> list[dict]:
    """The parts of one bar."""
    return [place | {"source": source, "part": part, "bytes": size, "n": n} for part, size in held.items()]


def parts(components: dict[str, float]) -> dict[str, float]:
    """Components summed up into the few parts that a figure shows."""
    name_of, sizes = {role: part for part, roles in PARTS.items() for role in roles}, Counter()
    for role, size_bytes in components.items():
        sizes[name_of.get(role, "other")] += size_bytes
    return {part: sizes[part] for part in PARTS if part in sizes}


def sentence(rows: list[dict], most: int = 2) -> str:
    """From `memory.table`: which arms have the lowest and the highest peak, and how good the formulas are.

    It covers the `most` groups that are drawn.
    """
    totals = {key: sum(row["bytes"] for row in mine) for key, mine in by(rows, "group", "line", "source").items()}
    sentences = []
    for mine in largest_groups(rows, most):
        group = mine[0]["group"]
        held = {line: totals[group, line, "measured"] for (line,) in by(mine, "line")}
        least, largest = min(held, key=held.get), max(held, key=held.get)
        measured = [row for row in mine if (row["line"], row["source"]) == (largest, "measured")]
        part = max(measured, key=lambda row: row["bytes"])
        if held[least] < held[largest]:
            lead = f"{least} has the lowest peak ({size(held[least])}), {largest} the highest ({size(held[largest])})"
            of = f" of {largest}'s peak"
        else:
            lead = f"{joined(list(held))} {'holds' if len(held) == 1 else 'hold'} {size(held[least])} at the peak"
            of = ""
        share = part["bytes"] / held[largest]
        sentences.append(f"In {conditions(group)}, **{lead}**; the largest part{of} is {part['part']} ({share:.0%}).")
    formulas = {key[:2]: total for key, total in totals.items() if key[2] == "predicted"}
    errors = [abs(total / totals[*place, "measured"] - 1) for place, total in formulas.items()]
    if errors:
        median = f"{_percent(stats.median(errors))} in the median over {len(errors)} peaks"
        sentences.append(f"The error of the formulas is {median}, and {_percent(max(errors))} at worst.")
    return " ".join(sentences)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 1e-3 else "less than 0.1%"


def title(rows: list[dict]) -> str:
    """About the measured bars; without any, about the predicted ones."""
    of_source = by(rows, "source")
    source = next((name for (name,) in of_source if name.startswith("measured")), next(iter(of_source))[0])
    held = {line: sum(row["bytes"] for row in mine) for (line,), mine in by(of_source[source,], "line").items()}
    least, most = min(held, key=held.get), max(held, key=held.get)
    tail = "" if source.startswith("measured") else f" ({source})"
    if held[least] == held[most]:
        return f"A rank of {least} holds {size(held[least])}{tail}"
    return f"{least} holds the least ({size(held[least])}), {most} the most ({size(held[most])}){tail}"


@style.figure
def figure(rows: list[dict], per_parameter: bool = False) -> Figure:
    """Peak memory of a rank, by what its tensors are for: measured, predicted and published."""
    scale, unit = stacked.scale(max(sum(row["bytes"] for row in mine) for mine in by(rows, "line", "source").values()))
    lengths = [row["bytes"] / (row["parameters"] if per_parameter else scale) for row in rows]
    of = f"peak memory of a rank ({'bytes per parameter' if per_parameter else unit})"
    measured = [row for row in rows if row["source"].startswith("measured")]
    text = f"Measured: the run with the highest peak, {style.counted(measured)}." if measured else "Not measured."
    text += " Pale: predicted or published." if len(measured) < len(rows) else ""
    if any(row["source"].startswith("ZeRO paper") for row in rows):
        text += " ZeRO paper: weights, gradients and optimizer states alone."
    if any(row["kind"] != "real" for row in measured):
        text += " Hatched: virtual ranks, or an emulated smaller device."
    lead, shown = title(rows), "bytes" if per_parameter else unit
    return stacked.bars(rows, lengths, "part", style.PARTS, "measured", of, text, lead, shown)
