"""`study claims` and `study report`: verdicts on published claims, and the web pages."""

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from study.errors import Stop
from study.io.numbers import number_of
from study.io.tables import WIDTH, say, say_wrapped, show
from study.io.validation import nearest
from study.io.words import joined
from study.ledger import catalogue, committed, files, ledger, words
from study.ledger.judging import Verdict
from study.ledger.model import SORTS, Claim
from study.ledger.verdict import BASES, CONSISTENT, CONTRADICTS, INCONCLUSIVE, OWN, VERDICTS
from study.probes import answers
from study.records import evidence
from study.records.runs import Runs, load
from study.spec.options import AsJson

OF_WORLD = [name for name in VERDICTS if name not in (CONSISTENT, CONTRADICTS)]  # not of a document's own numbers
CENTRAL = "What each document stands for, and what we find (study claims ID has the rest):"
ALL = "All claims about the world, those included that we chose because we suspected them:"
APART = """\
What they rest on. Apart from them: what was held against the document's own numbers, where a contradiction counts \
once (consistent, contradictions, open), and premises, which are ours."""

COVERAGE = """\
How much of each document is judged: its sentences, list items and rows that could turn out false, and those that a \
claim judges. Then whether its authors were asked, and what they answered (CONTRIBUTING.md says how to object)."""

Thing = TypeVar("Thing", Claim, Verdict)


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which claims are shown."""

    document: str | None = None
    """Only claims of this document: 000 to 003, P1 to P5, O, U, checkpoints, pages or libraries."""
    verdict: str | None = None
    """Only claims with this verdict: supported, refuted, understated, inconclusive, "not tested here", consistent or
    "contradicts itself"."""
    basis: str | None = None
    """Only verdicts with this evidence: measured, virtual, tried, predicted, "own numbers" or read. A claim that is not
    tested here has none."""
    kind: str | None = None
    """Only claims of this kind: memory, bytes, time, capacity, convergence or configuration."""

    @property
    def given(self) -> dict[str, str]:
        return {name: wanted for name, wanted in vars(self).items() if wanted is not None}

    def refuse_unknown(self, claims: list[Claim]) -> None:
        """Raise Stop for a filter that no claim can pass."""
        documents = tuple(dict.fromkeys(claim.document for claim in claims))
        known = {"verdict": VERDICTS, "basis": BASES, "kind": SORTS, "document": documents}
        for name, wanted in self.given.items():
            if wanted not in known[name]:
                what = f"--{name} must be one of {', '.join(known[name])} (got {wanted!r})"
                raise Stop(what, nearest(wanted, known[name], otherwise=f"correct --{name}"))

    def chosen(self, things: list[Thing], **attributes: str) -> list[Thing]:
        """Return the things whose attributes, given by the names of filters, are as wanted."""
        wanted = {attribute: getattr(self, name) for name, attribute in attributes.items()}
        return [each for each in things if all(want in (None, getattr(each, name)) for name, want in wanted.items())]


def claims(
    claim: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    filters: Annotated[Filters, tyro.conf.arg(name="")] = Filters(),
    runs: tuple[Path, ...] = (),
    file: Path = files.FOLDER,
    verbose: bool = False,
    checks: bool = False,
    keep: bool = False,
    differences: bool = False,
    as_json: AsJson = False,
) -> list[dict] | None:
    """Count how many published claims hold and by what evidence, or show everything about some of them.

    Args:
        claim: Ids of claims, such as S000-13 (case does not matter), or words that a claim contains, such as 60 GB.
            With --checks: names of checks.
        filters: Which claims.
        runs: Folders that contain runs, at any depth. Default: runs/, and the runs/ of every folder in reports/.
        file: A claims file, or a folder of claims files.
        verbose: Also print a line for every claim.
        checks: List every check that a claims file can name, with its arguments and claims that use it.
        keep: Write the verdicts to reports/verdicts.json. Later ones are compared with them.
        differences: Only say which verdicts differ from the committed ones, and how many the runs leave open.
        as_json: Print everything as JSON.
    """
    if checks:
        say(*_checks(claim))
        return None
    if keep and (claim or runs or file != files.FOLDER or filters.given):
        what = "--keep is for all claims of the study, and for the runs of its reports"
        raise Stop(what, "leave out the other options")
    known = files.read_all(file)
    filters.refuse_unknown(known)
    chosen = filters.chosen(_named(claim, known), document="document", kind="kind")
    loaded = load(runs, every_folder_has_runs=True) if runs else load(evidence.default_folders())
    gathered, judged = _judged(chosen, loaded, keep)
    if differences:
        flag = ["--runs"] if runs else []
        in_full = " ".join(["study claims", *flag, *map(str, runs)])
        say_wrapped(*committed.differences(judged), f"All of them: {in_full}", indent="    ")
        return None
    notes = _notes(gathered, files.doubts(known) if file == files.FOLDER else [])
    verdicts = filters.chosen(judged, verdict="verdict", basis="rests_on")
    if as_json or claim:  # otherwise below the summary
        sys.stderr.write("".join(f"{note}\n" for note in notes))
    if as_json:
        return [{"plainly": words.plainly(verdict)} | ledger.as_json(verdict) for verdict in verdicts]
    if claim and verdicts:
        _say_chosen(verdicts, claim)
        return None
    _say_answer(verdicts, filters)
    if verdicts:
        _say_plainly(verdicts if filters.given or verbose else [])
        _summary(verdicts)
        _coverage(file, filters)
        read = f"runs read: {len(gathered.runs)}, in {', '.join(map(str, loaded.folders)) or 'no folder'}"
        say_wrapped("", read, *notes, *committed.changes(verdicts), indent="    ")
    return None


def _judged(claims: list[Claim], runs: Runs, keep: bool) -> tuple[evidence.Evidence, list[Verdict]]:
    """Judge claims by runs. With `keep`, the verdicts are the committed ones from now on."""
    sys.stderr.write(f"judging the claims ({len(claims)}) by the runs ({len(runs)})\n")  # it takes seconds
    gathered = evidence.gather(runs)
    verdicts = ledger.judge_all(claims, gathered, anew=keep)
    if keep:
        committed.write(verdicts)
    return gathered, verdicts


def _notes(gathered: evidence.Evidence, doubts: list[str]) -> list[str]:
    """Return what to know of the runs, of the kept answers and of the claims."""
    reasons = (*gathered.set_aside, *answers.set_aside())
    return [*(f"set aside: {reason}" for reason in reasons), *gathered.notes, *doubts]


def _say_answer(verdicts: list[Verdict], filters: Filters) -> None:
    """Say how many published claims pass the filters, or how many hold: the count of README and report."""
    suspected = {verdict.claim.id for verdict in verdicts if verdict.claim.suspected}
    rows = ledger.once([ledger.row(verdict) for verdict in verdicts])
    counts = ledger.totals([row for row in rows if row["basis"] != OWN and row["claim"] not in suspected])
    answer = f"Of {number_of(counts['claims'], 'claims that others published')}: "
    answer += ", ".join(f"{counts[name]} {name}" for name in OF_WORLD if counts[name])
    if filters.given or not verdicts:
        passed = joined([f"{name} {wanted}" for name, wanted in filters.given.items()]) or "such words"
        answer = f"{number_of(counts['claims'], 'claims that others published')} with {passed}"
        if others := len(verdicts) - counts["claims"]:
            answer += f"; {others} more do not count: premises, own numbers, suspicions, or checks that cannot fail"
    say_wrapped(f"{answer}.", "")


def _checks(names: tuple[str, ...]) -> list[str]:
    """Return the checks with these names, or all checks, with claims of this study that use them."""
    known = catalogue.checks()
    for name in names:
        if name not in known:
            raise Stop(f"there is no check {name}", nearest(name, known))
    listed = files.read_all()
    chosen = [catalogue.lines(name, listed) for name in known if not names or name in names]
    return [*catalogue.HEAD, *(line for lines in chosen for line in ["", *lines])]


def _central(verdict: Verdict) -> dict:
    """Return a central claim as a row."""
    row = words.summary(verdict)
    says = textwrap.shorten(row["claimed"], 50, placeholder=" ...", break_on_hyphens=False)
    return {"claim": verdict.claim.id, "says": says, "we find": row["finding"], "certainty": row["certainty"] or None}


def _summary(verdicts: list[Verdict]) -> None:
    """Show the central claims, and count the verdicts by document and by evidence, in at most 100 columns."""
    if central := [_central(verdict) for verdict in verdicts if verdict.claim.central]:
        say(CENTRAL, "")
        show(central)
        say("", ALL, "")
    rows = ledger.once([ledger.row(verdict) for verdict in verdicts])
    by_verdict = []
    by_evidence = []
    for document in dict.fromkeys(row["document"] for row in rows):
        mine = [row for row in rows if row["document"] == document]
        world = ledger.totals([row for row in mine if row["basis"] != OWN])
        own = ledger.totals([row for row in mine if row["basis"] == OWN])
        apart = {CONSISTENT: own[CONSISTENT], "contradictions": own[CONTRADICTS], "open": own[INCONCLUSIVE]}
        by_verdict.append({"document": document} | {name: world[name] for name in ("claims", *OF_WORLD)})
        ours = {"ours": sum(row["premise"] for row in mine)}
        by_evidence.append({"document": document} | ledger.bases(mine) | apart | ours)
    show(by_verdict)
    say_wrapped("", APART, "")
    show(by_evidence)
    say("")
    by_basis = [totals for totals in ledger.by_basis(rows) if totals["basis"] != OWN]
    show([{name: totals[name] for name in ("basis", "claims", *OF_WORLD)} for totals in by_basis])


def _coverage(folder: Path, filters: Filters) -> None:
    """Show how many testable sentences of each document are judged, and what its authors say of the verdicts."""
    if filters.given or not folder.is_dir():
        return
    names = ("document", "testable", "judged", "counted", "contact", "response")
    say_wrapped("", COVERAGE, "")
    show([{name: getattr(each, name) for name in names} for each in files.coverage(folder)])


def report(
    *,
    runs: tuple[Path, ...] = (),
    out: Path = Path("reports/build"),
    readme: Path | None = None,
) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Args:
        runs: Folders that contain runs, at any depth.
        out: The folder for the pages. An earlier report in it is replaced.
        readme: Also write the verdicts into this file, between its two marker lines.
    """
    if not runs:
        raise Stop("study report needs --runs", "give folders that contain runs")
    from study.report.site import command

    sys.exit(command(runs, out, readme))


def _say_chosen(verdicts: list[Verdict], given: tuple[str, ...]) -> None:
    """Print everything about claims named by id, or about a single one; a sentence for each of several others."""
    if len(verdicts) > 1 and given[0].lower() != verdicts[0].claim.id.lower():
        _say_plainly(verdicts)
        return
    rule = f"\n\n{'-' * WIDTH}\n\n"
    say(rule.join("\n".join(words.lines(each)) for each in verdicts))


def _say_plainly(verdicts: list[Verdict]) -> None:
    if verdicts:
        lines = [f"{each.claim.id}: {words.plainly(each)}" for each in verdicts]
        say_wrapped(*lines, "", indent="    ")


def _named(given: tuple[str, ...], claims: list[Claim]) -> list[Claim]:
    """Return the claims with these ids, or those that contain all the words; all claims if nothing is given."""
    by_id = {claim.id.lower(): claim for claim in claims}
    if all(word.lower() in by_id for word in given):
        return [by_id[word.lower()] for word in given] or claims
    wanted = re.compile(rf"(?<!\w){re.escape(' '.join(given))}(?!\w)", re.IGNORECASE)
    containing = [claim for claim in claims if wanted.search(f"{claim.says} {claim.quote or ''}")]
    if not containing:
        remedy = nearest(given[0], [claim.id for claim in claims], otherwise="study claims --verbose lists all of them")
        raise Stop(f"there is no claim {' '.join(given)}, and none contains it", remedy)
    return containing
