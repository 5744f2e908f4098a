# /// script
# dependencies = ["zero-study[report]"]
# ///
"""Pages for readers on GitHub: the cards of all claims, a page for each document, and WORDS.md: python tools/cards.py

The cards have what `study claims ID` prints, the words what `study explain WORD` prints.
"""

import argparse
import re

from study.core.arms import ROOT
from study.core.glossary import meanings
from study.ledger import texts
from study.ledger.evidence import Piece
from study.ledger.texts import Claim, Text
from study.report.topics import documents

FOLDER = ROOT / "reports/answers/claims"
MARKED = re.compile(r"[*<$|]")  # in a quote; GitHub would read it as Markdown

PATH = re.compile(r"(?:examples|notebooks|reports)/[\w/]+\.\w+")
WORDS = """# Words

In alphabetical order. `study explain WORD` prints them, and what an arm is.

| word | meaning |
|---|---|
{words}
## Verdicts and certainties

Of a [claim](GUIDE.md#check-a-claim):

| verdict or certainty | what it means |
|---|---|
{verdicts}
Made from `study/core/glossary.toml` by `python tools/cards.py`.
"""


def words() -> str:
    """Return WORDS.md."""
    rows = [PATH.sub(r"[\g<0>](\g<0>)", f"| {word} | {meaning} |\n") for word, meaning in meanings().items()]
    first = [*meanings()].index(texts.VERDICTS[0])
    return WORDS.format(words="".join(rows[:first]), verdicts="".join(rows[first:]))


def quoted(text: str) -> str:
    return MARKED.sub(r"\\\g<0>", text)


def line_of(piece: Piece) -> str:
    of = quoted(piece.what) if piece.kind == "source" else f"`{piece.what}`"
    return f"- **{piece.shown}** {piece.kind}: {of}".replace("**** ", "") + (f" ({piece.note})" if piece.note else "")


def card(claim: Claim, records: list[str]) -> str:
    """Return the card of a claim, whose records are in these folders."""
    lines = [
        f"## {claim.id}",
        f"**{claim.judged[0].upper()}{claim.judged[1:]}.** {claim.answer}",
        f"*{claim.question}* ({claim.topic})",
        f"{claim.numbers}.".removeprefix("."),
        *[f"> {quoted(text)}" if name == "The text" else f"{name}: {text}" for name, text in claim.parts.items()],
        f"This quote is from {claim.quoted_from}." if claim.quoted_from else "",
        f"What would change it: {claim.changes}",
        f"How bytes count: {claim.how_bytes_count}" if claim.how_bytes_count else "",
        "\n".join(map(line_of, claim.evidence)),
    ]
    if records:
        links = ", ".join(f"[{each.removeprefix('reports/')}](../../../{each})" for each in records)
        lines.append(f"Counted again: `study claims {claim.id} --runs reports`. Records: {links}.")
    return "\n\n".join(filter(None, lines))


def page(text: Text, records: dict[str, dict[str, list[str]]]) -> str:
    """Return the page of a document."""
    ids = ", ".join(f"[{claim.id}](#{claim.id.lower()})" for claim in text.claim)
    quotes = f"Its quotes are from {text.quotes}." if text.quotes else ""
    head = [f"# Claims of {text.document}", text.cited, quotes, f"Read of it: {text.read}.", ids, *text.findings]
    if text.not_judged:
        head += ["Central, and judged by no claim of ours:", "\n".join(f"- {each}" for each in text.not_judged)]
    cards = [card(claim, records.get(claim.id, {}).get("folders", [])) for claim in text.claim]
    source = "Made from `study/ledger/texts/` by `python tools/cards.py`. [All claims](../claims.md)."
    return "\n\n".join(filter(None, [*head, *cards, source])) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (ROOT / "WORDS.md").write_text(words())
    kept = documents.kept_records()
    for each in texts.texts():
        (FOLDER / f"{each.document}.md").write_text(page(each, kept))
