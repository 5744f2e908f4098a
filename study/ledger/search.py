"""Which claims and faults somebody means: by ids, documents, verdicts and topics, or by words that claims contain."""

import difflib
import re
from collections.abc import Sequence, Set
from typing import NoReturn

from study.core.errors import Stop
from study.known.faults import Fault
from study.ledger.texts import ARXIV, CERTAINTIES, TOPICS, VERDICTS, Claim, claims, faults, of, texts

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
ARM = re.compile(r"(?i)\bzero([123])\b")  # claims write stage 3 or ZeRO-3, where evidence has zero3
WORDS_OF_A_TITLE = 3  # with fewer it is another: "trillion parameter" is of claims, and of the title of one paper
MOST_NEAR = 3  # names that are suggested for one that nothing has
LEAST_LETTERS = 5  # of a misspelt word and of what is meant: with fewer it is another, as load is not lora
NEAR = 0.8  # similarity of a misspelt word to one that a claim has
NEAR_A_VERDICT = 0.85  # the same of "does not holds", which is also three words that claims have


def named(words: tuple[str, ...]) -> list[Claim | Fault]:
    """The claims and faults with these ids, those of a document or of some kinds, or those that contain these words.

    Several words are a phrase where claims have them so, as in "stage 3". Otherwise each is looked for by itself.
    Beside a document, a topic, a certainty, papers, articles, posts or open they are looked for in these.
    """
    known: list[Claim | Fault] = [*claims(), *faults()]
    by_document = _by_document()
    by_name = _by_name()
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


def is_name(word: str) -> bool:
    """Whether a word is the id of a claim, or the name of a document or of a kind of claims."""
    return _as_written(word).lower() in _by_name() or bool(KIND.fullmatch(word.lower()))


def _by_document() -> dict[str, Sequence[Claim]]:
    by_document: dict[str, Sequence[Claim]] = {text.document.lower(): text.claim for text in texts()}
    return by_document | {text.document.removeprefix("S").lower(): text.claim for text in texts()}  # 002 is S002


def _by_name() -> dict[str, Sequence[Claim | Fault]]:
    known: list[Claim | Fault] = [*claims(), *faults()]
    return {**{each.id.lower(): [each] for each in known}, "faults": faults(), **_by_document()}


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
    for text in texts():
        for each in text.not_judged:
            if any(word.strip() for word in words) and all(_pattern(word).search(each) for word in words):
                what = f"no claim of ours is of this. Of {text.document} it is not judged: {each.rstrip('.')}"
                raise Stop(what, f"study claims {text.document} lists what is judged of it")
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
