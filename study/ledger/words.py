"""A verdict in words: the first sentence, and the lines below it. Nothing is decided here."""

import math
import re
import textwrap

from study.io.numbers import count, quantity, short, size
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
COUNTED = ("rows a pass", "passes a step", "ranks")
READING = "how it is read"

# --- the sentence --------------------------------------------------------------------------------------------------


def plainly(verdict: Verdict) -> str:
    """The first sentence: what the document says, what we found, and what that rests on."""
    claim = verdict.claim
    opening = f"{who(claim)} {'may imply' if claim.premise else 'says'}"
    if claim.premise and claim.quote is None:
        opening = "One may expect"
    outcome, basis = _outcome(verdict), _rests_on(verdict)
    return f"{opening} “{claim.says}”; {outcome}" + f" ({basis})" * (basis not in outcome) + "."


def who(claim: Claim) -> str:
    """The name by which a reader knows the document."""
    if claim.document.isdigit():
        return f"Document {claim.document}"
    if claim.document[1:].isdigit():
        return f"The paper {claim.title.partition(':')[0]}"
    owner, *page = " ".join(claim.where.split()).partition(";")[0].split(", ")[:2]
    page = [re.sub(r"( of \d+ \w+ \d{4})?( \(.*)?$", "", each) for each in page]  # neither the commit nor the day
    return f"{owner} ({page[0]})" if page else owner


def _outcome(verdict: Verdict) -> str:
    """What we found, and the verdict."""
    word, unit = verdict.verdict, verdict.claim.unit
    ours, theirs = value_words(verdict.found, unit), claimed_words(verdict.claim, verdict)
    if word == NOT_TESTED:
        return f"it is {word}"
    if word == INCONCLUSIVE and verdict.basis == PREDICTED and verdict.claim.settle:
        return f"our prediction leaves it {word}"  # the interval is in the lines below; a run would decide it
    if word == INCONCLUSIVE:
        return f"{_undecided(verdict, ours)}, so it is {word}"
    subject = "its own numbers give" if verdict.basis == OWN else "we find"
    if plain := _plain_finding(verdict):
        return f"{plain}, so it is {word}"
    if word in (SUPPORTED, CONSISTENT):
        return f"{subject} {ours or 'the same'}, so it is {word}"
    instead = f"{subject} {ours}" if ours else f"{subject} otherwise"
    if ours and not _stands_in(verdict.claimed, verdict.claim.says):
        instead += f" instead of {_bare(theirs, unit)}"
    if word == UNDERSTATED:
        return f"{instead}, which is better, so it is {word}"
    return f"{instead}, so it {word}" if word == CONTRADICTS else f"{instead}, so it is {word}"


def _plain_finding(verdict: Verdict) -> str:
    """What stands for a finding that is a word of the code: fits, or accepted. Nothing for all others."""
    claim, found = verdict.claim, verdict.found
    if claim.check in ("tried", "ran"):
        found, *others = dict.fromkeys(map(str, as_list(found)))
        if others:
            return ""
        parsed = claim.arguments.get("what") in ("deepspeed_config", "accelerate_yaml")
        return ENDS.get(found, "").replace(" it", " such a configuration" if parsed else " it")
    if claim.check != "fits" or not isinstance(found, str):
        return ""
    given = {name: value for name, value in claim.arguments.items() if name not in claim.unsaid}
    parameters = given.get("parameters")
    model = given.get("model") or (f"{count(parameters)} parameters" if parameters else "such a model")
    if parameters:
        found = {"fits": "fit", "does not fit": "do not fit"}[found]
    under = given.get("arm") or ("stage" in given and f"stage {given['stage']}")
    return f"{model} {found}" + f" under {under}" * bool(under)


def _stands_in(claimed, says: str) -> bool:
    """Whether the sentence has already quoted the claimed text."""
    return isinstance(claimed, str) and claimed.lower() in says.lower()


def _undecided(verdict: Verdict, ours: str) -> str:
    holds, fails = verdict.holds_under, verdict.fails_under
    if verdict.claim.check == "searched":
        return "no source that we read says so"
    if not holds and not fails:
        return f"what we find ({ours}) does not decide it" if ours else "nothing that we have decides it"
    words = " ".join((*holds, *fails)).split()
    matter = [name for name in verdict.claim.unsaid if name in words]  # the other names make no difference
    names = _and([NAMES.get(name, f"the {name}") for name in matter if name not in INTERNAL]) or READING
    if not (holds and fails):
        return f"it {'holds' if holds else 'fails'} in some cases, and in others nothing decides"
    held, failed = case_words(holds[0]), case_words(fails[0])
    unit = next((unit for unit in COUNTED if held.endswith(f" {unit}") and failed.endswith(unit)), "")
    cases = f"it holds with {_bare(held, unit)} and fails with {failed}"
    if len(holds) == len(fails) == 1 and len(cases) <= SHORT and set(matter).isdisjoint(INTERNAL):
        return cases
    return f"that depends on {names}" if names == READING else f"it leaves open {names}"


def case_words(words: str) -> str:
    """A case without the names that only the code uses: 8 ranks, no checkpointing."""
    for name, plain in CASES.items():
        words = words.replace(name, plain)
    words = re.sub(r"\b(arm|model|gpu|recipe|link|precision) (?=\S)", "", words)
    for name, plain in NAMES.items():
        words = re.sub(rf"\b{name}\b", plain.removeprefix("the "), words)
    words = re.sub(rf"\b({'|'.join(COUNTED)}) (\d+(?: or \d+)*)\b", r"\2 \1", words)
    return re.sub(r"(?<!or )\b1 (row|pass|rank)e?s\b", r"1 \1", words)


def _rests_on(verdict: Verdict) -> str:
    """The basis in words. For a claim that was not tested: what would test it."""
    basis, names, settle = verdict.basis, verdict.evidence, verdict.claim.settle
    if verdict.verdict == NOT_TESTED:
        return f"it takes {settle.machine}" if settle else "what would settle it is below"
    if basis in (MEASURED, VIRTUAL) and names:
        real = "real " if basis == MEASURED else ""
        cpu = "CPU " * any(words.startswith("device CPU instead") for words in verdict.differs)  # of a claim about GPUs
        if len(names) == 1:
            return f"measured in 1 {real or 'virtual '}{cpu}run"
        return f"measured in {len(names)} {real}{cpu}runs" + ", not all real" * (not real)
    if basis == READ and names:
        titles = list(dict.fromkeys(map(source_title, names)))
        return f"read in {_and(titles) if len(titles) <= MOST_NAMED else f'{len(titles)} sources'}"
    return BRIEFLY.get(basis, basis)


def source_title(name: str) -> str:
    """The name by which a reader knows a source: the ZeRO paper, not P1."""
    known = sources()
    if name not in known:
        return name
    title = re.split(r"[:,(]", known[name].title)[0].strip()
    return f"the {title} paper" if re.fullmatch(r"P\d+", name) else title


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# --- values --------------------------------------------------------------------------------------------------------


def value_words(value, unit: str) -> str:
    """What a check found, in human units. Empty for yes and no."""
    values = as_list(value)
    if value is None or any(isinstance(each, bool) or each is None for each in values):
        return ""
    return _few_values(value, unit)


def claimed_words(claim: Check, verdict: Verdict) -> str:
    """What the document says, in human units."""
    return RELATIONS[claim.relation] + _few_values(verdict.claimed, claim.unit)


def _few_values(value, unit: str) -> str:
    if isinstance(value, tuple):  # a range
        low, high = (with_unit(end, unit) for end in value)
        return f"{_bare(low, unit)} to {high}"
    values = [f"“{each}”" if isinstance(each, str) else each for each in as_list(value)]
    values = values[:1] if len(set(map(short, values))) == 1 else values
    if len(values) > MOST:
        return f"{with_unit(values[:MOST], unit)} and {len(values) - MOST} more"
    if len(values) == 1:
        return with_unit(values[0], unit)
    return _and(with_unit(values, unit).split(", ", len(values) - 1))


def with_unit(value, unit: str) -> str:
    """A value with its unit, as people write it: 42.7 GB, 31 % of the peak saved, 500 million elements."""
    values = as_list(value)
    if not all(map(is_number, values)) or not all(map(math.isfinite, values)):
        return in_units(value, unit)
    if 0 < max(map(abs, values)) < TINY:
        return f"less than {TINY} {unit}".rstrip()
    large = min(map(abs, values)) >= LARGE
    name, rest = re.match(r"(bytes(?:/s| per second)?|FLOP/s|of\b(?! \d)|share saved|)(.*)", unit).groups()
    if name in ("of", "share saved"):
        numbers, rest = [f"{short(100 * float(each))}" for each in values], f" % {unit.removeprefix('share ')}"
    elif name and large:
        per_s = "" if name == "bytes" else "/s"
        numbers = [_flops(each) if name == "FLOP/s" else size(each) + per_s for each in values]
    elif max(map(abs, values)) >= LARGE and min(map(abs, values)) >= THOUSANDS:
        numbers, rest = map(count, values), f" {unit}"
    else:
        return in_units(value, unit)
    return f"{', '.join(numbers)}{rest}".rstrip()


def _bare(text: str, unit: str) -> str:
    """A value without its unit, if the unit was just named."""
    return text.removesuffix(f" {unit}")


def _flops(value: float) -> str:
    return f"{value / 1e15:.3g} PFLOP/s" if value >= 1e15 else f"{value / 1e12:.3g} TFLOP/s"


# --- a claim in full --------------------------------------------------------------------------------------------


def lines(verdict: Verdict) -> list[str]:
    """A claim in full: sentence, quote, numbers, conditions, evidence, and what would change the verdict."""
    claim = verdict.claim
    tolerance = f", within {100 * claim.tolerance:.3g} % (fixed {claim.fixed})" if claim.tolerance else ""
    conditions = [f"{name} {condition_words(name, value)}" for name, value in claim.conditions.items()]
    premise = " (a premise of ours, not counted among their claims)" if claim.premise else ""
    words = [
        *textwrap.wrap(plainly(verdict), WIDTH, break_on_hyphens=False),
        "",
        *_line("claim", f"{claim.id}, {claim.title}{premise}"),
        *_line("where", claim.where),
        *_line("quote", claim.quote and f"“{claim.quote}”"),
        *_line("claimed", value_words(verdict.claimed, claim.unit) and f"{claimed_words(claim, verdict)}{tolerance}"),
        *_line("found", found_words(verdict, claim.unit)),
        *_line("verdict", verdict.verdict),
        *_line("basis", basis_words(verdict)),
        *_line("group", claim.contradiction and f"the claims of this error count once: {claim.contradiction}"),
        *_line("left open", "; ".join(f"{name}: {values_words(each)}" for name, each in claim.unsaid.items())),
        *_line("holds with", _few(verdict.holds_under, "; ")),
        *_line("fails with", _few(verdict.fails_under, "; ")),
        *_line("conditions", ", ".join(conditions)),
        *_line("differs", _few(verdict.differs, "; ")),
        *_line("working", verdict.working),
        *_evidence(verdict),
        *_line("nearest" if claim.check == "searched" else "sentence", verdict.sentence and f"“{verdict.sentence}”"),
        *_line("missing", verdict.missing if verdict.missing != otherwise(verdict) else ""),
        *_line("changed by", otherwise(verdict)),
        *_line("reading", claim.reading or ""),
    ]
    for other, check in zip(verdict.also, claim.also, strict=True):
        against = f" of {claimed_words(check, other)}" if value_words(other.found, check.unit) else ""
        words += ["", *_line("also", f"the value{against}, by {check.check}: {other.verdict} ({other.basis})")]
        words += _line("found", found_words(other, check.unit))
        words += [*_line("working", other.working), *_evidence(other)]
    return words


def basis_words(verdict: Verdict) -> str:
    words = f"{verdict.basis}: {WHAT_A_BASIS_IS[verdict.basis]}"
    return f"nothing yet; it would be {words}" if verdict.verdict == NOT_TESTED else words


def _line(label: str, text: str | None) -> list[str]:
    """A labelled text, wrapped under its label. No line if there is no text."""
    look = {"initial_indent": f"{label:<{LABEL}}", "subsequent_indent": " " * LABEL, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, **look) if text else []


def found_words(verdict: Verdict, unit: str) -> str:
    """What was found, with its interval if it has one. Empty for yes and no."""
    interval, words = verdict.interval, value_words(verdict.found, unit)
    if words and isinstance(interval, tuple) and all(map(is_number, interval)) and interval[0] != interval[1]:
        words += f", from {_bare(with_unit(interval[0], unit), unit)} to {_bare(with_unit(interval[1], unit), unit)}"
    return words


def _evidence(verdict: Verdict) -> list[str]:
    """The evidence. Runs in other conditions do not count, but a reader may want to see them."""
    runs = f"{len(verdict.evidence)} runs: " if verdict.basis in (MEASURED, VIRTUAL) else ""
    label = "elsewhere" if verdict.verdict == NOT_TESTED else "evidence"
    names = verdict.evidence
    if verdict.basis == READ:
        names = tuple(f"{name} ({source_title(name)})" for name in names)
    return _line(label, names and f"{runs}{_few(names, ', ')}")


def _few(words: tuple[str, ...], mark: str) -> str:
    """The first few items, and how many more there are."""
    more = f" ... and {len(words) - MOST} more (--json)" if len(words) > MOST else ""
    return mark.join(words[:MOST]) + more


def values_words(values) -> str:
    return " or ".join(short(value) if not isinstance(value, dict) else str(value) for value in as_list(values))


def condition_words(name: str, value) -> str:
    return quantity(value, {"parameters": name, "device_memory": "bytes"}.get(name, "")).removesuffix(" parameters")
