"""`study diagnose` and `study oom`: what is wrong with a run, or what a text means. `study diff`: why two differ."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from packaging.version import Version

from study.cli import given, pasted
from study.configs import sources
from study.configs.differences import Difference, compare, is_secret, mistakes, printable, same, shown
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.pasted import condense
from study.configs.settings import effective_settings
from study.core.arms import releases_of_defaults
from study.core.errors import Stop, nearest
from study.core.settings import flag
from study.core.text import number_of, say, say_wrapped
from study.known import lists
from study.known.faults import Fault, table
from study.known.findings import Finding, with_id
from study.predict.front import Wanted
from study.records import store
from study.watch.about import About, about

DEFAULT = " (the library's default{})"
LONGEST_PATH = 200  # characters: an error in quotes may be longer than a name can be

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
    paths, text = given.split(tuple(map(str, runs)))
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
            told |= {finding.id for finding in findings}
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
        _say_indented(answer.ranks)
    for number, finding in enumerate(findings, 1):
        show_finding(f"{number:>2}. ", finding)


def _say_indented(*texts: str) -> None:
    say_wrapped(*texts, indent="    ", first="    ")


def show_finding(first: str, finding: Finding) -> None:
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
    and which known faults were fixed or are new.

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
            show_finding("  - ", finding)
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
    answer: dict[str, Any] = {"fixed": _changed(known, old, new), "new": _changed(known, new, old)}
    answer["both"] = [fault.id for fault in known if fault.has(old) and fault.has(new)]
    unknown = sum(fault.has(old) is None or fault.has(new) is None for fault in known)
    fixed, added = number_of(len(answer["fixed"]), "known faults"), number_of(len(answer["new"]), "are new")
    say_wrapped(f"From {name} {old} to {new}: {fixed} fixed, {added.replace('1 are', '1 is')}.", "")
    for word in ("new", "fixed"):
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
    --sequence also with what a micro-batch makes.

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
    how = "Likely" if first.is_likely else "Perhaps"
    say_wrapped(with_id(f"{how}: {first.what}", first.id), "")
    if not first.is_likely:
        _say_indented("A memory snapshot of PyTorch would tell.")
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
