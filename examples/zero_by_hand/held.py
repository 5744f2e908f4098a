"""Draws what each file of ZeRO by hand holds and sends, from the tables in its README. A test compares both.

python examples/zero_by_hand/held.py examples/zero_by_hand/held.svg
"""

import re
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.report import style

CAPTION = "What rank 0 of 2 holds and sends, by file of ZeRO by hand"
README = ROOT / "examples" / "zero_by_hand" / "README.md"
HELD = {"weights": "weights", "gradients": "gradients", "moments": "optimizer"}  # by their names in style.PARTS
SENT = {"1 micro-batch in a step": "#9a9aa2", "4 micro-batches": "#3b6fb6"}


def table() -> pd.DataFrame:
    """Return MB: what is held by part, the peak, and what is sent with one and four micro-batches."""
    rows: dict[str, list[float]] = {}
    for line in re.findall(r"^\| `\w+\.py` \|.*", README.read_text(), re.MULTILINE):
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        numbers = [float(re.findall(r"[\d.]+", cell.partition("=")[2] or cell)[0]) for cell in cells]
        rows.setdefault(name.removesuffix(".py"), []).extend(numbers)
    one, four = SENT
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*HELD, "peak", one, "peak with 4", four])


@style.figure
def picture(rows: pd.DataFrame) -> Figure:
    drawing = Figure(figsize=(style.WIDTH, 5.6), layout="constrained")
    left, right = drawing.subplots(2, 1)
    begin = rows["weights"] * 0
    for part, coloured in HELD.items():
        left.barh(range(len(rows)), rows[part], left=begin, label=part, color=style.PARTS[coloured], **style.EDGE)
        begin += rows[part]
    left.plot(rows["peak"], range(len(rows)), "k|", markersize=14, markeredgewidth=2, label="peak")
    style.name_bars(left, rows.index)
    left.set_title("Held by rank 0 of 2, after the backward pass")
    left.set_xlabel("MB; 4 P is 1.05")
    left.set_xlim(right=5.9)
    left.legend(loc="lower right")
    for place, (label, colour) in enumerate(SENT.items()):
        right.barh(
            [y + 0.4 * place - 0.2 for y in range(len(rows))], rows[label], 0.4, label=label, color=colour, **style.EDGE
        )
    style.name_bars(right, rows.index)
    right.set_title("Sent by rank 0 in a step")
    right.set_xlabel("MB")
    right.legend(loc="upper right")
    return drawing


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(style.svg(picture(table()), CAPTION))
