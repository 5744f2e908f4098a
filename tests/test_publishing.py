"""What is published: the data set by the validators of its formats, the citation, submissions by strangers."""

import hashlib
import json
import re
import subprocess
import sys

import pandas as pd
import pytest
import yaml
from conftest import ROOT
from shaped import changed, finished, put

from study.errors import Stop
from study.publishing import documents, pages, project, registration, submissions, tables
from study.publishing.dataset import export
from study.publishing.project import Author

LACKING = "the extra [publish] has it: make test installs it"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The kept records as a data set."""
    folder = tmp_path_factory.mktemp("published") / "dataset"
    export(folder)
    return folder


def test_every_table_has_its_declared_columns(dataset):
    for name, form in tables.forms().items():
        frame = pd.read_parquet(dataset / "data" / f"{name}.parquet")
        assert len(frame) > 0, name
        expected = {column: tables.DTYPES[kind] for column, (kind, _) in form.columns.items()}
        assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == expected, name
        schema = (dataset / "SCHEMA.md").read_text()
        assert all(f"| `{column}` |" in schema for column in form.columns)
    runs = pd.read_parquet(dataset / "data" / "runs.parquet")
    assert not runs.duplicated(["machine", "run"]).any()
    predicted = pd.read_parquet(dataset / "data" / "predictions.parquet")
    outside = pd.read_parquet(dataset / "data" / "outside.parquet")
    assert set(predicted["row"]) <= set(outside["row"])
    assert sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file()) < 20e6


def test_croissant_is_valid_and_loads(dataset):
    croissant = pytest.importorskip("mlcroissant", reason=LACKING)
    loaded = croissant.Dataset(str(dataset / "croissant.json"))
    assert not loaded.metadata.ctx.issues.errors
    claims = pd.read_parquet(dataset / "data" / "claims.parquet")
    assert [row["claims/id"].decode() for row in loaded.records("claims")] == list(claims["id"])
    for file in loaded.metadata.file_objects:
        assert hashlib.sha256((dataset / file.content_url).read_bytes()).hexdigest() == file.sha256


def test_each_machine_is_an_ro_crate(dataset):
    crates = pytest.importorskip("rocrate.rocrate", reason=LACKING)
    for machine in (dataset / "machines").iterdir():
        crate = crates.ROCrate(machine)
        actions = [each for each in crate.contextual_entities if each.type == "CreateAction"]
        assert actions
        assert all((machine / action["result"].id).is_file() for action in actions)
        assert crate.root_dataset["license"].id.endswith("Apache-2.0")


def test_the_example_answers_three_questions(dataset, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["load_records.py", str(dataset)])
    exec(compile((ROOT / "examples" / "load_records.py").read_text(), "load_records.py", "exec"), {})
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("zero2", "refuted", "deepspeed"))


def test_the_citation_is_as_publish_toml_says_and_valid():
    for name, text in documents.citations().items():
        assert (ROOT / name).read_text() == text, f"{name}: run study release"
    pytest.importorskip("check_jsonschema", reason=LACKING)
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format", str(ROOT / "CITATION.cff")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_unknown_names_and_addresses_are_in_one_file_only():
    documents.release(check=True)
    odd = re.compile(r"\b(TODO|FIXME|XXX|Jane Doe|John Doe|your-org|example-org|10\.5281/zenodo\.X+)\b")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    documents_of_ours = [name for name in names if name.endswith((".md", ".cff", ".json", ".toml", ".yml", ".yaml"))]
    documents_of_ours = [name for name in documents_of_ours if not name.startswith(("reports/", "tests/"))]
    assert {name: found[0] for name in documents_of_ours if (found := odd.search((ROOT / name).read_text()))} == {}


def test_a_person_in_publish_toml_is_in_every_document(monkeypatch):
    person = Author(given="Ada", family="Lovelace", orcid="0000-0000-0000-0001")
    known = project.project().model_copy(update={"author": (person,), "repository": "https://example.org/a/b"})
    monkeypatch.setattr(documents, "project", lambda: known)
    documents._values.cache_clear()
    texts = documents.citations()
    documents._values.cache_clear()
    assert all("Lovelace" in texts[name] for name in ("CITATION.cff", "codemeta.json", ".zenodo.json"))
    assert 'Repository = "https://example.org/a/b"' in texts["pyproject.toml"]
    with pytest.raises(ValueError, match="either a name, or given and family"):
        Author(given="Ada")


def submitted(tmp_path, *records):
    into = tmp_path / "submissions" / "mine"
    submissions.submit((put(tmp_path / "runs", *records),), into=into)
    return into


def test_a_submission_of_a_stranger_passes_its_check(tmp_path, capsys):
    ours = finished("a", arm="ddp", argv=["/home/someone/train.py"])
    into = submitted(tmp_path, ours, finished("b", arm="zero2"))
    submissions.submit(check=into)
    assert "2 records, 0 reasons to refuse." in capsys.readouterr().out
    assert not any("someone" in path.read_text() for path in into.rglob("*") if path.is_file())
    system = json.loads((into / "system.json").read_text())
    assert system["number_of_nodes"] == 1
    assert system["accelerators_per_node"] == 0


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "system.json",
            lambda text: text.replace('"number_of_nodes": 1', '"number_of_nodes": 8'),
            "system.json is not",
        ),
    ],
)
def test_a_forged_submission_is_refused_with_its_reason(name, content, reason, tmp_path, capsys):
    into = submitted(tmp_path, finished("a", arm="ddp"), finished("b", arm="zero2"))
    text = (into / name).read_text()
    assert content(text) != text
    (into / name).write_text(content(text))
    with pytest.raises(Stop, match="is refused"):
        submissions.submit(check=into)
    assert reason in capsys.readouterr().out


def test_what_is_no_part_of_a_submission_is_refused(tmp_path, capsys):
    into = submitted(tmp_path, finished("a", arm="ddp"))
    (into / "setup.py").write_text("")
    (into / "runs" / "away").symlink_to("/etc")
    with pytest.raises(Stop, match="is refused"):
        submissions.submit(check=into)
    printed = capsys.readouterr().out
    assert "setup.py is not part of a submission" in printed
    assert "runs/away is a link" in printed


def test_impossible_records_cannot_be_submitted(tmp_path):
    forged = changed(finished("a", arm="zero2"), loss__train__0=-1.0)
    with pytest.raises(Stop, match=r"do not pass.*loss"):
        submitted(tmp_path, forged)


@pytest.mark.parametrize("kind", ["workflows", "ISSUE_TEMPLATE"])
def test_what_github_reads_fits_its_schemas(kind):
    pytest.importorskip("check_jsonschema", reason=LACKING)
    paths = sorted((ROOT / ".github" / kind).glob("*.yml"))
    assert len(paths) >= 4
    schema = "vendor.github-workflows" if kind == "workflows" else "vendor.github-issue-forms"
    names = [str(path) for path in paths if path.name != "config.yml"]
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


STARTS = re.findall(r"^\| `study (.+?)` \| \d+ \| (.+?) \|$", (ROOT / "ARTIFACT.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [each if number < 1 else pytest.param(*each, marks=pytest.mark.slow) for number, each in enumerate(STARTS)],
)
def test_the_ten_minutes_of_the_artifact_show_what_it_says(words, expected):
    assert len(STARTS) == 9
    command = [sys.executable, "-m", "study.cli", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected in " ".join(done.stdout.split())


def test_a_changed_tolerance_changes_the_registration(monkeypatch):
    before = registration.registration()
    heads = registration.coverage(registration.FOLDER)
    heads[0].claim[0]["tolerance"] = 0.123
    monkeypatch.setattr(registration, "coverage", lambda folder: heads)
    after = registration.registration()
    assert [name for name in before if before[name] != after[name]] == ["claims and tolerances"]


def test_the_changelog_begins_with_the_release():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {project.version()}" in text
    assert registration.MARK in text


def test_pages_have_the_head_of_a_space_whose_first_page_is_the_calculator(tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "calculator.html").write_text("<p>")
    for _ in range(2):
        pages.pages(tmp_path / "report", into=tmp_path / "public")
    head = yaml.safe_load((tmp_path / "public" / "README.md").read_text().split("---")[1])
    assert (head["sdk"], head["app_file"]) == ("static", "calculator.html")
    assert (tmp_path / "public" / ".nojekyll").exists()
    with pytest.raises(Stop, match="has no calculator"):
        pages.pages(tmp_path, into=tmp_path / "other")
