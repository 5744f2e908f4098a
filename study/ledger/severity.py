"""Plants falsehoods: a verdict is evidence only if there is a plausible world in which its check decides otherwise.

Each kind of evidence is falsified in its own way: the inputs of a formula, a document's own numbers, the answer of a
library, what a source says, the records of runs. Then the claim is judged again. This is the severe testing of Mayo
(Statistical Inference as Severe Testing, 2018). A verdict that no falsehood turns is so by construction.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from study.errors import Stop
from study.io.numbers import count, short
from study.ledger import probes
from study.ledger.arguments import argument_model, as_list, is_number
from study.ledger.evidence import Evidence, facts
from study.ledger.judging import Verdict, in_units, judge_check, plain
from study.ledger.model import Case, Claim, Reference
from study.ledger.pairing import TRAINING, in_words
from study.ledger.verdict import CONTRADICTS, FAILS, HOLDS, MEASURED, OWN, READ, TRIED, VERDICTS, Finding
from study.machine.gpus import GPUS
from study.records import metrics
from study.records.runs import Run
from study.records.schema import Collective

FACTORS = (1.2, 1 / 1.2, 2, 1 / 2, 10, 1 / 10, 100, 1 / 100)  # of a number: the nearest world comes first
# Arguments that say what is asked, or what is compared with what. With another one it would be another claim.
ASKED = ("stage", "stages", "along", "of", "to", "directions")
ACCEPTED, REJECTED = "accepted", "rejected"  # what a parser answers
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")  # not the 16 of fp16
ENDS = {"done": "oom", "oom": "done", "host_oom": "done", "unavailable": "done"}  # how a run ended, and might have
MODELS = ("gpt2", "gpt-neox-20b")  # a small and a large one
LARGE = 1e6
WOULD = {word: f"this would be {word}" for word in VERDICTS} | {CONTRADICTS: "the document would contradict itself"}
Path = tuple[str | int, ...]  # of a value in arguments or in a record


class Planted(NamedTuple):
    """A falsehood in words, and the world in which it holds."""

    words: str
    claim: Claim
    cases: list[Case]
    evidence: Evidence


def turned_by(verdict: Verdict, evidence: Evidence) -> str:
    """Return the nearest planted falsehood that turns a decided verdict, in words. Empty if there is none.

    Of what the document leaves open, a world has one case. A claim of several values holds if all hold: one falsehood
    refutes it, and it takes one for each value that failed.
    """
    if verdict.verdict not in (*HOLDS, *FAILS):
        return ""
    claim = verdict.claim
    shown = verdict.cases.index(verdict.verdict) if verdict.verdict in verdict.cases else 0
    turned = [_turned(part, [case], evidence) for part, case in _parts(claim, claim.cases[shown])]
    found = [words for before, words in turned if before in FAILS or verdict.verdict in HOLDS]
    enough = any(found) if verdict.verdict in HOLDS else all(found)
    return next(filter(None, found), "") if enough else ""


def _parts(claim: Claim, case: Case) -> list[tuple[Claim, Case]]:
    """Return a claim of several values as several claims, if its check is called once for each."""
    if len(case.calls) == 1 or not isinstance(claim.value, list):
        return [(claim, case)]
    pairs = zip(claim.value, case.calls, strict=True)
    return [(claim.model_copy(update={"value": value}), replace(case, calls=[call])) for value, call in pairs]


def _turned(claim: Claim, cases: list[Case], evidence: Evidence) -> tuple[str, str]:
    """Return a verdict, and the first falsehood with which it would be the opposite."""
    before = judge_check(claim, claim, evidence, cases)
    opposite = FAILS if before.verdict in HOLDS else HOLDS
    for planted in _falsehoods(claim, cases, before, evidence):
        try:
            after = judge_check(planted.claim, planted.claim, planted.evidence, planted.cases)
        except (Stop, ValueError, ArithmeticError):
            continue  # no such world is possible
        if after.verdict in opposite:
            return before.verdict, f"If {planted.words}{_findings(claim, before, after)}, {WOULD[after.verdict]}."
    return before.verdict, ""


def _findings(claim: Claim, before: Verdict, after: Verdict) -> str:
    """Return both findings in words, if they are other numbers."""
    if before.found == after.found or not is_number(before.found) or not is_number(after.found):
        return ""
    ours, theirs = (in_units(each.found, claim.unit) for each in (before, after))
    return f" (we would find {theirs} instead of {ours})"


def _falsehoods(claim: Claim, cases: list[Case], before: Verdict, evidence: Evidence) -> Iterator[Planted]:
    """Return the falsehoods that can be planted in what a claim rests on."""
    if claim.basis == MEASURED:
        for words, falsified in _of_records(claim, cases[0], before, evidence):
            yield Planted(words, claim, cases, falsified)
    elif claim.basis == TRIED:
        for words, value in _of_answers(claim, cases[0], before):
            answered = [replace(case, function=_answering(case.function, value)) for case in cases]
            yield Planted(words, claim, answered, evidence)
    elif claim.check == "published":
        for factor in FACTORS:
            faster = [replace(case, function=_times(case.function, factor)) for case in cases]
            yield Planted(f"the speeds of the first side were {factor:.3g} times as large", claim, faster, evidence)
    else:
        plant = _of_source if claim.basis == READ else _of_inputs
        for words, changed, changed_cases in plant(claim, cases):
            yield Planted(words, changed, changed_cases, evidence)
        if claim.basis == OWN or _is_quoted(claim):
            for value in _others(claim.value, before.found):
                said = (in_units(each, claim.unit) for each in (value, claim.value))
                words = "the document said {} instead of {}".format(*said)
                yield Planted(words, claim.model_copy(update={"value": value}), cases, evidence)


def _others(ours: Any, wanted: object) -> list:
    """Return other values of the same kind than ours: the wanted one, and some near and far."""
    if isinstance(ours, bool):
        return [not ours]
    if is_number(ours) or isinstance(ours, tuple):
        return [*filter(is_number, [wanted]), *(scaled(ours, factor) for factor in FACTORS)]
    known = {ACCEPTED: REJECTED, REJECTED: ACCEPTED}
    return [known[ours]] if ours in known else [wanted, f"other than {ours}"]


def scaled(value: Any, factor: float) -> Any:
    """Return so many times a number, or each of several. Whole numbers stay whole, and above 0."""
    if isinstance(value, (list, tuple)):
        return type(value)(scaled(each, factor) for each in value)
    if not is_number(value):
        return value
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value * factor


# --- formulas, and a document's own numbers ------------------------------------------------------------------------


def _of_inputs(claim: Claim, cases: list[Case]) -> Iterator[tuple[str, Claim, list[Case]]]:
    """Change an input of a formula, everywhere where it is the same."""
    inputs = _inputs(claim, cases[0])
    for number in range(max(map(len, inputs.values()), default=0)):
        for path, others in inputs.items():
            change = others[min(number, len(others) - 1)]
            worlds = [replace(case, calls=[_with_input(case, path, change)]) for case in cases]
            ours, theirs = (_at(_whole(case), path) for case in (cases[0], worlds[0]))
            if ours != theirs:
                name = str(path[-1]).replace("_", " ") if isinstance(path[-1], str) else f"the number {_plain(ours)}"
                words = f"{name} were {_plain(theirs, name)} instead of {_plain(ours, name)}"
                yield words, _with_reference(claim, path, change), worlds


def _inputs(claim: Claim, case: Case) -> dict[Path, list[Callable[[Any], Any]]]:
    """Return where the inputs of a formula are, also in `where`, in lists and by default, with other worlds of each.

    Neither what is asked is an input, nor what differs from the check that the claim's value refers to.
    """
    whole = _whole(case)
    compared = _whole(claim.value.check.written) if isinstance(claim.value, Reference) else {}
    inputs: dict[Path, list[Callable[[Any], Any]]] = {}
    for name, value in whole.items():
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for path in [(name,), *((name, key) for key, _ in pairs)]:
            others = [] if {*ASKED} & {*path} else _worlds(str(path[-1]), _at(whole, path))
            if others and _at(compared, path) in (None, _at(whole, path)):
                inputs[path] = others
    return inputs


def _worlds(name: str, value: object) -> list[Callable[[Any], Any]]:
    """Return changes of an input: of a number, of what a document gives, of a GPU or a model."""
    if is_number(value) and value:
        return [functools.partial(scaled, factor=factor) for factor in FACTORS]
    others = {"gpu": list(GPUS), "model": MODELS, "given": [[]]}.get(name, []) if value else []
    return [functools.partial(_instead, other) for other in others]


def _instead(other: object, _: object) -> object:
    return other


def _whole(case: Case) -> dict:
    """Return the arguments of a case's only call, with the defaults."""
    fields = argument_model(case.function).model_fields
    return {name: field.default for name, field in fields.items() if not field.is_required()} | case.calls[0]


def _at(arguments: dict, path: Path) -> Any:
    value: Any = arguments
    for key in path:
        known = (isinstance(value, dict) and key in value) or (isinstance(value, list) and isinstance(key, int))
        value = value[key] if known else None
    return value


def _with_input(case: Case, path: Path, change: Callable[[Any], Any]) -> dict:
    """Return the arguments of a case's only call with another input."""
    if len(path) == 1:
        return case.calls[0] | {path[0]: change(_whole(case).get(path[0]))}
    return case.calls[0] | {path[0]: _changed(_whole(case).get(path[0]), path[1:], change)}


def _with_reference(claim: Claim, path: Path, change: Callable[[Any], Any]) -> Claim:
    """Return a claim in which the check that its value refers to has the same input."""
    if not isinstance(claim.value, Reference):
        return claim
    check = claim.value.check
    written = check.written
    if check.basis == MEASURED or _at(_whole(written), path) is None:
        return claim
    value = written.function(**_with_input(written, path, change)).value
    return claim.model_copy(update={"value": value / claim.factor if is_number(value) else value})


def _is_quoted(claim: Claim) -> bool:
    """Return whether a number of the claim stands in its quote, in any unit: 7.5 for 7.5e9.

    Not 0 and 1 as limits: "more than" and "saves" have them in every document.
    """
    quoted = {_digits(float(number)) for number in NUMBER.findall((claim.quote or "").replace(",", ""))}
    values = [each for value in as_list(claim.value) for each in (value if isinstance(value, tuple) else (value,))]
    own = [each for each in values if is_number(each) and (claim.relation == "equal" or each not in (0, 1))]
    return any(_digits(each) in quoted for each in own)


def _digits(value: float) -> str:
    return f"{value:.3e}".partition("e")[0]


def _plain(value: object, name: str = "") -> str:
    return count(value) if is_number(value) and abs(value) >= LARGE and "bytes" not in name else plain(value, name)


# --- sources -------------------------------------------------------------------------------------------------------


def _of_source(claim: Claim, cases: list[Case]) -> Iterator[tuple[str, Claim, list[Case]]]:
    """Replace what a source says."""
    call = cases[0].calls[0]
    name = "value" if call.get("agrees") is None else "agrees"
    ours = call[name]
    for theirs in _others(ours, claim.value):
        said = f"the opposite of “{call['sentence']}”"
        if not isinstance(ours, bool):
            said = f"{short(theirs)} instead of {short(ours)}"
        falsified = [replace(case, calls=[case.calls[0] | {name: theirs}]) for case in cases]
        yield f"{' and '.join(as_list(call['source']))} said {said}", claim, falsified


def _times(function: Callable[..., Finding], factor: float) -> Callable[..., Finding]:
    def falsified(**given: Any) -> Finding:
        found = function(**given)
        return replace(found, value=scaled(found.value, factor), interval=scaled(found.interval, factor))

    return falsified


# --- libraries -----------------------------------------------------------------------------------------------------


def _of_answers(claim: Claim, case: Case, before: Verdict) -> Iterator[tuple[str, object]]:
    """Alter what a library answers. A parser that was never seen to answer otherwise cannot."""
    trial = probes.trial_of(inspect.unwrap(case.function), case.calls[0])
    if before.found in (ACCEPTED, REJECTED) and not _seen_otherwise(trial, before):
        return
    for value in _others(before.found, claim.value):
        yield f"the answer were {short(value)} instead of {short(before.found)}", value


def _answering(function: Callable[..., Finding], value: object) -> Callable[..., Finding]:
    return lambda **given: replace(function(**given), value=value)


def _seen_otherwise(trial: dict, before: Verdict) -> bool:
    """Return whether the parser answered another trial otherwise: for what holds, one that has the same keys."""
    others = [each.trial for each in probes.kept_answers() if each.found != before.found and _asks(each.trial, trial)]
    if before.found == REJECTED or before.verdict in FAILS:
        return bool(others)
    return any(_leaves(trial) <= _leaves(each) for each in others)


def _asks(trial: dict, other: dict) -> bool:
    return all(trial.get(name) == other.get(name) for name in ("what", "look"))


def _leaves(content: object) -> set[str]:
    """Return the keys of a config at any depth that hold no table."""
    pairs = content.items() if isinstance(content, dict) else ()
    return {key for key, value in pairs if not isinstance(value, dict)}.union(*(_leaves(value) for _, value in pairs))


# --- records -------------------------------------------------------------------------------------------------------


def _of_records(claim: Claim, case: Case, before: Verdict, evidence: Evidence) -> Iterator[tuple[str, Evidence]]:
    """Change what the runs of one side recorded: numbers by factors, texts, and how runs ended."""
    call = case.calls[0]
    path = _recorded_at(claim.check, call)
    resting = [run for run in evidence.runs if run.name in before.evidence]
    exact = [claim.value / before.found] if is_number(claim.value) and is_number(before.found) and before.found else []
    for factor, side in itertools.product([*exact, *FACTORS, 0], _sides(call)):
        change = functools.partial(_another, factor=factor, wanted=claim.value)
        numbers = "" if claim.check == "ran" else f", its numbers {factor:.3g} times as large"
        words = f"{'.'.join(map(str, path))} in the runs with {in_words(side)} were another{numbers}"
        yield words, _with_records(evidence, _chosen(resting, side, case), path, change)
    if kinds := [kind for kind in as_list(call.get("collective", "all")) if kind != "all"]:
        words = f"all collectives in the runs with {in_words(call['where'])} had been {kinds[0]}"
        change = functools.partial(_renamed, kind=kinds[0])
        yield words, _with_records(evidence, _chosen(resting, call["where"], case), ("traffic", "per_rank"), change)


def _chosen(runs: list[Run], side: dict, case: Case) -> list[Run]:
    """Return the runs of a side. What the document leaves open chooses none."""
    wanted = {name: as_list(value) for name, value in side.items() if name not in {*case.values, TRAINING}}
    return [run for run in runs if all(facts(run).get(name) in values for name, values in wanted.items())]


def _with_records(evidence: Evidence, runs: list[Run], path: Path, change: Callable[[Any], Any]) -> Evidence:
    """Return evidence in which these runs recorded something else at a path."""
    falsified = {run: replace(run, record=_changed(run.record, path, change)) for run in runs}
    return replace(evidence, runs=tuple(falsified.get(run, run) for run in evidence.runs))


def _renamed(per_rank: list[dict[str, Collective]], kind: str) -> list[dict[str, Collective]]:
    return [{kind: max(counts.values(), key=lambda each: each.bytes)} for counts in per_rank if counts]


def _sides(call: dict) -> list[dict]:
    """Return what chooses the runs of each side that may be falsified."""
    if call.get("arms"):
        return [{"arm": arm} for arm in call["arms"]]
    if "along" in call:
        return [{name: value} for name, values in call["along"].items() for value in values]
    return [call.get("of") or call.get("where") or {}]


def _recorded_at(check: str, call: dict) -> Path:
    """Return where the records have what a check reads."""
    name = str(call.get("quantity") or call.get("field") or check)
    training = (call.get("of") or {}).get(TRAINING)
    if training is not None:
        return "observed", "runs", training
    kept = {"ran": "status", "counted": "traffic", "same_loss": "loss", "joules_per_step": "energy"}
    kept |= {"parameters": "observed.parameters", "held_parameters": "observed.held_parameters"}
    kept |= {"saved_bytes": "observed.saved"}
    tables = {"time": metrics.TIMES, "loss": metrics.LOSSES, "memory": metrics.SIZES}
    section = next((section for section, table in tables.items() if name in table), None)
    path = kept.get(name) or section or ("memory" if name.startswith(metrics.COMPONENT) else name)
    return tuple(int(part) if part.lstrip("-").isdigit() else part for part in path.split("."))


def _another(value: Any, factor: float, wanted: object) -> Any:
    """Return another value of a record: a text that is wanted, 1 instead of 0, a multiple; of each value below it."""
    further = functools.partial(_another, factor=factor, wanted=wanted)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: further(each) for name, each in value})
    if isinstance(value, dict):
        return {name: further(each) for name, each in value.items()}
    if isinstance(value, list):
        return [further(each) for each in value]
    if isinstance(value, str):
        return wanted if isinstance(wanted, str) and wanted != value else ENDS.get(value, f"not {value}")
    if isinstance(value, bool):
        return not value
    return int(factor > 1) if is_number(value) and not (value and factor) else scaled(value, factor)


def _changed(content: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """Return a copy in which the value at a path is changed."""
    if not path:
        return change(content)
    if isinstance(content, BaseModel):
        name = str(path[0])
        return content.model_copy(update={name: _changed(getattr(content, name), path[1:], change)})
    if isinstance(content, list):
        chosen = int(path[0]) % max(len(content), 1)  # -1 is the last one; there may be none
        return [_changed(each, path[1:], change) if place == chosen else each for place, each in enumerate(content)]
    if isinstance(content, dict):
        return content | {path[0]: _changed(content.get(path[0]), path[1:], change)}
    return content
