"""A verdict in words: the first sentence, and the lines below it. Nothing is decided here."""

import ast
import math
import re
import textwrap
from collections.abc import Mapping

from study.io.numbers import count, is_number, number_of, quantity, short
from study.io.words import joined
from study.ledger import committed
from study.ledger.arguments import as_list
from study.ledger.certainty import certainty
from study.ledger.citations import sources
from study.ledger.judging import Verdict, in_units, plain
from study.ledger.ledger import otherwise
from study.ledger.model import Check, Claim
from study.ledger.verdict import (
    CONTRADICTS,
    FAILS,
    INCONCLUSIVE,
    MEASURED,
    NO_BASIS,
    NOT_TESTED,
    OWN,
    PREDICTED,
    READ,
    TRIED,
    UNDERSTATED,
    VIRTUAL,
)

WIDTH = 100  # columns of a line
LABEL = 12  # columns of its label
VERBATIM = ("claim", "where", "quote", "check", "evidence", "elsewhere", "sentence", "nearest", "reading")
LARGE = 1e6  # numbers from here on are written in GB, or in millions
TINY = 0.0001
MOST_NAMED = 2  # sources in the first sentence; the lines below name all
MOST = 4  # runs, differences and cases that are shown; --json has all
RELATIONS = {"equal": "", "at_least": "at least ", "at_most": "at most ", "above": "more than ", "below": "less than "}
RELATIONS |= {"up_to": "up to "}
# Argument names that mean nothing to a reader who has not seen the code.
INTERNAL = ("over", "of", "to", "where", "times", "plus", "value", "saved", "part", "quantity", "unit", "change")
WHAT_A_BASIS_IS = {
    MEASURED: "real ranks that really trained",
    VIRTUAL: "one rank alone, or weights without values; the engine is real",
    TRIED: "the libraries themselves were asked",
    PREDICTED: "a formula; nothing was run",
    OWN: "the document against itself, which says nothing about the world",
    READ: "a source says so; nothing was run",
    NO_BASIS: "not tested here",
}
BRIEFLY = {TRIED: "tried with the libraries"}
# The arguments of checks and the quantities of records as a reader calls them. Others are words already.
NAMES = {
    "micro_batch": "rows a pass",
    "accumulation": "passes a step",
    "weights_too": "what is offloaded",
    "bytes_per_s": "speed of the link",
    "disk_bytes_per_s": "speed of the disk",
    "memory_bytes": "memory of the GPU",
    "host_memory_bytes": "memory of the host",
    "rest_bytes": "bytes besides the states",
    "protocol_part": "part",
    "peak_bytes": "peak",
    "states_bytes": "model states",
    "step_s": "seconds a step",
    "step_ratio": "ratio of steps",
    "peak_saving": "share of the peak saved",
    "train_loss": "training loss",
    "joules_per_step": "joules a step",
    "samples_per_s": "rows a second",
    "tokens_per_s": "tokens a second",
    "training_s": "seconds of a training",
    "tokens_per_sample": "tokens a row",
    "tracked_peak_bytes": "peak of the tensors",
    "peak_allocated_bytes": "peak of the allocator",
    "weights_gradients": "weights and gradients",
    "lora_rank": "rank of LoRA",
}
READING = "how it is read"
# Of the dotted path of a field in a record: what says nothing to a reader, and what the others are called.
STRUCTURE = ("memory", "components", "per_rank", "observed", "checkpoints", "traffic")
PLACES = {"after_step": "after a step", "at_peak": "at the peak", "component": "at the peak", "saved": "saved"}
PLACES |= {"runs": "of training", "dtypes": "by their dtype"}
PATH = re.compile(r"\b(?:component|memory|observed|checkpoints|traffic)(?:\.(?:\w+|-1))+")
NAME = re.compile(rf"(?<![\w./])(?:{'|'.join(NAMES)})(?![\w./])")
ANSWER = re.compile(r"(?<!\w)\{'[^{}]*\}|(?<!\w)\['?[\w.-][^][]*\]")  # tables and lists, as Python writes them
# Of what is decided by construction: our check says nothing about the claim.
CANNOT_FAIL = "open (check cannot fail)"
NOT_COUNTED = " (not counted: our check cannot fail)"

OF_SOMETHING = re.compile(r"times (the|what|[A-Z]|stage|data|a) ?")  # a unit

# --- the sentence --------------------------------------------------------------------------------------------------


def plainly(verdict: Verdict) -> str:
    """Return the first sentence: what the document says, what we found, and what that rests on."""
    claim = verdict.claim
    opening = f"{who(claim)} {'may imply' if claim.premise else 'says'}"
    if claim.premise and claim.quote is None:
        opening = "One may expect"
    word = f"{'is ' * (verdict.verdict != CONTRADICTS)}{verdict.verdict}{NOT_COUNTED * verdict.is_by_construction}"
    outcome = f"it {word}" if verdict.verdict == NOT_TESTED else f"{_outcome(verdict)}, so it {word}"
    return f"{opening} “{claim.says}”; {outcome} ({_rests_on(verdict)})."


def summary(verdict: Verdict) -> dict[str, str]:
    """Return a verdict as a row of a table: what is claimed and found, and how certain that is."""
    level = certainty(verdict)
    decided = CANNOT_FAIL if verdict.is_by_construction else verdict.verdict
    values = verdict.found if isinstance(verdict.found, list) else [verdict.found]
    answers = {short(value) for value in values if isinstance(value, bool)}
    finding = ", ".join(sorted(answers)) or found_words(verdict, verdict.claim.unit)
    return {
        "claimed": verdict.claim.says,
        "found": finding if level else "",
        "found / claimed": ratio_words(verdict) if level else "",
        "finding": verdict.open_because or decided,
        "certainty": level.level if level else "",
        "rests on": verdict.rests_on or "",
    }


def ratio_words(verdict: Verdict) -> str:
    """Return the finding divided by the claimed value; empty for a limit, and for all but two numbers above 0."""
    value = verdict.found
    claimed = verdict.claimed
    if verdict.claim.relation not in ("equal", "up_to") or not (is_number(value) and is_number(claimed)):
        return ""
    return short(value / claimed) if claimed > 0 and 0 < value < math.inf else ""


def who(claim: Claim) -> str:
    """Return the name by which a reader knows the document."""
    if claim.document.isdigit():
        return f"Document {claim.document}"
    if claim.document[1:].isdigit():
        return f"The paper {claim.title.partition(':')[0]}"
    place = " ".join(claim.where.split()).partition(";")[0]
    owner, _, page = place.partition(", ")
    page = re.sub(r"( of \d+ \w+ \d{4})?( \(.*)?$", "", page.partition(", ")[0])  # neither the commit nor the day
    return f"{owner} ({page})" if page else owner


def _outcome(verdict: Verdict) -> str:
    """Return what we found, and instead of which value; or why nothing decides the claim."""
    claim = verdict.claim
    ours = value_words(verdict.found, claim.unit)
    if verdict.verdict == INCONCLUSIVE:
        return _undecided(verdict)
    if verdict.verdict not in (*FAILS, UNDERSTATED):
        return f"we find {ours or 'the same'}"
    words = f"we find {ours or 'otherwise'}"
    if ours and not isinstance(verdict.claimed, str):  # the claim's own words have a text
        words += f" instead of {claimed_words(claim, verdict).removesuffix(f' {claim.unit}')}"
    return f"{words}, which is better" if verdict.verdict == UNDERSTATED else words


def _undecided(verdict: Verdict) -> str:
    """Return why nothing decides a claim."""
    if verdict.claim.check == "searched":
        return "no source that we read says so"
    if verdict.holds_under and verdict.fails_under:
        decisive = " ".join((*verdict.holds_under, *verdict.fails_under)).split()  # the other names change nothing
        names = [name for name in verdict.claim.unsaid if name in decisive and name not in INTERNAL]
        words = [NAMES.get(name, name.replace("_", " ")) for name in names]
        return f"it leaves open: {joined(words) or READING}"
    if verdict.holds_under or verdict.fails_under:
        return f"it {'holds' if verdict.holds_under else 'fails'} in some cases, others are undecided"
    return "nothing that we have decides it" if verdict.found is None else "what we find does not decide it"


def _rests_on(verdict: Verdict) -> str:
    """Return the basis in words. For a claim that was not tested: what would test it."""
    names = verdict.evidence
    settle = verdict.claim.settle
    if verdict.verdict == NOT_TESTED:
        return f"it takes {settle.machine}" if settle else "what would settle it is below"
    if verdict.basis in (MEASURED, VIRTUAL) and names:
        on_cpu = any(words.startswith("device CPU instead") for words in verdict.differs)
        unreal = "{} virtual {}" if len(names) == 1 else "{} {}, not all real"
        real = "{} real {}" if verdict.basis == MEASURED else unreal
        runs = f"{'CPU ' * on_cpu}run{'s' * (len(names) > 1)}"
        verb = "measured" if verdict.basis == MEASURED else "counted"
        return f"{verb} in {real.format(len(names), runs)}"
    if verdict.basis == READ and names:
        titles = list(dict.fromkeys(map(source_title, names)))
        return f"read in {joined(titles) if len(titles) <= MOST_NAMED else number_of(len(titles), 'sources')}"
    return BRIEFLY.get(verdict.basis, verdict.basis)


def source_title(name: str) -> str:
    """Return the name by which a reader knows a source: the ZeRO paper, not P1."""
    known = sources()
    if name not in known:
        return name
    title = re.split(r"[:,(]", known[name].title)[0].strip()
    return f"the {title} paper" if re.fullmatch(r"P\d+", name) else title


# --- values --------------------------------------------------------------------------------------------------------


def value_words(value, unit: str) -> str:
    """Return what a check found, in human units. Empty for yes and no."""
    if any(each is None or isinstance(each, bool) for each in as_list(value)):
        return ""
    values = [f"“{each}”" if isinstance(each, str) else each for each in as_list(value)]
    if len(set(map(short, values))) == 1:
        return with_unit(values[0], unit)
    more = f" and {len(values) - MOST} more" if len(values) > MOST else ""
    return with_unit(values[:MOST], unit) + more


def claimed_words(claim: Check, verdict: Verdict) -> str:
    """Return what the document says, in human units. Empty for yes and no."""
    words = value_words(verdict.claimed, claim.unit)
    if claim.relation != "equal" and OF_SOMETHING.match(claim.unit):  # more than the share, not 1.0 times the share
        words = words.removeprefix("1.0 times ")
    return words and RELATIONS[claim.relation] + words


def with_unit(value, unit: str) -> str:
    """Return a value with its unit, as people write it: 42.7 GB, 31 % of the peak saved, 500 million elements."""
    values = as_list(value)
    if not all(is_number(each) and math.isfinite(each) for each in values):
        return in_units(value, unit)
    most = max(map(abs, values))
    if 0 < most < TINY:
        return f"less than {TINY} {unit}".rstrip()
    if unit.startswith("share saved") or re.match(r"of\b(?! \d)", unit):
        return f"{short([100 * float(each) for each in values])} % {unit.removeprefix('share ')}"
    name, _, rest = unit.replace("bytes per second", "bytes/s").partition(" ")
    if most >= LARGE and name in ("bytes", "bytes/s"):
        return f"{', '.join(quantity(each, name) for each in values)} {rest}".rstrip()
    return f"{', '.join(map(count, values))} {unit}" if most >= LARGE else in_units(value, unit)


def readable(text: str) -> str:
    """Return a text with a reader's words for the names, tables and lists of our code."""
    text = PATH.sub(lambda path: _recorded(path[0].split(".")), text)
    text = NAME.sub(lambda name: NAMES[name[0]], text)
    return ANSWER.sub(lambda answer: _listed(answer[0]), text)


def _recorded(parts: list[str]) -> str:
    """Return the dotted path of a field in words: moments after a step, losses of training 1."""
    *places, name = [part for part in parts if part not in STRUCTURE and part not in ("0", "-1")]
    if name.isdigit():  # the path ends at an entry of a list, not at one of its fields
        places, name = [*places, name], "values"
    words = [PLACES.get(place, place if place.isdigit() else f"of {place}") for place in places]
    return " ".join([NAMES.get(name, name.replace("_", " ")), *words])


def _listed(answer: str) -> str:
    """Return a table or a list without the marks of Python: stage 1: 3, 3; stage 2: 3, 3."""
    try:
        values = ast.literal_eval(answer)
    except (ValueError, SyntaxError):
        return answer
    if isinstance(values, dict):
        return "; ".join(f"{name}: {short(value)}" for name, value in values.items())
    return short(values)


# --- a claim in full --------------------------------------------------------------------------------------------


def lines(verdict: Verdict) -> list[str]:
    """Return a claim in full: sentence, quote, numbers, conditions, evidence, and what would change the verdict."""
    claim = verdict.claim
    words = [*textwrap.wrap(plainly(verdict), WIDTH, break_on_hyphens=False), ""]
    words += _labelled(_about(verdict))
    for other, check in zip(verdict.also, claim.also, strict=True):
        against = f" of {claimed_words(check, other)}" if value_words(other.found, check.unit) else ""
        also = f"the value{against}, by {check.check.replace('_', ' ')}: {other.verdict} ({other.basis})"
        texts = {"also": also, "found": found_words(other, check.unit), "working": other.working}
        words += ["", *_labelled(texts | {"evidence": _evidence(other)})]
    return words


def _about(verdict: Verdict) -> dict[str, str | None]:
    """Return the labelled texts about a claim. None or an empty text is not shown."""
    claim = verdict.claim
    premise = " (a premise of ours, not counted among their claims)" if claim.premise else ""
    changed_by = otherwise(verdict)
    return {
        "claim": f"{claim.id}, {claim.title}{premise}",
        "where": claim.where,
        "quote": claim.quote and f"“{claim.quote}”",
        "claimed": claimed_in_full(verdict),
        "found": found_words(verdict, claim.unit),
        "central": claim.central,
        "releases": committed.ranges().get(claim.id),
        "verdict": "; ".join(filter(None, (verdict.verdict, verdict.open_because, verdict.holding))),
        "basis": basis_words(verdict),
        "certainty": str(certainty(verdict) or ""),
        "not counted": not_counted_words(verdict),
        "check": claim.check,
        "group": claim.contradiction and f"the claims of this error count once: {claim.contradiction}",
        "left open": "; ".join(f"{name}: {values_words(each, name)}" for name, each in claim.unsaid.items()),
        "holds with": _few(verdict.holds_under, "; "),
        "fails with": _few(verdict.fails_under, "; "),
        "conditions": conditions_words(claim),
        "differs": _few(verdict.differs, "; "),
        "working": verdict.working,
        "elsewhere" if verdict.verdict == NOT_TESTED else "evidence": _evidence(verdict),
        "nearest" if claim.check == "searched" else "sentence": verdict.sentence and f"“{verdict.sentence}”",
        "missing": verdict.missing if verdict.missing != changed_by else "",
        "changed by": changed_by,
        "decided by": claim.would_decide if verdict.open_because else None,
        "reading": claim.reading,
    }


def _labelled(texts: Mapping[str, str | None]) -> list[str]:
    """Return labelled texts, wrapped under their labels."""
    words = []
    for label, text in texts.items():
        shown = (text or "") if label in VERBATIM else readable(text or "")
        whole = f"{label:<{LABEL}}{' '.join(shown.split())}"
        if text:
            words += textwrap.wrap(whole, WIDTH, subsequent_indent=" " * LABEL, break_on_hyphens=False)
    return words


def claimed_in_full(verdict: Verdict) -> str:
    """Return what the document says, with the tolerance. Empty for yes and no."""
    claim = verdict.claim
    words = claimed_words(claim, verdict)
    tolerance = f", within {100 * claim.tolerance:.3g} % (fixed {claim.fixed})" if claim.tolerance else ""
    return words and words + tolerance


def basis_words(verdict: Verdict) -> str:
    """Return the basis, and what it means."""
    words = f"{verdict.basis}: {WHAT_A_BASIS_IS[verdict.basis]}"
    return f"nothing yet; it would be {words}" if verdict.verdict == NOT_TESTED else words


def not_counted_words(verdict: Verdict) -> str:
    """Return why a decided claim is not counted. Empty if it is."""
    if not verdict.is_by_construction:
        return ""
    return f"our check cannot fail: {verdict.claim.by_construction}"


def found_words(verdict: Verdict, unit: str) -> str:
    """Return what was found, with its interval if it has one. Empty for yes and no."""
    words = value_words(verdict.found, unit)
    interval = verdict.interval
    if words and isinstance(interval, tuple) and all(map(is_number, interval)) and len(set(interval)) > 1:
        low, high = (with_unit(end, unit).removesuffix(f" {unit}") for end in interval)
        words += f", from {low} to {high}" if low != high else ""
    return words


def _evidence(verdict: Verdict) -> str:
    """Return the evidence. Runs in other conditions do not count, but a reader may want to see them."""
    names = verdict.evidence
    if verdict.basis == READ:
        names = tuple(f"{name} ({source_title(name)})" for name in names)
    runs = f"{number_of(len(names), 'runs')}: " if names and verdict.basis in (MEASURED, VIRTUAL) else ""
    return runs + _few(names, ", ")


def _few(words: tuple[str, ...], mark: str) -> str:
    """Return the first few items, and how many more there are."""
    more = f" ... and {len(words) - MOST} more (--json)" if len(words) > MOST else ""
    return mark.join(words[:MOST]) + more


def values_words(values: list, name: str) -> str:
    """Return the values that a document leaves open."""
    return " or ".join(plain(value, name) for value in values)


def conditions_words(claim: Claim) -> str:
    """Return the conditions of a claim, with their units."""
    units = {"parameters": "parameters", "device_memory": "bytes"}
    words = {name: quantity(value, units.get(name, "")) for name, value in claim.conditions.items()}
    return ", ".join(f"{name} {text.removesuffix(' parameters')}" for name, text in words.items())
