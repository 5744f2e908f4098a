"""How to cite the study: CITATION.cff, codemeta.json, .zenodo.json, BibTeX, and the addresses of the package.

The forms are in documents.toml, and are filled from publish.toml and pyproject.toml: nothing is written twice.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from study.errors import Stop
from study.io import files
from study.io.parsing import from_toml
from study.io.tables import say
from study.publishing.project import MAX_BYTES, Author, project, version
from study.records import store
from study.spec.arms import ROOT

FORMS = Path(__file__).with_name("documents.toml")
NAME = re.compile(r"\{(\w+)\}")
BIBTEX = re.compile(r"(?<=<!-- bibtex:start -->\n).*?(?=<!-- bibtex:end -->)", re.DOTALL)
ADDRESSES = re.compile(r"(?<=# addresses:start\n).*?(?=# addresses:end)", re.DOTALL)


def citations() -> dict[str, str]:
    """Return the content that each file should have, by its name below the root."""
    block = "".join(f"    {line}\n" for line in bibtex().splitlines())
    addresses = "".join(f'{name} = "{value}"\n' for name, value in filled("urls").items())
    section = f"[project.urls]\n{addresses}\n" if addresses else ""
    texts = {name: json.dumps(filled(name), indent=2, ensure_ascii=False) for name in ("codemeta.json", ".zenodo.json")}
    return {name: f"{text}\n" for name, text in texts.items()} | {
        "CITATION.cff": as_yaml(filled("CITATION.cff")),
        "README.md": BIBTEX.sub(lambda _: block, (ROOT / "README.md").read_text()),
        "pyproject.toml": ADDRESSES.sub(lambda _: section, (ROOT / "pyproject.toml").read_text()),
    }


def release(*, check: bool = False) -> None:
    """Write CITATION.cff, codemeta.json, .zenodo.json, the BibTeX and the package's addresses from publish.toml.

    Args:
        check: Write nothing, and fail if a file is not as it would be written.
    """
    stale = [
        name for name, text in citations().items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text
    ]
    if check and stale:
        raise Stop(f"{', '.join(stale)}: not as publish.toml and pyproject.toml say", "run study release")
    for name in stale:
        files.write_below(ROOT, name, citations()[name].encode())
    say(f"version {version()}: " + (f"written {', '.join(stale)}" if stale else "every file is as it should be"))


def as_yaml(content: dict) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)


def bibtex() -> str:
    """Return the entry for a bibliography."""
    lines = [f"  {name} = {{{value}}}," for name, value in filled("bibtex").items()]
    return "\n".join(["@software{zero_study,", *lines, "}"])


def filled(name: str, **more: Any) -> dict:
    """Return a form of documents.toml with its values and these, without entries of which something is unknown."""
    return _fill(_forms()[name], _values() | more)


@functools.cache
def _forms() -> dict[str, dict]:
    return from_toml(files.read(FORMS, MAX_BYTES))


def _fill(form: Any, values: dict) -> Any:
    if isinstance(form, dict):
        return _known({name: _fill(each, values) for name, each in form.items()})
    if isinstance(form, list):
        known = [filled for each in form if (filled := _fill(each, values)) is not None]
        return known or None
    names = NAME.findall(form)
    if form == f"{{{''.join(names)}}}":
        return values[names[0]]
    return None if any(values[name] is None for name in names) else NAME.sub(lambda match: str(values[match[1]]), form)


def _known(content: dict) -> dict:
    return {name: value for name, value in content.items() if value is not None}


@functools.cache
def _values() -> dict:
    known = project()
    released = str(known.released) if known.released else None
    authors = [author.model_dump() | {"inverted": _inverted(author)} for author in known.author]
    forms = _forms()
    return known.model_dump() | {
        "version": version(),
        "commit": store.commit_of_this_tree()[0] or "unknown",
        "released": released,
        "year": released and released[:4],
        "address": known.repository or known.pages,
        "cff_authors": [_fill(forms["cff_author"], each) for each in authors],
        "creators": [_fill(forms["organization" if each["name"] else "person"], each) for each in authors],
        "related": [_fill(forms["related"], {"repository": known.repository})] if known.repository else None,
        "zenodo_creators": [_fill(forms["zenodo_author"], each) for each in authors],
        "bibtex_authors": " and ".join(f"{{{each['name']}}}" if each["name"] else each["inverted"] for each in authors),
    }


def _inverted(author: Author) -> str:
    return author.name or f"{author.family}, {author.given}"
