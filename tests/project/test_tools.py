"""The tools that make what the repository keeps: each begins, and gives what is kept."""

import re
import runpy
import subprocess
from pathlib import Path

import address
import export_tables
import pandas as pd
import pictures
import planted_faults
import pytest
import times

from study.records.runs import load
from tests.conftest import ROOT

WORDS = re.compile(r">([^<>]+)</text>")
DRAWN = [*sorted((ROOT / "reports/answers").glob("*.svg")), ROOT / "examples/zero_by_hand/held.svg"]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_pictures_are_those_of_the_kept_runs(name):
    machine, draw, caption = pictures.PICTURES[name]
    drawn = pictures.style.svg(draw(load(ROOT / "reports" / machine / "runs")), caption)
    kept = (ROOT / f"reports/answers/{name}.svg").read_text()
    assert WORDS.findall(drawn) == WORDS.findall(kept)  # other releases of matplotlib may place them otherwise


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_phone_shows_a_picture_with_letters_of_11_px(path):
    """Of 390 px the margins take 32. Footnotes had 8."""
    drawn = path.read_text()
    (width,) = re.findall(r'viewBox="0 0 (\S+) ', drawn)
    smallest = min(float(each) for each in re.findall(r"font-size: ([\d.]+)px", drawn))
    assert smallest * 358 / float(width) > 11


def test_the_kept_times_are_those_of_the_code():
    kept = pd.read_csv(ROOT / "reports/times.csv")
    pd.testing.assert_frame_equal(kept, times.table(), check_dtype=False, rtol=1e-5)


RUN = [path for path in sorted((ROOT / "tools").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("tool", RUN, ids=lambda tool: tool.stem)
def test_each_tool_explains_itself_and_does_nothing(tool, monkeypatch, capsys):
    text = tool.read_text()
    assert ".parse_args()" in text, "or else it would run here"
    monkeypatch.setattr("sys.argv", [tool.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(tool), run_name="__main__")
    first = text.partition('"""')[2].split()[:3]
    assert end.value.code == 0
    assert " ".join(first) in " ".join(capsys.readouterr().out.split())


def test_each_planted_fault_is_one_change(tmp_path):
    file = tmp_path / "share.py"
    file.write_text("def share(part, whole):\n    if whole == 0:\n        return 1\n    return part / whole\n")
    content, changed = file.read_bytes(), set()
    for fault in planted_faults.faults_in(tmp_path, file):
        text = content[: fault.start] + fault.after.encode() + content[fault.end :]
        changed.add(f"{fault.kind}: {text.decode().splitlines()[fault.line - 1].strip()}")
    assert changed == {
        "branch: if (not whole == 0):",
        "comparison: if (whole != 0):",
        "constant: if whole == (1):",
        "constant: return (2)",
        "return: return (None)",
        "operator: return (part * whole)",
    }


def test_each_reproduction_has_its_line():
    scripts = {path.stem for path in (ROOT / "reproductions").glob("*.py")} - {"as_printed"}
    lines = re.findall(r"^\| `(\w+)` \|", (ROOT / "reproductions/README.md").read_text(), re.MULTILINE)
    assert sorted(lines) == sorted(scripts)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The kept records as a data set."""
    folder = tmp_path_factory.mktemp("published") / "dataset"
    export_tables.export(folder)
    return folder


def test_every_table_has_its_declared_columns(dataset):
    card = (dataset / "README.md").read_text()
    for name, form in export_tables.FORMS.items():
        frame = pd.read_parquet(dataset / "data" / f"{name}.parquet")
        assert len(frame) > 0, name
        expected = {column: export_tables.DTYPES[kind] for column, (kind, _) in form["columns"].items()}
        assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == expected, name
        assert f"data_files: data/{name}.parquet" in card
        assert f"[{name}.columns]\n{next(iter(form['columns']))} = " in card
    runs = pd.read_parquet(dataset / "data/runs.parquet")
    assert not runs.duplicated(["machine", "run"]).any()


def test_the_example_answers_three_questions(dataset, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["load_records.py", str(dataset)])
    exec(compile((ROOT / "examples/load_records.py").read_text(), "load_records.py", "exec"), {})
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("zero2", "P1-28", "deepspeed"))


# Where a dead address would be typed or cited.
UNPUBLISHED = {"", "ADDRESS-OF-THIS-PAGE", "# repository-code: not published yet"}


def addresses(root: Path, places: dict[str, str] = address.PLACES) -> dict[str, list[str]]:
    """Return the addresses in each of the files."""
    found = {}
    for name, pattern in places.items():
        text = (root / name).read_text()
        found[name] = [match.group().removeprefix(match.group(1)) for match in re.finditer(pattern, text)]
    return found


def test_the_tool_knows_each_file_with_the_address():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [
        name for name in listed.split("\0") if name.endswith((".md", ".py", ".toml", ".yaml", ".yml", ".cff", ".ipynb"))
    ]
    named = {name for name in texts if address.UNKNOWN in (ROOT / name).read_text()}
    assert named <= {*address.PLACES, "tools/address.py"}


def test_one_address_stands_everywhere(tmp_path, monkeypatch):
    known = addresses(ROOT)
    for name in ("by_hand", "colab"):
        assert known[f"notebooks/{name}.ipynb"] == [""], "no dead address is the first thing that a visitor runs"
    (only,) = {each for several in known.values() for each in several} - UNPUBLISHED
    assert all(known.values()), known
    for name, links in addresses(ROOT, address.LINKS).items():
        assert [link.startswith(": how](") for link in links] == [True], f"{name}: a link elsewhere promises no Colab"
    for name in {*address.PLACES, *address.LINKS}:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(address, "ROOT", tmp_path)
    for new in ("https://github.com/somebody/zero", only):
        address.main(new)
        assert {each for several in addresses(tmp_path).values() for each in several} == {new}
        in_colab = new.replace("github.com", "colab.research.google.com/github") + "/blob/main/notebooks/by_hand.ipynb"
        assert addresses(tmp_path, address.LINKS) == {name: [f"]({in_colab})"] for name in address.LINKS}
    assert (tmp_path / "README.md").read_text().count("[![tests]") == 1
    with pytest.raises(SystemExit, match="is not an address like"):
        address.main("somewhere")
