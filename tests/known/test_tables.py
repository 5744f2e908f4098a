"""A mistake in a row that somebody adds to a table is told with its file, row and key, in no traceback."""

import copy
import json
import re
import textwrap
from pathlib import Path

import pytest

from study.configs import settings
from study.configs.oom import causes
from study.configs.pasted import matching, said, situations, tracebacks, watchdogs, words
from study.conform import suite
from study.core.errors import Stop
from study.core.files import from_toml
from study.known import findings
from tests.cases import for_each
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT

READERS = {  # by the name of a table's path: the module that has it, and what reads it
    "FINDINGS": (findings, findings.texts),
    "HANGS": (findings, findings.causes_of_hangs),
    "CAUSES": (causes, causes.rows),
    "SETTINGS": (settings, settings.descriptions),
    "TRACEBACKS": (tracebacks, tracebacks.messages),
    "SIGNS": (tracebacks, tracebacks.rows),
    "WAITS": (watchdogs, watchdogs.causes_of_waits),
    "SITUATIONS": (situations, situations.situations),
    "SYMPTOMS": (matching, matching.symptoms_table),
    "SAID": (said, said.levels),
    "PROPERTIES_TABLE": (suite, suite.properties),
    "ADAPTERS_TABLE": (suite, suite.adapters),
}


def rows_of(content: dict) -> dict[str, dict]:
    """The rows of a table by their places: some are in groups, others in lists."""
    rows = {}
    for name, value in content.items():
        if isinstance(value, list):
            rows |= {f"{name}.{number}": row for number, row in enumerate(value)}
        elif value and all(isinstance(each, dict) for each in value.values()):
            rows |= {f"{name}.{id}": row for id, row in value.items()}
        else:
            rows[name] = value
    return rows


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What a reader says of its table after a change of its last row."""

    def reading(name, change) -> tuple[str, Stop]:
        module, reader = READERS[name]
        content = copy.deepcopy(from_toml(getattr(module, name).read_bytes()))
        place, row = [*rows_of(content).items()][-1]
        change(row)
        path = tmp_path / "table.json"  # which is read as TOML is
        path.write_text(json.dumps(content))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, path)
            with pytest.raises(Stop) as stop:
                getattr(reader, "__wrapped__", reader)()  # past what it has kept
        return place, stop.value

    return reading


def required(name: str) -> set[str]:
    """The keys that all rows have."""
    module, _ = READERS[name]
    return set.intersection(*map(set, rows_of(from_toml(getattr(module, name).read_bytes())).values()))


@pytest.mark.parametrize("name", READERS)
def test_a_row_that_lacks_a_key_is_named_with_it(name, refused):
    for key in sorted(required(name)):
        place, stop = refused(name, lambda row, key=key: row.pop(key))
        assert f"{place}.{key} is missing" in stop.what
        assert "has its keys" in stop.remedy
    assert required(name) or name == "SETTINGS", "each of its keys may be left out"


@pytest.mark.parametrize("name", READERS)
def test_a_key_that_is_misspelt_is_named_with_the_right_one(name, refused):
    key = next(iter(sorted(required(name))), "sentence")
    wrong = f"{key}s"
    place, stop = refused(name, lambda row: row.update({wrong: row.get(key)}))
    assert f"{place}.{wrong} is not known; did you mean {key!r}?" in stop.what


@pytest.mark.parametrize("name", READERS)
def test_a_value_of_another_type_is_named_with_its_key(name, refused):
    key = next(iter(sorted(required(name))), "sentence")
    place, stop = refused(name, lambda row: row.update({key: {"a": 1}}))
    assert f"{place}.{key} " in stop.what


@pytest.mark.parametrize(("name", "key"), [("TRACEBACKS", "pattern"), ("HANGS", "calls"), ("SITUATIONS", "needs")])
def test_a_pattern_that_is_no_regular_expression_is_named(name, key, refused):
    place, stop = refused(name, lambda row: row.update({key: "(a"}))
    assert f"{place}.{key} is no regular expression of Python: missing )" in stop.what


@for_each("name", ["FINDINGS", "HANGS", "TRACEBACKS", "SITUATIONS"])
@for_each("evidence", ["TODO", "tbd", "https://example.com", "...", "", "n/a", "see FIXME"])
def test_a_placeholder_is_no_evidence(name, evidence, refused):
    place, stop = refused(name, lambda row: row.update(evidence=evidence))
    assert f"{place}.evidence must be what somebody can look up, and no placeholder" in stop.what


def test_a_command_ends_in_a_sentence_and_not_in_a_traceback(monkeypatch, tmp_path, capsys):
    table = tmp_path / "tracebacks.toml"
    table.write_text('[my-error]\npattern = "a"\nsentence = "b"\nremedy = "c"\nevidence = "d"\n')
    monkeypatch.setattr(tracebacks, "TRACEBACKS", table)
    tracebacks.messages.cache_clear()
    code = in_this_process(monkeypatch, "diagnose the flux is inverted")
    tracebacks.messages.cache_clear()
    said = capsys.readouterr().err
    assert code == 2
    assert "tracebacks.toml is not a table that commands can read: my-error.sure is missing." in said
    assert "What to do: correct that row: Message in study/configs/pasted/tracebacks.py has its keys." in said


def test_the_message_that_contributing_shows_is_a_row(monkeypatch, tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^    \[my-error\]\n(?:    .+\n)+", text, re.MULTILINE)[0]
    (tmp_path / "tracebacks.toml").write_text(textwrap.dedent(block))
    monkeypatch.setattr(tracebacks, "TRACEBACKS", tmp_path / "tracebacks.toml")
    monkeypatch.setattr(tracebacks, "messages", tracebacks.messages.__wrapped__)
    (seen,) = tracebacks.errors("RuntimeError: expected 8 shards, got 4")
    assert seen.sentence == "Another number of ranks saved this checkpoint: 4"


def test_words_are_rows_of_forms(monkeypatch, tmp_path):
    (tmp_path / "words.toml").write_text('loss = ["loss"]')
    monkeypatch.setattr(words, "WORDS", tmp_path / "words.toml")
    with pytest.raises(Stop, match="loss must be a text"):
        words.forms.__wrapped__()


def test_no_module_parses_a_table_by_itself():
    """Then a mistake in it would be a traceback."""
    files = [path for path in (ROOT / "study").rglob("*.py") if "import tomllib" in path.read_text()]
    assert files == [Path(ROOT, "study/core/files.py")]
