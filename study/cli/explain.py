"""`study explain`: what is behind a sentence that a command printed, by the id in brackets; and what a word means."""

import re
from operator import itemgetter
from typing import Annotated

import tyro

from study import report
from study.cli.claims import claims
from study.cli.findings import show_behind
from study.cli.ids import by_key, forms, key, keys, row_of, word, words, words_with
from study.configs.sentences import sentences
from study.core.errors import Stop, nearest
from study.core.files import beside
from study.core.text import say, say_wrapped
from study.known.explained import Explained
from study.ledger import search, texts
from study.records.compare import REASONS
from study.records.groups import grouped

SOME = 3  # ids of a group that are named
LONGEST = 4  # arguments that are one word, such as `cannot be decided here`
NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3"}
OF_STAGE = re.compile(rf"(?i)(?<=stage[ -])({'|'.join(NUMBERS)})\b")
# Words that ask, and mean nothing by themselves.
OF_QUESTIONS = re.compile(
    "(?i)an?|and|are|between|by|can|do|does|for|how|i|if|in|is|it|its|many|much|my|not|of|on|or|so|than|that|the|to|"
    r"versus|vs\.?|what|when|where|which|why|will|with"
)
ASKS = re.compile("(?i)(are|can|do|does|how|is|what|when|which|why|will) ")
NEXT = {
    "component": "To read next: `study estimate` predicts it.",
    "arm": "To read next: `study arms` lists all arms, and GUIDE.md says which to use.",
    "key": "To read next: `study stack --config FILE` names known faults that a config's keys meet.",
    "word": "To read next: examples/zero_by_hand/README.md shows what ZeRO does. WORDS.md has all words.",
}


def explain(
    ids: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
) -> list[dict]:
    """Explain sentences by their ids: when they are said, what they rest on, where they are discussed, rule and test.

    Commands print the id behind a sentence, in brackets. Without an id the kinds of sentences are counted. It also says
    what an arm is, whose a key of a config is, and what a word means.

    With --json: the same; without an id all sentences. Example: `study explain second_bucket S000-20`

    Args:
        ids: Ids, claims, arms, keys or words.
        every: Without an id: list all sentences, one a line.
    """
    if not ids:
        rows = all_rows()
        if every:
            say(*[f"{row['id']}: {row['sentence']}" for row in rows])
        else:
            count_kinds(rows)
        return rows
    answers = answers_to(ids)
    wanted = [id for id in terms(ids) if is_known(id) or not answers]
    kinds_told: set[str] = set()  # whose next reading is said
    for id in wanted:
        row = word(id)
        of_id = by_key().get(key(id))
        of_key = keys().get(key(id))
        rows = [row] if row else words_with(id) or ([of_key] if of_key and not of_id else [])
        # An id in brackets, as commands print it, is never looked up as a word.
        is_id = of_id and (id.startswith("[") or id == of_id.id)
        if rows and not is_id:
            also = named_so(id, row, of_id, of_key if of_key not in rows else None)
            if not row and rows[0]["kind"] == "word":
                say_wrapped(f"No word is {id!r} alone. It is part of:")
            for each in rows:
                following = [] if each["kind"] in kinds_told else [NEXT[each["kind"]]]
                kinds_told.add(each["kind"])
                say_wrapped(f"{each['id']}: {each['sentence'].rstrip('.')}.", *following, *also, "")
            answers += rows
        elif of_id:
            answers.append(show_behind(of_id))
        else:
            answers += claims((claim_named(id),))
    return answers


def terms(ids: tuple[str, ...]) -> list[str]:
    """Return the terms to explain: words that together have a meaning, such as `optimizer states`, are one.

    Of a question, such as `why is stage 2 smaller than stage 1`, what is known is asked for: both stages.
    """
    answers = groups(ids)
    content = [each for each in answers if not OF_QUESTIONS.fullmatch(each)]
    known = [*dict.fromkeys(filter(is_known, content))]
    if not known:
        return [" ".join(content or answers)]
    return known if len(content) < len(answers) else answers


def named_so(id: str, row: dict | None, of_id: Explained | None, of_key: dict | None) -> list[str]:
    """Return what else has this name: a sentence, a key of a config, a part of memory, or claims."""
    also = [f"A sentence has this name as well: study explain '[{of_id.id}]'"] if of_id else []
    if of_key and not row:
        also = [f"A key of a config has this name as well: study explain '[{of_key['id']}]'"]
    if row and row["kind"] == "word" and (why := REASONS.get(id.strip("[]"))):
        also = [f"Of a rank's memory: {why}.", *also]
    if row and search.is_name(id):
        also.append(f"Its claims: study claims {id}")
    return also


def answers_to(ids: tuple[str, ...]) -> list[dict[str, str]]:
    """Print README's answers to a question, found by a word that is no part of a longer term, such as loss scale.

    Who asks what one word is wants its meaning alone.
    """
    parts = [each.lower() for each in groups(ids)]
    content = [each for each in parts if not OF_QUESTIONS.fullmatch(each)]
    if not ASKS.match(" ".join(ids)) or (parts[0] == "what" and len(content) == 1):
        return []
    typed = {form for each in content for form in forms(each)}
    answers = []
    # Read here, as the module that shows them needs packages that the light install lacks.
    for each in beside(str(report.__file__), "answers.toml")["answer"]:
        if typed & {*each["words"]}:
            page = f"To read next: reports/answers/{each['name']}.md"
            say_wrapped(f"{each['question']} {each['answer']}", f"How it is known: {each['known']}.", page, "")
            answers.append(row_of(each["question"], "answer", each["answer"]))
    return answers


def groups(ids: tuple[str, ...]) -> list[str]:
    """Return what was typed, with words that together have a meaning as one."""
    answers = []
    typed = OF_STAGE.sub(lambda found: NUMBERS[found[0].lower()], " ".join(ids).replace("?", "")).split()
    while typed:
        length = min(LONGEST, len(typed))
        while length > 1 and not is_known(" ".join(typed[:length])):
            length -= 1
        if "".join(typed[length : length + 1]).isdigit():  # no number has a meaning alone: stage 4
            length += 1
        answers.append(" ".join(typed[:length]))
        typed = typed[length:]
    return answers


def is_known(id: str) -> bool:
    return bool(word(id)) or key(id) in by_key() or key(id) in keys() or search.is_name(id.strip("[]"))


def all_rows() -> list[dict]:
    """Return all that has an id: sentences, then published claims."""
    rows = [row_of(each.id, each.kind, each.sentence) for each in sentences()]
    return rows + [row_of(claim.id, "published claim", claim.found) for claim in texts.claims()]


def claim_named(id: str) -> str:
    """Return the id of a claim, or the name of a document. Raise Stop if nothing is called so."""
    name = id.strip("[]")
    if not search.is_name(name):
        raise Stop(
            f"no sentence has the id {id!r:.80}, and no word",
            nearest(id, [*(row["id"] for row in all_rows()), *words()], SOME, "study explain --all lists them"),
        )
    return name


def count_kinds(rows: list[dict]) -> None:
    """Print what there is to explain: each kind, how many sentences are of it, and some of their ids."""
    say(f"{len(rows)} sentences have an id. Commands print it in brackets. To see one: study explain second_bucket", "")
    for kind, alike in grouped(rows, itemgetter("kind")).items():
        some = ", ".join(row["id"] for row in alike[:SOME])
        say_wrapped(f"{len(alike):>4} of the kind “{kind}”, such as {some}", indent="       ")
    say("", "study explain --all lists all; `study explain --all | grep clip` finds those about clipping.")
