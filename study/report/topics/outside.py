"""Predictions beside what others measured and published."""

from textwrap import shorten

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from study.bench.prediction import predicted
from study.predictor.outside import errors as outside_errors
from study.predictor.outside import published, stored, tables
from study.records import stats
from study.records.groups import by
from study.records.runs import Runs
from study.report import style
from study.report.style import CARD, FAINT, INK, SHADE

# What a model of time needs and no record of this machine has: `study peaks` has not been run beside them.
NO_TIME_ON_CPU = "no prediction: the speed of this CPU was not measured"
OPEN_POINT = {"linestyle": "", "markerfacecolor": CARD}
ROLES = {"test": (style.BLUE, "o"), "fit": (style.ORANGE, "^"), "interval": (style.GREEN, "v"), None: (FAINT, "s")}
SCALES = {"memory": (1e9, "GB"), "time": (1, "s per step")}


def table() -> list[dict]:
    """Every published number that has a prediction, with the prediction and its error."""
    return [
        {"source": row.source, "model": row.model, "GPU": row.gpu, "GPUs": row.n_gpus, "arm": row.arm}
        | {"rows per pass": row.micro_batch, "role": row.role}
        | {"quantity": compared.quantity, "measured": compared.measured, "predicted": compared.predicted}
        | {"error": compared.error}
        for row, compared in ((each.row, compared) for each in stored.predictions() for compared in each.quantities)
    ]


def errors() -> list[dict]:
    """Errors of the predictions, by source and over all, beside those of simpler methods."""
    return tables.lines(stored.read()["summary"])


def misses() -> list[dict]:
    """The predictions that are off by more than 10 % (memory) or 30 % (time), and why, as far as that is known."""
    return tables.misses(outside_errors.misses(list(stored.predictions())))


def sources() -> list[dict]:
    """Where the published numbers come from, and what the sources leave open."""
    of_source: dict[str, list[bool]] = {name: [] for name in published.sources()}
    for each in stored.predictions():
        of_source[each.row.source].append(bool(each.quantities))
    return [
        {
            "source": source.name,
            "rows": len(of_source[source.name]),
            "predicted": sum(of_source[source.name]),
            "what it is": source.what,
            "how it was read": source.read,
            "what it leaves open": source.unsaid,
            "licence": source.licence,
            "address": source.address,
        }
        for source in published.sources().values()
    ]


def here(runs: Runs) -> list[dict]:
    """Our own runs on a CPU, by arm: errors of predicted memory, and why time has no prediction."""
    rows = []
    chosen = [run for run in runs.done if run.components and run.ranks == 2 and run.record.observed.device == "cpu"]
    for (arm, kind), mine in sorted(
        by([{"run": run, "arm": run.arm, "kind": run.kind} for run in chosen], "arm", "kind").items()
    ):
        pairs = [(sum(run["run"].components.values()), predicted(run["run"].record)) for run in mine]
        errors = [ours.peak_bytes / held - 1 for held, ours in pairs if ours]
        rows.append(
            {
                "arm": arm,
                "two ranks": kind,
                "runs": len(mine),
                "with a prediction": len(errors),
                "memory off by": tables.percent(stats.median(list(map(abs, errors)))) if errors else None,
                "worst": tables.percent(max(errors, key=abs)) if errors else None,
                "time": NO_TIME_ON_CPU,
            }
        )
    return rows


def sentence() -> str:
    """Return how accurate the predictions are, as advise and estimate say it."""
    return stored.accuracy()


def title(rows: list[dict]) -> str:
    errors = [abs(row["error"]) for row in rows]
    return f"Predictions: median error {stats.median(errors):.1%}, largest {max(errors):.0%}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Predictions against what others measured and published: peak memory, and seconds of a step."""
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
        ax.set(xscale="log", yscale="log", xlabel=f"measured by others ({unit})", ylabel=f"predicted ({unit})")
        style.headed(ax, title(mine), f"{quantity}, {len(mine)} published numbers")
        style.plain(ax.xaxis)
        style.plain(ax.yaxis)
    words = {"test": "not used to build the model", "fit": "used to fit times", None: "not used for times"}
    words["interval"] = "used for the interval's width"
    present = [role for role in ROLES if any(row["role"] == role for row in rows)]
    marks = {words[role]: dict(zip(("color", "marker"), ROLES[role], strict=True)) | OPEN_POINT for role in present}
    text = f"n = {len(rows)} published numbers. Line: exact. Band: up to 30 % off. None of these runs was made here."
    return style.finished(drawing, style.keys([], marks), text, 2)


@style.figure
def figure_by_source(rows: list[dict]) -> Figure:
    """Errors of the predictions, source by source: one point for each published number, a bar at the median."""
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
        ax.set_title(f"{quantity.capitalize()}: median error within 10 % for {near} of {len(medians)} sources")
    axes[-1].set_xlabel("error: predicted / measured - 1")
    text = (
        f"n = {len(rows)} published numbers; in brackets, how many of each source. Errors above 100 % are at the edge."
    )
    return style.finished(drawing, [], text)
