"""The form of the ledger's files, and how they are read: texts with their claims, and faults of libraries.

A verdict is written by a person. Its evidence is computed by `study.ledger.evidence`, and a test compares the two.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, Field, model_validator

from study.core.errors import Stop
from study.core.files import load
from study.ledger.evidence import MAX_BYTES, STRICT, Evidence

FOLDER = Path(__file__).with_name("texts")
FAULTS = Path(__file__).with_name("faults.toml")
VerdictWord = Literal["holds", "does not hold", "holds only if", "cannot be decided here"]
VERDICTS = get_args(VerdictWord)
CertaintyWord = Literal["high", "moderate", "low", "very low"]
LEVELS = get_args(CertaintyWord)
LONGEST_QUOTE = 60  # words


def _short(quote: str) -> str:
    count = len(quote.split())
    if not 0 < count <= LONGEST_QUOTE:
        raise ValueError(f"must have 1 to {LONGEST_QUOTE} words (got {count})")
    return quote


Quote = Annotated[str, AfterValidator(_short)]


class Claim(BaseModel):
    """A published statement, what was found, and the evidence."""

    model_config = STRICT

    id: str
    question: str  # claims of one question stand together
    central: bool = False  # one of the three to five that its text stands for
    quote: Quote
    where: str
    verdict: VerdictWord
    condition: str = ""  # under which it holds; or what would decide it
    found: str
    changes: str  # what would change the verdict
    certainty: CertaintyWord | None = None
    because: str = ""
    idle: bool = False  # its evidence could not have come out otherwise: counted nowhere
    evidence: Annotated[tuple[Evidence, ...], Field(strict=False, max_length=3)]
    document: str = ""

    @property
    def about(self) -> str:
        return f"{self.question} {self.quote}"

    @property
    def outcome(self) -> str:
        """Return the verdict with its condition, or with what would decide it."""
        if self.verdict == "cannot be decided here":
            return f"{self.verdict}; it would take: {self.condition}"
        return f"{self.verdict} {self.condition}".rstrip()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        is_open = self.verdict == "cannot be decided here"
        if bool(self.condition) != (is_open or self.verdict == "holds only if"):
            raise ValueError("condition is for “holds only if” and “cannot be decided here”, which need it")
        if not is_open and not (self.certainty and self.because and self.evidence):
            raise ValueError("a verdict needs certainty, because and evidence")
        return self


class Text(BaseModel):
    """A document with its claims."""

    model_config = STRICT

    document: str
    title: str
    address: str
    read: str
    sentences: Annotated[int, Field(gt=0)]  # list items and rows as well: those that could turn out false
    unjudged: dict[str, int]  # how many of them are not judged, by a word that says why
    authors: str = "not asked"
    findings: tuple[str, ...] = Field(default=(), strict=False)  # where it contradicts itself in a number that matters
    claim: Annotated[tuple[Claim, ...], Field(strict=False)]

    @property
    def judged(self) -> int:
        return self.sentences - sum(self.unjudged.values())


class Fault(BaseModel):
    """A fault of a library, the script that shows it, and the releases that have it."""

    model_config = STRICT

    id: str
    library: Literal["deepspeed", "accelerate", "transformers", "torch"]
    what: str
    releases: str
    script: str  # in reproductions/
    thread: str = ""
    value: float | int | str | bool  # what the script finds
    found: str
    certainty: CertaintyWord
    because: str

    @property
    def about(self) -> str:
        return self.what

    @property
    def outcome(self) -> str:
        return f"is a fault of {self.library} {self.releases}"


class Faults(BaseModel):
    model_config = STRICT

    fault: tuple[Fault, ...] = Field(strict=False)


def read(path: Path) -> Text:
    """Return a text, whose claims know their document."""
    text = _form(path, Text)
    claims = tuple(each.model_copy(update={"document": text.document}) for each in text.claim)
    return text.model_copy(update={"claim": claims})


@functools.cache
def texts() -> tuple[Text, ...]:
    """Return all texts: documents, then papers."""
    known = [read(path) for path in FOLDER.glob("*.toml")]
    for name, times in Counter(claim.id for text in known for claim in text.claim).items():
        if times > 1:
            raise Stop(f"two claims have the id {name}", "give one of them another")
    return tuple(sorted(known, key=lambda text: text.document))


def claims() -> list[Claim]:
    return [claim for text in texts() for claim in text.claim]


@functools.cache
def faults() -> tuple[Fault, ...]:
    return _form(FAULTS, Faults).fault


def _form(path: Path, form):
    return load(path, form, what="as the ledger needs it", remedy="correct the file", most_bytes=MAX_BYTES)


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """Return how many claims have which verdict. A claim whose evidence is idle counts nowhere."""
    number = Counter(claim.verdict for claim in claims if not claim.idle)
    return {name: number[name] for name in VERDICTS}


def by_document() -> list[dict]:
    """Return how many sentences of each document are judged, and how many claims have which verdict."""
    return [
        {"document": each.document, "sentences": each.sentences, "judged": each.judged} | counts(each.claim)
        for each in texts()
    ]


def in_words(claims: Iterable[Claim]) -> str:
    """Return the count of verdicts as one sentence."""
    number = counts(claims)
    texts = (
        f"Of {sum(number.values())} published claims {number['holds']} hold, {number['does not hold']} do not",
        f"{number['holds only if']} hold under a condition",
        f"and {number['cannot be decided here']} cannot be decided here.",
    )
    return ", ".join(texts)


def named(words: tuple[str, ...]) -> list[Claim | Fault]:
    """Return the claims and faults with these ids, those of a document, or those that contain these words."""
    known: list[Claim | Fault] = [*claims(), *faults()]
    by_name: dict[str, list] = {each.id.lower(): [each] for each in known} | {"faults": [*faults()]}
    by_name |= {text.document.lower(): [*text.claim] for text in texts()}
    if all(word.lower() in by_name for word in words):
        return [each for word in words for each in by_name[word.lower()]]
    wanted = re.compile(rf"(?<!\w){re.escape(' '.join(words))}(?!\w)", re.IGNORECASE)
    matching = [each for each in known if wanted.search(f"{each.about} {each.found}")]
    if not matching:
        raise Stop(f"no claim is named {' '.join(words)}, and none contains it", "study claims lists the documents")
    return matching
