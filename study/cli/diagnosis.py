"""`study diagnose`: what is wrong or costly in a run, and which rank waits. `study diff`: why two trainings differ."""

import dataclasses
from pathlib import Path

import tyro

from study.core import arms
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.numbers import number_of
from study.core.options import AsJson
from study.core.tables import say, say_wrapped, wrapped
from study.records import collectives, hangs, store
from study.records.collectives import RankLog
from study.records.hangs import Finding
from study.records.schema import Record
from study.watch import diagnosis, differences, evidence, hang_causes, sources, trends
from study.watch.differences import Comparison, Difference, contradictions, is_secret, printable, shown
from study.watch.findings import ordered
from study.watch.oom.explain import explain
from study.watch.oom.training import Described, Shaped

REPRODUCTIONS = ROOT / "reproductions"
RECORDER = "Flight Recorder dumps"
MOST = 24  # names that a line lists


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
    for number, answer in enumerate(answers):
        say(*[""] * bool(number), *_lines(answer))
    return None


def _answer(path: Path) -> dict:
    """Return everything that is known about a run: by the logs of its ranks' collectives, and by its record."""
    if config := sources.read_config(path):
        return _of_file(path, config.words, _mistakes(contradictions(config)), "keys, and values that contradict")
    folder = path.parent if path.is_file() else path
    logs = collectives.load(folder) if folder.is_dir() else []
    if not logs and _is_evidence(path):
        found, state = evidence.look(path)
        return _of_file(path, RECORDER, found, RECORDER) | {"ranks": state}
    tables = trends.load(folder) if folder.is_dir() else {}
    judged_steps = ["steps"] if tables else []
    if logs and path == folder and not (folder / store.RECORD).exists():  # it ended before it wrote one
        about = {"run": folder.name, "how": "no record yet", "status": None, "error": None}
        return about | _waiting(logs) | {"not_known": []}
    record = store.read(path) if path.is_file() else store.load(folder)
    seen = record.observed
    judged, unknown = diagnosis.looked_at(record)
    ranks = f" on {number_of(seen.ranks, 'ranks')}" if seen.ranks else ""
    virtual = ", virtual" if record.is_virtual else ""
    waiting = _waiting(logs if record.status != "done" else [])
    ignored = _mistakes(differences.ignored_keys(record))
    findings = ordered([*ignored, *trends.findings(tables), *diagnosis.diagnose(record)])
    first, others = (list(map(dataclasses.asdict, some)) for some in (_out_of_memory(record, path), findings))
    return {
        "run": record.run_id,
        "how": f"{seen.arm or record.requested.arm or seen.wrapper or 'unknown'}{ranks}{virtual}, {record.status}",
        "status": record.status,
        "error": record.error.model_dump() if record.error else None,
        "ranks": waiting["ranks"],
        "findings": first + waiting["findings"] + others,
        "looked_at": waiting["looked_at"] + judged_steps + judged,
        "not_known": unknown,
    }


def _of_file(path: Path, kind: str, findings: list[Finding], topic: str) -> dict:
    """Return what is known by a file that is neither a run nor a record."""
    unknown = dict.fromkeys(("status", "error", "ranks"))
    about = {"run": path.name, "how": kind, "findings": list(map(dataclasses.asdict, findings))}
    return unknown | about | {"looked_at": [topic], "not_known": []}


def _mistakes(texts: list[str]) -> list[Finding]:
    """Return the mistakes of a config, each with its remedy."""
    parts = [text.rpartition(": ") for text in texts]
    return [Finding(sentence, remedy, id="config") for sentence, _, remedy in parts]


def _out_of_memory(record: Record, path: Path) -> list[Finding]:
    """Return what `study oom` reads in the error of a run that ended so, and the command that finds what would fit."""
    if record.status not in ("oom", "host_oom") or record.error is None:
        return []
    seen = record.observed
    arm = seen.arm if seen.arm in arms.all_paths() else None
    flags = {"arm": arm, "ranks": seen.ranks, "micro-batch": record.watched.rows_per_pass}
    flags |= {"accumulation": seen.accumulation if (seen.accumulation or 1) > 1 else None}
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    record_file = path if path.is_file() else path / store.RECORD
    remedy = f"`study oom {record_file} --model MODEL {words}` names the tensor, and predicts which arms fit"
    try:
        cause = explain(record.error.message, Shaped(), Described(arm=arm, ranks=seen.ranks)).causes[0]
    except (Stop, IndexError):  # the message has no sizes
        return [Finding("The memory was full", remedy, id="memory_full")]
    sure = "likely" if cause.is_likely else "possible"
    sentence = f"The memory was full. {cause.what[0].upper()}{cause.what[1:]} ({sure})"
    return [Finding(sentence, f"{cause.remedy}; {remedy}", id="memory_full")]


def _is_evidence(path: Path) -> bool:
    """Return whether a path is neither a run nor a record: what other tools wrote."""
    is_record = path.name == store.RECORD or (path / store.RECORD).exists()
    return not is_record and evidence.is_evidence(path)


def _waiting(logs: list[RankLog]) -> dict:
    """Return what the logs of the ranks' collectives say."""
    return {
        "ranks": hangs.state(logs) if logs else None,
        "findings": [dataclasses.asdict(finding) for finding in (*hang_causes.causes(logs), *hangs.hangs(logs))],
        "looked_at": ["where the ranks wait"] if logs else [],
    }


def _lines(answer: dict) -> list[str]:
    result = number_of(len(answer["findings"]), "findings") if answer["findings"] else "nothing was found"
    lines = wrapped(f"{answer['run']}: {answer['how']}: {result}.")
    if error := answer["error"]:
        status = "" if answer["status"] == error["message"] else f"{answer['status']}: "
        lines += _indented(f"{status}{error['message']}. What to do: {error['what_to_do']}.", 2)
    if answer["ranks"]:
        lines += _indented(f"{answer['ranks']}.", 2)
    for number, finding in enumerate(answer["findings"], 1):
        lines += ["", *wrapped(f"{number:>2}. {finding['sentence']}.", "    ")]
        if finding["remedy"]:
            lines += _indented(f"What to do: {finding['remedy']}.", 4)
        if evidence := finding["evidence"]:
            lines.append(f"    Shown by: {_shown_by(evidence)}")
    lines += ["", *_indented(f"Looked at: {', '.join(answer['looked_at'])}.", 2)]
    if answer["not_known"]:
        lines += _indented(f"Not in this record: {', '.join(answer['not_known'])}.", 2)
    return lines


def _shown_by(evidence: str) -> str:
    """Return the thread, the script or the command that shows it."""
    if evidence.startswith("https://"):
        return evidence
    is_script = safe_join(REPRODUCTIONS, f"{evidence}.py").exists()
    return f"reproductions/{evidence}.py" if is_script else f"study claims {evidence}"


def _indented(text: str, spaces: int) -> list[str]:
    return wrapped(text, " " * spaces, " " * spaces)


def diff(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> dict | None:
    """List why the losses or the memory of two trainings differ: known causes first, then all other keys.

    Each side is an Accelerate yaml, a DeepSpeed json, arguments of the Hugging Face Trainer (json or yaml), or a
    record. The two sides may be of different kinds.

    Args:
        a: The first: a config file, or a folder with a record.json.
        b: The second.
        as_json: Print everything as JSON.
    """
    sides = {name: sources.read(store.newest_try(path)) for name, path in {"a": a, "b": b}.items()}
    only_a, only_b = differences.found_in_one(sides["a"], sides["b"])
    compared = differences.compare(sides["a"], sides["b"])
    problems = {name: contradictions(source) for name, source in sides.items()}
    if as_json:
        rows = {name: [_row(each) for each in getattr(compared, name)] for name in ("known", "other")}
        names = {name: getattr(compared, name) for name in ("only_a", "only_b", "equal")}
        found_in = {"found_in_a": only_a, "found_in_b": only_b}
        names |= {name: [each.sentence for each in findings] for name, findings in found_in.items()}
        return rows | names | {f"{name}_contradictions": texts for name, texts in problems.items()}
    say_wrapped(_in_short(compared, problems), "")
    for name, source in sides.items():
        say(*wrapped(f"{name.upper()}: {source.path} ({source.words})", "   "))
        say(*(line for text in problems[name] for line in wrapped(f"- {text}.", "     ", "   ")))
    for letter, findings in (("A", only_a), ("B", only_b)):
        for finding in findings:
            say("", *wrapped(f"Found in {letter} only: {finding.sentence}. What to do: {finding.remedy}.", "  "))
    say("", *_causes(compared), *_others(compared))
    return None


def _in_short(compared: Comparison, mistaken: dict[str, list[str]]) -> str:
    """Return what differs, and which side has mistakes."""
    names = ", ".join(printable(difference.name) for difference in compared.known)
    text = "No setting differs that is known to change losses or memory."
    if names:
        text = f"What changes losses or memory: {names}."
    counts = [f"{side.upper()} has {number_of(len(texts), 'mistakes')}" for side, texts in mistaken.items() if texts]
    return " ".join([text, *(f"{count} of its own." for count in counts)])


def _causes(compared: Comparison) -> list[str]:
    lines = ["What makes them differ:"] if compared.known else []
    for number, difference in enumerate(compared.known, 1):
        lines += ["", *wrapped(f"{number:>2}. {_values(difference)}", "    ")]
        for letter, setting in (("A", difference.a), ("B", difference.b)):
            if setting.value is not None and setting.origin:
                lines += _indented(f"{letter}: {setting.origin}.", 4)
        if difference.description:
            lines += _indented(f"Changes {difference.description.changes}: {difference.description.why}.", 4)
    return lines


def _others(compared: Comparison) -> list[str]:
    lines = ["", "Other keys that differ:"] if compared.other else []
    for difference in compared.other:
        lines += wrapped(_values(difference), "    ", "  ")
    for letter, names in (("A", compared.only_a), ("B", compared.only_b)):
        if names:
            lines += ["", *wrapped(f"Only in {letter}: {_listed(names)}.", "  ")]
    return [*lines, "", *wrapped(f"Equal: {_listed(compared.equal) or 'nothing'}.", "  ")]


def _values(difference: Difference) -> str:
    name = difference.name
    return f"{name}: A {shown(difference.a, name)}, B {shown(difference.b, name)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(printable(name) for name in names[:MOST]) + more


def _row(difference: Difference) -> dict:
    row: dict = {"name": difference.name}
    for letter, setting in (("a", difference.a), ("b", difference.b)):
        row[letter] = "(not shown)" if is_secret(difference.name) else setting.value
        row[f"{letter}_why"] = setting.origin
    if difference.description:
        row |= {"changes": difference.description.changes, "why": difference.description.why}
    return row
