"""Texts for people use the field's words, as CONTRIBUTING says: documents, tables of sentences, help and messages."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from study.core.arms import ROOT
from tests.cases import for_each

FOLDERS = (
    "*.md",
    "reports/*.md",
    "reports/*/README.md",
    "reports/answers/*.md",
    "examples/**/*.md",
    "reproductions/*.md",
)
FOLDERS += (
    "tools/*.md",
    "study/*.md",
    "notebooks/*.ipynb",
    "study/**/*.toml",
    "study/**/*.py",
    "study/report/templates/*.html",
)
# A history tells what was said then.
FILES = sorted(
    {path for each in FOLDERS for path in ROOT.glob(each)} - {ROOT / "CHANGELOG.md", ROOT / "reports/log.md"}
)
# What a text quotes, what a program compares with, and what only its readers in this repository see.
NOT_OURS = ("quote", "theirs", "pattern", "words", "said", "text", "without", "also", "needs", "where", "when", "signs")
NOT_OURS += ("anywhere", "configs", "tokens", "script")
WAYS = r"(?:stages? \d|ZeRO|DDP|FSDP|DeepSpeed|zero\d|autocast|torch_autocast|every arm|other arms|each arm)"
STRANGE = {
    "under": rf"\bunder {WAYS}",  # with
    "mend": r"\bmend(?:s|ed|ing)?\b",  # fix
    "bring": r"\bbrings?\b|\bbrought back\b",
    "lack": r"\black(?:s|ed|ing)?\b(?! of)",  # has no
    "the host decides": r"\bhost decides",
    "kept back": r"\bkept back\b",
    "of those that": r"\bof those that\b",
    "hold to": r"\bh[eo]lds? (?:each|every|a|the) [\w ]{0,25}? to (?:one|DDP)",
    # reads as translated
    "it is of": r"\b(?:[Ii]t|[Tt]hat|[Tt]hey|numbers|GB) (?:is|are) of (?:an?|the|any|this|one|two|our)\b",
    "so it is with": r"\bSo it is with\b|\bit holds: |\bwould sign\b",
    "lose": r"\blos(?:es|t) (?:what|a|the) (?:one|parameter|small)",
    # micro-batch
    "pass": r"\b(?:g|\d|two|four|six|several|all|more|fewer|many|unequal) passes\b",
    "passes of a step": r"(?<!forward )(?<!backward )\bpasses (?:of|in|per) (?:a|an|the) (?:step|update)",
    "a pass": r"\b(?:per|each|last|every|one|in a) pass\b(?! (?:over|through))",
    # sequence
    "rows of a step": r"\brows (?:per|of|in) (?:a |an |the )?(?:micro-batch|pass|rank|step|update)",
    "row": r"\b(?:same|unequal|own|fewer) rows\b|\brows x\b|\brows? of \d+ tokens|\btokens (?:per|of|in) a? ?row",
}


def said_in_toml(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from said_in_toml(each) if key not in NOT_OURS else ()
    elif isinstance(value, list):
        for each in value:
            yield from said_in_toml(each)
    elif isinstance(value, str) and " " in value:
        yield value


def said_in_python(path: Path) -> Iterator[str]:
    """Every text but docstrings, of which those of commands and of options are printed."""
    tree = ast.parse(path.read_text())
    printed = "cli" in path.relative_to(ROOT).parts
    for node in ast.walk(tree):
        of_class = isinstance(node, ast.ClassDef) and any("Flags" in ast.dump(base) for base in node.bases)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            is_public = printed and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if not (is_public or of_class):
                node.body = node.body[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def said(path: Path) -> Iterator[str]:
    if path.suffix == ".toml":
        yield from said_in_toml(tomllib.loads(path.read_text()))
    elif path.suffix == ".py":
        yield from said_in_python(path)
    elif path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        yield re.sub(r"^    .*$|<script.*?</script>|\{%.*?%\}", "", path.read_text(), flags=re.MULTILINE)


def strange(text: str) -> list[str]:
    """The words of a text that its readers would have to learn. Code and what is in quotation marks is not ours."""
    plain = re.sub(r"`[^`]*`|“[^”]*”|\"[^\"]*\"", "", " ".join(text.split()))
    return [found[0] for pattern in STRANGE.values() for found in re.finditer(pattern, plain, re.IGNORECASE)]


@for_each("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_for_people_have_the_words_of_the_field(path):
    assert [(word, text[:160]) for text in said(path) for word in strange(text)] == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("DDP and stage 3, but not under stage 2", "under stage 2"),
        ("take fewer rows per pass", "per pass"),
        ("0.18.3 mended it", "mended"),
        ("each loss is that of one pass", "one pass"),
        ("ranks read the same rows", "same rows"),
        ("one row of 2048 tokens", "row of 2048 tokens"),
    ],
)
def test_a_strange_word_is_found(text, word):
    assert word in strange(text)


@pytest.mark.parametrize(
    "text", ["in the backward pass", "`--passes 4`", "the rows of a table", "under a cap of 24 GiB"]
)
def test_a_word_of_everybody_is_none(text):
    assert strange(text) == []
