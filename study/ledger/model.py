"""The form of claims files. A claim is data: it names its check and holds no verdict.

`with` is validated against the signature of the check's function. If an argument takes one value and gets a list, the
check is called once for each element, paired with the elements of `value`. `unsaid` holds the arguments that the
document leaves open, with their plausible values: the check runs over all combinations. `cited` checks are the one
exception to "no verdict": their `agrees` or `value` is what somebody read in the source.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator

from study.io.validation import nearest
from study.ledger import arguments, units
from study.ledger.arguments import STRICT, argument_model, as_list, is_number
from study.ledger.checks import KINDS, Kind, function_and_calls
from study.ledger.citations import LONGEST_QUOTE
from study.ledger.evidence import CONDITIONS
from study.ledger.verdict import MEASURED, PREDICTED, READ

Sort = Literal["memory", "bytes", "time", "capacity", "convergence", "configuration"]
SORTS = get_args(Sort)
MOST_CASES = 200
SHARED_WITH_FURTHER = ("value", "unit", "relation", "tolerance", "better")
NOT_OF_WEAKER = ("until_tested", "also", "unsaid")


@dataclass(frozen=True)
class Case:
    """A check's function and its calls, for one combination of values that the document leaves open."""

    values: dict
    function: arguments.Check
    calls: list[dict]


@dataclass(frozen=True)
class Reference:
    """The finding of another check as the value of a claim: of another claim's own check, or of a further one of it."""

    id: str
    number: int | None
    claim: "Claim"

    @property
    def check(self) -> "Check":
        return self.claim if self.number is None else self.claim.also[self.number - 1]

    def __str__(self) -> str:
        return f"what {self.id} finds" if self.number is None else f"what check {self.number} of {self.id} finds"


class Range(BaseModel):
    """A value between two numbers: { low = 10, high = 100 }."""

    model_config = STRICT

    low: float
    high: float


class FindingOf(BaseModel):
    """A reference as the file writes it."""

    model_config = STRICT

    finding_of: str
    also: Annotated[int, Field(ge=1)] | None = None


def _known(name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is not known; {nearest(name, known)}")
    return name


def _known_check(name: str) -> str:
    return _known(name, KINDS)


def _known_condition(name: str) -> str:
    return _known(name, CONDITIONS)


class Check(BaseModel):
    """A check, its arguments, and the value that its finding is compared with."""

    model_config = STRICT

    unit: str = ""
    relation: Literal["equal", "at_least", "at_most", "above", "below", "up_to"] = "equal"
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0  # a share of the value
    # If the truth is beyond the value on this side, the claim is understated.
    better: Literal["lower", "higher"] | None = None
    # On a further check: it decides as well, as evidence of the same rank or as another reading of the sentence.
    decides: Literal["evidence", "reading"] | None = None
    value: object
    check: Annotated[str, AfterValidator(_known_check)]
    arguments: dict = Field(alias="with")

    @property
    def basis(self) -> str:
        return KINDS[self.check].basis_of(self.arguments)

    @functools.cached_property
    def written(self) -> Case:
        """Return the calls that the file writes: one, or one for each value of the claim."""
        return Case({}, *function_and_calls(self.check, self.arguments))

    @property
    def cases(self) -> list[Case]:
        return [self.written]

    @functools.cached_property
    def factor(self) -> float:
        """Return how many of the quantity's units the claim's unit is: 1e9 bytes are 1 GB."""
        return units.parsed(self.unit).factor if self._expected_unit else 1

    @property
    def _choice(self) -> str:
        return KINDS[self.check].choice(self.arguments) or self.check

    @property
    def _expected_unit(self) -> str | None:
        return KINDS[self.check].unit(self._choice, self.arguments)

    @field_validator("tolerance")
    @classmethod
    def _has_a_reason(cls, tolerance: float, info: ValidationInfo) -> float:
        if tolerance and info.context:
            reasons = info.context["tolerances"]
            if tolerance not in reasons:
                known = ", ".join(map(str, reasons))
                raise ValueError(f"{tolerance:g} has no reason; the file has those of {known}")
        return tolerance

    @field_validator("value")
    @classmethod
    def _can_be_compared(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, dict) and "finding_of" in value:
            return FindingOf.model_validate(value)
        if isinstance(value, FindingOf):  # of a further check, which inherits the value of its claim
            return value
        if isinstance(value, dict) and value:
            value = _range(Range.model_validate(value), info)
        _refuse_unlike_numbers(value, info)
        return value

    @field_validator("arguments")
    @classmethod
    def _fit_the_check(cls, arguments: dict, info: ValidationInfo) -> dict:
        if name := info.data.get("check"):
            value = info.data.get("value")
            _refuse_unknown_text(value, KINDS[name])
            _refuse_other_count(name, function_and_calls(name, arguments)[1], value)
        return arguments

    @model_validator(mode="after")
    def _is_in_the_unit_of_its_finding(self):
        numbers = [value for value in _values(self.value) if is_number(value)]
        unit = self._expected_unit
        if unit and (numbers or isinstance(self.value, FindingOf)):
            units.refuse_unlike(self.unit, unit, self._choice)
        if unit == "bytes" and self.arguments.get("parameters") != 1:
            units.refuse_tiny(numbers, self.unit)
        if self.better and (self.relation != "equal" or not numbers):
            what = "better needs a number and the relation equal: the other relations have their own direction"
            raise ValueError(what)
        return self


def _values(value: object) -> list:
    return list(value) if isinstance(value, tuple) else as_list(value)


def _range(value: Range, info: ValidationInfo) -> tuple[float, float]:
    if value.low > value.high or info.data.get("relation") != "equal":
        raise ValueError("must go from low to high, with the relation equal")
    return value.low, value.high


def _refuse_unlike_numbers(value: object, info: ValidationInfo) -> None:
    """Raise a ValueError for a value that no finding can be compared with."""
    values = _values(value)
    if not values or not all(isinstance(each, (bool, int, float, str)) for each in values):
        raise ValueError(f"must be a number, a text, true or false, or a list of these (got {value!r})")
    if all(map(is_number, values)):
        if not all(map(math.isfinite, values)):
            raise ValueError(f"must be finite (got {value!r})")
    elif info.data.get("unit") or info.data.get("tolerance") or info.data.get("relation") != "equal":
        raise ValueError(f"must be a number: there is a unit, a tolerance or a relation (got {value!r})")


def _refuse_unknown_text(value: object, kind: Kind) -> None:
    """Raise a ValueError for a text that the check never finds: a misspelt word would be refuted forever."""
    for text in as_list(value):
        if kind.texts and isinstance(text, str) and text not in kind.texts:
            raise ValueError(f"never finds {text!r}: value is one of {', '.join(kind.texts)}")


def _refuse_other_count(name: str, calls: list[dict], value: object) -> None:
    count = len(calls)
    if count > 1 and not (isinstance(value, list) and len(value) == count):
        raise ValueError(f"calls {name} {count} times, so value must have {count} elements (got {value!r})")


class Settle(BaseModel):
    """What would decide a claim: a machine, and a command to run there."""

    model_config = STRICT

    machine: str
    command: str


class Claim(Check):
    """A published statement: where it is, what it says, and the check that decides it."""

    id: str
    document: str
    title: str
    fixed: date  # when its tolerance was fixed
    text: str | None  # the source file that has its quotes
    read: str | None  # or how the quotes were read
    quote: str | None = None  # verbatim; " ... " joins two pieces
    premise: bool = False  # the authors imply it at most, so it is not counted among their claims
    central: str | None = None  # why it is one of the few that its document stands for
    suspected: bool = False  # it was chosen because a problem was suspected, so it says nothing about the others
    by_construction: str | None = None  # why no observation could turn the verdict: shown, and counted nowhere
    contradiction: str | None = None  # claims that share this name are the same error, and count once
    unsaid: dict[str, list] = {}
    where: str
    says: str
    kind: Sort
    unit: str
    tolerance: Annotated[float, Field(ge=0, le=1)]
    conditions: dict[Annotated[str, AfterValidator(_known_condition)], object]
    reading: str | None = None
    settle: Settle | None = None
    also: tuple[Check, ...] = Field(default=(), strict=False)  # more evidence: shown, never decides
    until_tested: "Claim | None" = None  # the same claim with a weaker check, which decides while no run does
    at: str = ""  # file and line

    @property
    def basis(self) -> str:
        return KINDS[self.check].basis_of(self.arguments, self.document)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the claim's own check, and the further ones."""
        return (self, *self.also)

    @model_validator(mode="before")
    @classmethod
    def _give_to_other_checks(cls, table: dict) -> dict:
        """Give the claim's value to its further checks, unless they have another, and the claim to its weaker check."""
        own = {name: table[name] for name in SHARED_WITH_FURTHER if name in table}
        also = table.get("also", [])
        if isinstance(also, list) and all(isinstance(entry, dict) for entry in also):
            table = table | {"also": [entry if "value" in entry else own | entry for entry in also]}
        weaker = table.get("until_tested")
        if isinstance(weaker, dict):
            same = {name: value for name, value in table.items() if name not in NOT_OF_WEAKER}
            table = table | {"until_tested": same | weaker}
        return table

    @functools.cached_property
    def _open_cases(self) -> list[Case]:
        """Return a case for each combination of the values left open. The one that the file writes comes first."""
        combinations = [dict(zip(self.unsaid, each, strict=True)) for each in itertools.product(*self.unsaid.values())]
        written = {name: _argument(self.arguments, name) for name in self.unsaid}
        cases = []
        for values in sorted(combinations, key=lambda values: values != written):
            arguments = _replaced(self.check, self.arguments, values)
            case = Case(values, *function_and_calls(self.check, arguments))
            _refuse_other_count(self.check, case.calls, self.value)
            cases.append(case)
        return cases

    @property
    def cases(self) -> list[Case]:
        return self._open_cases if self.unsaid else [self.written]

    @field_validator("quote")
    @classmethod
    def _is_short(cls, quote: str | None) -> str | None:
        if quote is not None:
            count = len(quote.replace(" ... ", " ").split())
            if not 0 < count <= LONGEST_QUOTE:
                raise ValueError(f"must have 1 to {LONGEST_QUOTE} words (got {count})")
        return quote

    @field_validator("unsaid")
    @classmethod
    def _is_not_too_much(cls, unsaid: dict[str, list]) -> dict[str, list]:
        count = math.prod(map(len, unsaid.values()))
        if not 0 < count <= MOST_CASES:
            raise ValueError(f"must have 1 to {MOST_CASES} combinations (got {count})")
        return unsaid

    @model_validator(mode="after")
    def _is_whole(self):
        if self.quote is None and not self.premise and (self.text or self.read):
            raise ValueError("quote is missing: give the words of the document, or premise = true if it has none")
        try:
            _ = self.cases
        except ValueError as error:
            raise ValueError(f"unsaid {error}") from None
        return self

    @model_validator(mode="after")
    def _says_what_settles_it(self):
        reads_records = self.basis == MEASURED
        if reads_records and not self.settle:
            raise ValueError(f"settle is missing: {self.check} reads records. Say which machine and command decide it")
        if self.until_tested and (not reads_records or self.until_tested.basis not in (PREDICTED, READ)):
            what = "until_tested is a check that predicts or cites, for a claim whose own check reads records"
            raise ValueError(what)
        return self


def _argument(arguments: dict, name: str) -> object:
    """Return the value of an argument, or of the fact of runs that `where` names."""
    if name in arguments:
        return arguments[name]
    where = arguments.get("where")
    return where.get(name) if isinstance(where, dict) else None


def _replaced(check: str, arguments: dict, values: dict) -> dict:
    """Return the arguments with other values. A name that the check does not take goes into `where`."""
    known = argument_model(function_and_calls(check, arguments)[0]).model_fields
    arguments = arguments | {name: value for name, value in values.items() if name in known}
    further = {name: value for name, value in values.items() if name not in known}
    if not further:
        return arguments
    if "where" not in known:
        first = next(iter(further))
        raise ValueError(f"{first} is not known; {nearest(first, known)}")
    return arguments | {"where": (arguments.get("where") or {}) | further}
