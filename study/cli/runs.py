"""`study runs` and `study compare`: look at runs, and compare them."""

import dataclasses
from pathlib import Path

import tyro

from study.core.errors import Stop
from study.core.options import AsJson
from study.core.text import part_of, say, say_wrapped, show, size
from study.records import compare as comparing
from study.records import runs as records
from study.records import store
from study.records.runs import Run, Runs, load


def runs(
    folders: tyro.conf.Positional[tuple[Path, ...]], /, *, keep: Path | None = None, as_json: AsJson = False
) -> list[dict] | None:
    """List the runs below folders.

    Args:
        folders: Folders that contain runs, at any depth.
        keep: Instead, copy the records into this machine's folder, such as reports/cpu-2core, without private paths.
        as_json: Print the rows as JSON instead of a table.
    """
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    if keep:
        _keep(folders, keep)
        return None
    loaded = load(folders, every_folder_has_runs=True)
    if as_json:
        return loaded.rows()
    say(f"{part_of(len(loaded.done), len(loaded), 'runs')} done.", "")
    show(loaded.rows())
    ended = [(run.record.run_id, run.record.error) for run in loaded if run.record.error]
    say(*[f"{name}: {error.message}. What to do: {error.what_to_do}." for name, error in ended])
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    return None


def _keep(folders: tuple[Path, ...], into: Path) -> None:
    kept, left_out = records.keep([*folders], into)
    size_bytes = sum(path.stat().st_size for path in into.glob(f"**/{store.RECORD}"))
    say(*(f"left out: {sentence}" for sentence in left_out))
    say(f"{kept} records kept in {into}, which holds {size_bytes / 1e6:.2f} MB of them")


def compare(
    folders: tyro.conf.Positional[tuple[Path, ...]], /, *, arms: bool = False, as_json: AsJson = False
) -> dict | list[dict] | None:
    """Compare time and memory of equal cells, over folders and machines. Unequal cells are never pooled.

    Of two runs, it says why their memory differs: what each holds at its peak, component by component.

    Args:
        folders: Folders that contain runs, at any depth; or two runs, the first of which the second is compared with.
        arms: Instead, compare the arms of each task with DDP, in sentences and a table.
        as_json: Print the comparison as JSON instead of a table.
    """
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    tries = [store.newest_try(folder) for folder in folders]
    if len(tries) == 2 and all((folder / store.RECORD).is_file() for folder in tries):
        return _explain([Run(folder, store.load(folder)) for folder in tries], as_json)
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
    from study.report.topics import arms  # it needs packages that the light install lacks

    compared = arms.by_task(loaded)
    if as_json:
        return compared
    for number, each in enumerate(compared):
        lines = each["in_words"] or ["There is no DDP to compare with."]
        say_wrapped(*[""] * bool(number), f"{each['group']}:", *lines, "", indent="  ")
        show([_shown(row) for row in each["rows"]])
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    if not compared:
        raise Stop("no task has runs of two arms to compare", "name folders that hold them")
    return None


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


def _explain(runs: list[Run], as_json: bool) -> dict | None:
    """Show how the peaks of two runs differ, and beside that their times and losses."""
    first, second = runs
    rows = comparing.peaks(first, second)
    unlike = comparing.unlike(first, second)
    if as_json:
        return {"unlike": unlike, "components": rows}
    total = next(row for row in rows if row["component"] == comparing.TRACKED)
    sizes = [size(total[side]) for side in ("first", "second")]
    say(f"At the peak {second.record.arm} holds {sizes[1]}, and {first.record.arm} {sizes[0]}.", "")
    if unlike:
        say("They differ in more than the arm:", "")
        show(unlike)
        say("")
    reasons = [(row["component"], row.pop("why")) for row in rows]
    in_bytes = ("first", "second", "difference")
    show([row | {name: None if row[name] is None else size(row[name]) for name in in_bytes} for row in rows])
    say("")
    say_wrapped(*[f"{component}: {why}" for component, why in reasons if why], indent="  ")
    return None
