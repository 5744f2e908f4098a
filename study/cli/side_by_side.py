"""`study compare --arms`: the arms of each task compared with DDP, in sentences and a table."""

import textwrap

from study.io.numbers import nats, size
from study.io.tables import say, show
from study.ledger import words
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import grouping
from study.report.style import conditions, ordered
from study.report.topics import traffic

NO_LESS = 1.005  # a larger ratio of the most to the least counts as a difference


def by_task(runs: Runs) -> list[dict]:
    """A group for each task and model: a row for each arm, and sentences about the rows."""
    real = [run for run in runs if not run.virtual and not run.record.is_script]
    compared = []
    for group, members in groups(real, only=grouping.SETTINGS).items():
        arms = ordered(run.arm for run in members)
        rows = [_row(arm, [run for run in members if run.arm == arm], members) for arm in arms]
        if len(rows) > 1:
            compared.append({"group": conditions(group), "rows": rows, "in_words": in_words(rows)})
    return compared


def _row(arm: str, repeats: list[Run], members: list[Run]) -> dict:
    """An arm's newest finished run; if none is finished, its newest run."""
    run = next((run for run in reversed(repeats) if run.done), repeats[-1])
    partner = loss_partner(run, members, baseline_arm(each for each in members if each.done and each.losses))
    distances = loss_distances(run, partner) if partner else []
    return {
        "arm": arm,
        "status": run.status,
        "last loss": run.losses[-1] if run.losses else None,
        "from": partner.arm if partner else None,
        "furthest nats": max(distances, default=None),
        "peak bytes": run.peak_bytes,
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": run.median_step_s,
        "why not": None if run.done or not run.record.error else run.record.error.message,
    }


def in_words(rows: list[dict]) -> list[str]:
    """Sentences about losses, memory, traffic and time, and about arms that did not run."""
    compared = [row for row in rows if row["furthest nats"] is not None]
    lines = []
    if compared:
        worst = max(compared, key=lambda row: row["furthest nats"])
        text = f"at no step is an arm further than {nats(worst['furthest nats'])} from {worst['from']} ({worst['arm']}"
        text += f"; {len(compared)} arm{'s' * (len(compared) > 1)} compared)"
        equal = f"all {len(compared) + 1} arms have the same ones, to the last bit"
        lines.append(f"Losses: {text if worst['furthest nats'] else equal}.")
    lines += [_times(rows, "peak bytes", "Memory", "holds"), _times(rows, "sent bytes", "Traffic", "sends")]
    lines += [_times(rows, "s/step", "Time", "takes")]
    if rows and lines[-1]:
        lines[-1] += " One run each, on this machine: small differences are noise."
    lines += [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]
    return list(filter(None, lines))


def _times(rows: list[dict], name: str, what: str, verb: str) -> str:
    """A sentence on the arms with the smallest and the largest value, relative to DDP; empty without DDP."""
    known = {row["arm"]: row[name] for row in rows if row[name] and row["status"] == "done"}
    if "ddp" not in known or len(known) < 3:
        return ""
    others = {arm: value / known["ddp"] for arm, value in known.items() if arm not in ("ddp", "single")}
    least, most = min(others, key=others.__getitem__), max(others, key=others.__getitem__)
    unit = f"{known['ddp']:.3g} s" if name == "s/step" else size(known["ddp"])
    if others[most] < NO_LESS * others[least]:
        return f"{what}: every arm {verb} {others[most]:.2g} times what ddp {verb} ({unit})."
    return (
        f"{what}: {least} {verb} {others[least]:.2g} times what ddp {verb} ({unit}), {most} {others[most]:.2g} times."
    )


def print_groups(compared: list[dict]) -> None:
    """Sentences first, then the table that they come from."""
    for number, each in enumerate(compared):
        say(*[""] * bool(number), each["group"])
        for line in each["in_words"]:
            say(*textwrap.wrap(line, words.WIDTH, initial_indent="  ", subsequent_indent="  "))
        say("")
        show([_shown(row) for row in each["rows"]])


def _shown(row: dict) -> dict:
    distance = row["furthest nats"]
    return {
        "arm": row["arm"],
        "status": row["status"],
        "last loss": row["last loss"],
        "furthest (nats)": None if distance is None else f"{distance:.1g}",
        "peak": row["peak bytes"] and size(row["peak bytes"]),
        "sent in a step": row["sent bytes"] and size(row["sent bytes"]),
        "s/step": row["s/step"],
    }
