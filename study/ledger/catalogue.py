"""The list of all checks that a claims file can name (`study claims --checks`), read from the code itself.

Arguments and types come from the signature, the purpose from the docstring, and the example is the shortest claim of
this study that uses the check.
"""

import inspect
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from study.ledger import arguments, evidence, probes
from study.ledger.arguments import argument_model
from study.ledger.checks import KINDS
from study.ledger.citations import sources
from study.ledger.model import CONDITIONS, SORTS, Check, Claim, Reference
from study.ledger.verdict import OWN
from study.ledger.words import WIDTH
from study.machine.gpus import GPUS
from study.predictor.papers import LINKS, RECIPES
from study.records import metrics
from study.records.schema import Record
from study.spec.arms import all_paths
from study.spec.shapes import SHAPES

METRICS = (*metrics.QUANTITIES, f"{metrics.COMPONENT}weights")
GIVEN = ("own",)  # arguments that the program adds: the claims file's own sources
SHOWN = ("value", "unit", "relation", "check")
HEAD = (
    "A claim names a check, gives it arguments in `with`, and compares what it finds with `value`.",
    "If an argument takes one value and gets a list, each element is a call of its own, and `value` is a list as well.",
    "[claim.unsaid] holds what the document leaves open: the argument's name, with its plausible values.",
    "The units are in the arguments' names. CONTRIBUTING.md shows a complete claims file.",
)


@dataclass(frozen=True)
class Use:
    """A use of a check by a claim."""

    says: str
    check: Check


@dataclass(frozen=True)
class Entry:
    """A check; or, if an argument chooses what the check computes or tries, one of these choices."""

    check: str
    choice: str
    function: arguments.Check
    example: Use | None

    @property
    def name(self) -> str:
        return self.choice or self.check


def entries(claims: Iterable[Claim]) -> list[Entry]:
    """Return every check with all its choices. The example is the shortest use in these claims."""
    shortest: dict[tuple[str, str], Use] = {}
    for use in sorted(_uses(claims), key=lambda use: len(str(use.check.arguments))):
        key = (use.check.check, KINDS[use.check.check].choice(use.check.arguments))
        shortest.setdefault(key, use)
    functions = [(check, *each) for check, kind in KINDS.items() for each in kind.functions.items()]
    return [Entry(check, choice, function, shortest.get((check, choice))) for check, choice, function in functions]


def _uses(claims: Iterable[Claim]) -> list[Use]:
    uses = []
    for claim in claims:
        says = f"{claim.id}: {claim.says}"
        uses += [Use(says, check) for check in claim.checks]
        if claim.until_tested:
            uses.append(Use(says, claim.until_tested))
    return uses


def lines(entry: Entry) -> list[str]:
    """Return a check in words: what it finds, its arguments, and a claim that uses it."""
    kind = KINDS[entry.check]
    named = f'check = "{entry.check}"'
    if kind.chosen_by:
        named += f', with {kind.chosen_by} = "{entry.choice}"'
    basis = OWN if entry.choice in kind.own else kind.basis
    finds = " or ".join(map(toml, kind.texts)) or kind.unit(entry.name, {}) or "any unit"
    purpose = " ".join((inspect.getdoc(entry.function) or "").split())
    about = textwrap.wrap(purpose, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [f"{entry.name}   ({named}; basis: {basis}; finds {finds})", *about, *_arguments(entry), *_example(entry)]


def _arguments(entry: Entry) -> list[str]:
    words = []
    for name, field in argument_model(entry.function).model_fields.items():
        if name not in GIVEN:
            default = "" if field.is_required() or field.default in (None, [], {}) else f" = {toml(field.default)}"
            needed = "needed" if field.is_required() else "optional"
            words.append(f"    {name}: {_type(field.annotation)}{default} ({needed})")
    return words


def _type(annotation: object) -> str:
    return inspect.formatannotation(annotation).replace("typing.", "").replace(" | None", "")


def toml(value: object) -> str:
    """Return a value as a claims file writes it."""
    if isinstance(value, tuple):
        value = dict(zip(("low", "high"), value, strict=True))
    if isinstance(value, Reference):
        value = {"finding_of": value.id} | ({"also": value.number} if value.number else {})
    if isinstance(value, dict):
        content = ", ".join(f"{name} = {toml(each)}" for name, each in value.items())
        return f"{{ {content} }}" if content else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def _example(entry: Entry) -> list[str]:
    if entry.example is None:
        return []
    check = entry.example.check
    given = {name: getattr(check, name) for name in SHOWN}
    given["with"] = {name: value for name, value in check.arguments.items() if name not in GIVEN}
    shown = [f"    {name} = {toml(value)}" for name, value in given.items() if value not in ("", "equal")]
    return [*textwrap.wrap(f"  {entry.example.says}", WIDTH, subsequent_indent="    "), *shown]


def names() -> list[str]:
    """Return the names that arguments may have, and the words that every claim may use."""
    known: dict[str, Iterable] = {
        "arms": all_paths(),
        "GPUs": GPUS,
        "links": LINKS,
        "models": SHAPES,
        "recipes": [f"{name} ({', '.join(map(str, parts))} bytes)" for name, parts in RECIPES.items()],
        "sources": sources(),
        "reproductions": probes.scripts(),
        "quantities of theory": KINDS["theory"].functions,
        "quantities of records": [f"{name} ({metrics.unit_of(name)})" for name in METRICS],
        "fields of records, by their paths (memory.per_rank.0.host_peak_bytes)": Record.model_fields,
        "what `where`, `of` and `to` choose runs by": evidence.FACTS,
        "kinds": SORTS,
        "relations": get_args(Check.model_fields["relation"].annotation),
        "conditions": CONDITIONS,
    }
    lists = [f"{what}: {', '.join(map(str, each))}" for what, each in known.items()]
    return [line for words in lists for line in textwrap.wrap(words, WIDTH, subsequent_indent="    ")]
