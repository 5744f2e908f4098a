"""`study runs`, `study compare` and `study explain`: look at runs, and compare them."""

import dataclasses
from pathlib import Path

import tyro

from study.errors import Stop
from study.io.numbers import nats, part_of, size, times
from study.io.tables import say, say_wrapped, show
from study.records import compare as comparing
from study.records import explain as explaining
from study.records import store
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import groups
from study.records.runs import Run, Runs, load
from study.spec.options import AsJson


def runs(folder: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> list[dict] | None:
    """List the runs below a folder.

    Args:
        folder: A folder that contains runs, at any depth.
        as_json: Print the rows as JSON instead of a table.
    """
    loaded = load([folder], every_folder_has_runs=True)
    if as_json:
        return loaded.rows()
    say(f"{part_of(len(loaded.done), len(loaded), 'runs')} done.", "")
    show(loaded.rows())
    ended = [(run.name, run.record.error) for run in loaded if run.record.error]
    say(*[f"{name}: {error.message}. What to do: {error.what_to_do}." for name, error in ended])
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    return None


def compare(
    folders: tyro.conf.Positional[tuple[Path, ...]], /, *, arms: bool = False, as_json: AsJson = False
) -> dict | list[dict] | None:
    """Compare time and memory of equal cells, over folders and machines. Unequal cells are never pooled.

    Args:
        folders: Folders that contain runs, at any depth.
        arms: Instead, compare the arms of each task with DDP, in sentences and a table.
        as_json: Print the comparison as JSON instead of a table.
    """
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    loaded = load(folders, every_folder_has_runs=True)
    if arms:
        return _compare_arms(loaded, as_json)
    comparison = comparing.compare(loaded)
    if as_json:
        return dataclasses.asdict(comparison)
    say_wrapped(comparing.answer(comparison), "")
    show(comparison.rows)
    say("", *comparing.notes(comparison))
    return None


def _compare_arms(loaded: Runs, as_json: bool) -> list[dict] | None:
    """Show sentences first, then the table that they come from."""
    compared = by_task(loaded)
    if as_json:
        return compared
    for number, each in enumerate(compared):
        answer, *more = each["in_words"] or ["there is no DDP to compare with."]
        say_wrapped(*[""] * bool(number), f"{each['group']}. {answer}", *more, "", indent="  ")
        show([_shown(row) for row in each["rows"]])
    return None


def by_task(runs: Runs) -> list[dict]:
    """Return a group for each task and model: a row for each arm, and sentences about the rows."""
    from study.report import grouping, style  # they need packages that the light install lacks

    real = [run for run in runs if not run.virtual and not run.record.is_script]
    compared = []
    for group, members in groups(real, only=grouping.SETTINGS).items():
        arms = style.ordered(run.arm for run in members)
        rows = [_row(arm, [run for run in members if run.arm == arm], members) for arm in arms]
        if len(rows) > 1:
            compared.append({"group": style.conditions(group), "rows": rows, "in_words": _in_words(rows)})
    return compared


def _row(arm: str, repeats: list[Run], members: list[Run]) -> dict:
    """Return an arm's newest finished run; if none is finished, its newest run."""
    from study.report.topics import traffic

    run = next((run for run in reversed(repeats) if run.done), repeats[-1])
    partner = loss_partner(run, members, baseline_arm(each for each in members if each.done and each.losses))
    return {
        "arm": arm,
        "status": run.status,
        "last loss": run.losses[-1] if run.losses else None,
        "from": partner.arm if partner else None,
        "furthest nats": max(loss_distances(run, partner)) if partner else None,
        "peak bytes": run.peak_bytes,
        "sent bytes": sum(traffic.sent_bytes(run).values()) or None,
        "s/step": run.median_step_s,
        "why not": None if run.done or not run.record.error else run.record.error.message,
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


def explain(
    run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path], /, *, as_json: AsJson = False
) -> dict | None:
    """Explain why two runs differ in memory: what each holds at its peak, component by component.

    Args:
        run_a: The folder of the first run.
        run_b: The folder of the second run. Differences are those from the first to the second.
        as_json: Print components and sentences as JSON.
    """
    a = store.load(run_a)
    b = store.load(run_b)
    rows = explaining.explain(a, b)
    warning = explaining.unlike(a, b)
    sentences = explaining.sentences(a, b)
    if as_json:
        return {"unlike": warning, "components": rows, "in_words": sentences}
    answer, *reasons = sentences
    say_wrapped(answer, *([warning] if warning else []), *reasons, "")
    columns = {"a_bytes": "first", "b_bytes": "second", "difference_bytes": "difference"}
    tracked = [row for row in rows if row["kind"] != explaining.UNTRACKED]
    table = []
    for row in [*tracked, explaining.totals(rows), *rows[len(tracked) :]]:
        sizes = {name: None if row[key] is None else size(row[key]) for key, name in columns.items()}
        share = None if row["share"] is None else f"{row['share']:.0%}"
        table.append({"component": row["component"], "of": row["kind"]} | sizes | {"of all changes": share})
    show(table)
    return None
