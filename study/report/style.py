"""How figures look: one colour and one marker per arm everywhere, on a white card, with text as text.

No figure tells things apart by colour alone: each arm has its own marker; virtual or emulated is open or hatched.
"""

import html
import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from study.io.numbers import short
from study.ledger.verdict import CONSISTENT, CONTRADICTS, INCONCLUSIVE, NOT_TESTED, REFUTED, SUPPORTED, UNDERSTATED
from study.spec.arms import NAMES, all_paths

EXACT = 1e-9  # where a difference of zero is drawn on a logarithmic axis
WIDTH = 5.4  # inches: a phone shows it at two thirds, a desk at full size and a fifth more
NEAR = 8  # points from a mark to its name
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))  # right and up, the best first
HORIZONTAL: dict[int, Literal["right", "center", "left"]] = {-1: "right", 0: "center", 1: "left"}
VERTICAL: dict[int, Literal["top", "center", "bottom"]] = {-1: "top", 0: "center", 1: "bottom"}
Look = Mapping[str, Any]  # keywords that matplotlib takes for a line or a mark
LEAST_LETTERS = 12  # the shortest line of a title
SAFE = 0.93  # share of the room that a text may take: a browser sets the same font up to 5 % wider
INK, FAINT, CARD = "#1d1d1f", "#5c5c63", "#ffffff"
SHADE = "#f3d3ad"  # a light orange, behind the points
OPEN: dict[str, Any] = {
    "color": FAINT,
    "marker": "o",
    "linestyle": "",
    "markerfacecolor": CARD,
}  # virtual or emulated, in a legend

# Eight colours and a grey that people with and without red-green blindness tell apart: M. Okabe and K. Ito, "Color
# Universal Design", 2008; the list as in B. Wong, Nature Methods 8, 441 (2011).
BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442"
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
COLLECTIVES = {
    "all-reduce": GREY,
    "reduce-scatter": GREEN,
    "all-gather": SKY,
    "reduce": YELLOW,
    "broadcast": PURPLE,
    "all-to-all": ORANGE,
}
COLLECTIVES |= {"any": CARD}
VERDICTS = {SUPPORTED: BLUE, UNDERSTATED: SKY, REFUTED: VERMILION, INCONCLUSIVE: GREY, NOT_TESTED: CARD}
VERDICTS |= {CONSISTENT: GREEN, CONTRADICTS: ORANGE}  # a document compared with its own numbers
COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')  # attributes of SVG
MARK = "mark of "  # the id of a mark that belongs to an arm begins with it
MARKED = re.compile(rf'<g id="{MARK}([^|"]*)\|([^|"]*)\|(key)?">')
WITH_UNIT, NO_BREAK = re.compile(r"(?<=\d) (?=(?:[kMGT]B|nats)\b)"), "\N{NO-BREAK SPACE}"
UNITS_OF_LABELS = {"rows/pass": ("row per pass", "rows per pass"), "passes": ("pass", "passes")}
UNITS_OF_LABELS |= {"tokens": ("token", "tokens"), "epochs": ("epoch", "epochs"), "steps": ("step", "steps")}
UNITS_OF_LABELS |= {"hosts": ("host", "hosts"), "threads": ("thread", "threads")}
UNITS_OF_LABELS |= {
    "virtual ranks": ("virtual rank", "virtual ranks"),
    "warmup steps": ("warm-up step", "warm-up steps"),
}
UNITS_OF_LABELS |= {"evaluation rows": ("evaluation row", "evaluation rows")}
WORDS_OF_LABELS = {"cap GiB": "memory cap of {} GiB", "bandwidth mbit": "links of {} Mbit/s"}
WORDS_OF_LABELS |= {
    "checkpoint every": "a checkpoint every {} steps",
    "measured by version": "instruments of version {}",
}
# A third of what matplotlib writes: a report has each figure three times, in a page, in its notebook and as a file.
UNNEEDED = [
    re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL),
    re.compile(r"""font-family: 'DejaVu Sans', 'Verdana', 'Arial', sans-serif; """),  # the same in all texts: see FONT
    re.compile(r' transform="rotate\(-?0 [^"]*\)"'),
    re.compile(r' id="(?:figure|axes|text|patch|[xy]tick|line2d|legend|matplotlib\.axis|\w+Collection)_\d+"'),
    re.compile(r"\n\s*(?=<)"),
]
STYLES = re.compile(r' style="[^"]*"')
FONT = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif"'
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
    text = short(float(value))
    interval = None
    if has_interval:
        interval = [[value - row.low], [row.high - value]]
        text += f" ({short(float(row.low))} to {short(float(row.high))})"
    drawn = axes.errorbar(x, value, interval, **look, **options)
    for part in drawn.get_children():
        tell(part, row.arm, f"{getattr(row, 'line', row.arm)}: {text}")


def strips(axes: Axes, rows_of: dict[str, pd.DataFrame], value: str, spread: float, **look: Any) -> None:
    """Draw one strip of points for each group of rows; the points of a strip are shifted so that all are visible."""
    for place, mine in enumerate(rows_of.values()):
        offsets = np.linspace(-spread, spread, len(mine)) if len(mine) > 1 else [0.0]
        for offset, arm, number in zip(offsets, mine["arm"], mine[value], strict=True):
            (mark,) = axes.plot(number, place + offset, marker(arm), color=colour(arm), **look)
            tell(mark, arm, f"{arm}: {number:.3g}")
    axes.set_yticks(range(len(rows_of)), list(rows_of))
    axes.set_ylim(len(rows_of) - 0.5, -0.5)


def keys(arms: Iterable[str], marks: Mapping[str, Look] | None = None) -> list[Line2D]:
    """Return legend entries: arms in their order, and then other marks by their label."""
    entries = [Line2D([], [], label=arm, color=colour(arm), marker=marker(arm)) for arm in ordered(arms)]
    return entries + [Line2D([], [], label=label, **look) for label, look in (marks or {}).items()]


def patches(colours: dict[str, str]) -> list[Patch]:
    return [Patch(facecolor=tone, edgecolor=FAINT, linewidth=0.6, label=name) for name, tone in colours.items()]


def finished(drawing: Figure, entries: list, text: str = "", columns: int = 3) -> Figure:
    """The figure with a legend above its panels and a note below them: how many runs, and what to beware of."""
    lines = textwrap.wrap(text, 76)
    if entries:
        columns = _columns(drawing, entries, columns)
        for name in _legend(drawing, entries, columns).get_texts():
            if name.get_text() in all_paths():
                key(name, name.get_text())
    if lines:
        drawing.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8.5, color=FAINT)
    height = drawing.get_figheight() + (0.1 if entries else 0) + 0.19 * math.ceil(len(entries) / columns)
    drawing.set_figheight(height + 0.16 * len(lines))  # the panels keep their height
    _fit_titles(drawing)
    return drawing


def _legend(drawing: Figure, entries: list, columns: int) -> Legend:
    look = {"ncols": columns, "columnspacing": 1.2, "handletextpad": 0.5}
    return drawing.legend(handles=entries, loc="outside upper left", **look)


def _columns(drawing: Figure, entries: list, most: int) -> int:
    """The largest number of legend columns that fit the figure."""
    renderer = FigureCanvasAgg(drawing).get_renderer()
    for columns in range(most, 1, -1):
        legend = _legend(drawing, entries, columns)
        wide = legend.get_window_extent(renderer).width > SAFE * drawing.bbox.width
        legend.remove()
        if not wide:
            return columns
    return 1


def _fit_titles(drawing: Figure) -> None:
    """Titles begin where their panel does, which the names of bars decide: break them before the figure's edge."""
    drawing.draw_without_rendering()
    added = 0
    for axes in drawing.axes:
        title = axes.get_title("left")
        room = SAFE * (drawing.bbox.x1 - axes.bbox.x0)
        for text in axes.get_children():
            if isinstance(text, Text) and title and text.get_text() == title:
                _break(text, room)
                added += text.get_text().count("\n") - title.count("\n")
    drawing.set_figheight(drawing.get_figheight() + 0.16 * added)  # the panels keep their height


def _break(text: Text, room: float) -> None:
    """Break the lines of a text until it is narrower than `room`."""
    lines = text.get_text().splitlines()
    letters = max(map(len, lines))
    while text.get_window_extent().width > room and letters > LEAST_LETTERS:
        letters -= 1
        text.set_text("\n".join(textwrap.fill(line, letters) for line in lines))


def name_bars(axes: Axes, names: Iterable[str], places: Iterable[float] | None = None) -> None:
    """Name horizontal bars, the first one on top. A name that begins with an arm's is its key."""
    names = list(names)
    axes.set_yticks(list(range(len(names)) if places is None else places), names)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        if (arm := re.split("[:, ]", name)[0]) in all_paths():
            key(label, arm)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def name_ends(axes: Axes, ends: dict[str, float], apart: float = 0.058) -> None:
    """Name the lines of arms at their right ends, on a logarithmic axis. Names that would overlap move apart."""
    low, high = (math.log(end) for end in axes.get_ylim())
    arms = sorted(ends, key=lambda arm: ends[arm])
    heights = [(math.log(ends[arm]) - low) / (high - low) for arm in arms]
    for number in range(1, len(arms)):
        heights[number] = max(heights[number], heights[number - 1] + apart)
    ceiling = 1.0
    for number in reversed(range(len(arms))):
        heights[number] = min(heights[number], ceiling)
        ceiling = heights[number] - apart
    for arm, up in zip(arms, heights, strict=True):
        look: dict[str, Any] = {"color": colour(arm), "transform": axes.transAxes, "clip_on": False}
        axes.plot([1.025], [up], marker(arm), **look)
        name = axes.text(1.05, up, arm, transform=axes.transAxes, va="center", fontsize=8.5)
        key(name, arm)


def name_points(axes: Axes, places: dict[str, tuple[float, float]], arms: dict[str, str]) -> None:
    """Name points beside them, where there is room; further away with a line. Call it on a figure that is finished.

    If there is no room anywhere, the mark still shows its name under the pointer.
    """
    drawing = cast(Figure, axes.figure)
    drawing.draw_without_rendering()
    spot = drawing.dpi / 72 * NEAR / 2
    corners = axes.transData.transform([*places.values()])
    taken = [Bbox.from_extents(x - spot, y - spot, x + spot, y + spot) for x, y in corners]
    room = Bbox.from_extents(axes.bbox.x0, axes.bbox.y0, drawing.bbox.x1, axes.bbox.y1)
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        for distance, side in itertools.product((NEAR, 2 * NEAR, 4 * NEAR, 6 * NEAR), SIDES):
            text, box = _name_beside(axes, name, place, distance, side)
            is_inside = room.x0 < box.x0 and box.x1 < room.x1 and room.y0 < box.y0 and box.y1 < room.y1
            if is_inside and not box.count_overlaps(taken):
                taken.append(box)
                text.set_in_layout(False)
                key(text, arms[name])
                break
            text.remove()


def _name_beside(
    axes: Axes, name: str, place: tuple[float, float], distance: float, side: tuple[int, int]
) -> tuple[Text, Bbox]:
    """Write a name on one side of a point. Return it with its box, without the line to its mark."""
    right, up = side
    renderer = FigureCanvasAgg(cast(Figure, axes.figure)).get_renderer()
    text = axes.annotate(
        name,
        place,
        (right * distance, up * distance),
        textcoords="offset points",
        fontsize=8.5,
        ha=HORIZONTAL[right],
        va=VERTICAL[up],
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6} if distance > NEAR else None,
        bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.5},  # no line goes through a name
    )
    text.update_positions(renderer)
    return text, Text.get_window_extent(text, renderer)


def counted(rows: pd.DataFrame) -> str:
    """Return how many runs there are behind each mark, as a note states it."""
    counts = sorted({int(count) for count in rows["n"] if count}) if len(rows) else []
    if not counts:
        return "no run"
    return f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")


def headed(axes: Axes, lead: str, group: str) -> None:
    """A title that says what is seen, and below it under which conditions. `finished` breaks its lines."""
    axes.set_title("\n".join(filter(None, [WITH_UNIT.sub(NO_BREAK, lead), conditions(group)])))


def annotate(axes: Axes, text: str, x: float, y: float, offset: float = 4) -> Annotation:
    """Write a number behind the end of a bar."""
    return axes.annotate(text, (x, y), (offset, 0), textcoords="offset points", va="center", fontsize=8.5)


def tell(artist: Artist, arm: str, words: str = "") -> None:
    """What a reader sees over this mark, and the arm that it belongs to: both are in the SVG."""
    artist.set_gid(f"{MARK}{arm}|{words}|")


def key(artist: Artist, arm: str) -> None:
    """The name of an arm in a figure: in the report a click on it hides the arm's marks."""
    artist.set_gid(f"{MARK}{arm}||key")


def conditions(group: str) -> str:
    """The label of a group of runs in words: `rows/pass 8` is `8 rows per pass`."""
    words = []
    for part in group.split(", "):
        name, _, value = part.rpartition(" ")
        number, units = value.removesuffix(".0"), UNITS_OF_LABELS.get(name)
        text = WORDS_OF_LABELS.get(name, "{}").format(number) if name in WORDS_OF_LABELS else part
        words.append(f"{number} {units[number != '1']}" if units else text)
    return ", ".join(words).replace("links of unlimited Mbit/s", "links without a limit")


def _rounded(attribute: re.Match) -> str:
    """Coordinates with one decimal: a tenth of a point is a fifth of a dot, and all six make a large report."""
    return re.sub(r"(\.\d)\d+", r"\1", attribute[0])


def _with_data(group: re.Match) -> str:
    arm, words, is_key = group.groups()
    kind = ' data-key=""' if is_key else ""
    return f'<g data-arm="{arm}"{kind}>' + (f"<title>{words}</title>" if words else "")


def svg(drawing: Figure, name: str, label: str | None = None) -> str:
    """The figure as SVG: the same figure is the same bytes whenever it is drawn. `label` is for screen readers."""
    with matplotlib.rc_context({"svg.hashsalt": name}, STYLE):
        drawing.savefig(out := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    text, label = COORDINATES.sub(_rounded, MARKED.sub(_with_data, out.getvalue())), html.escape(label or name)
    for unneeded in UNNEEDED:
        text = unneeded.sub("", text)
    text = STYLES.sub(lambda style: style[0].replace(": ", ":").replace("; ", ";"), text)
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" {FONT} ', 1)
