# /// script
# dependencies = ["zero-study[report]"]
# ///
"""The picture of README: python reproductions/laboratories/headline.py reports/cpu-2core/headline.svg

Losses, memory and bytes sent of the kept runs, side by side: the figures of the report's first page.
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.text import nats
from study.records.runs import Runs, load
from study.report import answers, style
from study.report.topics import losses, memory, traffic

RUNS = ROOT / "reports" / "cpu-2core" / "runs"
CAPTION = "Compared with DDP: the same losses, less GPU memory, more traffic"


@style.figure
def picture(runs: Runs) -> Figure:
    rows, held, _, sent = (answer.rows for answer in answers.answers(runs))
    held = held[(held["panel"] == held["panel"].iloc[0]) & (held["source"] != answers.PUBLISHED)]
    drawing = Figure(figsize=(2 * style.WIDTH, 4.6), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.35, 1.1))
    losses.draw_curves(left, rows[rows["difference"].notna() | (rows["arm"] == answers.BASELINE)])
    left.set_title(f"Same losses\nof every arm, at most {nats(rows['difference'].max())} apart")
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.16), "ncols": 2, "fontsize": 8}
    style.draw_stacks(middle, held, memory.BARS)
    middle.legend(handles=style.stack_keys(held, memory.BARS), **below)
    middle.set_title(f"Less GPU memory\n{held['model'].iloc[0]} on {answers.RANKS} virtual ranks")
    style.draw_stacks(right, sent, traffic.BARS._replace(words="{:.2g}".format))
    right.legend(handles=style.stack_keys(sent, traffic.BARS), **below)
    right.set_title("More traffic\nthe same runs, one pass in a step")
    return drawing


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(style.svg(picture(load(RUNS)), CAPTION))
