"""One answer to a pasted text: what it means, what to do, who is hit, what that rests on, and what would say more."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from study.configs.oom import reading
from study.configs.oom.causes import Cause, causes
from study.configs.pasted import losses, matching, tracebacks, watchdogs
from study.configs.pasted.read import Pasted, read
from study.configs.pasted.situations import fitting
from study.configs.pasted.told import flags, flags_of_arm
from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.two_releases import came_between
from study.configs.pasted.words import Sentence, meets, sentences
from study.core.errors import Stop
from study.core.text import number_of
from study.known.faults import named

MOST_MAY = 5
MOST_QUESTIONS = 3
MOST_ALSO = 3
ORDER = ("sure", "likely", "possible")
# What a rank that waited for a failed one wrote says less than that one's error.
WAITED = ("rank-behind", "rank-missing", "rank-timed-out-first", "nccl-watchdog", "watchdog-stuck", "gloo-timeout")
OF_STEPS = ("loss-", "norm-", "rate-", "steps-", "overflow-")  # the beginnings of signs in the lines of a trainer
OF_NAN = ("loss-zero", "loss-nan", "norm-sqrt2", "norm-nan")
OUT_OF_MEMORY = ("oom",)
FULL = "memory-unsized"
NO_ROOM = "oom-states"
# Who writes so of a model asks what it takes.
OF_SIZES = ("memory", "oom", "what/which stage", "need/needs/require/requires/required/enough/many/minimum + gpu")
HANGS = ("hang",)
FEW_WORDS = 200  # characters
MOST_LINES = 60  # of a question without an error
KILLED_BY_MEMORY = r"(?i)out.of.memory|\boom|MemoryError|allocat|bad_alloc|low on memory"
ByText = Callable[[Pasted, reading.OomError | None], list[Cause]]
RELEASES = "the releases"
OF_MEMORY = ("memory-was-full", "memory-elsewhere", "process-killed")
ASKED = {"stage": "the stage of ZeRO, or FSDP", "passes": "gradient accumulation", "ranks": "the number of GPUs"}


@dataclass(frozen=True)
class PastedAnswer:
    """What a text means. The first of `found` is the answer."""

    found: tuple[Seen, ...]  # the first explains most
    read: tuple[str, ...]  # what was read, in words
    may: tuple[matching.Match, ...]  # faults of which the text speaks
    left: int  # faults that may apply, and of which it does not speak
    questions: tuple[str, ...]
    unsaid: tuple[str, ...]  # what faults depend on, and the text does not say
    nothing: str = ""  # what to say if nothing was found

    @property
    def id(self) -> str:
        return self.found[0].id if self.found else ""

    @property
    def sure(self) -> Literal["sure", "likely", "possible", "nothing"]:
        return self.found[0].sure if self.found else "nothing"


def answer(text: str, symptom: str = "", by_text: ByText | None = None) -> PastedAnswer:
    """Return the answer to a text, and to what a person says was seen.

    `by_text` matches an error about memory with the model that the text names; a page in a browser has none.
    """
    pasted = read(f"{text}\n{symptom}")
    words = f"{pasted.prose}\n{symptom}"
    said = sentences(words)
    shown = _shown(pasted, said, by_text)
    signs = {each.id for each in shown}
    seen = matching.symptoms(said, signs)
    if losses.falls(pasted.text):
        seen -= {"no-update"}  # a log that shows the contrary counts more than words
    if "loss" in seen and not any(id.startswith(OF_STEPS) for id in signs):
        seen |= {"norm"}  # a wrong gradient shows in the loss, or in the rewards
    faults = matching.matches(pasted, words, seen)
    # Beside an error that nothing here explains, and in a long document, words are guesses.
    is_guess = not shown and (_last_error(pasted.text) or _is_document(pasted.text))
    situations = [] if is_guess else fitting(pasted, said, seen | signs)
    found = _ordered(shown, faults, situations) or [*_two_releases(pasted)] or [*_full(pasted, said)]
    found = found or [*_asks_of_sizes(pasted, said)]
    possible = [each for each in faults if each.sure == "possible"]
    speaks = [each for each in possible if each.is_seen and each.applies.may_be_inside and len(each.applies.why) == 1]
    may = [] if found else speaks[:MOST_MAY]
    return PastedAnswer(
        found=tuple(found[: 1 + MOST_ALSO]),
        read=tuple(_read(pasted)),
        may=tuple(may),
        left=len(possible) - len(may),
        questions=_questions(pasted, found, possible, seen),
        unsaid=_unsaid(pasted, possible),
        nothing="" if found else _nothing(pasted),
    )


def _shown(pasted: Pasted, said: tuple[Sentence, ...], by_text: ByText | None) -> list[Seen]:
    """Return what the text shows, the cause before what follows from it."""
    errors = [_in_its_release(each, pasted) for each in tracebacks.errors(pasted.text)]
    memory = [*_memory(pasted, said, by_text)]
    found = [*errors, *memory, *watchdogs.hangs(pasted.text, said), *losses.signs(pasted.text, said)]
    is_failed = any(not each.follows and each.sure != "possible" for each in (*errors, *memory))
    return sorted(
        found, key=lambda each: (each.follows, each.id in WAITED and is_failed, ORDER.index(each.sure), each.place)
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


def _memory(pasted: Pasted, said: tuple[Sentence, ...], by_text: ByText | None) -> Iterator[Seen]:
    """Yield what an error about memory means, as `study oom` says, with a model if the text names one."""
    text = pasted.text
    try:
        error = reading.find(text)
    except Stop:
        # In a document the model, the GPUs and the word memory stand in sentences of other things.
        if _is_document(text) or not by_text:
            return
        if (sentence := meets(OUT_OF_MEMORY, said)) and (of_model := by_text(pasted, None)):
            cause = of_model[0]
            remedy = cause.remedy_for(pasted.said.get("checkpointing"))
            yield _filled_by(cause, text, max(text.find(sentence), 0), remedy, is_sized=False)
        return
    place = max(text.find(error.line[:40]), 0)
    first, *others = (by_text(pasted, error) if by_text else []) or causes(error, {}, False, "")
    if error.where == "GPU" and not error.asked.high and not first.is_likely and pasted.prose:
        return  # the words alone, as in a title: what a person says beside them tells more
    if error.where != "GPU":
        # Of a process that was only seen to end by SIGKILL nobody says why.
        is_said = meets(OUT_OF_MEMORY, said) or re.search(KILLED_BY_MEMORY, error.context)
        if first.id == "oom-host" and not is_said:
            yield sign("process-killed", text, place, remedy=first.remedy)
        else:
            yield sign("memory-elsewhere", text, place, cause=first.what, remedy=first.remedy)
        return
    remedy = f"{first.remedy_for(pasted.said.get('checkpointing'))}. It is told apart so: {first.apart}"
    if others:
        remedy += f". Else: {others[0].what}"
    seen = _filled_by(first, text, place, remedy, is_sized=bool(error.asked.high))
    model = " ".join(filter(None, [flags(pasted), flags_of_arm(pasted)])) if flags(pasted) else "--model MODEL"
    evidence = f"{'; '.join(first.reasons)}; `study oom FILE {model}` compares its size"
    yield Seen(**vars(seen) | {"evidence": evidence, "line": error.line})


def _filled_by(cause: Cause, text: str, place: int, remedy: str, is_sized: bool) -> Seen:
    """Return what filled a GPU. Without the size that was asked for, other situations come before a guess."""
    is_likely = cause.is_likely and (is_sized or cause.id == NO_ROOM)
    how = "likely" if is_likely else "perhaps"
    seen = sign("memory-was-full", text, place, how=how, cause=cause.what, remedy=remedy)
    return seen if is_sized or is_likely else Seen(**vars(seen) | {"sure": "possible"})


def _full(pasted: Pasted, said: tuple[Sentence, ...]) -> Iterator[Seen]:
    """Yield that a GPU's memory was full, where nothing tells more: by an error without its size, or a few words."""
    try:
        is_full = reading.find(pasted.text).where == "GPU"
    except Stop:  # at length people write of memory beside what they ask
        is_full = len(pasted.text) < FEW_WORDS and bool(meets(OUT_OF_MEMORY, said))
    if is_full:
        yield sign(FULL, pasted.text, 0, command=f"study advise {flags(pasted)}".strip())


def _asks_of_sizes(pasted: Pasted, said: tuple[Sentence, ...]) -> Iterator[Seen]:
    """Yield the command that answers who asks what a model takes: it claims nothing, so words are enough."""
    sizes = flags(pasted)
    is_other = _last_error(pasted.text) or meets(HANGS, said)
    if sizes and not is_other and (sentence := meets(OF_SIZES, said)):
        command = " ".join(filter(None, ["study estimate", sizes, flags_of_arm(pasted)]))
        place = max(pasted.text.find(sentence), 0)
        yield sign("sizes-asked", pasted.text, place, command=command, advise=f"study advise {sizes}")


def _ordered(shown: list[Seen], matches: list[matching.Match], situations: list[Seen]) -> list[Seen]:
    """Return errors first, then silent faults, what words mean, signs in steps, and last what follows from others.

    What is only possible comes behind what is likely, and a watchdog, which says who waits, behind who says why.
    """
    told = {each.fault for each in shown}
    faults = [_of_fault(each) for each in matches if each.sure != "possible" and each.fault.id not in told]
    errors = [each for each in shown if not each.id.startswith(OF_STEPS) and each.id not in WAITED]
    if any(not each.follows and each.sure != "possible" for each in errors):
        situations = []
    silent = [each for each in faults if not named(each.id).symptom.startswith("error")]
    # Where a log shows NaN, a fault that makes none explains less than the log does.
    is_nan = any(each.id in OF_NAN for each in shown)
    others = [each for each in silent if is_nan and "nan" not in named(each.id).symptom]
    kinds = [
        [each for each in errors if not each.follows and each.sure != "possible"],
        [each for each in silent if each not in others],
        situations,
        [each for each in errors if not each.follows and each.sure == "possible"],
        [each for each in shown if each.id in WAITED],
        [each for each in shown if each.id.startswith(OF_STEPS)],
        others,
        [each for each in faults if named(each.id).symptom.startswith("error")],
        [each for each in errors if each.follows],
    ]
    found = [each for kind in kinds for each in kind]
    return sorted(found, key=lambda each: (each.follows, each.sure == "possible"))


def _two_releases(pasted: Pasted) -> Iterator[Seen]:
    """Yield what came between two releases of which a text tells."""
    for package, apart in pasted.apart.items():
        faults = came_between(package, apart)
        count = f"{number_of(len(faults), 'known faults')} came" if faults else "no known fault came"
        first = f", such as {faults[0].id}" if faults else ""
        values = {"package": package, "works": apart.works, "broken": apart.broken, "count": count, "first": first}
        yield sign("two-releases", pasted.text, max(pasted.text.find(str(apart.broken)), 0), **values)


def _of_fault(match: matching.Match) -> Seen:
    fault = match.fault
    evidence = " ".join(
        filter(None, [fault.rests_on, fault.script and f"reproductions/{fault.script}.py", fault.upstream])
    )
    if match.applies.why:
        evidence += f". If: {' '.join(question.text for question in match.applies.why)}"
    who = f"{fault.package} {fault.releases}"
    return Seen(fault.id, fault.sentence, fault.do, match.sure, evidence, who=who, fault=fault.id)


def _read(pasted: Pasted) -> Iterator[str]:
    yield from pasted.words
    if frames := re.findall(r'File "[^"\n]*", line \d+', pasted.text):
        yield number_of(len(frames), "frames of tracebacks")
    if told := losses.lines(pasted.text):
        yield number_of(len(told), "lines of a trainer")


def _nothing(pasted: Pasted) -> str:
    if not pasted.text.strip():
        return "The text is empty"
    if _is_strange(pasted):
        return "Nothing in this text is known here: no error, no library, no training"
    if error := _last_error(pasted.text):
        return f"This error is not known here: {error}"
    return "Nothing known applies to what you gave"


def _is_document(text: str) -> bool:
    return text.count("\n") > MOST_LINES and not _last_error(text)


def _is_strange(pasted: Pasted) -> bool:
    return not pasted.words and not re.search(r"(?i)error|deepspeed|accelerate|torch|fsdp|loss", pasted.text)


def _last_error(text: str) -> str:
    lines = re.findall(r"^.{0,40}?\b(\w*(?:Error|Exception): .{1,120})", text, re.MULTILINE)
    return lines[-1] if lines else ""


def _unsaid(pasted: Pasted, possible: list[matching.Match]) -> tuple[str, ...]:
    wanted = {question.condition for each in possible for question in each.applies.why}
    unsaid = [what for condition, what in ASKED.items() if condition in wanted and condition not in pasted.said]
    is_released = any(isinstance(release, Version) for release in pasted.releases.values())
    return tuple(unsaid if is_released else [*unsaid, RELEASES])


def _questions(pasted: Pasted, found: list[Seen], possible: list[matching.Match], seen: set[str]) -> tuple[str, ...]:
    """Return what would say most more: the error itself, what is seen, releases, then what faults in question ask."""
    if not found and _is_strange(pasted):
        return ()
    unsaid = _unsaid(pasted, possible)
    asked = matching.asks(seen) if not found or found[0].id == FULL else []
    if found and all(each.follows for each in found):
        asked.append("What is the first Traceback of any rank? Paste the lines above")
    # An error that explains itself is the same in all releases.
    if RELEASES in unsaid and not (found and (found[0].sure == "sure" or found[0].id in OF_MEMORY)):
        asked.append("Which releases? Give the output of `pip freeze` as well")
    if not found:
        asked += [f"What is {what}? Paste the config or the launch command" for what in unsaid if what != RELEASES]
        if not pasted.prose.strip():
            asked.append('What was seen? Say it with --symptom "..."')
    return tuple(asked[:MOST_QUESTIONS])
