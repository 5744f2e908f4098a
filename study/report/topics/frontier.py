"""Seconds of a step against memory at the peak: what offloading saves, and what it costs."""

from matplotlib.figure import Figure

from study.io.numbers import size
from study.records.groups import groups, lines
from study.records.runs import Runs
from study.report import seconds, style
from study.report.grouping import columns, largest_groups, split_by_ranks
from study.report.style import FAINT, OPEN, conditions


def table(runs: Runs) -> list[dict]:
    """Seconds of a step and peak memory of each arm."""
    rows, known = [], [run for run in seconds.timed(runs) if run.peak_bytes]
    for group, members in split_by_ranks(groups(known), with_lone=True).items():
        if len({run.arm for run in members}) < 2:
            continue
        for line, mine in lines(members).items():
            place = {"group": group, "line": line} | columns(mine[0], "arm", "ranks", "kind")
            place |= {"peak bytes": max(run.peak_bytes for run in mine)} | columns(mine[0], "peak_of", "rows_per_step")
            rows.append(place | seconds.middle(seconds.of(mine)))
    return rows


def sentence(rows: list[dict], most: int = 2) -> str:
    """From `frontier.table`: the fastest and the smallest arm of `most` groups, and what the latter costs."""
    sentences = []
    for mine in largest_groups(rows, most):
        fast, small = min(mine, key=lambda row: row["median"]), min(mine, key=lambda row: row["peak bytes"])
        speed, held = f"{fast['median']:.3g} s per step", size(fast["peak bytes"])
        if len(mine) == 1:
            rest = f"only {fast['line']} has timings: {speed}, {held}."
        elif small["peak bytes"] == fast["peak bytes"]:
            rest = f"{fast['line']} is the fastest ({speed}) and the smallest ({held})."
        else:
            less, slower = 1 - small["peak bytes"] / fast["peak bytes"], small["median"] / fast["median"]
            offloaded = f"{small['line']} holds {less:.0%} less and takes {slower:.2g} times as long."
            rest = f"{fast['line']} is the fastest ({speed}); {offloaded}"
        sentences.append(f"In {conditions(mine[0]['group'])}, {rest}")
    return " ".join(sentences)


def title(rows: list[dict]) -> str:
    fast, small = min(rows, key=lambda row: row["median"]), min(rows, key=lambda row: row["peak bytes"])
    if small["peak bytes"] == fast["peak bytes"]:
        return f"{fast['line']} is the fastest and holds the least"
    slower = small["median"] / fast["median"]
    return f"{small['line']} holds the least and takes {slower:.2g} times as long as {fast['line']}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Seconds of a step against peak memory, one point for each arm."""
    drawing, (ax,) = style.panels([3.2])
    for row in rows:
        style.point(ax, row["peak bytes"] / 1e6, row, markersize=8)
    best = []  # nothing else is both smaller and faster
    for row in sorted(rows, key=lambda row: row["peak bytes"]):
        if not best or row["median"] < best[-1]["median"]:
            best.append(row)
    marks, on_cpu = {}, rows[0]["peak of"] == "tracked"
    if len(best) > 1:
        marks["nothing is both smaller and faster"] = look = {"color": FAINT, "linestyle": ":"}
        sizes, times = [row["peak bytes"] / 1e6 for row in best], [row["median"] for row in best]
        ax.step(sizes, times, where="post", linewidth=1, zorder=0, **look)
    of = "a rank's tensors, in host memory" if on_cpu else "a rank, as PyTorch allocated it on the GPU"
    ax.set(xlabel=f"peak memory of {of} (MB)", ylabel="seconds of a step", xscale="log", yscale="log")
    style.plain(ax.xaxis)
    style.plain(ax.yaxis)
    style.headed(ax, title(rows), rows[0]["group"])
    if any(row["kind"] != "real" for row in rows):
        marks["emulated smaller device"] = OPEN
    text = " On a CPU, host and device share one memory, so offloading saves nothing." if on_cpu else ""
    style.finished(drawing, style.keys([], marks), f"{seconds.note(rows)}{text}", 2)
    places = {row["line"]: (row["peak bytes"] / 1e6, row["median"]) for row in rows}
    style.name_points(ax, places, {row["line"]: row["arm"] for row in rows})
    return drawing
