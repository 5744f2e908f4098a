"""One answer to a pasted text: what it means, what to do, who is hit, what that rests on, and what would say more."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import Version

from study.configs.oom import reading
from study.configs.oom.causes import causes
from study.configs.pasted import losses, matching, tracebacks, watchdogs
from study.configs.pasted.read import Pasted, read
from study.configs.pasted.tracebacks import Seen
from study.core.errors import Stop
from study.known.faults import named

MOST_MAY = 5
MOST_QUESTIONS = 3
MOST_ALSO = 3
OF_CONDITIONS = {"stage": "the stage (--stage) or FSDP", "passes": "gradient accumulation", "ranks": "the number of GPUs"}


@dataclass(frozen=True)
class Answer:
    """What a text means. `sentence` is what a person reads first."""

    id: str
    sentence: str
    sure: Literal["sure", "likely", "possible", "nothing"]
    do: str = ""
    who: str = ""
    rests_on: str = ""
    line: str = ""  # of the text
    read: tuple[str, ...] = ()
    also: tuple[Seen, ...] = ()  # seen as well
    may: tuple[str, ...] = ()  # sentences on faults of which the text speaks
    left: int = 0  # faults that may apply, and of which it does not speak
    questions: tuple[str, ...] = field(default=())


def answer(text: str, symptom: str = "") -> Answer:
    """Return the answer to a text, and to what a person says was seen."""
    pasted = read(f"{text}\n{symptom}")
    seen = _seen(pasted)
    words = f"{pasted.prose}\n{symptom}"
    found = matching.matches(pasted, words, {each.id for each in seen})
    explained = [_of_fault(each) for each in found if each.sure != "possible"]
    seen = _explained(seen, explained)
    about = {"read": tuple(_read(pasted, seen)), "may": (), "left": 0}
    candidates = [each for each in found if each.sure == "possible"]
    speaks = [each for each in candidates if each.is_seen and each.share >= matching.SOME and each.applies.may_be_inside]
    if not any(not each.follows for each in seen):
        about |= {"may": tuple(map(_may, speaks[:MOST_MAY])), "left": len(candidates) - len(speaks[:MOST_MAY])}
    if not seen:
        return Answer("nothing", _nothing(pasted), "nothing", questions=_questions(pasted, seen, candidates), **about)
    first, *also = seen
    return Answer(
        id=first.id,
        sentence=first.sentence,
        sure=first.sure,
        do=first.do,
        who=first.who,
        rests_on=first.rests_on,
        line=first.line,
        also=tuple(also[:MOST_ALSO]),
        questions=_questions(pasted, seen, candidates),
        **about,
    )


def _seen(pasted: Pasted) -> list[Seen]:
    """Return what the text shows, what happened first before what follows from it."""
    errors = [_in_its_release(each, pasted) for each in tracebacks.errors(pasted.text)]
    found = [*errors, *_memory(pasted.text), *watchdogs.hangs(pasted.text), *losses.signs(pasted.text)]
    memory = any(each.id == "memory" for each in found)
    hung = ("rank-behind", "rank-missing", "nccl-watchdog", "watchdog-stuck", "gloo-timeout")
    order = ("sure", "likely", "possible")
    return sorted(
        found,
        # Who waited for a rank that failed saw no more than that; losses before an error are rarely its cause.
        key=lambda each: (each.follows, each.id in hung and (memory or bool(errors)), order.index(each.sure), each.place),
    )


def _in_its_release(seen: Seen, pasted: Pasted) -> Seen:
    """Return an error without the fault that makes it, where the release is another."""
    if not seen.fault:
        return seen
    fault = named(seen.fault)
    release = pasted.releases.get(fault.package)
    if isinstance(release, Version) and fault.has(release) is False:
        return Seen(**vars(seen) | {"fault": "", "who": "", "sure": "possible"})
    return seen


def _memory(text: str) -> Iterator[Seen]:
    """Yield what an error about memory means, as `study oom` says without a model."""
    try:
        error = reading.find(text)
    except Stop:
        return
    first, *others = causes(error, {}, False, "")
    what = f"Memory was full: {'likely' if first.is_likely else 'perhaps'} {first.what}"
    if error.where != "GPU":
        what = f"Memory was short, not of the GPU: {first.what}"
    place = max(text.find(error.line[:40]), 0)
    do = f"{first.remedy}. It is told apart so: {first.apart}"
    if others:
        do += f". Else: {others[0].what}"
    sure: Literal["likely", "possible"] = "likely" if first.is_likely else "possible"
    rests_on = f"{'; '.join(first.reasons)}; `study oom FILE --model MODEL --arm ARM` compares the size with its tensors"
    yield Seen("memory", what, do, sure, rests_on, place=place, line=error.line)


def _of_fault(match: matching.Match) -> Seen:
    fault = match.fault
    rests_on = f"{fault.rests_on}{f', reproductions/{fault.script}.py' if fault.script else ''} {fault.upstream}".strip()
    sentence = fault.sentence.rstrip(".")
    if match.sure == "likely":
        rests_on += f"; asked: {' '.join(question.text for question in match.applies.why)}"
    who = f"{fault.package} {fault.releases}"
    return Seen(fault.id, sentence, fault.do, match.sure, rests_on, who=who, fault=fault.id)


def _explained(seen: list[Seen], faults: list[Seen]) -> list[Seen]:
    """Put faults before the signs that they explain, and behind errors."""
    of_steps = {"loss-zero", "loss-nan", "loss-constant", "norm-sqrt2", "norm-nan", "norm-zero", "norm-constant",
                "norm-scaled", "steps-slow-down"}  # fmt: skip
    errors = [each for each in seen if each.id not in of_steps and not each.follows]
    signs = [each for each in seen if each.id in of_steps]
    follows = [each for each in seen if each.follows]
    known = {each.fault for each in errors}
    faults = [each for each in faults if each.id not in known]
    silent = [each for each in faults if not named(each.id).symptom.startswith("error")]
    return [*errors, *silent, *signs, *[each for each in faults if each not in silent], *follows]


def _may(match: matching.Match) -> str:
    asked = " ".join(question.text for question in match.applies.why)
    return f"{match.fault.sentence.rstrip('.')} ({match.fault.package} {match.fault.releases}) [{match.fault.id}]. {asked}"


def _read(pasted: Pasted, seen: list[Seen]) -> Iterator[str]:
    yield from pasted.words
    if frames := re.findall(r'File "[^"\n]*", line \d+', pasted.text):
        yield f"{len(frames)} frames of tracebacks"
    if told := losses.lines(pasted.text):
        yield f"{len(told)} lines of a trainer"


def _nothing(pasted: Pasted) -> str:
    if not pasted.text.strip():
        return "The text is empty"
    if not pasted.words and not re.search(r"(?i)error|deepspeed|accelerate|torch|fsdp|loss", pasted.text):
        return "Nothing in this text is known here: no error, no library, no training"
    return "Nothing known applies to what you gave"


def _questions(pasted: Pasted, seen: list[Seen], candidates: list[matching.Match]) -> tuple[str, ...]:
    """Return what would say most more: the error itself, releases, then what faults in question ask."""
    asked = []
    if seen and all(each.follows for each in seen):
        asked.append("What is the first Traceback of any rank? Paste the lines above")
    if not any(isinstance(release, Version) for release in pasted.releases.values()):
        asked.append("Which releases? Paste `pip freeze`")
    if not seen:
        counts = [question.condition for each in candidates for question in each.applies.why]
        for condition, what in OF_CONDITIONS.items():
            if condition in counts and condition not in pasted.said:
                asked.append(f"What is {what}? Paste the config or the launch command")
        if not pasted.prose.strip():
            asked.append("What was seen? Say it with --symptom \"...\"")
    return tuple(asked[:MOST_QUESTIONS])
