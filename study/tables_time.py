"""Tables of seconds: against model size, against the batch, against memory, and between machines.

Each row has the median over `n` runs. An interval is the 95 % bootstrap interval over runs; below three runs there is
none, and `low` and `high` are None. Virtual runs send nothing, so their seconds are in none of these tables.
"""

from collections.abc import Iterable

import numpy as np

from study import stats
from study.compare import FEWEST_RUNS, compare
from study.evidence import Evidence, Run, by, groups, lines
from study.published import BATCHES_000
from study.record import Stop

OF_THE_MODEL = ("lr", "attention")  # their defaults depend on it
IN_STEPS = {"micro_batch": "rows per pass", "accumulation": "passes per step"}


def middle(values: list[float]) -> dict:
    return ratio(values, [1.0] * len(values))


def ratio(above: list[float], below: list[float]) -> dict:
    """A ratio of medians over runs, its interval where there are runs enough, and how many of them there are."""
    n = min(len(above), len(below))
    if n < FEWEST_RUNS:
        return {"median": stats.median(above) / stats.median(below), "low": None, "high": None, "n": n}
    value, low, high = stats.ratio_of_medians(above, below, np.random.default_rng(0))
    return {"median": value, "low": low, "high": high, "n": n}


def timed(evidence: Evidence) -> list[Run]:
    return [run for run in evidence.where() if run.median_step_s and not run.virtual]


def seconds(runs: Iterable[Run]) -> list[float]:
    return [run.median_step_s for run in runs]


def ladder(evidence: Evidence, base: str = "single", other: str = "zero3_cpu") -> list[dict]:
    """Seconds of a step as the model grows, and by how much the other arm is faster: document 002, figure 2."""
    rows = []
    chosen = [run for run in timed(evidence) if run.arm in (base, other) and run.parameters and run.kind == "real"]
    for label, members in groups(chosen, without=("model", *OF_THE_MODEL)).items():
        sizes = {run.model: run.parameters for run in members}
        if len(sizes) < 2:
            continue
        for model in sorted(sizes, key=sizes.get):
            mine = {arm: [run for run in members if run.model == model and run.arm == arm] for arm in (base, other)}
            common = {"group": label, "model": model, "parameters": sizes[model], "weights GB": 4 * sizes[model] / 1e9}
            for arm, runs in mine.items():
                if runs:
                    rows.append(common | {"what": "s/step", "arm": arm} | middle(seconds(runs)))
            if all(mine.values()):
                faster = ratio(seconds(mine[base]), seconds(mine[other]))
                faster |= {key: faster[key] and faster[key] - 1 for key in ("median", "low", "high")}
                rows.append(common | {"what": "speed-up", "arm": other} | faster)
    return rows


def batches(evidence: Evidence, baseline: str = "ddp") -> list[dict]:
    """Speed over the baseline's as the batch grows, by rows per pass and by passes apart; and document 000's."""
    rows = []
    for setting, words in IN_STEPS.items():
        for label, members in groups(timed(evidence), without=(setting,)).items():
            if len({getattr(run, setting) for run in members if run.arm == baseline}) < 2:
                continue
            for (value, ranks), mine in by(members, setting, "ranks").items():
                base = [run for run in mine if run.arm == baseline]
                for (arm,), runs in by(mine, "arm").items():
                    if base and arm != baseline:
                        rows.append({"group": label, "varied": words, "arm": arm, "value": value, "ranks": ranks,
                                     "batch": runs[0].rows_per_step, "source": "measured"}
                                    | ratio(seconds(base), seconds(runs)))  # fmt: skip
    if rows:
        rows += published_batches()
    return rows


def published_batches() -> list[dict]:
    return [{"group": None, "varied": "batch", "arm": arm, "value": band["from"], "ranks": 8, "batch": band["from"],
             "source": "document 000", "median": band[arm], "low": None, "high": None, "n": 0, "from": band["from"],
             "to": band["to"]}
            for band in BATCHES_000 for arm in ("zero2", "zero3")]  # fmt: skip


def frontier(evidence: Evidence) -> list[dict]:
    """Seconds of a step against memory at the peak, each arm a point: what offloading buys, and what it costs."""
    rows = []
    chosen = [run for run in timed(evidence) if run.peak_bytes]
    for label, members in groups(chosen).items():
        if len({run.arm for run in members}) < 2:
            continue
        for line, runs in lines(members).items():
            rows.append({"group": label, "line": line, "arm": runs[0].arm, "ranks": runs[0].ranks, "kind": runs[0].kind,
                         "peak bytes": max(run.peak_bytes for run in runs), "peak of": runs[0].peak_of,
                         "rows per step": runs[0].rows_per_step} | middle(seconds(runs)))  # fmt: skip
    return rows


def settings(evidence: Evidence, what: str, arms: Iterable[str] = ()) -> list[dict]:
    """One setting varied with all else alike: losses, seconds, memory and bytes of each of its values."""
    rows = []
    chosen = [
        run for run in evidence.where() if (not arms or run.arm in arms) and run.kind == "real" and not run.repair
    ]
    for label, members in groups(chosen, without=(what,)).items():
        if what != "ranks" and len({getattr(run, what) for run in members}) < 2:
            continue
        if what == "ranks" and len({run.ranks for run in members}) < 2:
            continue
        for (arm, value, ranks), runs in by(members, "arm", what, "ranks").items():
            times = [run.median_step_s for run in runs if run.median_step_s]
            moved = runs[0].traffic
            rows.append({
                "group": label, "arm": arm, what: value, "ranks": ranks, "n": len(runs),
                "final loss": stats.median([run.losses[-1] for run in runs]) if runs[0].losses else None,
                "s/step": stats.median(times) if times else None,
                "peak MB": runs[0].peak_bytes and max(run.peak_bytes or 0 for run in runs) / 1e6,
                "moved MB": sum(moved.values()) / 1e6 if moved else None,
            })  # fmt: skip
    return rows


def machines(evidence: Evidence) -> tuple[list[dict], dict[str, dict]]:
    """Equal cells in each environment, and the environments by their letters."""
    folders = [folder for folder in evidence.folders if any(folder.glob("**/record.json"))]
    if not folders:
        return [], {}
    try:
        found = compare(folders)
    except Stop:
        return [], {}
    return found.rows, found.environments
