"""The form of claims files. A claim is data: it names its check and holds no verdict.

`with` is validated against the signature of the check's function. If an argument takes one value and gets a list, the
check is called once for each element, paired with the elements of `value`. `unsaid` holds the arguments that the
document leaves open, with their plausible values: the check runs over all combinations. `cited` checks are the one
exception to "no verdict": their `agrees` or `value` is what somebody read in the source.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from study.ledger import units
from study.ledger.arguments import STRICT, argument_model, as_list, calls_of, is_number
from study.spec.validation import nearest

Sort = Literal["memory", "bytes", "time", "capacity", "convergence", "configuration"]
SORTS = get_args(Sort)
# The conditions that a claim may state. If no record has one of them (link, nodes), records cannot decide the claim.
SCALE = {"model", "parameters", "sequence", "micro_batch", "batch"}
PLACE = {"ranks", "nodes", "device", "device_memory", "link"}
RECIPE = {"precision", "accumulation", "checkpointing", "attention", "optimizer", "offload"}
CONDITIONS = sorted(SCALE | PLACE | RECIPE | {"task", "data", "virtual", "software"})
MEASURED, VIRTUAL, TRIED = "measured", "virtual", "tried"
PREDICTED, OWN, READ = "predicted", "own numbers", "read"
BASES = (MEASURED, VIRTUAL, TRIED, PREDICTED, OWN, READ)  # what a verdict may rest on
TRENDS = ("rises", "falls", "neither")
LONGEST_QUOTE = 40  # words
MOST_CASES = 200


@dataclass(frozen=True)
class Kind:
    """A kind of check: what it rests on, and its function; or several functions, of which an argument chooses one."""

    basis: str
    functions: dict[str, Callable]
    chosen_by: str | None = None
    own: tuple[str, ...] = ()  # the functions that only need the document's own numbers
    # The unit of the finding, by the function's name and the arguments. None: any unit that the claim gives.
    unit: Callable[[str, dict], str | None] = lambda name, arguments: None
    finds: tuple[str, ...] = ()  # if not empty: the only texts that it can find
    # By document, the functions whose formulas that document published. They cannot show that its own claims are true.
    published: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A check's function and its calls, for one combination of values that the document leaves open."""

    values: dict
    function: Callable
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


class Check(BaseModel):
    """A check, its arguments, and the value that its finding is compared with."""

    model_config = STRICT

    unit: str = ""
    relation: Literal["equal", "at_least", "at_most", "above", "below", "up_to"] = "equal"
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0  # a share of the value
    better: Literal["lower", "higher"] | None = (
        None  # if the truth is beyond the value on this side, the claim is understated
    )
    value: object
    check: Annotated[str, AfterValidator(lambda name: _known(name, kinds()))]
    arguments: dict = Field(alias="with")

    @property
    def basis(self) -> str:
        kind = kinds()[self.check]
        return OWN if self.arguments.get(kind.chosen_by) in kind.own else kind.basis

    @functools.cached_property
    def written(self) -> Case:
        """The calls that the file writes: one, or one for each value of the claim."""
        return Case({}, *function_and_calls(self.check, self.arguments))

    @property
    def cases(self) -> list[Case]:
        return [self.written]

    @functools.cached_property
    def factor(self) -> float:
        """How many of the quantity's units the claim's unit is: 1e9 bytes are 1 GB."""
        return units.parsed(self.unit).factor if _unit(self) else 1

    @field_validator("tolerance")
    @classmethod
    def _has_a_reason(cls, tolerance: float, info) -> float:
        reasons = (info.context or {}).get("tolerances", {})
        if tolerance and info.context and tolerance not in reasons:
            raise ValueError(f"{tolerance:g} has no reason; the file has those of {', '.join(map(str, reasons))}")
        return tolerance

    @field_validator("value")
    @classmethod
    def _can_be_compared(cls, value, info):
        if isinstance(value, dict) and value:
            value = (FindingOf if "finding_of" in value else Range).model_validate(value)
        if isinstance(value, FindingOf):
            return value
        values, about = as_list(value), info.data
        if isinstance(value, Range):
            if value.low > value.high or about.get("relation") != "equal":
                raise ValueError("must go from low to high, with the relation equal")
            values = [value.low, value.high]
            value = tuple(values)
        if not values or not all(isinstance(each, (bool, int, float, str)) for each in values):
            raise ValueError(f"must be a number, a text, true or false, or a list of these (got {value!r})")
        if not all(map(is_number, values)):
            if about.get("unit") or about.get("tolerance") or about.get("relation") != "equal":
                raise ValueError(f"must be a number: there is a unit, a tolerance or a relation (got {value!r})")
        elif not all(map(math.isfinite, values)):
            raise ValueError(f"must be finite (got {value!r})")
        return value

    @field_validator("arguments")
    @classmethod
    def _fit_the_check(cls, arguments: dict, info) -> dict:
        if name := info.data.get("check"):
            _can_be_found(info.data.get("value"), kinds()[name])
            _as_many_as_values(name, function_and_calls(name, arguments)[1], info.data.get("value"))
        return arguments

    @model_validator(mode="after")
    def _is_in_the_unit_of_what_is_found(self):
        values = list(self.value) if isinstance(self.value, tuple) else as_list(self.value)
        numbers = [value for value in values if is_number(value)]
        if (unit := _unit(self)) and (numbers or isinstance(self.value, FindingOf)):
            units.refuse_unlike(self.unit, unit, self.arguments.get(kinds()[self.check].chosen_by, self.check))
            if unit == "bytes" and self.arguments.get("parameters") != 1:
                units.refuse_tiny(numbers, self.unit)
        if self.better and (self.relation != "equal" or not numbers):
            raise ValueError(
                "better needs a number and the relation equal: the other relations have their own direction"
            )
        return self


def _can_be_found(value, kind: Kind) -> None:
    """Refuse a text that the check never finds: a misspelt word would be refuted forever."""
    for text in as_list(value):
        if kind.finds and isinstance(text, str) and text not in kind.finds:
            raise ValueError(f"never finds {text!r}: value is one of {', '.join(kind.finds)}")


def _as_many_as_values(name: str, calls: list[dict], value) -> None:
    count = len(calls)
    if count > 1 and not (isinstance(value, list) and len(value) == count):
        raise ValueError(f"calls {name} {count} times, so value must have {count} elements (got {value!r})")


def _unit(check: Check) -> str | None:
    kind = kinds()[check.check]
    return kind.unit(check.arguments.get(kind.chosen_by, check.check), check.arguments)


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
    contradiction: str | None = None  # claims that share this name are the same error, and count once
    unsaid: dict[str, list] = {}
    where: str
    says: str
    kind: Sort
    unit: str
    tolerance: Annotated[float, Field(ge=0, le=1)]
    conditions: dict[Annotated[str, AfterValidator(lambda name: _known(name, CONDITIONS))], object]
    reading: str | None = None
    settle: Settle | None = None
    also: tuple[Check, ...] = Field(default=(), strict=False)  # more evidence: shown, never decides
    until_tested: "Claim | None" = None  # the same claim with a weaker check, which decides while no run does
    at: str = ""  # file and line

    @property
    def basis(self) -> str:
        """A paper's own formula says of its numbers whether they are consistent, not whether they are true."""
        kind = kinds()[self.check]
        theirs = kind.published.get(self.document, ())
        return OWN if self.arguments.get(kind.chosen_by) in theirs else super().basis

    @model_validator(mode="before")
    @classmethod
    def _further_checks_inherit(cls, table: dict) -> dict:
        """A further check is compared with the claim's own value, unless it gives another."""
        own = {name: table[name] for name in ("value", "unit", "relation", "tolerance", "better") if name in table}
        also = table.get("also", [])
        if isinstance(also, list) and all(isinstance(entry, dict) for entry in also):
            table = table | {"also": [entry if "value" in entry else own | entry for entry in also]}
        return table

    @model_validator(mode="before")
    @classmethod
    def _a_weaker_check_is_of_the_same_claim(cls, table: dict) -> dict:
        if isinstance(weaker := table.get("until_tested"), dict):
            same = {name: value for name, value in table.items() if name not in ("until_tested", "also", "unsaid")}
            table = table | {"until_tested": same | weaker}
        return table

    @functools.cached_property
    def _cases(self) -> list[Case]:
        """A case for each combination of the values left open. The combination that the file writes comes first."""
        combinations = [dict(zip(self.unsaid, each, strict=True)) for each in itertools.product(*self.unsaid.values())]
        written = [{name: _argument(self.arguments, name) for name in self.unsaid}]
        cases = []
        for values in sorted(combinations, key=lambda values: values not in written):
            arguments = _replaced(self.check, self.arguments, values)
            cases.append(Case(values, *function_and_calls(self.check, arguments)))
            _as_many_as_values(self.check, cases[-1].calls, self.value)
        return cases

    @property
    def cases(self) -> list[Case]:
        return self._cases if self.unsaid else [self.written]

    @field_validator("quote")
    @classmethod
    def _is_short(cls, quote: str | None) -> str | None:
        words = 0 if quote is None else len(quote.replace(" ... ", " ").split())
        if quote is not None and not 0 < words <= LONGEST_QUOTE:
            raise ValueError(f"must have 1 to {LONGEST_QUOTE} words (got {words})")
        return quote

    @field_validator("unsaid")
    @classmethod
    def _is_not_too_much(cls, unsaid: dict[str, list]) -> dict[str, list]:
        if (count := math.prod(map(len, unsaid.values()))) > MOST_CASES or not count:
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
    def _measured_claims_say_what_settles_them(self):
        if self.basis == MEASURED and not self.settle:
            raise ValueError(f"settle is missing: {self.check} reads records. Say which machine and command decide it")
        if self.until_tested and (self.basis != MEASURED or self.until_tested.basis not in (PREDICTED, READ)):
            raise ValueError(
                "until_tested is a check that predicts or cites, for a claim whose own check reads records"
            )
        return self


class Source(BaseModel):
    """What claims may cite, and how it was read."""

    model_config = STRICT

    id: str
    title: str
    address: str
    read: Literal["original", "translation", "abstract", "source code", "documentation"]


@functools.cache
def kinds() -> dict[str, Kind]:
    """Every check by name. The modules are imported here because they import this one."""
    from study.ledger import citations, probes, record_checks, theory_checks

    return theory_checks.KINDS | citations.KINDS | record_checks.KINDS | probes.KINDS


def _argument(arguments: dict, name: str):
    """The value of an argument, or of the fact of runs that `where` names."""
    return arguments[name] if name in arguments else (arguments.get("where") or {}).get(name)


def _replaced(check: str, arguments: dict, values: dict) -> dict:
    """The arguments with other values. A name that the check does not take goes into `where`, which chooses runs."""
    known = argument_model(function_and_calls(check, arguments)[0]).model_fields
    arguments = arguments | {name: value for name, value in values.items() if name in known}
    further = {name: value for name, value in values.items() if name not in known}
    if further and "where" not in known:
        raise ValueError(f"{next(iter(further))} is not known; {nearest(next(iter(further)), known)}")
    return arguments | {"where": (arguments.get("where") or {}) | further} if further else arguments


def function_and_calls(name: str, arguments: dict) -> tuple[Callable, list[dict]]:
    """A check's function and its calls. A ValueError if the arguments do not fit the function."""
    kind, choice = kinds()[name], ""
    if kind.chosen_by:
        choice = _known(str(arguments.get(kind.chosen_by)), kind.functions)
        arguments = {key: value for key, value in arguments.items() if key != kind.chosen_by}
    function = kind.functions[choice]
    return function, calls_of(function, arguments, choice or name)
