"""What `study diagnose` says of a pasted text: the answer, what to do, who is hit, what it rests on, and questions."""

import re
from dataclasses import asdict

from study.configs.pasted.answer import MOST_MAY, RELEASES, PastedAnswer
from study.configs.pasted.tracebacks import Seen
from study.core.text import number_of, say_wrapped
from study.known.findings import with_id
from study.known.which_apply import ANSWERS

HOW_SURE = {"sure": "", "likely": "Likely: ", "possible": "Is it this? "}
OF_A_SCRIPT = re.compile(r".+\.py:\d+: ")
HEDGES = re.compile(r"\b(likely|perhaps|usually|mostly|most often)\b", re.IGNORECASE)


def tell(told: PastedAnswer, details: bool, says_nothing: bool = True) -> dict:
    """Print and return an answer to a text. `says_nothing`: say it also if nothing was found."""
    if told.unknown and (told.found or not says_nothing):
        say_wrapped(f"{told.unknown}.", "")
    if told.found:
        show_found(told)
    elif says_nothing:
        say_wrapped(f"{told.nothing}.")
    if told.read:
        say_wrapped("", f"Read: {', '.join(told.read)}.")
    say_wrapped(*told.notes)
    show_applying(told)
    show_open(told)
    if details:
        say_wrapped(*[f"Seen: {with_id(each.line, each.id)}" for each in told.found if each.line], indent="    ")
    if told.questions:
        say_wrapped("", "To be surer:" if told.found else "What to give next:")
    for number, question in enumerate(told.questions, 1):
        say_wrapped(f"{question}.", indent="    ", first=f"{number:>2}. ")
    return in_json(told)


def show_applying(told: PastedAnswer) -> None:
    """Show the faults that apply to the releases and settings of a text, or likely do, whatever was seen."""
    for match in told.applying[:MOST_MAY]:
        say_wrapped("", match.applies.in_one_line, indent="    ")
        say_wrapped(f"    What to do: {match.applies.do}.", indent="    ")
    if more := told.applying[MOST_MAY:]:
        ids = ", ".join(f"{match.fault.id} ({ANSWERS[match.applies.answer].lower()})" for match in more)
        say_wrapped("", f"{number_of(len(more), 'others')}: {ids}.")


def show_open(told: PastedAnswer) -> None:
    """Show the faults that may apply, and name the command that lists the others."""
    for match in told.may:
        say_wrapped("", match.applies.in_one_line, indent="    ")
    if told.found and told.left and RELEASES not in told.unsaid:
        symptom = f" --symptom {told.seen[0]}" if len(told.seen) == 1 else ""
        lists = f"`study stack releases.txt{symptom} --details`, with the list of `pip freeze`, names all."
        say_wrapped("", f"{told.left} known faults may apply as well. {lists}")


def show_found(told: PastedAnswer) -> None:
    first, *others = told.found
    say_wrapped(f"{'Also seen: ' if told.unknown else ''}{_said(first)}", "")
    say_wrapped(f"What to do: {first.remedy}.", indent="    ")
    if first.who:
        say_wrapped(f"Who is hit: {first.who}.", indent="    ")
    say_wrapped(f"It rests on: {first.evidence.rstrip('.')}".removesuffix("?") + ".", indent="    ")
    if first.line:
        say_wrapped(f"In the text: {first.line}", indent="    ")
    for each in others:
        say_wrapped("", f"Also seen: {_said(each)}", indent="    ")
        say_wrapped(f"    What to do: {each.remedy}.", indent="    ")
        if OF_A_SCRIPT.match(each.line):
            say_wrapped(f"    In the text: {each.line}", indent="    ")


def _said(seen: Seen) -> str:
    """Return the sentence, with how sure it is unless it says so itself: one hedge is enough."""
    how = "" if seen.sure == "likely" and HEDGES.search(seen.sentence) else HOW_SURE[seen.sure]
    return f"{how}{with_id(seen.sentence, seen.id)}"


def in_json(told: PastedAnswer) -> dict:
    applies = [match.fault.id for match in told.applying if match.applies.answer == "applies"]
    is_wrong = applies or told.sure == "sure"
    fine = False if is_wrong else True if told.is_answered else None
    row: dict = {
        "fine": fine,
        "unknown": told.unknown,
        "answer": told.nothing,
        "id": told.id,
        "sure": told.sure,
        "do": "",
        "who": "",
        "rests_on": "",
    }
    if told.found:
        first = told.found[0]
        row |= {"answer": first.sentence, "do": first.remedy, "who": first.who, "rests_on": first.evidence}
    return row | {
        "found": [asdict(each) for each in told.found],
        "read": told.read,
        "notes": list(told.notes),
        "applies": applies,
        "likely": [match.fault.id for match in told.applying if match.fault.id not in applies],
        "may": [match.fault.id for match in told.may],
        "questions": told.questions,
    }
