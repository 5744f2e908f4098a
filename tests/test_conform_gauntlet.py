"""The gauntlet and its planted faults, and the texts of issues."""

import ast
import json
from pathlib import Path

import pandas as pd
import pytest
from packaging.version import Version

from study.cli.commands import start
from study.conform import gauntlet, suite, upstream
from study.conform.suite import PROPERTIES, table
from study.errors import Stop
from study.report.topics import conformance

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "reports" / "conform" / "known"


def test_bugs_are_whole():
    bugs = gauntlet.bugs()
    assert len(bugs) >= 15
    assert len({(bug.thread, bug.property) for bug in bugs}) == len(bugs)
    for bug in bugs:
        assert bug.property in PROPERTIES or bug.unseen, bug.thread
        assert bug.adapter().path.is_file()
        assert [bug.before, bug.after] == sorted((bug.before, bug.after), key=Version)


def test_faults_can_be_planted():
    faults = gauntlet.faults()
    assert set(table("faults")["first"]) <= set(PROPERTIES)
    assert len(faults) == 40
    assert len({fault.sentence for fault in faults}) == 40
    for fault in faults:
        path, source = fault.planted()
        assert source != path.read_text(), fault.sentence
        ast.parse(source)
        assert fault.adapter in suite.ADAPTERS


def test_a_fault_that_does_not_fit_the_installed_library_is_a_sentence():
    fault = gauntlet.Fault("torch/nn/parallel/distributed.py", "not in the file", "", "ddp", "Says")
    with pytest.raises(Stop, match="0 times instead of once"):
        fault.planted()


def test_a_bug_is_caught_if_only_the_release_before_fails(monkeypatch, tmp_path, capsys):
    statuses = {"0.1": "fails", "0.2": "holds", "0.3": "fails"}
    bugs = [
        gauntlet.Bug("a/b#1", "One", "0.1", "0.2", property="sgd"),
        gauntlet.Bug("a/b#2", "Two", "0.1", "0.3", property="sgd"),
        gauntlet.Bug("a/b#3", "Three", "0.1", "0.2", unseen="needs a GPU"),
    ]

    def cell(adapter, wanted, release, *_):
        return [suite.Result(adapter.name, "sgd", statuses[release])]

    monkeypatch.setattr(gauntlet, "bugs", lambda: bugs)
    monkeypatch.setattr(gauntlet, "installed", lambda library, release, overlays: release)
    monkeypatch.setattr(gauntlet, "cell", cell)
    gauntlet.gauntlet(overlays=tmp_path, out=tmp_path)
    rows = json.loads((tmp_path / "bugs.json").read_text())
    assert [row["caught"] for row in rows] == [True, False, False]
    assert rows[2]["words"] == "needs a GPU"
    assert "1 of 3 are seen before their fix, and not after it." in capsys.readouterr().out


def test_what_was_seen_is_of_these_bugs_and_faults():
    rows = {row["thread"]: row for row in json.loads((KNOWN / "bugs.json").read_text())}
    assert {thread: (row["before"], row["after"], row["property"]) for thread, row in rows.items()} == {
        bug.thread: (bug.before, bug.after, bug.property) for bug in gauntlet.bugs()
    }
    assert sum(row["caught"] for row in rows.values()) >= 12
    explained = {bug.thread for bug in gauntlet.bugs() if bug.unseen}
    assert {thread for thread, row in rows.items() if not row["caught"]} == explained
    planted = json.loads((KNOWN / "faults.json").read_text())
    assert [row["sentence"] for row in planted] == [fault.sentence for fault in gauntlet.faults()]
    assert sum(bool(row["caught_by"]) for row in planted) >= 34


def test_the_pages_have_a_row_for_what_differs():
    rows = conformance.table()
    assert set(conformance.counts(rows)["adapter"]) >= {"ddp", "fsdp2", "zero1", "zero2", "zero3"}
    assert "empty" in set(conformance.differing(rows)["property"])
    assert "Nothing fails with" in conformance.sentence(rows)
    assert len(conformance.bugs()) == len(gauntlet.bugs())
    assert str(sum(row["caught"] for row in json.loads((KNOWN / "bugs.json").read_text()))) in conformance.power()


def test_the_libraries_own_tests_are_shown_for_faults_of_ours():
    kept = pd.read_csv(KNOWN / "own_tests.csv")
    assert len(kept) == len(conformance.own_tests()) >= 6, "a sentence is not that of a fault"
    assert set(kept["failing"].isna()) == {True, False}, "some find their fault, and some do not"


@pytest.mark.slow
def test_a_planted_fault_is_found(tmp_path):
    (fault,) = [each for each in gauntlet.faults() if each.sentence.startswith("FSDP2 sums gradients")]
    found = gauntlet.planted_into(fault, ("one-update", "weights-before"), tmp_path)
    assert found["caught_by"] == ["one-update"]
    assert found["tried"] == 2


# --- issues --------------------------------------------------------------------------------------------------------


def test_an_issue_of_a_property_has_what_a_maintainer_needs(tmp_path):
    start(["report-bug", "zero3-hpz/checkpoint-frozen", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    for needed in ("State: not filed", "deepspeed 0.19.8", "**Expected**", "the loss of update 1", "LoRA", "#7707"):
        assert needed in text
    script = text.partition("```python\n")[2].partition("```")[0]
    ast.parse(script)
    assert "import study" not in script
    assert "from study" not in script


def test_an_issue_of_a_reproduction_runs_it(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text('"""Claimed: one\nthing.\n\nWhat happens: another.\n"""\n\nprint(7)\n')
    monkeypatch.setattr(upstream, "REPRODUCTIONS", tmp_path)
    upstream.report_bug(("mine",), out=tmp_path)
    text = (tmp_path / "mine.md").read_text()
    assert "**Expected**: one thing." in text
    assert "What happens: another. Printed now: `7`" in text


def test_every_failure_with_the_installed_libraries_has_an_issue_or_is_documented():
    """All failures of one explanation share an issue."""
    for name, (_, why, _) in upstream.failures().items():
        assert why, name
        assert bool(why.matters) == (why.kind != "documented difference"), name
    kept = {path.stem for path in (ROOT / "reports" / "upstream").glob("*.md")}
    assert {name.replace("/", "-") for name in upstream.one_of_each()} == kept


def test_a_failure_that_does_not_exist_is_a_sentence():
    with pytest.raises(Stop, match="'zero2/sgd' is neither a failure nor a reproduction"):
        upstream.report_bug(("zero2/sgd",))
