"""Bars made of parts, of memory and of bytes sent."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.report import style
from study.report.grouping import each, parts
from study.report.style import FAINT

UNSPLIT = {"all": "parts not given", "any": "collective not given"}  # where a source names no parts


@dataclass(frozen=True)
class Stacks:
    """How bars of parts are drawn: one bar for each source, grouped by line."""

    part: str  # the column that names a part
    colours: dict[str, str]
    solid: str  # only sources that begin with this are opaque
    unit: str
    label: str  # of the axis
    title: str
    note: str


def scale(largest_bytes: float) -> tuple[float, str]:
    """Return the divisor and the unit for an axis of bytes."""
    return (1e9, "GB") if largest_bytes >= 1e9 else (1e6, "MB")


def draw(rows: pd.DataFrame, stacks: Stacks) -> Figure:
    """Draw the column `length` of the rows as bars made of parts."""
    bars = sum(len(parts(mine, "source")) for mine in parts(rows, "line").values())
    lines = parts(rows, "line")
    drawing, (ax,) = style.panels([1.1 + 0.21 * bars + 0.12 * len(lines)])
    names, places, at = [], [], 0.0
    for line, of_line in lines.items():
        for number, (source, mine) in enumerate(parts(of_line, "source").items()):
            _bar(ax, at, mine, stacks)
            names.append(source if number else f"{line}: {source}")
            places.append(at)
            at += 1
        at += 0.55
    style.name_bars(ax, names, places)
    ax.margins(x=0.12, y=0.02)
    style.headed(ax, stacks.title, rows["group"].iloc[0])
    ax.set_xlabel(stacks.label, loc="right")  # in the middle it could leave the figure, where names of bars are long
    present = set(rows[stacks.part])
    shown = {UNSPLIT.get(name, name): tone for name, tone in stacks.colours.items() if name in present}
    return style.finished(drawing, style.patches(shown), stacks.note, 4)


def _bar(ax: Axes, at: float, mine: pd.DataFrame, stacks: Stacks) -> None:
    left = 0.0
    for row in each(mine):
        is_solid = row.source.startswith(stacks.solid)
        part = getattr(row, stacks.part)
        (bar,) = ax.barh(
            at,
            row.length,
            0.86,
            left,
            color=stacks.colours.get(part, FAINT),
            hatch="////" if row.kind != "real" and is_solid else None,
            edgecolor=FAINT,
            linewidth=0.6,
            alpha=1 if is_solid else 0.55,
        )
        words = f"{row.line}, {row.source}, {part}: {row.length:.3g} {stacks.unit}"
        style.tell(bar, row.arm, words.rstrip())
        left += row.length
    style.annotate(ax, f"{left:.3g}", left, at)
