"""The units in which documents write sizes, times and counts."""

import re

BYTES = {"bytes": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COUNTS = {"": 1, "million ": 1e6, "billion ": 1e9, "trillion ": 1e12}
# What a unit measures, and its factor. A value without a unit measures a "number".
UNITS: dict[str, tuple[str, float]] = {name: ("bytes", factor) for name, factor in BYTES.items()}
UNITS |= {f"{name}/s": ("bytes/s", factor) for name, factor in BYTES.items()}
UNITS |= {f"{word}parameters": ("parameters", factor) for word, factor in COUNTS.items()}
UNITS |= {"s": ("s", 1), "seconds": ("s", 1), "ms": ("s", 1e-3), "%": ("number", 0.01)}
LONGEST_FIRST = sorted(UNITS, key=len, reverse=True)


def parsed_unit(unit: str) -> tuple[str, float]:
    """Return what a text's first unit measures, and its factor; the other words only explain."""
    words = unit.replace(" per second", "/s")
    names = (name for name in LONGEST_FIRST if re.match(rf"{re.escape(name)}(?![\w/])", words))
    return UNITS.get(next(names, ""), ("number", 1))
