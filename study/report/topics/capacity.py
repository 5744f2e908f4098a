"""How far each arm goes under a memory cap."""

import contextlib

from matplotlib.figure import Figure

from study.errors import Stop
from study.io.words import joined
from study.predictor.architecture import named, parameters
from study.records.groups import by, groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import SETTINGS
from study.report.style import CARD, INK, colour, conditions, ordered
from study.spec.shapes import shape_of


def table(runs: Runs) -> list[dict]:
    """For each arm under a memory cap: the largest model or batch that ran, and the smallest that ran out of memory."""
    rows = []
    capped = [run for run in runs if run.memory_cap_gib and run.status in ("done", "oom", "host_oom")]
    for what in ("model", "micro_batch"):
        alike = [name for name in ("memory_cap_gib", *SETTINGS) if name not in (what, "attention")]
        for group, members in groups(capped, only=alike).items():
            sizes = {run.value(what): _size(run, what, members) for run in members}
            sizes = {value: size for value, size in sizes.items() if size}
            if len(sizes) < 2:
                continue
            for line, mine in lines([run for run in members if run.value(what) in sizes]).items():
                largest = max((run.value(what) for run in mine if run.done), key=sizes.get, default=None)
                smallest = min((run.value(what) for run in mine if not run.done), key=sizes.get, default=None)
                place = {"group": group, "line": line, "arm": mine[0].arm, "what": what}
                place |= {"cap GiB": mine[0].memory_cap_gib, "largest": largest, "size": sizes.get(largest)}
                rows.append(place | {"failed": smallest, "failed size": sizes.get(smallest), "n": len(mine)})
    return rows


def _size(run: Run, what: str, members: list[Run]) -> float | None:
    """By what tried values are ordered: rows per pass by their number, models by their parameters."""
    if what == "micro_batch":
        return run.micro_batch
    observed = [member.parameters for member in members if member.model == run.model and member.parameters]
    with contextlib.suppress(Stop):  # no built-in shape has this name
        return observed[0] if observed else parameters(named(shape_of(run.model)))


def sentence(rows: list[dict]) -> str:
    """From `capacity.table`: the largest that fits, arm by arm."""
    items = []
    for row in rows:
        unit = "" if row["what"] == "model" else " rows per pass"
        text = "nothing that was tried fits"
        if row["largest"] is not None:
            text = f"the largest that fits is {row['largest']}{unit}"
        if row["failed"] is not None:
            text += f", and the smallest that runs out of memory is {row['failed']}{unit}"
        items.append(f"- {conditions(row['group'])}, {row['arm']}: {text}")
    return "\n".join(items)


def title(rows: list[dict]) -> str:
    survived = [row for row in rows if row["size"]]
    if not survived:
        return "Nothing that was tried fits under the cap"
    best = max(survived, key=lambda row: row["size"])
    alike = ordered(row["arm"] for row in survived if row["size"] == best["size"])
    unit = "" if best["what"] == "model" else " rows per pass"
    return f"The largest that fits is {best['largest']}{unit}, under {joined(alike)}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """The largest model or batch that each arm trains under a memory cap, and the smallest that runs out of memory."""
    searches = by(rows, "group", "what")
    drawing, axes = style.panels([0.95 + 0.36 * len(mine) for mine in searches.values()])
    for ax, ((group, what), mine) in zip(axes, searches.items(), strict=True):
        for place, row in enumerate(mine):
            look = {"color": colour(row["arm"])}
            if what == "model" and row["size"]:  # a bar on a logarithmic axis would begin anywhere
                (mark,) = ax.plot(row["size"], place, "o", markersize=9, markerfacecolor=CARD, **look)
            else:
                (mark,) = ax.barh(place, row["size"] or 0, 0.6, hatch="////", edgecolor=CARD, **look)
            style.tell(mark, row["arm"], f"{row['arm']}: {row['largest']} fits, {row.get('failed')} does not")
            if row["failed size"]:
                ax.plot(row["failed size"], place, "x", color=INK, markersize=7, markeredgewidth=1.6)
        names = [f"{row['arm']}: {row['largest'] if row['largest'] is not None else 'none'}" for row in mine]
        ax.set_ylim(-0.5, len(mine) - 0.5)
        style.name_bars(ax, names)
        if what == "model":
            ax.set_xscale("log")
            style.plain(ax.xaxis)
            ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        ax.set_xlabel("million parameters" if what == "model" else "rows per pass")
        style.headed(ax, title(mine), group)
    text = "Bar or ring: the largest that fits. Cross: the smallest that runs out of memory. One search for each arm."
    return style.finished(drawing, [], f"{text} The smaller device is emulated.")
