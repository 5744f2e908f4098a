"""The tables that `study export` writes, and the files that GitHub reads."""

import pandas as pd
import pytest
from conftest import ROOT

from study.report import export

GITHUB = {
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/*[!g].yml",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The kept records as a data set."""
    folder = tmp_path_factory.mktemp("published") / "dataset"
    export.export(folder)
    return folder


def test_every_table_has_its_declared_columns(dataset):
    card = (dataset / "README.md").read_text()
    for name, form in export.FORMS.items():
        frame = pd.read_parquet(dataset / "data" / f"{name}.parquet")
        assert len(frame) > 0, name
        expected = {column: export.DTYPES[kind] for column, (kind, _) in form["columns"].items()}
        assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == expected, name
        assert f"data_files: data/{name}.parquet" in card
        assert f"[{name}.columns]\n{next(iter(form['columns']))} = " in card
    runs = pd.read_parquet(dataset / "data" / "runs.parquet")
    assert not runs.duplicated(["machine", "run"]).any()


def test_the_example_answers_three_questions(dataset, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["load_records.py", str(dataset)])
    exec(compile((ROOT / "examples" / "load_records.py").read_text(), "load_records.py", "exec"), {})
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("zero2", "P1-28", "deepspeed"))


@pytest.mark.parametrize("schema", GITHUB)
def test_what_github_reads_fits_its_schema(schema, capsys):
    main = pytest.importorskip("check_jsonschema", reason="the extra [test] has it: make test installs it").main
    names = [str(path) for path in sorted(ROOT.glob(GITHUB[schema]))]
    assert names
    assert main(["--builtin-schema", schema, *names], standalone_mode=False) == 0, capsys.readouterr().out
