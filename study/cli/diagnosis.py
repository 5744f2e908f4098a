"""`study diagnose` and `study oom`: what is wrong with a run. `study diff`: why two differ."""

import re
from dataclasses import asdict
from pathlib import Path

import tyro
from packaging.version import Version

from study.configs import sources
from study.configs.differences import Difference, compare, is_secret, mistakes, printable, same, shown
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.settings import effective_settings
from study.core.arms import releases_of_defaults
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import number_of, say, say_wrapped
from study.known import lists
from study.known.faults import table
from study.known.findings import Finding, with_id
from study.predict.front import Wanted
from study.records import store
from study.watch.about import About, about

DEFAULT = " (the library's default{})"

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
