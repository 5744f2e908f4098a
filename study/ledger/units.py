"""Units of claims: what each one measures, and its factor of the base unit."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """What a unit measures, and its factor of the base unit. A value without a unit measures a "number"."""

    measures: str
    factor: float


BYTES = {"bytes": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COUNTS = {"": 1, "million ": 1e6, "billion ": 1e9, "trillion ": 1e12}
UNITS = {name: Unit("bytes", factor) for name, factor in BYTES.items()}
UNITS |= {f"{name}/s": Unit("bytes/s", factor) for name, factor in BYTES.items()}
UNITS |= {f"{word}parameters": Unit("parameters", factor) for word, factor in COUNTS.items()}
UNITS |= {"s": Unit("s", 1), "seconds": Unit("s", 1), "ms": Unit("s", 1e-3), "%": Unit("number", 0.01)}
NUMBER = Unit("number", 1)
LONGEST_FIRST = sorted(UNITS, key=len, reverse=True)
FEWEST_BYTES = 1e6


def parsed(unit: str) -> Unit:
    """Return the unit that a text begins with; the other words only explain."""
    words = unit.replace(" per second", "/s")
    for name in LONGEST_FIRST:
        if re.match(rf"{re.escape(name)}(?![\w/])", words):
            return UNITS[name]
    return NUMBER


def refuse_unlike(unit: str, expected: str, quantity: str) -> None:
    """Raise a ValueError if a claim's unit does not measure what the check finds."""
    if parsed(unit).measures == expected:
        return
    has = f"is in {unit!r}" if unit else "has no unit"
    article = "a" if expected == "number" else "in"
    raise ValueError(f"value {has} and {quantity} is {article} {expected}")


def refuse_tiny(values: list[float], unit: str) -> None:
    """Raise a ValueError for less than a megabyte: somebody forgot the unit."""
    factor = parsed(unit).factor
    for value in values:
        if 0 < abs(value) * factor < FEWEST_BYTES and "parameter" not in unit:
            raise ValueError(f"value is {value:g} {unit}, less than a megabyte: name its unit (GB, GiB)")
