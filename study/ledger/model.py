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

from study.io.numbers import is_number
from study.io.units import parsed_unit
from study.io.validation import nearest
from study.ledger import arguments
from study.ledger.arguments import STRICT, argument_model, as_list
from study.ledger.checks import KINDS, function_and_calls
from study.ledger.choosing import CONDITIONS
from study.ledger.citations import Sentence
from study.ledger.verdict import MEASURED, PREDICTED, READ

Sort = Literal["memory", "bytes", "time", "capacity", "convergence", "configuration"]
SORTS = get_args(Sort)
Share = Annotated[float, Field(ge=0, le=1)]
MOST_CASES = 200
SHARED_WITH_FURTHER = ("value", "unit", "relation", "tolerance", "better")
NOT_OF_WEAKER = ("until_tested", "also", "unsaid")
FEWEST_BYTES = 1e6  # of a value whose unit is bytes: with less, the unit was forgotten


def _refuse_unlike(values: list[float], unit: str, expected: str, quantity: str) -> None:
    """Raise a ValueError if a claim's unit does not measure what the check finds, or was forgotten."""
    measures, factor = parsed_unit(unit)
    if measures != expected:
        raise ValueError(f"value is in {unit!r} and {quantity} is in {expected}")
    sizes = [abs(value) * factor for value in values if value]
    if unit == "bytes" and sizes and min(sizes) < FEWEST_BYTES:
        raise ValueError("value is less than a megabyte: name its unit (GB, GiB)")


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


class FindingOf(BaseModel):
    """A reference as the file writes it."""

    model_config = STRICT

    finding_of: str
    also: Annotated[int, Field(ge=1)] | None = None


def _one_of(known: Iterable[str]) -> AfterValidator:
    def refuse_others(name: str) -> str:
        if name not in known:
            raise ValueError(f"{name!r} is not known; {nearest(name, known)}")
        return name

    return AfterValidator(refuse_others)


class Check(BaseModel):
    """A check, its arguments, and the value that its finding is compared with."""

    model_config = STRICT

    unit: str = ""
    relation: Literal["equal", "at_least", "at_most", "above", "below", "up_to"] = "equal"
    tolerance: Share = 0.0  # a share of the value
    # If the truth is beyond the value on this side, the claim is understated.
    better: Literal["lower", "higher"] | None = None
    enough: Literal["one"] | None = None  # of the cases left open: the sentence says that something can be done
    # On a further check: it decides as well, as evidence of the same rank or as another reading of the sentence.
    decides: Literal["evidence", "reading"] | None = None
    value: object
    check: Annotated[str, _one_of(KINDS)]
    arguments: dict = Field(alias="with")

    @property
    def basis(self) -> str:
        return KINDS[self.check].basis_of(self.arguments)

    @functools.cached_property
    def written(self) -> Case:
        """Return the calls that the file writes: one, or one for each value of the claim."""
        return Case({}, *function_and_calls(self.check, self.arguments))

    @functools.cached_property
    def cases(self) -> list[Case]:
        return [self.written]

    @functools.cached_property
    def factor(self) -> float:
        """Return how many of the quantity's units the claim's unit is: 1e9 bytes are 1 GB."""
        return parsed_unit(self.unit)[1] if self._expected_unit else 1

    @property
    def _choice(self) -> str:
        return KINDS[self.check].choice(self.arguments) or self.check

    @property
    def _expected_unit(self) -> str | None:
        return KINDS[self.check].unit(self._choice, self.arguments)

    @field_validator("tolerance")
    @classmethod
    def _has_a_reason(cls, tolerance: float, info: ValidationInfo) -> float:
        reasons = info.context["tolerances"] if info.context else [tolerance]
        if tolerance and tolerance not in reasons:
            known = ", ".join(map(str, reasons))
            raise ValueError(f"{tolerance:g} has no reason; the file has those of {known}")
        return tolerance

    @field_validator("value")
    @classmethod
    def _is_a_value(cls, value: object) -> object:
        """Return a number, a text, yes or no, or several of them; or a reference."""
        if isinstance(value, dict):
            return FindingOf.model_validate(value)
        values = as_list(value)
        if not all(isinstance(each, (bool, int, float, str)) for each in values):
            raise ValueError(f"must be a number, a text, true or false, or a list of these (got {value!r})")
        if values == [] or not all(math.isfinite(each) for each in values if is_number(each)):
            raise ValueError(f"must be finite (got {value!r})")
        return value

    @field_validator("arguments")
    @classmethod
    def _fit_the_check(cls, arguments: dict, info: ValidationInfo) -> dict:
        if name := info.data.get("check"):
            value = info.data.get("value")
            texts = KINDS[name].texts
            for text in as_list(value):  # a misspelt word would be refuted forever
                if texts and isinstance(text, str) and text not in texts:
                    raise ValueError(f"never finds {text!r}: value is one of {', '.join(texts)}")
            _refuse_other_count(name, function_and_calls(name, arguments)[1], value)
        return arguments

    @model_validator(mode="after")
    def _can_be_compared(self):
        numbers = [*filter(is_number, as_list(self.value))]
        is_reference = isinstance(self.value, FindingOf)
        if (self.unit or self.tolerance or self.relation != "equal") and not (numbers or is_reference):
            raise ValueError(f"value must be a number: there is a unit, a tolerance or a relation (got {self.value!r})")
        if self._expected_unit and (numbers or is_reference):
            _refuse_unlike(numbers, self.unit, self._expected_unit, self._choice)
        if self.better and (self.relation != "equal" or not numbers):
            raise ValueError("better needs a number and the relation equal: the others have a direction")
        return self


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
    quote: Sentence | None = None  # verbatim; " ... " joins two pieces, " | " is between the cells of a table
    premise: bool = False  # the authors imply it at most, so it is not counted among their claims
    central: str | None = None  # why it is one of the few that its document stands for
    names: tuple[str, ...] = Field(default=(), strict=False)  # sources that the document itself follows
    suspected: bool = False  # it was chosen because a problem was suspected, so it says nothing about the others
    by_construction: str | None = None  # why our check cannot fail: shown, and counted nowhere
    contradiction: str | None = None  # claims that share this name are the same error, and count once
    unsaid: dict[str, Annotated[list, Field(min_length=1)]] = {}
    where: str
    says: str
    kind: Sort
    unit: str
    tolerance: Share
    conditions: dict[Annotated[str, _one_of(CONDITIONS)], object]
    reading: str | None = None
    settle: Settle | None = None
    would_decide: str | None = None  # what would decide it, in a sentence, while it is open
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
    def cases(self) -> list[Case]:
        """Return a case for each combination of the values left open. The one that the file writes comes first."""
        if not self.unsaid:
            return [self.written]
        combinations = [dict(zip(self.unsaid, each, strict=True)) for each in itertools.product(*self.unsaid.values())]
        where = self.arguments.get("where")
        given = (where if isinstance(where, dict) else {}) | self.arguments
        written = {name: given.get(name) for name in self.unsaid}
        cases = []
        for values in sorted(combinations, key=lambda values: values != written):
            arguments = _replaced(self.check, self.arguments, values)
            case = Case(values, *function_and_calls(self.check, arguments))
            _refuse_other_count(self.check, case.calls, self.value)
            cases.append(case)
        return cases

    @model_validator(mode="after")
    def _is_whole(self):
        if self.quote is None and not self.premise and (self.text or self.read):
            raise ValueError("quote is missing: give the words of the document, or premise = true if it has none")
        if math.prod(map(len, self.unsaid.values())) > MOST_CASES:
            raise ValueError(f"unsaid must have at most {MOST_CASES} combinations")
        try:
            _ = self.cases
        except ValueError as error:
            raise ValueError(f"unsaid {error}") from None
        reads_records = self.basis == MEASURED
        if reads_records and not self.settle:
            raise ValueError(f"settle is missing: {self.check} reads records. Say which machine and command decide it")
        if self.until_tested and (not reads_records or self.until_tested.basis not in (PREDICTED, READ)):
            what = "until_tested is a check that predicts or cites, for a claim whose own check reads records"
            raise ValueError(what)
        return self


def _replaced(check: str, arguments: dict, values: dict) -> dict:
    """Return the arguments with other values. A name that the check does not take goes into `where`."""
    known = argument_model(function_and_calls(check, arguments)[0]).model_fields
    arguments = arguments | {name: value for name, value in values.items() if name in known}
    further = {name: value for name, value in values.items() if name not in known}
    if further and "where" not in known:
        first = next(iter(further))
        raise ValueError(f"{first} is not known; {nearest(first, known)}")
    return arguments | {"where": (arguments.get("where") or {}) | further} if further else arguments
