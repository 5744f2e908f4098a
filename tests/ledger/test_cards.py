"""The pages of cards, which readers on GitHub open from the page of claims, and WORDS.md are up to date."""

import re

import cards
import pytest

from study.core.arms import ROOT
from study.core.glossary import meanings
from study.ledger import search, texts
from study.report.topics import documents


@pytest.fixture(scope="module")
def kept():
    return documents.kept_records()


@pytest.mark.parametrize("text", texts.texts(), ids=lambda text: text.document)
def test_a_page_of_cards_is_that_of_its_document(text, kept):
    page = (cards.FOLDER / f"{text.document}.md").read_text()
    assert page == cards.page(text, kept), "python tools/cards.py"
    assert re.findall(r"(?m)^## (.+)$", page) == [claim.id for claim in text.claim]


def test_a_document_without_a_page_is_noticed():
    assert {path.stem for path in cards.FOLDER.iterdir()} == {text.document for text in texts.texts()}


def test_a_quote_is_no_markdown_and_an_expression_is_code():
    (claim,) = search.named(("P4-14",))
    assert "“\\*hpZ\\* eliminates" in cards.card(claim, [])
    (claim,) = search.named(("P3-07",))
    assert "arithmetic: `20 * 12 * 195 * 65536 ** 2 / 2 ** 40`" in cards.card(claim, [])


def test_the_page_of_words_is_that_of_the_glossary():
    assert (ROOT / "WORDS.md").read_text() == cards.words(), "python tools/cards.py"


def test_words_stand_in_alphabetical_order():
    words = [word.casefold() for word in meanings()]
    words = words[: words.index("holds")]  # those of verdicts follow, the best first
    assert len(words) > 80
    assert words == sorted(words)
