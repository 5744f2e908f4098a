"""Checks that need no run: formulas of `study.predictor`, and the document's own numbers."""

import itertools
import math
from typing import Literal

from study.errors import Stop
from study.io.numbers import short
from study.ledger import memory_checks, step_checks
from study.ledger.arguments import calls_of, one_argument
from study.ledger.model import OWN, PREDICTED, TRENDS, Kind
from study.ledger.theory_arguments import one_of
from study.ledger.verdict import Finding

# Exponent and stored mantissa bits: IEEE 754 for the first two; bfloat16 is fp32 with 16 bits of the mantissa cut off.
FORMATS = {"fp32": (8, 23), "fp16": (5, 10), "bf16": (8, 7)}


def float_format(*, dtype: Literal["fp32", "fp16", "bf16"], bits: Literal["exponent", "mantissa", "all"]) -> Finding:
    """Bits of a number format."""
    exponent, mantissa = FORMATS[dtype]
    number = {"exponent": exponent, "mantissa": mantissa, "all": 1 + exponent + mantissa}[bits]
    return Finding(number, f"{dtype}: a sign, {exponent} bits of exponent, {mantissa} of mantissa")


def arithmetic(
    *, times: list[float] = (), over: list[float] = (), plus: list[float] = (), saved: bool = False
) -> Finding:
    """From the document's own numbers: the product of `times` over the product of `over`, plus the sum of `plus`."""
    if 0 in over:
        raise Stop("an arithmetic check divides by 0", "give numbers other than 0 for over")
    result = (math.prod(times) / math.prod(over) if times or over else 0.0) + sum(plus)
    digits = {"x": times or ([1] if over else []), "/": over, "+": plus}
    words = "".join(f" {sign} {short(float(number))}" for sign, numbers in digits.items() for number in numbers)[3:]
    if saved:
        result, words = 1 - result, f"1 - {words}"
    return Finding(result, f"{words} = {short(float(result))}")


def stated(*, needed: list[str], given: list[str]) -> Finding:
    """How many of the facts in `needed` the document does not give."""
    lacking = [name for name in needed if name not in given]
    working = f"{len(needed) - len(lacking)} of {len(needed)} are given"
    return Finding(len(lacking), f"{working}; not given: {', '.join(lacking)}" if lacking else working)


def trend(*, quantity: str, along: dict[str, list], where: dict) -> Finding:
    """Whether a quantity of theory "rises" or "falls" along the values of an argument, in their order, or "neither"."""
    name, values = one_argument(along)
    results = [_quantity(quantity, where | {name: value}).value for value in values]
    pairs = list(itertools.pairwise(results))
    word = "rises" if all(a < b for a, b in pairs) else "falls" if all(a > b for a, b in pairs) else "neither"
    return Finding(word, f"{quantity} with {name} {short(values)}: {short(results)}")


def _quantity(quantity: str, arguments: dict) -> Finding:
    function = one_of(QUANTITIES, quantity, "quantity")
    try:
        (call,) = calls_of(function, arguments, quantity)
    except ValueError as error:
        raise Stop(str(error), "correct the arguments") from None
    return function(**call)


def quotient(*, quantity: str, of: dict, to: dict, where: dict = {}) -> Finding:  # noqa: B006
    """A quantity of theory with the arguments `of`, over it with the arguments `to`.

    A side can name another `quantity`. If both sides have intervals, the quotient has one, too: it assumes that the two
    predictions err in opposite directions.
    """
    names = [side.get("quantity", quantity) for side in (of, to)]
    sides = [where | {key: value for key, value in side.items() if key != "quantity"} for side in (of, to)]
    findings = [_quantity(name, side) for name, side in zip(names, sides, strict=True)]
    (numerator, denominator), interval = (finding.value for finding in findings), None
    if not denominator:
        raise Stop(f"{names[1]} is 0 on the side to divide by", "give other arguments for to")
    if all(finding.interval for finding in findings):
        (low, high), (least, most) = (finding.interval for finding in findings)
        interval = low / most, high / least
    ratio = numerator / denominator
    working = f"{names[0]} {short(numerator)} / {names[1]} {short(denominator)} = {short(ratio)}"
    return Finding(ratio, working, interval)


QUANTITIES = {
    check.__name__: check
    for check in (
        *(memory_checks.parameters, memory_checks.states_bytes, memory_checks.states_saving),
        *(memory_checks.states_ratio, memory_checks.largest_parameters, memory_checks.fewest_ranks),
        *(memory_checks.fitted_bytes_per_parameter, memory_checks.rest_bytes, memory_checks.rest_spread),
        *(memory_checks.offloaded_states_bytes, memory_checks.peak_bytes, memory_checks.peak_saving),
        *(step_checks.traffic_ratio, step_checks.deepspeed_traffic_ratio, step_checks.traffic_bytes),
        *(step_checks.between_nodes_ratio, step_checks.link_bytes_per_s),
        *(memory_checks.activation_bytes, float_format),
        *(step_checks.step_ratio, step_checks.utilization, step_checks.offload_efficiency),
    )
}
BYTES = ("states_bytes", "rest_bytes", "offloaded_states_bytes", "peak_bytes", "activation_bytes", "traffic_bytes")
UNITS = dict.fromkeys(QUANTITIES, "number") | dict.fromkeys((*BYTES, "fitted_bytes_per_parameter"), "bytes")
UNITS |= {"parameters": "parameters", "largest_parameters": "parameters", "link_bytes_per_s": "bytes/s"}
FROM_THE_DOCUMENT = ("fitted_bytes_per_parameter", "rest_bytes", "rest_spread")  # differences of its own figures
PUBLISHED = {
    "P1": ("states_bytes", "states_saving", "states_ratio", "largest_parameters", "fewest_ranks", "traffic_ratio"),
    "P2": ("offloaded_states_bytes",),
    "P3": ("offload_efficiency",),
}
KINDS = {check.__name__: Kind(OWN, {"": check}) for check in (arithmetic, stated)}
KINDS |= {check.__name__: Kind(PREDICTED, {"": check}) for check in (step_checks.bound, quotient)}
KINDS |= {"fits": Kind(PREDICTED, {"": memory_checks.fits}, finds=("fits", "does not fit"))}
KINDS |= {"trend": Kind(PREDICTED, {"": trend}, finds=TRENDS)}
KINDS |= {
    "theory": Kind(PREDICTED, QUANTITIES, "quantity", FROM_THE_DOCUMENT, lambda name, _: UNITS.get(name), (), PUBLISHED)
}
