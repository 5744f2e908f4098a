"""`study runs`, `compare` and `report`: what runs hold, and how they differ."""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import tyro

from study.core.arms import all_paths, of_stage
from study.core.errors import Stop
from study.core.text import number_of, say, say_wrapped, show, size
from study.records import compare as comparing
from study.records import runs as records
from study.records import store
from study.records.runs import Run, Runs

MOST_REASONS = 5  # components: the rest changes less


def _load(folders: tuple[Path, ...]) -> Runs:
    # tyro has no list of one or more words, only of any number.
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    arms = [folder for folder in folders if not folder.exists() and of_stage(str(folder)) in all_paths()]
    if arms:
        two = " ".join(map(str, [*arms, "OTHER"][:2]))
        remedy = f"name folders with runs. `study diff {two}` says in which settings arms differ, "
        raise Stop(f"{arms[0]} is an arm, and no folder with runs", f"{remedy}`study estimate` what each needs")
    return records.load(folders, every_folder_has_runs=True)


def _with_sizes(row: dict, *names: str) -> dict:
    return row | {name: size(row[name]) for name in names if row[name] is not None}


def runs(folders: tuple[Path, ...], /, *, keep: Path | None = None) -> list[dict]:
    """List the runs below folders. The exit code is 1 if one failed.

    With --json: the rows. Example: `study runs reports/cpu-2core/runs/smoke`

    Args:
        folders: Folders that contain runs, at any depth.
        keep: First copy the records into this machine's folder, such as reports/cpu-2core, without private paths.
    """
    loaded = _load(folders)
    if keep:
        kept, left_out = records.keep([*folders], keep)
        say(*[f"left out: {sentence}" for sentence in left_out], f"{kept} records kept in {keep}")
    say(f"{len(loaded.done)} of {number_of(len(loaded), 'runs')} are done.", "")
    show(loaded.rows())
    # What failed is a row above. Why, and what to do about it, is a sentence.
    for run in loaded:
        if error := run.record.error:
            say(f"{run.record.run_id}: {error.message}. What to do: {error.what_to_do}.")
    say_set_aside(loaded)
    return [row | {"fine": not run.record.error} for row, run in zip(loaded.rows(), loaded, strict=True)]


def say_set_aside(loaded: Runs) -> None:
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])


# --- study compare: equal cells, the arms of a task, or two runs -----------------------------------------------------


def compare(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    /,
    *,
    arms: bool = False,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
) -> dict | list[dict]:
    """Compare time and memory of equal cells, over folders and machines. Unequal cells are never pooled.

    Of two runs, it says what each holds at its peak, component by component, and why, if only their arms differ. The
    exit code is 1 if losses of equal trainings differ by more than rounding (AdamW in fp32, all but the arm equal).

    With --json: the rows, and what was left out. Example: `study compare reports/cpu-2core/runs/smoke --arms`

    Args:
        folders: Folders that contain runs, at any depth; or two runs, the first of which the second is compared with.
        arms: Instead, compare the arms of each task with DDP, and show the table of the first.
        every: With --arms: the tables of all tasks.
    """
    # Two folders that are runs themselves, and not folders of runs.
    if len(folders) == 2 and all((folder / store.RECORD).is_file() for folder in folders):
        first, second = (Run(folder, store.load(folder)) for folder in folders)
        rows = _compare_peaks(first, second)
        return _with_losses(rows, [first, second])
    loaded = _load(folders)
    if arms:
        return _with_losses(_compare_arms(loaded, every), loaded.done)
    comparison = comparing.compare(loaded)
    say_wrapped(comparing.answer(comparison), "")
    known = {name for row in comparison.rows for name, value in row.items() if value is not None}
    show([{name: value for name, value in row.items() if name in known} for row in comparison.rows])
    say_wrapped("", *comparing.notes(comparison), indent="  ")
    return _with_losses([dataclasses.asdict(comparison)], loaded.done)[0]


def _with_losses(rows: list[dict], of: Iterable[Run]) -> list[dict]:
    """Say which losses differ that should be equal, and return the rows with whether none does."""
    wrong = comparing.unequal_losses(of)
    if wrong:
        say_wrapped("", *wrong, indent="  ")
    return [row | {"fine": not wrong} for row in rows]


def _compare_arms(loaded: Runs, every: bool) -> list[dict]:
    from study.report.topics import arms  # it needs packages that the light install lacks

    compared = arms.by_task(loaded)
    shown = compared if every else compared[:1]
    for each in compared:
        say_wrapped(f"{each['group']}:", *(each["in_words"] or ["There is no DDP to compare with."]), "", indent="  ")
        if each in shown:
            _show_arms(each["rows"])
    if len(compared) > len(shown):
        say(f"--all shows the tables of the other {number_of(len(compared) - len(shown), 'tasks')} as well.")
    one_memory = {row["arm"] for each in shown for row in each["rows"] if row["one memory"]}
    say_wrapped(*comparing.in_one_memory(sorted(one_memory)))
    say_set_aside(loaded)
    # After the reasons: a record that was set aside may be the arm that is missing.
    if not compared:
        raise Stop("no task has runs of two arms to compare", "name folders that hold them")
    return compared


def _show_arms(rows: list[dict]) -> None:
    """Print a row for each arm. What is said in words above, and what is alike in all rows, needs no column."""
    left_out = {"device", "one memory", "from", "times DDP's", "why not"}
    if all(row["status"] == "done" for row in rows):
        left_out.add("status")
    shown = []
    for row in rows:
        sized = _with_sizes(row, "peak bytes", "sent bytes")
        shown.append({name: sized[name] for name in sized if name not in left_out})
    show(shown)
    say("")


def _compare_peaks(first: Run, second: Run) -> list[dict]:
    rows = comparing.peaks(first, second)
    ours = size(sum(row["first"] for row in rows))
    theirs = size(sum(row["second"] for row in rows))
    differences = comparing.differences(first, second)
    if differences:
        say_wrapped(f"The trainings differ: {differences}. So what follows is not the arms' doing alone.")
    say(f"At the peak {first.record.arm}, the first, holds {ours}, and {second.record.arm} {theirs}.", "")
    show([_with_sizes(row, "first", "second") for row in rows])
    say("")
    if not differences:
        say_wrapped(*comparing.reasons(rows[:MOST_REASONS]), indent="  ")
    say_wrapped(*comparing.in_one_memory(comparing.one_memory([first, second])))
    say("", "`study diff` lists the settings in which they differ.")
    return rows


def report(
    *, runs: tuple[Path, ...] = (), out: Path = Path("reports/build"), address: str = "", paste: bool = False
) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Example: `study report --runs reports/cpu-2core/runs`

    Args:
        runs: Folders that contain runs, at any depth. Default: the kept records of reports/cpu-2core/runs.
        out: The folder for the pages. An earlier report in it is replaced.
        address: Where the pages will stand, so that links to them show a picture.
        paste: Fetch the Python with which a browser reads pasted texts, 14 MB, from npm and the package index.
    """
    # It needs packages for figures and notebooks, which the light install lacks.
    from study.report.site import build

    # It returns what failed, such as a notebook; the others are there all the same.
    sys.exit(bool(build(list(runs) or [records.KEPT], out, address.rstrip("/"), paste)))
