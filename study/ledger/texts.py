"""The form of the ledger's files, and how they are read: texts with their claims, and faults of libraries.

Somebody reads a sentence and writes the verdict. `study.ledger.evidence` computes its evidence; a test compares them.
"""

import functools
import re
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field

from study.core.files import load
from study.core.text import is_number
from study.known.faults import Fault, table
from study.ledger.evidence import MAX_BYTES, MOVED, STRICT, Evidence, calculated

FOLDER = Path(__file__).with_name("texts")
VerdictWord = Literal["holds", "does not hold", "holds only if", "cannot be decided here"]
VERDICTS = get_args(VerdictWord)  # in the order of tables
CertaintyWord = Literal["high", "moderate", "low"]
CERTAINTIES = get_args(CertaintyWord)
TopicWord = Literal["memory", "traffic", "losses", "time", "settings"]
TOPICS = get_args(TopicWord)
ARXIV = re.compile(r"\d{4}\.\d{5}")  # a paper's number; typed with its version, or within an address
NUMBER = re.compile(r"\d+(?:\.\d+)?")
LETTERS_OF_A_CONDITION = 120  # in a list
NEAR = 0.15  # a number is right within this share: `study explain holds`
COUNTED = (
    "Volume is the size of the tensors that ranks hand to collectives, as the papers count. What gloo writes to its "
    "sockets is more where it reduces or reduce-scatters (`study explain socket bytes`)."
)


ORDINALS = ("first", "second", "third", "fourth")


def source_of(document: str) -> str:
    return "articles" if document.startswith("S") else "papers"


class Claim(BaseModel):
    """A published statement, what was found, and the evidence."""

    model_config = STRICT

    id: str
    question: str  # claims of one question stand together
    topic: TopicWord
    central: bool = False  # one of the three to five that its text stands for
    in_post: bool = False  # of DeepSpeed's post or tutorial on a paper, and not of the paper
    quote: str  # at most 60 words
    where: str
    quoted_from: str = ""  # if the quote does not stand in what `address` of its text leads to
    verdict: VerdictWord
    answer: str  # one sentence of at most 25 words; everything else is behind it
    ours: str = ""  # one number of the answer, and the same of the text
    theirs: str = ""
    condition: str = ""  # under which it holds
    is_reading: bool = False  # of `condition`: settings alone are not enough, as what a word means has to be read so
    would_decide: str = ""  # one that cannot be decided here
    not_judged: str = ""  # a part of the quoted sentence
    found: str  # why the answer is so, with all conditions
    instead: str = ""  # for one that does not hold: the nearest sentence that the evidence carries
    changes: str  # what would change the verdict
    certainty: CertaintyWord | None = None  # None: it cannot be decided here
    because: str = ""
    evidence: Annotated[tuple[Evidence, ...], Field(strict=False, max_length=14)]
    document: str = Field(default_factory=lambda known: known["id"].partition("-")[0])

    @property
    def kinds(self) -> set[str]:
        """The words of `KIND` that are true of it."""
        posts = {"posts"} if self.in_post else set()
        return {self.verdict, source_of(self.document), self.topic, self.certainty or "", *posts}

    @property
    def judged(self) -> str:
        return f"{self.verdict} (certainty: {self.graded})" if self.certainty else self.verdict

    @property
    def graded(self) -> str:
        """The certainty, and whether only a part of the sentence has it."""
        return f"{self.certainty}, in part" if self.not_judged else f"{self.certainty}"

    @property
    def in_a_list(self) -> str:
        """The answer. Of one that holds only if something, this: without it such a verdict says nothing."""
        return shorten(self.condition, LETTERS_OF_A_CONDITION, placeholder=" ...") or self.answer

    @property
    def parts(self) -> dict[str, str]:
        """What a card has below its answer, by its name: what decides comes first."""
        named = {
            "It holds only if": self.condition,
            "What would decide it": self.would_decide,
            "What holds instead": self.instead,
            "The text": f"“{self.quote}” ({self.where})",
            "Not judged of its sentence": self.not_judged,
            "So certain because": self.because,
            "Because": self.found,
        }
        return {name: text for name, text in named.items() if text}

    @property
    def how_bytes_count(self) -> str:
        return COUNTED if any(getattr(each, "quantity", "") in MOVED for each in self.evidence) else ""

    @property
    def numbers(self) -> str:
        """The number of the evidence beside that of the text, where there are such."""
        named = {self.given_by: self.ours, "The text says": self.theirs}
        return ". ".join(f"{who}: {number}" for who, number in named.items() if number)

    @property
    def given_by(self) -> str:
        """Who or what gives `ours`, by the evidence that has its first number, or by all: what others measured, or
        what is divided out of their numbers, is nothing that we found."""
        first = next(iter(NUMBER.findall(self.ours.replace(",", ""))), None)
        of_it = {
            piece.kind for piece in self.evidence if first and is_number(piece.value) and piece.value == float(first)
        }
        kinds = of_it or {piece.kind for piece in self.evidence}
        if kinds & {"runs", "virtual", "reproduction", "prediction"}:
            return "We find"
        return "By arithmetic" if kinds & {"arithmetic", "formula"} else "Others report"


class Aside(BaseModel):
    """What is no claim, and is counted apart: where a text contradicts itself in a number that matters, or what is
    central to it and was not judged."""

    model_config = STRICT

    document: str
    said: str
    is_contradiction: bool

    @property
    def kinds(self) -> set[str]:
        return {source_of(self.document)}


class Checked(BaseModel):
    """Numbers of a text that follow from others of it, and are no claims: computed from these."""

    model_config = STRICT

    where: str
    says: Annotated[tuple[float, ...], Field(strict=False)]
    unit: str = ""
    of: Annotated[tuple[float | str, ...], Field(strict=False)] = ("",)  # of each number, in the place of {}
    expression: str
    note: str = ""  # on numbers that do not agree

    @property
    def computed(self) -> list[float]:
        return [calculated(self.expression.format(each)) for each in self.of]

    @property
    def agree(self) -> list[bool]:
        return [abs(computed - said) <= NEAR * said for computed, said in zip(self.computed, self.says, strict=True)]


class Text(BaseModel):
    model_config = STRICT

    document: str
    title: str
    authors: str = ""  # all of them, where a text names persons
    address: str
    quotes: str = ""  # of a paper: which version its quotes are from, and whether `address` leads to it
    read: str  # how much of it was read
    sentences: Annotated[int, Field(gt=0)]  # list items and rows as well: those that could turn out false
    unjudged: dict[str, int]  # how many of them are not judged, by a word that says why
    # What is central to it and no claim is about, with the reason.
    not_judged: tuple[str, ...] = Field(default=(), strict=False)
    findings: tuple[str, ...] = Field(default=(), strict=False)  # where it contradicts itself in a number that matters
    checked: tuple[Checked, ...] = Field(default=(), strict=False)
    claim: Annotated[tuple[Claim, ...], Field(strict=False)]

    @property
    def about(self) -> str:
        """What a library's catalogue has of it."""
        papers = " ".join(f"arXiv {number}" for number in ARXIV.findall(self.address))
        return f"{self.document} {self.title} {self.authors} {papers}"

    @property
    def called(self) -> str:
        """How people name it: the ZeRO paper, the first article."""
        if source_of(self.document) == "papers":
            return f"{self.title.partition(':')[0].removeprefix('PyTorch ')} paper"
        return f"{ORDINALS[int(self.document[1:])]} article"

    @property
    def cited(self) -> str:
        if self.address.startswith("https:"):
            return f"{self.title}, {self.address}"
        return f"{self.title}. Its text is not in the repository, so nobody can check the quote there."

    @property
    def is_read_in_part(self) -> bool:
        """Whether its running text was not read: then its abstract, tables, figures and posts alone are judged."""
        return "was not read" in self.read

    @property
    def judged(self) -> int:
        return self.sentences - sum(self.unjudged.values())


@functools.cache
def texts() -> tuple[Text, ...]:
    what = "as the ledger needs it"
    remedy = "correct the file"
    known = [load(path, Text, what=what, remedy=remedy, most_bytes=MAX_BYTES) for path in FOLDER.glob("*.toml")]
    return tuple(sorted(known, key=lambda text: (not text.document.startswith("S"), text.document)))  # articles first


def claims() -> list[Claim]:
    """Return all claims, in the order of the documents."""
    return [claim for text in texts() for claim in text.claim]


def of(claim: Claim) -> Text:
    """Return the text that a claim is of."""
    return next(text for text in texts() if text.document == claim.document)


def faults() -> list[Fault]:
    """Return the known faults that a script shows, with what it finds."""
    return [each for each in table().fault if each.found]


def asides() -> list[Aside]:
    """Return where texts contradict themselves, and what is not judged of them, in the order of the documents."""
    return [
        Aside(document=text.document, said=said, is_contradiction=is_contradiction)
        for text in texts()
        for is_contradiction, several in ((True, text.findings), (False, text.not_judged))
        for said in several
    ]
