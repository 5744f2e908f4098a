"""The list of all checks that a claims file can name (`study claims --checks`), read from the code itself.

Arguments and types come from the signature, the purpose from the docstring, and the example is the shortest claim of
this study that uses the check.
"""

import inspect
import json
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Union, get_args, get_origin

from study.ledger import evidence, model, probes
from study.ledger.arguments import argument_model
from study.ledger.citations import sources
from study.ledger.model import CONDITIONS, OWN, SORTS, Check, Claim, Reference
from study.ledger.words import WIDTH
from study.machine.gpus import GPUS
from study.predictor.papers import LINKS, RECIPES
from study.records import metrics
from study.records.schema import Record
from study.spec.arms import all_paths
from study.spec.shapes import SHAPES

TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
UNITS = {"bytes_per_s": "bytes/s", "flops_per_s": "operations/s", "bytes": "bytes", "parameters": "parameters"}
# Arguments whose texts are names, and the list that has these names; OF_CHECKS: only in the checks that it names.
LISTED = {"arm": "arms", "arms": "arms", "base": "arms", "over": "arms", "gpu": "GPUs", "link": "links"}
LISTED |= {"model": "models", "recipe": "recipes", "source": "sources", "looked_in": "sources"}
OF_CHECKS = {("reproduction", "name"): "reproductions"}
OF_CHECKS |= dict.fromkeys(
    ((name, "quantity") for name in ("ratio", "order", "measured_trend")), "quantities of records"
)
OF_CHECKS |= dict.fromkeys((("trend", "quantity"), ("quotient", "quantity")), "quantities of theory")
OF_CHECKS |= dict.fromkeys((("observed", "field"), ("observed", "over"), ("equal", "field")), "fields of records")
METRICS = (*metrics.QUANTITIES, f"{metrics.COMPONENT}weights")
# Examples of checks that no claim of this study uses.
UNUSED = {
    "With more ranks, each rank holds less": {
        "value": "falls",
        "check": "measured_trend",
        "with": {"quantity": "peak_bytes", "along": {"ranks": [1, 2, 4]}, "where": {"arm": "zero2"}},
    },
    "Stage 3 on eight ranks holds an eighth of what stage 0 holds": {
        "value": 8,
        "unit": "times less",
        "check": "quotient",
        "with": {
            "quantity": "states_bytes",
            "of": {"stage": 0},
            "to": {"stage": 3},
            "where": {"ranks": 8, "parameters": 1e9},
        },
    },
}
GIVEN = ("own",)  # arguments that the program adds: the claims file's own sources
HEAD = (
    "A claim names a check, gives it arguments in `with`, and compares what it finds with `value`.",
    "If an argument takes one value and gets a list, each element is a call of its own, and `value` is a list as well.",
    "[claim.unsaid] holds what the document leaves open: the argument's name, with its plausible values.",
    "CONTRIBUTING.md shows a complete claims file.",
)


@dataclass(frozen=True)
class Entry:
    """A check; or, if an argument chooses what the check computes or tries, one of these choices."""

    check: str
    choice: str
    function: Callable
    example: tuple[str, Check] | None  # what the claim says, and its check

    @property
    def name(self) -> str:
        return self.choice or self.check


def entries(claims: Iterable[Claim]) -> list[Entry]:
    """Every check with all its choices. The example is the shortest use in these claims."""
    shortest: dict[tuple[str, str], tuple[str, Check]] = {}
    uses = [(claim, check) for claim in claims for check in (claim, claim.until_tested, *claim.also) if check]
    for claim, check in sorted(uses, key=lambda use: (use[0] is not use[1], len(str(use[1].arguments)), use[0].id)):
        shortest.setdefault((check.check, _choice(check)), (f"{claim.id}: {claim.says}", check))
    for says, table in UNUSED.items():
        check = Check.model_validate(table)
        shortest.setdefault((check.check, _choice(check)), (says, check))
    return [
        Entry(check, choice, function, shortest.get((check, choice)))
        for check, kind in model.kinds().items()
        for choice, function in kind.functions.items()
    ]


def _choice(check: Check) -> str:
    chosen_by = model.kinds()[check.check].chosen_by
    return check.arguments[chosen_by] if chosen_by else ""


def lines(entry: Entry) -> list[str]:
    """A check in words: what it finds, its arguments, and a claim that uses it."""
    kind = model.kinds()[entry.check]
    named = f'check = "{entry.check}"' + (f', with {kind.chosen_by} = "{entry.choice}"' if kind.chosen_by else "")
    basis, unit = OWN if entry.choice in kind.own else kind.basis, kind.unit(entry.name, {})
    finds = " or ".join(map(toml, kind.finds)) or (unit if _in(unit) else "")
    about = f"{entry.name}   ({named}; basis: {basis}{finds and f'; finds {finds}'})"
    purpose = " ".join((inspect.getdoc(entry.function) or "").split())
    return [
        about,
        *textwrap.wrap(purpose, WIDTH, initial_indent="  ", subsequent_indent="  "),
        *_arguments(entry),
        *_example(entry),
    ]


def _arguments(entry: Entry) -> list[str]:
    fields = argument_model(entry.function).model_fields
    described = {name: argument(entry.name, name, field) for name, field in fields.items() if name not in GIVEN}
    width = max(map(len, described), default=0)
    return [f"    {name:<{width}}  {words}" for name, words in described.items()]


def argument(check: str, name: str, field) -> str:
    """An argument in words: its type or choices, its unit, and whether it is required."""
    words, listed = type_words(field.annotation), OF_CHECKS.get((check, name), LISTED.get(name))
    words += f" ({listed} below)" if listed and "text" in words else ""
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), None)
    words += f", in {unit}" if unit and "number" in words else ""
    if field.is_required():
        return words
    default = field.default
    return words + (", optional" if default in (None, (), []) else f", {toml(default)} if not given")


def type_words(annotation) -> str:
    """An annotation in words: a whole number; "device" or "host"; a list of texts."""
    if annotation in TYPES:
        return TYPES[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(toml, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(part) for part in parts if part is not type(None))
    if origin is list:
        plural = type_words(parts[0]).removeprefix("a ")
        return f"a list of {plural}" if plural.endswith(('"', "false")) else f"a list of {plural}s"
    return TYPES.get(origin, "anything")


def toml(value) -> str:
    """A value as a claims file writes it."""
    if isinstance(value, dict):
        return "{}" if not value else f"{{ {', '.join(f'{name} = {toml(each)}' for name, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple):
        return toml(dict(zip(("low", "high"), value, strict=True)))
    if isinstance(value, Reference):
        return toml({"finding_of": value.id} | ({"also": value.number} if value.number else {}))
    return json.dumps(value, ensure_ascii=False)


def _example(entry: Entry) -> list[str]:
    if entry.example is None:
        return []
    says, check = entry.example
    given = {name: getattr(check, name) for name in ("value", "unit", "relation", "check")} | {
        "with": {name: value for name, value in check.arguments.items() if name not in GIVEN}
    }
    shown = [f"    {name} = {toml(value)}" for name, value in given.items() if value not in ("", "equal")]
    return [*textwrap.wrap(f"  {says}", WIDTH, subsequent_indent="    "), *shown]


def _in(unit: str | None) -> str:
    return f" ({unit})" if unit not in (None, "number") else ""


def names() -> list[str]:
    """The names that arguments may have, and the words that every claim may use."""
    known = {
        "arms": all_paths(),
        "GPUs": GPUS,
        "links": LINKS,
        "models": SHAPES,
        "recipes": [f"{name} ({', '.join(map(str, parts))} bytes)" for name, parts in RECIPES.items()],
        "sources": sources(),
        "reproductions": probes.scripts(),
        "quantities of theory": model.kinds()["theory"].functions,
        "quantities of records": [f"{name}{_in(metrics.unit_of(name))}" for name in METRICS],
        "fields of records, by their paths (memory.per_rank.0.host_peak_bytes)": Record.model_fields,
        "what `where`, `of` and `to` choose runs by": evidence.FACTS,
        "kinds": SORTS,
        "relations": get_args(Check.model_fields["relation"].annotation),
        "conditions": CONDITIONS,
    }
    lists = [f"{what}: {', '.join(map(str, each))}" for what, each in known.items()]
    return [line for words in lists for line in textwrap.wrap(words, WIDTH, subsequent_indent="    ")]
