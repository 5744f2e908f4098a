"""The table of checks that a claims file may name."""

from collections.abc import Callable
from dataclasses import dataclass, field

from study.io.validation import nearest
from study.ledger import citations, memory_checks, record_checks, step_checks, theory_checks, trial_checks
from study.ledger.arguments import Check, calls_of
from study.ledger.verdict import MEASURED, OWN, PREDICTED, READ, TRIED


@dataclass(frozen=True)
class Kind:
    """A kind of check: what it rests on, and its function; or several functions, of which an argument chooses one."""

    basis: str
    functions: dict[str, Check]
    chosen_by: str | None = None
    own: tuple[str, ...] = ()  # the functions that only need the document's own numbers
    unit_of: Callable[[str, dict], str | None] | None = None  # by the function's name and the arguments
    texts: tuple[str, ...] = ()  # if not empty: the only texts that it can find
    # By document, the functions whose formulas that document published. They cannot show that its own claims are true.
    published: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def choice(self, arguments: dict) -> str:
        """Return the name of the function that the arguments choose; empty if there is only one."""
        return str(arguments.get(self.chosen_by)) if self.chosen_by else ""

    def unit(self, name: str, arguments: dict) -> str | None:
        """Return the unit of the finding; None if it is in the unit that the claim gives."""
        return self.unit_of(name, arguments) if self.unit_of else None

    def basis_of(self, arguments: dict, document: str = "") -> str:
        """Return what a check rests on. A paper's own formula only says whether its numbers are consistent."""
        own = (*self.own, *self.published.get(document, ()))
        return OWN if self.choice(arguments) in own else self.basis


def _kinds(basis: str, *checks: Check, **about) -> dict[str, Kind]:
    return {check.__name__: Kind(basis, {"": check}, **about) for check in checks}


THEORY = Kind(
    PREDICTED,
    theory_checks.QUANTITIES,
    chosen_by="quantity",
    own=("fitted_bytes_per_parameter", "rest_bytes", "rest_spread"),  # differences of a document's own figures
    unit_of=lambda name, arguments: theory_checks.UNITS.get(name),
    published={
        "P1": ("states_bytes", "states_saving", "states_ratio", "largest_parameters", "fewest_ranks", "traffic_ratio"),
        "P2": ("offloaded_states_bytes",),
        "P3": ("offload_efficiency",),
    },
)
RECORDS = {"unit_of": record_checks.unit_of}
KINDS: dict[str, Kind] = {
    **_kinds(OWN, theory_checks.arithmetic, theory_checks.stated),
    **_kinds(PREDICTED, step_checks.bound, theory_checks.quotient),
    **_kinds(PREDICTED, memory_checks.fits, texts=("fits", "does not fit")),
    "theory": THEORY,
    **_kinds(READ, citations.cited, citations.searched, citations.published),
    **_kinds(MEASURED, record_checks.ran, texts=(*record_checks.ANSWERS, record_checks.REFUSED), **RECORDS),
    **_kinds(MEASURED, record_checks.counted, record_checks.ratio, record_checks.order, **RECORDS),
    **_kinds(MEASURED, record_checks.observed, record_checks.equal, record_checks.same_loss, **RECORDS),
    "tried": Kind(TRIED, {**trial_checks.TRIALS, "property": trial_checks.holds}, chosen_by="what"),
}


def function_and_calls(name: str, arguments: dict) -> tuple[Check, list[dict]]:
    """Return a check's function and its calls. Raise a ValueError if the arguments do not fit the function."""
    kind = KINDS[name]
    choice = kind.choice(arguments)
    if choice not in kind.functions:
        raise ValueError(f"{choice!r} is not known; {nearest(choice, kind.functions)}")
    arguments = {key: value for key, value in arguments.items() if key != kind.chosen_by}
    function = kind.functions[choice]
    return function, calls_of(function, arguments, choice or name)
