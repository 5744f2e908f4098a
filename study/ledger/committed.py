"""The verdicts that the reports contain. Later verdicts are compared with them."""

import functools
import json
from collections.abc import Iterable

from pydantic import BaseModel, TypeAdapter

from study.io import files
from study.io.numbers import number_of
from study.ledger.judging import Verdict
from study.ledger.verdict import INCONCLUSIVE, NOT_TESTED
from study.spec import arms

FILE = arms.ROOT / "reports" / "verdicts.json"
RANGES = arms.ROOT / "reports" / "conform" / "releases" / "ranges.json"
MAX_BYTES = 4 * 2**20
OPEN = (INCONCLUSIVE, NOT_TESTED)


class Committed(BaseModel):
    """What is kept of a verdict."""

    verdict: str
    found: str


@functools.cache
def ranges() -> dict[str, str]:
    """Return the releases in which claims are right, by their ids, as `study versions all` found them."""
    return json.loads(files.read(RANGES, MAX_BYTES)) if RANGES.exists() else {}


@functools.cache
def verdicts() -> dict[str, Committed]:
    """Return the committed verdicts by claim. None without the folder of reports, as in an installed package."""
    if not FILE.exists():
        return {}
    return TypeAdapter(dict[str, Committed]).validate_json(files.read(FILE, MAX_BYTES))


def write(judged: Iterable[Verdict]) -> None:
    """Replace the committed verdicts."""
    entries = {verdict.claim.id: {"verdict": verdict.verdict, "found": str(verdict.found)} for verdict in judged}
    FILE.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    verdicts.cache_clear()


def changes(judged: Iterable[Verdict]) -> list[str]:
    """Return which verdicts are not the committed ones, in one sentence; nothing if all are."""
    changed = [
        f"{each.claim.id} {each.verdict} (was {verdicts()[each.claim.id].verdict})"
        for each in judged
        if each.claim.id in verdicts() and verdicts()[each.claim.id].verdict != each.verdict
    ]
    return [f"{len(changed)} verdicts differ from the committed ones: {', '.join(changed)}"] if changed else []


def differences(judged: list[Verdict]) -> list[str]:
    """Return whether the verdicts are the committed ones where these runs decide, and how many they leave open."""
    known = [each for each in judged if each.claim.id in verdicts()]
    agree = "These runs agree with the published verdicts wherever they can decide."
    lines = changes(each for each in known if each.verdict not in OPEN) or [agree]
    left_open = [each for each in known if each.verdict in OPEN and verdicts()[each.claim.id].verdict not in OPEN]
    return [*lines, f"These runs leave {number_of(len(left_open), 'verdicts')} open, which other experiments decide."]
