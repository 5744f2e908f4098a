"""Equal cells on several machines."""

from collections.abc import Iterable

from matplotlib.figure import Figure

from study.records.compare import compare
from study.records.groups import by
from study.records.runs import Runs
from study.report import style
from study.report.style import INK

FIRST_COLUMNS = ("arm", "model", "environment", "runs", "s/step", "from", "to", "vs A", "peak MB", "loss")


def tables(runs: Runs) -> tuple[list[dict], list[dict]]:
    """Equal cells in each environment, and the environments by their letters; columns that differ come first."""
    compared = compare(runs)
    places = [{"environment": letter} | place for letter, place in compared.environments.items()]
    places = [
        {("instruments" if name == "measure_version" else name): value for name, value in place.items()}
        for place in places
    ]
    names = dict.fromkeys(name for place in places for name in place)
    differ = [name for name in names if len({str(place.get(name)) for place in places}) > 1]
    return [_first(row, FIRST_COLUMNS) for row in compared.rows], [_first(place, differ) for place in places]


def _first(row: dict, names: Iterable[str]) -> dict:
    return {name: row[name] for name in names if name in row} | row


def title(rows: list[dict]) -> str:
    ratios = [row["vs A"] for row in rows]
    return f"A step takes {min(ratios):.2g} to {max(ratios):.2g} times as long as in environment A"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Seconds of a step in each environment, divided by those in environment A, one point for each cell."""
    compared = [row for row in rows if row["vs A"] is not None and row["environment"] != "A"]
    places = {f"environment {name}": mine for (name,), mine in by(compared, "environment").items()}
    drawing, (ax,) = style.panels([1.0 + 0.5 * len(places)])
    style.strips(ax, places, "vs A", 0.15)
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.set(xscale="log", xlabel="seconds of a step (1 = the same cell in environment A)")
    style.plain(ax.xaxis)
    style.headed(ax, title(compared), "equal cells")
    text = "Each point is one cell. Environments differ in machine, software or commit, and were measured at different"
    return style.finished(drawing, style.keys(compared), f"{text} times: small differences may be noise.")
