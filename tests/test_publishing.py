"""What is published: the data set by the validators of its formats, the citation, submissions by strangers."""

import gzip
import hashlib
import json
import re
import subprocess
import sys

import pandas as pd
import pytest
from conftest import ROOT

from study.publishing import documents, project, tables
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


def test_each_record_is_as_it_was_sealed(dataset):
    for machine in (dataset / "machines").iterdir():
        lines = map(json.loads, (machine / "manifest.jsonl").read_text().splitlines())
        seals = {line["file"]: line["sha256"] for line in lines}
        seen = {}
        for path in machine.glob("records/*.jsonl.gz"):
            for line in map(json.loads, gzip.decompress(path.read_bytes()).splitlines()):
                text = json.dumps(line["record"], indent=1) + "\n"
                seen[line["file"]] = hashlib.sha256(text.encode()).hexdigest()
        assert seen == seals


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
