"""Checkpoints: what they cost in each arm, and whether a run that resumed from one equals one that was never killed."""

import math
from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.errors import Stop
from study.predictor.architecture import named
from study.predictor.memory.checkpoints import CheckpointBytes, checkpoint_bytes
from study.predictor.setup import Setup
from study.records.runs import Run, Runs
from study.records.schema import RankMemory, Resume
from study.report import grouping, style
from study.report.grouping import each
from study.report.style import EXACT, FAINT, INK, Look, colour

PROTOCOL = "resume"
ROUTES = {"load_state": "loaded directly", "universal": "universal checkpoint"}
TRIED = {"moved": "load_state", "moved_universal": "universal"}  # if no record says which route was taken
MARKS = {"killed, and resumed": "o", "loaded directly": "D", "universal checkpoint": "^"}  # by route
PREDICTED: Look = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": ""}
LOAD: Look = {"color": INK, "marker": "D", "markersize": 4.5, "linestyle": ""}
PARTS = {"save_s": style.SKY, "seal_s": style.YELLOW}  # of the seconds that saving takes


def of_protocol(runs: Runs, *parts: str) -> list[Run]:
    """Return the runs of these parts of the protocol, in the order of their names."""
    chosen = [run for run in runs.runs if run.record.cell.protocol == PROTOCOL and run.record.cell.part in parts]
    return sorted(chosen, key=lambda run: run.record.run_id)


def finished(runs: Runs, part: str) -> list[Run]:
    """Return the runs of a part that are done."""
    return [run for run in of_protocol(runs, part) if run.record.status == "done"]


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return runs in the order of their arms, as in every table, then by ranks."""
    return sorted(runs, key=lambda run: (grouping.in_order(run), run.ranks))


def what_is_saved(run: Run) -> tuple[str, str, int | None]:
    """Return what is saved, and how it is divided."""
    return ", ".join(map(str, (run.task, run.model, run.precision))), run.arm, run.ranks


def table(runs: Runs) -> pd.DataFrame:
    """Return bytes, seconds and memory of an uninterrupted run's last checkpoint, and of loading such a checkpoint."""
    resumed = {what_is_saved(run): run.record.checkpoints.resumes[-1] for run in finished(runs, "killed")}
    whole = {what_is_saved(run): run for run in (*finished(runs, "source"), *finished(runs, "whole"))}
    return pd.DataFrame([_cost(run, resumed.get(what_is_saved(run))) for run in in_order(whole.values())])


def _cost(run: Run, loaded: Resume | None) -> dict:
    saved = run.record.checkpoints.saved[-1]
    theory = predicted_bytes(run)
    parameters = run.parameters or math.nan
    written = [size for size in saved.written_bytes_per_rank if size is not None]
    row = {
        "group": what_is_saved(run)[0],
        "arm": run.arm,
        "ranks": run.ranks,
        "predicted_bytes_per_parameter": theory.total / parameters if theory else None,
        "bytes_per_parameter": saved.bytes / parameters,
        "predicted_share_of_one_rank": max(theory.per_rank) / theory.total if theory else None,
        "share_of_one_rank": max(written) / sum(written) if written else None,
        "save_s": max(saved.save_s_per_rank),
        "seal_s": saved.seal_s,
        "load_s": None,
        "more_while_saving_bytes": _more(saved.before_per_rank, saved.peak_per_rank),
        "more_while_loading_bytes": None,
    }
    if loaded:
        row["load_s"] = max(loaded.load_s_per_rank)
        row["more_while_loading_bytes"] = _more(loaded.before_per_rank, loaded.peak_per_rank)
    return row


def predicted_bytes(run: Run) -> CheckpointBytes | None:
    """Return theory's bytes of a run's checkpoint; None for an unknown model."""
    if not (run.model and run.ranks and run.parameters):
        return None
    try:
        model = named(run.model)
    except Stop:
        return None
    setup = Setup.of_arm(model, run.arm, ranks=run.ranks, precision=run.precision)
    return checkpoint_bytes(setup, run.parameters)


def _more(before: list[RankMemory], peak: list[RankMemory]) -> int | None:
    """Return by how much the peak of a rank was above what it held before, on the rank where that is largest."""
    name = "peak_allocated_bytes" if before and before[0].peak_allocated_bytes is not None else "host_peak_bytes"
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, peak, strict=True)]
    if not pairs or any(None in pair for pair in pairs):
        return None
    return max(after - earlier for earlier, after in pairs)


def title(rows: pd.DataFrame) -> str:
    sizes = rows["bytes_per_parameter"]
    text = f"A checkpoint takes {sizes.min():.3g} to {sizes.max():.3g} bytes per parameter"
    errors = (sizes / rows["predicted_bytes_per_parameter"] - 1).abs().dropna()
    return f"{text}, at most {errors.max():.1%} off the prediction" if len(errors) else text


def title_of_seconds(rows: pd.DataFrame) -> str:
    saved, loaded = rows["save_s"], rows["load_s"].dropna()
    text = f"Saving takes {saved.min():.2g} to {saved.max():.2g} s"
    return f"{text}, loading {loaded.min():.2g} to {loaded.max():.2g} s" if len(loaded) else text


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Size of a checkpoint per parameter, measured and predicted, and the seconds to save and to load it."""
    several = rows["arm"].duplicated(keep=False)
    names = [
        f"{row.arm}, {row.ranks} ranks" if is_one else row.arm for row, is_one in zip(each(rows), several, strict=True)
    ]
    drawing, (above, below) = style.panels([0.8 + 0.2 * len(rows)] * 2)
    for place, (name, row) in enumerate(zip(names, rows.to_dict("records"), strict=True)):
        _draw_size(above, place, name, row)
        _draw_seconds(below, place, name, row)
    for ax in (above, below):
        style.name_bars(ax, names)
        ax.margins(x=0.1, y=0.02)
    style.headed(above, title(rows), rows["group"].iloc[0])
    style.headed(below, title_of_seconds(rows), "")
    above.set_xlabel("size of a checkpoint (bytes per parameter)")
    below.set_xlabel("seconds of the slowest rank")
    entries = [*style.keys([], {"predicted": PREDICTED, "load": LOAD})]
    patches = style.patches({name.removesuffix("_s"): tone for name, tone in PARTS.items()})
    text = "n = 1 checkpoint for each bar, the last of its run. Seal: checksums of all files, and waiting for the disk."
    text += " No load is drawn where no run resumed from the checkpoint."
    return style.finished(drawing, [*entries, *patches], text, 4)


def _draw_size(ax: Axes, place: int, name: str, row: dict) -> None:
    size, predicted = row["bytes_per_parameter"], row["predicted_bytes_per_parameter"]
    (bar,) = ax.barh(place, size, 0.7, color=colour(row["arm"]), alpha=0.75)
    words = f"{name}: {size:.4g} bytes per parameter"
    if pd.notna(predicted):
        words += f", predicted {predicted:.4g}"
        ax.plot([predicted], [place], **PREDICTED)
    style.tell(bar, row["arm"], words)
    style.annotate(ax, f"{size:.3g}", size, place, 8)


def _draw_seconds(ax: Axes, place: int, name: str, row: dict) -> None:
    left = 0.0
    for part, tone in PARTS.items():
        (bar,) = ax.barh(place, row[part], 0.7, left, color=tone, edgecolor=FAINT, linewidth=0.6)
        style.tell(bar, row["arm"], f"{name}: {row[part]:.2g} s to {part.removesuffix('_s')}")
        left += row[part]
    if pd.notna(row["load_s"]):
        (mark,) = ax.plot([row["load_s"]], [place], **LOAD)
        style.tell(mark, row["arm"], f"{name}: {row['load_s']:.2g} s to load")


# --- resumed runs --------------------------------------------------------------------------------------------------


def equality(runs: Runs) -> pd.DataFrame:
    """Return differences of losses and rates between killed and resumed runs and runs never killed."""
    whole = {run.arm: run for run in finished(runs, "whole")}
    pairs = [(run, whole[run.arm]) for run in in_order(finished(runs, "killed")) if run.arm in whole]
    return pd.DataFrame([_equality(run, other) for run, other in pairs])


def _equality(run: Run, other: Run) -> dict:
    resumes = run.record.checkpoints.resumes
    ours, theirs = run.record.observed, other.record.observed
    return {
        "arm": run.arm,
        "ranks": run.ranks,
        "interruptions": len(resumes),
        "killed_at_step": resumes[-1].reached,
        "went_on_after_step": resumes[-1].step,
        "losses_differ_by": furthest(run.losses, other.losses),
        "rates_differ_by": furthest(ours.learning_rates, theirs.learning_rates),
        "weights_are_equal": ours.final_weights_checksum == theirs.final_weights_checksum,
    }


def moves(runs: Runs) -> pd.DataFrame:
    """Return each move from an arm and its ranks to others: loaded or refused, by which route, and the difference."""
    sources = {run.record.run_id: run for run in of_protocol(runs, "source")}
    return pd.DataFrame([_move(run, sources) for run in of_protocol(runs, "moved", "moved_universal")])


def _move(run: Run, sources: dict[str, Run]) -> dict:
    name = run.record.run_id.partition("-")[2]
    before, _, after = name.partition("-to-")
    row: dict[str, str | bool | float | None] = {"from": before, "to": after}
    row["route"] = ROUTES[TRIED[run.record.cell.part or ""]]
    row |= {"loads": run.record.status == "done", "losses_differ_by": None, "load_s": None}
    if resumes := run.record.checkpoints.resumes:
        source = sources.get(resumes[-1].run_id)
        row |= {"route": ROUTES[resumes[-1].route or ""], "load_s": max(resumes[-1].load_s_per_rank)}
        row["losses_differ_by"] = furthest(run.losses, source.losses) if source else None
    return row | {"message": run.record.error.message.partition("\n")[0] if run.record.error else None}


def resumed(runs: Runs) -> pd.DataFrame:
    """Return for every resumed run how far its losses are from those of the run it is compared with."""
    chosen = (*finished(runs, "killed"), *finished(runs, "moved"), *finished(runs, "moved_universal"))
    group = " and ".join(dict.fromkeys(what_is_saved(run)[0] for run in chosen))
    rows = []
    for row in equality(runs).to_dict("records"):
        rows.append(row | {"line": f"{row['arm']}, ranks: {row['ranks']}", "route": "killed, and resumed"})
    for row in moves(runs).to_dict("records"):
        rows.append(row | {"line": f"{row['from']} to {row['to']}", "arm": row["to"].rpartition("-")[0]})
    table = pd.DataFrame(rows, columns=["arm", "line", "route", "losses_differ_by"]).assign(group=group)
    return table[table["losses_differ_by"].notna()]


def furthest(losses: list[float], others: list[float]) -> float | None:
    """Return the largest relative difference of two curves; None if their lengths differ."""
    if len(losses) != len(others) or not losses:
        return None
    return max(abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, others, strict=True))


def title_of_resumed(rows: pd.DataFrame) -> str:
    worst = rows["losses_differ_by"].max()
    exact = int((rows["losses_differ_by"] == 0).sum())
    if worst == 0:
        return f"All {exact} resumed runs have the same losses, bit for bit"
    text = f"{exact} of {len(rows)} resumed runs have the same losses, bit for bit"
    return f"{text}; the others differ by {worst:.0e} at most"


@style.figure
def figure_of_resumed(rows: pd.DataFrame) -> Figure:
    """Largest difference between the losses of a resumed run and of the run it is compared with."""
    drawing, (ax,) = style.panels([0.8 + 0.19 * len(rows)])
    for place, row in enumerate(each(rows)):
        off = row.losses_differ_by
        (mark,) = ax.plot([max(off, EXACT)], [place], MARKS[row.route], color=colour(row.arm), markersize=6)
        style.tell(mark, row.arm, f"{row.line}, {row.route}: {f'{off:.1e} off' if off else 'the same bits'}")
    style.name_bars(ax, rows["line"])
    ax.set(xscale="log", xlabel="largest relative difference of a loss")
    ax.set_xlim(EXACT / 1.8, 3 * max(1e-6, rows["losses_differ_by"].max()))
    ax.margins(y=0.02)
    style.from_zero(ax.xaxis)
    style.headed(ax, title_of_resumed(rows), rows["group"].iloc[0])
    present = set(rows["route"])
    marks: dict[str, Look] = {
        route: {"color": INK, "marker": mark, "linestyle": ""} for route, mark in MARKS.items() if route in present
    }
    text = "n = 1 run for each point. Killed runs use dropout; they are compared with the same run without the kill."
    text += " Moves use no dropout; they are compared with the run that saved. The number after an arm is its ranks."
    return style.finished(drawing, style.keys([], marks), text)
