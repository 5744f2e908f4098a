"""How many claims hold: claims by verdict, counted and in words, and those that are read first."""

from collections.abc import Iterable, Sequence

from study.core.text import number_of
from study.known.faults import Fault
from study.ledger.texts import CERTAINTIES, VERDICTS, Aside, Claim, asides, texts

MOST_TO_READ = 3


def by_verdict(chosen: Iterable[Claim | Fault | Aside]) -> dict[str, list[Claim]]:
    """Return claims by verdict, in the order of tables, with verdicts that none has."""
    found: dict[str, list[Claim]] = {verdict: [] for verdict in VERDICTS}
    for each in chosen:
        if isinstance(each, Claim):
            found[each.verdict].append(each)
    return found


def counts(claims: Iterable[Claim | Fault | Aside]) -> dict[str, int]:
    """Return the number of claims by verdict, with those that no claim has."""
    return {verdict: len(found) for verdict, found in by_verdict(claims).items()}


def by_document() -> list[dict]:
    """Count the sentences and the claims of each document, which may join several, and the claims by verdict."""
    return [
        {"document": text.document, "sentences": text.sentences, "claims": len(text.claim)} | counts(text.claim)
        for text in texts()
    ]


def in_words(claims: Sequence[Claim]) -> str:
    """How many hold, of papers and of articles apart: most that do not hold are of articles."""
    said = []
    for source in ("papers", "articles"):
        chosen = [claim for claim in claims if source in claim.kinds]
        documents = number_of(len({claim.document for claim in chosen}), source)
        holds, not_, only_if, undecided = counts(chosen).values()
        posts = counts(claim for claim in chosen if claim.in_post)["holds"]
        of_posts = f" ({posts} of DeepSpeed's posts)" if posts else ""
        do = "does" if not_ == 1 else "do"
        read = sum(claim.is_reading for claim in chosen)
        of_them = f" ({read} by a reading)" if read else ""
        said.append(
            f"Of {len(chosen)} claims of {documents} {holds} hold{of_posts}, {not_} {do} not, "
            f"{only_if} hold under a condition{of_them}, "
            f"and {undecided} cannot be decided here."
        )
    times = [
        sum(source in each.kinds for each in asides() if each.is_contradiction) for source in ("papers", "articles")
    ]
    said.append("Papers contradict themselves {} times, articles {}, slips included, by our reading.".format(*times))
    return " ".join(said)


def by_reading() -> str:
    """What holds of the papers whose bodies were not read, apart from the others."""
    said = []
    for in_part, words in (
        (False, "whose text was read"),
        (True, "of which we read abstract, tables, figures or posts only"),
    ):
        chosen = [text for text in texts() if text.document.startswith("P") and text.is_read_in_part == in_part]
        *others, last = [text.document for text in chosen]
        holds, not_, only_if, undecided = counts(claim for text in chosen for claim in text.claim).values()
        number = sum(len(text.claim) for text in chosen)
        said.append(
            f"{', '.join(others)} and {last}, {words}: of {number} claims {holds} hold, {not_} not, "
            f"{only_if} under a condition, {undecided} are open."
        )
    return " ".join(said)


def surest_first(claims: Iterable[Claim]) -> list[Claim]:
    """Sort claims by verdict, and those of one verdict by certainty."""
    certainties = [*CERTAINTIES, None]
    return sorted(claims, key=lambda each: (VERDICTS.index(each.verdict), certainties.index(each.certainty)))


def to_read_first(chosen: Sequence[Claim | Fault | Aside]) -> list[str]:
    """Return the ids of the three surest of those that their documents stand for."""
    central = [each for each in chosen if isinstance(each, Claim) and each.central]
    ids = [each.id for certainty in CERTAINTIES for each in central if each.certainty == certainty]
    return ids[:MOST_TO_READ]
