"""The arms of each task beside DDP: a row for each arm, and the four answers. `study compare --arms` prints both."""

from collections import Counter
from statistics import median

import pandas as pd

from study.core.files import value_at
from study.core.text import nats, number_of, times
from study.records import metrics
from study.records.compare import FEWEST_RUNS, has_one_memory, loss_distances, paired
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report.of_record import sent_bytes
from study.report.tables import SETTINGS

TRAININGS = (*SETTINGS, "epochs", "steps")  # losses of others are not those of the same training
STAGES = ["ddp", "zero1", "zero2", "zero3"]
TOLD = {
    "peak bytes": "Memory: {} what DDP holds.",
    "sent bytes": "Traffic: {} what DDP sends, as the papers count it: an all-reduce twice.",
}
NOISE_NATS = 1e-3  # arms in 16 bits differ by as much
APART = 10  # times the median: this is no noise of an arithmetic
SENDS_AGAIN = 1.2  # times DDP's traffic: less than stage 3 sends (1.5) if it gathers weights for the backward pass too


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and the answers that the rows give."""
    # A virtual run has no loss, and no time that means anything.
    real = runs.select(virtual=False, script="train")
    compared = []
    for group, members in groups(real, only=TRAININGS).items():
        seed, ranks = _most_common(members)
        rows = [_row(repeats, members, seed, ranks) for repeats in by(members, "arm").values()]
        if len(rows) > 1:  # one arm alone is compared with nothing
            compared.append({"group": group, "rows": rows, "in_words": in_words(rows)})
    return compared


def _most_common(members: list[Run]) -> tuple[int, int]:
    """Return the seed and the number of ranks that most arms have; of several the smallest seed, the most ranks."""
    done = [run for run in members if run.record.status == "done"]
    arms = Counter((seed or 0, ranks or 0) for _, seed, ranks in by(done, "arm", "seed", "ranks"))
    return max(arms, key=lambda pair: (arms[pair], -pair[0], pair[1]), default=(0, 0))


def _row(repeats: list[Run], members: list[Run], seed: int, ranks: int) -> dict:
    """Return the row of an arm's newest finished run of this seed and ranks, or else of its newest finished run.

    The largest distance of losses is that of all its finished runs.
    """

    def preference(run: Run) -> tuple:
        return run.record.status == "done", run.facts["seed"] == seed, run.facts["ranks"] == ranks

    # The first of the largest: the newest, as repeats are from old to new.
    run = max(reversed(repeats), key=preference)
    compared = [loss_distances(each, members) for each in repeats if each.record.status == "done"]
    return {
        "arm": run.record.arm,
        "status": run.record.status,
        "device": run.record.observed.device,
        "one memory": has_one_memory(run),
        "ranks": run.record.observed.ranks,
        "seed": run.facts["seed"],
        "init": run.record.requested.init,
        "last loss": value_at(run.record, "loss.train.-1"),
        "from": next((against for against, _ in compared if against), None),
        "furthest nats": max((distance for _, distances in compared for distance in distances), default=None),
        "peak bytes": metrics.value(run.record, "peak_bytes"),
        "sent bytes": sum(sent_bytes(run).values()) or None,
        "s/step": metrics.value(run.record, "step_s"),
        "times DDP's": _over_ddp(repeats, members),
        "why not": value_at(run.record, "error.message"),
    }


def _over_ddp(runs: list[Run], members: list[Run]) -> list[float] | None:
    """The median step time over DDP's, and the least and the largest of any two runs: equal cells, on one machine.

    None of few runs: on a busy machine two take twice as long as one another.
    """
    ddp = [run for run in members if run.record.arm == "ddp" and run.record.status == "done"]
    done = [run for run in runs if run.record.status == "done"]
    for ours, theirs in paired(done, ddp, {"arm"}):
        above, below = ([metrics.value(run.record, "step_s") for run in side] for side in (ours, theirs))
        if min(len(above), len(below)) >= FEWEST_RUNS and None not in above + below:
            return [median(above) / median(below), min(above) / max(below), max(above) / min(below)]
    return None


def in_words(rows: list[dict]) -> list[str]:
    """What ZeRO's stages do to losses, memory, time and traffic, and which arms are not compared."""
    # --- losses: the largest difference of all arms, but for those that stand apart
    of_arm = pd.DataFrame(rows).set_index("arm")
    lines = []
    compared = of_arm.dropna(subset="furthest nats")
    if len(compared):
        distances = compared["furthest nats"].astype(float)
        is_apart = distances > max(APART * distances.median(), NOISE_NATS)
        near, apart = distances[~is_apart], distances[is_apart]
        baseline = compared["from"].iloc[0]
        number = f"{number_of(len(near), 'arms')} {'is' if len(near) == 1 else 'are'}"
        close = f"within {nats(near.max())} of" if near.max() else "identical to"
        lines.append(f"Losses: at every step, {number} {close} {baseline}.")
        lines += [f"But {arm} differs by up to {nats(distance)}." for arm, distance in apart.items()]
    # --- memory and traffic: the stages over DDP. Without a finished run of DDP there is nothing to divide by.
    done = of_arm[of_arm["status"] == "done"]
    stages = done.reindex(STAGES).astype(dict.fromkeys(TOLD, float))
    for name, sentence in TOLD.items():
        over = (stages[name] / stages[name].iloc[0]).iloc[1:].dropna()
        if len(over):
            lines.append(sentence.format(", ".join(f"stage {arm[-1]} {times(share)}" for arm, share in over.items())))
            if name == "peak bytes" and over.min() > 1 and stages["ranks"].max() > 1:
                lines[-1] += " On a model this small, buckets outweigh the states that are divided."
            if name == "sent bytes" and over.get("zero3", 2) < SENDS_AGAIN:
                lines[-1] += " By default stage 3 keeps up to a billion gathered weights for the backward pass."
    if "ddp" in done.index:
        lines += _time(done.reindex(STAGES[1:]))
        ddp = done.loc["ddp"]
        has_its_ranks = done["ranks"] == ddp["ranks"]
        alike = done[has_its_ranks & done["furthest nats"].isna() & (done.index != "ddp")]
        for arm, init in alike["init"].items():
            drawn = "in_place" in (init, ddp["init"])
            why = "each run draws its own first weights, in place" if drawn else "another seed, data or steps"
            lines.append(f"The losses of {arm} are not compared: {why}.")
        for arm, ranks in done["ranks"][~has_its_ranks].items():
            lines.append(f"{arm} has {number_of(int(ranks), 'ranks')}, so its losses are of other sequences.")
    return lines + [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]


def _time(stages: pd.DataFrame) -> list[str]:
    """Return what stages take of DDP's time, each with its spread, without which a ratio may be noise alone."""
    if stages["s/step"].isna().all():
        return []
    ratios = [
        f"stage {str(arm)[-1]} {times(middle)} ({times(least).removesuffix(' times')} to {times(most)})"
        for arm, (middle, least, most) in stages["times DDP's"].dropna().items()
    ]
    if not ratios:
        return ["Time: no ratios, as fewer than three runs of an arm show no spread; the table has seconds."]
    of_cpus = " They are of CPUs and say nothing of GPUs." if (stages["device"] == "cpu").any() else ""
    return [f"Time: {', '.join(ratios)} DDP's seconds, over all pairs of repeats.{of_cpus}"]
