"""Checkpoints: what they cost in each arm, whether a resumed run is one never killed, and which moves load."""

from collections.abc import Iterable

from study.errors import Stop
from study.records.runs import Run, Runs
from study.records.schema import RankMemory, Resume
from study.spec.arms import all_paths
from study.theory.architecture import named
from study.theory.checkpoints import checkpoint_bytes
from study.theory.setup import Setup

PROTOCOL = "resume"
ROUTES = {"load_state": "as it is", "universal": "universal checkpoint"}
TRIED = {"moved": "load_state", "moved_universal": "universal"}  # where no record says which was taken


def of_protocol(runs: Runs, *parts: str) -> list[Run]:
    """The runs of these parts of the protocol, in the order of their names."""
    chosen = [run for run in runs.runs if (run.record.cell.protocol, run.record.cell.part in parts) == (PROTOCOL, True)]
    return sorted(chosen, key=lambda run: run.record.run_id)


def costs(runs: Runs) -> list[dict]:
    """Bytes, seconds and memory of the last checkpoint of an uninterrupted run, and of going on from one, by arm."""
    rows = []
    resumed = {_place(run): run.record.checkpoints.resumes[-1] for run in finished(runs, "killed")}
    whole = {_place(run): run for run in (*finished(runs, "source"), *finished(runs, "whole"))}
    for run in in_order(whole.values()):
        saved, theory = run.record.checkpoints.saved[-1], predicted_bytes(run)
        parameters, loaded = run.parameters, resumed.get(_place(run))
        written = [size for size in saved.written_bytes_per_rank if size is not None]
        rows.append(
            {
                "group": _place(run)[0],
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
    """Arms in the order of every table, the fewest ranks first."""
    place = {arm: number for number, arm in enumerate(all_paths())}
    return sorted(runs, key=lambda run: (place.get(run.arm, len(place)), run.ranks))


def _place(run: Run) -> tuple[str, str, int]:
    """What is saved, and how it is divided."""
    return ", ".join([run.task, run.model, run.precision]), run.arm, run.ranks


def predicted_bytes(run: Run):
    """Theory's bytes of a run's checkpoint; None for a model that it does not know."""
    try:
        model = named(run.model)
    except Stop:
        return None
    setup = Setup.of_arm(model, run.arm, ranks=run.ranks, precision=run.precision)
    return checkpoint_bytes(setup, run.parameters)


def equality(runs: Runs) -> list[dict]:
    """Killed and resumed against never killed: by how much losses and rates differ at most, and whether weights do."""
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


def went_on(runs: Runs) -> list[dict]:
    """How far the losses of all that went on from a checkpoint are from those that they should be."""
    chosen = (*finished(runs, "killed"), *finished(runs, "moved"), *finished(runs, "moved_universal"))
    group = " and ".join(dict.fromkeys(_place(run)[0] for run in chosen))
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
    """The largest relative difference of two curves; None where they are of different lengths."""
    if len(losses) != len(others) or not losses:
        return None
    return max(abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, others, strict=True))


def finished(runs: Runs, part: str) -> list[Run]:
    return [run for run in of_protocol(runs, part) if run.record.status == "done"]


def _more(before: list[RankMemory], peak: list[RankMemory]) -> int | None:
    """By how much the peak of a rank was above what it held before, of the rank where that is most."""
    name = "peak_allocated_bytes" if before and before[0].peak_allocated_bytes is not None else "host_peak_bytes"
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, peak, strict=True)]
    return None if not pairs or None in (each for pair in pairs for each in pair) else max(b - a for a, b in pairs)
