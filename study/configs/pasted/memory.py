"""What a text says of memory that was full, or that a training would need."""

import re
from collections.abc import Callable
from dataclasses import replace

from study.configs.oom import reading
from study.configs.oom.causes import Cause, causes
from study.configs.oom.means import in_its_words
from study.configs.oom.reading import OomError
from study.configs.pasted.read import Pasted
from study.configs.pasted.told import all_flags, flags
from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.words import meets
from study.core.errors import Stop

FULL = "memory-unsized"
OUT_OF_MEMORY = ("oom",)
NO_ROOM = "oom-states"
# Who writes so of a model asks what it takes.
OF_SIZES = ("memory", "oom", "what/which stage", "need/needs/require/requires/required/enough/many/minimum + gpu")
HANGS = ("hang",)
FEW_WORDS = 200  # characters
KILLED_BY_MEMORY = re.compile(r"(?i)out.of.memory|\boom|MemoryError|allocat|bad_alloc|low on memory")
ByText = Callable[[Pasted, OomError | None], list[Cause]]


def without_model(pasted: Pasted, error: OomError | None) -> list[Cause]:
    """Return no cause: a page in a browser has no models."""
    return []


def error_in(text: str) -> OomError | None:
    """Return the error about memory that a text has."""
    try:
        return reading.find(text)
    except Stop:
        return None


def of_error(pasted: Pasted, error: OomError, by_text: ByText) -> Seen | None:
    """Return what an error about memory means, as `study oom` says. None: a person's words beside it tell more."""
    first, *others = by_text(pasted, error) or _by_error(pasted, error)
    if error.where != "GPU":
        return _elsewhere(pasted, error, first)
    is_sized = bool(error.asked.high)
    if not is_sized and not first.is_likely and pasted.prose:
        return None
    remedy = f"{first.remedy}. It is told apart so: {first.apart}"
    if others:
        remedy += f". Else: {others[0].what}"
    seen = _filled_by(first, pasted, error.line[:40], remedy, is_sized)
    evidence = f"{'; '.join(first.reasons)}; `study oom FILE {all_flags(pasted) or '--model MODEL'}` compares its size"
    return replace(seen, evidence=evidence, line=error.quoted)


def of_words(pasted: Pasted, by_text: ByText) -> Seen | None:
    """Return what filled a GPU, of which a person tells without an error."""
    if pasted.is_document:
        return None  # there the model, the GPUs and the word memory stand in sentences of other things
    sentence = meets(OUT_OF_MEMORY, pasted.question)
    if not sentence:
        return None
    causes = by_text(pasted, None)
    if not causes:
        return None
    return _filled_by(causes[0], pasted, sentence, causes[0].remedy, is_sized=False)


def _by_error(pasted: Pasted, error: OomError) -> list[Cause]:
    """Return the causes of an error where no model is matched with it."""
    return [replace(each, remedy=in_its_words(each.remedy, pasted.said)) for each in causes(error, {}, False, "")]


def _elsewhere(pasted: Pasted, error: OomError, cause: Cause) -> Seen:
    """Return what was full beside the GPU, or that a process was killed."""
    # Of a process that was only seen to end by SIGKILL nobody says why.
    is_said = meets(OUT_OF_MEMORY, pasted.sentences) or KILLED_BY_MEMORY.search(error.context)
    id = "memory-elsewhere" if is_said or cause.id != "oom-host" else "process-killed"
    seen = sign(id, pasted.text, pasted.place(error.line[:40]), cause=cause.what, remedy=cause.remedy)
    if cause.id == "oom-host" and error.full_host:
        return replace(seen, sure="likely", evidence=f"{seen.evidence}, and {error.full_host}")
    return seen


def _filled_by(cause: Cause, pasted: Pasted, line: str, remedy: str, is_sized: bool) -> Seen:
    """Return what filled a GPU. Without the size that was asked for, only states without room are likely."""
    is_likely = cause.is_likely and (is_sized or cause.id == NO_ROOM)
    how = "likely" if is_likely else "perhaps"
    seen = sign("memory-was-full", pasted.text, pasted.place(line), how=how, cause=cause.what, remedy=remedy)
    return seen if is_likely else replace(seen, sure="possible")


def was_full(pasted: Pasted, error: OomError | None) -> list[Seen]:
    """Return that a GPU's memory was full, where nothing tells more: by an error without its size, or a few words."""
    if error:
        is_full = error.where == "GPU"
    else:  # at length people write of memory beside what they ask
        is_full = len(pasted.text) < FEW_WORDS and bool(meets(OUT_OF_MEMORY, pasted.sentences))
    return [sign(FULL, pasted.text, 0, command=f"study advise {flags(pasted)}".strip())] if is_full else []


def sizes_asked(pasted: Pasted) -> list[Seen]:
    """Return the command that answers who asks what a model takes: it claims nothing, so words are enough."""
    sizes = flags(pasted)
    if not sizes or pasted.last_error or meets(HANGS, pasted.sentences):
        return []
    sentence = meets(OF_SIZES, pasted.sentences)
    if not sentence:
        return []
    command, advise = f"study estimate {all_flags(pasted)}", f"study advise {sizes}"
    return [sign("sizes-asked", pasted.text, pasted.place(sentence), command=command, advise=advise)]
