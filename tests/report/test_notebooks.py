"""Notebooks: as they lie in the repository, over real runs, over an empty folder, and the one for Colab."""

import ast
import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, at_home, launch
from packaging.requirements import Requirement
from test_cli import in_this_process

from study.core.errors import Stop
from study.records import store
from study.report import notebook
from study.report import site as report
from study.report.notebook import Book
from study.sweeps import launches
from study.sweeps.launches import options

NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


def sources(path: Path) -> list[str]:
    """The code of a notebook, cell by cell, a line for a shell as a call that IPython makes of it."""
    texts = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]
    return [re.sub(r"^( *)!(.*)$", r"\1_exit_code = shell(f'''\2''')", text, flags=re.MULTILINE) for text in texts]


def execute(name: str, out: Path, *words: str | Path) -> str:
    """Execute a notebook as a user types it, and return what it says, as text. None of that is an error."""
    command = [sys.executable, "-m", "papermill", f"notebooks/{name}.ipynb", out, *words, "--no-progress-bar"]
    for _ in range(3):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if "Kernel died before" not in done.stderr:  # the port that was chosen for it was taken meanwhile
            break
    assert done.returncode == 0, done.stderr
    shown = [output for cell in cells(out) for output in cell.get("outputs", [])]
    return json.dumps([output.get("data", output.get("text")) for output in shown], ensure_ascii=False)


# --- as they lie ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped_and_there_are_parameters(name):
    code = [cell for cell in cells(ROOT / "notebooks" / f"{name}.ipynb") if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    (cell,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    names = {node.targets[0].id for node in ast.parse("".join(cell["source"])).body}
    assert names >= {"colab": {"runs"}, "compare": {"runs", "data", "baseline", "tasks"}}.get(name, {"runs", "data"})


# --- executed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", report.NOTEBOOKS)
def test_over_real_runs(name, site):
    text = (site / f"{name}.html").read_text()
    assert {"stages": 'class="dataframe"'}.get(name, "<figure><svg") in text
    assert "text_cell_render" in text, "the prose is there"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "colab"])
def test_over_nothing(name, home, tmp_path, monkeypatch):
    """What is missing is named, with the command that makes it. Run here: a kernel for each takes seconds."""
    at_home(home, monkeypatch)
    shown, space = [], {}
    monkeypatch.setattr(notebook, "display", lambda content, **_: shown.append(getattr(content, "data", str(content))))
    for source in sources(ROOT / "notebooks" / f"{name}.ipynb"):
        exec(source, space)
        if "runs" in space and "Book" not in source:
            space |= {"runs": str(tmp_path), "data": ""}
    text = "\n".join(shown)
    assert "**0 runs**" in text
    assert name == "claims" or ("Not here yet" in text and "study sweep " in text), "that one needs no run"


def test_as_typed_with_its_parameters(real_runs, tmp_path):
    """`papermill notebooks/compare.ipynb out.ipynb -p runs ...`, what baseline and tasks do, and where files go."""
    words = ("-p", "runs", real_runs, "-p", "baseline", "zero2", "-p", "tasks", "imdb", "-p", "data", tmp_path)
    assert "difference from zero2" in execute("compare", tmp_path / "out.ipynb", *words)
    assert {path.suffix for path in tmp_path.glob("compare-losses-1.*")} == {".csv", ".svg"}


def test_a_folder_that_is_not_there_is_named_in_one_sentence():
    with pytest.raises(Stop, match="runs = 'nosuch' is not a folder") as caught:
        Book("compare", "nosuch")
    assert caught.value._render_traceback_() == [caught.value.sentence]


def run_colab(shell, **parameters) -> None:
    """Run the cells of the notebook here. A line that IPython would give to a shell is given to `shell`."""
    space = {"shell": shell}
    for number, source in enumerate(sources(ROOT / "notebooks" / "colab.ipynb")):
        exec(source, space)
        space |= {} if number else parameters  # the first cell has the parameters


def test_colab_keeps_the_runtime_s_own_packages(monkeypatch, tmp_path):
    """pip is held to the versions that are there, and what it replaced all the same ends the notebook."""
    lines, present = [], {"torch", "ipykernel"}
    versions = {"torch": "2.99", "ipykernel": "6.1"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in present or None)
    monkeypatch.setattr("importlib.metadata.version", versions.get)

    def pip(line: str) -> int:
        lines.append(line)
        present.add("study")
        versions["torch"] = "3.0"
        return 0

    with pytest.raises(AssertionError, match=r"pip replaced \{'torch': '2.99'\}"):
        run_colab(pip, source="https://example.org/some")
    assert "--constraint kept.txt" in lines[0]
    assert (tmp_path / "kept.txt").read_text() == "torch==2.99\nipykernel==6.1\n"


def test_colab_s_own_versions_are_enough():
    """Those of 19 August 2026 (googlecolab/backend-info). The notebook keeps them: a higher bound would end it."""
    own = {"torch": "2.11.0", "ipykernel": "6.17.1", "ipython": "7.34.0", "jupyter-client": "7.4.9"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["train"], *extras["report"]]
    bounds = {each.name: each.specifier for each in map(Requirement, needed)}
    assert [name for name in own if name in bounds and own[name] not in bounds[name]] == []
    assert {"torch", "ipykernel"} < bounds.keys()


def test_colab_on_a_cpu(home, cache, tmp_path, monkeypatch):
    """The same notebook, with a small model: compiled what is needed, three launches, figures, verdicts.

    Its sweep runs in this process, and the launches are forked: fresh ones are almost all imports.
    """
    at_home(home, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which a command changes
    shown = []
    monkeypatch.setattr(notebook, "display", lambda content, **about: shown.append((content, about)))

    def forked(turn, folder, *_):
        monkeypatch.setenv(store.CELL, turn.declared.model_dump_json())
        cell, place = turn, folder.resolve()
        ranks = ("--num_processes", str(cell.ranks)) if cell.ranks else ()
        run = launch(cell.arm, place, *options(cell.settings), cache=cache, launcher=ranks)
        assert run.code == 0, run.output
        return store.load(folder)

    def shell(line: str) -> int | None:
        words = shlex.split(line.removesuffix(" | cat"))
        if "sweep" not in words:
            return subprocess.run(words, cwd=ROOT, check=False).returncode
        return in_this_process(monkeypatch, " ".join(words[words.index("sweep") :]))

    monkeypatch.setattr(launches, "run", forked)
    run_colab(shell, scale="tiny", runs=str(tmp_path / "runs"))
    text = " ".join(str(getattr(content, "data", content)) for content, _ in shown)
    for words in ("**3 runs**, 3 of them done", "S002-13"):
        assert words in text, words
    shown_names = [about["metadata"]["study_name"] for _, about in shown if about]
    assert shown_names == ["losses-1", "parity", "memory-1", "peaks", "claims"]
    assert "the table “seconds”" in text, "two cores teach nothing about GPUs"
