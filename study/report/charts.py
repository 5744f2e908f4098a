"""Small charts for pages that exist by the hundred: geometry, which `templates/charts.html` draws.

matplotlib would take a tenth of a second and 20 kB for each. Colours are those of `style`, so that a part, a collective
or an arm looks the same on every page.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from study.io.numbers import short, size
from study.report import style

WIDTH, HEIGHT = 560, 254
LEFT, RIGHT, TOP, BOTTOM = FRAME = (62, 546, 38, 212)  # in which values are drawn
MOST_TICKS = 6
UNSEEN = 2e-4  # of the longest bar: a tenth of a dot. What is smaller stands in the table below a bar
MOST_MARKS = 24  # of a line: a mark shows its value under the pointer
LOOKS = ("var(--ink)", style.VERMILION, style.BLUE, style.GREEN)


@dataclass(frozen=True)
class Line:
    """A line of a chart, in its coordinates."""

    name: str
    colour: str
    points: list[tuple[float, float, str]]  # x, y, and the words that are shown for the point
    dashed: bool

    @property
    def path(self) -> str:
        return " ".join(f"{x:.0f},{y:.1f}" for x, y, _ in self.points)

    @property
    def every(self) -> int:
        """Only one point of so many is marked, the last one always."""
        return math.ceil(len(self.points) / MOST_MARKS)

    @property
    def values(self) -> str:
        """The words of the marks, which `site.js` adds: each is a place and a value."""
        return ",".join(words for _, _, words in self.points[:: -self.every][::-1])


@dataclass(frozen=True)
class Chart:
    """Lines over steps, with ticks at round numbers."""

    x_label: str
    y_label: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    label: str  # for a reader who does not see it
    width: int = WIDTH
    height: int = HEIGHT
    frame: tuple[int, int, int, int] = FRAME


def chart(series: Mapping[str, Iterable[tuple[float, float]]], x_label: str, y_label: str) -> Chart | None:
    """Return a chart of several lines: points (x, y) by the name of their line. None if there is no finite point."""
    known = {}
    for name, points in series.items():
        every = np.array([*points], float).reshape(-1, 2)
        if len(finite := every[np.isfinite(every).all(axis=1)]):
            known[name] = finite
    if not known:
        return None
    (x_low, y_low), (x_high, y_high) = (end(np.concatenate([*known.values()]), axis=0) for end in (np.min, np.max))
    y_ticks = ticks(y_low, y_high)
    x_ticks = [tick for tick in ticks(x_low, x_high) if tick.is_integer()]
    x_range = (x_low, x_high) if x_high > x_low else (x_low - 0.5, x_low + 0.5)
    y_range = (y_ticks[0], y_ticks[-1])
    lines, words = [], []
    for number, (name, points) in enumerate(known.items()):
        across, up = np.interp(points[:, 0], x_range, (LEFT, RIGHT)), np.interp(points[:, 1], y_range, (BOTTOM, TOP))
        texts = [f"{x:g} {short(float(y))}" for x, y in points]
        lines.append(Line(name, LOOKS[number % 4], [*zip(across, up, texts, strict=True)], number > 0))
        words.append(f"{name}: from {short(float(points[0, 1]))} to {short(float(points[-1, 1]))}")
    return Chart(
        x_label,
        y_label,
        lines,
        [(float(np.interp(tick, x_range, (LEFT, RIGHT))), short(tick)) for tick in x_ticks if x_low <= tick <= x_high],
        [(float(np.interp(tick, y_range, (BOTTOM, TOP))), short(tick)) for tick in y_ticks],
        f"{y_label} over {x_label}. {'; '.join(words)}",
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers that hold an interval."""
    around = 0 if high > low else abs(low) / 2 or 0.5
    chosen = MaxNLocator(MOST_TICKS - 1, steps=[1, 2, 5, 10]).tick_values(low - around, high + around)
    return [float(tick) for tick in chosen]


@dataclass(frozen=True)
class Bar:
    """A bar made of parts: a name, a size in words, a colour, and the share of the longest bar."""

    name: str
    total: str
    parts: list[tuple[str, str, str, float]]
    predicted: bool


@dataclass(frozen=True)
class Bars:
    """Bars below each other, on one scale."""

    bars: list[Bar]
    legend: dict[str, str]  # the colours of the parts that occur
    label: str  # for a reader who does not see it; the bars are text


def bars(
    stacks: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], label: str, predicted: str = ""
) -> Bars:
    """Stacked bars of bytes: parts by bar, in the order of the colours. `predicted` names one that nobody measured."""
    longest = max(sum(parts.values()) for parts in stacks.values()) or 1
    drawn = []
    present = set()
    for name, parts in stacks.items():
        seen = [part for part in colours if parts.get(part, 0) >= UNSEEN * longest]
        pieces = [(part, size(parts[part]), colours[part], 100 * parts[part] / longest) for part in seen]
        drawn.append(Bar(name, size(sum(parts.values())), pieces, name == predicted))
        present |= set(seen)
    return Bars(drawn, {part: tone for part, tone in colours.items() if part in present}, label)
