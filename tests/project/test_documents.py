"""The Markdown files: links, anchors and paths lead somewhere, and commands have the options that are given to them."""

import re

import pytest

from study.cli import commands
from study.core.arms import ROOT

FILES = sorted(path for folder in (".", "examples", "reports", "reports/*") for path in ROOT.glob(f"{folder}/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACE = re.compile(r"`((?:accelerate_configs|examples|notebooks|reports|study|tests)/[\w./-]+)`")
MADE = ("reports/build/", "reports/your-machine/")  # by the reader's own commands
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\bstudy ([a-z]+)\b((?:[^`\n#]|\\\n)*)")


def anchors(text: str) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(path):
    text = FENCED.sub("", path.read_text())
    links = [link for link in LINK.findall(text) if not link.startswith("https://")]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    named = [name for name in PLACE.findall(path.read_text()) if not name.startswith(MADE)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def options_by_command() -> dict[str, set[str]]:
    """The options that the documents give to each command."""
    given = {}
    for path in FILES:
        for name, words in COMMAND.findall(path.read_text()):
            if name in commands.COMMANDS:
                given.setdefault(name, set()).update(re.findall(r"(?<!\S)--(?!tyro)[a-z0-9-]+", words))
    return {name: options for name, options in given.items() if options}


def test_commands_have_the_options_that_the_documents_give(capsys):
    given = options_by_command()
    assert len(given) > 9
    for name, options in given.items():
        with pytest.raises(SystemExit):
            commands.start([name, "--help"])
        text = capsys.readouterr().out
        missing = {option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)}
        assert not missing, f"study {name}"
