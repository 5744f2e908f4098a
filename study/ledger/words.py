"""A verdict in words: the first sentence, and the lines below it. Nothing is decided here."""

import math
import re
import textwrap
from collections.abc import Mapping

from study.io.numbers import count, quantity, short, size
from study.io.words import joined
from study.ledger.arguments import as_list, is_number
from study.ledger.citations import sources
from study.ledger.ledger import Verdict, in_units, otherwise
from study.ledger.model import Check, Claim
from study.ledger.verdict import (
    CONSISTENT,
    CONTRADICTS,
    INCONCLUSIVE,
    MEASURED,
    NOT_TESTED,
    OWN,
    PREDICTED,
    READ,
    SUPPORTED,
    TRIED,
    UNDERSTATED,
    VIRTUAL,
)

WIDTH, LABEL = 100, 12  # columns of a line, and of its label
LARGE = 1e6  # numbers from here on are written in GB, or in millions
THOUSANDS = 1e3  # numbers from here on, beside millions, are written as 100,000
TINY = 0.0001
SHORT = 72  # at most so many characters name a case that holds and one that fails
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
}

BRIEFLY = {TRIED: "tried with the libraries", PREDICTED: "predicted by a formula", OWN: "its own numbers"}
# The arguments of checks as a reader calls them.
NAMES = {"micro_batch": "rows a pass", "accumulation": "passes a step", "rest_bytes": "the rest of the memory"}
NAMES |= {"config": "the configuration", "gpu": "the GPU", "gpus": "the number of GPUs"}
NAMES |= {name: name for name in ("ranks", "checkpointing", "attention", "precision")}
NAMES |= {"tokens_per_sample": "tokens a sample", "bytes_per_s": "the speed of the link"}
NAMES |= {"disk_bytes_per_s": "the speed of the disk", "host_memory_bytes": "the memory of the host"}
NAMES |= {"weights_too": "what is offloaded", "recipe": "the optimizer's recipe", "sequence": "the sequence length"}
CASES = {"checkpointing true": "checkpointing", "checkpointing false": "no checkpointing"}
CASES |= {"weights_too true": "offloaded weights", "weights_too false": "weights on the GPU"}
# What was tried, and how runs ended.
ENDS = {"accepted": "the library accepts it", "rejected": "the library rejects it", "done": "it succeeds"}
ENDS |= {"unavailable": "the library refuses it", "oom": "it runs out of memory", "absent": "there is none"}
PLURAL = {"fits": "fit", "does not fit": "do not fit"}
COUNTED = ("rows a pass", "passes a step", "ranks")
READING = "how it is read"

# --- the sentence --------------------------------------------------------------------------------------------------


def plainly(verdict: Verdict) -> str:
    """Return the first sentence: what the document says, what we found, and what that rests on."""
    claim = verdict.claim
    opening = f"{who(claim)} {'may imply' if claim.premise else 'says'}"
    if claim.premise and claim.quote is None:
        opening = "One may expect"
    outcome = _outcome(verdict)
    basis = _rests_on(verdict)
    rests_on = "" if basis in outcome else f" ({basis})"
    return f"{opening} “{claim.says}”; {outcome}{rests_on}."


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
    """Return what we found, and the verdict."""
    word = verdict.verdict
    if word == NOT_TESTED:
        return f"it is {word}"
    if word == INCONCLUSIVE and verdict.basis == PREDICTED and verdict.claim.settle:
        return f"our prediction leaves it {word}"  # the interval is in the lines below; a run would decide it
    end = f"so it {word}" if word == CONTRADICTS else f"so it is {word}"
    if word == INCONCLUSIVE:
        return f"{_undecided(verdict)}, {end}"
    return f"{_plain_finding(verdict) or _value_found(verdict)}, {end}"


def _value_found(verdict: Verdict) -> str:
    """Return the value that we found, and instead of which one."""
    unit = verdict.claim.unit
    subject = "its own numbers give" if verdict.basis == OWN else "we find"
    ours = value_words(verdict.found, unit)
    if verdict.verdict in (SUPPORTED, CONSISTENT):
        return f"{subject} {ours or 'the same'}"
    words = f"{subject} {ours or 'otherwise'}"
    if ours and not _stands_in(verdict.claimed, verdict.claim.says):
        words += f" instead of {_bare(claimed_words(verdict.claim, verdict), unit)}"
    return f"{words}, which is better" if verdict.verdict == UNDERSTATED else words


def _plain_finding(verdict: Verdict) -> str:
    """Return what stands for a finding that is a word of the code: fits, or accepted. Empty for all others."""
    claim = verdict.claim
    if claim.check in ("tried", "ran"):
        found = set(map(str, as_list(verdict.found)))
        parsed = claim.arguments.get("what") in ("deepspeed_config", "accelerate_yaml")
        words = ENDS.get(found.pop(), "") if len(found) == 1 else ""
        return words.replace(" it", " such a configuration" if parsed else " it")
    if claim.check != "fits" or not isinstance(verdict.found, str):
        return ""
    given = {name: value for name, value in claim.arguments.items() if name not in claim.unsaid}
    words = f"{given.get('model', 'such a model')} {verdict.found}"
    if "parameters" in given:
        words = f"{count(given['parameters'])} parameters {PLURAL[verdict.found]}"
    under = given.get("arm") or ("stage" in given and f"stage {given['stage']}")
    return f"{words} under {under}" if under else words


def _stands_in(claimed: object, says: str) -> bool:
    """Return whether the sentence has already quoted the claimed text."""
    return isinstance(claimed, str) and claimed.lower() in says.lower()


def _undecided(verdict: Verdict) -> str:
    """Return why nothing decides a claim."""
    holds = verdict.holds_under
    fails = verdict.fails_under
    if verdict.claim.check == "searched":
        return "no source that we read says so"
    if holds and fails:
        return _depends(verdict)
    if holds or fails:
        return f"it {'holds' if holds else 'fails'} in some cases, and in others nothing decides"
    ours = value_words(verdict.found, verdict.claim.unit)
    return f"what we find ({ours}) does not decide it" if ours else "nothing that we have decides it"


def _depends(verdict: Verdict) -> str:
    """Return on what a verdict depends: the two cases if they are short, else the names of what is left open."""
    words = " ".join((*verdict.holds_under, *verdict.fails_under)).split()
    decisive = [name for name in verdict.claim.unsaid if name in words]  # the other names make no difference
    names = [NAMES.get(name, f"the {name}") for name in decisive if name not in INTERNAL]
    held = case_words(verdict.holds_under[0])
    failed = case_words(verdict.fails_under[0])
    for unit in COUNTED:
        if held.endswith(f" {unit}") and failed.endswith(unit):
            held = _bare(held, unit)
    cases = f"it holds with {held} and fails with {failed}"
    single = len(verdict.holds_under) == len(verdict.fails_under) == 1
    if single and len(cases) <= SHORT and set(decisive).isdisjoint(INTERNAL):
        return cases
    return f"it leaves open {joined(names)}" if names else f"that depends on {READING}"


def case_words(words: str) -> str:
    """Return a case without the names that only the code uses: 8 ranks, no checkpointing."""
    for name, plain in CASES.items():
        words = words.replace(name, plain)
    words = re.sub(r"\b(arm|model|gpu|recipe|link|precision) (?=\S)", "", words)
    for name, plain in NAMES.items():
        words = re.sub(rf"\b{name}\b", plain.removeprefix("the "), words)
    words = re.sub(rf"\b({'|'.join(COUNTED)}) (\d+(?: or \d+)*)\b", r"\2 \1", words)
    return re.sub(r"(?<!or )\b1 (row|pass|rank)e?s\b", r"1 \1", words)


def _rests_on(verdict: Verdict) -> str:
    """Return the basis in words. For a claim that was not tested: what would test it."""
    basis = verdict.basis
    names = verdict.evidence
    settle = verdict.claim.settle
    if verdict.verdict == NOT_TESTED:
        return f"it takes {settle.machine}" if settle else "what would settle it is below"
    if basis in (MEASURED, VIRTUAL) and names:
        return f"measured in {_runs(verdict)}"
    if basis == READ and names:
        titles = list(dict.fromkeys(map(source_title, names)))
        return f"read in {joined(titles) if len(titles) <= MOST_NAMED else f'{len(titles)} sources'}"
    return BRIEFLY.get(basis, basis)


def _runs(verdict: Verdict) -> str:
    """Return how many runs a verdict rests on, and what is unusual about them."""
    number = len(verdict.evidence)
    cpu = "CPU " if any(words.startswith("device CPU instead") for words in verdict.differs) else ""
    if verdict.basis == MEASURED:
        return f"{number} real {cpu}run{'s' * (number > 1)}"
    return f"1 virtual {cpu}run" if number == 1 else f"{number} {cpu}runs, not all real"


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
    return _few_values(value, unit)


def claimed_words(claim: Check, verdict: Verdict) -> str:
    """Return what the document says, in human units."""
    return RELATIONS[claim.relation] + _few_values(verdict.claimed, claim.unit)


def _few_values(value, unit: str) -> str:
    if isinstance(value, tuple):
        low, high = value
        return f"{_bare(with_unit(low, unit), unit)} to {with_unit(high, unit)}"
    values = [f"“{each}”" if isinstance(each, str) else each for each in as_list(value)]
    if len(set(map(short, values))) == 1:
        return with_unit(values[0], unit)
    if len(values) > MOST:
        return f"{with_unit(values[:MOST], unit)} and {len(values) - MOST} more"
    return joined(with_unit(values, unit).split(", ", len(values) - 1))


def with_unit(value, unit: str) -> str:
    """Return a value with its unit, as people write it: 42.7 GB, 31 % of the peak saved, 500 million elements."""
    values = as_list(value)
    if not all(is_number(each) and math.isfinite(each) for each in values):
        return in_units(value, unit)
    least = min(map(abs, values))
    most = max(map(abs, values))
    if 0 < most < TINY:
        return f"less than {TINY} {unit}".rstrip()
    if unit.startswith("share saved") or re.match(r"of\b(?! \d)", unit):
        return f"{short([100 * float(each) for each in values])} % {unit.removeprefix('share ')}"
    for name, (write, suffix) in LARGE_UNITS.items():
        if unit.startswith(name) and least >= LARGE:
            return ", ".join(write(each) + suffix for each in values) + unit.removeprefix(name)
    if most >= LARGE and least >= THOUSANDS:
        return f"{', '.join(map(count, values))} {unit}".rstrip()
    return in_units(value, unit)


def _bare(text: str, unit: str) -> str:
    """Return a value without its unit, if the unit was just named."""
    return text.removesuffix(f" {unit}")


def _flops(value: float) -> str:
    return f"{value / 1e15:.3g} PFLOP/s" if value >= 1e15 else f"{value / 1e12:.3g} TFLOP/s"


# Units that are written otherwise if the number is large, and how. The longest name comes first.
LARGE_UNITS = {"bytes per second": (size, "/s"), "bytes/s": (size, "/s"), "bytes": (size, ""), "FLOP/s": (_flops, "")}


# --- a claim in full --------------------------------------------------------------------------------------------


def lines(verdict: Verdict) -> list[str]:
    """Return a claim in full: sentence, quote, numbers, conditions, evidence, and what would change the verdict."""
    claim = verdict.claim
    words = [*textwrap.wrap(plainly(verdict), WIDTH, break_on_hyphens=False), ""]
    words += _labelled(_about(verdict))
    for other, check in zip(verdict.also, claim.also, strict=True):
        against = f" of {claimed_words(check, other)}" if value_words(other.found, check.unit) else ""
        also = f"the value{against}, by {check.check}: {other.verdict} ({other.basis})"
        texts = {"also": also, "found": found_words(other, check.unit), "working": other.working}
        words += ["", *_labelled(texts | {"evidence": _evidence(other)})]
    return words


def _about(verdict: Verdict) -> dict[str, str | None]:
    """Return the labelled texts about a claim. None or an empty text is not shown."""
    claim = verdict.claim
    premise = " (a premise of ours, not counted among their claims)" if claim.premise else ""
    contradiction = claim.contradiction and f"the claims of this error count once: {claim.contradiction}"
    changed_by = otherwise(verdict)
    return {
        "claim": f"{claim.id}, {claim.title}{premise}",
        "where": claim.where,
        "quote": claim.quote and f"“{claim.quote}”",
        "claimed": claimed_in_full(verdict),
        "found": found_words(verdict, claim.unit),
        "verdict": verdict.verdict,
        "basis": basis_words(verdict),
        "group": contradiction,
        "left open": "; ".join(f"{name}: {values_words(each)}" for name, each in claim.unsaid.items()),
        "holds with": _few(verdict.holds_under, "; "),
        "fails with": _few(verdict.fails_under, "; "),
        "conditions": conditions_words(claim),
        "differs": _few(verdict.differs, "; "),
        "working": verdict.working,
        "elsewhere" if verdict.verdict == NOT_TESTED else "evidence": _evidence(verdict),
        "nearest" if claim.check == "searched" else "sentence": verdict.sentence and f"“{verdict.sentence}”",
        "missing": verdict.missing if verdict.missing != changed_by else "",
        "changed by": changed_by,
        "reading": claim.reading,
    }


def _labelled(texts: Mapping[str, str | None]) -> list[str]:
    """Return labelled texts, wrapped under their labels."""
    words = []
    for label, text in texts.items():
        if text:
            wrapped = textwrap.wrap(text, WIDTH - LABEL, break_on_hyphens=False)
            words += [
                f"{name:<{LABEL}}{line}" for name, line in zip([label, *[""] * len(wrapped)], wrapped, strict=False)
            ]
    return words


def claimed_in_full(verdict: Verdict) -> str:
    """Return what the document says, with the tolerance. Empty for yes and no."""
    claim = verdict.claim
    if not value_words(verdict.claimed, claim.unit):
        return ""
    tolerance = f", within {100 * claim.tolerance:.3g} % (fixed {claim.fixed})" if claim.tolerance else ""
    return claimed_words(claim, verdict) + tolerance


def basis_words(verdict: Verdict) -> str:
    words = f"{verdict.basis}: {WHAT_A_BASIS_IS[verdict.basis]}"
    return f"nothing yet; it would be {words}" if verdict.verdict == NOT_TESTED else words


def found_words(verdict: Verdict, unit: str) -> str:
    """Return what was found, with its interval if it has one. Empty for yes and no."""
    words = value_words(verdict.found, unit)
    interval = verdict.interval
    if not words or not isinstance(interval, tuple) or not all(map(is_number, interval)) or len(set(interval)) == 1:
        return words
    low, high = (_bare(with_unit(end, unit), unit) for end in interval)
    return f"{words}, from {low} to {high}"


def _evidence(verdict: Verdict) -> str:
    """Return the evidence. Runs in other conditions do not count, but a reader may want to see them."""
    names = verdict.evidence
    if verdict.basis == READ:
        names = tuple(f"{name} ({source_title(name)})" for name in names)
    runs = f"{len(names)} runs: " if names and verdict.basis in (MEASURED, VIRTUAL) else ""
    return runs + _few(names, ", ")


def _few(words: tuple[str, ...], mark: str) -> str:
    """Return the first few items, and how many more there are."""
    more = f" ... and {len(words) - MOST} more (--json)" if len(words) > MOST else ""
    return mark.join(words[:MOST]) + more


def values_words(values: list) -> str:
    return " or ".join(short(value) if not isinstance(value, dict) else str(value) for value in values)


def conditions_words(claim: Claim) -> str:
    return ", ".join(f"{name} {condition_words(name, value)}" for name, value in claim.conditions.items())


def condition_words(name: str, value) -> str:
    return quantity(value, {"parameters": name, "device_memory": "bytes"}.get(name, "")).removesuffix(" parameters")
