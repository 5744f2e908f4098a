"""`study runs`, `compare`, `claims` and `report`: what runs hold, how they differ, and what they say about claims."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import tyro

from study.core.errors import Stop
from study.core.text import number_of, say, say_wrapped, short, show, size
from study.ledger import texts
from study.ledger.texts import Claim, Fault
from study.records import compare as comparing
from study.records import runs as records
from study.records import store
from study.records.runs import Run, Runs


def _load(folders: tuple[Path, ...]) -> Runs:
    # tyro has no list of one or more words, only of any number.
    if not folders:
        raise Stop("no folder is given", "name one or several folders with runs")
    return records.load(folders, every_folder_has_runs=True)


def _with_sizes(row: dict, *names: str) -> dict:
    return row | {name: size(row[name]) for name in names if row[name] is not None}


def runs(folders: tyro.conf.Positional[tuple[Path, ...]], /, *, keep: Path | None = None) -> list[dict]:
    """List the runs below folders.

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
    ended = [(run.record.run_id, run.record.error) for run in loaded if run.record.error]
    say(*[f"{name}: {error.message}. What to do: {error.what_to_do}." for name, error in ended])
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    return loaded.rows()


# --- study compare: equal cells, the arms of a task, or two runs -----------------------------------------------------


def compare(folders: tyro.conf.Positional[tuple[Path, ...]], /, *, arms: bool = False) -> dict | list[dict]:
    """Compare time and memory of equal cells, over folders and machines. Unequal cells are never pooled.

    Of two runs, it says what each holds at its peak, component by component, and why, if only their arms differ.

    With --json: the rows, and what was left out. Example: `study compare reports/cpu-2core/runs/smoke --arms`

    Args:
        folders: Folders that contain runs, at any depth; or two runs, the first of which the second is compared with.
        arms: Instead, compare the arms of each task with DDP.
    """
    # Two folders that are runs themselves, and not folders of runs.
    if len(folders) == 2 and all((folder / store.RECORD).is_file() for folder in folders):
        first, second = (Run(folder, store.load(folder)) for folder in folders)
        return _compare_peaks(first, second)
    loaded = _load(folders)
    if arms:
        return _compare_arms(loaded)
    comparison = comparing.compare(loaded)
    say_wrapped(comparing.answer(comparison), "")
    show(comparison.rows)
    say_wrapped("", *comparing.notes(comparison), indent="  ")
    return dataclasses.asdict(comparison)


def _compare_arms(loaded: Runs) -> list[dict]:
    from study.report.topics import arms  # it needs packages that the light install lacks

    compared = arms.by_task(loaded)
    for each in compared:
        say_wrapped(f"{each['group']}:", *(each["in_words"] or ["There is no DDP to compare with."]), "", indent="  ")
        rows = [_with_sizes(row, "peak bytes", "sent bytes") for row in each["rows"]]
        show([{name: row[name] for name in row if name not in ("from", "times DDP's", "why not")} for row in rows])
        say("")
    say(*[f"set aside: {reason}" for reason in loaded.set_aside])
    # After the reasons: a record that was set aside may be the arm that is missing.
    if not compared:
        raise Stop("no task has runs of two arms to compare", "name folders that hold them")
    return compared


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
    for row in rows[:3]:  # the rest changes less
        if not differences and row["first"] != row["second"] and row["component"] in comparing.REASONS:
            say_wrapped(f"{row['component']}: {comparing.REASONS[row['component']]}", indent="  ")
    say("", "`study diff` lists the settings in which they differ.")
    return rows


# --- study claims and study report -----------------------------------------------------------------------------------


def claims(
    claim: tyro.conf.Positional[tuple[str, ...]] = (), /, *, undecided: bool = False, runs: tuple[Path, ...] = ()
) -> list[dict]:
    """Count how many published claims hold, list some of them, or show everything about one.

    With --json: the claims as the files of the ledger have them. Example: `study claims S002-25`

    Args:
        claim: Ids of claims, such as S000-20 (case does not matter); a document, such as 002; or words that a claim
            contains, such as stage 3. Words in quotes are searched as one phrase.
        undecided: List the claims that cannot be decided here, each with what would decide it.
        runs: Folders that contain runs, at any depth: compare what they give with the evidence of the claims.
    """
    chosen: list[Claim | Fault] = [*texts.claims()]
    if claim:
        chosen = texts.named(claim)
    if undecided:
        are_open = [each for each in chosen if isinstance(each, Claim) and each.would_decide]
        for open_claim in are_open:
            how = f"    What would decide it: {open_claim.would_decide}"
            say_wrapped(f"{open_claim.id} {open_claim.answer}", how, indent="    ")
        chosen = [*are_open]
    elif runs:
        _compare_claims(chosen, _load(runs), in_full=bool(claim))
    elif not claim:
        say_wrapped(texts.in_words(texts.claims()), "")
        show(texts.by_document())
        say("", "What each document stands for (study claims ID has the rest):", "")
        columns = ("id", "question", "verdict", "certainty")
        show([{name: getattr(each, name) for name in columns} for each in texts.claims() if each.central])
        say(
            "",
            "What would decide the others: study claims --undecided.",
            f"Apart from these: {len(texts.faults())} faults of libraries that a script shows (study claims faults).",
        )
    elif len(chosen) > len(claim):  # a document, or words that many claims contain: a line of each
        _list_claims(chosen)
    else:
        for each in chosen:
            if isinstance(each, Claim):
                _show_claim(each)
            else:
                about = [f"{name}: {short(value)}" for name, value in vars(each).items() if value]
                say_wrapped(f"{each.id} {each.outcome}", *about, "", indent="    ")
    # By alias: as the ledger's files have it.
    return [each.model_dump(mode="json", by_alias=True) for each in chosen]


def _list_claims(chosen: list[Claim | Fault]) -> None:
    for verdict in texts.VERDICTS:
        mine = [each for each in chosen if isinstance(each, Claim) and each.verdict == verdict]
        if mine:
            say(f"{verdict}: {len(mine)}")
            say_wrapped(*[f"  {each.id} {each.answer}" for each in mine], indent="      ")
    say_wrapped(*[f"  {each.id} {each.outcome}" for each in chosen if isinstance(each, Fault)], indent="      ")
    say("", "study claims ID shows one with its quote and its evidence.")


def _show_claim(claim: Claim) -> None:
    """Print the answer, and below it what it rests on."""
    say(f"{claim.id} {claim.verdict}" + (f" (certainty: {claim.certainty})" if claim.certainty else ""))
    parts = {
        "The text": f"“{claim.quote}” ({claim.where})",
        "It holds only if": claim.condition,
        "What would decide it": claim.would_decide,
        "Because": claim.found,
        "What we would sign": claim.instead,
        "So certain because": claim.because,
    }
    say_wrapped(claim.answer, f"{claim.numbers}.".removeprefix("."), first="  ", indent="  ")
    say_wrapped(*[f"  {name}: {text}" for name, text in parts.items() if text], "", indent="    ")
    show([{"evidence": each.kind, "of": each.what, "value": each.shown, "note": each.note} for each in claim.evidence])
    say_wrapped("", f"What would change it: {claim.changes}", "")


def _compare_claims(chosen: list[Claim | Fault], loaded: Runs, in_full: bool) -> None:
    # Runs that have ended count, and no records of other people's scripts.
    rows = texts.compared([each for each in chosen if isinstance(each, Claim)], loaded.counting)
    counts = Counter(row.answer for row in rows)
    agree, differ, lack = (counts[answer] for answer in texts.ANSWERS)
    yours = number_of(len(loaded), "runs")
    say_wrapped(
        f"Your {yours} give {agree} numbers of the claims' evidence again, and {differ} otherwise. {lack} numbers need "
        "experiments that you have not run.",
        "",
    )
    # Of all claims hundreds of rows would agree, or say nothing: only the others are shown.
    shown = [row for row in rows if in_full or row.answer == texts.DIFFERS]
    show(
        [
            {
                "claim": row.claim,
                "evidence": row.evidence.what,
                "committed": row.evidence.value,
                "yours": row.value,
                "answer": row.answer,
            }
            for row in shown
        ]
    )


def report(
    *, runs: tuple[Path, ...], out: Path = Path("reports/build"), address: str = "", paste: bool = False
) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Example: `study report --runs reports/cpu-2core/runs`

    Args:
        runs: Folders that contain runs, at any depth.
        out: The folder for the pages. An earlier report in it is replaced.
        address: Where the pages will stand, so that links to them show a picture.
        paste: Fetch the Python with which a browser reads pasted texts, 14 MB, from npm and the package index.
    """
    # It needs packages for figures and notebooks, which the light install lacks.
    from study.report.site import build

    # It returns what failed, such as a notebook; the others are there all the same.
    sys.exit(bool(build(list(runs), out, address.rstrip("/"), paste)))
