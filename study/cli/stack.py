"""`study stack`: which known faults of libraries apply to some releases, in some training."""

from dataclasses import asdict, replace
from pathlib import Path

from study.cli.findings import say_indented, show_finding
from study.configs import arguments, engines, priorities, sources
from study.configs.deciding import deciding
from study.configs.mistakes import compared_with, unusable
from study.configs.pasted.matching import symptom_of_word
from study.configs.priorities import AskedStack, Ranked
from study.configs.stacks import described, launched_ranks, with_config
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import say_wrapped
from study.known import findings
from study.known.faults import Fault, table
from study.known.findings import Finding, in_a_sentence
from study.known.stacks import WAYS, Flags, Stack
from study.known.which_apply import Applies, free, untested

MOST_FREE = 4  # releases


def stack(
    releases: tuple[str, ...] = (),
    /,
    *,
    flags: Flags,
    config: Path | None = None,
    symptom: str | None = None,
    details: bool = False,
) -> dict:
    """Which known faults of libraries apply to these releases, in this training?

    A fault applies; it likely does, where tested releases before and after yours have it; or it does if something is so
    that neither a config nor a flag says. More than half were run, on CPUs, and there are others that nobody knows. The
    exit code is 1 if one applies, or if the config is surely wrong.

    With --json: the faults. Example: `study stack deepspeed==0.19.8 --stage 2`

    Args:
        releases: Words such as deepspeed==0.19.8; or a file: a list of requirements, what `pip freeze` or `pip list`
            wrote, a project, an environment of conda, a lock of uv or poetry; or any text, such as a log, that also
            says what the training is. Several count together.
            A config among them is as --config. Without any: those of the record, or of this environment.
        config: A DeepSpeed json, an Accelerate yaml, arguments of the Trainer, or a record.
        symptom: What was seen, in a word (error, hang, ignored, loss, memory, no-update, norm, slow) or in your words:
            faults with it come first. `study diagnose --symptom` says what it may mean without any release.
        details: All faults that may apply, what would decide that, what to do, and what shows them.
    """
    refuse_contradictions(flags)
    words = (*releases, *([str(config)] if config else []))
    releases, config = with_config(releases, config)
    mistaken = [*unusable(sources.read(config), None)] if config else []
    texts = engines.texts_of(words)
    differ = [each for each in engines.contradictions(texts) if each not in mistaken]
    told = {each.id for each in differ}
    is_compared = arguments.compares(texts) or not told.isdisjoint(arguments.OF_TRAINERS)
    used, notes = described(releases, launched_ranks(words, flags), config, told, is_compared)
    notes += compared_with(mistaken, used.releases)
    if symptom and not symptom_of_word(symptom):
        notes.append(f"`study diagnose --symptom {symptom!r:.80}` says what else may make it.")
    notes += engines.started(differ, words)
    say_wrapped(*map(in_a_sentence, differ), *engines.not_here(texts, config))
    asked = AskedStack.of(used, flags, config, symptom, releases)
    asked = replace(asked, told={findings.texts()[id].get("fault") for id in told})
    answer = show_faults(asked, notes, details)
    is_wrong = any(each.is_surely_wrong for each in (*differ, *mistaken))
    said = {"contradictions": list(map(asdict, differ)), "mistakes": list(map(asdict, mistaken))}
    return answer | said | {"fine": answer["fine"] and not is_wrong}


def show_faults(asked: AskedStack, notes: list[str], details: bool) -> dict:
    """Print and return which faults apply, and may."""
    found = priorities.ranked(asked)
    answer = in_words(asked, found, " ".join(notes))
    say_wrapped(*notes, answer["first"])  # notes tell what was not understood
    show_not_said(asked, found)
    for number, each in enumerate(found.applying, 1):
        show_applying(number, each)
    show_free(answer["free"])
    shown = found.may if details else found.spoken
    for each in [*found.likely, *shown]:
        show_open(each, details)
    show_rest(asked, found, [each for each in found.may if each not in shown])
    return answer


def refuse_contradictions(flags: Flags) -> None:
    ways = [name for name in ("stage", *WAYS) if getattr(flags, name) not in (None, False)]
    if len(ways) > 1:
        raise Stop(f"{' and '.join(map(flag, ways))} exclude each other", "give the one that your training has")
    for number in (flags.ranks, flags.passes):
        if number is not None and number < 1:
            raise Stop(f"ranks and micro-batches must be at least 1 (got {number})", "give 1 or more")


def in_words(asked: AskedStack, found: Ranked, said: str) -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies.

    `said` is what was said before the sentence: if that names the releases, the sentence does not.
    """
    used = asked.stack
    packages = dict.fromkeys(each.fault.package for each in found.applying if each.fault.package in table().asked)
    return {
        "fine": not found.applying,
        "first": in_one_sentence(used, found, said),
        "faults": [row_of(each) for each in found.every],
        "not_asked": [release_of(used, package) for package in untested(used)],
        "free": {package: free(used, package) for package in packages},
    }


def release_of(used: Stack, package: str) -> str:
    return f"{package} {used.releases[package] or '(release not said)'}"


def in_one_sentence(used: Stack, found: Ranked, said: str) -> str:
    """Return what applies, the worst of it first."""
    likely = f"{len(found.likely)} likely {'do' if len(found.likely) > 1 else 'does'}" if found.likely else ""
    if found.applying:
        worst = found.applying[0].fault.sentence.rstrip(".")
        count = len(found.applying)
        first = f"{count} known faults apply; the worst: {worst}" if count > 1 else "1 known fault applies"
        first = f"{first}. {likely}".rstrip(". ") + "."
    else:
        known = sum(fault.when is not None for fault in table().fault)
        surely = ", ".join(filter(None, ["surely applies", likely]))
        first = f"none of {known} known faults {surely}, and {worth_a_look(found)}."
    named = [release_of(used, package) for package in used.releases]
    if all(release in said for release in named):
        return f"{first[0].upper()}{first[1:]}"
    return f"{', '.join(named)}: {first}"


def worth_a_look(found: Ranked) -> str:
    """Return how many faults may apply, and how many of them are shown."""
    if not found.may:
        return "none may"
    count = len(found.spoken)
    if not count:
        return f"{len(found.may)} may"
    return f"{len(found.may)} may, {count} of which {'are' if count > 1 else 'is'} worth a look"


def shown_by(fault: Fault) -> str:
    return f"reproductions/{fault.script}.py" if fault.script else f"{fault.rests_on}, {fault.upstream}".rstrip(", ")


def row_of(each: Applies) -> dict:
    """Return a fault that applies, or may, in words."""
    fault = each.fault
    return fault.model_dump(include={"id", "package", "symptom", "who", "upstream", "when"}) | {
        "answer": each.answer,
        "asked": each.is_tested,
        "inside": each.may_be_inside,
        "question": each.asks,
        "sentence": fault.in_releases,
        "do": each.do,
        "shown": shown_by(fault),
    }


def show_not_said(asked: AskedStack, found: Ranked) -> None:
    """Say what is missing to tell more: the stage, or a test of the release."""
    is_open = asked.says_no_stage and not found.applying
    if is_open and (flags := deciding(asked, found.may)):
        say_wrapped(f"To tell which, give {', '.join(flags)}.")
    if packages := untested(asked.stack):
        say_wrapped(f"Not tested by us in this release: {', '.join(packages)}.")


def show_applying(number: int, each: Applies) -> None:
    fault = each.fault
    show_finding(f"{number:>2}. ", Finding(fault.id, fault.in_releases, each.do, shown_by(fault)))
    if fault.who:
        say_indented(f"Who is hit: {fault.who}.")


def show_open(each: Applies, details: bool) -> None:
    say_wrapped("", each.in_one_line, indent="    ")
    if details or each.answer == "likely":
        say_indented(f"What to do: {each.do}.", f"Shown by: {shown_by(each.fault)}")


def show_free(right: dict[str, list[str]]) -> None:
    """Name releases without a fault that surely applies."""
    for name, releases in right.items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if releases:
            these = " or ".join(releases[:MOST_FREE])
            sentence = f"With {name} {these} no known fault of {name} surely applies here, but others may."
        say_wrapped("", sentence)


def show_rest(asked: AskedStack, found: Ranked, left: list[Applies]) -> None:
    """Say in one line how many faults were not shown, and what would tell whether they apply."""
    if not left:
        return
    unasked = sum(not each.is_tested for each in left)
    of_these = f"; for {unasked} of these nobody tested your release" if unasked else ""
    is_first = len(left) == len(found.every)
    is_said = asked.says_no_stage and not found.applying  # at the top
    flags = [] if is_said else deciding(asked, left)
    give = f"Give {', '.join(flags)} to check them; " if flags else ""
    say_wrapped("", f"{len(left)}{'' if is_first else ' more'} may apply{of_these}. {give}--details lists all.")
