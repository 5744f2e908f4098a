"""The list of all checks that a claims file can name (`study claims --checks`), read from the code itself.

Arguments and types come from the signature, the purpose from the docstring. The claims of this study are examples.
"""

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import get_args

from study.ledger import evidence, probes
from study.ledger.arguments import argument_model
from study.ledger.checks import KINDS
from study.ledger.citations import sources
from study.ledger.model import CONDITIONS, SORTS, Check, Claim
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
HEAD = (
    "A claim names a check, gives it arguments in `with`, and compares what it finds with `value`.",
    "If an argument takes one value and gets a list, each element is a call of its own, and `value` is a list as well.",
    "[claim.unsaid] holds what the document leaves open: the argument's name, with its plausible values.",
    "The units are in the arguments' names. CONTRIBUTING.md shows a complete claims file.",
)


def checks() -> dict[str, tuple[str, str]]:
    """Return every check, and every choice of a check whose argument chooses what it computes, by name."""
    return {choice or check: (check, choice) for check, kind in KINDS.items() for choice in kind.functions}


def lines(name: str, claims: Iterable[Claim]) -> list[str]:
    """Return a check in words: what it finds, its arguments, and a claim of these that uses it."""
    check, choice = checks()[name]
    kind = KINDS[check]
    function = kind.functions[choice]
    named = f'check = "{check}"' + (f', with {kind.chosen_by} = "{choice}"' if choice else "")
    basis = OWN if choice in kind.own else kind.basis
    finds = " or ".join(kind.texts) or kind.unit(name, {}) or "any unit"
    purpose = " ".join((inspect.getdoc(function) or "").split())
    words = [f"{name}   ({named}; basis: {basis}; finds {finds})"]
    words += textwrap.wrap(purpose, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for argument, field in argument_model(function).model_fields.items():
        if argument not in GIVEN:
            kind_of_value = inspect.formatannotation(field.annotation).replace("typing.", "").replace(" | None", "")
            words.append(f"    {argument}: {kind_of_value} {_default(field.is_required(), field.default)}")
    users = [claim.id for claim in claims for each in claim.checks if _is(each, check, choice)]
    return [*words, f"  claims that use it: {', '.join(users[:3]) or 'none'}"]


def _is(each: Check, check: str, choice: str) -> bool:
    return each.check == check and KINDS[check].choice(each.arguments) == choice


def _default(is_required: bool, default: object) -> str:
    return "(needed)" if is_required else f"(optional{'' if default in (None, [], {}) else f', {default}'})"


def names() -> list[str]:
    """Return the names that arguments may have, and the words that every claim may use."""
    known: Mapping[str, Iterable] = {
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
