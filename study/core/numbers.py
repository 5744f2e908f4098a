"""Numbers as people write them: 42.7 GB, not 4.273e+10 bytes. Units are decimal: 1 GB is 10^9 bytes."""

import math
from typing import TypeGuard

UNKNOWN = "-"


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short(value) -> str:
    """Any value as a table shows it: four significant digits, yes or no, and a dash for unknown values."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(short, value))
    if isinstance(value, float):
        return _significant(value, 4) if math.isfinite(value) else "never"
    return str(value)


def size(size_bytes: float) -> str:
    """Bytes with three significant digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= 0.9995 * factor:
            return f"{_significant(size_bytes / factor, 3)} {unit}"
    return number_of(round(size_bytes), "bytes")


def count(number: float) -> str:
    """A large number in words: 9.24 billion."""
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(number) >= 0.9995 * factor:
            return f"{_significant(number / factor, 3)} {word}"
    return f"{number:,.0f}"


def nats(difference: float) -> str:
    """A difference between losses with one digit: 4e-7 nats."""
    text = f"{difference:.1g}" if difference == 0 or difference >= 1e-3 else f"{difference:.0e}".replace("e-0", "e-")
    return f"{text} nats"


def number_of(number: float, things: str) -> str:
    """A number of things, given as a plural: 1 rank, 4 ranks, 1 call of deepspeed.initialize, 1.0 times the bytes."""
    shown = short(number)
    if shown != "1":
        return f"{shown} {things}"
    plural, space, rest = things.partition(" ")
    return f"1.0 {things}" if plural == "times" else f"1 {_singular(plural)}{space}{rest}"


def times(ratio: float) -> str:
    """A ratio with two digits: 2.5 times, 1.0 times."""
    return number_of(float(f"{ratio:.2g}"), "times")


def part_of(number: int, whole: int, things: str) -> str:
    """A part of some things, with its verb: 2 of 5 runs are, 1 of 5 runs is, the only run is."""
    if whole == 1:
        return f"the only {_singular(things)} is"
    return f"{number} of {whole} {things} {'is' if number == 1 else 'are'}"


def percent(share: float) -> str:
    """A share: 3.4%, or 12%."""
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def signed(share: float) -> str:
    """A share with its sign: -3.4%, or +12%."""
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"


def _singular(plural: str) -> str:
    """The word for one of a thing. Units such as s and GB/s have none."""
    if not plural.replace("-", "").isalpha() or len(plural) < 3 or plural.endswith("ss"):
        return plural
    if plural.endswith(("sses", "ches", "shes", "xes")):
        return plural.removesuffix("es")
    return f"{plural.removesuffix('ies')}y" if plural.endswith("ies") else plural.removesuffix("s")


def quantity(value, unit: str) -> str:
    """A value with its unit. Bytes are written as kB, MB, GB or TB."""
    number = is_number(value) and math.isfinite(value)
    if number and unit in ("bytes", "bytes/s"):
        return size(value) + unit.removeprefix("bytes")
    if number and unit == "parameters":
        return f"{count(value)} {unit if value != 1 else 'parameter'}"
    return number_of(value, unit) if number and unit else f"{short(value)} {unit}".rstrip()


def _significant(value: float, digits: int) -> str:
    """A number with so many significant digits, without an exponent unless it is tiny or huge."""
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        decimals = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.{digits}g}"
