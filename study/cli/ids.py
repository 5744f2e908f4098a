"""What has a name: sentences, arms, words, keys of configs, claims and symptoms; and the command that answers it."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from study.configs.pasted.matching import symptom_of_word
from study.configs.sentences import sentences
from study.configs.settings import descriptions
from study.core.arms import of_stage
from study.core.glossary import meanings, of_arms
from study.core.library_defaults import known_libraries, paths
from study.core.text import short
from study.known.explained import Explained
from study.known.faults import table
from study.ledger import search
from study.records.compare import REASONS

ENDS = ("", "s", "es", "e", "d", "ed", "ing", "ion", "ism")  # in which forms of a word differ


def key(id: str) -> str:
    return id.strip("[]").lower().replace("_", "-").replace(" ", "-")


def row_of(id: str, kind: str, sentence: str) -> dict[str, str]:
    return {"id": id, "kind": kind, "sentence": sentence}


@functools.cache
def by_key() -> dict[str, Explained]:
    """Return sentences by their ids; those of a setting also by its name, and by the keys that files have for it."""
    by_id = {key(each.id): each for each in sentences()}
    by_name = {id.removeprefix("differs-"): each for id, each in by_id.items()}
    by_path: dict[str, Explained] = {}
    for of in descriptions().values():
        if of.sentence:
            of_files = (of.deepspeed, of.accelerate, of.trainer, *of.keys)
            by_path |= {key(path): by_id[key(of.id)] for path in of_files if path}
    return by_path | by_name | by_id


@functools.cache
def words() -> dict[str, dict[str, str]]:
    """Return what arms, components of memory and words of the guide mean, by their names."""
    rows = {key(name): row_of(name, "component", why) for name, why in REASONS.items()}
    rows |= {key(name): row_of(name, "arm", sentence) for name, sentence in of_arms().items()}
    for several, meaning in meanings().items():
        rows |= {key(word): row_of(several, "word", meaning) for word in several.split(", ")}
    return rows


def forms(typed: str) -> list[str]:
    """Return how a word may be written in the glossary: sharded and sharding as shard, recompute as recomputed."""
    return list(dict.fromkeys(typed.removesuffix(end) + other for end in ENDS for other in ENDS))


def word(id: str) -> dict[str, str] | None:
    """Return the word or the arm that is called so, in any form, or without hyphens: gradient, sharding, allreduce."""
    known = {name.replace("-", ""): row for name, row in words().items()} | words()
    names = (key(id), key(of_stage(id)), *forms(key(id)))
    return next((known[each] for each in names if each in known), None)


def words_with(part: str) -> list[dict[str, str]]:
    """Return the words with a part in any form: gradient accumulation of accumulate. None of an id in brackets."""
    typed = part.lower().replace("_", "-").replace(" ", "-")
    asked = re.compile(rf"\b(?:{'|'.join(map(re.escape, forms(typed)))})\b")
    rows = [row for name, row in words().items() if row["kind"] == "word" and part and asked.search(name)]
    return list({row["id"]: row for row in rows}.values())


@functools.cache
def keys() -> dict[str, dict[str, str]]:
    """Return of keys of configs, by their dotted paths, whose they are."""
    rows = {key(path): row_of(path, "key", "a key of another program's config") for path in table().other_keys}
    for library, known in known_libraries().items():
        for path, default in paths(library):
            of = f"a key of {library} {known['version']}".replace("trainer", "transformers' Trainer,")
            by_default = f"by default {short(default)}" if default is not None else "without a fixed default"
            rows[key(path)] = row_of(path, "key", f"{of}, {by_default}")
    for fault in table().fault:
        groups: Any = fault.conditions.get("keys", [])
        for path in itertools.chain(*groups):
            rows.setdefault(
                key(path), row_of(path, "key", f"a key that the fault {fault.id} of {fault.package} asks for")
            )
    return rows


def of_setting(id: str) -> list[str]:
    """Return what the setting of a sentence changes, and the keys of configs that set it, with their defaults."""
    for each in descriptions().values():
        if each.id == id:
            rows = [keys().get(key(path or "")) for path in (each.deepspeed, each.accelerate, each.trainer)]
            return [f"Changes: {each.changes}", *(f"{row['id']}: {row['sentence']}" for row in rows if row)]
    return []


def answering(asked: Sequence[str]) -> str:
    """Return the commands that answer these ids, as a remedy; empty if one of them names nothing."""
    commands = []
    for id in asked:
        if search.is_name(id.strip("[]")):
            commands.append(f"`study claims {id.strip('[]')}`")
        elif word(id) or key(id) in by_key() | keys():
            commands.append(f"`study explain {id}`")
        elif symptom_of_word(id):
            commands.append(f"`study stack --symptom {id}`")
        else:
            return ""
    return f"ask {' and '.join(commands)}" if commands else ""
