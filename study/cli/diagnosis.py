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

from study.configs import sources
from study.configs.differences import Difference, compare, is_secret, mistakes, printable, recognised, same, shown
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.settings import UNSET, EffectiveSettings, effective_settings
from study.core.arms import releases_of_defaults
from study.core.errors import Stop, nearest
from study.core.recipes import AUTOCAST
from study.core.settings import flag
from study.core.text import is_number, number_of, say, say_wrapped
from study.known import lists
from study.known.faults import table
from study.known.findings import Finding, with_id
from study.known.which_apply import Applies, Flags, Stack, free, untested, which_apply
from study.predict.front import Wanted
from study.records import store
from study.records.metrics import dig
from study.watch.about import About, about

DEFAULT = " (the library's default{})"
MOST_SHOWN = 10  # faults, without --details: a reader of 50 reads none

# --- study diagnose --------------------------------------------------------------------------------------------------


def diagnose(runs: tyro.conf.Positional[tuple[Path, ...]], /) -> list[dict]:
    """Say what is wrong or costly in a run, what to do about it, and which claim or script demonstrates it.

    Of a folder with several runs it lists them, and tells each kind of finding once: name a run, and it tells all of
    its own.

    Of a watched run it also says what its steps show: waiting for data, slow ranks, memory that creeps, and more. If it
    is not finished, it says which rank waits for which. This works while the run hangs and after it was ended.

    It also reads a folder of Flight Recorder dumps in JSON, one of each rank.

    With --json: all findings of each run. Example: `study diagnose reports/cpu-2core/runs/smoke`

    Args:
        runs: Folders of runs, record.json files, dumps, or configs, whose mistakes are named.
    """
    if not runs:
        raise Stop("no run is given", "name the folder of a run, or its record.json")
    folders = [folder for path in runs for folder in store.run_folders(path) or [path]]
    is_list = len(folders) > len(runs)
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
    if two := re.fullmatch(r"(accelerate|deepspeed)==(\S+) \1==(\S+)", f"{first} {second}"):
        return _releases_apart(two[1], list(two.groups()[1:]))
    if "==" in first.name or "==" in second.name:
        what = f"two releases of one package can be compared (got {first} and {second})"
        raise Stop(what, "name deepspeed twice, or accelerate; `study stack` takes several")
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
    """Show what changes from the older to the newer of two releases."""
    from study.conform.command import conform  # it takes as long as all else here

    if all(isinstance(lists.release_of(release), Version) for release in releases):
        releases.sort(key=Version)
    answer = conform((f"{package}-configuration",), release="..".join(releases))
    old, new = map(Version, releases)
    say("")
    for word, has, has_not in (("Mended", old, new), ("New", new, old)):
        of_package = [fault for fault in table().fault if fault.package == package and fault.when]
        changed = [fault for fault in of_package if fault.has(has) and fault.has(has_not) is False]
        for each in changed:
            sentence = f"{each.sentence.rstrip('.')} ({each.releases})"
            say_wrapped(f"{word}: {with_id(sentence, each.id)}", indent="  ")
        answer[word.lower()] = [each.id for each in changed]
    return answer


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
    message = reading.find(reading.content(" ".join(error) or None))
    causes, training = explain(message, model, training)
    if not causes[0].is_likely:
        say_wrapped("No cause is sure. The likeliest is first; a memory snapshot of PyTorch tells.", "")
    for number, cause in enumerate(causes, 1):
        what = f"{cause.what[0].upper()}{cause.what[1:]}"
        why = f"{'likely' if cause.is_likely else 'possible'}: {'; '.join(cause.reasons)}"
        say_wrapped(with_id(f"{what} ({why})", cause.id), indent="    ", first=f"{number:>2}. ")
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
        symptom: What was seen: faults with it come first. It is error, hang, ignored, loss, memory, no-update or norm.
        details: All faults that may apply, what would decide that, what to do, and what shows them.
    """
    if flags.stage is not None and flags.fsdp2:
        raise Stop("--stage and --fsdp2 exclude each other", "give the one that shards your training")
    for number in (flags.ranks, flags.passes):
        if number is not None and number < 1:
            raise Stop(f"ranks and passes must be at least 1 (got {number})", "give 1 or more")
    if symptom:
        symptom = _symptom(symptom)
    said, key = _of_config(config)
    versions = {name: said[f"version of {name}"].value for name in table().asked if f"version of {name}" in said}
    releases = releases or tuple(f"{name} {version}" for name, version in versions.items())  # of a record
    config_says = {name: None if each.is_open else each.value for name, each in said.items()}
    training = Stack.of(lists.releases(releases), flags, config_says, key)
    seen = symptom or ""
    found = sorted(which_apply(training), key=lambda each: (seen not in each.fault.symptom, *order(each)))
    answer = in_words(training, found)
    say_wrapped(*lists.notes(releases, training.releases), *_overruled(flags, said), answer["first"])
    left = _show_faults(found, answer["faults"], symptom, details, config)
    for name, right in answer["free"].items():
        sentence = f"Each release of {name} that was tested has a known fault here."
        if right:
            sentence = (
                f"With {name} {' or '.join(right[:4])} no known fault of {name} surely applies here, but others may."
            )
        say_wrapped("", sentence)
    if left:
        unasked = sum(not each.is_tested for each in left)
        of_these = f"; for {unasked} of these nobody tested your release" if unasked else ""
        say_wrapped("", f"{len(left)} more may apply{of_these}. With --details: all, and what to do.")
    return answer


def in_words(training: Stack, found: list[Applies]) -> dict:
    """Return the answer of `study stack`: the sentence, the faults, and releases without any that surely applies."""
    applying = [each for each in found if each.answer == "applies"]
    packages = dict.fromkeys(each.fault.package for each in applying)
    return {
        "fine": not applying,
        "first": _in_one_sentence(training, len(applying), len(found) - len(applying)),
        "faults": [_fault_row(each, training) for each in found],
        "not_asked": [_release_in_words(training, package) for package in untested(training)],
        "free": {package: free(training, package) for package in packages},
    }


def _release_in_words(training: Stack, package: str) -> str:
    return f"{package} {training.releases[package] or '(release not said)'}"


def _in_one_sentence(training: Stack, apply: int, may: int) -> str:
    """Return how many faults there are, with the releases of which nothing is known."""
    named = ", ".join(_release_in_words(training, package) for package in training.releases)
    known = sum(fault.when is not None for fault in table().fault)
    first = f"{named}: of {known} known faults {apply} {'applies' if apply == 1 else 'apply'}, and {may} may"
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


def _symptom(word: str) -> str:
    """Return what was seen as the table has it."""
    by_word = {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}
    name = word.lower().replace("_", "-")
    if name not in by_word:
        what = f"--symptom must be one of {', '.join(sorted(table().symptoms))} (got {word!r:.80})"
        raise Stop(what, nearest(name, by_word, otherwise="study stack --help explains the options"))
    return by_word[name]


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
    if flags.fsdp2 and engine.value == "DeepSpeed":
        yield "--fsdp2 counts, and not the config's DeepSpeed."
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


def _show_faults(
    found: list[Applies], rows: list[dict], symptom: str | None, details: bool, config: Path | None
) -> list[Applies]:
    """Show those that apply, and some of those that may. Return the others. `rows` are the faults in words."""
    # --- each flag is asked for once, and not with each fault
    flags = Counter(question.flag for each in found for question in each.why if question.flag)
    if flags and not details:
        wanted = [name for name, _ in flags.most_common()]
        if config is None:
            wanted.insert(0, "--config")
        say_wrapped(f"To narrow it down, give {', '.join(wanted)}. Questions that they answer are left out below.")
    left = []
    for number, (each, row) in enumerate(zip(found, rows, strict=True), 1):
        first = f"{number:>2}. "
        if details or each.answer == "applies" or (symptom and symptom in each.fault.symptom):
            sentence = f"{row['question']} {row['sentence']}".lstrip()
            _show_finding(first, Finding(each.fault.id, sentence, row["do"], row["shown"]))
        elif number <= MOST_SHOWN:
            of_others = [*_not_tested(each), *(question.text for question in each.why if not question.flag)]
            # Without any question it would read as if it applied.
            question = " ".join(of_others) or row["question"]
            said = with_id(row["sentence"], each.fault.id)
            say_wrapped(f"{said} {question}", indent="    ", first=first)
        else:
            left.append(each)
    return left
