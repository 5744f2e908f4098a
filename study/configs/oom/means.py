"""Say what a remedy names in the words of the framework that is in use: means.toml has its own keys for each."""

import functools
from pathlib import Path
from typing import Any

from study.core.tables import read_table

MEANS = Path(__file__).with_name("means.toml")


@functools.cache
def means() -> dict[str, dict[str, str]]:
    """Return by name of a remedy what each framework has for it."""
    return read_table(MEANS, dict[str, dict[str, str]], dict)


def framework(said: dict[str, Any]) -> str:
    """Return what divides the training: DeepSpeed, FSDP1, FSDP2 or DDP. Empty: nobody says it."""
    stage = said.get("stage", "")
    if stage == "FSDP":  # as the newest releases do where none is said: commands say so
        return "FSDP2"
    return stage if isinstance(stage, str) else "DeepSpeed"


def in_its_words(remedy: str, said: dict[str, Any]) -> str:
    """Return a remedy with the keys of the framework, or of the trainer, that is in use."""
    used = framework(said)
    plain = f"{used} plain" if said.get("plain") else used
    names = (plain, used, said.get("trainer", ""), "otherwise")
    words = {name: next(row[each] for each in names if each in row) for name, row in means().items()}
    return "; ".join(filter(None, (clause.format(**words) for clause in remedy.split("; "))))
