"""What fits: how far each arm goes under a memory cap, and which arms of a protocol fit this machine by formulas."""

import contextlib

import pandas as pd
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.errors import Stop
from study.io.numbers import size
from study.io.words import joined
from study.machine.gpus import gpus_here
from study.predictor.architecture import named, parameters
from study.predictor.estimate import Estimate, estimate
from study.predictor.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES
from study.predictor.room import HOST_PROCESS_BYTES, PROCESS_BYTES
from study.predictor.setup import Setup
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import SETTINGS, largest, parts
from study.report.style import CARD, INK, colour, conditions, ordered
from study.spec.shapes import shape_of
from study.sweeps import protocol
from study.sweeps.protocol import Cell

SEQUENCE = 128  # tokens, as in document 002, if a cell does not say


def table(runs: Runs) -> pd.DataFrame:
    """Return for each arm under a memory cap the largest model or batch that ran, and the smallest that did not."""
    rows = []
    capped = [run for run in runs if run.requested.memory_cap_gib and run.status in ("done", "oom", "host_oom")]
    for what in ("model", "micro_batch"):
        alike = [name for name in ("memory_cap_gib", *SETTINGS) if name not in (what, "attention")]
        for group, members in groups(capped, only=alike).items():
            sizes = _sizes(members, what)
            tried = [run for run in members if run.value(what) in sizes]
            for line, mine in lines(tried).items() if len(sizes) > 1 else ():
                place = {"group": group, "line": line, "arm": mine[0].arm, "what": what}
                rows.append(place | {"cap_gib": mine[0].requested.memory_cap_gib} | _search(mine, what, sizes))
    return pd.DataFrame(rows)


def _search(mine: list[Run], what: str, sizes: dict) -> dict:
    ended = [(sizes[run.value(what)], run.value(what), run.done) for run in mine]
    size_of_largest, largest = max(((size, value) for size, value, done in ended if done), default=(None, None))
    size_of_failed, failed = min(((size, value) for size, value, done in ended if not done), default=(None, None))
    row = {"largest": largest, "size": size_of_largest, "failed": failed}
    return row | {"failed_size": size_of_failed, "n": len(mine)}


def _sizes(members: list[Run], what: str) -> dict:
    """Return the values that were tried with what orders them: rows per pass by their number, models by parameters."""
    if what == "micro_batch":
        return {run.micro_batch: run.micro_batch for run in members}
    sizes = {run.model: _parameters(run.model, members) for run in members if run.model}
    return {model: count for model, count in sizes.items() if count}


def _parameters(model: str, members: list[Run]) -> int | None:
    observed = [run.parameters for run in members if run.model == model and run.parameters]
    if observed:
        return observed[0]
    with contextlib.suppress(Stop):  # no built-in shape has this name
        return parameters(named(shape_of(model)))
    return None


def _value(row: pd.Series, name: str) -> str:
    """Return a model, or a number of rows."""
    return str(row[name]) if row["what"] == "model" else f"{int(row[name])} rows per pass"


def sentence(rows: pd.DataFrame) -> str:
    """Return the largest that fits, arm by arm."""
    items = []
    for _, row in rows.iterrows():
        text = "nothing that was tried fits"
        if pd.notna(row["largest"]):
            text = f"the largest that fits is {_value(row, 'largest')}"
        if pd.notna(row["failed"]):
            text += f", and the smallest that runs out of memory is {_value(row, 'failed')}"
        items.append(f"- {conditions(row['group'])}, {row['arm']}: {text}")
    return "\n".join(items)


def title(rows: pd.DataFrame) -> str:
    survived = rows[rows["size"].notna()]
    if survived.empty:
        return "Nothing that was tried fits under the cap"
    best = largest(survived, "size")
    alike = ordered(survived[survived["size"] == best["size"]]["arm"])
    return f"The largest that fits is {_value(best, 'largest')}, under {joined(alike)}"


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """The largest model or batch that each arm trains under a memory cap, and the smallest that runs out of memory."""
    searches = list(parts(rows, "group", "what").values())
    drawing, axes = style.panels([0.95 + 0.36 * len(mine) for mine in searches])
    for ax, mine in zip(axes, searches, strict=True):
        _draw(ax, mine)
    text = "Bar or ring: the largest that fits. Cross: the smallest that runs out of memory. One search for each arm."
    return style.finished(drawing, [], f"{text} The smaller device is emulated.{ONE_MEMORY}")


ONE_MEMORY = " It holds what is offloaded as well: without a GPU, host and device are one memory."


def _draw(ax: Axes, mine: pd.DataFrame) -> None:
    is_model = mine["what"].iloc[0] == "model"
    names = []
    for place, (_, row) in enumerate(mine.iterrows()):
        fits = pd.notna(row["size"])
        if is_model and fits:  # a bar on a logarithmic axis would begin anywhere
            tone = colour(row["arm"])
            (mark,) = ax.plot(row["size"], place, "o", markersize=9, markerfacecolor=CARD, color=tone)
        else:
            length = row["size"] if fits else 0
            (mark,) = ax.barh(place, length, 0.6, hatch="////", edgecolor=CARD, color=colour(row["arm"]))
        style.tell(mark, row["arm"], f"{row['arm']}: {row['largest']} fits, {row.get('failed')} does not")
        if pd.notna(row["failed_size"]):
            ax.plot(row["failed_size"], place, "x", color=INK, markersize=7, markeredgewidth=1.6)
        names.append(f"{row['arm']}: {row['largest'] if fits else 'none'}")
    ax.set_ylim(-0.5, len(mine) - 0.5)
    style.name_bars(ax, names)
    if is_model:
        ax.set_xscale("log")
        style.plain(ax.xaxis)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    ax.set_xlabel("million parameters" if is_model else "rows per pass")
    style.headed(ax, title(mine), mine["group"].iloc[0])


# --- before anything is launched -----------------------------------------------------------------------------------


def fitting(name: str, scale: str, precision: str) -> pd.DataFrame:
    """Return what a rank of each arm of a protocol needs of GPU and host memory, and whether both have it."""
    gpus, host_bytes = gpus_here(), psutil.virtual_memory().total
    rows = []
    for cell in protocol.cells(protocol.read(name), scale):
        if cell.value("precision") == precision:
            needed = needed_by(cell, "cuda" if gpus else "cpu")
            rows.append({"arm": cell.arm} | room(needed, gpus[0].memory_bytes if gpus else None, host_bytes))
    return pd.DataFrame(rows)


def room(needed: Estimate, gpu_bytes: int | None, host_bytes: int) -> dict:
    """Return needed and available memory. Without a GPU, the host holds everything."""
    if gpu_bytes is None:
        on_host = needed.peak_bytes + PROCESS_BYTES
        here = {"gpu_memory": "there is no GPU", "host_memory": f"{size(on_host)} of {size(host_bytes)}"}
        return here | {"fits": on_host <= host_bytes}
    on_host = needed.host_bytes + HOST_PROCESS_BYTES
    free = gpu_bytes - OUTSIDE_AT_MOST_BYTES - FRAGMENTATION * gpu_bytes
    here = {"gpu_memory": f"{size(needed.peak_bytes)} of {size(free)}"}
    here |= {"host_memory": f"{size(on_host)} of {size(host_bytes)}"}
    return here | {"fits": needed.peak_bytes <= free and on_host <= host_bytes}


def needed_by(cell: Cell, device: str) -> Estimate:
    """Return the estimate of a cell that has not run."""
    return estimate(
        Setup.of_arm(
            named(shape_of(str(cell.value("model")))),
            cell.arm,
            ranks=cell.ranks or 1,
            sequence=cell.value("sequence") or SEQUENCE,
            device=device,
            precision=cell.value("precision"),
            micro_batch=cell.value("micro_batch"),
        )
    )
