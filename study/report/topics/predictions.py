"""Predictions beside what others measured and published, and beside what other predictors of memory say."""

from textwrap import shorten

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from study.bench import board as boards
from study.bench import gpu_scores
from study.predictor.outside import errors as outside_errors
from study.predictor.outside import published, stored
from study.records.runs import Runs
from study.report import style
from study.report.grouping import parts
from study.report.style import CARD, FAINT, INK, SHADE, Look

ROLES = {"test": (style.BLUE, "o"), "fit": (style.ORANGE, "^"), "interval": (style.GREEN, "v"), "": (FAINT, "s")}
MEANINGS = {"test": "not used to build the model", "fit": "used to fit times", "": "not used for times"}
MEANINGS["interval"] = "used for the interval's width"
SCALES = {"memory": (1e9, "GB"), "time": (1, "s per step")}
PREDICTORS = ("ours", "deepspeed", "accelerate")


def table() -> pd.DataFrame:
    """Return every published number that has a prediction, with the prediction and its error."""
    rows = []
    for each in stored.predictions():
        row = each.row
        about = {"source": row.source, "model": row.model, "gpu": row.gpu, "gpus": row.n_gpus, "arm": row.arm}
        about |= {"micro_batch": row.micro_batch, "role": row.role}
        for compared in each.quantities:
            numbers = {"quantity": compared.quantity, "measured": compared.measured, "predicted": compared.predicted}
            rows.append(about | numbers | {"error": compared.error})
    return pd.DataFrame(rows)


def errors() -> pd.DataFrame:
    """Return errors of the predictions, by source and over all, beside those of simpler methods."""
    return pd.DataFrame(outside_errors.lines(stored.predictions()))


def misses() -> pd.DataFrame:
    """Return the predictions that are off by more than 10 % (memory) or 30 % (time), and why, if that is known."""
    return pd.DataFrame(outside_errors.misses(stored.predictions()))


def board() -> pd.DataFrame:
    """Return the score of each predictor on rows that nothing was fitted to, the best first."""
    return pd.DataFrame(boards.scores())


def on_their_rows() -> pd.DataFrame:
    """Return the median errors of simulators on the rows that they published, beside ours there."""
    return pd.DataFrame(boards.on_their_rows())


def sources() -> pd.DataFrame:
    """Return where the published numbers come from, and what the sources leave open."""
    kept = [{"source": each.row.source, "predicted": bool(each.quantities)} for each in stored.predictions()]
    counts = pd.DataFrame(kept)
    of_source = counts.groupby("source")["predicted"].agg(["size", "sum"])
    return pd.DataFrame(
        {
            "source": source.name,
            "rows": of_source["size"].get(source.name, 0),
            "predicted": of_source["sum"].get(source.name, 0),
            "what_it_is": source.what,
            "how_it_was_read": source.read,
            "what_it_leaves_open": source.unsaid,
            "licence": source.licence,
            "address": source.address,
        }
        for source in published.sources().values()
        if source.name in of_source.index
    )


def sentence() -> str:
    """Return how accurate the predictions are, as advise and estimate say it."""
    return stored.accuracy()


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Predictions against what others measured and published: peak memory, and seconds of a step."""
    rows = rows.fillna({"role": ""})
    quantities = parts(rows, "quantity")
    drawing, axes = style.panels([3.0] * len(quantities))
    for ax, (quantity, mine) in zip(axes, quantities.items(), strict=True):
        _draw(ax, quantity, mine)
    marks: dict[str, Look] = {}
    for role, (tone, mark) in ROLES.items():
        if (rows["role"] == role).any():
            marks[MEANINGS[role]] = {"color": tone, "marker": mark, "linestyle": "", "markerfacecolor": CARD}
    text = f"n = {len(rows)} published numbers. Line: exact. Band: up to 30 % off. None of these runs was made here."
    return style.finished(drawing, style.keys([], marks), text, 2)


def _draw(ax: Axes, quantity: str, mine: pd.DataFrame) -> None:
    scale, unit = SCALES[quantity]
    for role, points in parts(mine, "role").items():
        tone, mark = ROLES[role]
        measured, ours = points["measured"] / scale, points["predicted"] / scale
        ax.plot(measured, ours, mark, color=tone, markersize=3.5, markerfacecolor="none", linestyle="")
    ends = [mine["measured"].min() / scale, mine["measured"].max() / scale]
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    ax.fill_between(ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color=SHADE, alpha=0.5)
    ax.set(xscale="log", yscale="log", xlabel=f"measured by others ({unit})", ylabel=f"predicted ({unit})")
    off = mine["error"].abs()
    title = f"Predictions: median error {off.median():.1%}, largest {off.max():.0%}"
    style.headed(ax, title, f"{quantity}, {len(mine)} published numbers")
    style.plain(ax.xaxis)
    style.plain(ax.yaxis)


@style.figure
def figure_by_source(rows: pd.DataFrame) -> Figure:
    """Errors of the predictions, source by source: one point for each published number, a bar at the median."""
    quantities = parts(rows, "quantity")
    drawing, axes = style.panels([0.3 + 0.3 * mine["source"].nunique() for mine in quantities.values()])
    for ax, (quantity, mine) in zip(axes, quantities.items(), strict=True):
        medians = mine.groupby("source", sort=False)["error"].median().sort_values(kind="stable")
        names = []
        for place, source in enumerate(medians.index):
            off = mine[mine["source"] == source]["error"]
            ax.plot(off.clip(-1, 1), [place] * len(off), "o", color=style.BLUE, markersize=3.5, markerfacecolor="none")
            ax.plot(medians[source], place, "|", color=INK, markersize=13)
            short_name = shorten(str(source).rsplit("/", 1)[-1], 28, placeholder=" ...")
            names.append(f"{short_name} ({len(off)})")
        style.name_bars(ax, names)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_xlim(-1.05, 1.05)
        ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
        near = int((medians.abs() <= 0.1).sum())
        ax.set_title(f"{quantity.capitalize()}: median error within 10 % for {near} of {len(medians)} sources")
    axes[-1].set_xlabel("error: predicted / measured - 1")
    text = f"n = {len(rows)} published numbers; in brackets, how many of each source."
    return style.finished(drawing, [], f"{text} Errors above 100 % are at the edge.")


def on_gpu(runs: Runs) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return our own runs on a GPU with their predictions, and the errors of these."""
    cells = gpu_scores.scored(runs)
    return pd.DataFrame(gpu_scores.lines(cells)), pd.DataFrame(gpu_scores.errors(cells) if cells else [])


# --- who predicts memory best --------------------------------------------------------------------------------------


def scores(cells: list[dict]) -> pd.DataFrame:
    """Return each predictor's error on each measured peak, from the cells of `study scoreboard`."""
    rows = []
    for cell in cells:
        name = f"{cell['cell']}, {cell['ranks']} ranks, {cell['precision']}"
        about = {"cell": name, "arm": cell["arm"], "held_out": cell["held out"]}
        rows += [about | {"predictor": each, "error": cell[each]} for each in PREDICTORS if cell[each] is not None]
    return pd.DataFrame(rows)


def sentence_of_scores(rows: pd.DataFrame) -> str:
    """Return the median and worst error of each predictor."""
    items = []
    for name, mine in parts(rows, "predictor").items():
        off = mine["error"].abs()
        items.append(f"{name} {off.median():.2%} in the median, {off.max():.0%} at worst ({len(mine)} cells)")
    return f"Errors: {'; '.join(items)}." if items else ""


@style.figure
def figure_of_scores(rows: pd.DataFrame) -> Figure:
    """Error of each memory predictor: one point for each measured peak, a bar at the median."""
    predictors = {f"{name} ({len(mine)})": mine for name, mine in parts(rows, "predictor").items()}
    drawing, (ax,) = style.panels([1.2 + 0.55 * len(predictors)])
    style.strips(ax, predictors, "error", 0.25, markersize=4.5, alpha=0.8)
    for place, mine in enumerate(predictors.values()):
        ax.plot([mine["error"].median()] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=2)
    ax.axvline(0, color=FAINT, linewidth=0.8)
    ax.set_xscale("symlog", linthresh=0.01)
    ax.set_xticks([-1, -0.1, -0.01, 0, 0.01, 0.1, 1])
    off = rows["error"].abs()
    furthest = 1.6 * max(1, off.max())  # no point lies on the frame
    ax.set_xlim(-furthest, furthest)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set_xlabel("error: predicted / measured - 1 (logarithmic beyond 1 %)", loc="right")
    medians = off.groupby(rows["predictor"], sort=False).median()
    title = f"Median error: {medians.idxmin()} {medians.min():.2%}, the others up to {medians.max():.0%}"
    style.headed(ax, title, "predictions of the same measured peaks")
    text = "Each point is one measured cell; the number of cells is in brackets. The bar is the median."
    text += " A predictor that does not cover an arm has no point for it."
    return style.finished(drawing, style.keys(rows["arm"]), text, 4)
