"""`study diagnose` and `study oom`: what is wrong with a run. `study diff`: why two differ. `study stack`: faults."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from packaging.version import Version

from study.cli import pasted
from study.configs import sources
from study.configs.differences import Difference, compare, is_secret, mistakes, printable, recognised, same, shown
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.pasted import condense, losses, matching
from study.configs.settings import UNSET, EffectiveSettings, effective_settings
from study.core.arms import releases_of_defaults
from study.core.errors import Stop, nearest
from study.core.recipes import AUTOCAST
from study.core.settings import flag
from study.core.text import is_number, number_of, say, say_wrapped
from study.known import lists
from study.known.faults import Fault, table
from study.known.findings import Finding, with_id
from study.known.which_apply import WAYS, Applies, Flags, Stack, free, untested, which_apply
from study.predict.front import Wanted
from study.records import store
from study.records.metrics import dig
from study.watch.about import About, about

DEFAULT = " (the library's default{})"
MOST_MAY = 5  # faults that may apply, without --details: a reader of 50 reads none
MOST_QUESTIONS = 3
LONGEST_PATH = 200  # characters: an error in quotes may be longer than a name can be
USUAL = {"stage", "ranks", "cuda", "trainer", "offload", "script"}  # conditions that say little of a training

# --- study diagnose --------------------------------------------------------------------------------------------------


def diagnose(
    runs: tyro.conf.Positional[tuple[str, ...]] = (), /, *, symptom: str = "", details: bool = False
) -> list[dict]:
    """Say what is wrong or costly in a run, or what a log, an error or any pasted text means, and what to do about it.

    A text may be a log, a traceback, `pip freeze`, `transformers env`, `accelerate env`, `ds_report`, a config, a
    command, your own sentences, or all of them: in files, through a pipe (`-`), or as words. Several make one answer.

    Of a folder with several runs it lists them, and tells each kind of finding once: name a run, and it tells all of
    its own. Of a watched run it also says what its steps show: waiting for data, slow ranks, memory that creeps, and
    more. If it is not finished, it says which rank waits for which. This works while the run hangs and after it was
    ended. It also reads a folder of Flight Recorder dumps in JSON, one of each rank.

    With --json: all findings of each run, and the answer to the text.

    Example: `study diagnose train.log`

    Args:
        runs: Texts, or folders of runs, record.json files, dumps, or configs, whose mistakes are named.
        symptom: What was seen, in your words, such as "loss is 0 and grad_norm 1.414 after a few hundred steps".
        details: Also the lines of the text that show it.
    """
    if not runs and not symptom:
        raise Stop("nothing is given", "name a log, a run, or paste an error; `-` reads a pipe")
    paths, text = pasted.split(tuple(map(str, runs)))
    answers = []
    if text or not paths:
        # A config beside a text says more of the training that the text is about.
        text = "\n".join([text, *(condense.content(path) for path in paths if path.is_file())])
        answers.append(pasted.tell(text, symptom, details))
        say_wrapped(*([""] if paths else []))
    return answers + _runs(paths)


def _runs(paths: list[Path]) -> list[dict]:
    """Tell the findings of runs, records, dumps and configs."""
    folders = [folder for path in paths for folder in store.run_folders(path) or [path]]
    is_list = len(folders) > len(paths)
    answers = []
    quiet = []
    told: set[str] = set()
    for folder in folders:
        try:
            answer = about(folder)
        except Stop as stop:
            if not is_list:
                raise
            answer = About(folder.name, stop.what)  # the others are listed all the same
        answers.append(asdict(answer))
        if is_list and not answer.findings and answer.how.endswith("done"):
            quiet.append(answer.run)
            continue
        findings = [finding for finding in answer.findings if finding.id not in told]
        _show(answer, findings)
        if is_list:
            told |= {finding.id for finding in findings if finding.id}
        elif answer.not_known:
            _say_indented("", f"Not in this record: {', '.join(answer.not_known)}.")
    if quiet:
        say_wrapped(f"No findings: {', '.join(quiet)}.")
    return answers


def _show(answer: About, findings: list[Finding]) -> None:
    text = f"{answer.run}: {answer.how}: {number_of(len(answer.findings), 'findings')}"
    if above := len(answer.findings) - len(findings):
        text += f", {above} told above"
    if answer.config:
        text += f" in its keys; `study stack --config {answer.config}` names known faults of libraries"
    say_wrapped(f"{text}.")
    if error := answer.error:
        _say_indented(f"It ended: {error['message']}. What to do: {error['what_to_do']}.")
    if answer.ranks:
        _say_indented(f"{answer.ranks}.")
    for number, finding in enumerate(findings, 1):
        _show_finding(f"{number:>2}. ", finding)


def _say_indented(*texts: str) -> None:
    say_wrapped(*texts, indent="    ", first="    ")


def _show_finding(first: str, finding: Finding) -> None:
    say("")
    say_wrapped(finding.said, indent="    ", first=first)
    if finding.remedy:
        _say_indented(f"What to do: {finding.remedy}.")
    if finding.evidence:
        say(f"    Shown by: {finding.evidence}")  # a path to copy: it is not wrapped


# --- study diff ------------------------------------------------------------------------------------------------------


def diff(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path], /) -> dict:
    """List why the losses or the memory of two trainings differ: known causes first, then all other keys.

    Each side is an Accelerate yaml, a DeepSpeed json, arguments of the Hugging Face Trainer (json or yaml), or a
    record. The two sides may be of different kinds. Of two releases, such as deepspeed==0.18.2 and deepspeed==0.19.8,
    in any order, it lists which defaults and which configs that are accepted changed between them, by the kept answers,
    and which known faults were mended or are new.

    With --json: the rows. Example: `study diff accelerate_configs/zero2.yaml accelerate_configs/zero3.yaml`

    Args:
        first: A config file, a folder with a record.json, or a release: A in the answer.
        second: The other one: B.
    """
    if two := re.fullmatch(r"([\w-]+)==(\S+) \1==(\S+)", f"{first} {second}"):
        return _releases_apart(two[1], list(two.groups()[1:]))
    if "==" in first.name or "==" in second.name:
        what = f"two releases of one package can be compared (got {first} and {second})"
        raise Stop(what, "name one package twice, such as trl==1.8.0 trl==1.12.0; `study stack` takes several")
    # --- what each side sets, whatever its kind of file
    a = sources.read(first)
    b = sources.read(second)
    known, others = compare(a, b)
    answer = {"known": list(map(_row, known)), "other": list(map(_row, others))}
    # --- what differs in one line, what is wrong in one of them alone, each known cause with its values, and keys whose
    # effect nobody knows
    nothing = "no known cause differs, but other keys do" if others else "no setting that differs"
    names = []
    for each in known:
        older = " with older releases" if same(each.a.value, each.b.value) else ""
        names.append(f"{printable(each.name)}{older}")
    say_wrapped(f"What changes losses or memory: {', '.join(names) or nothing}.")
    for letter, side in ("a", a), ("b", b):
        say_wrapped("", f"{letter.upper()}: {side.path} ({side.words})", indent="   ")
        findings = list(mistakes(side))
        for finding in findings:
            _show_finding("  - ", finding)
        answer[f"found_in_{letter}"] = list(map(asdict, findings))
    for number, each in enumerate(known, 1):
        say("")
        say_wrapped(_values(each), indent="    ", first=f"{number:>2}. ")
        why = f"Changes {each.description.changes}: {each.description.sentence}"
        _say_indented(with_id(why, each.description.id))
    if others:
        say("", "Other keys that differ:")
        say_wrapped(*map(_values, others), indent="    ", first="  ")
    if any(each.is_default for side in (a, b) for each in effective_settings(side).values()):
        say_wrapped("", f"Defaults are those of {releases_of_defaults()}.")
    return answer


def _releases_apart(package: str, releases: list[str]) -> dict:
    """Show what changes from the older to the newer of two releases, of faults as far as they are known."""
    name = table().packages.get(package.lower())
    if name is None:
        raise Stop(f"of {package!r:.80} nothing is known", nearest(package, table().packages))
    if not all(isinstance(lists.release_of(release), Version) for release in releases):
        raise Stop(f"{' or '.join(releases):.80} is no release", f"write two, such as {package}==0.19.8")
    old, new = sorted(map(Version, releases))
    known = [fault for fault in table().fault if fault.package == name and fault.when]
    answer: dict[str, Any] = {"mended": _changed(known, old, new), "new": _changed(known, new, old)}
    answer["both"] = [fault.id for fault in known if fault.has(old) and fault.has(new)]
    unknown = sum(fault.has(old) is None or fault.has(new) is None for fault in known)
    mended, brought = number_of(len(answer["mended"]), "known faults"), number_of(len(answer["new"]), "are new")
    say_wrapped(f"From {name} {old} to {new}: {mended} mended, {brought.replace('1 are', '1 is')}.", "")
    for word in ("new", "mended"):
        for fault in [each for each in known if each.id in answer[word]]:
            say_wrapped(f"{word.capitalize()}: {with_id(fault.in_releases, fault.id)}", indent="    ")
            if word == "new":
                _say_indented(f"What to do: {fault.do}.")
    if answer["both"]:
        say_wrapped("", f"Both have: {', '.join(answer['both'])}. `study explain ID` says more.")
    if unknown:
        others = number_of(unknown, "others")
        say_wrapped("", f"Of {others} nobody tested one of the two: `study stack {package}=={new}` names them.")
    if name in ("accelerate", "deepspeed"):  # of these, kept answers say which configs and defaults changed
        from study.conform.command import conform  # it takes as long as all else here

        say("")
        answer |= conform((f"{name}-configuration",), release=f"{old}..{new}")
    return answer


def _changed(known: list[Fault], has: Version, has_not: Version) -> list[str]:
    return [fault.id for fault in known if fault.has(has) and fault.has(has_not) is False]


def _values(difference: Difference) -> str:
    sides = (difference.a, difference.b)
    a, b = (f"{shown(side, difference.name)}{DEFAULT.format(side.older) if side.is_default else ''}" for side in sides)
    return f"{printable(difference.name)}: A {a}, B {b}"


def _row(difference: Difference) -> dict:
    row = {"name": difference.name, "a": difference.a.value, "b": difference.b.value}
    # A config of somebody else may hold a token, and this answer may be sent to somebody.
    for side in ("a", "b"):
        if is_secret(difference.name, row[side]):
            row[side] = "(not shown)"
    if difference.is_known:
        about = difference.description
        row |= {"id": about.id, "changes": about.changes, "why": about.sentence}
    return row


# --- study oom -------------------------------------------------------------------------------------------------------


def oom(error: tyro.conf.Positional[tuple[str, ...]] = (), /, *, model: Wanted, training: Described) -> dict:
    """Explain an error about memory: what its size is, and what made it. Nothing is run.

    It reads errors of CUDA and ROCm, of host memory and pinned memory, of processes that were killed, and of disks.
    With --model and --arm or --config, the size is matched with that training's tensors; with --micro-batch and
    --sequence also with what a pass makes.

    With --json: the causes with their points.

    Example: `study oom train.log --vocabulary 248320 --sequence 4k --micro-batch 1`

    Args:
        error: The error, best in quotes, or the log that holds it. Default: the standard input.
        model: The model.
        training: The training.
    """
    text = condense.content(Path(error[0])) if _is_text(error) else reading.content(" ".join(error) or None)
    message = reading.find(text)
    causes, training = explain(message, model, training)
    first, *others = causes
    how = "Likely" if first.is_likely else "Perhaps (nothing is sure; a memory snapshot of PyTorch tells)"
    say_wrapped(with_id(f"{how}: {first.what}", first.id), "")
    _say_indented(f"What to do: {first.remedy}.", f"Tells it apart: {first.apart}.")
    _say_indented(f"It rests on: {'; '.join(first.reasons)}.")
    for number, cause in enumerate(others, 2):
        why = f"{'likely' if cause.is_likely else 'possible'}: {'; '.join(cause.reasons)}"
        what = with_id(f"{cause.what[0].upper()}{cause.what[1:]} ({why})", cause.id)
        say_wrapped("", what, indent="    ", first=f"{number:>2}. ")
        _say_indented(f"What to do: {cause.remedy}.", f"Tells it apart: {cause.apart}.")
    say_wrapped("", f"The message ({message.where.removeprefix('oom-')}): {message.line}")
    # The config says more of the training than the flags do. A wrong guess has to be seen.
    known = [f"{flag(name)} {value}" for name, value in vars(training).items() if value is not None]
    if known:
        say_wrapped(f"Taken as: {', '.join(known)}.")
    if not (model.model or model.params):
        say_wrapped("", "With --model and --arm or --config, the size is matched with this training's own tensors.")
    elif model.lora_rank is None:
        say_wrapped("", "If only adapters train, give --lora-rank as well.")
    say_wrapped("`study advise` predicts which arms fit, and how long their steps take.")
    return {"error": asdict(message), "causes": list(map(asdict, causes)), "taken_as": vars(training)}


def _is_text(error: tuple[str, ...]) -> bool:
    """Whether a file is named that may be of any size."""
    return len(error) == 1 and len(error[0]) < LONGEST_PATH and Path(error[0]).is_file()


# --- study stack -----------------------------------------------------------------------------------------------------


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
            raise Stop(f"ranks and passes must be at least 1 (got {number})", "give 1 or more")
    seen = _symptoms(symptom)
    of_config, key = _of_config(config)
    recorded = {name: of_config.get(f"version of {name}") for name in table().asked}
    versions = {name: each.value for name, each in recorded.items() if each is not None}
    releases = releases or tuple(f"{name} {version}" for name, version in versions.items())  # of a record
    config_says = {name: None if each.is_open else each.value for name, each in of_config.items()}
    training = Stack.of(lists.releases(releases), flags, config_says, key)
    found = sorted(which_apply(training), key=lambda each: (not _is_seen(each, seen), *order(each)))
    answer = in_words(training, found)
    said = {name for name, value in vars(flags).items() if value is not None} | {*config_says}
    say_wrapped(*lists.notes(releases, training.releases))  # only if what is given was not understood
    _say_stack(found, answer, training, seen)
    may = [each for each in found if each.answer != "applies"]
    spoken = may
    if not details:
        spoken = [each for each in may if _is_seen(each, seen) or speaks(each, said)]
        spoken = sorted(spoken, key=lambda each: (not _is_seen(each, seen), -speaks(each, said)))[:MOST_MAY]
    _show_may(spoken, answer, details)
    say_wrapped(*_overruled(flags, of_config))
    _say_left([each for each in may if each not in spoken], config)
    return answer


def _is_seen(each: Applies, seen: set[str]) -> bool:
    return any(symptom in each.fault.symptom for symptom in seen)


def speaks(each: Applies, said: set[str]) -> int:
    """Return how much of what a fault needs a config or a flag says, besides what each training has."""
    if not each.may_be_inside:
        return 0
    special = {*(each.fault.when or {})} - USUAL - {question.condition for question in each.why}
    settings = {condition for name, condition in table().settings.items() if name in said} | said | {"keys"}
    # Trainers and PEFT have few faults, and who names one asks about it.
    return 2 * len(special & settings) + (each.fault.package in (*table().trainers, "PEFT"))


def _say_stack(found: list[Applies], answer: dict, training: Stack, seen: set[str]) -> None:
    """Say what applies, the worst first, and what to do about it; or that nothing surely does."""
    rows = {row["id"]: row for row in answer["faults"]}
    applying = sorted(
        (each for each in found if each.answer == "applies"),
        key=lambda each: (not _is_seen(each, seen), not each.fault.symptom.startswith(table().silent)),
    )
    say_wrapped(answer["first"])
    for number, each in enumerate(applying, 1):
        row = rows[each.fault.id]
        _show_finding(f"{number:>2}. ", Finding(each.fault.id, row["sentence"], row["do"], row["shown"]))
        if each.fault.who:
            _say_indented(f"Who is hit: {each.fault.who}.")
    for name, right in answer["free"].items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if right:
            sentence = (
                f"With {name} {' or '.join(right[:4])} no known fault of {name} surely applies here, but others may."
            )
        say_wrapped("", sentence)


def _show_may(spoken: list[Applies], answer: dict, details: bool) -> None:
    """Show faults that may apply, each with its question."""
    rows = {row["id"]: row for row in answer["faults"]}
    for each in spoken:
        row = rows[each.fault.id]
        said = f"May apply: {with_id(row['sentence'], each.fault.id)} {row['question']}"
        say_wrapped("", said, indent="    ")
        if details:
            _say_indented(f"What to do: {row['do']}.", f"Shown by: {row['shown']}")


def _say_left(left: list[Applies], config: Path | None) -> None:
    """Say in one line what would tell whether the others apply."""
    if not left:
        return
    flags = Counter(question.flag for each in left for question in each.why if question.flag)
    wanted = [name for name, _ in flags.most_common(MOST_QUESTIONS - 1)]
    if config is None:
        wanted.insert(0, "--config")
    unasked = sum(not each.is_tested for each in left)
    of_these = f"; for {unasked} of these nobody tested your release" if unasked else ""
    give = f"Give {', '.join(wanted)} to check them; " if wanted else ""
    say_wrapped("", f"{len(left)} more may apply{of_these}. {give}--details lists all.")


def in_words(training: Stack, found: list[Applies]) -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies."""
    applying = [each for each in found if each.answer == "applies"]
    worst = sorted(applying, key=lambda each: not each.fault.symptom.startswith(table().silent))
    packages = dict.fromkeys(each.fault.package for each in applying)
    return {
        "fine": not applying,
        "first": _in_one_sentence(training, len(applying), len(found) - len(applying), next(iter(worst), None)),
        "faults": [_fault_row(each, training) for each in found],
        "not_asked": [_release_in_words(training, package) for package in untested(training)],
        "free": {package: free(training, package) for package in packages},
    }


def _release_in_words(training: Stack, package: str) -> str:
    return f"{package} {training.releases[package] or '(release not said)'}"


def _in_one_sentence(training: Stack, apply: int, may: int, worst: Applies | None) -> str:
    """Return what applies, the worst of it first, with the releases of which nothing is known."""
    named = ", ".join(_release_in_words(training, package) for package in training.releases)
    known = sum(fault.when is not None for fault in table().fault)
    if worst is None:
        first = f"{named}: none of {known} known faults surely applies, and {may} may"
    else:
        others = f"{apply} known faults apply; the worst" if apply > 1 else "1 known fault applies"
        first = f"{named}: {others}: {worst.fault.sentence.rstrip('.')}"
    if packages := untested(training):
        first += f"; in no test of ours: {', '.join(_release_in_words(training, each) for each in packages)}"
    return f"{first}."


def _fault_row(each: Applies, training: Stack) -> dict:
    """Return a fault that applies, or may, in words."""
    fault = each.fault
    shown_by = f"reproductions/{fault.script}.py" if fault.script else f"{fault.rests_on}, {fault.upstream}"
    return fault.model_dump(include={"id", "package", "symptom", "who", "upstream", "when"}) | {
        "answer": each.answer,
        "asked": each.is_tested,
        "inside": each.may_be_inside,
        "question": " ".join([*_not_tested(each), *(question.text for question in each.why)]),
        "sentence": fault.in_releases,
        "do": fault.do_with.get(training.said["trainer"], fault.do),
        "shown": shown_by.rstrip(", "),
    }


def _not_tested(each: Applies) -> list[str]:
    """Return a sentence if the release was not tested."""
    if each.is_tested:
        return []
    return [table().questions["release"].format(each.fault.package, each.release)]


def _of_config(config: Path | None) -> tuple[EffectiveSettings, Callable | None]:
    """Return what a config says by our names, and what returns its value at a dotted path."""
    if config is None:
        return {}, None
    source = recognised(config)
    said = effective_settings(source)
    if "ranks" in said and said["ranks"].is_open:
        del said["ranks"]  # auto is no number: 2 are taken, as where nothing says how many
    if source.unread:
        say_wrapped(f"{source.unread}.")
        return said, None
    return said, partial(dig, (source.named or source).content | source.content)


def _symptoms(words: str | None) -> set[str]:
    """Return what was seen as the table has it, of one word or of a person's sentence."""
    if not words:
        return set()
    by_word = {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}
    name = words.lower().replace("_", "-")
    if name in by_word:
        return {by_word[name]}
    signs = {each.id for each in losses.signs("", words)}
    if seen := matching.symptoms(words, signs):
        return seen
    what = f"--symptom {words!r:.80} names nothing that faults are known by"
    listed = f"say what was seen: {', '.join(sorted(table().symptoms))}, or a sentence with the numbers"
    raise Stop(what, nearest(name, by_word, otherwise=listed))


def _overruled(flags: Flags, said: EffectiveSettings) -> Iterator[str]:
    """Yield a sentence for each flag that says otherwise than the config, or what the table does not know."""
    for name, condition in table().settings.items():
        given = getattr(flags, condition, None)
        written = said.get(name, UNSET)
        if given is None or written.value is None or written.is_open or written.is_default:
            continue
        if not same(given, written.value) and not _is_named_so(given, str(written.value).lower()):
            yield f"{flag(condition)} {given} counts, and not the config's {shown(written, name)}."
    engine = said.get("engine", UNSET)
    known = table().optimizers
    if flags.optimizer is not None and not any(name in flags.optimizer.lower() for name in known):
        yield f"--optimizer {flags.optimizer!r:.80} is none of {', '.join(known)}: no fault of these is told."
    for way in WAYS:
        if getattr(flags, way) and engine.value == "DeepSpeed":
            yield f"{flag(way)} counts, and not the config's DeepSpeed."
    if flags.stage is not None and engine.value == "FSDP":
        yield f"--stage {flags.stage} counts, and not the config's FSDP."


def _is_named_so(given: Any, written: str) -> bool:
    """Whether a config says in its words what a flag says: AdamW or adamw_torch, a cast to bfloat16, lora."""
    if isinstance(given, bool):
        return given == (written not in ("false", "none"))
    kind, _, how = str(given).partition("_")
    if kind in AUTOCAST:
        return written == f"{how or 'cast'} to {AUTOCAST[kind]}"
    return str(given).lower() in written and not is_number(given)


def order(each: Applies) -> tuple:
    """Return what sorts a fault: what applies comes first, then wrong trainings of which at least half is said, then
    that of which the most is said, and the least is open.

    A release between two that have a fault most likely has it: that it was not asked leaves nothing open.
    """
    is_open = len(each.why)
    is_said = len(each.fault.when or ()) - is_open
    return (
        each.answer,
        not each.may_be_inside,
        not (each.fault.symptom.startswith(table().silent) and is_said >= is_open),
        -is_said,
        is_open,
    )
