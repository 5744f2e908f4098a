"""Which claims and faults somebody means: by ids, documents, verdicts and topics, or by words that claims contain."""

import difflib
import re
from collections.abc import Callable, Sequence, Set
from typing import NoReturn

from study.core.errors import Stop
from study.known.faults import Fault
from study.ledger.texts import (
    ARXIV,
    CERTAINTIES,
    TOPICS,
    VERDICTS,
    Aside,
    Claim,
    asides,
    claims,
    faults,
    of,
    texts,
)

# Kinds of claims that `named` takes, as it takes documents.
KINDS = (*VERDICTS[::-1], *CERTAINTIES[::-1], "papers", "articles", "posts", *TOPICS)
# Words by which we count, for a verdict's own, and the usual one for a topic.
ALSO = {
    "open": "cannot be decided here",
    "undecided": "cannot be decided here",
    "refuted": "does not hold",
    "conditional": "holds only if",
    "speed": "time",
}
# Each kind by all that names it: "certainty: high" as cards print it.
FILTERS = (
    {kind: kind for kind in KINDS}
    | ALSO
    | {
        typed: level
        for level in CERTAINTIES
        for typed in (f"certainty {level}", f"certainty: {level}", f"{level} certainty")
    }
)
OF_VERDICTS = {typed: kind for typed, kind in FILTERS.items() if kind in VERDICTS}  # the page has fields for the others
MOST_WORDS = max(len(typed.split()) for typed in FILTERS)
ALSO_WORDS = {*CERTAINTIES, "holds"}  # beside a word that claims have next to it: "high bandwidth" is no certainty
ID = re.compile(r"(?i)(?:S?0*(\d{1,3})|(P\d))-0*(\d+)")  # S000-20 and P1-01, or as people type them: 0-20, p1-1
ANY_ID = re.compile(r"(?i)[a-z]?\d*-\d+")  # of a claim or a fault, whether or not there is one
# What people type, and what claims write for it. Claims write stage 3 or ZeRO-3, where evidence has zero3.
MEANT = (
    (r"\bzero([123])\b", r"(?:stage|ZeRO)[ -]\1"),
    (
        r"\b(?:(?:activation|gradient)[ -])?(?:checkpointing|recomputing|recomputation)\b",
        "(?:checkpoint|recomput)[a-z]*",
    ),
)
LETTER = r"[^\W\d_]"
IN_QUOTES = re.compile(r"[\"“”]([^\"“”]+)[\"“”]|([^\s\"“”]+)")  # a phrase, or a word beside one
# Where a hyphen or a space may be: super-linear, super linear and superlinear are one word, as are 60 GB and 60GB.
# "1-2" is not 12.
BETWEEN = re.compile(rf"(?<={LETTER})[ -]+|[ -]+(?={LETTER})|(?<=[^\W_])(?={LETTER})")
# The ending that the last word loses. What is left finds all that begin so, if it is long: activ finds activations.
ENDING = re.compile(
    r"(?<=[a-z]{3}iz)(?:e[ds]?|ing|ations?)$|(?<=[a-z]{3}[a-rt-z])s$|(?<=[a-z]{2}[sxh])es$|(?<=[a-z]{5})(?:ing|ed)$",
    re.IGNORECASE,
)
BEGINNING = re.compile(rf"{LETTER}{{3}}$")
WORDS_OF_A_TITLE = 3  # with fewer it is another: "trillion parameter" is of claims, and of the title of one paper
TEXT = ("head", "text", "about")  # of `fields_of`: what a claim says, without its evidence
WHOLE = (*TEXT, "rest")
MOST_NEAR = 3  # names that are suggested for one that nothing has
LEAST_LETTERS = 5  # of a misspelt word and of what is meant: with fewer it is another, as load is not lora
NEAR = 0.8  # similarity of a misspelt word to one that a claim has
NEAR_A_VERDICT = 0.85  # the same of "does not holds", which is also three words that claims have

Found = Claim | Fault | Aside
POOLS: dict[str, Callable[[], Sequence[Found]]] = {  # of no claims
    "faults": faults,
    "contradictions": lambda: [each for each in asides() if each.is_contradiction],
}


def named(words: tuple[str, ...]) -> list[Found]:
    """The claims and faults with these ids, those of a document or of some kinds, or those that contain these words.

    Each word is used: a document and kinds narrow what ids and other words find. Several other words are a phrase
    where claims have them so, as in "stage 3"; else each is looked for. They also find where a text contradicts itself,
    and what is central to it and not judged.
    """
    tokens = _tokens(words)
    by_name = _by_name()
    # --- so many words of a title are no words of a claim, and no kinds
    if titled := _titled(" ".join(tokens)):
        return [each for each in claims() if each.document in titled]
    kinds, others = _filters(tokens)
    pools = [each for each in others if each.lower() in POOLS]
    names = [each for each in others if each.lower() in by_name]
    rest = [each for each in others if each not in {*pools, *names, *missing(words)}]
    narrows = bool(names or kinds or pools)
    if rest or not narrows:
        _refuse_nearly_a_verdict(" ".join(tokens).lower().split())
    # --- ids, documents and kinds
    chosen: list[Found] = [each for name in names for each in by_name[name.lower()]]
    documents = {_document(each) for each in chosen}
    if pools:
        chosen = [each for pool in pools for each in POOLS[pool.lower()]() if not names or _document(each) in documents]
    within = [each for each in (chosen if names or pools else claims()) if _kinds(each) >= {*kinds}]
    if narrows and not rest:
        return within or _refuse_kinds(kinds, [*names, *pools])
    if titled := _titled(" ".join(rest)):
        within = [each for each in within if _document(each) in titled]
        return within or _refuse_kinds(kinds, sorted(titled))
    # --- other words, in what these leave
    found = _with(rest, within if narrows else _judged(), by_head=not narrows)
    if not found and len(kinds) == 1 and not names and not pools and {*kinds} <= {*TOPICS}:
        found = _with(tokens, claims(), by_head=True)  # a topic is a word of claims as well
    if not pools:
        told = [each for each in asides() if not names or each.document in documents]
        found += _with(rest, [each for each in told if each.kinds >= {*kinds}], by_head=False)
    return found or _refuse_unknown(words, by_name.keys())


def missing(words: Sequence[str]) -> list[str]:
    """The ids among these words that nothing has, beside others that something has."""
    by_name = _by_name()
    tokens = [each.lower() for each in _tokens(words)]
    if not any(each in by_name for each in tokens):
        return []
    return [each.upper() for each in tokens if ANY_ID.fullmatch(each) and each not in by_name]


def apart(words: Sequence[str]) -> list[str]:
    """The words, and each of several names with commas between, such as P1-17,P1-19, as one."""
    by_name = _by_name()
    found: list[str] = []
    if any(quote in word for word in words for quote in '"“”'):  # quotes that the shell left
        words = [phrase or word for phrase, word in IN_QUOTES.findall(" ".join(words))]
    for word in words:
        parts = [each for each in re.split(r"[\s,]+", word) if each]
        are_names = parts and all(ANY_ID.fullmatch(each) or each.lower() in by_name for each in parts)
        found += parts if are_names else [word]
    return found


def is_name(word: str) -> bool:
    """Whether a word is the id of a claim, or the name of a document or of a kind of claims."""
    name = _as_written(word).lower()
    return name in _by_name() or name in FILTERS or name in POOLS


def _tokens(words: Sequence[str]) -> list[str]:
    """The words, with the ledger's name of each id and of each paper's address; a phrase in quotes is one."""
    by_number = {number: text.document for text in texts() for number in ARXIV.findall(text.address)}
    tokens: list[str] = []
    for word in apart(words):
        for each in word.split() if ARXIV.search(word) else [word]:
            paper = ARXIV.search(each)
            if paper and paper[0] in by_number:
                if tokens and tokens[-1].lower().rstrip(":") == "arxiv":
                    tokens.pop()
                each = by_number[paper[0]]
            tokens.append(_as_written(each))
    return [each for each in tokens if each.strip()]


def _filters(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The kinds among words, and the other words."""
    kinds: list[str] = []
    others: list[str] = []
    place = 0
    while place < len(tokens):
        for several in range(min(MOST_WORDS, len(tokens) - place), 0, -1):
            typed = " ".join(tokens[place : place + several]).lower()
            after = tokens[place + several : place + several + 1]
            beside = [*(f"{other} {typed}" for other in others[-1:]), *(f"{typed} {other}" for other in after)]
            is_word = typed in ALSO_WORDS and any(
                each.lower() not in FILTERS and _containing([each], _judged(), TEXT) for each in beside
            )
            if typed in FILTERS and not is_word:
                if FILTERS[typed] not in kinds:
                    kinds.append(FILTERS[typed])
                place += several
                break
        else:
            others.append(tokens[place])
            place += 1
    return kinds, others


def _titled(phrase: str) -> set[str]:
    """The document that is called so, or those that a catalogue has these words of, if they are enough for a title."""
    called = phrase.lower().removeprefix("the ")
    if called.endswith((" paper", " article")):
        named = {text.document for text in texts() if _pattern(called).fullmatch(text.called)}
        if named:
            return named
    title = _pattern(phrase) if len(phrase.split()) >= WORDS_OF_A_TITLE else None
    return {text.document for text in texts() if title and title.search(text.about)}


def _document(each: Found) -> str:
    return "" if isinstance(each, Fault) else each.document


def _kinds(each: Found) -> set[str]:
    return set() if isinstance(each, Fault) else each.kinds


def _by_name() -> dict[str, Sequence[Claim | Fault]]:
    by_name: dict[str, Sequence[Claim | Fault]] = {each.id.lower(): [each] for each in _judged()}
    for text in texts():
        by_name |= {
            name.lower(): text.claim for name in (text.document, text.document.removeprefix("S"))
        }  # 002 is S002
    return by_name


def _judged() -> list[Claim | Fault]:
    return [*claims(), *faults()]


def _as_written(word: str) -> str:
    """An id of a claim as the ledger has it."""
    if (found := ID.fullmatch(word.strip())) is None:
        return word
    article, paper, number = found.groups()
    return f"{paper or f'S{article:0>3}'}-{number:0>2}"


def _containing(words: Sequence[str], known: Sequence[Found], parts: Sequence[str]) -> list[Found]:
    patterns = [_pattern(word) for word in words if word.strip()]
    return [each for each in known if patterns and all(pattern.search(text_of(each, parts)) for pattern in patterns)]


def _with(words: Sequence[str], known: Sequence[Found], by_head: bool) -> list[Found]:
    """Those about these words as a phrase; where none is, those that have the phrase, or each word; at last, anywhere.

    The page of claims finds the same: `found` of site.js.
    """
    phrase = [" ".join(words)]
    about = _containing(phrase, known, ("head",)) if by_head and len(words) > 1 else []
    if any(isinstance(each, Claim) for each in about):
        return about
    ways = ((phrase, TEXT), (words, TEXT), (phrase, WHOLE), (words, WHOLE), (phrase[0].split(), ("about",)))
    return next(filter(None, (_containing(wanted, known, parts) for wanted, parts in ways)), [])


def _refuse_nearly_a_verdict(words: Sequence[str]) -> None:
    others = [verdict for verdict in VERDICTS if " " in verdict and f" {verdict} " not in f" {' '.join(words)} "]
    for several in {len(verdict.split()) - lacking for verdict in others for lacking in (0, 1)}:
        for start in range(len(words) - several + 1):
            typed = " ".join(words[start : start + several])
            if near := difflib.get_close_matches(typed, others, 1, NEAR_A_VERDICT):
                raise Stop(f"no verdict is called {typed}", f"did you mean {near[0]}?")


def _refuse_unknown(words: Sequence[str], names: Set[str]) -> NoReturn:
    known = _judged()
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
    raise Stop(what, f"did you mean {' or '.join(near)}?" if near else nearest_claims(_tokens(words)) or fewer)


def nearest_claims(words: Sequence[str]) -> str:
    """Say which claims have most of several words, if some have more than half of them."""
    # First those that have most of them, and of these the ones that are about them.
    counted = [
        [sum(len(_containing([word], [each], of)) for word in words) for of in (TEXT, ("head",))] for each in claims()
    ]
    ordered = sorted(zip(counted, claims(), strict=True), key=lambda row: row[0], reverse=True)
    (most, _), _ = ordered[0]
    if 2 * most <= len(words) or most < 2:
        return ""
    named = "; ".join(f"{each.id} “{each.quote}”" for (number, _), each in ordered[:MOST_NEAR] if number == most)
    return f"the nearest have {most} of these {len(words)} words: {named}"


def _refuse_kinds(kinds: Sequence[str], names: Sequence[str]) -> NoReturn:
    of = f" of {', '.join(names).upper()}" if names else ""
    what = f"no claim{of} is all of these: {', '.join(kinds)}"
    raise Stop(what, "give fewer of them; study claims --all counts them")


def _pattern(words: str) -> re.Pattern:
    """A word from its beginning, and a whole number: 5X is not in 1.5x."""
    return re.compile(rf"(?<!\w)(?<!\d[.,]){_alike(words)}(?!\w)", re.IGNORECASE)


def _alike(words: str) -> str:
    """The pattern of words and of other spellings of them."""
    for typed, meant in MEANT:
        if found := re.search(typed, words, re.IGNORECASE):
            return _alike(words[: found.start()]) + found.expand(meant) + _alike(words[found.end() :])
    more = f"{LETTER}*" if BEGINNING.search(words) else ""
    return "[ -]*".join(map(re.escape, BETWEEN.split(ENDING.sub("", words)))) + more


def text_of(each: Found, parts: Sequence[str] = TEXT) -> str:
    """These parts of what words are looked for in, a line for each field."""
    return "\n".join(line for part in parts for line in fields_of(each)[part]).replace("`", "")


def fields_of(each: Found) -> dict[str, list[str]]:
    """What words are looked for in: a word in the evidence alone does not make it a claim about that."""
    fields: dict[str, list[str]] = {"head": [], "text": [], "rest": [], "about": []}
    if isinstance(each, Claim):
        certainty = f"certainty: {each.certainty}" if each.certainty else ""
        fields["head"] = [each.verdict, certainty, each.answer, each.quote, each.question]
        fields["text"] = [each.id, each.condition, each.where, each.would_decide, each.found, each.not_judged]
        fields["rest"] = [f"{each.numbers}.".removeprefix("."), each.quoted_from, each.instead]
        fields["rest"] += [said for piece in each.evidence for said in (piece.what, piece.shown, piece.note)]
        fields["rest"] += [each.because, each.changes]
        fields["about"] = [of(each).about]
    elif isinstance(each, Fault):
        fields["head"] = [f"{each.package} {each.releases}", each.sentence]
        fields["text"] = [each.id, each.found]
        fields["rest"] = [each.because]
    else:
        fields["text"] = [each.document, each.said]
    return fields
