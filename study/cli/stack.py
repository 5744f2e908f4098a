"""`study stack`: which known faults of libraries apply to some releases, in some training."""

from collections import Counter
from pathlib import Path

import tyro

from study.cli.diagnosis import show_finding
from study.configs.stacks import described
from study.core.errors import Stop, nearest
from study.core.text import say_wrapped
from study.known.faults import table
from study.known.findings import Finding, with_id
from study.known.which_apply import Applies, Flags, Stack, free, untested, which_apply

MOST_SHOWN = 10  # faults, without --details: a reader of 50 reads none
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
            wrote, a project, an environment of conda, a lock of uv or poetry. Several count together.
            Without any: those of the record, or of this environment.
        config: A DeepSpeed json, an Accelerate yaml, arguments of the Trainer, or a record.
        symptom: What was seen: faults with it come first. It is error, hang, ignored, loss, memory, no-update or norm.
        details: All faults that may apply, what would decide that, what to do, and what shows them.
    """
    if flags.stage is not None and flags.fsdp2:
        raise Stop("--stage and --fsdp2 exclude each other", "give the one that shards your training")
    for number in (flags.ranks, flags.passes):
        if number is not None and number < 1:
            raise Stop(f"ranks and passes must be at least 1 (got {number})", "give 1 or more")
    seen = _symptom(symptom) if symptom else None
    asked, notes = described(releases, flags, config)
    found = which_apply(asked)
    if seen:  # sorting keeps the order of the others
        found.sort(key=lambda each: seen not in each.fault.symptom)
    answer = in_words(asked, found)
    say_wrapped(*notes, answer["first"])
    if not details:
        _narrow_down(found, config)
    left = []
    for number, (each, row) in enumerate(zip(found, answer["faults"], strict=True), 1):
        if details or each.answer == "applies" or (seen and seen in each.fault.symptom):
            sentence = f"{row['question']} {row['sentence']}".lstrip()
            show_finding(f"{number:>2}. ", Finding(each.fault.id, sentence, row["do"], row["shown"]))
        elif number <= MOST_SHOWN:
            # Without any question it would read as if it applied.
            question = _questions(each, of_flags=False) or row["question"]
            said = with_id(row["sentence"], each.fault.id)
            say_wrapped(f"{said} {question}", indent="    ", first=f"{number:>2}. ")
        else:
            left.append(each)
    _show_rest(answer["free"], left)
    return answer


def in_words(asked: Stack, found: list[Applies]) -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies."""
    applying = [each for each in found if each.answer == "applies"]
    packages = dict.fromkeys(each.fault.package for each in applying)
    return {
        "fine": not applying,
        "first": _in_one_sentence(asked, len(applying), len(found) - len(applying)),
        "faults": [_row(each) for each in found],
        "not_asked": [_release(asked, package) for package in untested(asked)],
        "free": {package: free(asked, package) for package in packages},
    }


def _release(asked: Stack, package: str) -> str:
    return f"{package} {asked.releases[package] or '(release not said)'}"


def _in_one_sentence(asked: Stack, apply: int, may: int) -> str:
    """Return how many faults there are, with the releases of which nothing is known."""
    named = ", ".join(_release(asked, package) for package in asked.releases)
    known = sum(fault.when is not None for fault in table().fault)
    first = f"{named}: of {known} known faults {apply} {'applies' if apply == 1 else 'apply'}, and {may} may"
    if packages := untested(asked):
        first += f"; in no test of ours: {', '.join(_release(asked, each) for each in packages)}"
    return f"{first}."


def _row(each: Applies) -> dict:
    """Return a fault that applies, or may, in words."""
    fault = each.fault
    shown_by = f"reproductions/{fault.script}.py" if fault.script else f"{fault.rests_on}, {fault.upstream}"
    return fault.model_dump(include={"id", "package", "symptom", "who", "upstream", "when"}) | {
        "answer": each.answer,
        "asked": each.is_tested,
        "inside": each.may_be_inside,
        "question": _questions(each),
        "sentence": fault.in_releases,
        "do": each.do,
        "shown": shown_by.rstrip(", "),
    }


def _questions(each: Applies, of_flags: bool = True) -> str:
    """Return what would decide whether a fault applies; without those that a flag answers, if these are asked above."""
    asked = [question.text for question in each.why if of_flags or not question.flag]
    if not each.is_tested:
        asked.insert(0, table().questions["release"].format(each.fault.package, each.release))
    return " ".join(asked)


def _narrow_down(found: list[Applies], config: Path | None) -> None:
    """Name the flags that would decide most. Each is asked for once, and not with each fault."""
    flags = Counter(question.flag for each in found for question in each.why if question.flag)
    wanted = [name for name, _ in flags.most_common()]
    if wanted:
        names = ", ".join(wanted if config else ["--config", *wanted])
        say_wrapped(f"To narrow it down, give {names}. Questions that they answer are left out below.")


def _show_rest(right: dict[str, list[str]], left: list[Applies]) -> None:
    """Name releases without a fault that surely applies, and say how many faults were not shown."""
    for name, releases in right.items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if releases:
            these = " or ".join(releases[:MOST_FREE])
            sentence = f"With {name} {these} no known fault of {name} surely applies here, but others may."
        say_wrapped("", sentence)
    if left:
        unasked = sum(not each.is_tested for each in left)
        of_these = f"; for {unasked} of these nobody tested your release" if unasked else ""
        say_wrapped("", f"{len(left)} more may apply{of_these}. With --details: all, and what to do.")


def _symptom(word: str) -> str:
    """Return what was seen as the table has it."""
    by_word = {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}
    name = word.lower().replace("_", "-")
    if name not in by_word:
        what = f"--symptom must be one of {', '.join(sorted(table().symptoms))} (got {word!r:.80})"
        raise Stop(what, nearest(name, by_word, otherwise="study stack --help explains the options"))
    return by_word[name]
