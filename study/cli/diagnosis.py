"""`study diagnose`: what is wrong or costly in a run, and which rank waits. `study diff`: why two trainings differ."""

import dataclasses
from pathlib import Path

import tyro

from study.core.errors import Stop
from study.core.options import AsJson
from study.core.text import number_of, say, say_wrapped, wrapped
from study.predict.front import Wanted
from study.records import collectives, store
from study.records.schema import Record
from study.watch import hangs, sources, trends
from study.watch.diagnosis import judge
from study.watch.differences import Difference, compare, found_in_one, is_secret, mistakes, printable, shown
from study.watch.findings import Finding, ordered
from study.watch.oom.explain import Described, explain


def diagnose(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, as_json: AsJson = False) -> list[dict] | None:
    """Say what is wrong or costly in a run, what to do about it, and which claim or script demonstrates it.

    Of a watched run it also says what its steps show: waiting for data, slow ranks, memory that creeps, and more. If it
    is not finished, it says which rank waits for which. This works while the run hangs and after it was ended.

    It also reads Flight Recorder dumps of several ranks, in a folder.

    Args:
        runs: Folders of runs, record.json files, dumps, or configs, whose mistakes are named.
        as_json: Print everything as JSON.
    """
    if not runs:
        raise Stop("no run is given", "name the folder of a run, or its record.json")
    answers = [_answer(store.newest_try(path)) for path in runs]
    if as_json:
        return answers
    for answer in answers:
        _show(answer)
    return None


def _answer(path: Path) -> dict:
    """Return what is known by a config, by Flight Recorder dumps, or by a run: its record, steps and collectives."""
    folder = path if path.is_dir() else path.parent
    file = folder / store.RECORD
    answer: dict = {"run": path.name, "how": "no record yet", "error": None, "ranks": None, "not_known": []}
    findings: list[Finding] = []
    logs = collectives.load(path) if path.is_dir() else []
    if config := sources.read_config(path):
        return answer | {"how": config.words, "findings": list(map(dataclasses.asdict, mistakes(config)))}
    if not file.exists() and not logs and (path.is_file() or (path.is_dir() and hangs.dumps_in(path))):
        logs = hangs.dumps(path)
        answer["how"] = "Flight Recorder dumps"
    elif file.exists() or not logs:
        record = store.read(path if path.is_file() else file)
        logs = [] if record.status == "done" else logs
        steps = trends.findings(trends.load(folder))
        judged, unknown = judge(record)
        findings = [*_out_of_memory(record, file), *ordered([*mistakes(sources.read(file)), *steps, *judged])]
        virtual = ", virtual" if record.is_virtual else ""
        arm = record.observed.arm or record.requested.arm or record.observed.wrapper or "unknown"
        answer["run"] = record.run_id
        answer["how"] = f"{arm} on {number_of(record.observed.ranks or 0, 'ranks')}{virtual}, {record.status}"
        answer |= {"error": record.error and record.error.model_dump(), "not_known": unknown}
    if logs:
        answer["ranks"] = hangs.state(logs)
        findings = [*hangs.causes(logs), *hangs.hangs(logs), *findings]
    return answer | {"findings": list(map(dataclasses.asdict, findings))}


def _out_of_memory(record: Record, file: Path) -> list[Finding]:
    """Return what `study oom` reads in the error of a run that ended so, and the command that finds what would fit."""
    if record.status != "oom" or record.error is None:
        return []
    seen = record.observed
    flags = {"arm": seen.arm, "ranks": seen.ranks, "micro-batch": record.watched.rows_per_pass}
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    remedy = f"`study oom {file} --model MODEL {words}` names the tensor, and predicts which arms fit"
    try:
        cause = explain(record.error.message, Wanted(), Described(ranks=seen.ranks)).causes[0]
    except (Stop, IndexError):  # the message has no sizes
        return [Finding("The memory was full", remedy, id="memory_full")]
    sentence = f"The memory was full; the likeliest cause: {cause.what}"
    return [Finding(sentence, f"{cause.remedy}; {remedy}", id="memory_full")]


def _show(answer: dict) -> None:
    result = number_of(len(answer["findings"]), "findings") if answer["findings"] else "nothing was found"
    say_wrapped(f"{answer['run']}: {answer['how']}: {result}.")
    if error := answer["error"]:
        say_wrapped(f"It ended: {error['message']}. What to do: {error['what_to_do']}.", indent="  ", first="  ")
    if answer["ranks"]:
        say_wrapped(f"{answer['ranks']}.", indent="  ", first="  ")
    for number, finding in enumerate(answer["findings"], 1):
        _show_finding(f"{number:>2}. ", finding)
    if answer["not_known"]:
        say_wrapped("", f"Not in this record: {', '.join(answer['not_known'])}.", indent="  ", first="  ")


def _show_finding(first: str, finding: dict) -> None:
    say("", *wrapped(f"{finding['sentence']}.", "    ", first))
    if finding["remedy"]:
        say_wrapped(f"What to do: {finding['remedy']}.", indent="    ", first="    ")
    if finding["evidence"]:
        say(f"    Shown by: {finding['evidence']}")


def diff(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> dict | None:
    """List why the losses or the memory of two trainings differ: known causes first, then all other keys.

    Each side is an Accelerate yaml, a DeepSpeed json, arguments of the Hugging Face Trainer (json or yaml), or a
    record. The two sides may be of different kinds.

    Args:
        a: The first: a config file, or a folder with a record.json.
        b: The second.
        as_json: Print everything as JSON.
    """
    sides = [sources.read(store.newest_try(path)) for path in (a, b)]
    compared = compare(*sides)
    known = [each for each in compared if each.description]
    others = [each for each in compared if not each.description]
    found = [[*mistakes(side), *found_in_one(side, other)] for side, other in (sides, sides[::-1])]
    if as_json:
        rows = {"known": list(map(_row, known)), "other": list(map(_row, others))}
        return rows | dict(zip(("found_in_a", "found_in_b"), found, strict=True))
    names = ", ".join(printable(each.name) for each in known) or "no setting that differs"
    say_wrapped(f"What changes losses or memory: {names}.")
    for letter, side, findings in zip("AB", sides, found, strict=True):
        say("", *wrapped(f"{letter}: {side.path} ({side.words})", "   "))
        for finding in findings:
            _show_finding("  - ", dataclasses.asdict(finding))
    for number, each in enumerate(known, 1):
        say("", *wrapped(f"{number:>2}. {_values(each)}", "    "))
        if each.description:
            why = f"Changes {each.description.changes}: {each.description.why}."
            say_wrapped(why, indent="    ", first="    ")
    if others:
        say("", "Other keys that differ:")
    for each in others:
        say_wrapped(_values(each), indent="    ", first="  ")
    return None


def _values(difference: Difference) -> str:
    texts = []
    for letter, setting in (("A", difference.a), ("B", difference.b)):
        default = " (the library's default)" if setting.is_default else ""
        texts.append(f"{letter} {shown(setting, difference.name)}{default}")
    return f"{printable(difference.name)}: {', '.join(texts)}"


def _row(difference: Difference) -> dict:
    values = {"a": difference.a.value, "b": difference.b.value}
    if is_secret(difference.name):
        values = dict.fromkeys(values, "(not shown)")
    about = difference.description
    return {"name": difference.name, **values} | ({"changes": about.changes, "why": about.why} if about else {})
