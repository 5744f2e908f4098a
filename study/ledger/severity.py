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
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from study.errors import Stop
from study.io.numbers import count, is_number, short
from study.ledger.arguments import argument_model, as_list
from study.ledger.judging import Verdict, in_units, judge_check, plain
from study.ledger.model import Case, Claim, Reference
from study.ledger.pairing import TRAINING, in_words
from study.ledger.trial_checks import trial_of
from study.ledger.verdict import CONTRADICTS, FAILS, HOLDS, MEASURED, OWN, PREDICTED, READ, TRIED, VERDICTS, Finding
from study.machine.gpus import GPUS
from study.probes import answers
from study.records import metrics
from study.records.evidence import Evidence
from study.records.facts import facts
from study.records.runs import Run
from study.records.schema import Collective

FACTORS = (1.2, 1 / 1.2, 2, 1 / 2, 10, 1 / 10, 100, 1 / 100)  # of a number: the nearest world comes first
OTHER_INPUTS = {"gpu": list(GPUS), "model": ["gpt2", "gpt-neox-20b"], "given": [[]]}  # besides numbers
# Arguments that say what is asked, or what is compared with what. With another one it would be another claim.
ASKED = ("stage", "stages", "of", "to", "directions")
ACCEPTED = "accepted"
REJECTED = "rejected"
OPPOSITE = {ACCEPTED: REJECTED, REJECTED: ACCEPTED}  # of what a parser answers
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")  # not the 16 of fp16
LARGE = 1e6
ENDS = {"done": "oom", "oom": "done", "host_oom": "done", "unavailable": "done"}  # how a run ended, and might have
# Where records have what a check reads, if it is not a path itself.
SECTIONS = dict.fromkeys(metrics.SIZES, "memory") | dict.fromkeys(metrics.TIMES, "time")
SECTIONS |= dict.fromkeys(metrics.LOSSES, "loss") | {"joules_per_step": "energy", "saved_bytes": "observed.saved"}
SECTIONS |= {"parameters": "observed.parameters", "held_parameters": "observed.held_parameters"}
SECTIONS |= {"ran": "status", "counted": "traffic", "same_loss": "loss"}
WOULD = {word: f"this would be {word}" for word in VERDICTS} | {CONTRADICTS: "the document would contradict itself"}


@dataclass(frozen=True)
class World:
    """What a claim says and rests on, in one case; and the falsehood that is planted in it."""

    claim: Claim
    case: Case
    evidence: Evidence
    planted: str = ""

    @property
    def call(self) -> dict:
        return self.case.calls[0]

    def judge(self) -> Verdict:
        return judge_check(self.claim, self.claim, self.evidence, [self.case])

    def calling(self, planted: str, call: dict) -> "World":
        """Return a world in which the check gets other arguments."""
        return replace(self, planted=planted, case=replace(self.case, calls=[call]))

    def claiming(self, planted: str, value: object) -> "World":
        """Return a world in which the document claims another value."""
        return replace(self, planted=planted, claim=self.claim.model_copy(update={"value": value}))


def turned_by(verdict: Verdict, evidence: Evidence) -> str:
    """Return the nearest planted falsehood that turns a decided verdict, in words. Empty if there is none.

    Of what the document leaves open, a world has one case. A claim of several values holds if all hold: one falsehood
    refutes it, and it takes one for each value that failed.
    """
    if verdict.verdict not in (*HOLDS, *FAILS):
        return ""
    shown = verdict.cases.index(verdict.verdict) if verdict.verdict in verdict.cases else 0
    turned = [_turned(world) for world in _parts(World(verdict.claim, verdict.claim.cases[shown], evidence))]
    falsehoods = [words for before, words in turned if before in FAILS or verdict.verdict in HOLDS]
    enough = any(falsehoods) if verdict.verdict in HOLDS else all(falsehoods)
    return next(filter(None, falsehoods), "") if enough else ""


def _parts(world: World) -> list[World]:
    """Return a world for each value of a claim, if its check is called once for each."""
    values = world.claim.value
    if len(world.case.calls) == 1 or not isinstance(values, list):
        return [world]
    pairs = zip(values, world.case.calls, strict=True)
    return [world.claiming("", value).calling("", call) for value, call in pairs]


def _turned(world: World) -> tuple[str, str]:
    """Return a verdict, and the first falsehood with which it would be the opposite."""
    before = world.judge()
    opposite = FAILS if before.verdict in HOLDS else HOLDS
    for falsified in PLANTERS[world.claim.basis](world, before):
        try:
            after = falsified.judge()
        except (Stop, ValueError, ArithmeticError):
            continue  # no such world is possible
        if after.verdict in opposite:
            findings = _findings(world.claim, before, after)
            return before.verdict, f"If {falsified.planted}{findings}, {WOULD[after.verdict]}."
    return before.verdict, ""


def _findings(claim: Claim, before: Verdict, after: Verdict) -> str:
    """Return both findings in words, if they are other numbers."""
    if before.found == after.found or not is_number(before.found) or not is_number(after.found):
        return ""
    return f" (we would find {in_units(after.found, claim.unit)} instead of {in_units(before.found, claim.unit)})"


def _others(ours: Any, wanted: object) -> list:
    """Return other values of the same kind than ours: the wanted one, and some near and far."""
    if isinstance(ours, bool):
        return [not ours]
    if is_number(ours):
        return [*filter(is_number, [wanted]), *(scaled(ours, factor) for factor in FACTORS)]
    return [OPPOSITE[ours]] if ours in OPPOSITE else [wanted, f"other than {ours}"]


# --- formulas, and a document's own numbers ------------------------------------------------------------------------


def _of_formula(world: World, before: Verdict) -> Iterator[World]:
    """Change an input of a formula; then what the document claims, if the number is the document's."""
    inputs = _inputs(world)
    for others in itertools.zip_longest(*inputs.values()):
        for path, theirs in zip(inputs, others, strict=True):
            ours = metrics.dig(_whole(world.case), path)
            if theirs not in (None, ours):
                name = path.rpartition(".")[2].replace("_", " ")
                name = f"the number {_plain(ours)}" if name.isdigit() else name
                words = f"{name} were {_plain(theirs, name)} instead of {_plain(ours, name)}"
                falsified = world.calling(words, _with_input(world.case, path, theirs))
                yield falsified.claiming(words, _claimed(world.claim, path, theirs))
    if world.claim.basis == OWN or _is_quoted(world.claim):
        unit = world.claim.unit
        for value in _others(world.claim.value, before.found):
            words = f"the document said {in_units(value, unit)} instead of {in_units(world.claim.value, unit)}"
            yield world.claiming(words, value)


def _inputs(world: World) -> dict[str, list]:
    """Return the inputs of a formula by their paths, also in `where`, in lists and by default, with other values.

    Neither what is asked is an input, nor what differs from the check that the claim's value refers to.
    """
    whole = _whole(world.case)
    reference = world.claim.value
    compared = _whole(reference.check.written) if isinstance(reference, Reference) else {}
    inputs = {}
    for path in _paths(whole):
        ours = metrics.dig(whole, path)
        is_asked = {*ASKED} & {*path.split(".")} or (path == "over" and is_number(ours))
        if ours and not is_asked and metrics.dig(compared, path) in (None, ours):
            others = [scaled(ours, factor) for factor in FACTORS] if is_number(ours) else []
            inputs[path] = others or OTHER_INPUTS.get(path.rpartition(".")[2], [])
    return {path: others for path, others in inputs.items() if others}


def _paths(whole: dict) -> Iterator[str]:
    """Yield the path of each argument, and of what is in its table or list."""
    for name, value in whole.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)
        elif isinstance(value, list):
            yield from (f"{name}.{place}" for place in range(len(value)))


def _whole(case: Case) -> dict:
    """Return the arguments of a case's only call, with the defaults."""
    fields = argument_model(case.function).model_fields
    return {name: field.default for name, field in fields.items() if not field.is_required()} | case.calls[0]


def _with_input(case: Case, path: str, value: object) -> dict:
    """Return the arguments of a case's only call with another input."""
    name = path.partition(".")[0]
    return case.calls[0] | {name: metrics.changed(_whole(case), path, lambda _: value)[name]}


def _claimed(claim: Claim, path: str, value: object) -> object:
    """Return what is claimed if the check that the value refers to has the same input."""
    if not isinstance(claim.value, Reference):
        return claim.value
    written = claim.value.check.written
    if claim.value.check.basis == MEASURED or metrics.dig(_whole(written), path) is None:
        return claim.value
    finding = written.function(**_with_input(written, path, value)).value
    return finding / claim.factor if is_number(finding) else finding


def _is_quoted(claim: Claim) -> bool:
    """Return whether a number of the claim stands in its quote, in any unit: 7.5 for 7.5e9, 40 (%) for 1.4.

    Not 0 and 1 as limits: "more than" and "saves" have them in every document.
    """
    quoted = {_digits(float(number)) for number in NUMBER.findall((claim.quote or "").replace(",", ""))}
    numbers = filter(is_number, as_list(claim.value))
    own = [each for each in numbers if claim.relation == "equal" or each not in (0, 1)]
    return any({_digits(each), _digits(abs(each - 1))} & quoted for each in own)


def _digits(value: float) -> str:
    return f"{value:.3e}".partition("e")[0]


def _plain(value: object, name: str = "") -> str:
    return count(value) if is_number(value) and abs(value) >= LARGE and "bytes" not in name else plain(value, name)


# --- sources, publications, libraries ------------------------------------------------------------------------------


def _of_finding(world: World, before: Verdict) -> Iterator[World]:
    """Replace what a source says, what others measured, or what a library answers.

    A parser that was never seen to answer otherwise cannot.
    """
    claim = world.claim
    call = world.call
    ours = before.found
    who = "the answer were"
    if claim.check == "cited":
        ours = call["value"] if call.get("agrees") is None else call["agrees"]
        who = f"{' and '.join(as_list(call['source']))} said"
    if claim.check == "published":
        ours = world.case.function(**call).value
        who = "the ratio of published speeds were"
    trial = trial_of(inspect.unwrap(world.case.function), call) if claim.basis == TRIED else {}
    if ours in (ACCEPTED, REJECTED) and trial and not _seen_otherwise(trial, before):
        return
    for theirs in _others(ours, claim.value):
        words = f"{who} {short(theirs)} instead of {short(ours)}"
        if isinstance(ours, bool) and claim.check == "cited":
            words = f"{who} the opposite of “{call['sentence']}”"
        yield replace(world, planted=words, case=replace(world.case, function=_finding(world.case.function, theirs)))


def _finding(function: Callable[..., Finding], value: object) -> Callable[..., Finding]:
    """Return a check that finds another value. The interval of a number is moved with it."""

    def falsified(**given: Any) -> Finding:
        finding = function(**given)
        factor = value / finding.value if finding.interval and is_number(value) and is_number(finding.value) else 1
        return replace(finding, value=value, interval=scaled(finding.interval, factor))

    return falsified


def _seen_otherwise(trial: dict, before: Verdict) -> bool:
    """Return whether the parser answered another trial otherwise: for what holds, one that has the same keys."""
    question = trial["what"], trial.get("look")
    alike = [each for each in answers.kept_answers() if (each.trial.get("what"), each.trial.get("look")) == question]
    others = [each.trial for each in alike if each.found != before.found]
    if before.found == REJECTED or before.verdict in FAILS:
        return bool(others)
    return any(_leaves(trial) <= _leaves(each) for each in others)


def _leaves(content: dict) -> set[str]:
    """Return the keys of a config at any depth that hold no table."""
    tables = [value for value in content.values() if isinstance(value, dict)]
    return {key for key, value in content.items() if value not in tables}.union(*map(_leaves, tables))


# --- records -------------------------------------------------------------------------------------------------------


def _of_records(world: World, before: Verdict) -> Iterator[World]:
    """Change what the runs of one side recorded: numbers by factors, texts, and how runs ended."""
    claimed = world.claim.value
    path = _recorded_at(world)
    chosen = world.call.get("of") or world.call.get("where") or {}
    sides = [{"arm": arm} for arm in world.call.get("arms") or ()] or [chosen]
    exact = [claimed / before.found] if is_number(claimed) and is_number(before.found) and before.found else []
    for factor, side in itertools.product([*exact, *FACTORS, 0], sides):
        change = functools.partial(another, factor=factor, wanted=claimed)
        recorded = f"recorded another {path}" if isinstance(claimed, str) else f"recorded {factor:.3g} times the {path}"
        words = f"the runs with {in_words(side)} had {'ended otherwise' if world.claim.check == 'ran' else recorded}"
        yield _with_records(world, before, words, side, path, change)
    if kinds := [kind for kind in as_list(world.call.get("collective", "all")) if kind != "all"]:
        side = world.call["where"]
        words = f"all collectives in the runs with {in_words(side)} had been {kinds[0]}"
        yield _with_records(world, before, words, side, "traffic.per_rank", functools.partial(renamed, kind=kinds[0]))


def _with_records(
    world: World, before: Verdict, words: str, side: dict, path: str, change: Callable[[Any], Any]
) -> World:
    """Return a world in which the runs of a side recorded something else. What is left open chooses no runs."""
    wanted = {name: as_list(value) for name, value in side.items() if name not in {*world.case.values, TRAINING}}

    def falsified(run: Run) -> Run:
        is_of_side = all(facts(run).get(name) in values for name, values in wanted.items())
        if run.name not in before.evidence or not is_of_side:
            return run
        return replace(run, record=metrics.changed(run.record, path, change))

    runs = tuple(map(falsified, world.evidence.runs))
    return replace(world, planted=words, evidence=replace(world.evidence, runs=runs))


def _recorded_at(world: World) -> str:
    """Return where the records have what a check reads."""
    name = str(world.call.get("quantity") or world.call.get("field") or world.claim.check)
    training = (world.call.get("of") or {}).get(TRAINING)
    if training is not None:
        return f"observed.runs.{training}"
    return "memory" if name.startswith(metrics.COMPONENT) else SECTIONS.get(name, name)


# --- other values -------------------------------------------------------------------------------------------------


def scaled(value: Any, factor: float) -> Any:
    """Return so many times a number, or both ends of a range. Whole numbers stay whole, and above 0."""
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    if not is_number(value):
        return value
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value * factor


def another(value: Any, factor: float, wanted: object) -> Any:
    """Return another value of a record: a text that is wanted, 1 instead of 0, a multiple; of each value below it."""
    further = functools.partial(another, factor=factor, wanted=wanted)
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


def renamed(per_rank: list[dict[str, Collective]], kind: str) -> list[dict[str, Collective]]:
    """Return the collectives of each rank as if all had been of one kind."""
    return [{kind: max(counts.values(), key=lambda each: each.bytes)} for counts in per_rank if counts]


PLANTERS: dict[str, Callable[[World, Verdict], Iterator[World]]] = {
    **dict.fromkeys((PREDICTED, OWN), _of_formula),
    **dict.fromkeys((READ, TRIED), _of_finding),
    MEASURED: _of_records,
}
