"""The arms of each task beside DDP: rows, and sentences about them. `study compare --arms` prints both."""

from study.core.numbers import nats, size, times
from study.records import metrics
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import grouping, style
from study.report.topics import traffic


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and sentences about the rows."""
    real = [run for run in runs if not run.record.is_virtual and not run.record.is_script]
    compared = []
    for group, members in groups(real, only=grouping.SETTINGS).items():
        arms = style.ordered(run.record.arm for run in members)
        rows = [_row(arm, [run for run in members if run.record.arm == arm], members) for arm in arms]
        if len(rows) > 1:
            compared.append({"group": style.conditions(group), "rows": rows, "in_words": _in_words(rows)})
    return compared


def _row(arm: str, repeats: list[Run], members: list[Run]) -> dict:
    """Return an arm's newest finished run; if none is finished, its newest run."""
    run = next((run for run in reversed(repeats) if run.record.status == "done"), repeats[-1])
    partner = loss_partner(
        run,
        members,
        baseline_arm(each for each in members if each.record.status == "done" and each.record.loss.train),
    )
    return {
        "arm": arm,
        "status": run.record.status,
        "last loss": run.record.loss.train[-1] if run.record.loss.train else None,
        "from": partner.record.arm if partner else None,
        "furthest nats": max(loss_distances(run, partner)) if partner else None,
        "peak bytes": metrics.peak_bytes(run.record),
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": metrics.value(run.record, "step_s"),
        "why not": None if run.record.status == "done" or not run.record.error else run.record.error.message,
    }


def _in_words(rows: list[dict]) -> list[str]:
    """Return sentences about losses, memory, traffic and time, and about arms that did not run."""
    lines = []
    if compared := [row for row in rows if row["furthest nats"] is not None]:
        worst = max(compared, key=lambda row: row["furthest nats"])
        furthest = f"{nats(worst['furthest nats'])} from {worst['from']}"
        lines.append(
            f"Losses: at no step is an arm further than {furthest} (the furthest of {len(compared)}: {worst['arm']})."
        )
    lines += _ratios(rows, "peak bytes", "Memory: {least} holds {low} what ddp holds ({ddp}), ")
    lines += _ratios(rows, "sent bytes", "Traffic: {least} sends {low} what ddp sends ({ddp}), ")
    lines += _ratios(
        rows,
        "s/step",
        "Time (small differences of single runs are noise): {least} takes {low} what ddp takes ({ddp}), ",
    )
    return lines + [f"{row['arm']} did not run: {row['why not']}." for row in rows if row["why not"]]


def _ratios(rows: list[dict], name: str, sentence: str) -> list[str]:
    """Return a sentence on the arms with the smallest and the largest value, relative to DDP; none without DDP."""
    known = {row["arm"]: row[name] for row in rows if row[name] and row["status"] == "done"}
    others = {arm: known[arm] / known["ddp"] for arm in known if "ddp" in known and arm not in ("ddp", "single")}
    if len(others) < 2:
        return []
    least = min(others, key=others.__getitem__)
    most = max(others, key=others.__getitem__)
    ddp = f"{known['ddp']:.3g} s" if name == "s/step" else size(known["ddp"])
    return [sentence.format(least=least, low=times(others[least]), ddp=ddp) + f"{most} {times(others[most])}."]
