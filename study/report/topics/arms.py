"""The arms of each task beside DDP: a row for each arm, and the four answers. `study compare --arms` prints both."""

import pandas as pd

from study.core.text import nats
from study.records import metrics
from study.records.compare import loss_distances
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import style, tables
from study.report.topics import traffic

STAGES = ("zero1", "zero2", "zero3")
COMPARED = {"Memory": "peak bytes", "Time": "s/step", "Traffic": "sent bytes"}
CAUTION = (
    "On a tiny model ZeRO costs memory: its buckets are larger than the states that it divides. Times are of this "
    "machine and of single runs: small differences are noise, and a GPU has others."
)


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and the answers that the rows give."""
    real = [run for run in runs if not run.record.is_virtual and not run.record.is_script]
    compared = []
    for group, members in groups(real, only=tables.SETTINGS).items():
        arms = style.ordered(run.record.arm for run in members)
        rows = [_row([run for run in members if run.record.arm == arm], members) for arm in arms]
        if len(rows) > 1:
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
        "last loss": next(reversed(run.record.loss.train), None),
        "from": against,
        "furthest nats": max(distances, default=None),
        "peak bytes": metrics.peak_bytes(run.record),
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": metrics.value(run.record, "step_s"),
        "why not": run.record.error.message if run.record.error else None,
    }


def in_words(rows: list[dict]) -> list[str]:
    """Return what ZeRO's stages do to losses, memory, time and traffic, and which arms are not compared."""
    of_arm = pd.DataFrame(rows).set_index("arm")
    lines = []
    compared = of_arm.dropna(subset="furthest nats")
    if len(compared):
        furthest = nats(compared["furthest nats"].max())
        lines.append(
            f"Losses: of {len(compared)} arms none is further than {furthest} from {compared['from'].iloc[0]}."
        )
    done = of_arm[of_arm["status"] == "done"].reindex(["ddp", *STAGES]).astype(dict.fromkeys(COMPARED.values(), float))
    for word, name in COMPARED.items():
        over = (done[name] / done[name].iloc[0]).iloc[1:].dropna()
        if len(over):
            shares = ", ".join(f"stage {arm[-1]} {share:.2g}" for arm, share in over.items())
            lines.append(f"{word}: a rank's, in multiples of DDP's: {shares}.")
    if lines:
        lines.append(CAUTION)
    return lines + [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]
