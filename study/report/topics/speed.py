"""Seconds of a step, and beside them the memory that they buy."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from study.records import compare, metrics
from study.records.groups import groups
from study.records.runs import Runs
from study.report import style
from study.report.style import FAINT, PUBLISHED, colour
from study.report.tables import lines_of, parts, split_by_ranks


def frontier(runs: Runs) -> pd.DataFrame:
    """Return the seconds of a step and the peak memory of each arm: what offloading saves, and what it costs.

    The seconds must say something of other machines: those of GPUs, or of links of a known speed.
    """
    timed = [
        run
        for run in runs.done
        if metrics.value(run.record, "step_s")
        and metrics.value(run.record, "peak_bytes")
        and not run.record.is_virtual
        and (run.record.observed.device == "cuda" or run.record.requested.hosts)
    ]
    rows = []
    for place, repeats, _ in lines_of(split_by_ranks(groups(timed))):
        # The median of the seconds, and the peak of the run that needs most.
        seconds = [metrics.value(run.record, "step_s") for run in repeats]
        median, low, high = compare.median_with_interval(seconds, np.random.default_rng(0))
        if len(repeats) < compare.FEWEST_RUNS:  # an interval would say more than is known
            low, high = None, None
        peak_bytes = max(metrics.value(run.record, "peak_bytes") for run in repeats)
        rows.append(place | {"peak_bytes": peak_bytes, "median": median, "low": low, "high": high})
    return pd.DataFrame(rows)


@style.figure
def figure_of_steps(rows: pd.DataFrame) -> Figure:
    """Seconds of a step under each arm: predicted with their intervals, and what others measured."""
    settings = parts(rows, "setting")
    arms = style.ordered(rows["arm"])
    drawing, axes = style.panels([0.7 + 0.25 * len(arms)] * len(settings))
    for ax, (setting, mine) in zip(axes, settings.items(), strict=True):
        for arm, source, seconds, low, high in mine[["arm", "source", "seconds", "low", "high"]].to_numpy():
            place = arms.index(arm)
            if source != "predicted":  # published: one number, without an interval
                ax.plot(seconds, place, **PUBLISHED)
                continue
            ax.plot([low, high], [place] * 2, color=colour(arm), linewidth=2)
            ax.plot(seconds, place, "o", color=colour(arm), markerfacecolor=style.CARD)
            style.annotate(ax, f"{seconds:.2g} s", high, place)
        # All arms have a place in each panel, so that panels can be compared.
        style.name_bars(ax, arms)
        ax.margins(x=0.14, y=0.06)
        ax.set_xlim(left=0)
        ax.set_title(f"Llama-3-8B on eight H100, {setting} in a step")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    note = "Nothing was measured on a GPU here. DDP would not fit into 80 GB. Others do not say on which GPUs they"
    note += " measured, nor whether activations were recomputed; the data file names them."
    predicted: style.Look = {"color": FAINT, "marker": "o", "markerfacecolor": style.CARD}
    return style.finished(drawing, style.keys({"predicted": predicted, "measured by others": PUBLISHED}), note)
