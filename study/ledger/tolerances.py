"""How closely the numbers of a record must agree before the audit reports a fault."""

import math

ROUNDING = 1e-6  # for numbers that differ only in the order of additions
PADDING = 0.05  # stage 3 pads what it gathers, and allocators round sizes up
EXACT, EXACT_ELEMENTS = 0.01, 2000  # parts are padded to equal sizes, by at most 126 elements in any kept record


def same(a: float, b: float, within: float = ROUNDING) -> bool:
    return math.isclose(a, b, rel_tol=within, abs_tol=0)


def same_elements(elements: float, expected: float) -> bool:
    """Whether two numbers of elements are equal but for the padding of parts."""
    return abs(elements - expected) <= EXACT * expected + EXACT_ELEMENTS
