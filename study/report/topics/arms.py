"""The arms of each task beside DDP: a row for each arm, and the four answers. `study compare --arms` prints both."""

import pandas as pd

from study.core.text import nats, size
from study.records import metrics
from study.records.compare import loss_distances
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import grouping, style
from study.report.topics import traffic

STAGES = ("zero1", "zero2", "zero3")
COSTS_MEMORY = "On a model this small ZeRO costs memory: its buckets are larger than the states that it divides."
ONE_MACHINE = "They are of this machine, and of single runs: small differences are noise, and a GPU has others."


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and the answers that the rows give."""
    real = [run for run in runs if not run.record.is_virtual and not run.record.is_script]
    compared = []
    for group, members in groups(real, only=grouping.SETTINGS).items():
        arms = style.ordered(run.record.arm for run in members)
        rows = [_row([run for run in members if run.record.arm == arm], members) for arm in arms]
        if len(rows) > 1:
            compared.append({"group": group, "rows": rows, "in_words": in_words(rows)})
    return compared


def _row(repeats: list[Run], members: list[Run]) -> dict:
    """Return an arm's newest finished run; if none is finished, its newest run."""
    run = next((run for run in reversed(repeats) if (run.record.status == "done")), repeats[-1])
    against, distances = loss_distances(run, members)
    return {
        "arm": run.record.arm,
        "status": run.record.status,
        "last loss": run.record.loss.train[-1] if run.record.loss.train else None,
        "from": against,
        "furthest nats": max(distances, default=None),
        "peak bytes": metrics.peak_bytes(run.record),
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": metrics.value(run.record, "step_s"),
        "why not": None if (run.record.status == "done") or not run.record.error else run.record.error.message,
    }


def in_words(rows: list[dict]) -> list[str]:
    """Return what ZeRO's stages do to losses, memory, time and traffic, and which arms are not compared."""
    of_arm = pd.DataFrame(rows).set_index("arm")
    lines = []
    compared = of_arm["furthest nats"].dropna()
    if len(compared):
        furthest = f"{nats(compared.max())} from {of_arm['from'].dropna().iloc[0]}'s at any step"
        lines.append(f"Losses: of {len(compared)} arms none is further than {furthest}.")
        others = of_arm.index[of_arm["furthest nats"].isna() & (of_arm["status"] == "done") & (of_arm.index != "ddp")]
        lines += [f"        Other rows in a step, so not compared: {', '.join(others)}."] if len(others) else []
    for word, name, what in (
        ("Memory", "peak bytes", "holds"),
        ("Time", "s/step", "takes"),
        ("Traffic", "sent bytes", "sends"),
    ):
        known = of_arm[of_arm["status"] == "done"][name].dropna()
        stages = [arm for arm in STAGES if arm in known]
        if "ddp" not in known or not stages:
            continue
        over = {arm: known[arm] / known["ddp"] for arm in stages}
        ddp = f"{known['ddp']:.3g} s" if name == "s/step" else size(known["ddp"])
        shares = ", ".join(f"stage {arm[-1]} {over[arm]:.2g}" for arm in stages)
        lines.append(f"{word}: a rank {what}, in multiples of DDP's {ddp}: {shares}.")
        lines += [COSTS_MEMORY] if name == "peak bytes" and min(over.values()) > 1 else []
        lines += [ONE_MACHINE] if name == "s/step" else []
    return lines + [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]
