"""One answer to a pasted text: what it means, what to do, who is hit, and what that rests on."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Literal

from study.configs.oom.reading import OomError
from study.configs.pasted import (
    course,
    dumps,
    losses,
    matching,
    memory,
    own_loops,
    resumed,
    tracebacks,
    two_logs,
    watchdogs,
)
from study.configs.pasted.in_use import advised
from study.configs.pasted.lines import FEW
from study.configs.pasted.memory import ByText
from study.configs.pasted.one_rank import (
    OF_ALL,
    OF_SCRIPTS,
    OF_SHARDS,
    OF_WEIGHTS,
    SHARDED,
    on_one_rank,
    skipped_alone,
    that_may_hang,
)
from study.configs.pasted.questions import RELEASES, not_said, to_be_surer, to_know
from study.configs.pasted.ranking import OF_NAN, OF_STEPS, WAITED, Kind, explains, kind_of, ordered
from study.configs.pasted.read import ERROR, Pasted, read
from study.configs.pasted.said import left_open
from study.configs.pasted.situations import fitting, is_without
from study.configs.pasted.told import foreign_layer, printed_shapes, told
from study.configs.pasted.tracebacks import Seen, sign
from study.configs.pasted.two_releases import came_between
from study.configs.pasted.words import only, sentences
from study.configs.syntax import parsed
from study.core.shapes import models
from study.core.text import number_of
from study.known.faults import named

MOST_MAY = 5
LONGEST_ERROR = 160  # characters
MOST_QUESTIONS = 3
MOST_ALSO = 3
LAYER_NAME = "fsdp-layer-name"
PRESSED, SLOWER = "memory-pressure-slow", {"steps-slow-down", "steps-stop"}
FLUSHES = re.compile(r"(\d+) pytorch allocator cache flushes since last step")
IF_SLOW = "With `--symptom slow` this says what to do"
GOES_ON = re.compile(r"it/s|s/it|'loss'")  # a training
BAR = re.compile(r"(\d+)/(\d+) \[")  # of steps
AT_A_STEP = re.compile(r"(?i)\b(?:step|iteration)s?\W{0,2}\d")


@dataclass(frozen=True)
class PastedAnswer:
    """What a text means. The first of `found` is the answer."""

    found: tuple[Seen, ...]  # the first explains most
    read: tuple[str, ...]  # what was read, in words
    seen: tuple[str, ...]  # symptoms, as `study stack --symptom` takes them
    notes: tuple[str, ...]  # releases that contradict each other, and a hang that is not told, in sentences
    applying: tuple[matching.Match, ...]  # faults that apply, whatever was seen
    possible: tuple[matching.Match, ...]  # faults that may apply
    questions: tuple[str, ...]
    unsaid: tuple[str, ...]  # what faults depend on, and the text does not say
    unknown: str  # that what a person saw, or the last error, is not known here; empty, if it is
    nothing: str  # what to say if nothing was found
    is_answered: bool  # whether it is known what the text, and the person, ask of

    @property
    def may(self) -> tuple[matching.Match, ...]:
        """Faults of which the text speaks, where nothing was found; and beside a guess those that a script leaves."""
        if self.sure in ("sure", "likely"):
            return ()
        return tuple(each for each in self.possible if each.is_spoken_of and (each.has_script or not self.found))[
            :MOST_MAY
        ]

    @property
    def left(self) -> int:
        """How many faults may apply of which the text does not speak."""
        return len(self.possible) - len(self.may)

    @property
    def id(self) -> str:
        """That `study explain` takes; empty, if nothing was found."""
        return self.found[0].id if self.found else ""

    @property
    def sure(self) -> Literal["sure", "likely", "possible", "nothing"]:
        return self.found[0].sure if self.found else "nothing"


def answer(
    text: str,
    symptom: str = "",
    by_text: ByText = memory.without_model,
    scripts: Mapping[Path, str] = MappingProxyType({}),
) -> PastedAnswer:
    """Return the answer to a text, and to what a person says was seen.

    `by_text` matches an error about memory with the model that the text names. `scripts` are in the text as well.
    """
    pasted = read(text, symptom)
    error = memory.error_in(pasted.text)
    shown = _shown(pasted, error, by_text)
    seen = _symptoms(pasted, shown)
    if "hang" in seen:
        shown += _hanging(pasted, scripts)
    faults = matching.matches(pasted, seen, scripts)
    if _is_finite(pasted, shown):  # losses that are seen count more than words
        faults = [replace(each, sure="possible") if "nan" in each.fault.symptom else each for each in faults]
    likely = [each for each in faults if each.sure != "possible"]
    others = [each for each in faults if each.sure == "possible"]
    possible = [each for each in others if not each.is_certain]
    of_loop = sorted(own_loops.mistakes(pasted, scripts, seen), key=lambda each: -each.place)
    explained = {each.fault for each in (*shown, *of_loop)}
    silent = [each for each in likely if each.fault.id not in explained]
    applying = [each for each in others if each.is_certain and each.fault.id not in explained]
    found = ordered(shown, silent, _situations(pasted, shown, seen))
    by_loop = _of_loop(of_loop, shown, found, seen)
    found = sorted([*by_loop, *found], key=lambda each: each in by_loop and each.sure == "possible")
    found = found or _otherwise(pasted, error)
    unsaid = not_said(pasted, possible)
    is_open = "stage" in pasted.said and not (found or seen)  # any fault of it may be there
    asks_releases = RELEASES in unsaid and any(each.applies.is_seen or is_open for each in possible)
    questions = to_be_surer(found, asks_releases, seen) if found else to_know(pasted, unsaid, asks_releases, seen)
    found = found if "slow" in seen else found[: 1 + MOST_ALSO]  # what makes steps slow adds up
    ids = {each.id for each in shown}
    may_hang = [each for each in that_may_hang(scripts, pasted.said.get("stage")) if each.id not in ids]
    unknown = _unknown(pasted, found)
    return PastedAnswer(
        found=tuple(replace(each, remedy=advised(each.remedy, pasted)) for each in found),
        read=tuple(_read(pasted)),
        seen=tuple(sorted(seen)),
        notes=(
            *pasted.contradictions,
            *left_open(pasted.said),
            *_waits_aside(shown, found),
            *_pressed(pasted, found),
            *(each.noted("This line may hang when it is reached") for each in may_hang),
            *(each.noted("In the script") for each in of_loop if each not in found),
            *_not_found(found, seen),
            *_compares(pasted, seen, shown, scripts),
        ),
        applying=tuple(applying),
        possible=tuple(possible),
        questions=tuple(questions[:MOST_QUESTIONS]),
        unsaid=unsaid,
        unknown=unknown,
        nothing=". ".join(filter(None, [unknown, _nothing(pasted, unknown, len(applying), bool(may_hang), scripts)])),
        is_answered=bool(not unknown and (found or not (pasted.is_strange or pasted.is_cut))),
    )


def _hanging(pasted: Pasted, scripts: Mapping[Path, str]) -> Iterator[Seen]:
    """Yield what some ranks alone call in scripts, or leave out. The line at which a dump waits comes first."""
    stage = pasted.said.get("stage")
    of_weights = OF_WEIGHTS if stage in SHARDED else ()
    causes = OF_ALL if stage == "DDP" else (*OF_SHARDS, *of_weights, *OF_ALL)  # DDP gathers nothing
    lines = dumps.lines(pasted.text)
    for seen in on_one_rank(scripts, causes, _is_in_training(pasted), watchdogs.that_differ(pasted.text)):
        yield replace(seen, place=-1) if any(line in seen.line for line in lines) else seen
    yield from skipped_alone(scripts)


def _shown(pasted: Pasted, error: OomError | None, by_text: ByText) -> list[Seen]:
    """Return what the text shows: messages, who waits for whom, and what the lines of a trainer say."""
    errors = [_in_its_release(each, pasted) for each in tracebacks.errors(pasted.text)]
    if pasted.last_error:  # what follows says less, unless it is that error
        is_last = tracebacks.follows(pasted.last_error)
        errors = [each for each in errors if not each.follows or (is_last and ERROR.search(each.line))]
    is_fsdp = str(pasted.said.get("stage")).startswith("FSDP")
    if is_fsdp and not errors and (foreign := foreign_layer(pasted.text)):
        errors = [_not_in_the_model(pasted, *foreign)]
    of_memory = memory.of_error(pasted, error, by_text) if error else memory.of_words(pasted, by_text)
    waits = [watchdogs.hangs(pasted.text, pasted.sentences), dumps.waits(pasted.text)]
    passes, vocabulary = pasted.said.get("passes", losses.USUAL_PASSES), _vocabulary(pasted)
    signs = losses.signs(pasted.log, pasted.may_be_deepspeed, passes, vocabulary)
    apart = two_logs.factor_apart(pasted)
    # A state that was not loaded makes no such factor.
    signs += [each for each in resumed.signs(pasted.log) if not (apart and each.id == "loss-jumps-on-resume")]
    if diverged := course.diverges(pasted.log):  # NaN is where that ends
        signs = [diverged, *(each for each in signs if each.id not in OF_NAN)]
    is_well = all(each.id in SLOWER for each in signs) and not apart
    if is_well and (astray := course.astray(pasted.log, passes, vocabulary)):
        signs = [astray, *signs]
    if not signs and len(pasted.log.lines) < FEW:  # where a log has more, a person's words say less
        signs = losses.signs_in_words(pasted.text, pasted.sentences, pasted.may_be_deepspeed)
    shown = [*errors, *filter(None, [of_memory, *waits, apart]), *signs]
    return _without_notes(pasted, shown)


def _not_in_the_model(pasted: Pasted, layer: str, model: str) -> Seen:
    """Return what Accelerate will say of a class that the model does not have."""
    row = tracebacks.messages()[LAYER_NAME]
    sentence = f"{row.sentence}: {layer}, and the model is {model}"
    place = pasted.place(layer)
    line = tracebacks.line_at(pasted.text, place)
    return Seen(LAYER_NAME, sentence, row.remedy, "likely", row.evidence, row.who, place=place, line=line)


def _vocabulary(pasted: Pasted) -> int | None:
    """Return the words that the model of a text has. None: it names no model that is known, and shows no config."""
    printed = only({shape.get("vocab_size") for shape in printed_shapes(pasted.text)})
    return printed or models().get(told(pasted.text).model or "", {}).get("vocab_size")


def _without_notes(pasted: Pasted, shown: list[Seen]) -> list[Seen]:
    """Return what a text shows without lines of trainings that are well, if it shows more than these."""
    ids = {each.id for each in shown} | matching.symptoms(pasted.sentences, set())
    notes = [each for each in shown if each.note and ids.isdisjoint(tracebacks.messages()[each.id].hides)]
    goes_on = pasted.last_error or GOES_ON.search(pasted.text)  # or ends with an error that is not known
    return [each for each in shown if each not in notes] if goes_on or len(notes) < len(shown) else shown


def _of_loop(of_loop: list[Seen], shown: list[Seen], found: list[Seen], seen: set[str]) -> list[Seen]:
    """Return the mistakes of a loop that may be what was seen; all, if nothing was. The others are told beside it."""
    ids = {each.id for each in shown}
    if not seen and not ids:
        return [] if found else of_loop
    return [each for each in of_loop if (makes := own_loops.MAKES[each.id]) & (seen | ids) and ids <= makes]


def _waits_aside(shown: list[Seen], found: list[Seen]) -> Iterator[str]:
    """Yield that ranks waited, where an error of memory explains it: it may be of another run."""
    for wait in shown:
        if wait.id in WAITED and wait not in found:
            alone = "If that is of another run, give its log alone to `study diagnose`"
            yield f"Also in the text: ranks that waited, as they do for one that failed [{wait.id}]. {alone}."


def _pressed(pasted: Pasted, found: list[Seen]) -> Iterator[str]:
    """Yield that DeepSpeed warns of memory that is nearly full, where nobody says that steps are slow."""
    flushes = [*map(int, FLUSHES.findall(pasted.text))]
    if flushes and all(each.id != PRESSED for each in found):
        what = f"{sum(flushes)} flushes of PyTorch's cache in {number_of(len(flushes), 'warnings')}"
        yield f"DeepSpeed warns of {what}: memory is nearly full, which makes steps slow [{PRESSED}]. {IF_SLOW}."


def _is_in_training(pasted: Pasted) -> bool:
    """Whether steps were made and the training has not ended: what stands after it in the script was not reached."""
    bars = [(int(last), int(step)) for step, last in BAR.findall(pasted.text)]
    if "train_runtime" in pasted.text or (bars and max(bars)[0] == max(bars)[1]):  # that of the longest bar
        return False
    return bool(bars or pasted.log.lines or AT_A_STEP.search(pasted.written))


def _not_found(found: list[Seen], seen: set[str]) -> Iterator[str]:
    """Yield what a person saw and nothing explains, where the lines of a trainer show something else."""
    if found and all(kind_of(each) in (Kind.MARK, Kind.STEPS) for each in found):
        for symptom in sorted(seen & {"hang", "memory", "slow"}):
            if symptom != "slow" or SLOWER.isdisjoint(each.id for each in found):
                yield f"You asked about {symptom!r}: nothing here explains it."


def _compares(pasted: Pasted, seen: set[str], shown: list[Seen], scripts: Mapping[Path, str]) -> Iterator[str]:
    """Yield what finds the hang of a script, if no line of it explains that."""
    if "hang" in seen and scripts and not any(each.id in OF_SCRIPTS for each in shown):
        stage = pasted.said.get("stage")
        looked = "collectives" if stage == "DDP" else "collectives, saving, gathered weights"
        looked += ", forward passes" if stage in SHARDED else ""
        for path, script in scripts.items():
            found = f"nothing was found in {path}" if parsed(script) else f"{path} is no Python, and was not read"
            yield f"Looked for what some ranks call alone ({looked}): {found}."
        if stage is None:
            yield "Forward passes were not looked at: they wait for all ranks with stage 3 or FSDP. Nothing says which."
        command = f"study virtual {next(iter(scripts))} --ranks {pasted.ranks or 2} --evaluate"
        yield f"`{command}` compares what the ranks call."


def _in_its_release(seen: Seen, pasted: Pasted) -> Seen:
    """Return an error without the fault that makes it, where the release is another."""
    if seen.fault and is_without(seen.fault, pasted):
        return replace(seen, fault="", who="", sure="possible")
    return seen


def _symptoms(pasted: Pasted, shown: list[Seen]) -> set[str]:
    """Return the symptoms of which a person, or a sign, speaks."""
    signs = {each.id for each in shown}
    seen = matching.symptoms(pasted.sentences, signs) | matching.symptom_of_word(pasted.symptom)
    if pasted.log.falls:
        seen -= {"no-update"}  # a log that shows the contrary counts more than words
    if "loss" in seen and not any(id.startswith(OF_STEPS) for id in signs):
        seen |= {"norm"}  # a wrong gradient shows in the loss, or in the rewards
    return seen


def _is_finite(pasted: Pasted, shown: list[Seen]) -> bool:
    """Whether a text shows losses, and nothing that is not a number."""
    is_nan = not OF_NAN.isdisjoint(each.id for each in shown) or re.search(r"(?i)\bnan\b", pasted.text)
    return len(pasted.log.losses.values) > 1 and not is_nan


def _situations(pasted: Pasted, shown: list[Seen], seen: set[str]) -> list[Seen]:
    """Return what a person's words mean: nothing beside an error that is explained, and guesses in a long document."""
    if any(map(explains, shown)):
        return []
    if not shown and (pasted.last_error or pasted.is_document):
        return []
    fits = fitting(pasted, seen | {each.id for each in shown})
    # Who tells of two releases asks what came between them.
    return [each for each in fits if each.sure == "likely"] if pasted.apart else fits


def _otherwise(pasted: Pasted, error: OomError | None) -> list[Seen]:
    """Return what is said where nothing explains the text."""
    told = [*_two_releases(pasted)] or memory.was_full(pasted, error) or memory.sizes_asked(pasted)
    if len(FLUSHES.findall(pasted.text)) >= FEW:
        told = told or [each for each in fitting(pasted, {"slow"}) if each.id == PRESSED]
    if told or pasted.last_error or pasted.is_document or len(pasted.log.lines) >= FEW:
        return told
    return losses.guesses_by_words(pasted.text, pasted.question)


def _two_releases(pasted: Pasted) -> Iterator[Seen]:
    """Yield what came between two releases of which a text tells."""
    for package, apart in pasted.apart.items():
        faults = came_between(package, apart)
        came = "no known fault came"
        if faults:
            came = f"{number_of(len(faults), 'known faults')} came, such as {faults[0].id}"
        values = {"package": package, "works": apart.works, "broken": apart.broken, "came": came}
        yield sign("two-releases", pasted.text, pasted.place(str(apart.broken)), **values)


def _read(pasted: Pasted) -> Iterator[str]:
    """Yield what was read, in words."""
    yield from pasted.words
    if model := told(pasted.text).model:
        yield f"model {model}"
    if frames := re.findall(r'File "[^"\n]*", line \d+', pasted.text):
        yield number_of(len(frames), "frames of tracebacks")
    if lines := pasted.log.lines:
        yield number_of(len(lines), "lines of a trainer")
        steps, by = losses.timed(pasted.log)
        if steps and by != "bar":
            yield f"the time of {number_of(len(steps), 'steps')}"


def _unknown(pasted: Pasted, found: list[Seen]) -> str:
    """Return that the last error of a text, or what a person says was seen, is not known here. Empty: it is."""
    if pasted.last_error and not _is_error_known(pasted, found):
        error = shorten(pasted.last_error.rstrip(".: "), LONGEST_ERROR, placeholder=" (...)")
        return ". ".join(filter(None, [f"This error is not known here: {error}", pasted.raised_at]))
    if _is_known(pasted, found):
        return ""
    return f"The symptom {shorten(repr(pasted.symptom), LONGEST_ERROR)} is not known here"


def _is_error_known(pasted: Pasted, found: list[Seen]) -> bool:
    """Whether what was found is an error, or a message stands where the last one was raised: losses explain none."""
    raised = max(pasted.text.rfind("Traceback (most", 0, pasted.text.rfind(pasted.last_error)), 0)
    for seen in found:
        if seen.fault == seen.id:
            is_of_error = named(seen.fault).symptom.startswith("error")
        else:
            is_of_error = kind_of(seen) not in (Kind.MARK, Kind.STEPS) and seen.id not in OF_NAN
            is_of_error = is_of_error and (seen.place >= raised or bool(ERROR.search(seen.line)))
        if is_of_error:
            return True
    last = pasted.text[raised:]
    is_named = any(not (each.follows or each.note) for each in tracebacks.errors(last))
    return is_named or memory.error_in(last) is not None


def _is_known(pasted: Pasted, found: list[Seen]) -> bool:
    """Whether a person's words, apart from the text, say something that is known here. Without any: yes."""
    if not pasted.symptom.strip():
        return True
    begins = len(pasted.text) - len(pasted.symptom)
    is_symptom = matching.symptoms(sentences(pasted.symptom), set()) | matching.symptom_of_word(pasted.symptom)
    is_found = any(each.place >= begins or (each.line and each.line in pasted.symptom) for each in found)
    return bool(is_symptom or pasted.apart or is_found)


def _stops(text: str) -> str:
    """Return at which step of its longest bar a log stops. Empty: it has no bar, or reaches its end."""
    bars = [(int(bar[2]), int(bar[1])) for bar in resumed.OF_STEPS.finditer(text)]
    total = max((total for total, _ in bars), default=0)
    steps = [step for of, step in bars if of == total]
    if not steps or total in steps or re.search("train_runtime|KeyboardInterrupt", text):
        return ""
    at = f"The log stops at step {steps[-1]} of {total} ({steps[-1] / total:.0%}) and shows no error"
    return f"{at}. If the training has ended, the scheduler's log, dmesg or another rank's output may say why"


def _nothing(pasted: Pasted, unknown: str, applying: int, will_hang: bool, scripts: Mapping[Path, str]) -> str:
    """Return what to say where nothing was found, beside the faults that apply."""
    if applying:
        named = f"{number_of(applying, 'known faults')} can be named"
        return named if unknown else f"Nothing that was seen is known here, but {named}"
    if not pasted.text.strip():
        return "The text is empty"
    if pasted.is_strange:
        return "Nothing in this text is known here: no error, no library, no training"
    if pasted.is_cut:
        return "The text ends before the last line of its traceback, which names the error"
    if will_hang:
        return "A line of the script may hang when it is reached"
    if unknown:
        return ""
    if stops := _stops(pasted.text):
        return stops
    runs = ""
    if scripts:
        runs = (
            ". Not checked: which rows each rank reads, and how the loss is computed. `study.watch` sees more in a run"
        )
        runs += f". The script was read and not run: `study virtual {next(iter(scripts))}` runs it"
    return f"Nothing known applies to what you gave{runs}"
