"""Small charts for pages that exist by the hundred: geometry, which `templates/charts.html` draws.

matplotlib would take a tenth of a second and 20 kB for each. Colours are those of `style`, so that a part, a collective
or an arm looks the same on every page.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from study.io.numbers import short, size
from study.report import style

WIDTH, HEIGHT = 560, 254
LEFT, RIGHT, TOP, BOTTOM = 62, 546, 38, 212  # the frame in which values are drawn
MOST_TICKS = 6
Series = Mapping[str, Iterable[tuple[float, float]]]  # points (x, y) by the name of their line
UNSEEN = 2e-4  # of the longest bar: a tenth of a dot. What is smaller stands in the table below a bar
MOST_MARKS = 24  # of a line: a mark shows its value under the pointer


@dataclass(frozen=True)
class Line:
    """A line of a chart, in its coordinates."""

    name: str
    colour: str
    points: list[tuple[float, float, str]]  # x, y, and the words that are shown for the point
    dashed: bool = False

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in self.points)

    @property
    def marks(self) -> list[tuple[float, float, str]]:
        every = math.ceil(len(self.points) / MOST_MARKS)
        return self.points[::-every][::-1]  # the last one is always marked


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
    frame: tuple[int, int, int, int] = (LEFT, RIGHT, TOP, BOTTOM)


@dataclass(frozen=True)
class Bar:
    """A bar made of parts: a name, a size in words, a colour, and the share of the longest bar."""

    name: str
    total: str
    parts: list[tuple[str, str, str, float]]
    note: str = ""
    predicted: bool = False


@dataclass(frozen=True)
class Bars:
    """Bars below each other, on one scale."""

    bars: list[Bar]
    legend: dict[str, str]  # the colours of the parts that occur
    label: str  # for a reader who does not see it


def chart(series: Series, x_label: str, y_label: str, unit: str = "") -> Chart | None:
    """A chart of several lines. The axis of y begins at zero only if that leaves the shape visible."""
    known = {name: [(x, y) for x, y in points if y is not None and math.isfinite(y)] for name, points in series.items()}
    known = {name: points for name, points in known.items() if points}
    everything = [point for points in known.values() for point in points]
    if not everything:
        return None
    x_low, x_high = _range(x for x, _ in everything)
    y_low, y_high = _range(y for _, y in everything)
    y_low = 0.0 if 0 <= y_low < 0.5 * y_high else y_low
    y_ticks = ticks(y_low, y_high)
    x_ticks = [tick for tick in ticks(x_low, x_high) if tick == int(tick) and x_low <= tick <= x_high]
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
    looks = ("var(--ink)", style.VERMILION, style.BLUE, style.GREEN)

    def across(x: float) -> float:
        return LEFT + (RIGHT - LEFT) * (x - x_low) / (x_high - x_low)

    def up(y: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (y - y_low) / (y_high - y_low)

    lines = [
        Line(name, looks[number % len(looks)], [(across(x), up(y), _at(x, y, unit)) for x, y in points], number > 0)
        for number, (name, points) in enumerate(known.items())
    ]
    words = [f"{name}: from {short(float(of[0][1]))} to {short(float(of[-1][1]))}{unit}" for name, of in known.items()]
    return Chart(
        x_label,
        y_label,
        lines,
        [(across(tick), short(float(tick))) for tick in x_ticks],
        [(up(tick), short(float(tick))) for tick in y_ticks],
        f"{y_label} over {x_label}. {'; '.join(words)}",
    )


def _at(x: float, y: float, unit: str) -> str:
    return f"step {x:g}: {short(float(y))}{unit}"


def _range(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    low, high = min(values), max(values)
    around = abs(low) / 2 or 0.5
    return (low, high) if high > low else (low - around, high + around)


def ticks(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Round numbers that hold an interval, at most so many: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / (most - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def bars(
    stacks: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], label: str, predicted: str | None = None
) -> Bars:
    """Stacked bars of bytes: parts by bar, in the order of the colours. `predicted` names one that nobody measured."""
    longest = max((sum(parts.values()) for parts in stacks.values()), default=0) or 1
    ordered = {bar: {name: parts[name] for name in colours if parts.get(name)} for bar, parts in stacks.items()}
    drawn = [
        Bar(
            bar,
            size(sum(parts.values())),
            [
                (name, size(held), colours[name], 100 * held / longest)
                for name, held in parts.items()
                if held >= UNSEEN * longest
            ],
            "predicted, at the peak" if bar == predicted else "",
            bar == predicted,
        )
        for bar, parts in ordered.items()
    ]
    present = {name: tone for name, tone in colours.items() if any(name in parts for parts in ordered.values())}
    words = "; ".join(f"{bar.name} {bar.total}" for bar in drawn)
    return Bars(drawn, present, f"{label}: {words}")
