"""`study stack`: which known faults of libraries apply to some releases, in some training."""

from collections import Counter
from pathlib import Path

import tyro
from packaging.version import Version

from study.cli.findings import show_finding
from study.configs.pasted import losses, matching
from study.configs.pasted.read import read
from study.configs.pasted.words import sentences
from study.configs.stacks import described, filled
from study.core.errors import Stop, nearest
from study.core.settings import flag
from study.core.text import say_wrapped
from study.known.faults import Fault, table
from study.known.findings import Finding, with_id
from study.known.which_apply import WAYS, Applies, Flags, Stack, free, untested, which_apply

MOST_MAY = 5  # faults that may apply, without --details: a reader of 50 reads none
MOST_LIKELY = 3
MOST_ASKED = 2  # flags, beside --config
USUAL = {"stage", "ranks", "cuda", "trainer", "offload", "script"}  # conditions that say little of a training
MOST_FREE = 4  # releases


def stack(
    releases: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    flags: Flags,
    config: Path | None = None,
    symptom: str | None = None,
    details: bool = False,
) -> dict:
    """Which known faults of libraries apply to these releases, in this training?

    A fault applies, or it does if something is so that neither a config nor a flag says. More than half were run, on
    CPUs, and there are others that nobody knows. The exit code is 1 if one applies.

    With --json: the faults. Example: `study stack deepspeed==0.19.8 --stage 2`

    Args:
        releases: Words such as deepspeed==0.19.8; or a file: a list of requirements, what `pip freeze` or `pip list`
            wrote, a project, an environment of conda, a lock of uv or poetry; or any text, such as a log, that also
            says what the training is. Several count together.
            Without any: those of the record, or of this environment.
        config: A DeepSpeed json, an Accelerate yaml, arguments of the Trainer, or a record.
        symptom: What was seen, in a word (error, hang, ignored, loss, memory, no-update, norm) or in your words: faults
            with it come first. `study diagnose --symptom` says what it may mean without any release.
        details: All faults that may apply, what would decide that, what to do, and what shows them.
    """
    _refuse(flags)
    seen = _symptoms(symptom)
    if symptom:
        flags = filled(flags, read(symptom))
    used, notes = described(releases, flags, config)
    given = _said(used, flags, config)
    # What was seen comes first, and of that what meets most of what is said. The others keep their order.
    found = which_apply(used)
    having = sorted([each for each in found if _is_seen(each, seen)], key=lambda each: -_met(each, given))
    faults = having + [each for each in found if not _is_seen(each, seen)]
    applying = [each for each in faults if each.answer == "applies"]
    may = [each for each in faults if each.answer != "applies"]
    says_no_stage = config is None and "stage" not in used.said
    answer = in_words(used, faults, " ".join(notes))
    say_wrapped(*notes, answer["first"])  # notes tell what was not understood
    if says_no_stage and not applying:
        say_wrapped(f"To tell which, give {', '.join(_deciding(may, config))}.")
    if packages := untested(used):
        say_wrapped(f"Not tested by us in this release: {', '.join(packages)}.")
    for number, each in enumerate(applying, 1):
        _show_applying(number, each)
    _show_free(answer["free"])
    shown = may if details else _spoken_of(may, seen, given)
    if (says_no_stage or not shown) and not (details or seen or applying):
        shown = [*(likely := _likely(may, used)), *(each for each in shown if each not in likely)][:MOST_MAY]
    for each in shown:
        _show_open(each, details)
    left = [each for each in may if each not in shown]
    _show_rest(left, [] if says_no_stage and not applying else _deciding(left, config), bool(shown or applying))
    return answer


def _refuse(flags: Flags) -> None:
    ways = [name for name in ("stage", *WAYS) if getattr(flags, name) not in (None, False)]
    if len(ways) > 1:
        raise Stop(f"{' and '.join(map(flag, ways))} exclude each other", "give the one that your training has")
    for number in (flags.ranks, flags.passes):
        if number is not None and number < 1:
            raise Stop(f"ranks and micro-batches must be at least 1 (got {number})", "give 1 or more")


def _is_seen(each: Applies, seen: set[str]) -> bool:
    return any(symptom in each.fault.symptom for symptom in seen)


def _met(each: Applies, said: set[str]) -> int:
    """Return how many conditions of a fault are said and so, of those that not all trainings have."""
    return len(({*(each.fault.when or {})} - USUAL - {question.condition for question in each.why}) & said)


def _said(used: Stack, flags: Flags, config: Path | None) -> set[str]:
    """Return the conditions of which a flag or the config speaks."""
    by_flags = {name for name, value in vars(flags).items() if value is not None}
    return by_flags | ({*used.said, "keys"} if config else set())


def _spoken_of(may: list[Applies], seen: set[str], said: set[str]) -> list[Applies]:
    """Return faults that may apply and have the symptom, or of which something special is said, the most first."""

    def weight(each: Applies) -> int:
        # Trainers and PEFT have few faults, and who names one asks about it. But few train by one method, such as DPO.
        is_of_many = each.fault.package in (*table().trainers, "PEFT") and _is_decided_by_flags(each)
        return 2 * _met(each, said) + is_of_many

    spoken = [each for each in may if _is_seen(each, seen) or (each.may_be_inside and weight(each))]
    return sorted(spoken, key=lambda each: (not _is_seen(each, seen), -weight(each)))[:MOST_MAY]


def _is_decided_by_flags(each: Applies) -> bool:
    """Whether nobody has to look at the script or the config."""
    return all(question.flag for question in each.why)


def _likely(may: list[Applies], used: Stack) -> list[Applies]:
    """Return some of the faults in whose range these releases are, the likeliest first."""

    def place(each: Applies) -> tuple:
        when = each.fault.when or {}
        has_adapters = "PEFT" in used.releases and when.get("peft") is True
        is_silent = each.fault.symptom.startswith(table().silent)
        # Most train with AdamW in bf16, of which few faults speak.
        unusual = ("optimizer" in when, "precision" in when)
        is_named = isinstance(each.release, Version)
        return (not _is_decided_by_flags(each), not has_adapters, not is_named, *unusual, not is_silent)

    return sorted([each for each in may if each.may_be_inside], key=place)[:MOST_LIKELY]


def in_words(used: Stack, faults: list[Applies], said: str = "") -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies.

    `said` is what was said before the sentence: if that names the releases, the sentence does not.
    """
    applying = [each for each in faults if each.answer == "applies"]
    packages = dict.fromkeys(each.fault.package for each in applying)
    return {
        "fine": not applying,
        "first": _in_one_sentence(used, applying, len(faults) - len(applying), said),
        "faults": [_row(each) for each in faults],
        "not_asked": [_release(used, package) for package in untested(used)],
        "free": {package: free(used, package) for package in packages},
    }


def _release(used: Stack, package: str) -> str:
    return f"{package} {used.releases[package] or '(release not said)'}"


def _in_one_sentence(used: Stack, applying: list[Applies], may: int, said: str) -> str:
    """Return what applies, the worst of it first."""
    named = [_release(used, package) for package in used.releases]
    if applying:
        count = len(applying)
        others = f"{count} known faults apply; the worst" if count > 1 else "1 known fault applies"
        first = f"{others}: {applying[0].fault.sentence.rstrip('.')}."
    else:
        known = sum(fault.when is not None for fault in table().fault)
        first = f"none of {known} known faults surely applies, and {may} may."
    if all(release in said for release in named):
        return f"{first[0].upper()}{first[1:]}"
    return f"{', '.join(named)}: {first}"


def _shown_by(fault: Fault) -> str:
    return f"reproductions/{fault.script}.py" if fault.script else f"{fault.rests_on}, {fault.upstream}".rstrip(", ")


def _row(each: Applies) -> dict:
    """Return a fault that applies, or may, in words."""
    fault = each.fault
    return fault.model_dump(include={"id", "package", "symptom", "who", "upstream", "when"}) | {
        "answer": each.answer,
        "asked": each.is_tested,
        "inside": each.may_be_inside,
        "question": _questions(each),
        "sentence": fault.in_releases,
        "do": each.do,
        "shown": _shown_by(fault),
    }


def _questions(each: Applies) -> str:
    """Return what would decide whether a fault applies."""
    texts = [question.text for question in each.why]
    if not each.is_tested:
        texts.insert(0, each.fault.untested(each.release))
    return " ".join(texts)


def _show_applying(number: int, each: Applies) -> None:
    fault = each.fault
    show_finding(f"{number:>2}. ", Finding(fault.id, fault.in_releases, each.do, _shown_by(fault)))
    if fault.who:
        say_wrapped(f"Who is hit: {fault.who}.", indent="    ", first="    ")


def _show_open(each: Applies, details: bool) -> None:
    fault = each.fault
    say_wrapped("", f"May apply: {with_id(fault.in_releases, fault.id)} {_questions(each)}", indent="    ")
    if details:
        say_wrapped(f"What to do: {each.do}.", f"Shown by: {_shown_by(fault)}", indent="    ", first="    ")


def _show_free(right: dict[str, list[str]]) -> None:
    """Name releases without a fault that surely applies."""
    for name, releases in right.items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if releases:
            these = " or ".join(releases[:MOST_FREE])
            sentence = f"With {name} {these} no known fault of {name} surely applies here, but others may."
        say_wrapped("", sentence)


def _deciding(may: list[Applies], config: Path | None) -> list[str]:
    """Return the flags that would tell of the most faults whether they apply."""
    flags = Counter(question.flag for each in may for question in each.why if question.flag)
    wanted = [name for name, _ in flags.most_common(MOST_ASKED)]
    return wanted if config else ["--config", *wanted]


def _show_rest(left: list[Applies], deciding: list[str], after_others: bool) -> None:
    """Say in one line how many faults were not shown, and what would tell whether they apply."""
    if not left:
        return
    unasked = sum(not each.is_tested for each in left)
    of_these = f"; for {unasked} of these nobody tested your release" if unasked else ""
    give = f"Give {', '.join(deciding)} to check them; " if deciding else ""
    say_wrapped("", f"{len(left)}{' more' if after_others else ''} may apply{of_these}. {give}--details lists all.")


def _symptoms(words: str | None) -> set[str]:
    """Return what was seen as the table has it, of one word or of a person's sentence."""
    if not words:
        return set()
    by_word = {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}
    name = words.lower().replace("_", "-")
    if name in by_word:
        return {by_word[name]}
    said = sentences(words)
    if seen := matching.symptoms(said, {each.id for each in losses.signs_in_words("", said)}):
        return seen
    what = f"--symptom {words!r:.80} names nothing that faults are known by"
    listed = f"say what was seen: {', '.join(sorted(table().symptoms))}, or a sentence with the numbers"
    raise Stop(what, nearest(name, by_word, otherwise=listed))
