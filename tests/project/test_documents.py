"""The Markdown files: links, anchors and paths lead somewhere, and commands have the options that are given to them."""

import re

import pytest

from study.cli import commands
from study.core.arms import ROOT

FILES = sorted(path for folder in (".", "examples", "reports", "reports/*") for path in ROOT.glob(f"{folder}/*.md"))
PLACE = re.compile(r"`((?:accelerate_configs|examples|notebooks|reports|study|tests)/[\w./-]+)`")
MADE = ("reports/build/", "reports/your-machine/")  # by the reader's own commands
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\bstudy ([a-z]+)\b((?:[^`\n#]|\\\n)*)")


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


def test_commands_have_the_options_that_the_documents_give(capsys):
    given: dict[str, str] = {}
    for name, words in [each for path in FILES for each in COMMAND.findall(path.read_text())]:
        given[name] = given.get(name, "") + words
    assert len(given.keys() & commands.COMMANDS) > 9
    for name in given.keys() & commands.COMMANDS:
        with pytest.raises(SystemExit):
            commands.start([name, "--help"])
        known = re.findall(r"(?<![\w-])--[\w-]+", capsys.readouterr().out)
        assert set(re.findall(r"(?<!\S)--(?!tyro)[a-z0-9-]+", given[name])) <= set(known), f"study {name}"
