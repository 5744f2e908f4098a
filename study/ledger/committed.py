"""The verdicts that the reports contain, each with the version of its check and the planted falsehood that turns it.

Later verdicts are compared with them. A falsehood is sought again if the check, the verdict or the finding changed.
"""

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel, TypeAdapter

from study.io import files
from study.io.words import joined
from study.ledger import trial_checks
from study.ledger.arguments import Check as Function
from study.ledger.judging import Verdict
from study.ledger.model import Case, Check, Claim, Reference
from study.ledger.severity import turned_by
from study.ledger.verdict import MEASURED, VERDICTS
from study.probes import answers
from study.records.evidence import Evidence
from study.spec import arms

FILE = arms.ROOT / "reports" / "verdicts.json"
RANGES = arms.ROOT / "reports" / "conform" / "releases" / "ranges.json"
MAX_BYTES = 4 * 2**20
DIGITS = 8  # of a version
COMPARED = ("unit", "relation", "tolerance", "better", "enough")


class Committed(BaseModel):
    """What is kept of a verdict."""

    version: str
    verdict: str
    found: str
    turned_by: str | None


@functools.cache
def ranges() -> dict[str, str]:
    """Return the releases in which claims are right, by their ids, as `study versions all` found them."""
    return json.loads(files.read(RANGES, MAX_BYTES)) if RANGES.exists() else {}


def version(claim: Claim) -> str:
    """Return the version of a claim's check: a digest of its code, its arguments, and the claimed value."""
    whole = [_content(claim), claim.kind, claim.conditions, claim.unsaid]
    return hashlib.sha256(json.dumps(whole, default=str, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _content(check: Check) -> list:
    """Return what decides what a check finds, besides the evidence."""
    value = check.value
    compared = [_content(value.check) if isinstance(value, Reference) else value]
    compared += [getattr(check, name) for name in COMPARED]
    return [_code(check.written), check.arguments, compared]


def _code(case: Case) -> list[str]:
    """Return what identifies the code of a check: of its function, or of what tries each trial."""
    function = inspect.unwrap(case.function)
    if case.function in trial_checks.TRIALS.values():
        return [answers.code(trial_checks.trial_of(function, call)) for call in case.calls]
    return [_code_of(function)]


@functools.cache
def _code_of(function: Function) -> str:
    """Return the arguments and the code of a function, without comments and docstring."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef):
        return ast.unparse(tree)
    body = tree.body[ast.get_docstring(tree) is not None :]
    return "\n".join(map(ast.unparse, [tree.args, *body]))


@functools.cache
def verdicts() -> dict[str, Committed]:
    """Return the committed verdicts by claim. None without the folder of reports, as in an installed package."""
    if not FILE.exists():
        return {}
    return TypeAdapter(dict[str, Committed]).validate_json(files.read(FILE, MAX_BYTES))


def write(judged: Iterable[Verdict]) -> None:
    """Replace the committed verdicts."""
    entries = {verdict.claim.id: _entry(verdict).model_dump() for verdict in judged}
    FILE.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    verdicts.cache_clear()


def _entry(verdict: Verdict) -> Committed:
    return Committed(
        version=version(verdict.claim),
        verdict=verdict.verdict,
        found=str(verdict.found),
        turned_by=verdict.turned_by,
    )


def with_falsehood(verdict: Verdict, evidence: Evidence, anew: bool) -> Verdict:
    """Return a verdict with the planted falsehood that turns it: the committed one if nothing changed."""
    known = None if anew else verdicts().get(verdict.claim.id)
    if known and known == _entry(replace(verdict, turned_by=known.turned_by)):
        return replace(verdict, turned_by=known.turned_by)
    return replace(verdict, turned_by=turned_by(verdict, evidence))


def changes(judged: Iterable[Verdict]) -> list[str]:
    """Return which verdicts are not the committed ones, by the reason, in words."""
    return [
        f"{len(changed)} verdicts differ from the committed ones {reason}: "
        + ", ".join(f"{each.claim.id} {each.verdict} (was {verdicts()[each.claim.id].verdict})" for each in changed)
        for reason, changed in _by_reason(judged).items()
    ]


def differences(judged: list[Verdict]) -> list[str]:
    """Return how the counts of verdicts differ from the committed ones, and why, in few lines."""
    known = [each for each in judged if each.claim.id in verdicts()]
    now = Counter(each.verdict for each in known)
    before = Counter(verdicts()[each.claim.id].verdict for each in known)
    counts = joined(
        [f"{now[word]} {word} (committed: {before[word]})" for word in VERDICTS if now[word] != before[word]]
    )
    reasons = joined([f"{len(changed)} {reason}" for reason, changed in _by_reason(known).items()])
    if not reasons:
        return [f"All {len(known)} verdicts, on premises and suspicions as well, are the committed ones."]
    return [f"Of {len(known)} verdicts, on premises and suspicions as well: {counts}.", f"Not as committed: {reasons}."]


def _by_reason(judged: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts that are not the committed ones, by the reason."""
    by_reason: dict[str, list[Verdict]] = {}
    for verdict in judged:
        known = verdicts().get(verdict.claim.id)
        if known and known.verdict != verdict.verdict:
            by_reason.setdefault(_reason(verdict, known), []).append(verdict)
    return by_reason


def _reason(verdict: Verdict, known: Committed) -> str:
    if known.version != version(verdict.claim):
        return "since the check or the claim changed"
    return "by other runs" if verdict.claim.basis == MEASURED else "by other answers or formulas"
