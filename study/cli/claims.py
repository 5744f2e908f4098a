"""`study claims`: published claims, whether they hold, and what runs say of their evidence."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from study.cli.findings import show_behind
from study.core.errors import Stop
from study.core.text import is_number, number_of, say, say_wrapped, show
from study.known.explained import of_fault
from study.ledger import comparison, search, texts, verdicts
from study.ledger.evidence import REPORTS, OfRuns, Piece, in_full
from study.ledger.search import Found
from study.ledger.texts import Aside, Claim, Fault
from study.records import runs as records
from study.records import store
from study.records.runs import Runs

MOST_RUNS = 3  # records of a number that are named
MOST_PIECES = 5  # of evidence on a card without --all
ASK = (
    "What to type:",
    "  study claims stage 3        a line for each claim about it",
    "  study claims S002           those of a document; an arXiv id, an author or a title finds them too",
    "  study claims S002-25        one claim, its quote and its evidence",
    "  study claims open           those of a verdict: holds, does not hold, holds only if, open",
    "  study claims memory stage 1 those of a topic: memory, traffic, losses, time, settings",
    "  study claims papers high    of papers, DeepSpeed's posts or articles, with high certainty",
    "  study claims FOLDER         those that rest on the records in it",
    "  study claims faults         faults of libraries that a script shows",
    "  study claims contradictions where texts contradict themselves: no claims",
    "  study claims S002-25 --all  with all of its evidence, and where the quote is from",
    "  study claims --undecided    what would decide the open ones",
    "  study claims --shared       which claims rest on the same evidence",
    "  study claims --runs runs    your runs beside their evidence",
    "  study claims --all          each document, and what it stands for",
)


def claims(
    claim: tuple[str, ...] = (),
    /,
    *,
    undecided: bool = False,
    shared: bool = False,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    runs: tuple[Path, ...] = (),
) -> list[dict]:
    """Count how many published claims hold, list some of them, or show everything about one.

    With --json: the claims as the files of the ledger have them; with --runs each number, with the folders of its runs.
    The exit code is 1 if a number of --runs differs from the evidence.
    Example: `study claims S002-25`

    Args:
        claim: Ids of claims, such as S000-20 (case does not matter); a document, such as S002, its arXiv id, authors,
            year or title; a verdict, a certainty, a topic (memory, traffic, losses, time, settings), papers, articles
            or posts; a folder of kept records; or words, such as stage 3: claims about this phrase, or if there are
            none, those that contain all the words. Beside ids, documents, topics and other kinds, those of these
            claims. Words in quotes are one phrase, in reasons and conditions too.
        undecided: List the claims that cannot be decided here, each with what would decide it.
        shared: List the evidence that decides several claims. So many facts they are not.
        every: Count the claims of each document, and list what it stands for. Of a claim: show all that a card has.
        runs: Folders that contain runs, at any depth: compare what they give with the evidence of the claims.
    """
    folders = [Path(each) for each in claim if os.sep in each and Path(each).is_dir()]
    chosen: Sequence[Found] = search.named(claim) if claim and not folders else texts.claims()
    if folders:
        chosen = resting_on(folders)
        list_claims(chosen)
    elif undecided:
        chosen = show_undecided(chosen)
    elif shared:
        chosen = show_shared(chosen)
    elif runs:
        return compare_claims(chosen, records.load(runs, every_folder_has_runs=True), in_full=bool(claim))
    elif every and not claim:
        show_all()
    elif not claim:
        say_wrapped(verdicts.in_words(texts.claims()), "")
        say_wrapped(*ASK, indent=" " * 30)
    elif len(chosen) > len(search.apart(claim)) and not every:  # a document, or words that many claims contain
        list_claims(chosen)
    else:
        for each in chosen:
            show_one(each, whole=every)
    for id in search.missing(claim):
        say(f"No claim is named {id}.")
    # By alias: as the ledger's files have it.
    return [each.model_dump(mode="json", by_alias=True) for each in chosen]


def resting_on(folders: Sequence[Path]) -> list[Claim]:
    """Return the claims with a number of these kept records."""
    of = {os.path.relpath(each.resolve()) for folder in folders for each in store.run_folders(folder)}
    rows = comparison.compared(texts.claims(), records.kept_as_evidence())
    ids = {row.claim for row in rows if of & {each for several in row.runs for each in several.split(" over ")}}
    if not ids:
        what = f"no claim rests on the records in {', '.join(map(str, folders))}"
        raise Stop(what, f"your own runs: study claims --runs {folders[0]}")
    return [each for each in texts.claims() if each.id in ids]


def show_undecided(chosen: Sequence[Found]) -> list[Claim]:
    """Show the claims that cannot be decided here, and return them."""
    are_open = [each for each in chosen if isinstance(each, Claim) and each.would_decide]
    for each in are_open:
        say_wrapped(f"{each.id} {each.answer}", f"    What would decide it: {each.would_decide}", indent="    ")
    return are_open


def show_all() -> None:
    say_wrapped(verdicts.in_words(texts.claims()), "")
    rows = verdicts.by_document()
    for row in rows:
        row["open"] = row.pop("cannot be decided here")  # a table of 80 characters
    show(rows)
    say_wrapped("", "What was read of each:", indent="    ")
    say_wrapped(*[f"  {text.document}: {text.read}" for text in texts.texts()], indent="    ")
    say("", "What each document stands for (study claims ID has the rest):", "")
    central = [each for each in texts.claims() if each.central]
    say_wrapped(*[f"  {each.id} {each.judged}: {each.question}" for each in central], indent="      ")
    faults = f"{len(texts.faults())} faults of libraries that a script shows (study claims faults)"
    say_wrapped("", f"Apart from these: {faults}.")


def show_counts(chosen: Sequence[Found]) -> None:
    number = verdicts.counts(chosen)
    total = sum(number.values())
    if not total:
        return
    say_wrapped(
        f"{number_of(total, 'claims')}, by verdict: "
        + ", ".join(f"{verdict} {of_verdict}" for verdict, of_verdict in number.items() if of_verdict)
        + "."
    )
    posts = sum(isinstance(each, Claim) and each.in_post for each in chosen)
    if 0 < posts < total:
        say(f"Of DeepSpeed's posts on papers: {posts} (study claims posts).")
    if first := ", ".join(verdicts.to_read_first(chosen)):
        say(f"Read first: {first}.")
    say("")


def list_claims(chosen: Sequence[Found]) -> None:
    show_counts(chosen)
    for verdict, found in verdicts.by_verdict(chosen).items():
        if found:
            below = "the condition" if found[0].condition else "we find"
            say(f"what the text says {verdict}: {number_of(len(found), 'claims')}; {below}:")
            named = [f"{each.id} (in part)" if each.not_judged else each.id for each in found]
            rows = zip(named, found, strict=True)
            say_wrapped(*[f"  {name} “{each.quote}”: {each.in_a_list}" for name, each in rows], indent="      ")
    if faults := [each for each in chosen if isinstance(each, Fault)]:
        say(f"faults of libraries: {len(faults)}")
        say_wrapped(*[f"  {each.id} {each.outcome}" for each in faults], indent="      ")
    asides = [each for each in chosen if isinstance(each, Aside)]
    for is_contradiction, what in (
        (True, "where texts contradict themselves by our reading, slips included"),
        (False, "central, and not judged"),
    ):
        if told := [each for each in asides if each.is_contradiction == is_contradiction]:
            say(f"{what}, which are no claims: {len(told)}")
            say_wrapped(*[f"  {each.document} {each.said}" for each in told], indent="      ")
    for text in texts.texts():
        if [*text.claim] != chosen:
            continue
        say("", f"The {text.called} is {text.document}: study claims {text.document}")
        if text.findings:
            times = number_of(len(text.findings), "times")
            say_wrapped("", f"It contradicts itself {times}: study claims {text.document} contradictions.")
        if agree := [each for several in text.checked for each in several.agree]:
            say_wrapped(
                f"Of {len(agree)} of its numbers that follow from others {sum(agree)} agree: reports/answers/claims.md."
            )
    say("", "study claims ID shows one with its quote and its evidence.")


def show_one(claim: Found, whole: bool) -> None:
    """Print the answer, and below it what it rests on: what decides is in the first lines."""
    if isinstance(claim, Fault):
        show_behind(of_fault(claim))
        return
    if isinstance(claim, Aside):
        what = " contradicts itself, which is no claim" if claim.is_contradiction else ", central and not judged by us"
        say_wrapped(f"{claim.document}{what}: {claim.said}", indent="  ")
        return
    say(f"{claim.id} {claim.judged}")
    text = texts.of(claim)
    say_wrapped(claim.answer, f"{claim.numbers}.".removeprefix("."), first="  ", indent="  ")
    say_wrapped(*[f"  {name}: {text}" for name, text in claim.parts.items()], "", indent="    ")
    evidence = claim.evidence if whole else claim.evidence[:MOST_PIECES]
    show_evidence(claim, evidence)
    last = {"What would change it": claim.changes, "Source": text.cited, "The quote is from": claim.quoted_from}
    if whole:
        last["The quote is from"] = claim.quoted_from or text.quotes
        last |= {"Read of it": text.read, "How bytes count": claim.how_bytes_count}
    else:
        left_out = len(claim.evidence) - len(evidence)
        more = f"{left_out} more of its evidence, what" if left_out else "What"
        last[f"{more} was read, and of which version"] = f"study claims {claim.id} --all"
    say_wrapped(*[f"  {name}: {said}" for name, said in last.items() if said], "", indent="    ")


def show_evidence(claim: Claim, evidence: Sequence[Piece]) -> None:
    """Print a line for each value, and below it of what it is: as wide as text, also in a pipe."""
    of_runs = [each for each in claim.evidence if isinstance(each, OfRuns)]
    setting = " (a setting: model, batch, precision, ranks)" if any(each.n > 1 for each in of_runs) else ""
    say(f"  Evidence{setting}:")
    width = max((len(each.shown) for each in evidence), default=0)
    for each in evidence:
        note = f" ({each.note})" if each.note else ""
        first = f"    {each.shown:<{width}}  " if width else "    "
        say_wrapped(f"{each.kind}: {each.what}{note}", first=first, indent=" " * (len(first) + 2))
    if of_runs:
        say_wrapped(
            f"    Its records, and what makes such runs: study claims {claim.id} --runs reports", indent="      "
        )


def show_shared(chosen: Sequence[Found]) -> list[Claim]:
    """Show the evidence that several of these claims rest on, and return these."""
    of_claims = [each for each in chosen if isinstance(each, Claim)]
    found = comparison.shared(of_claims, records.kept_as_evidence())
    ids = {id for several in found.values() for id in several}
    say_wrapped(
        f"{len(ids)} of {number_of(len(of_claims), 'claims')} share evidence with another: {len(found)} facts. Each "
        "is evidence of several, and need not decide them. "
        "Of runs: the same ones or some of them, whatever is counted in them.",
        "",
        *[f"  {', '.join(several)}: {what}" for what, several in found.items()],
        indent="    ",
    )
    return [each for each in of_claims if each.id in ids]


def compare_claims(chosen: Sequence[Found], loaded: Runs, in_full: bool) -> list[dict]:
    """Show the numbers that evidence takes from runs beside those of some runs, and return them with their folders."""
    of_claims = [each for each in chosen if isinstance(each, Claim)]
    # Runs that have ended count, and no records of other people's scripts.
    rows = comparison.compared(of_claims, loaded.counting)
    counts = Counter(row.answer for row in rows)
    are_kept = all(folder.resolve().is_relative_to(REPORTS) for folder in loaded.folders)
    of = f"the {number_of(len(loaded), 'kept records')}" if are_kept else f"your {number_of(len(loaded), 'runs')}"
    said = []
    for answer, number in sorted(counts.items()):  # agree, differ, need other runs
        verb, *rest = answer.split(" ", 1)
        said.append(" ".join([str(number), f"{verb}s" if number == 1 else verb, *rest]))
    if not rows:
        say("No evidence of this is a run.")
    else:
        say_wrapped(f"{number_of(len(rows), 'numbers')} of runs, compared with {of}: {', '.join(said)}.", "")
    # Of all claims hundreds of rows would agree, or say nothing: only the others are shown.
    shown = [row for row in rows if in_full or row.answer == comparison.DIFFERS]
    if shown:
        show([row_of(row, "counted again" if are_kept else "yours") for row in shown])
    if counts[comparison.NO_RUNS] and not in_full:  # some agree, and it is not seen which
        agreeing = Counter(row.claim for row in rows if row.answer == comparison.AGREES)
        named = ", ".join(f"{id} ({number})" if number > 1 else id for id, number in agreeing.items())
        say_wrapped(f"Agree: {named or 'none'}. The numbers: study claims ID --runs and these folders.", indent="  ")
    say_runs(shown)
    if in_full:
        say_what_they_need(of_claims, [row.evidence for row in rows if row.answer == comparison.NO_RUNS])
    say_others(of_claims)
    # Beside the evidence a number that differs is surely wrong, in the runs or in the ledger: the exit code is 1.
    return [
        row_of(row)
        | {"fine": row.answer != comparison.DIFFERS, "values": row.values, "runs": row.runs, "alike": row.alike}
        for row in rows
    ]


def row_of(row: comparison.Compared, theirs: str = "yours") -> dict:
    kept, of_runs = in_full(row.evidence.value), in_full(row.value)
    if row.evidence.most is not None:
        kept = f"{kept} to {in_full(row.evidence.most)}"
    has_range = row.evidence.most is not None or row.answer == comparison.DIFFERS
    if has_range and row.values and is_number(row.values[0]):  # a median would hide the one that differs
        least, most = in_full(row.values[0]), in_full(row.values[-1])
        of_runs = least if least == most else f"{least} to {most}"
    return {
        "claim": row.claim,
        "evidence": row.evidence.what,
        "committed": kept,
        theirs: of_runs,
        "answer": row.answer,
    }


def say_runs(rows: Sequence[comparison.Compared]) -> None:
    """Say which records the numbers are of: their folders, each with a record.json and the number that it gives."""
    for row in rows:
        if row.runs:
            records_of = number_of(len(row.runs), "pairs of records" if row.evidence.over else "records")
            more = f", of which {MOST_RUNS} follow; --json has all" if len(row.runs) > MOST_RUNS else ""
            say_wrapped("", f"{row.claim}: {in_full(row.value)} comes from {records_of} ({row.distinct}){more}:")
            valued = [f"{in_full(value)}: {of}" for value, of in zip(row.values, row.runs, strict=True)]
            shown = [*valued[: MOST_RUNS - 1], *valued[MOST_RUNS - 1 :][-1:]]  # with the least and the largest
            say_wrapped(*shown, indent="    ", first="  ")
            say_wrapped(*row.alike, indent="    ", first="  More like them: ", end=" \\")  # as a shell reads it
    if any(row.runs for row in rows):
        say_wrapped("", "`More like them` makes runs of the same arm and model, and not these records again.")


def say_what_they_need(chosen: Sequence[Claim], lacking: Sequence[OfRuns]) -> None:
    """Say what makes the runs that some evidence of these claims needs, as far as the kept records tell."""
    for row in comparison.compared(chosen, records.kept_as_evidence() if lacking else []):
        if row.evidence in lacking:
            say("", f"{row.claim}: {in_full(row.evidence.value)} needs runs of:", *[f"  {each}" for each in row.alike])


def say_others(claims: Sequence[Claim]) -> None:
    """Say how much of the evidence no run can give, and what computes it."""
    kinds = Counter(each.kind for claim in claims for each in claim.evidence if not isinstance(each, OfRuns))
    if kinds:
        named = ", ".join(f"{kind} {number}" for kind, number in kinds.items())
        test = "pytest tests/ledger" + (f" -k {claims[0].id}" if len(claims) == 1 else "")
        pieces = number_of(kinds.total(), "pieces of evidence")
        say_wrapped("", f"Not of runs: {pieces} ({named}). What computes them: {test}", indent="  ")
