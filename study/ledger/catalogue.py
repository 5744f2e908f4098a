"""The list of all checks that a claims file can name (`study claims --checks`), read from the code itself.

Arguments and types come from the signature, the purpose from the docstring. The claims of this study are examples.
"""

import inspect
import textwrap
from collections.abc import Iterable

from study.ledger.arguments import argument_model
from study.ledger.checks import KINDS
from study.ledger.model import CONDITIONS, SORTS, Claim
from study.ledger.verdict import OWN
from study.ledger.words import WIDTH
from study.records import metrics
from study.records.facts import FACTS

GIVEN = ("own",)  # arguments that the program adds: the claims file's own sources
HEAD = (
    "A claim names a check, gives it arguments in `with`, and compares what it finds with `value`.",
    "If an argument takes one value and gets a list, each element is a call of its own, and `value` is a list as well.",
    "[claim.unsaid] holds what the document leaves open: the argument's name, with its plausible values.",
    "The units are in the arguments' names. CONTRIBUTING.md shows a complete claims file. If a name of an arm, a GPU,",
    "a model, a recipe or a link is not known, the error lists those that are.",
    *textwrap.wrap(f"Kinds: {', '.join(SORTS)}. Conditions: {', '.join(CONDITIONS)}.", WIDTH),
    *textwrap.wrap(f"`where`, `of` and `to` choose runs by {', '.join(FACTS)}.", WIDTH),
    *textwrap.wrap(f"Quantities of records: {', '.join(metrics.QUANTITIES)}.", WIDTH),
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
            default = "" if field.default in (None, [], {}) else f", {field.default}"
            words.append(
                f"    {argument}: {kind_of_value} ({'needed' if field.is_required() else f'optional{default}'})"
            )
    pairs = [
        (claim.id, each.check, KINDS[each.check].choice(each.arguments)) for claim in claims for each in claim.checks
    ]
    users = [user for user, *named_by in pairs if named_by == [check, choice]]
    return [*words, f"  claims that use it: {', '.join(users[:3]) or 'none'}"]
