"""Predictions beside what others measured and published, and beside what other predictors of memory say."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.bench import board as boards
from study.bench import gpu_scores
from study.io.numbers import percent
from study.predictor.outside import published, stored
from study.records.runs import Runs
from study.report import outside, style
from study.report.grouping import parts
from study.report.style import CARD, FAINT, INK, SHADE, Look

ROLES = {"test": (style.BLUE, "o"), "fit": (style.ORANGE, "^"), "interval": (style.GREEN, "v"), "": (FAINT, "s")}
MEANINGS = {"test": "not used to build the model", "fit": "used to fit times", "": "not used for times"}
MEANINGS["interval"] = "used for the interval's width"
SCALES = {"memory": (1e9, "GB"), "time": (1, "s per step")}


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
    return pd.DataFrame(outside.lines(stored.predictions())).rename(columns={"median": "median error"})


def misses() -> pd.DataFrame:
    """Return the predictions that are off by more than 10 % (memory) or 30 % (time), and why, if that is known."""
    return pd.DataFrame(outside.misses(stored.predictions()))


def board() -> pd.DataFrame:
    """Return the score of each predictor on rows that nothing was fitted to, the best first."""
    return _in_percent(pd.DataFrame(boards.scores()))


def on_their_rows() -> pd.DataFrame:
    """Return the median errors of simulators on the rows that they published, beside ours there."""
    return _in_percent(pd.DataFrame(boards.on_their_rows()))


def _in_percent(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose shares are percentages."""
    rows = rows.copy()
    for name in rows.select_dtypes("float").columns:
        rows[name] = [None if pd.isna(share) else percent(share) for share in rows[name]]
    return rows


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
    return outside.accuracy()


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


def on_gpu(runs: Runs) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return our own runs on a GPU with their predictions, and the errors of these."""
    cells = gpu_scores.scored(runs)
    return pd.DataFrame(gpu_scores.lines(cells)), pd.DataFrame(gpu_scores.errors(cells) if cells else [])


# --- who predicts memory best --------------------------------------------------------------------------------------
