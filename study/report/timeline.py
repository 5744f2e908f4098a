"""A predicted step as a picture: one lane per stream."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from study.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, WIDTH, figure
from study.theory.replay import Span

# By the first word of a task's name. Nothing is told apart by colour alone: lanes have names, and kinds their order.
KINDS = {
    "forward": (BLUE, ""),
    "backward": (ORANGE, ""),
    "update": (GREEN, ""),
    "all_gather": (SKY, "//"),
    "reduce_scatter": (PURPLE, "\\\\"),
    "all_reduce": (PURPLE, "\\\\"),
}
OTHERS = (GREY, "..")


@figure
def draw(spans: Sequence[Span], title: str) -> Figure:
    """Lanes from top to bottom in the order in which a step comes to them."""
    streams = list(dict.fromkeys(span.task.stream for span in spans))
    drawing = Figure(figsize=(WIDTH, 0.7 + 0.45 * len(streams)), layout="constrained")
    axes, kinds = drawing.add_subplot(), {}
    for lane, stream in enumerate(streams):
        for span in spans:
            if span.task.stream == stream and span.end_s > span.start_s:
                word = span.task.name.partition(" ")[0]
                colour, hatch = KINDS.get(word, OTHERS)
                kinds[word if word in KINDS else "states"] = (colour, hatch)
                width_s = span.end_s - span.start_s
                axes.barh(
                    lane, width_s, left=span.start_s, height=0.7, color=colour, hatch=hatch, edgecolor="white", lw=0.2
                )
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a predicted step")
    axes.set_title(title, fontsize="small", color=INK, loc="left", wrap=True)
    handles = [Patch(facecolor=colour, hatch=hatch, label=word) for word, (colour, hatch) in kinds.items()]
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="x-small", frameon=False)
    return drawing


def save(spans: Sequence[Span], title: str, path: Path) -> None:
    draw(spans, title).savefig(path)
