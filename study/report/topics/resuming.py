"""Resuming from a checkpoint: whether the run equals one never killed, and which moves to other arms load."""

from matplotlib.figure import Figure

from study.records.runs import Runs
from study.records.schema import Resume
from study.report import style
from study.report.style import EXACT, INK, colour
from study.report.topics.checkpoints import finished, in_order, of_protocol, what_is_saved

ROUTES = {"load_state": "loaded directly", "universal": "universal checkpoint"}
TRIED = {"moved": "load_state", "moved_universal": "universal"}  # if no record says which route was taken
MARKS = {"killed, and resumed": "o", "loaded directly": "D", "universal checkpoint": "^"}  # by route


def equality(runs: Runs) -> list[dict]:
    """Killed and resumed runs against runs never killed: differences of losses and rates, equality of weights."""
    whole = {run.arm: run for run in finished(runs, "whole")}
    rows = []
    for run in in_order(finished(runs, "killed")):
        other, resume = whole.get(run.arm), run.record.checkpoints.resumes[-1]
        if other is not None:
            rows.append(
                {
                    "arm": run.arm,
                    "ranks": run.ranks,
                    "interruptions": len(run.record.checkpoints.resumes),
                    "killed at step": resume.reached,
                    "went on after step": resume.step,
                    "losses differ by": furthest(run.record.loss.train, other.record.loss.train),
                    "rates differ by": furthest(
                        run.record.observed.learning_rates, other.record.observed.learning_rates
                    ),
                    "weights are equal": run.record.observed.final_weights_checksum
                    == other.record.observed.final_weights_checksum,
                }
            )
    return rows


def moves(runs: Runs) -> list[dict]:
    """Each move from an arm and its ranks to others: loaded or refused, by which route, and how far losses differ."""
    sources = {run.record.run_id: run for run in of_protocol(runs, "source")}
    rows = []
    for run in of_protocol(runs, "moved", "moved_universal"):
        name = run.record.run_id.partition("-")[2]
        before, _, after = name.partition("-to-")
        resume: Resume | None = next(reversed(run.record.checkpoints.resumes), None)
        source = sources.get(resume.run_id) if resume else None
        rows.append(
            {
                "from": before,
                "to": after,
                "route": ROUTES[resume.route if resume else TRIED[run.record.cell.part]],
                "loads": run.record.status == "done",
                "losses differ by": source and furthest(run.record.loss.train, source.record.loss.train),
                "load s": resume and max(resume.load_s_per_rank),
                "words": run.record.error.message.partition("\n")[0] if run.record.error else None,
            }
        )
    return rows


def table(runs: Runs) -> list[dict]:
    """For every resumed run: how far its losses are from those of the run it is compared with."""
    chosen = (*finished(runs, "killed"), *finished(runs, "moved"), *finished(runs, "moved_universal"))
    group = " and ".join(dict.fromkeys(what_is_saved(run)[0] for run in chosen))
    killed = [
        row | {"line": f"{row['arm']}, ranks: {row['ranks']}", "route": "killed, and resumed"} for row in equality(runs)
    ]
    moved = [
        row | {"line": f"{row['from']} to {row['to']}", "arm": row["to"].rpartition("-")[0]} for row in moves(runs)
    ]
    names = ("arm", "line", "route", "losses differ by")
    rows = [{"group": group} | {name: row[name] for name in names} for row in (*killed, *moved)]
    return [row for row in rows if row["losses differ by"] is not None]


def furthest(losses: list[float], others: list[float]) -> float | None:
    """The largest relative difference of two curves; None if their lengths differ."""
    if len(losses) != len(others) or not losses:
        return None
    return max(abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, others, strict=True))


def title(rows: list[dict]) -> str:
    worst = max(row["losses differ by"] for row in rows)
    exact = sum(row["losses differ by"] == 0 for row in rows)
    if worst == 0:
        return f"All {exact} resumed runs have the same losses, bit for bit"
    text = f"{exact} of {len(rows)} resumed runs have the same losses, bit for bit"
    return f"{text}; the others differ by {worst:.0e} at most"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Largest difference between the losses of a resumed run and of the run it is compared with."""
    drawing, (ax,) = style.panels([0.8 + 0.19 * len(rows)])
    for place, row in enumerate(rows):
        arm, off = row["arm"], row["losses differ by"]
        (mark,) = ax.plot([max(off, EXACT)], [place], MARKS[row["route"]], color=colour(arm), markersize=6)
        style.tell(mark, arm, f"{row['line']}, {row['route']}: {f'{off:.1e} off' if off else 'the same bits'}")
    style.name_bars(ax, [row["line"] for row in rows])
    ax.set(xscale="log", xlabel="largest relative difference of a loss")
    ax.set_xlim(EXACT / 1.8, 3 * max(1e-6, *(row["losses differ by"] for row in rows)))
    ax.margins(y=0.02)
    style.from_zero(ax.xaxis)
    style.headed(ax, title(rows), rows[0]["group"])
    shown = {row["route"] for row in rows}
    marks = {route: {"color": INK, "marker": mark, "linestyle": ""} for route, mark in MARKS.items() if route in shown}
    text = "n = 1 run for each point. Killed runs use dropout; they are compared with the same run without the kill."
    text += " Moves use no dropout; they are compared with the run that saved. The number after an arm is its ranks."
    return style.finished(drawing, style.keys([], marks), text)
