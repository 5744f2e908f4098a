"""The arms of each task beside DDP: a row for each arm, and the four answers. `study compare --arms` prints both."""

import pandas as pd

from study.core.text import nats, number_of, times
from study.records import metrics
from study.records.compare import loss_distances
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report.tables import SETTINGS
from study.report.topics import traffic

TOLD = {
    "peak bytes": "Memory: {} what DDP holds.",
    "s/step": "Time: {} DDP's seconds, in single runs on this machine: small differences are noise.",
    "sent bytes": "Traffic: {} what DDP sends.",
}
NOISE_NATS = 1e-3  # arms in 16 bits differ by as much
APART = 10  # times the median: this is no noise of an arithmetic
SENDS_AGAIN = 1.2  # times DDP's traffic: less than stage 3 sends (1.5) if it gathers weights for the backward pass too


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and the answers that the rows give."""
    # A virtual run has no loss, and no time that means anything.
    real = runs.select(virtual=False, script="train")
    compared = []
    for group, members in groups(real, only=SETTINGS).items():
        rows = [_row(repeats, members) for repeats in by(members, "arm").values()]
        if len(rows) > 1:  # one arm alone is compared with nothing
            compared.append({"group": group, "rows": rows, "in_words": in_words(rows)})
    return compared


def _row(repeats: list[Run], members: list[Run]) -> dict:
    """Return the row of an arm's newest finished run; if none is finished, of its newest run."""
    # The first of the largest: among runs that are done the newest, as repeats are from old to new.
    run = max(reversed(repeats), key=lambda run: run.record.status == "done")
    against, distances = loss_distances(run, members)
    return {
        "arm": run.record.arm,
        "status": run.record.status,
        "ranks": run.record.observed.ranks,
        "last loss": metrics.dig(run.record, "loss.train.-1"),
        "from": against,
        "furthest nats": max(distances, default=None),
        "peak bytes": metrics.value(run.record, "peak_bytes"),
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": metrics.value(run.record, "step_s"),
        "why not": metrics.dig(run.record, "error.message"),
    }


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
        lines.append(f"Losses: at every step, {number} within {nats(near.max())} of {baseline}.")
        lines += [f"But {arm} differs by up to {nats(distance)}." for arm, distance in apart.items()]
    # --- the other three: the stages over DDP. Without a finished run of DDP there is nothing to divide by.
    done = of_arm[of_arm["status"] == "done"]
    stages = done.reindex(["ddp", "zero1", "zero2", "zero3"]).astype(dict.fromkeys(TOLD, float))
    for name, sentence in TOLD.items():
        over = (stages[name] / stages[name].iloc[0]).iloc[1:].dropna()
        if len(over):
            lines.append(sentence.format(", ".join(f"stage {arm[-1]} {times(share)}" for arm, share in over.items())))
            if name == "peak bytes" and over.min() > 1 and stages["ranks"].max() > 1:
                lines[-1] += " On a model this small, buckets outweigh the states that are divided."
            if name == "sent bytes" and over.get("zero3", 2) < SENDS_AGAIN:
                lines[-1] += " By default stage 3 keeps up to a billion gathered weights for the backward pass."
    if "ddp" in done.index:
        alike = done[(done["ranks"] == done.loc["ddp", "ranks"]) & done["furthest nats"].isna() & (done.index != "ddp")]
        lines += [f"The losses of {arm} are not compared: another seed, data or steps." for arm in alike.index]
        others = done[done["ranks"] != done.loc["ddp", "ranks"]]
        ranks = [f"{arm} has {number_of(int(ranks), 'ranks')}" for arm, ranks in others["ranks"].items()]
        lines += [f"{sentence}, and so other rows." for sentence in ranks]
    return lines + [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]
