"""Checkpoints: what they cost in each arm, and whether a run that resumed from one equals one that was never killed."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from study.errors import Stop
from study.io.numbers import number_of
from study.predictor.architecture import named
from study.predictor.memory.checkpoints import checkpoint_bytes
from study.predictor.setup import Setup
from study.records.runs import Run, Runs
from study.records.schema import RankMemory, Resume
from study.report import grouping, style
from study.report.grouping import each
from study.report.style import INK, Look, colour

PROTOCOL = "resume"
ROUTES = {"load_state": "loaded directly", "universal": "universal checkpoint"}
TRIED = {"moved": "load_state", "moved_universal": "universal"}  # if no record says which route was taken
PREDICTED: Look = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": ""}


def of_protocol(runs: Runs, *parts: str) -> list[Run]:
    """Return the runs of these parts of the protocol, in the order of their names."""
    chosen = [run for run in runs.runs if run.record.cell.protocol == PROTOCOL and run.record.cell.part in parts]
    return sorted(chosen, key=lambda run: run.record.run_id)


def finished(runs: Runs, *parts: str) -> list[Run]:
    """Return the runs of some parts that are done, in the order of their arms, as in every table, then by ranks."""
    done = [run for run in of_protocol(runs, *parts) if run.done]
    return sorted(done, key=lambda run: (grouping.in_order(run), run.ranks))


def what_is_saved(run: Run) -> tuple[str, str, int | None]:
    """Return what is saved, and how it is divided."""
    return ", ".join(map(str, (run.task, run.model, run.precision))), run.arm, run.ranks


def table(runs: Runs) -> pd.DataFrame:
    """Return bytes, seconds and memory of an uninterrupted run's last checkpoint, and of loading such a checkpoint."""
    resumed = {what_is_saved(run): run.record.checkpoints.resumes[-1] for run in finished(runs, "killed")}
    of_saved = {what_is_saved(run): run for run in (*finished(runs, "source"), *finished(runs, "whole"))}
    whole = sorted(of_saved.values(), key=lambda run: (grouping.in_order(run), run.ranks))
    return pd.DataFrame([_cost(run, resumed.get(what_is_saved(run))) for run in whole])


def _cost(run: Run, loaded: Resume | None) -> dict:
    saved = run.record.checkpoints.saved[-1]
    theory = predicted_bytes(run)
    parameters = run.parameters or math.nan
    written = [size for size in saved.written_bytes_per_rank if size is not None]
    return {
        "group": what_is_saved(run)[0],
        "arm": run.arm,
        "ranks": run.ranks,
        "predicted_bytes_per_parameter": sum(theory) / parameters if theory else None,
        "bytes_per_parameter": saved.bytes / parameters,
        "predicted_share_of_one_rank": max(theory) / sum(theory) if theory else None,
        "share_of_one_rank": max(written) / sum(written) if written else None,
        "save_s": max(saved.save_s_per_rank),
        "seal_s": saved.seal_s,
        "load_s": max(loaded.load_s_per_rank) if loaded else None,
        "more_while_saving_bytes": _more(saved.before_per_rank, saved.peak_per_rank),
        "more_while_loading_bytes": _more(loaded.before_per_rank, loaded.peak_per_rank) if loaded else None,
    }


def predicted_bytes(run: Run) -> list[float] | None:
    """Return theory's bytes of a run's checkpoint by rank; None for an unknown model."""
    if not (run.model and run.ranks and run.parameters):
        return None
    try:
        model = named(run.model)
    except Stop:
        return None
    return checkpoint_bytes(Setup.of_arm(model, run.arm, ranks=run.ranks, precision=run.precision), run.parameters)


def _more(before: list[RankMemory], peak: list[RankMemory]) -> int | None:
    """Return by how much the peak of a rank was above what it held before, on the rank where that is largest."""
    name = "peak_allocated_bytes" if before and before[0].peak_allocated_bytes is not None else "host_peak_bytes"
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, peak, strict=True)]
    if not pairs or any(None in pair for pair in pairs):
        return None
    return max(after - earlier for earlier, after in pairs)


def sentence(rows: pd.DataFrame) -> str:
    """Return the size of a checkpoint, and how well it is predicted."""
    if rows.empty:
        return ""
    sizes = rows["bytes_per_parameter"]
    off = (rows["bytes_per_parameter"] / rows["predicted_bytes_per_parameter"] - 1).abs().max()
    text = f"**A checkpoint takes {sizes.min():.3g} to {sizes.max():.3g} bytes per parameter**"
    return f"{text}, at most {off:.1%} off the prediction."


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Size of a checkpoint per parameter, measured and predicted."""
    drawing, (ax,) = style.panels([0.8 + 0.2 * len(rows)])
    names = [f"{row.arm}, {number_of(row.ranks, 'ranks')}" for row in each(rows)]
    for place, row in enumerate(each(rows)):
        size, predicted = row.bytes_per_parameter, row.predicted_bytes_per_parameter
        style.stack(ax, place, [(size, colour(row.arm))])
        if not pd.isna(predicted):
            ax.plot([predicted], [place], **PREDICTED)
    style.name_bars(ax, names)
    ax.margins(x=0.1, y=0.02)
    style.headed(ax, rows["group"].iloc[0])
    ax.set_xlabel("size of a checkpoint (bytes per parameter)")
    text = "n = 1 checkpoint for each bar, the last of its run."
    return style.finished(drawing, style.keys([], {"predicted": PREDICTED}), text)


# --- resumed runs --------------------------------------------------------------------------------------------------


def equality(runs: Runs) -> pd.DataFrame:
    """Return differences of losses and rates between killed and resumed runs and runs never killed."""
    whole = {run.arm: run for run in finished(runs, "whole")}
    rows = []
    for run in finished(runs, "killed"):
        if other := whole.get(run.arm):
            resumes = run.record.checkpoints.resumes
            ours = run.record.observed
            theirs = other.record.observed
            row = {
                "arm": run.arm,
                "ranks": run.ranks,
                "interruptions": len(resumes),
                "killed_at_step": resumes[-1].reached,
                "went_on_after_step": resumes[-1].step,
                "losses_differ_by": furthest(run.losses, other.losses),
                "rates_differ_by": furthest(ours.learning_rates, theirs.learning_rates),
                "weights_are_equal": ours.final_weights_checksum == theirs.final_weights_checksum,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def moves(runs: Runs) -> pd.DataFrame:
    """Return each move from an arm and its ranks to others: loaded or refused, by which route, and the difference."""
    sources = {run.record.run_id: run for run in of_protocol(runs, "source")}
    rows = []
    for run in of_protocol(runs, *TRIED):
        before, _, after = run.record.run_id.partition("-")[2].partition("-to-")
        row: dict[str, str | bool | float | None] = {"from": before, "to": after}
        row["route"] = ROUTES[TRIED[run.record.cell.part or ""]]
        row |= {"loads": run.done, "losses_differ_by": None, "load_s": None}
        if resumes := run.record.checkpoints.resumes:
            source = sources.get(resumes[-1].run_id)
            row |= {"route": ROUTES[resumes[-1].route or ""], "load_s": max(resumes[-1].load_s_per_rank)}
            row["losses_differ_by"] = furthest(run.losses, source.losses) if source else None
        rows.append(row | {"message": run.record.error.message.partition("\n")[0] if run.record.error else None})
    return pd.DataFrame(rows)


def furthest(losses: Iterable[float], others: Iterable[float]) -> float | None:
    """Return the largest relative difference of two curves; None if their lengths differ."""
    ours, theirs = np.array([*losses], float), np.array([*others], float)
    if len(ours) != len(theirs) or not len(ours):
        return None
    return float((np.abs(ours - theirs) / np.where(theirs, np.abs(theirs), 1)).max())


def sentence_of_resumed(killed: pd.DataFrame, moved: pd.DataFrame) -> str:
    """Return how many resumed runs have the losses of the run that they are compared with."""
    off = pd.Series([value for rows in (killed, moved) for value in rows.get("losses_differ_by", ())]).dropna()
    if off.empty:
        return ""
    text = f"{(off == 0).sum()} of {len(off)} resumed runs have the same losses, bit for bit"
    return f"**{text}**; the largest difference is {off.max():.0e}."
