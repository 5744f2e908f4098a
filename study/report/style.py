"""How figures look: one colour and one marker per arm everywhere, on a white card, with text as text.

No figure tells things apart by colour alone: each arm has its own marker; virtual or emulated is open or hatched.
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from study.core.arms import NAMES, all_paths
from study.report.grouping import parts

UNSPLIT = {"all": "parts not given", "any": "collective not given"}  # where a source names no parts
EXACT = 1e-9  # where a difference of zero is drawn on a logarithmic axis
WIDTH = 5.4  # inches: on a phone it scrolls, as site.css says; a desk shows it at full size and a fifth more
WIDER = 1.12  # a screen with few dots sets the same font up to so many times as wide
SHORTEST = 8  # letters of a line
NOTE_SIZE = 8.5  # points, of the text below a figure
LINE = 0.16  # inches: the height of a line of text
Look = Mapping[str, Any]  # keywords that matplotlib takes for a line or a mark
INK, FAINT, CARD, GRID = "#1d1d1f", "#5c5c63", "#ffffff", "#e6e6ea"  # as in figures.mplstyle
ON_DARK, ON_BRIGHT = "#fefefe", "#111111"  # text on a bar: it keeps its colour in the dark
SHADE = "#f3d3ad"  # a light orange, behind the points
OPEN: Look = {"color": FAINT, "marker": "o", "linestyle": "", "markerfacecolor": CARD}  # virtual or emulated

# Eight colours and a grey that people with and without red-green blindness tell apart: M. Okabe and K. Ito, "Color
# Universal Design", 2008; the list as in B. Wong, Nature Methods 8, 441 (2011).
BLACK, ORANGE, SKY, GREEN, YELLOW = "#010101", "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#999999"
# More, for FSDP2 and for groups of ranks: the muted scheme of P. Tol, "Colour Schemes", SRON/EPS/TN/09-002, 2021.
WINE, INDIGO, OLIVE, TEAL, ROSE = "#882255", "#332288", "#999933", "#44aa99", "#cc6677"
SAND, CYAN, FOREST = "#ddcc77", "#88ccee", "#117733"
ARMS = {
    "single": (BLACK, "s"),
    "ddp": (GREY, "o"),
    "zero1": (BLUE, "^"),
    "zero1_cpu": (SKY, "v"),
    "zero2": (GREEN, "D"),
    "zero2_cpu": (PURPLE, "d"),
    "zero3": (VERMILION, "P"),
    "zero3_cpu": (ORANGE, "X"),
    "zero3_nvme": (YELLOW, "*"),
    "fsdp2": (WINE, "h"),
    "fsdp2_grad_op": (INDIGO, "8"),
    "fsdp2_cpu": (OLIVE, "p"),
    "hsdp": (TEAL, "H"),
    "zero3_hpz": (ROSE, "p"),
    "zero3_ulysses": (SAND, "p"),
    "zero1_tp": (CYAN, ">"),
    "zero2_tp": (FOREST, "<"),
}
# A variant has the colour of the arm that it varies, and its own marker among that arm's variants.
VARIANT_MARKERS = ("<", ">", "p", "h", "8", "H", "1", "2", "3", "4")
PARTS = {"weights": BLUE, "gradients": YELLOW, "optimizer": GREEN, "buckets": PURPLE, "gathered weights": SKY}
PARTS |= {"activations": ORANGE, "other": GREY, "all": CARD}  # all: the source does not name parts
COLLECTIVES = {"all-reduce": GREY, "reduce-scatter": GREEN, "all-gather": SKY, "reduce": YELLOW, "broadcast": PURPLE}
COLLECTIVES |= {"all-to-all": ORANGE, "any": CARD}
UNITS_OF_LABELS = {"rows/pass": "rows per pass", "warmup steps": "warm-up steps"}
UNITS_OF_LABELS |= {name: name for name in ("passes", "tokens", "epochs", "steps", "hosts", "threads")}
UNITS_OF_LABELS |= {name: name for name in ("virtual ranks", "evaluation rows")}
PLURAL = re.compile(r"(?<=ss)es\b|s\b")  # its first match: `rows per pass`
WORDS_OF_LABELS = {
    "cap GiB": "memory cap of {} GiB",
    "bandwidth mbit": "links of {} Mbit/s",
    "checkpoint every": "a checkpoint every {} steps",
    "measured by version": "instruments of version {}",
}
STYLE = Path(__file__).with_name("templates") / "figures.mplstyle"


def figure(draw: Callable) -> Callable:
    """Decorate a figure function: it draws in this style, whatever the notebook around it has set."""
    return matplotlib.rc_context(fname=STYLE)(draw)


def panels(heights: list[float], **options) -> tuple[Figure, list[Axes]]:
    """Panels above each other, with heights in inches: a phone could not show them side by side."""
    drawing = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    engine = ConstrainedLayoutEngine(h_pad=0.08)  # inches: labels of one panel must not lie on those of the next
    drawing.set_layout_engine(engine)
    return drawing, list(drawing.subplots(len(heights), 1, squeeze=False, height_ratios=heights, **options)[:, 0])


def colour(arm: str) -> str:
    """An arm's colour; a variant has the colour of the arm that it varies, and an unknown arm is grey."""
    return _look(arm)[0]


def marker(arm: str) -> str:
    """An arm's marker; a variant has its own, so that it can be told from its arm in one figure."""
    variants = [name for name in all_paths() if name not in ARMS and _look(name) == _look(arm)]
    return VARIANT_MARKERS[variants.index(arm)] if arm in variants else _look(arm)[1]


def _look(arm: str) -> tuple[str, str]:
    known = [name for name in ARMS if arm == name or arm.startswith(f"{name}_")]
    return ARMS[max(known, key=len)] if known else (FAINT, ".")


def ordered(arms: Iterable[str]) -> list[str]:
    """Arms in their order, which is that of every table; variants after them."""
    names = set(arms)
    return [arm for arm in NAMES if arm in names] + sorted(names - set(NAMES))


def plain(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis, as many as there is room for. Call it after drawing."""
    low, high = axis.get_view_interval()
    steps_within = {3: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8), 12: (1, 2, 3, 5, 7), 1000: (1, 2, 5)}
    steps = next((steps for span, steps in steps_within.items() if high / low < span), (1,))
    axis.set_major_locator(MaxNLocator(5) if high / low < 2 else LogLocator(10, steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def from_zero(axis: Axis) -> None:
    """Ticks of a logarithmic axis on which EXACT stands for zero."""
    axis.set_major_locator(LogLocator(10, numticks=9))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: "0" if value <= EXACT else f"{value:.0e}".replace("e-0", "e-"))


def point(axes: Axes, x: float, row: Any, y: float | None = None, **options: Any) -> None:
    """Draw one value of a row with its interval, if it has one; open if the run was virtual or its device emulated."""
    value = row.median if y is None else y
    low = getattr(row, "low", None)
    has_interval = low is not None and not math.isnan(low)
    is_open = getattr(row, "kind", "real") in ("virtual", "capped", "emulated")
    look: dict[str, Any] = {"color": colour(row.arm), "marker": marker(row.arm), "capsize": 2.5, "linestyle": "none"}
    look["markerfacecolor"] = CARD if is_open else colour(row.arm)
    interval = [[value - row.low], [row.high - value]] if has_interval else None
    axes.errorbar(x, value, interval, **look, **options)


def keys(arms: Iterable[str], marks: Mapping[str, Look] | None = None) -> list[Line2D]:
    """Return legend entries: arms in their order, and then other marks by their label."""
    entries = [Line2D([], [], label=arm, color=colour(arm), marker=marker(arm)) for arm in ordered(arms)]
    return entries + [Line2D([], [], label=label, **look) for label, look in (marks or {}).items()]


def patches(colours: dict[str, str]) -> list[Patch]:
    return [Patch(facecolor=tone, edgecolor=FAINT, linewidth=0.6, label=name) for name, tone in colours.items()]


def finished(drawing: Figure, entries: list, text: str = "", columns: int = 3) -> Figure:
    """The figure with a legend above its panels and a note below them: how many runs, and what to beware of."""
    note = wrapped(text, WIDTH - 0.1, NOTE_SIZE)
    height = drawing.get_figheight() + LINE * note.count("\n") + LINE * bool(note)  # the panels keep their height
    if entries:
        column = max(width(str(entry.get_label())) for entry in entries) + 0.6  # with its mark
        columns = max(1, min(columns, int(WIDTH / column)))
        height += 0.1 + 0.19 * math.ceil(len(entries) / columns)
        look = {"ncols": columns, "columnspacing": 1.2, "handletextpad": 0.5}
        drawing.legend(handles=entries, loc="outside upper left", **look)
    if note:
        drawing.supxlabel(note, x=0.01, ha="left", fontsize=NOTE_SIZE, color=FAINT)
    drawing.set_figheight(height + LINE * _wrap_titles(drawing))
    return drawing


def width(text: str, size: float | None = None) -> float:
    """Return the width of a line in a browser, in inches."""
    letters = FontProperties(size=size or matplotlib.rcParams["axes.titlesize"])
    return WIDER * text_to_path.get_text_width_height_descent(text, letters, ismath=False)[0] / 72


def wrapped(text: str, room: float, size: float | None = None) -> str:
    """Return a text with line breaks, so that no line is wider than some inches."""
    if not text.strip() or width(text, size) <= room:
        return text
    letters = int(len(text) * room / width(text, size))
    while max(width(line, size) for line in textwrap.wrap(text, letters)) > room and letters > SHORTEST:
        letters -= 1
    return textwrap.fill(text, letters)


def _wrap_titles(drawing: Figure) -> int:
    """Wrap titles at the edge of the figure: they begin where the panels do. Return the number of lines added."""
    label_inches = 0.0
    for axes in drawing.axes:
        labels = max(width(label.get_text() or "0", 9) for label in axes.get_yticklabels())
        label_inches = max(label_inches, labels + (0.5 if axes.get_ylabel() else 0.25))
    added = 0
    for axes in drawing.axes:
        lines = axes.get_title("left").splitlines()
        broken = [wrapped(line, WIDTH - label_inches) for line in lines]
        axes.set_title("\n".join(broken))
        added += sum(line.count("\n") for line in broken)
    return added


def name_bars(axes: Axes, names: Iterable[str], places: Iterable[float] | None = None) -> None:
    """Name horizontal bars, the first one on top."""
    names = list(names)
    axes.set_yticks(list(range(len(names)) if places is None else places), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def stack(axes: Axes, place: float, pieces: Iterable[tuple[float, str]], **look: Any) -> float:
    """Draw a bar of pieces: of each its length and its colour. Return the length of the bar."""
    left = 0.0
    for length, tone in pieces:
        axes.barh(place, length, 0.8, left, color=tone, edgecolor=FAINT, linewidth=0.6, **look)
        left += length
    return left


def stacks(
    rows: pd.DataFrame, part: str, colours: Mapping[str, str], solid: str, words: Callable[[float], str], note: str
) -> Figure:
    """Draw the column `length` as bars made of the parts in a column: one for each source, grouped by line.

    Only sources that begin with `solid` are opaque. Those of runs that are not real are hatched. Rows with another
    `panel` have axes of their own, below, with that title.
    """
    below = parts(rows, "panel") if "panel" in rows else {"": rows}
    bars = {
        title: [parts(mine, "source") for mine in parts(of_panel, "line").values()] for title, of_panel in below.items()
    }
    heights = [1.1 + 0.21 * sum(map(len, lines)) + 0.12 * len(lines) for lines in bars.values()]
    drawing, axes = panels(heights, sharex=True)
    for ax, (title, lines) in zip(axes, bars.items(), strict=True):
        _draw_stacks(ax, lines, part, colours, solid, words)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(lambda value, _: words(value) if value else "0")
        ax.set_title(title or conditions(rows["group"].iloc[0]))
    present = set(rows[part])
    shown = {UNSPLIT.get(name, name): tone for name, tone in colours.items() if name in present}
    return finished(drawing, patches(shown), note, 4)


def _draw_stacks(
    ax: Axes,
    lines: list[dict[str, pd.DataFrame]],
    part: str,
    colours: Mapping[str, str],
    solid: str,
    words: Callable[[float], str],
) -> None:
    names = []
    places = []
    at = 0.0
    for sources in lines:
        for number, (source, mine) in enumerate(sources.items()):
            first = mine.iloc[0]
            is_solid = source.startswith(solid)
            hatch = "////" if is_solid and first["kind"] != "real" else None
            named = zip(mine[part], mine["length"], strict=True)
            pieces = [(size, colours.get(name, FAINT)) for name, size in named]
            end = stack(ax, at, pieces, alpha=1 if is_solid else 0.55, hatch=hatch)
            annotate(ax, words(end), end, at)
            names.append(source if number else f"{first['line']}: {source}")
            places.append(at)
            at += 1
        at += 0.55
    name_bars(ax, names, places)
    ax.margins(x=0.2, y=0.02)


def counted(rows: pd.DataFrame) -> str:
    """Return how many runs there are behind each mark, as a note states it."""
    counts = sorted({int(count) for count in rows["n"] if count}) if len(rows) else []
    if not counts:
        return "no run"
    return f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")


def headed(axes: Axes, group: str, lead: str = "") -> None:
    """Write the conditions of a group of runs as a title, below what is seen. `finished` breaks its lines."""
    axes.set_title("\n".join(filter(None, [lead, conditions(group)])))


def annotate(axes: Axes, text: str, x: float, y: float) -> None:
    """Write a number behind the end of a bar."""
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", fontsize=8.5)


def conditions(group: str) -> str:
    """Return the label of a group of runs in words: `rows/pass 8` is `8 rows per pass`."""
    words = []
    for part in group.split(", "):
        name, _, value = part.rpartition(" ")
        number = value.removesuffix(".0")
        text = part
        if units := UNITS_OF_LABELS.get(name):
            text = f"{number} {PLURAL.sub('', units, count=1) if number == '1' else units}"
        words.append(WORDS_OF_LABELS[name].format(number) if name in WORDS_OF_LABELS else text)
    return ", ".join(words).replace("links of unlimited Mbit/s", "links without a limit")


def svg(drawing: Figure, name: str, label: str | None = None) -> str:
    """The figure as SVG: the same figure is the same bytes whenever it is drawn. `label` is for screen readers."""
    with matplotlib.rc_context({"svg.hashsalt": name}, STYLE):  # `savefig` would draw it twice
        FigureCanvasSVG(drawing).print_svg(out := io.StringIO(), metadata={"Date": None, "Creator": None})
    _, _, text = out.getvalue().partition("<svg ")
    return f'<svg role="img" aria-label="{html.escape(label or name)}" {text}'
