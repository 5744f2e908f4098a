"""Bars made of parts, of memory and of bytes sent."""

from matplotlib.figure import Figure

from study.records.groups import by
from study.report import style
from study.report.style import FAINT

UNSPLIT = {"all": "parts not given", "any": "collective not given"}  # where a source names no parts


def scale(largest_bytes: float) -> tuple[float, str]:
    """The divisor and the unit for an axis of bytes."""
    return (1e9, "GB") if largest_bytes >= 1e9 else (1e6, "MB")


def bars(
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
    """Bars made of parts: one bar for each source, grouped by line. Only sources that begin with `solid` are opaque."""
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
    patches = style.patches({UNSPLIT.get(name, name): tone for name, tone in colours.items() if name in present})
    return style.finished(drawing, patches, text, 4)
