"""`study stack`: which known faults of libraries apply to some releases, in some training."""

from collections import Counter
from pathlib import Path

import tyro

from study.cli.diagnosis import show_finding
from study.configs.pasted import losses, matching
from study.configs.stacks import described
from study.core.errors import Stop, nearest
from study.core.settings import flag
from study.core.text import say_wrapped
from study.known.faults import table
from study.known.findings import Finding, with_id
from study.known.which_apply import WAYS, Applies, Flags, Stack, free, untested, which_apply

MOST_MAY = 5  # faults that may apply, without --details: a reader of 50 reads none
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
            wrote, a project, an environment of conda, a lock of uv or poetry. Several count together.
            Without any: those of the record, or of this environment.
        config: A DeepSpeed json, an Accelerate yaml, arguments of the Trainer, or a record.
        symptom: What was seen, in a word (error, hang, ignored, loss, memory, no-update, norm) or in your words: faults
            with it come first. `study diagnose --symptom` says what it may mean without any release.
        details: All faults that may apply, what would decide that, what to do, and what shows them.
    """
    ways = [name for name in ("stage", *WAYS) if getattr(flags, name) not in (None, False)]
    if len(ways) > 1:
        raise Stop(f"{' and '.join(map(flag, ways))} exclude each other", "give the one that your training has")
    for number in (flags.ranks, flags.passes):
        if number is not None and number < 1:
            raise Stop(f"ranks and micro-batches must be at least 1 (got {number})", "give 1 or more")
    seen = _symptoms(symptom)
    asked, notes = described(releases, flags, config)
    found = which_apply(asked)
    found.sort(key=lambda each: not _is_seen(each, seen))  # sorting keeps the order of the others
    answer = in_words(asked, found)
    say_wrapped(*notes, answer["first"])  # notes tell what was not understood
    rows = {row["id"]: row for row in answer["faults"]}
    for number, each in enumerate([each for each in found if each.answer == "applies"], 1):
        row = rows[each.fault.id]
        show_finding(f"{number:>2}. ", Finding(each.fault.id, row["sentence"], row["do"], row["shown"]))
        if each.fault.who:
            say_wrapped(f"Who is hit: {each.fault.who}.", indent="    ", first="    ")
    _show_free(answer["free"])
    may = [each for each in found if each.answer != "applies"]
    shown = may if details else _spoken_of(may, seen, _said(asked, flags, config))
    for each in shown:
        row = rows[each.fault.id]
        say_wrapped("", f"May apply: {with_id(row['sentence'], each.fault.id)} {row['question']}", indent="    ")
        if details:
            say_wrapped(f"What to do: {row['do']}.", f"Shown by: {row['shown']}", indent="    ", first="    ")
    _show_rest([each for each in may if each not in shown], config, is_all=answer["fine"] and not shown)
    return answer


def _is_seen(each: Applies, seen: set[str]) -> bool:
    return any(symptom in each.fault.symptom for symptom in seen)


def _said(asked: Stack, flags: Flags, config: Path | None) -> set[str]:
    """Return the conditions of which a flag or the config speaks."""
    by_flags = {name for name, value in vars(flags).items() if value is not None}
    return by_flags | ({*asked.said, "keys"} if config else set())


def _spoken_of(may: list[Applies], seen: set[str], said: set[str]) -> list[Applies]:
    """Return faults that may apply and have the symptom, or of which something special is said, the most first."""

    def weight(each: Applies) -> int:
        special = {*(each.fault.when or {})} - USUAL - {question.condition for question in each.why}
        # Trainers and PEFT have few faults, and who names one asks about it.
        return 2 * len(special & said) + (each.fault.package in (*table().trainers, "PEFT"))

    spoken = [each for each in may if _is_seen(each, seen) or (each.may_be_inside and weight(each))]
    return sorted(spoken, key=lambda each: (not _is_seen(each, seen), -weight(each)))[:MOST_MAY]


def in_words(asked: Stack, found: list[Applies]) -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies."""
    applying = [each for each in found if each.answer == "applies"]
    packages = dict.fromkeys(each.fault.package for each in applying)
    return {
        "fine": not applying,
        "first": _in_one_sentence(asked, len(applying), len(found) - len(applying), next(iter(applying), None)),
        "faults": [_row(each) for each in found],
        "not_asked": [_release(asked, package) for package in untested(asked)],
        "free": {package: free(asked, package) for package in packages},
    }


def _release(asked: Stack, package: str) -> str:
    return f"{package} {asked.releases[package] or '(release not said)'}"


def _in_one_sentence(asked: Stack, apply: int, may: int, worst: Applies | None) -> str:
    """Return what applies, the worst of it first, with the releases of which nothing is known."""
    named = ", ".join(_release(asked, package) for package in asked.releases)
    known = sum(fault.when is not None for fault in table().fault)
    if worst is None:
        first = f"{named}: none of {known} known faults surely applies, and {may} may"
    else:
        others = f"{apply} known faults apply; the worst" if apply > 1 else "1 known fault applies"
        first = f"{named}: {others}: {worst.fault.sentence.rstrip('.')}"
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


def _questions(each: Applies) -> str:
    """Return what would decide whether a fault applies."""
    asked = [question.text for question in each.why]
    if not each.is_tested:
        asked.insert(0, table().questions["release"].format(each.fault.package, each.release))
    return " ".join(asked)


def _show_free(right: dict[str, list[str]]) -> None:
    """Name releases without a fault that surely applies."""
    for name, releases in right.items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if releases:
            these = " or ".join(releases[:MOST_FREE])
            sentence = f"With {name} {these} no known fault of {name} surely applies here, but others may."
        say_wrapped("", sentence)


def _show_rest(left: list[Applies], config: Path | None, is_all: bool) -> None:
    """Say in one line how many faults were not shown, and what would tell whether they apply. The answer counts all."""
    if not left:
        return
    flags = Counter(question.flag for each in left for question in each.why if question.flag)
    wanted = [name for name, _ in flags.most_common(MOST_ASKED)]
    if config is None:
        wanted.insert(0, "--config")
    unasked = sum(not each.is_tested for each in left)
    untested = f"for {unasked} of these nobody tested your release" if unasked else ""
    parts = [untested] if is_all else [f"{len(left)} more may apply", untested]
    said = "; ".join(filter(None, parts))
    give = f"Give {', '.join(wanted)} to check them; " if wanted else ""
    said = f"{said[0].upper()}{said[1:]}. " if said else ""
    say_wrapped("", f"{said}{give}--details lists all.")


def _symptoms(words: str | None) -> set[str]:
    """Return what was seen as the table has it, of one word or of a person's sentence."""
    if not words:
        return set()
    by_word = {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}
    name = words.lower().replace("_", "-")
    if name in by_word:
        return {by_word[name]}
    if seen := matching.symptoms(words, {each.id for each in losses.signs("", words)}):
        return seen
    what = f"--symptom {words!r:.80} names nothing that faults are known by"
    listed = f"say what was seen: {', '.join(sorted(table().symptoms))}, or a sentence with the numbers"
    raise Stop(what, nearest(name, by_word, otherwise=listed))
