"""How figures look: one colour and one marker per arm everywhere, on a white card, with text as text.

No figure tells things apart by colour alone: each arm has its own marker; virtual or emulated is hatched.
`templates/figures.mplstyle` has fonts, lines and the colours of text.
"""

import base64
import html
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from study.core.files import beside
from study.report.tables import parts

WIDTH = 4.0  # inches: a phone of 390 px shows all of it, with letters of 11 px or more; a desk shows it larger
# Letters of a line: browsers set the same font up to an eighth wider than matplotlib.
NAME_LETTERS, TITLE_LETTERS, NOTE_LETTERS = 17, 32, 50
COLUMNS = 2  # of a legend
COLOURS_OF_PNG, DPI_OF_PNG = 64, 144
LINE = 0.16  # inches: the height of a line of text
FAINT, CARD = "#5c5c63", "#ffffff"  # as in figures.mplstyle
EDGE: dict[str, Any] = {"edgecolor": FAINT, "linewidth": 0.6}  # of a part of a bar

COLOURS = beside(__file__, "colours.toml")
ARMS, PARTS, COLLECTIVES, MARKS = (COLOURS[name] for name in ("arms", "parts", "collectives", "marks"))
STYLE = Path(__file__).with_name("templates") / "figures.mplstyle"


def figure(draw: Callable) -> Callable:
    """Decorate a figure function: it draws in this style, whatever the notebook around it has set."""
    return matplotlib.rc_context(fname=STYLE)(draw)


def panels(heights: list[float]) -> tuple[Figure, list[Axes]]:
    """Panels above each other, with heights in inches: a phone could not show them side by side."""
    drawing = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    return drawing, list(drawing.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def look(arm: str) -> dict[str, Any]:
    """Return the colour and the marker of an arm, as matplotlib takes them."""
    colour, marker = ARMS.get(arm, (FAINT, "."))
    return {"color": colour, "marker": marker}


def keys(looks: Mapping[str, Mapping[str, Any]]) -> list:
    return [Line2D([], [], label=label, **look) for label, look in looks.items()]


def finished(drawing: Figure, entries: list, note: str) -> Figure:
    """The figure with a legend above its panels, and over it a note: how many runs, and what to beware of."""
    # --- text is wrapped here, and its lines make the figure higher
    note = textwrap.fill(note, NOTE_LETTERS)
    rows = note.count("\n") + 1 + 1.2 * math.ceil(len(entries) / COLUMNS)
    key = drawing.legend(
        handles=entries, title=note, loc="outside upper left", ncols=COLUMNS, columnspacing=1.2, handletextpad=0.5
    )
    key.set_alignment("left")
    key.get_title().set(fontsize=9, color=FAINT)
    for axes in drawing.axes:
        title = "\n".join(textwrap.fill(line, TITLE_LETTERS) for line in axes.get_title("left").splitlines())
        axes.set_title(title)
        rows += title.count("\n")
    drawing.set_figheight(drawing.get_figheight() + 0.1 + LINE * rows)  # the panels keep their height
    return drawing


def name_bars(axes: Axes, names: Iterable[str]) -> None:
    """Name horizontal bars, the first one on top."""
    labels = list(names)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


class StackedBars(NamedTuple):
    value: str  # the column that is drawn; the column `part` has the names
    colours: Mapping[str, str]  # by part
    words: Callable[[float], str]  # for a value
    label: str  # of the axis


@figure
def stacks(rows: pd.DataFrame, stack: StackedBars, note: str) -> Figure:
    """Draw a bar of parts for each line; each `panel` has axes of its own."""
    below = parts(rows.assign(line=[textwrap.fill(name, NAME_LETTERS) for name in rows["line"]]), "panel")
    # --- a name may take several lines
    drawing, axes = panels([0.8 + 0.25 * len("\n".join(parts(mine, "line")).split("\n")) for mine in below.values()])
    for ax, title in zip(axes, below, strict=True):
        draw_stacks(ax, below[title], stack)
        ax.set_title(title)
    axes[-1].set_xlabel(stack.label, loc="right")
    return finished(drawing, stack_keys(rows, stack), note)


def stack_keys(rows: pd.DataFrame, stack: StackedBars) -> list:
    """Return the legend of stacks: the parts and the marks that there are."""
    shown = {*rows["part"], *rows["source"]}  # in the order of the tables of looks, not of the rows
    patches = [Patch(facecolor=tone, label=name, **EDGE) for name, tone in stack.colours.items() if name in shown]
    return patches + keys({name: mark for name, mark in MARKS.items() if name in shown})


def draw_stacks(ax: Axes, rows: pd.DataFrame, stack: StackedBars) -> None:
    """Draw each line's first source as a bar, pale if it is predicted, and the sums of its other sources as marks."""
    lines = parts(rows, "line")
    room = rows.groupby(["line", "source"])[stack.value].sum().max() / 5  # of a number
    for place, mine in enumerate(lines.values()):
        # --- the bar
        (bar, pieces), *others = parts(mine, "source").items()
        how = EDGE
        if bar == "predicted":
            how = EDGE | {"alpha": 0.55}
        elif (pieces["kind"] != "real").any():
            how = EDGE | {"hatch": "////"}
        lengths = pieces[stack.value]
        tones = [stack.colours.get(name, FAINT) for name in pieces["part"]]
        ax.barh(place, lengths, 0.8, lengths.cumsum() - lengths, color=tones, **how)
        # --- the interval of a prediction, the marks, and a number: behind the bar, and behind what would stand on it
        ends = [lengths.sum()]
        if "high" in pieces:
            low, high = pieces[["low", "high"]].iloc[0]
            ax.plot([low, high], [place, place], color=FAINT, linewidth=2)
            ends.append(high)
        for source, theirs in others:
            mark = theirs[stack.value].sum()
            ax.plot(mark, place, **MARKS[source])
            if mark < max(ends) + room:
                ends.append(mark)
        annotate(ax, stack.words(lengths.sum()), max(ends), place)
    name_bars(ax, lines)
    ax.margins(x=0.2, y=0.02)  # the numbers need room
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(lambda value, _: stack.words(value) if value else "0")


def annotate(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", fontsize=9)


def svg(drawing: Figure, name: str, label: str | None = None) -> str:
    """The figure as SVG: the same figure is the same bytes whenever it is drawn. `label` is for screen readers."""
    with matplotlib.rc_context({"svg.hashsalt": name}, STYLE):  # `savefig` would draw it twice
        FigureCanvasSVG(drawing).print_svg(out := io.StringIO(), metadata={"Date": None, "Creator": None})
    _, _, text = out.getvalue().partition("<svg ")
    return f'<svg role="img" aria-label="{html.escape(label or name)}" {text}'


def png(drawing: Figure) -> str:
    """The figure as a small PNG in base64, for readers of notebooks that show no SVG, as GitHub's."""
    drawing.set_dpi(DPI_OF_PNG)
    with matplotlib.rc_context(fname=STYLE):
        FigureCanvasAgg(drawing).print_png(wide := io.BytesIO())
    # --- a figure has few colours: a quarter of the bytes
    Image.open(wide).convert("RGB").quantize(COLOURS_OF_PNG).save(small := io.BytesIO(), "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()
