"""`study runs`, `compare`, `claims` and `report`: what runs hold, how they differ, and what they say about claims."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import tyro

from study.core.errors import Stop
from study.core.options import AsJson
from study.core.text import number_of, say, say_wrapped, short, show, size
from study.ledger import texts
from study.ledger.texts import Claim, Fault
from study.records import compare as comparing
from study.records import runs as records
from study.records import store
from study.records.runs import Run, Runs

SIZES = ("first", "second", "difference")  # columns in bytes


def _load(folders: tuple[Path, ...]) -> Runs:
    # tyro has no list of one or more words, only of any number.
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    return records.load(folders, every_folder_has_runs=True)


def _size(number: float | None) -> str | None:
    if number is None:
        return None
    return size(number)


def runs(
    folders: tyro.conf.Positional[tuple[Path, ...]], /, *, keep: Path | None = None, as_json: AsJson = False
) -> list[dict] | None:
    """List the runs below folders.

    Args:
        folders: Folders that contain runs, at any depth.
        keep: Instead, copy the records into this machine's folder, such as reports/cpu-2core, without private paths.
        as_json: Print the rows as JSON instead of a table.
    """
    if keep:
        kept, left_out = records.keep([*folders], keep)
        say(*[f"left out: {sentence}" for sentence in left_out], f"{kept} records kept in {keep}")
        return None
    loaded = _load(folders)
    if as_json:
        return loaded.rows()
    say(f"{len(loaded.done)} of {number_of(len(loaded), 'runs')} are done.", "")
    show(loaded.rows())
    # What failed is a row above. Why, and what to do about it, is a sentence.
    ended = [(run.record.run_id, run.record.error) for run in loaded if run.record.error]
    say(*[f"{name}: {error.message}. What to do: {error.what_to_do}." for name, error in ended])
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    return None


# --- study compare: equal cells, the arms of a task, or two runs -----------------------------------------------------


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
    tries = [store.newest_try(folder) for folder in folders]
    # Two folders that are runs themselves, and not folders of runs.
    if len(tries) == 2 and all((folder / store.RECORD).is_file() for folder in tries):
        first, second = (Run(folder, store.load(folder)) for folder in tries)
        return _compare_peaks(first, second, as_json)
    loaded = _load(folders)
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
    for each in compared:
        say_wrapped(f"{each['group']}:", *(each["in_words"] or ["There is no DDP to compare with."]), "", indent="  ")
        rows = []
        for row in each["rows"]:
            furthest = row["furthest nats"]
            if furthest is not None:
                furthest = f"{furthest:.1g}"  # mostly rounding errors, of which more digits say nothing
            sizes = {"peak": _size(row["peak bytes"]), "sent in a step": _size(row["sent bytes"])}
            of_losses = {"last loss": row["last loss"], "furthest (nats)": furthest}
            rows.append({"arm": row["arm"], "status": row["status"], **of_losses, **sizes, "s/step": row["s/step"]})
        show(rows)
        say("")
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    # After the reasons: a record that was set aside may be the arm that is missing.
    if not compared:
        raise Stop("no task has runs of two arms to compare", "name folders that hold them")
    return None


def _compare_peaks(first: Run, second: Run, as_json: bool) -> dict | None:
    """Show how the peaks of two runs differ, and beside that their times and losses."""
    rows = comparing.peaks(first, second)
    unlike = comparing.unlike(first, second)
    if as_json:
        return {"unlike": unlike, "components": rows}
    # The sum of the components, which the rows for the rest of the device's memory follow.
    total = next(row for row in rows if row["component"] == comparing.TRACKED)
    held, held_first = size(total["second"]), size(total["first"])
    say(f"At the peak {second.record.arm} holds {held}, and {first.record.arm} {held_first}.", "")
    if unlike:
        say("They differ in more than the arm:", "")
        show(unlike)
        say("")
    # The reasons are sentences, which stand below the table.
    reasons = [(row["component"], row.pop("why")) for row in rows]
    show([row | {name: _size(row[name]) for name in SIZES} for row in rows])
    say("")
    say_wrapped(*[f"{component}: {why}" for component, why in reasons if why], indent="  ")
    return None


# --- study claims and study report -----------------------------------------------------------------------------------


def claims(
    claim: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    runs: tuple[Path, ...] = (),
    as_json: AsJson = False,
) -> list[dict] | None:
    """Count how many published claims hold, or show everything about some of them.

    Args:
        claim: Ids of claims, such as S000-20 (case does not matter); a document, such as 002; or words that a claim
            contains, such as 60 GB.
        runs: Folders that contain runs, at any depth: compare what they give with the evidence of the claims.
        as_json: Print everything as JSON.
    """
    chosen: list[Claim | Fault] = [*texts.claims()]
    if claim:
        chosen = texts.named(claim)
    if as_json:  # by alias: as the ledger's files have it
        return [each.model_dump(mode="json", by_alias=True) for each in chosen]
    if runs:
        _compare_claims(chosen, _load(runs), in_full=bool(claim))
    elif not claim:
        _summary()
    elif len(chosen) > len(claim):
        # A document, or words that many claims contain: a few lines of each. Each id gives one claim.
        say_wrapped(*[f"{each.id} {each.outcome}. {each.found}" for each in chosen], "", indent="    ")
    else:
        for each in chosen:
            say_wrapped(*_in_full(each), "", indent="    ")
    return None


def _summary() -> None:
    """Show the count of verdicts, the documents, and the central claims."""
    say_wrapped(texts.in_words(texts.claims()), "")
    show(texts.by_document())
    say("", "What each document stands for (study claims ID has the rest):", "")
    columns = ("id", "question", "verdict", "certainty")
    show([{name: getattr(each, name) for name in columns} for each in texts.claims() if each.central])
    say("", f"Apart from these: {len(texts.faults())} faults of libraries (study claims faults).")


def _in_full(each: Claim | Fault) -> list[str]:
    """Return everything about a claim, or about a fault of a library."""
    first = f"{each.id} {each.outcome}"
    certainty = f" ({each.certainty} certainty: {each.because})"
    if isinstance(each, Fault):
        evidence = f"evidence: python reproductions/{each.script}.py finds {short(each.value)}"
        lines = [f"{first}{certainty}", each.what, each.found, evidence]
        if each.thread:
            lines.append(f"thread: {each.thread}")
        return lines
    # What cannot be decided has a verdict without a certainty.
    if each.certainty is None:
        certainty = ""
    lines = [f"{first}.{certainty}", f"“{each.quote}” ({each.where})", each.found]
    lines.append(f"What would change it: {each.changes}")
    if each.idle:
        lines.append("It counts nowhere: its evidence could not have come out otherwise.")
    return [*lines, *(f"evidence: {evidence}" for evidence in each.evidence)]


def _compare_claims(chosen: list[Claim | Fault], loaded: Runs, in_full: bool) -> None:
    """Show whether some runs give the numbers that claims name. Otherwise only those that differ."""
    # Runs that have ended count, and no records of other people's scripts.
    rows = texts.compared([each for each in chosen if isinstance(each, Claim)], loaded.counting)
    counts = Counter(row.answer for row in rows)
    agree, differ, lack = (counts[answer] for answer in texts.ANSWERS)
    yours = number_of(len(loaded), "runs")
    answer = f"Your {yours} agree with {agree} numbers of published claims, and differ from {differ};"
    say_wrapped(f"{answer} {lack} need experiments that you have not run.", "")
    # Of all claims hundreds of rows would agree, or say nothing: only the others are shown.
    table = []
    for row in rows:
        if in_full or row.answer == texts.DIFFERS:
            numbers = {"committed": row.evidence.value, "yours": row.value}
            table.append({"claim": row.claim, "evidence": row.evidence.what, **numbers, "answer": row.answer})
    show(table)


def report(*, runs: tuple[Path, ...], out: Path = Path("reports/build")) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Args:
        runs: Folders that contain runs, at any depth.
        out: The folder for the pages. An earlier report in it is replaced.
    """
    # It needs packages for figures and notebooks, which the light install lacks.
    from study.report.site import build

    # It returns the names of the notebooks that failed; the others are there all the same.
    sys.exit(int(bool(build(list(runs), out))))
