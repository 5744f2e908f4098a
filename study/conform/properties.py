"""Reads the properties from properties.toml. Needs no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.io.parsing import from_toml

DEFAULTS = {
    "model": "Plain",
    "width": 8,
    "layers": 2,
    "updates": 3,
    "passes": 1,
    "clip": 0.0,
    "optimizer": "sgd",
    "groups": "",
    "schedule": "",
    "precision": "fp32",
    "rounded": True,
    "bucket": 64,
    "lengths": [3],
    "scale": 1.0,
}  # of a Case; a test compares them


@dataclass(frozen=True)
class Property:
    """One thing that sharded training must keep."""

    name: str
    sentence: str
    source: str
    case: dict = field(default_factory=dict)  # the settings of its training that are not the defaults
    check: str = "same_training"
    ranks: tuple[int, ...] = (2,)  # of each launch

    def setting(self, name: str) -> Any:
        return self.case.get(name, DEFAULTS[name])


def read() -> list[Property]:
    rows = from_toml(Path(__file__).with_name("properties.toml").read_bytes())["property"]
    return [Property(**row | {"ranks": tuple(row.get("ranks", (2,)))}) for row in rows]
