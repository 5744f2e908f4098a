"""Find the configs that stand in a pasted text: as JSON, if with comments, or as Python writes a dictionary."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

MOST_TRIES = 6  # braces before a key at which its object may begin
LONGEST_CONFIG = 20_000  # characters


@dataclass(frozen=True)
class Config:
    """A DeepSpeed config. DeepSpeed itself reads Hjson (runtime/config.py), Accelerate and transformers JSON."""

    content: dict
    is_json: bool  # or a dictionary of Python

    @property
    def name(self) -> str:
        """What was read, in words."""
        name = "a DeepSpeed config"
        refused = "with a comment or a trailing comma, which DeepSpeed reads, and Accelerate and the Trainer refuse"
        return name if self.is_json else f"{name} {refused}"


def deepspeed_config(text: str) -> Config | None:
    """Return the first whole DeepSpeed config in a text, written as JSON, if with comments, or as Python writes it."""
    return next(configs_with("zero_optimization", text), None)


def configs_with(key: str, text: str) -> Iterator[Config]:
    """Yield the whole objects in a text that have a key."""
    for match in re.finditer(rf"[\"']{key}[\"']\s*:", text):
        if config := _config_around(text, match.start(), key):
            yield config


def _config_around(text: str, place: int, key: str) -> Config | None:
    """Return the object that has a key at a place of a text."""
    begin = place
    for _ in range(MOST_TRIES):
        begin = text.rfind("{", max(0, place - LONGEST_CONFIG), begin)
        if begin < 0:
            return None
        config = _parsed(text[begin : begin + LONGEST_CONFIG])
        if key in config.content:
            is_assigned = text[:begin].rstrip(" \t(").endswith("=")  # in Python, which has comments
            return replace(config, is_json=config.is_json or is_assigned)
    return None


def _parsed(text: str) -> Config:
    """Return the object with which a text begins; an empty one if there is none."""
    bare = re.sub(r"(?m)(?<=[\s,{}\[\]])(?://|#)[^\n]*$", "", text)
    bare = re.sub(r",(\s*[}\]])", r"\1", bare)
    of_python = bare.replace("'", '"').replace("True", "true").replace("False", "false").replace("None", "null")
    for form in (text, bare, of_python):
        with contextlib.suppress(ValueError, RecursionError):
            return Config(json.JSONDecoder().raw_decode(form)[0], is_json=form != bare or bare == text)
    return Config({}, is_json=False)
