"""Losses: how far each arm is from the baseline, step by step."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.io.numbers import nats
from study.records import stats
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import by, groups, lines
from study.records.runs import Runs
from study.report import style
from study.report.grouping import columns
from study.report.style import EXACT, colour, conditions, marker

DASH = 4  # points: lines that coincide alternate as dashes of this length
NEAR = 0.02  # share of the drawn range: lines that differ by less coincide


def table(runs: Runs, baseline: str = "ddp", tasks: Iterable[str] = ()) -> list[dict]:
    """The loss of every step of every run, and its difference from that of the baseline's run with the same seed.

    In a group without the baseline, the plainest arm takes its place; `against` names it. Runs with other rows per step
    than the baseline are not compared.
    """
    chosen = [run for run in runs.done if run.losses and not run.virtual and not run.record.is_script]
    rows = []
    for group, members in groups(run for run in chosen if not tasks or run.task in tasks).items():
        reference = baseline_arm(members, baseline)
        for line, run in ((line, run) for line, repeats in lines(members).items() for run in repeats):
            against = loss_partner(run, members, reference)
            distances = loss_distances(run, against) if against else []
            about = {"group": group, "line": line, "arm": run.arm, "run": run.name}
            about |= columns(run, "seed", "rows_per_step", "kind")
            for number, loss in enumerate(run.losses):
                difference = distances[number] if against else None
                compared = {"difference": difference, "against": against and against.arm}
                rows.append(about | {"step": number + 1, "loss": loss} | compared)
    return rows


def parity(rows: list[dict]) -> list[dict]:
    """For each line: its largest difference from the baseline, and how far the baseline's seeds are apart."""
    apart = {group: _seeds_apart(mine) for (group,), mine in by(rows, "group").items()}
    distances = []
    for (group, line, arm), mine in by(rows, "group", "line", "arm").items():
        steps = max(row["step"] for row in mine)
        differences = [row["difference"] for row in mine if row["difference"] is not None]
        final = stats.median([row["loss"] for row in mine if row["step"] == steps])
        against = ", ".join(sorted({row["against"] for row in mine} - {None})) or None
        about = {"group": group, "line": line, "arm": arm, "n": len({row["run"] for row in mine}), "steps": steps}
        distance = {"largest difference": max(differences, default=None)}
        distance["seeds differ by"] = apart[group] if differences else None
        distances.append(about | {"final loss": final, "against": against} | distance)
    return distances


def _seeds_apart(rows: list[dict]) -> float | None:
    """The spread of the baseline's losses over seeds (median over steps); None with one seed."""
    references = {row["against"] for row in rows}
    frame = pd.DataFrame([row for row in rows if row["arm"] in references])
    if frame.empty:
        return None
    medians = frame.groupby(["line", "rows per step", "step", "seed"])["loss"].median().unstack("seed")
    spreads = (medians.max(axis=1) - medians.min(axis=1))[medians.count(axis=1) > 1]
    return float(spreads.median()) if len(spreads) else None


def sentence(rows: list[dict]) -> str:
    """From `losses.parity`: how far the arms are apart, and how far seeds are."""
    compared = [row for row in rows if row["largest difference"] is not None]
    if not compared:
        why = "No losses are compared: no two arms here have runs with the same seed, rows per step and steps."
        return why if rows else ""
    worst = max(compared, key=lambda row: row["largest difference"])
    furthest = f"{worst['line']} against {worst['against']} in {conditions(worst['group'])}"
    text = f"**At every step, losses are within {nats(worst['largest difference'])} of the baseline's**"
    text += f" ({len(compared)} comparison{'s' * (len(compared) > 1)}; furthest: {furthest})."
    usual = [row["largest difference"] for row in compared if _is_usual(row["group"])]
    if usual and len(usual) < len(compared):
        text += f" In fp32 with AdamW, the largest difference is {nats(max(usual))}."
    if seeds := [row["seeds differ by"] for row in compared if row["seeds differ by"]]:
        text += (
            f" For comparison, another seed alone changes the loss by {stats.median(seeds):.2g} (median over steps)."
        )
    return text


def _is_usual(group: str) -> bool:
    """fp32 with AdamW: a label names the optimizer only if groups differ in it."""
    named = [part.removeprefix("optimizer ") for part in group.split(", ") if part.startswith("optimizer ")]
    return "fp32" in group.split(", ") and named in ([], ["adamw"])


def title(rows: list[dict]) -> str:
    compared = [row for row in rows if row["difference"] is not None]
    if not compared:
        return "Losses without a run to compare them with"
    worst = max(compared, key=lambda row: row["difference"])
    if worst["difference"] == 0:
        return f"Every arm's losses equal {worst['against']}'s, bit for bit"
    furthest = nats(worst["difference"])
    return f"At every step, each arm's loss is within {furthest} of {worst['against']}'s"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Training loss of every arm at each step, and how far it is from the baseline's loss, one point per step."""
    compared, entries = [row for row in rows if row["difference"] is not None], []
    of_line = by(rows, "line", "arm")
    others = {line: mine for (line,), mine in by(compared, "line").items()}
    drawing, axes = style.panels([2.3, 0.75 + 0.22 * len(others)] if compared else [2.5])
    usual = Counter(row["rows per step"] for row in rows).most_common(1)[0][0]
    dashes = {}
    for together in _coinciding({line: mine for (line, _), mine in of_line.items()}):
        gap = DASH * (len(together) - 1)
        dashes |= {line: (DASH * place, (DASH, gap)) if gap else "-" for place, line in enumerate(together)}
    for (line, arm), mine in of_line.items():
        band(axes[0], mine, "loss", colour(arm), linestyle=dashes[line])
        entries += style.keys(mine)
        unusual = mine[0]["rows per step"] != usual
        entries[-1].set_label(f"{line}, {mine[0]['rows per step']} rows/step" if unusual else line)
    style.headed(axes[0], title(rows), rows[0]["group"])
    axes[0].set(xlabel="optimizer step", ylabel="training loss (nats)")
    if compared:
        _distances(axes[1], others)
    n = style.counted([{"n": len({row["run"] for row in mine})} for mine in by(rows, "line").values()])
    text = f"Lines: means over runs ({n}). Bands: from the lowest to the highest run. Lines that coincide"
    text += " alternate as dashes."
    text += " Lower panel: the largest difference of any run at each step." if compared else ""
    most = 3 if max(len(entry.get_label()) for entry in entries) < 16 else 2
    return style.finished(drawing, entries, text, most)


def _coinciding(rows_of: dict[str, list[dict]]) -> list[list[str]]:
    """Groups of lines that look like one: their means never differ by more than a fiftieth of the drawn range."""
    means = {
        line: [np.mean([row["loss"] for row in each]) for each in by(mine, "step").values()]
        for line, mine in rows_of.items()
    }
    least = NEAR * (max(map(max, means.values())) - min(map(min, means.values())))
    together: list[list[str]] = []
    for line, curve in means.items():
        for group in together:
            first = means[group[0]]
            if len(first) == len(curve) and np.max(np.abs(np.subtract(first, curve))) <= least:
                group.append(line)
                break
        else:
            together.append([line])
    return together


def _distances(ax: Axes, rows_of: dict[str, list[dict]]) -> None:
    """A row for each arm, a point for each step, on a logarithmic axis that has a place for zero."""
    for place, (line, mine) in enumerate(rows_of.items()):
        arm, steps = mine[0]["arm"], by(mine, "step").values()
        largest = [max(EXACT, *(row["difference"] for row in of_step)) for of_step in steps]
        look = {"color": colour(arm), "markersize": 4, "alpha": 0.6, "linestyle": ""}
        (points,) = ax.plot(largest, [place] * len(largest), marker(arm), **look)
        most = max(largest)
        style.tell(points, arm, f"{line}: at most {nats(most if most > EXACT else 0.0)}, in {len(largest)} steps")
    against = ", ".join(sorted({row["against"] for mine in rows_of.values() for row in mine} - {None}))
    style.name_bars(ax, rows_of)
    ax.set(xscale="log", xlabel=f"difference from {against}'s loss at each step (nats)", xlim=(EXACT / 1.6, None))
    ax.margins(y=0.08)
    style.from_zero(ax.xaxis)


def band(ax: Axes, rows: list[dict], name: str, tone: str, **look) -> None:
    """The mean over runs at each step as a line, from the smallest to the largest value as a band."""
    values = {step: [row[name] for row in mine] for (step,), mine in by(rows, "step").items()}
    low, mean, high = np.array([(min(each), np.mean(each), max(each)) for each in values.values()]).T
    ax.fill_between(list(values), low, high, color=tone, alpha=0.15, linewidth=0)
    (line,) = ax.plot(list(values), mean, color=tone, **look)
    style.tell(line, rows[0].get("arm", ""), f"{rows[0].get('line', '')}: from {mean[0]:.4g} to {mean[-1]:.4g}")
