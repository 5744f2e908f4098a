"""How figures look: one colour and one marker per arm everywhere, on a white card, with text as text.

No figure tells things apart by colour alone: each arm has its own marker; virtual or emulated is hatched.
`templates/figures.mplstyle` has fonts, lines and the colours of text.
"""

import html
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from study.core.arms import NAMES
from study.core.files import from_toml
from study.report.grouping import parts

EXACT = 1e-9  # where a difference of zero is drawn on a logarithmic axis
WIDTH = 5.4  # inches: on a phone it scrolls, as site.css says; a desk shows it at full size and a fifth more
TITLE_LETTERS, NOTE_LETTERS = 52, 72  # of a line: browsers set the same font up to an eighth wider than matplotlib
LINE = 0.16  # inches: the height of a line of text
Look = Mapping[str, Any]  # keywords that matplotlib takes for a line or a mark
INK, FAINT, CARD, SHADE = "#1d1d1f", "#5c5c63", "#ffffff", "#f3d3ad"  # as in figures.mplstyle, and a light orange

COLOURS = from_toml(Path(__file__).with_name("colours.toml").read_text())
ARMS, PARTS, COLLECTIVES = COLOURS["arms"], COLOURS["parts"], COLOURS["collectives"]
BLUE, ORANGE, SKY, VERMILION = "#0072b2", "#e69f00", "#56b4e9", "#d55e00"  # where lines are not arms
# Of several sources of one bar, the first is the bar, and the others are marks at their sums.
PUBLISHED: dict[str, Any] = {"color": VERMILION, "marker": "D", "markersize": 6, "linestyle": "none"}
MARKS: dict[str, Look] = {
    "predicted": {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"},
    "ZeRO paper": {"color": INK, "marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": "none"},
    "published by others": PUBLISHED,
    "the document": PUBLISHED | {"marker": "d"},
}
STYLE = Path(__file__).with_name("templates") / "figures.mplstyle"


def figure(draw: Callable) -> Callable:
    """Decorate a figure function: it draws in this style, whatever the notebook around it has set."""
    return matplotlib.rc_context(fname=STYLE)(draw)


def panels(heights: list[float], **options) -> tuple[Figure, list[Axes]]:
    """Panels above each other, with heights in inches: a phone could not show them side by side."""
    drawing = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    return drawing, list(drawing.subplots(len(heights), 1, squeeze=False, height_ratios=heights, **options)[:, 0])


def _look(arm: str) -> tuple[str, str]:
    """An arm's colour and marker; a variant has the colour of the arm that it varies, and an unknown arm is grey."""
    known = [name for name in ARMS if arm.startswith(f"{name}_")]
    return ARMS.get(arm) or (ARMS[max(known, key=len)][0] if known else FAINT, ".")


def colour(arm: str) -> str:
    return _look(arm)[0]


def marker(arm: str) -> str:
    return _look(arm)[1]


def ordered(arms: Iterable[str]) -> list[str]:
    """Arms in their order, which is that of every table; variants after them."""
    names = set(arms)
    return [arm for arm in NAMES if arm in names] + sorted(names - set(NAMES))


def keys(arms: Iterable[str], marks: Mapping[str, Look] | None = None) -> list[Line2D]:
    """Return legend entries: arms in their order, and then other marks by their label."""
    entries = [Line2D([], [], label=arm, color=colour(arm), marker=marker(arm)) for arm in ordered(arms)]
    return entries + [Line2D([], [], label=label, **look) for label, look in (marks or {}).items()]


def patches(colours: Mapping[str, str]) -> list[Patch]:
    return [Patch(facecolor=tone, edgecolor=FAINT, linewidth=0.6, label=name) for name, tone in colours.items()]


def finished(drawing: Figure, entries: list, note: str = "", columns: int = 3) -> Figure:
    """The figure with a legend above its panels and a note below them: how many runs, and what to beware of."""
    note = textwrap.fill(note, NOTE_LETTERS)
    height = drawing.get_figheight() + LINE * (note.count("\n") + 1)  # the panels keep their height
    if entries:
        height += 0.1 + 0.19 * math.ceil(len(entries) / columns)
        drawing.legend(handles=entries, loc="outside upper left", ncols=columns, columnspacing=1.2, handletextpad=0.5)
    drawing.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color=FAINT)
    for axes in drawing.axes:
        lines = [textwrap.fill(line, TITLE_LETTERS) for line in axes.get_title("left").splitlines()]
        axes.set_title("\n".join(lines))
        height += LINE * sum(line.count("\n") for line in lines)
    drawing.set_figheight(height)
    return drawing


def name_bars(axes: Axes, names: Iterable[str]) -> None:
    """Name horizontal bars, the first one on top."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def stacks(
    rows: pd.DataFrame, part: str, colours: Mapping[str, str], words: Callable[[float], str], note: str
) -> Figure:
    """Draw the column `length` as bars of parts, one for each line; each `panel` has axes of its own."""
    below = parts(rows, "panel")
    drawing, axes = panels([0.8 + 0.25 * mine["line"].nunique() for mine in below.values()])
    for ax, (title, mine) in zip(axes, below.items(), strict=True):
        draw_stacks(ax, mine, part, colours, words)
        ax.set_title(title)
    return finished(drawing, stack_keys(rows, part, colours), note, 3)


def stack_keys(rows: pd.DataFrame, part: str, colours: Mapping[str, str]) -> list:
    """Return the legend of stacks: the parts and the marks that there are."""
    shown = {name: tone for name, tone in colours.items() if (rows[part] == name).any()}
    return [*patches(shown), *keys([], {name: look for name, look in MARKS.items() if (rows["source"] == name).any()})]


def draw_stacks(
    ax: Axes, rows: pd.DataFrame, part: str, colours: Mapping[str, str], words: Callable[[float], str]
) -> None:
    """Draw each line's first source as a bar, pale if it is predicted, and the sums of its other sources as marks."""
    lines = parts(rows, "line")
    for place, mine in enumerate(lines.values()):
        (bar, pieces), *others = parts(mine, "source").items()
        hatch = "////" if bar != "predicted" and (pieces["kind"] != "real").any() else None
        end = 0.0
        for name, length in zip(pieces[part], pieces["length"], strict=True):
            look: dict[str, Any] = {
                "color": colours.get(name, FAINT),
                "hatch": hatch,
                "alpha": 0.55 if bar == "predicted" else 1,
            }
            ax.barh(place, length, 0.8, end, edgecolor=FAINT, linewidth=0.6, **look)
            end += length
        ends = [end]
        for source, theirs in others:
            ends.append(theirs["length"].sum())
            ax.plot(ends[-1], place, **MARKS[source])
        on_gpu = pieces[pieces[part] != "host memory"]["length"].sum()  # host and GPU memory are never one number
        annotate(ax, words(on_gpu), max(ends), place)
    name_bars(ax, lines)
    ax.margins(x=0.2, y=0.02)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: words(value) if value else "0")


def counted(rows: pd.DataFrame) -> str:
    """Return how many runs there are behind each mark, as a note states it."""
    counts = [int(count) for count in rows["n"] if count]
    return "n = " + " to ".join(dict.fromkeys([str(min(counts, default=0)), str(max(counts, default=0))]))


def annotate(axes: Axes, text: str, x: float, y: float) -> None:
    """Write a number behind the end of a bar."""
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", fontsize=8.5)


def svg(drawing: Figure, name: str, label: str | None = None) -> str:
    """The figure as SVG: the same figure is the same bytes whenever it is drawn. `label` is for screen readers."""
    with matplotlib.rc_context({"svg.hashsalt": name}, STYLE):  # `savefig` would draw it twice
        FigureCanvasSVG(drawing).print_svg(out := io.StringIO(), metadata={"Date": None, "Creator": None})
    _, _, text = out.getvalue().partition("<svg ")
    return f'<svg role="img" aria-label="{html.escape(label or name)}" {text}'
