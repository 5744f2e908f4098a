"""`study explain`: what is behind a sentence that a command printed, by the id in brackets."""

from dataclasses import asdict
from typing import Annotated

import tyro

from study.cli.claims import claims
from study.configs.sentences import sentences
from study.core.errors import Stop, nearest
from study.core.text import say, say_wrapped
from study.known.explained import ROOT, Explained, comments_of_rule, places
from study.ledger import texts

MOST = 4  # tests that are shown
SOME = 3  # ids of a group that are named


def explain(
    ids: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
) -> list[dict]:
    """Explain sentences by their ids: rule, sentence, what it rests on, its test, and where it is discussed.

    Commands print the id behind a sentence, in brackets. Without an id the kinds of sentences are counted.

    With --json: the same; without an id all sentences. Example: `study explain second_bucket S000-20`

    Args:
        ids: Ids, or claims.
        every: Without an id: list all sentences, one a line.
    """
    known = {key(each.id): each for each in sentences()}
    rows = [{"id": each.id, "kind": each.kind, "sentence": each.sentence} for each in known.values()]
    rows += [{"id": claim.id, "kind": "published claim", "sentence": claim.found} for claim in texts.claims()]
    if every and not ids:
        say(*[f"{row['id']}: {row['sentence']}" for row in rows])
        return rows
    if not ids:
        count_kinds(rows)
        return rows
    by_key = {key(row["id"]): row["id"] for row in rows}
    answers = []
    for id in ids:
        if key(id) not in by_key:
            remedy = nearest(id, by_key.values(), 3, "study explain --all lists them")
            raise Stop(f"no sentence has the id {id!r:.80}", remedy)
        answers += show(known[key(id)]) if key(id) in known else claims((by_key[key(id)],))
    return answers


def count_kinds(rows: list[dict]) -> None:
    """Print what there is to explain: each kind, how many sentences are of it, and some of their ids."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row["id"])
    say(f"{len(rows)} sentences have an id. Commands print it in brackets. To see one: study explain second_bucket", "")
    for kind, ids in kinds.items():
        say_wrapped(f"{len(ids):>4} of the kind “{kind}”, such as {', '.join(ids[:SOME])}", indent="       ")
    say("", "study explain --all lists all; `study explain --all | grep clip` finds those about clipping.")


def key(id: str) -> str:
    return id.strip("[]").lower().replace("_", "-")


def show(each: Explained) -> list[dict]:
    """Print what is behind a sentence, and return it."""
    at = places(each.id)
    written = [place for place in at if place.startswith(f"{each.table.relative_to(ROOT)}:")]
    ours = [place for place in at if place.startswith("study/") and place not in written]
    rules = [place for place in ours if ".py:" in place]
    # Of many findings the evidence stands where the rule is.
    rests_on = each.rests_on or " ".join(dict.fromkeys(filter(None, map(comments_of_rule, rules))))
    readers = [place for place in ours if place not in rules]  # tables that name it for another sentence
    tests = [place for place in at if place.startswith("tests/")]
    say_wrapped(
        f"{each.id}: a {each.kind}",
        f"Sentence: {each.sentence.rstrip('.')}.",
        f"What to do: {each.remedy or 'the sentence says it'}.",
        f"Written: {written[0]}",
        f"Rule: {', '.join(rules) or f'that table, which {each.read_by} reads'}",
        *([f"Also named in: {', '.join(readers)}"] if readers else []),
        f"Rests on: {rests_on.rstrip('.') or 'its test'}.",
        f"Test: {', '.join(tests[:MOST]) or 'in a checkout, tests/'}",
        f"Upstream: {each.upstream or 'no thread'}",
        "",
        indent="    ",
    )
    return [{**asdict(each), "rests_on": rests_on, "table": written[0], "rules": [*rules, *readers], "tests": tests}]
