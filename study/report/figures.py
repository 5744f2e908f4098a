"""One function per figure: a table in, a figure out. What all figures share is in `style`."""

from collections import Counter
from textwrap import shorten

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from study.claims.ledger import counted
from study.claims.model import OWN
from study.claims.verdict import SUPPORTED
from study.records import stats
from study.records.groups import by
from study.report import style, timeline, titles
from study.report.published import SMALLEST_SPEEDUP_002, WORTHWHILE_FROM_BYTES_002
from study.report.style import CARD, EXACT, FAINT, INK, colour, marker
from study.text.numbers import nats

DASH = 4  # points: of lines that coincide each is seen in turn
NEAR = 0.02  # of the range that is drawn: lines that are not further apart coincide
APART = 0.3  # of a point's ranks, from the first arm to the last: equal points would hide each other
SHADE = "#f3d3ad"  # a light orange, behind the points
OPEN_POINT = {"linestyle": "", "markerfacecolor": CARD}
OPEN = {"color": FAINT, "marker": "o", "linestyle": "", "markerfacecolor": CARD}  # virtual or emulated, in a legend


@style.figure
def losses(rows: list[dict]) -> Figure:
    """The loss of every arm at each step; and of each arm how far it is from the baseline, a point for each step."""
    compared, entries = [row for row in rows if row["difference"] is not None], []
    of_line = by(rows, "line", "arm")
    others = {line: mine for (line,), mine in by(compared, "line").items()}
    drawing, axes = style.panels([2.3, 0.75 + 0.22 * len(others)] if compared else [2.5])
    usual = Counter(row["rows per step"] for row in rows).most_common(1)[0][0]
    dashes = {}
    for together in _coinciding({line: mine for (line, _), mine in of_line.items()}):
        gap = DASH * (len(together) - 1)
        dashes |= {line: (DASH * place, (DASH, gap)) if gap else "-" for place, line in enumerate(together)}
    for (line, arm), mine in of_line.items():
        _band(axes[0], mine, "loss", colour(arm), linestyle=dashes[line])
        entries += style.keys(mine)
        unusual = mine[0]["rows per step"] != usual
        entries[-1].set_label(f"{line}, {mine[0]['rows per step']} rows/step" if unusual else line)
    style.headed(axes[0], titles.losses(rows), rows[0]["group"])
    axes[0].set(xlabel="optimizer step", ylabel="training loss (nats)")
    if compared:
        _distances(axes[1], others)
    n = style.counted([{"n": len({row["run"] for row in mine})} for mine in by(rows, "line").values()])
    text = f"Lines: means over runs, {n}. Bands: from the smallest to the largest."
    text += " Lines that coincide take turns in dashes."
    text += " Below: the largest distance of a run at each step." if compared else ""
    columns = 3 if max(len(entry.get_label()) for entry in entries) < 16 else 2
    return style.finished(drawing, entries, text, columns)


def _coinciding(rows_of: dict[str, list[dict]]) -> list[list[str]]:
    """Lines that look like one: at each step their means are apart by less than a fiftieth of what is drawn."""
    means = {
        line: [np.mean([row["loss"] for row in each]) for each in by(mine, "step").values()]
        for line, mine in rows_of.items()
    }
    least = NEAR * (max(map(max, means.values())) - min(map(min, means.values())))
    together: list[list[str]] = []
    for line, curve in means.items():
        for group in together:
            first = means[group[0]]
            if len(first) == len(curve) and np.max(np.abs(np.subtract(first, curve))) <= least:
                group.append(line)
                break
        else:
            together.append([line])
    return together


def _distances(ax: Axes, rows_of: dict[str, list[dict]]) -> None:
    """A row for each arm, a point for each step, on a logarithmic axis that has a place for zero."""
    for place, (line, mine) in enumerate(rows_of.items()):
        arm, steps = mine[0]["arm"], by(mine, "step").values()
        largest = [max(EXACT, *(row["difference"] for row in of_step)) for of_step in steps]
        look = {"color": colour(arm), "markersize": 4, "alpha": 0.6, "linestyle": ""}
        (points,) = ax.plot(largest, [place] * len(largest), marker(arm), **look)
        most = max(largest)
        style.tell(points, arm, f"{line}: at most {nats(most if most > EXACT else 0.0)}, in {len(largest)} steps")
    against = ", ".join(sorted({row["against"] for mine in rows_of.values() for row in mine} - {None}))
    style.name_bars(ax, rows_of)
    ax.set(xscale="log", xlabel=f"distance from {against} at each step (nats)", xlim=(EXACT / 1.6, None))
    ax.margins(y=0.08)
    style.from_zero(ax.xaxis)


def _band(ax: Axes, rows: list[dict], name: str, tone: str, least: float = -np.inf, **look) -> None:
    """The mean over runs at each step as a line, from the smallest to the largest value as a band."""
    values = {step: [row[name] for row in mine] for (step,), mine in by(rows, "step").items()}
    ends_and_mean = np.array([(min(each), np.mean(each), max(each)) for each in values.values()]).T
    low, mean, high = np.maximum(ends_and_mean, least)
    ax.fill_between(list(values), low, high, color=tone, alpha=0.15, linewidth=0)
    (line,) = ax.plot(list(values), mean, color=tone, **look)
    style.tell(line, rows[0].get("arm", ""), f"{rows[0].get('line', '')}: from {mean[0]:.4g} to {mean[-1]:.4g}")


@style.figure
def script(rows: list[dict]) -> Figure:
    """Document 002's script as printed, with a fresh model, and with DeepSpeed engaged: the losses of its trainings."""
    kinds = by(rows, "script")
    drawing, axes = style.panels([1.6] * len(kinds), sharex=True, sharey=True)
    looks, marks = {1: (INK, "-"), 2: (style.VERMILION, "--"), 3: (style.SKY, ":")}, {}  # trainings are not arms
    for ax, ((kind,), mine) in zip(axes, kinds.items(), strict=True):
        calls = 0
        for (number,), training in by(mine, "training").items():
            tone, dash = looks.get(number, (FAINT, "-"))
            look = {"linestyle": dash, "marker": "o", "markersize": 3.5}
            _band(ax, training, "loss", tone, **look)
            marks[f"{number}: {training[0]['name']}, batch {training[0]['batch']}"] = look | {"color": tone}
            calls += max(row["deepspeed.initialize calls"] for row in training)
        start = next((row["weights from"] for row in mine if row["training"] == 2), "-")
        ax.set_title(f"{kind}: DeepSpeed called {calls} times, training 2 starts from {start}")
        ax.set_ylabel("loss (nats)")
    axes[-1].set_xlabel("optimizer step of each training")
    window, seeds = min(row["step"] for row in rows), len({row["seed"] for row in rows})
    text = f"Means of windows of {window} steps, n = {seeds} seeds. Bands: from the smallest to the largest."
    return style.finished(drawing, style.keys([], marks), text)


@style.figure
def verdicts(rows: list[dict]) -> Figure:
    """How many claims of each document got which verdict, and how often its own numbers agree with each other."""
    documents = by(counted(rows), "document")
    height, most = 0.6 + 0.36 * len(documents), max(map(len, documents.values()))
    drawing, (above, below) = style.panels([height, height], sharex=True)
    for ax, is_own in ((above, False), (below, True)):
        for place, mine in enumerate(documents.values()):
            left, counts = 0, Counter(row["verdict"] for row in mine if (row["basis"] == OWN) == is_own)
            for verdict, tone in style.VERDICTS.items():
                if not (count := counts[verdict]):
                    continue
                ax.barh(place, count, 0.72, left, color=tone, edgecolor=FAINT, linewidth=0.8)
                if count >= 0.03 * most:
                    tone_of_text = "white" if verdict == SUPPORTED else INK  # on each the one with more contrast
                    ax.text(left + count / 2, place, count, va="center", ha="center", color=tone_of_text)
                left += count
        style.name_bars(ax, [document for (document,) in documents])
    above.set_title("Claims about the world")
    below.set_title("The document held against its own numbers")
    below.set_xlabel("claims")
    text = "A contradiction counts once, however many claims it touches. Premises, which are ours, do not count."
    return style.finished(drawing, style.patches(style.VERDICTS), text)


@style.figure
def scores(rows: list[dict]) -> Figure:
    """The error of each memory predictor on each measured peak: a point for each cell, a bar at the median."""
    predictors = {f"{name} ({len(mine)})": mine for (name,), mine in by(rows, "predictor").items()}
    drawing, (ax,) = style.panels([1.2 + 0.55 * len(predictors)])
    _strips(ax, predictors, "error", 0.25, markersize=4.5, alpha=0.8)
    for place, mine in enumerate(predictors.values()):
        median = stats.median([row["error"] for row in mine])
        ax.plot([median] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=2)
    ax.axvline(0, color=FAINT, linewidth=0.8)
    ax.set_xscale("symlog", linthresh=0.01)
    ax.set_xticks([-1, -0.1, -0.01, 0, 0.01, 0.1, 1])
    furthest = 1.6 * max(1, *(abs(row["error"]) for row in rows))  # no point lies on the frame
    ax.set_xlim(-furthest, furthest)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set_xlabel("predicted over measured, minus one (logarithmic beyond 1 %)", loc="right")
    style.headed(ax, titles.scores(rows), "the same measured peaks, predicted")
    text = "Each point is one measured cell; their number is in brackets. The bar is their median."
    text += " A predictor that does not cover an arm has no point for it."
    return style.finished(drawing, style.keys(rows), text, 4)


def _strips(ax: Axes, rows_of: dict[str, list[dict]], value: str, spread: float, **look) -> None:
    """Points in strips below each other, side by side in each."""
    for place, mine in enumerate(rows_of.values()):
        offsets = np.linspace(-spread, spread, len(mine)) if len(mine) > 1 else [0.0]
        for offset, row in zip(offsets, mine, strict=True):
            (mark,) = ax.plot(row[value], place + offset, marker(row["arm"]), color=colour(row["arm"]), **look)
            style.tell(mark, row["arm"], f"{row['arm']}: {row[value]:.3g}")
    ax.set_yticks(range(len(rows_of)), list(rows_of))
    ax.set_ylim(len(rows_of) - 0.5, -0.5)


@style.figure
def machines(rows: list[dict]) -> Figure:
    """Seconds of a step in each environment over those in environment A, cell by cell."""
    compared = [row for row in rows if row["vs A"] is not None and row["environment"] != "A"]
    places = {f"environment {name}": mine for (name,), mine in by(compared, "environment").items()}
    drawing, (ax,) = style.panels([1.0 + 0.5 * len(places)])
    _strips(ax, places, "vs A", 0.15)
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.set(xscale="log", xlabel="s/step over that in environment A, same cell")
    style.plain(ax.xaxis)
    style.headed(ax, titles.machines(compared), "equal cells")
    text = "Each point is one cell. Environments differ in machine, software or commit, and were measured at different"
    return style.finished(drawing, style.keys(compared), f"{text} times: small differences may be noise.")


# --- memory and bytes ----------------------------------------------------------------------------------------------


@style.figure
def memory(rows: list[dict], per_parameter: bool = False) -> Figure:
    """What a rank holds at its peak by part: measured, predicted, published."""
    scale, unit = _unit(max(sum(row["bytes"] for row in mine) for mine in by(rows, "line", "source").values()))
    lengths = [row["bytes"] / (row["parameters"] if per_parameter else scale) for row in rows]
    of = "bytes per parameter, at the peak of a rank" if per_parameter else f"{unit} per rank, at its peak"
    measured = [row for row in rows if row["source"].startswith("measured")]
    text = f"Measured: the run that held most, {style.counted(measured)}." if measured else "Nothing here is measured."
    if any(row["kind"] != "real" for row in measured):
        text += " Hatched: virtual ranks, or an emulated smaller device."
    lead, shown = titles.memory(rows), "bytes" if per_parameter else unit
    return _stacked(rows, lengths, "part", style.PARTS, "measured", of, text, lead, shown)


def _unit(largest_bytes: float) -> tuple[float, str]:
    return (1e9, "GB") if largest_bytes >= 1e9 else (1e6, "MB")


@style.figure
def traffic(rows: list[dict]) -> Figure:
    """Bytes sent in a step over those of one all-reduce of the gradients, by collective: counted and published."""
    lengths, label = [row["times"] for row in rows], "bytes sent in a step, over an all-reduce of the gradients"
    text = "for rings, in which an all-reduce goes round twice. White: the document does not name the collective."
    text = f"Counted: {style.counted(rows)}, {text}"
    lead = titles.traffic(rows)
    return _stacked(rows, lengths, "collective", style.COLLECTIVES, "counted", label, text, lead, "all-reduces")


def _stacked(
    rows: list[dict],
    lengths: list[float],
    part: str,
    colours: dict[str, str],
    solid: str,
    label: str,
    text: str,
    lead: str,
    unit: str,
) -> Figure:
    """Bars made of parts, one for each source, the bars of a line together. Only `solid` sources are opaque."""
    rows = [row | {"length": length} for row, length in zip(rows, lengths, strict=True)]
    lines = by(rows, "line")
    drawing, (ax,) = style.panels([1.1 + 0.21 * len(by(rows, "line", "source")) + 0.12 * len(lines)])
    ticks, at = {}, 0.0
    for (line,), of_line in lines.items():
        for number, ((source,), mine) in enumerate(by(of_line, "source").items()):
            left, is_solid = 0.0, source.startswith(solid)
            look = {"edgecolor": FAINT, "linewidth": 0.6, "alpha": 1 if is_solid else 0.55}
            for row in mine:
                hatch = "////" if row["kind"] != "real" and is_solid else None
                (bar,) = ax.barh(
                    at, row["length"], 0.86, left, color=colours.get(row[part], FAINT), hatch=hatch, **look
                )
                style.tell(bar, row["arm"], f"{line}, {source}, {row[part]}: {row['length']:.3g} {unit}".rstrip())
                left += row["length"]
            ax.annotate(f"{left:.3g}", (left, at), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
            ticks[at] = source if number else f"{line}: {source}"
            at += 1
        at += 0.55
    style.name_bars(ax, ticks.values(), list(ticks))
    ax.margins(x=0.12, y=0.02)
    style.headed(ax, lead, rows[0]["group"])
    ax.set_xlabel(label, loc="right")  # in the middle it could leave the figure, where names of bars are long
    present = {row[part] for row in rows}
    patches = style.patches({name: tone for name, tone in colours.items() if name in present})
    return style.finished(drawing, patches, text, 4)


@style.figure
def peaks(rows: list[dict]) -> Figure:
    """Peak memory of a rank against the number of ranks: formulas as lines, measurements as points."""
    drawing, (ax,) = style.panels([3.5])
    scale, unit = _unit(max(row["bytes"] for row in rows))
    arms, seen = style.ordered(row["arm"] for row in rows), [row for row in rows if row["source"] == "seen"]
    for (arm,), mine in by([row for row in rows if row["source"] == "predicted"], "arm").items():
        sizes, number = [row["bytes"] / scale for row in mine], arms.index(arm)
        dashes = (5 * number, (9, 6)) if number else "-"
        (line,) = ax.plot([row["ranks"] for row in mine], sizes, color=colour(arm), linestyle=dashes)
        style.tell(line, arm, f"{arm}, predicted: {sizes[0]:.3g} to {sizes[-1]:.3g} {unit}")
    for row in seen:
        offset = 1 + APART * (arms.index(row["arm"]) / max(1, len(arms) - 1) - 0.5)
        style.point(ax, row["ranks"] * offset, row | {"size": row["bytes"] / scale}, "size", zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="ranks", ylabel=f"{unit} per rank, at its peak")
    ax.set_xticks([2**i for i in range(0, 11, 2)], [str(2**i) for i in range(0, 11, 2)])
    ax.xaxis.set_minor_formatter(NullFormatter())
    style.plain(ax.yaxis)
    ends = {
        row["arm"]: row["bytes"] / scale for row in rows if row["source"] == "predicted"
    }  # the last is furthest right
    style.name_ends(ax, ends)
    style.headed(ax, titles.peaks(rows), rows[0]["group"])
    marks = {"predicted": {"color": FAINT}, "measured": {"color": FAINT, "marker": "o", "linestyle": ""}}
    if any(row["kind"] == "virtual" for row in seen):
        marks["virtual rank"] = OPEN
    text = "Points at the same number of ranks are drawn side by side. Lines: from formulas and the arm's config alone."
    without_line = [row for row in rows if row["arm"] not in ends]
    note = f"Points: the largest measured peak, {style.counted(seen)}. {text}"
    return style.finished(drawing, style.keys(without_line, marks), note)


@style.figure
def capacity(rows: list[dict]) -> Figure:
    """How far each arm goes under a memory cap: the largest that survived, and the smallest that did not."""
    searches = by(rows, "group", "what")
    drawing, axes = style.panels([0.95 + 0.36 * len(mine) for mine in searches.values()])
    for ax, ((group, what), mine) in zip(axes, searches.items(), strict=True):
        for place, row in enumerate(mine):
            look = {"color": colour(row["arm"])}
            if what == "model" and row["size"]:  # a bar on a logarithmic axis would begin anywhere
                (mark,) = ax.plot(row["size"], place, "o", markersize=9, markerfacecolor=CARD, **look)
            else:
                (mark,) = ax.barh(place, row["size"] or 0, 0.6, hatch="////", edgecolor=CARD, **look)
            style.tell(mark, row["arm"], f"{row['arm']}: {row['largest']} survives, {row.get('failed')} does not")
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
        style.headed(ax, titles.capacity(mine), group)
    text = "Bar or ring: the largest that survived. Cross: the smallest that ran out of memory. One search each."
    return style.finished(drawing, [], f"Hatched or open: an emulated smaller device. {text}")


# --- seconds -------------------------------------------------------------------------------------------------------


def _medians(rows: list[dict]) -> str:
    """What points are: medians of how many runs, and whether there are intervals."""
    with_intervals = any(row["low"] is not None for row in rows)
    intervals = "with 95 % intervals over runs" if with_intervals else "too few for intervals"
    return f"Points: medians, {style.counted(rows)}, {intervals}."


def _curve(ax: Axes, x: str, rows: list[dict]) -> None:
    """The medians of one arm as points on a line."""
    ax.plot([row[x] for row in rows], [row["median"] for row in rows], color=colour(rows[0]["arm"]), linewidth=1)
    for row in rows:
        style.point(ax, row[x], row)


@style.figure
def ladder(rows: list[dict]) -> Figure:
    """Seconds of a step, and the speed-up, as the model grows; document 002's values are marked."""
    drawing, axes = style.panels([2.1, 2.1], sharex=True)
    for (what, _, arm), mine in by(rows, "what", "group", "arm").items():
        _curve(axes[what == "speed-up"], "weights GB", mine)
        for row in mine if what == "s/step" and arm == rows[0]["arm"] else ():
            at = (row["weights GB"], row["median"])
            axes[0].annotate(row["model"], at, (7, -8), textcoords="offset points", fontsize=8.5)
    sizes, from_gb = [row["weights GB"] for row in rows], WORTHWHILE_FROM_BYTES_002 / 1e9
    axes[1].axhline(0, color=INK, linewidth=0.8)
    axes[1].axvspan(from_gb, max(10 * from_gb, 1.5 * max(sizes)), color=SHADE, alpha=0.6, linewidth=0)
    axes[1].plot(min(sizes), SMALLEST_SPEEDUP_002, "_", color=INK, markersize=16, markeredgewidth=2.2)
    axes[0].set(yscale="log", xscale="log", ylabel="s/step")
    axes[0].margins(y=0.18)  # the names stand below their points
    axes[1].set(ylabel="speed-up by ZeRO", xlabel="weights in fp32 (GB)")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1, 0))
    style.plain(axes[0].yaxis)
    style.plain(axes[1].xaxis)
    style.headed(axes[0], titles.ladder(rows), " and ".join(group for (group,) in by(rows, "group")))
    smallest = {"color": INK, "marker": "_", "linestyle": "", "markersize": 12}
    marks = {"document 002: its smallest model": smallest}
    marks["document 002: faster from here on"] = {"color": SHADE, "linewidth": 7}
    text = "Lines join the models of a family. Of its figure, the document prints only the two marked values."
    return style.finished(drawing, style.keys(rows, marks), f"{_medians(rows)} {text}", 2)


@style.figure
def network(rows: list[dict]) -> Figure:
    """Seconds of a step against the bandwidth between emulated hosts."""
    kinds = by(rows, "ranks", "hosts", "passes")
    drawing, axes = style.panels([2.0] * len(kinds), sharex=True)
    most = max(filter(None, (row["Mbit/s"] for row in rows)), default=1.0)
    free, places = 5 * most, sorted({row["Mbit/s"] for row in rows} - {None})
    for ax, ((ranks, hosts, passes), mine) in zip(axes, kinds.items(), strict=True):
        for (arm,), points in by(mine, "arm").items():
            known = [row for row in points if row["predicted s"] is not None]
            line = {"color": colour(arm), "linewidth": 1, "linestyle": ":"}
            ax.plot([row["Mbit/s"] for row in known], [row["predicted s"] for row in known], **line)
            for row in points:
                style.point(ax, row["Mbit/s"] or free, row)
        ax.set(xscale="log", yscale="log", ylabel="s/step")
        ax.margins(y=0.15)
        style.plain(ax.yaxis)
        place = f"{ranks} ranks on {hosts} hosts, {passes} {'pass' if passes == 1 else 'passes'} in a step"
        style.headed(ax, titles.network(mine), place)
    axes[-1].set_xticks([*places, free], [*(f"{place:g}" for place in places), "no limit"])
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("declared bandwidth of each host's link (Mbit/s)")
    marks = {"predicted": {"color": INK, "linewidth": 1, "linestyle": ":"}, "measured": OPEN}
    text = f"{_medians(rows)} Hosts and links are emulated on one machine; ranks, sockets and bytes are real."
    return style.finished(drawing, style.keys(rows, marks), text)


@style.figure
def batches(rows: list[dict]) -> Figure:
    """Speed over DDP's against the batch, by rows per pass and by passes per step, with document 000's numbers."""
    measured = [row for row in rows if row["source"] == "measured"]
    varieties = by(measured, "varied")
    drawing, axes = style.panels([2.2] * len(varieties), sharex=True)
    bar = {"linewidth": 5, "alpha": 0.35}
    for ax, ((varied,), mine) in zip(axes, varieties.items(), strict=True):
        for row in rows:
            if row["source"] != "measured":
                ends = [row["from"], max(row["to"], 1.35 * row["from"])]
                ax.plot(ends, [row["median"]] * 2, color=colour(row["arm"]), solid_capstyle="butt", **bar)
        for points in by(mine, "group", "arm").values():
            _curve(ax, "batch", sorted(points, key=lambda row: row["batch"]))
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set(xscale="log", ylabel="speed over DDP's")
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
        alike = list(dict.fromkeys(row["group"] for row in mine))
        which = style.conditions(alike[0]) if len(alike) == 1 else f"{len(alike)} groups of runs, a line for each"
        style.headed(ax, titles.batches(mine), f"varied: {varied} ({which})")
    axes[-1].set_xlabel("rows in a step, over all ranks")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    marks = {"document 000's (eight H100)": {"color": FAINT} | bar}
    return style.finished(drawing, style.keys(rows, marks), _medians(measured))


@style.figure
def frontier(rows: list[dict]) -> Figure:
    """Seconds of a step against memory at the peak: what offloading saves, and what it costs."""
    drawing, (ax,) = style.panels([3.2])
    for row in rows:
        style.point(ax, row["peak bytes"] / 1e6, row, markersize=8)
    best = []  # nothing else is both smaller and faster
    for row in sorted(rows, key=lambda row: row["peak bytes"]):
        if not best or row["median"] < best[-1]["median"]:
            best.append(row)
    marks, on_cpu = {}, rows[0]["peak of"] == "tracked"
    if len(best) > 1:
        marks["nothing is both smaller and faster"] = look = {"color": FAINT, "linestyle": ":"}
        sizes, times = [row["peak bytes"] / 1e6 for row in best], [row["median"] for row in best]
        ax.step(sizes, times, where="post", linewidth=1, zorder=0, **look)
    where = "tensors hold on the host" if on_cpu else "PyTorch allocated on the GPU"
    ax.set(xlabel=f"MB that {where}, at the peak of a rank", ylabel="s/step", xscale="log", yscale="log")
    style.plain(ax.xaxis)
    style.plain(ax.yaxis)
    style.headed(ax, titles.frontier(rows), rows[0]["group"])
    if any(row["kind"] != "real" for row in rows):
        marks["emulated smaller device"] = OPEN
    text = " On a CPU, host and device are one memory: offloading saves nothing." if on_cpu else ""
    style.finished(drawing, style.keys([], marks), f"{_medians(rows)}{text}", 2)
    places = {row["line"]: (row["peak bytes"] / 1e6, row["median"]) for row in rows}
    style.name_points(ax, places, {row["line"]: row["arm"] for row in rows})
    return drawing


ROLES = {"test": (style.BLUE, "o"), "fit": (style.ORANGE, "^"), "interval": (style.GREEN, "v"), None: (FAINT, "s")}
SCALES = {"memory": (1e9, "GB"), "time": (1, "s per step")}


@style.figure
def outside(rows: list[dict]) -> Figure:
    """Predicted against measured, of numbers that others published: memory, and seconds of a step."""
    quantities = by(rows, "quantity")
    drawing, axes = style.panels([3.0] * len(quantities))
    for ax, ((quantity,), mine) in zip(axes, quantities.items(), strict=True):
        scale, unit = SCALES[quantity]
        for (role,), points in by(mine, "role").items():
            tone, mark = ROLES[role]
            values = [[row[name] / scale for row in points] for name in ("measured", "predicted")]
            ax.plot(*values, mark, color=tone, markersize=3.5, markerfacecolor="none", linestyle="")
        ends = [min(row["measured"] for row in mine) / scale, max(row["measured"] for row in mine) / scale]
        ax.plot(ends, ends, color=INK, linewidth=0.8)
        ax.fill_between(ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color=SHADE, alpha=0.5)
        ax.set(xscale="log", yscale="log", ylabel=f"predicted ({unit})")
        style.headed(ax, titles.outside(mine), f"{quantity}: {len(mine)} published numbers, measured ({unit})")
        style.plain(ax.xaxis)
        style.plain(ax.yaxis)
    axes[-1].set_xlabel("measured by others")
    words = {"test": "it decided nothing", "fit": "times were fitted on it", None: "not used for times"}
    words["interval"] = "it decided the interval's width"
    marks = {words[role]: dict(zip(("color", "marker"), ROLES[role], strict=True)) | OPEN_POINT for role in ROLES}
    text = f"n = {len(rows)} numbers of others. The line: exact. The band: 30 % off. No run here was on these GPUs."
    return style.finished(drawing, style.keys([], marks), text, 2)


@style.figure
def outside_by_source(rows: list[dict]) -> Figure:
    """How far predictions are off, source by source; a line marks the median."""
    quantities = by(rows, "quantity")
    heights = [0.3 + 0.3 * len(by(mine, "source")) for mine in quantities.values()]
    drawing, axes = style.panels(heights)
    for ax, ((quantity,), mine) in zip(axes, quantities.items(), strict=True):
        medians = {key: stats.median([row["error"] for row in each]) for key, each in by(mine, "source").items()}
        of_source = dict(sorted(by(mine, "source").items(), key=lambda item: medians[item[0]]))
        for place, points in enumerate(of_source.values()):
            errors = [max(-1, min(1, row["error"])) for row in points]
            ax.plot(errors, [place] * len(errors), "o", color=style.BLUE, markersize=3.5, markerfacecolor="none")
            ax.plot(stats.median([row["error"] for row in points]), place, "|", color=INK, markersize=13)
        names = {name: shorten(name.rsplit("/", 1)[-1], 28, placeholder=" ...") for (name,) in of_source}
        style.name_bars(ax, [f"{names[name]} ({len(each)})" for (name,), each in of_source.items()])
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_xlim(-1.05, 1.05)
        ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
        near = sum(abs(error) <= 0.1 for error in medians.values())
        ax.set_title(f"{quantity.capitalize()}: the median is within 10 % for {near} of {len(medians)} sources")
    axes[-1].set_xlabel("predicted over measured, less one")
    text = (
        f"n = {len(rows)} numbers of others, in brackets how many each source has. What is further off is at the edge."
    )
    return style.finished(drawing, [], text)


@style.figure
def timelines(rows: list[dict]) -> Figure:
    """A predicted step of each arm, stream by stream."""
    arms = by(rows, "arm")
    drawing, axes = style.panels([0.5 + 0.35 * len(by(mine, "stream")) for mine in arms.values()])
    handles: dict[str, Patch] = {}
    for ax, ((arm,), mine) in zip(axes, arms.items(), strict=True):
        handles |= timeline.lanes(ax, mine)
        ax.set_title(f"{arm}: {max(row['end s'] for row in mine):.2g} s")
    axes[-1].set_xlabel("seconds of a step")
    text = f"Predicted, no run was made: {rows[0]['setup']}. What waits for what is not drawn."
    return style.finished(drawing, list(handles.values()), text)
