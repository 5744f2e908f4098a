"""Keeps what formulas find: the claims ask for two thousand predictions, which take seconds.

They are in the user's cache, with the digest of all code and data that they depend on. Other code computes all again.
"""

import dataclasses
import functools
import hashlib
import json

from pydantic import TypeAdapter

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
FINDINGS = TypeAdapter(dict[str, Finding])
NEW: set[str] = set()  # keys of findings that are not kept yet


def find(function: Check, arguments: dict) -> Finding:
    """Return what a formula finds, kept or computed."""
    key = cache.fingerprint([function.__module__, function.__qualname__, arguments])
    known = _kept()
    if key not in known:
        known[key] = function(**arguments)
        NEW.add(key)
    return known[key]


def keep() -> None:
    """Keep what is new."""
    if NEW:
        findings = {key: dataclasses.asdict(finding) for key, finding in _kept().items()}
        cache.keep(cache_home().expanduser(), NAME, {"code": _code(), "findings": findings})
        NEW.clear()


def forget() -> None:
    """Compute all again."""
    _kept().clear()


@functools.cache
def _kept() -> dict[str, Finding]:
    """Return the findings that this code kept, by their keys."""
    content = cache.answer(cache_home().expanduser(), NAME)
    known = content["findings"] if isinstance(content, dict) and content.get("code") == _code() else {}
    return FINDINGS.validate_python(known)


@functools.cache
def _code() -> str:
    """Return a digest of the code, the data and the libraries that predictions depend on."""
    paths = (path for folder in FOLDERS for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES)
    digest = hashlib.sha256(json.dumps(software.versions(), sort_keys=True).encode())
    for path in paths:
        digest.update(files.read(path, MAX_BYTES))
    return digest.hexdigest()
