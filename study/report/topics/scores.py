"""Who predicts memory best: the errors of each predictor on the same measured peaks."""

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from study.records import stats
from study.records.groups import by
from study.report import style
from study.report.style import FAINT, INK

PREDICTORS = ("ours", "deepspeed", "accelerate")


def table(cells: list[dict]) -> list[dict]:
    """Each predictor's error on each measured peak, from the cells of `study scoreboard`."""
    rows = []
    for cell in cells:
        name = f"{cell['cell']}, {cell['ranks']} ranks, {cell['precision']}"
        for predictor in (predictor for predictor in PREDICTORS if cell[predictor] is not None):
            error = {"predictor": predictor, "error": cell[predictor], "held out": cell["held out"]}
            rows.append({"cell": name, "arm": cell["arm"]} | error)
    return rows


def sentence(rows: list[dict]) -> str:
    """From `scores.table`: the median and worst error of each predictor."""
    items = []
    for (name,), mine in by(rows, "predictor").items():
        errors = [abs(row["error"]) for row in mine]
        items.append(f"{name} {stats.median(errors):.2%} in the median, {max(errors):.0%} at worst ({len(mine)} cells)")
    return f"Errors: {'; '.join(items)}." if items else ""


def title(rows: list[dict]) -> str:
    medians = {
        name: stats.median([abs(row["error"]) for row in mine]) for (name,), mine in by(rows, "predictor").items()
    }
    best = min(medians, key=medians.get)
    return f"Median error: {best} {medians[best]:.2%}, the others up to {max(medians.values()):.0%}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Error of each memory predictor: one point for each measured peak, a bar at the median."""
    predictors = {f"{name} ({len(mine)})": mine for (name,), mine in by(rows, "predictor").items()}
    drawing, (ax,) = style.panels([1.2 + 0.55 * len(predictors)])
    style.strips(ax, predictors, "error", 0.25, markersize=4.5, alpha=0.8)
    for place, mine in enumerate(predictors.values()):
        median = stats.median([row["error"] for row in mine])
        ax.plot([median] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=2)
    ax.axvline(0, color=FAINT, linewidth=0.8)
    ax.set_xscale("symlog", linthresh=0.01)
    ax.set_xticks([-1, -0.1, -0.01, 0, 0.01, 0.1, 1])
    furthest = 1.6 * max(1, *(abs(row["error"]) for row in rows))  # no point lies on the frame
    ax.set_xlim(-furthest, furthest)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set_xlabel("error: predicted / measured - 1 (logarithmic beyond 1 %)", loc="right")
    style.headed(ax, title(rows), "predictions of the same measured peaks")
    text = "Each point is one measured cell; the number of cells is in brackets. The bar is the median."
    text += " A predictor that does not cover an arm has no point for it."
    return style.finished(drawing, style.keys(rows), text, 4)
