"""The Markdown files: links, anchors and paths lead somewhere, and commands have the options that are given to them."""

import functools
import importlib
import re

import pytest

from study.cli import commands
from study.core.arms import ROOT
from study.core.errors import Stop

FILES = sorted(
    path
    for folder in (".", "examples", "reports", "reports/*", "reproductions", "examples/*")
    for path in ROOT.glob(f"{folder}/*.md")
)
PLACE = re.compile(r"`((?:accelerate_configs|examples|notebooks|reports|study|tests)/[\w./-]+)`")
MADE = ("reports/build/", "reports/site", "reports/your-machine/")  # by the reader's own commands
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(path):
    for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", FENCED.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / (name or path.name)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    named = [name for name in PLACE.findall(path.read_text()) if not name.startswith(MADE)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def commands_in(text: str, kind: str) -> set[str]:
    """Return the words of each `study ...` command: in backticks, in a block of a document, or a text of a TOML."""
    found = re.findall(r"`study ([a-z]+\b[^`]*)`", text)
    blocks = [*FENCED.findall(text), *re.findall(r"^    .+$", text.replace("\\\n", " "), re.MULTILINE)]
    if kind == ".md":
        found += re.findall(r"^(?:\s*|.*\$ )study ([a-z]+\b[^#\n]*)", "\n".join(blocks), re.MULTILINE)
    if kind == ".toml":
        found += re.findall(r'"study ([a-z]+\b[^"]*)"', text)
    return {" ".join(words.split()) for words in found}


SPOKEN = [path for pattern in ("**/*.toml", "**/*.py") for path in (ROOT / "study").glob(pattern)]
SPOKEN += [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "examples").glob("*.py"), *ROOT.glob(".github/*.md")]


def test_every_command_that_a_text_gives_is_understood(monkeypatch):
    """Those of documents, notebooks, remedies and errors. `{}` is a value that a program fills in."""
    given = {words for path in (*FILES, *SPOKEN) for words in commands_in(path.read_text(), path.suffix)}
    given = {words for words in given if words.split()[0] in commands.COMMANDS}
    assert len(given) > 60
    assert {"oom {file} --model MODEL {words}", "advise --model gemma2-9b --gpu H100"} <= given
    for name in commands.COMMANDS:
        module, _ = commands.COMMANDS[name]
        command = getattr(importlib.import_module(module), name)
        # It has the options of the command, and does nothing.
        monkeypatch.setattr(f"{module}.{name}", functools.wraps(command)(lambda *_, **__: None))
    refused = {}
    for words in given:
        name, *options = words.partition("|")[0].replace(" {words}", "").split()
        try:
            commands.start([name, *options] if options else ["--help"])
        except Stop as stop:
            refused[words] = stop.what
    # A text may name an option alone, without its value and without what the command is about.
    assert [what for what in refused.values() if not re.search(" needs |must have a value", what)] == []
