"""Keeps what formulas find: the claims ask for two thousand predictions, which take seconds.

They are in the user's cache, with the digest of all code and data that they depend on. Other code computes all again.
"""

import dataclasses
import functools
import hashlib
import json

from study.io import files
from study.ledger.arguments import Check
from study.ledger.verdict import Finding
from study.machine import cache, software
from study.predictor.outside.published import FOLDER as OUTSIDE
from study.spec import arms
from study.spec.settings import cache_home

NAME = "predictions"
FOLDERS = (*(arms.PACKAGE / name for name in ("predictor", "spec", "machine", "ledger")), arms.FOLDER, OUTSIDE)
SUFFIXES = (".py", ".toml", ".json", ".yaml", ".zip", ".gz")
MAX_BYTES = 64 * 2**20  # of a file


def find(function: Check, arguments: dict) -> Finding:
    """Return what a formula finds, kept or computed."""
    key = cache.fingerprint([function.__module__, function.__qualname__, arguments])
    known = _kept()
    if key not in known:
        known[key] = dataclasses.asdict(function(**arguments))
        known[key] |= {"is_new": True}
    fields = {name: value for name, value in known[key].items() if name != "is_new"}
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list) and name != "value"}
    return Finding(**fields | lists)


def keep() -> None:
    """Keep what is new."""
    known = _kept()
    if any(each.pop("is_new", False) for each in [*known.values()]):
        cache.keep(cache_home().expanduser(), NAME, {"code": _code(), "findings": known})


def forget() -> None:
    """Compute all again."""
    _kept().clear()


@functools.cache
def _kept() -> dict[str, dict]:
    """Return the findings that this code kept, by their keys."""
    content = cache.answer(cache_home().expanduser(), NAME)
    return content["findings"] if isinstance(content, dict) and content.get("code") == _code() else {}


@functools.cache
def _code() -> str:
    """Return a digest of the code, the data and the libraries that predictions depend on."""
    paths = (path for folder in FOLDERS for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES)
    digest = hashlib.sha256(json.dumps(software.versions(), sort_keys=True).encode())
    for path in paths:
        digest.update(files.read(path, MAX_BYTES))
    return digest.hexdigest()
