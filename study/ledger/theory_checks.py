"""Checks that need no run: formulas of `study.predictor`, and the document's own numbers."""

import math
from typing import Literal

from study.errors import Stop
from study.io.numbers import short
from study.ledger import memory_checks, step_checks
from study.ledger.arguments import Check, calls_of, one_of
from study.ledger.verdict import Finding

# Exponent and stored mantissa bits: IEEE 754 for the first two; bfloat16 is fp32 with 16 bits of the mantissa cut off.
FORMATS = {"fp32": (8, 23), "fp16": (5, 10), "bf16": (8, 7)}


def float_format(*, dtype: Literal["fp32", "fp16", "bf16"], bits: Literal["exponent", "mantissa", "all"]) -> Finding:
    """Count the bits of a number format."""
    exponent, mantissa = FORMATS[dtype]
    number = {"exponent": exponent, "mantissa": mantissa, "all": 1 + exponent + mantissa}[bits]
    return Finding(number, f"{dtype}: a sign, {exponent} bits of exponent, {mantissa} of mantissa")


def arithmetic(
    *,
    times: list[float] = [],  # noqa: B006
    over: list[float] = [],  # noqa: B006
    plus: list[float] = [],  # noqa: B006
    saved: bool = False,
) -> Finding:
    """Compute from the document's own numbers: the product of `times` over that of `over`, plus the sum of `plus`."""
    if 0 in over:
        raise Stop("an arithmetic check divides by 0", "give numbers other than 0 for over")
    factors = times or over
    product = math.prod(times) / math.prod(over) if factors else 0.0
    signs = {" x ": times or [1.0] * bool(over), " / ": over, " + ": plus}
    words = "".join(f"{sign}{short(float(number))}" for sign, numbers in signs.items() for number in numbers)[3:]
    result = product + sum(plus)
    if saved:
        result = 1 - result
        words = f"1 - {words}"
    return Finding(result, f"{words} = {short(float(result))}")


def stated(*, needed: list[str], given: list[str]) -> Finding:
    """Count the facts in `needed` that the document does not give."""
    lacking = [name for name in needed if name not in given]
    working = f"{len(needed) - len(lacking)} of {len(needed)} are given"
    return Finding(len(lacking), f"{working}; not given: {', '.join(lacking)}" if lacking else working)


def _side(given: dict) -> tuple[str, float, tuple[float, float] | None]:
    """Return the name of a quantity of theory, what it is with these arguments, and its interval if it has one."""
    name = given["quantity"]
    function = one_of(QUANTITIES, name, "quantity")
    try:
        (call,) = calls_of(function, {key: value for key, value in given.items() if key != "quantity"}, name)
    except ValueError as error:
        raise Stop(str(error), "correct the arguments") from None
    finding = function(**call)
    return name, finding.value, finding.interval


def quotient(*, quantity: str, of: dict, to: dict, where: dict = {}) -> Finding:  # noqa: B006
    """Return a quantity of theory with the arguments `of`, over it with the arguments `to`.

    A side can name another `quantity`. If both sides have intervals, the quotient has one, too: it assumes that the two
    predictions err in opposite directions.
    """
    above, numerator, span = _side({"quantity": quantity} | where | of)
    below, denominator, other_span = _side({"quantity": quantity} | where | to)
    if not denominator:
        raise Stop(f"{below} is 0 on the side to divide by", "give other arguments for to")
    interval = (span[0] / other_span[1], span[1] / other_span[0]) if span and other_span else None
    ratio = numerator / denominator
    working = f"{above} {short(numerator)} / {below} {short(denominator)} = {short(ratio)}"
    return Finding(ratio, working, interval)


QUANTITIES: dict[str, Check] = {
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
