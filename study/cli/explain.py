"""`study explain`: what is behind a sentence that a command printed, by the id in brackets."""

from dataclasses import asdict

import tyro

from study.cli.claims import claims
from study.configs.sentences import sentences
from study.core.errors import Stop, nearest
from study.core.text import say, say_wrapped
from study.known.explained import ROOT, Explained, places
from study.ledger import texts

MOST = 4  # tests that are shown


def explain(ids: tyro.conf.Positional[tuple[str, ...]] = (), /) -> list[dict]:
    """Explain sentences by their ids: rule, sentence, what it rests on, its test, and where it is discussed.

    Commands print the id behind a sentence, in brackets. Without an id all are listed, one a line.

    With --json: the same. Example: `study explain second_bucket S000-20`

    Args:
        ids: Ids, or claims.
    """
    known = {key(each.id): each for each in sentences()}
    rows = [{"id": each.id, "sentence": each.sentence} for each in known.values()]
    rows += [{"id": claim.id, "sentence": claim.found} for claim in texts.claims()]
    if not ids:
        say(*[f"{row['id']}: {row['sentence']}" for row in rows])
        return rows
    by_key = {key(row["id"]): row["id"] for row in rows}
    answers = []
    for id in ids:
        if key(id) not in by_key:
            remedy = nearest(id, by_key.values(), 3, "study explain without an id lists all")
            raise Stop(f"no sentence has the id {id!r:.80}", remedy)
        answers += show(known[key(id)]) if key(id) in known else claims((by_key[key(id)],))
    return answers


def key(id: str) -> str:
    return id.strip("[]").lower().replace("_", "-")


def show(each: Explained) -> list[dict]:
    """Print what is behind a sentence, and return it."""
    at = places(each.id)
    written = [place for place in at if place.startswith(f"{each.table.relative_to(ROOT)}:")]
    rules = [place for place in at if place.startswith("study/") and place not in written]
    tests = [place for place in at if place.startswith("tests/")]
    say_wrapped(
        f"{each.id}: a {each.kind}",
        f"Sentence: {each.sentence.rstrip('.')}.",
        f"What to do: {each.remedy or 'the sentence says it'}.",
        f"Written: {written[0]}",
        f"Rule: {', '.join(rules) or f'that table, which {each.read_by} reads'}",
        f"Rests on: {each.rests_on.rstrip('.') or 'its test'}.",
        f"Test: {', '.join(tests[:MOST]) or 'in a checkout, tests/'}",
        f"Upstream: {each.upstream or 'no thread'}",
        "",
        indent="    ",
    )
    return [{**asdict(each), "table": written[0], "rules": rules, "tests": tests}]
