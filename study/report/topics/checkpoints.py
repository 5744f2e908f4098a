"""Checkpoints: what they cost in each arm."""

from collections.abc import Iterable

from matplotlib.figure import Figure

from study.errors import Stop
from study.predictor.architecture import named
from study.predictor.memory.checkpoints import checkpoint_bytes
from study.predictor.setup import Setup
from study.records.groups import by
from study.records.runs import Run, Runs
from study.records.schema import RankMemory
from study.report import style
from study.report.style import FAINT, INK, colour
from study.spec.arms import all_paths

PROTOCOL = "resume"


def of_protocol(runs: Runs, *parts: str) -> list[Run]:
    """The runs of these parts of the protocol, in the order of their names."""
    chosen = [run for run in runs.runs if (run.record.cell.protocol, run.record.cell.part in parts) == (PROTOCOL, True)]
    return sorted(chosen, key=lambda run: run.record.run_id)


def finished(runs: Runs, part: str) -> list[Run]:
    return [run for run in of_protocol(runs, part) if run.record.status == "done"]


def table(runs: Runs) -> list[dict]:
    """By arm: bytes, seconds and memory of an uninterrupted run's last checkpoint, and of loading such a checkpoint."""
    rows = []
    resumed = {what_is_saved(run): run.record.checkpoints.resumes[-1] for run in finished(runs, "killed")}
    whole = {what_is_saved(run): run for run in (*finished(runs, "source"), *finished(runs, "whole"))}
    for run in in_order(whole.values()):
        saved, theory = run.record.checkpoints.saved[-1], predicted_bytes(run)
        parameters, loaded = run.parameters, resumed.get(what_is_saved(run))
        written = [size for size in saved.written_bytes_per_rank if size is not None]
        rows.append(
            {
                "group": what_is_saved(run)[0],
                "arm": run.arm,
                "ranks": run.ranks,
                "predicted bytes a parameter": theory and theory.total / parameters,
                "bytes a parameter": saved.bytes / parameters,
                "predicted share of one rank": theory and max(theory.per_rank) / theory.total,
                "share of one rank": max(written) / sum(written) if written else None,
                "save s": max(saved.save_s_per_rank),
                "seal s": saved.seal_s,
                "load s": loaded and max(loaded.load_s_per_rank),
                "more memory while saving": _more(saved.before_per_rank, saved.peak_per_rank),
                "more memory while loading": loaded and _more(loaded.before_per_rank, loaded.peak_per_rank),
            }
        )
    return rows


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Runs in the order of their arms, as in every table, then by ranks."""
    place = {arm: number for number, arm in enumerate(all_paths())}
    return sorted(runs, key=lambda run: (place.get(run.arm, len(place)), run.ranks))


def what_is_saved(run: Run) -> tuple[str, str, int]:
    """What is saved, and how it is divided."""
    return ", ".join([run.task, run.model, run.precision]), run.arm, run.ranks


def predicted_bytes(run: Run):
    """Theory's bytes of a run's checkpoint; None for an unknown model."""
    try:
        model = named(run.model)
    except Stop:
        return None
    setup = Setup.of_arm(model, run.arm, ranks=run.ranks, precision=run.precision)
    return checkpoint_bytes(setup, run.parameters)


def _more(before: list[RankMemory], peak: list[RankMemory]) -> int | None:
    """By how much the peak of a rank was above what it held before, on the rank where that is largest."""
    name = "peak_allocated_bytes" if before and before[0].peak_allocated_bytes is not None else "host_peak_bytes"
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, peak, strict=True)]
    return None if not pairs or None in (each for pair in pairs for each in pair) else max(b - a for a, b in pairs)


def title(rows: list[dict]) -> str:
    low, high = (extreme(row["bytes a parameter"] for row in rows) for extreme in (min, max))
    text = f"A checkpoint takes {low:.3g} to {high:.3g} bytes per parameter"
    pairs = [(row["bytes a parameter"], row["predicted bytes a parameter"]) for row in rows]
    errors = [abs(size / predicted - 1) for size, predicted in pairs if predicted]
    return f"{text}, at most {max(errors):.1%} off the prediction" if errors else text


def title_of_seconds(rows: list[dict]) -> str:
    saved, loaded = ([row[name] for row in rows if row[name] is not None] for name in ("save s", "load s"))
    text = f"Saving takes {min(saved):.2g} to {max(saved):.2g} s"
    return f"{text}, loading {min(loaded):.2g} to {max(loaded):.2g} s" if loaded else text


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Size of a checkpoint per parameter, measured and predicted, and the seconds to save and to load it."""
    several = {arm for (arm,), mine in by(rows, "arm").items() if len(mine) > 1}
    names = [f"{row['arm']}, {row['ranks']} ranks" if row["arm"] in several else row["arm"] for row in rows]
    drawing, (above, below) = style.panels([0.8 + 0.2 * len(rows)] * 2)
    exact = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": ""}
    load = {"color": INK, "marker": "D", "markersize": 4.5, "linestyle": ""}
    parts = {"save s": style.SKY, "seal s": style.YELLOW}
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        arm, size, predicted = row["arm"], row["bytes a parameter"], row["predicted bytes a parameter"]
        (bar,) = above.barh(place, size, 0.7, color=colour(arm), alpha=0.75)
        words = f", predicted {predicted:.4g}" if predicted else ""
        style.tell(bar, arm, f"{name}: {size:.4g} bytes per parameter{words}")
        above.annotate(f"{size:.3g}", (size, place), (8, 0), textcoords="offset points", va="center", fontsize=8.5)
        if predicted:
            above.plot([predicted], [place], **exact)
        left = 0.0
        for part, tone in parts.items():
            (bar,) = below.barh(place, row[part], 0.7, left, color=tone, edgecolor=FAINT, linewidth=0.6)
            style.tell(bar, arm, f"{name}: {row[part]:.2g} s to {part.removesuffix(' s')}")
            left += row[part]
        if row["load s"] is not None:
            (mark,) = below.plot([row["load s"]], [place], **load)
            style.tell(mark, arm, f"{name}: {row['load s']:.2g} s to load")
    for ax in (above, below):
        style.name_bars(ax, names)
        ax.margins(x=0.1, y=0.02)
    style.headed(above, title(rows), rows[0]["group"])
    style.headed(below, title_of_seconds(rows), "")
    above.set_xlabel("size of a checkpoint (bytes per parameter)")
    below.set_xlabel("seconds of the slowest rank")
    entries = style.keys([], {"predicted": exact, "load": load})
    entries += style.patches({"save": style.SKY, "seal": style.YELLOW})
    text = "n = 1 checkpoint for each bar, the last of its run. Seal: checksums of all files, and waiting for the disk."
    text += " No load is drawn where no run resumed from the checkpoint."
    return style.finished(drawing, entries, text, 4)
