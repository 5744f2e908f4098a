"""The form of the ledger's files, and how they are read: texts with their claims, and faults of libraries.

Somebody reads a sentence and writes the verdict. `study.ledger.evidence` computes its evidence; a test compares them.
"""

import difflib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal, NamedTuple, NoReturn, get_args

from pydantic import BaseModel, Field

from study.core.errors import Stop
from study.core.files import load
from study.core.text import is_number, number_of
from study.known.faults import Fault, table
from study.ledger.evidence import MAX_BYTES, MOVED, STRICT, Evidence, OfRuns, Value, middle
from study.records.runs import Run
from study.sweeps import protocol

FOLDER = Path(__file__).with_name("texts")
VerdictWord = Literal["holds", "does not hold", "holds only if", "cannot be decided here"]
VERDICTS = get_args(VerdictWord)  # in the order of tables
CertaintyWord = Literal["high", "moderate", "low", "very low"]
CERTAINTIES = get_args(CertaintyWord)
TopicWord = Literal["memory", "traffic", "losses", "time", "settings"]
TOPICS = get_args(TopicWord)
# Kinds of claims that `named` takes, as it takes documents; "certainty: high" as cards print it.
KINDS = (*VERDICTS[::-1], *CERTAINTIES[::-1], "papers", "articles", "posts", *TOPICS)
# Words by which we count, for a verdict's own, and the usual one for a topic.
ALSO = {
    "open": "cannot be decided here",
    "undecided": "cannot be decided here",
    "refuted": "does not hold",
    "conditional": "holds only if",
    "speed": "time",
}
KIND = re.compile(rf"(?<!\w)(?:certainty:? )?({'|'.join((*KINDS, *ALSO))})(?!\w)")
LEVEL = "|".join(CERTAINTIES[::-1])
# Beside other words these narrow what they find; "high bandwidth" is no certainty.
NARROWING = re.compile(
    rf"(?<!\w)(certainty:? (?:{LEVEL})|(?:{LEVEL}) certainty|papers|articles|posts|{'|'.join((*TOPICS, *ALSO))})(?!\w)"
)
ID = re.compile(r"(?i)(?:S?0*(\d{1,3})|(P\d))-0*(\d+)")  # S000-20 and P1-01, or as people type them: 0-20, p1-1
ARXIV = re.compile(r"\d{4}\.\d{5}")  # a paper's number; typed with its version, or within an address
ARM = re.compile(r"(?i)\bzero([123])\b")  # claims write stage 3 or ZeRO-3, where evidence has zero3
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MOST_TO_READ = 3
WORDS_OF_A_TITLE = 3  # with fewer it is another: "trillion parameter" is of claims, and of the title of one paper
MOST_NEAR = 3  # names that are suggested for one that nothing has
LETTERS_OF_A_CONDITION = 120  # in a list
LEAST_LETTERS = 5  # of a misspelt word and of what is meant: with fewer it is another, as load is not lora
NEAR = 0.8  # similarity of a misspelt word to one that a claim has
NEAR_A_VERDICT = 0.85  # the same of "does not holds", which is also three words that claims have
COUNTED = (
    "Volume is the size of the tensors that ranks hand to collectives, as the papers count. What gloo writes to its "
    "sockets is more where it reduces or reduce-scatters (`study explain socket bytes`)."
)
AGREES, DIFFERS, NO_RUNS = ANSWERS = "agree", "differ", "need other runs"


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
    would_decide: str = ""  # one that cannot be decided here
    found: str  # why the answer is so, with all conditions
    instead: str = ""  # for one that does not hold: the nearest sentence that the evidence carries
    changes: str  # what would change the verdict
    certainty: CertaintyWord | None = None  # None: it cannot be decided here
    because: str = ""
    evidence: Annotated[tuple[Evidence, ...], Field(strict=False, max_length=14)]
    document: str = Field(default_factory=lambda known: known["id"].partition("-")[0])

    @property
    def said(self) -> str:
        return f"{self.question} {self.quote} {self.answer} {self.found}"

    @property
    def kinds(self) -> set[str]:
        """The words of `KIND` that are true of it."""
        source = "articles" if self.document.startswith("S") else "papers"
        posts = {"posts"} if self.in_post else set()
        return {self.verdict, source, self.topic, self.certainty or "", *posts}

    @property
    def head(self) -> str:
        """What it is about, and the verdict as it is printed: without the reasons."""
        return f"{self.question} {self.quote} {self.answer} {self.verdict} (certainty: {self.certainty})"

    @property
    def judged(self) -> str:
        return f"{self.verdict} (certainty: {self.certainty})" if self.certainty else self.verdict

    @property
    def in_a_list(self) -> str:
        """The answer. Of one that holds only if something, this: without it such a verdict says nothing."""
        return shorten(self.condition, LETTERS_OF_A_CONDITION, placeholder=" ...") or self.answer

    @property
    def parts(self) -> dict[str, str]:
        """What a card has below the quote, by its name."""
        named = {
            "It holds only if": self.condition,
            "What would decide it": self.would_decide,
            "Because": self.found,
            "What we would sign": self.instead,
            "So certain because": self.because,
            "How bytes count": COUNTED if any(getattr(each, "quantity", "") in MOVED for each in self.evidence) else "",
        }
        return {name: text for name, text in named.items() if text}

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
    claim: Annotated[tuple[Claim, ...], Field(strict=False)]

    @property
    def about(self) -> str:
        """What a library's catalogue has of it."""
        papers = " ".join(f"arXiv {number}" for number in ARXIV.findall(self.address))
        return f"{self.document} {self.title} {self.authors} {papers}"

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


def named(words: tuple[str, ...]) -> list[Claim | Fault]:
    """The claims and faults with these ids, those of a document or of some kinds, or those that contain these words.

    Several words are a phrase where claims have them so, as in "stage 3". Otherwise each is looked for by itself.
    Beside a document, a topic, a certainty, papers, articles, posts or open they are looked for in these.
    """
    known: list[Claim | Fault] = [*claims(), *faults()]
    by_document: dict[str, Sequence] = {text.document.lower(): text.claim for text in texts()}
    by_document |= {text.document.removeprefix("S").lower(): text.claim for text in texts()}  # 002 as well as S002
    by_name: dict[str, Sequence] = {each.id.lower(): [each] for each in known} | {"faults": faults()} | by_document
    # --- each word is a name, or all of them are words of a claim
    names = [_as_written(word).lower() for word in words]
    if by_name.keys() >= set(names):
        return [each for name in names for each in by_name[name]]
    kinds = [ALSO.get(kind, kind) for kind in KIND.findall(" ".join(names))]
    rest = KIND.sub(" ", " ".join(names)).replace(" certainty", " ").split()
    if kinds and by_name.keys() >= set(rest):
        return _of_kinds([each for name in rest for each in by_name[name]] or claims(), kinds, rest)
    _refuse_nearly_a_verdict(" ".join(names).split())
    # --- so many words of a title are no words of a claim
    if len(" ".join(names).split()) >= WORDS_OF_A_TITLE:
        title = _pattern(" ".join(names))
        titled: list[Claim | Fault] = [each for text in texts() if title.search(text.about) for each in text.claim]
        if titled:
            return titled
    # --- documents and kinds narrow what other words find, if they find something
    narrow = NARROWING.findall(" ".join(names))
    documents = [name for name in names if name in by_document]
    if narrow or documents:
        wanted = {ALSO.get(each, re.sub("certainty:?", "", each).strip()) for each in narrow}
        of_documents = [each for name in documents for each in by_document[name]] or claims()
        of_kinds = [each for each in of_documents if each.kinds >= wanted]
        taken = {*" ".join(narrow).split(), *documents}
        others = [word for word in words if word.lower() not in taken]
        if narrowed := _containing([" ".join(others)], of_kinds) or _containing(others, of_kinds):
            return narrowed
    return _with(words, known) or _refuse_unknown(words, known, by_name.keys())


def _as_written(word: str) -> str:
    """An id of a claim as the ledger has it."""
    if (found := ID.fullmatch(word.strip())) is None:
        return word
    article, paper, number = found.groups()
    return f"{paper or f'S{article:0>3}'}-{number:0>2}"


def _containing(words: Sequence[str], known: Sequence[Claim | Fault]) -> list[Claim | Fault]:
    patterns = [_pattern(word) for word in words if word.strip()]
    return [each for each in known if patterns and all(pattern.search(text_of(each)) for pattern in patterns)]


def _with(words: Sequence[str], known: Sequence[Claim | Fault]) -> list[Claim | Fault]:
    """Those about these words as a phrase; where no claim is, those that have each of them."""
    if len([word for word in words if word.strip()]) > 1:
        phrase = _pattern(" ".join(words))
        # A phrase in the reasons does not make it a claim about that.
        about = [each for each in known if phrase.search(each.head if isinstance(each, Claim) else each.outcome)]
        if about:
            return about
    return _containing(words, known)


def _refuse_nearly_a_verdict(words: Sequence[str]) -> None:
    others = [verdict for verdict in VERDICTS if " " in verdict and f" {verdict} " not in f" {' '.join(words)} "]
    for several in {len(verdict.split()) - lacking for verdict in others for lacking in (0, 1)}:
        for start in range(len(words) - several + 1):
            typed = " ".join(words[start : start + several])
            if near := difflib.get_close_matches(typed, others, 1, NEAR_A_VERDICT):
                raise Stop(f"no verdict is called {typed}", f"did you mean {near[0]}?")


def _refuse_unknown(words: Sequence[str], known: Sequence[Claim | Fault], names: Set[str]) -> NoReturn:
    what = f"no claim is named {' '.join(words):.80}, and none contains all of these words"
    said = {word.lower() for each in known for word in re.findall(r"[\w-]+", text_of(each))}
    # A word that some claim has is not misspelt.
    unknown = [word for word in words if word.strip() and word.lower() not in said | names]
    ids = [each.id for each in known]
    near: list[str] = []
    for word in map(_as_written, unknown):
        document, _, number = word.upper().rpartition("-")
        if of_document := [each.id for each in claims() if each.document == document and number.isdecimal()]:
            nearest = sorted(of_document, key=lambda id: abs(int(id.partition("-")[2]) - int(number)))
            near += sorted(nearest[:MOST_NEAR])
            continue
        alike = [each for each in sorted(said - names) if len(each) >= LEAST_LETTERS and each[0] == word[0].lower()]
        like = ids if len(word) < LEAST_LETTERS else [*ids, *alike]
        near += difflib.get_close_matches(word, like, MOST_NEAR, NEAR)
    fewer = ("give fewer words; " if len(words) > 1 else "") + "study claims --all lists the documents"
    raise Stop(what, f"did you mean {' or '.join(near)}?" if near else fewer)


def _of_kinds(chosen: Sequence[Claim | Fault], kinds: Sequence[str], names: Sequence[str]) -> list[Claim | Fault]:
    found: list[Claim | Fault] = [each for each in chosen if isinstance(each, Claim) and each.kinds >= set(kinds)]
    if not found:
        of = f" of {', '.join(names).upper()}" if names else ""
        what = f"no claim{of} is all of these: {', '.join(kinds)}"
        raise Stop(what, "give fewer of them; study claims --all counts them")
    return found


def _pattern(words: str) -> re.Pattern:
    if paper := ARXIV.search(words):
        words = paper[0]
    either = ARM.sub(r"(?:stage|ZeRO)[ -]\1", re.escape(words))
    return re.compile(rf"(?<!\w){either}(?!\w)", re.IGNORECASE)


def text_of(each: Claim | Fault) -> str:
    """Return what single words are looked for in. A word in the evidence does not make it a claim about that."""
    if isinstance(each, Claim):
        parts = (each.id, each.head, each.where, each.found, each.condition, each.would_decide, of(each).about)
        return " ".join(parts)
    return f"{each.said} (certainty: {each.certainty})"


def by_verdict(chosen: Iterable[Claim | Fault]) -> dict[str, list[Claim]]:
    """Return claims by verdict, in the order of tables, with verdicts that none has."""
    found: dict[str, list[Claim]] = {verdict: [] for verdict in VERDICTS}
    for each in chosen:
        if isinstance(each, Claim):
            found[each.verdict].append(each)
    return found


def counts(claims: Iterable[Claim | Fault]) -> dict[str, int]:
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
        chosen = [claim for claim in claims if claim.document.startswith("S") == (source == "articles")]
        documents = number_of(len({claim.document for claim in chosen}), source)
        holds, not_, only_if, undecided = counts(chosen).values()
        posts = counts(claim for claim in chosen if claim.in_post)["holds"]
        of_posts = f" ({posts} of DeepSpeed's posts on them)" if posts else ""
        do = "does" if not_ == 1 else "do"
        said.append(
            f"Of {len(chosen)} claims of {documents} {holds} hold{of_posts}, {not_} {do} not, "
            f"{only_if} hold under a condition, and {undecided} cannot be decided here."
        )
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


def to_read_first(chosen: Sequence[Claim | Fault]) -> list[str]:
    """Return the ids of the three surest of those that their documents stand for."""
    central = [each for each in chosen if isinstance(each, Claim) and each.central]
    ids = [each.id for certainty in CERTAINTIES for each in central if each.certainty == certainty]
    return ids[:MOST_TO_READ]


class Compared(NamedTuple):
    claim: str
    evidence: OfRuns
    values: list[Value]  # of each run or pair, from the least
    answer: str
    runs: list[str]  # for each value the folder of its run, or of the two runs of a ratio
    alike: Sequence[str]  # the commands that make runs like most of them

    @property
    def value(self) -> Value:
        """Their median, or the text that all have."""
        return middle(self.values)


def compared(claims: Iterable[Claim], runs: Sequence[Run]) -> list[Compared]:
    """Each number that claims take from runs, beside the same of other runs, if there are such runs."""
    rows = []
    for claim in claims:
        for piece in claim.evidence:
            if isinstance(piece, OfRuns):
                valued = piece.values_with_runs(runs)
                if valued and is_number(valued[0][0]):
                    valued.sort(key=lambda each: each[0])
                values = [value for value, _ in valued]
                answer = AGREES if all(map(piece.agrees, values)) else DIFFERS
                of = [" over ".join(os.path.relpath(run.folder) for run in several) for _, several in valued]
                ways = Counter(tuple(dict.fromkeys(map(protocol.alike, several))) for _, several in valued)
                # A sweep makes what the other side of a ratio needs as well.
                alike = max(
                    ways, key=lambda way: (all(each.startswith("study sweep") for each in way), ways[way]), default=()
                )
                rows.append(Compared(claim.id, piece, values, answer if valued else NO_RUNS, of, alike))
    return rows
