"""Notebooks: as they lie in the repository, over real runs, over an empty folder, and the one for Colab."""

import importlib.util
import itertools
import json
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter

import IPython.display
import keep_outputs
import nbformat
import pytest

from study.core.errors import Stop
from study.ledger import texts
from study.predict.estimate import HOST_PROCESS_BYTES
from study.records import runs as records
from study.report import notebook
from study.report.notebook import Book
from study.report.site import BY_HAND, BY_HAND_FOLDER
from study.report.topics import documents, stages
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT, ranks_of
from tests.shaped import failed, finished, put

NOTEBOOKS = {path.stem: json.loads(path.read_text())["cells"] for path in (ROOT / "notebooks").glob("*.ipynb")}


def sources(name: str) -> list[str]:
    """The code of a notebook, cell by cell, a line for a shell as a call that IPython makes of it."""
    texts = ["".join(cell["source"]) for cell in NOTEBOOKS[name] if cell["cell_type"] == "code"]
    return [re.sub(r"^( *)!(.*)$", r"\1_exit_code = shell(f'''\2''')", text, flags=re.MULTILINE) for text in texts]


@pytest.fixture
def execute(monkeypatch):
    """A function that runs the cells of a notebook here, and returns what they show and the names of that.

    A kernel for each would take seconds. A line that IPython would give to a shell is given to `shell`.
    """

    def run(name: str, shell=None, **parameters) -> tuple[str, list[str]]:
        shown: list = []
        monkeypatch.setattr(notebook, "display", lambda content, **about: shown.append((content, about)))
        if name != "colab":  # each figure is also drawn as SVG
            monkeypatch.setattr(notebook, "png", lambda drawing: "")
        space = {"shell": shell}
        for number, source in enumerate(sources(name)):
            exec(source, space)
            if number == 0:  # the cell with the parameters
                assert not parameters.keys() - space.keys()
                space |= parameters
        text = "\n".join(str(getattr(content, "data", content)) for content, _ in shown)
        return text, [about["metadata"]["study_name"] for _, about in shown if about]

    return run


def test_the_sections_by_hand_need_no_study(monkeypatch):
    """As in the environment of examples/zero_by_hand: the drawing says what is missing."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "study"]:
        monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    monkeypatch.setattr(IPython.display, "display", lambda content: said.append(content.data))
    titles = [number for number, cell in enumerate(NOTEBOOKS["stages"]) if "## 5." in "".join(cell["source"])]
    space: dict = {}
    for cell in NOTEBOOKS["stages"][: titles[0]]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    assert said[0].startswith("The drawing needs the study: ")
    assert "times" in space, "the last of section 4"
    following = next(cell for cell in NOTEBOOKS["stages"][titles[0] :] if cell["cell_type"] == "code")
    with pytest.raises(Exception, match="needs the study, which `make notebook` installs") as stopped:
        exec("".join(following["source"]), space)
    assert stopped.value._render_traceback_() == [str(stopped.value)], "a sentence, and no traceback"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_title_and_a_question_come_first_then_the_parameters(name):
    begins = "".join(NOTEBOOKS[name][0]["source"])
    assert begins.startswith("# ")
    assert "\n\n**Question.** " in begins
    first, *_ = [cell for cell in NOTEBOOKS[name] if cell["cell_type"] == "code"]
    assert first["metadata"]["tags"] == ["parameters"]


# --- outputs that are kept -------------------------------------------------------------------------------------------


def outputs(name: str) -> list[dict]:
    return [output for cell in NOTEBOOKS[name] for output in cell.get("outputs", [])]


def test_each_notebook_shows_what_it_gives():
    assert keep_outputs.RUNS.keys() == NOTEBOOKS.keys()


@pytest.mark.parametrize("name", ["compare", "replicate"])
def test_two_numbers_of_two_records_are_divided_in_plain_sight(name):
    """And the table of the same notebook has the same numbers."""
    (cell,) = [cell for cell in NOTEBOOKS[name] if cell["id"] == f"{name}-divided"]
    assert cell["metadata"]["tags"] == ["open"], "the built page shows its lines"
    space: dict = {}
    *lines, last = "".join(cell["source"]).splitlines()
    exec("\n".join(lines), space)
    assert [repr(eval(last, space))] == ["".join(each["data"]["text/plain"]) for each in cell["outputs"]]
    shown = "".join("".join(each["data"].get("text/html", "")) for each in outputs(name))
    expected = {"compare": [f"{space[arm] / 1e6:.1f} MB" for arm in ("zero2", "ddp")], "replicate": ["1.5 "]}[name]
    assert all(each in shown for each in expected), expected


@pytest.mark.parametrize("name", keep_outputs.RUNS)
def test_kept_outputs_are_of_the_present_cells(name):
    book = nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4)
    assert book.metadata["kept"] == keep_outputs.digest(book), "a cell or an output is another: make outputs"
    assert re.search(r"made on \d+ \w+ \d{4} by `make outputs`", book.cells[-1].source)
    assert keep_outputs.RUNS[name] in book.cells[-1].source


def test_a_changed_cell_or_output_is_noticed():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[])])
    before = keep_outputs.digest(book)
    book.cells[0].source = "2"
    after = keep_outputs.digest(book)
    book.cells[0].outputs = [nbformat.v4.new_output("display_data", {"text/plain": "2"})]
    assert len({before, after, keep_outputs.digest(book)}) == 3


@pytest.mark.parametrize("name", keep_outputs.RUNS)
def test_kept_outputs_are_small_and_can_be_seen_on_github(name):
    """GitHub shows tables and pictures, and neither SVG nor scripts. Nothing names a folder of the machine."""
    kept = outputs(name)
    assert len(kept) >= 4
    for output in kept:
        forms = output["data"]
        assert forms.keys() <= {"text/plain", "text/html", "text/markdown", "image/png"}
        assert len(forms.get("image/png", "")) * 3 / 4 < 60_000
        words = "".join(map("".join, (forms.get("text/html", ""), forms.get("text/plain", ""))))
        assert not re.search(r"<svg|<script|(?<![\w.<])/\w+/\w|<IPython|Traceback", words), words[:200]
        assert len(words) < 60_000


@pytest.mark.parametrize("name", keep_outputs.RUNS)
def test_no_command_that_is_shown_writes_into_the_kept_records(name):
    shown = json.dumps(NOTEBOOKS[name])
    assert not re.search(r"--runs reports|To make it: `[^`]*reports/", shown)


@pytest.mark.parametrize("protocol", notebook.ON_A_GPU)
def test_without_a_gpu_kept_seconds_are_shown_and_labelled(protocol, tmp_path, monkeypatch):
    said, shown = [], []
    monkeypatch.setattr(notebook, "say", said.append)
    monkeypatch.setattr(Book, "table", lambda _, rows, name: shown.append(rows))
    book = Book("compare", str(tmp_path))
    book.seconds(book.runs, "seconds", protocol)
    assert said[-1].startswith("> **Kept records:** no run here is of a GPU.")
    assert re.search(rf"These are of {notebook.ON_A_GPU[protocol]}, from 1 x NVIDIA H[12]00", said[-1])
    assert f"`study sweep {protocol} --runs {tmp_path}`" in said[-1]
    assert len(shown[0]) >= 2
    assert shown[0]["s/step"].notna().all()
    monkeypatch.setattr(notebook, "ROOT", tmp_path)  # as in a wheel
    book.seconds(book.runs, "seconds", protocol)
    assert said[-1].startswith("> **Needs a GPU:** the table “seconds”.")
    assert len(shown) == 1


def test_new_runs_go_where_the_notebook_looks_and_never_into_the_kept_records(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "say", lambda _: None)
    assert Book("compare", str(tmp_path)).own == str(tmp_path)
    assert Book("compare", str(ROOT / "reports/cpu-2core/runs/lora")).own == notebook.DEFAULT


def test_what_github_cannot_show_is_left_out():
    def kept(**forms) -> dict:
        output = nbformat.v4.new_output("display_data", {name.replace("_", "/"): text for name, text in forms.items()})
        return keep_outputs.as_kept(output).data

    assert kept(text_html="<figure><svg>", image_png="aGk=", text_plain="losses").keys() == {"image/png", "text/plain"}
    assert kept(text_html="<script>") == {"text/plain": keep_outputs.MOVES}
    still = kept(text_html="<script>", image_png="aGk=", text_plain="a drawing")
    assert still == {"image/png": "aGk=", "text/plain": keep_outputs.MOVES}
    assert kept(text_markdown="**3 runs**", text_plain="<IPython>")["text/plain"] == "**3 runs**"
    printed = nbformat.v4.new_output("stream", name="stdout", text="Stage1\r\nheld\r\n")
    assert keep_outputs.as_kept(printed).data == {"text/plain": "Stage1\nheld\n"}
    with pytest.raises(SystemExit, match="another kind"):
        keep_outputs.as_kept(nbformat.v4.new_output("stream", name="stderr", text="a warning names a folder"))


@pytest.mark.parametrize("name", sorted(NOTEBOOKS.keys() - {"colab", "by_hand"}))
def test_over_nothing(name, execute, tmp_path, monkeypatch):
    """What is missing is named, with the command that makes it."""
    monkeypatch.setattr(records, "KEPT", tmp_path)  # as in an installed wheel
    text, _ = execute(name, runs=str(tmp_path), data="")
    assert ("**0 runs**" in text) == (name != "stages"), "a lesson counts no runs"
    assert name == "claims" or ("Not here yet" in text and "study sweep " in text), "that one needs no run"


def test_each_claim_counts_once_by_its_evidence_and_predictions_decide_one():
    for column in ("verdict", "certainty"):
        counted = documents.by_evidence(column).set_index("strongest evidence")
        assert counted.to_numpy().sum() == len(texts.claims())
    alone = documents.by_evidence("verdict").set_index("strongest evidence").loc["predictions"]
    assert (alone["holds"], alone["does not hold"]) == (1, 0), "as the notebook says"
    named = {claim.id: (claim.verdict, claim.certainty) for claim in texts.claims() if claim.id == "P5-05"}
    assert named == {"P5-05": ("holds", "low")}, "the one it names"


def test_the_claims_that_a_reader_names_are_counted_again(execute, tmp_path):
    text, names = execute("claims", runs=str(tmp_path), about="P4 S000-20")
    assert "counted-again" in names
    rows = re.findall(r"<td>([SP]\d+-\d+)</td>", text.rpartition("computed again")[2])
    assert {*rows} == {each.id for each in texts.claims() if each.document == "P4"} | {"S000-20"}


def test_runs_that_are_not_done_are_counted_too(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda content, **_: shown.append(content.data))
    put(tmp_path, finished("good"), finished("other"), failed("full"))
    Book("stages", str(tmp_path))
    assert shown == ["Shown here: **3 runs**, each a recorded training. 2 ended as planned, 1 out of memory."]
    Book("stages", str(tmp_path), counted=False)
    assert len(shown) == 1, "a lesson needs no count"


def test_the_runs_in_the_lesson_are_those_of_the_command_beside_them():
    """The kept records have such runs of other protocols as well, with names that come earlier."""
    chosen = Book("stages", keep_outputs.RECORDS).select("smoke", **stages.SMALL).select(arm=list(stages.ARMS))
    first: dict[str, str] = {}
    for run in chosen.done:  # as the table takes them
        first.setdefault(run.record.arm, run.record.run_id)
    assert [each.partition("-")[0] for each in first.values()] == ["arms"] * 4


@pytest.mark.parametrize("name", ["stages", "compare", "replicate"])
def test_without_a_folder_of_runs_the_kept_records_are_shown_and_labelled(name, execute, tmp_path, monkeypatch):
    """A newcomer has no `runs` where a notebook looks for them. Only seconds of a GPU are not kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook, "ROOT", tmp_path)
    text, names = execute(name)
    assert "**0 runs**" in text
    assert text.count("Kept records:") >= 1
    assert text.index("Kept records:") < text.index("<table" if name == "stages" else "<figure>")
    missing = re.findall("Not here yet:.. the (?:table|figure) “(.*?)”", text)
    assert [each for each in missing if "seconds" not in each] == []
    assert {"stages": "eight-ranks", "compare": "losses-1", "replicate": "003-losses-1"}[name] in names


def test_runs_are_found_in_the_checkout_where_jupyter_starts_in_another_folder(real_runs, tmp_path, monkeypatch):
    """And a folder of that name here comes first."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "runs").symlink_to(real_runs)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(notebook, "ROOT", tmp_path)
    monkeypatch.setattr(notebook, "display", lambda *_, **__: None)
    assert Book("stages", "runs").runs.done
    (tmp_path / "notebooks/runs").mkdir()
    assert not Book("stages", "runs").runs.done


def test_with_its_parameters(execute, real_runs, tmp_path):
    """What baseline and tasks do, and where files go."""
    text, _ = execute("compare", runs=str(real_runs), baseline="zero2", tasks="imdb", data=str(tmp_path))
    assert "difference from zero2" in text
    assert (tmp_path / "compare-losses-1.csv").is_file()


def test_a_folder_that_is_not_there_is_named_in_one_sentence():
    with pytest.raises(Stop, match="runs = 'nosuch' is not a folder") as caught:
        Book("compare", "nosuch")
    assert caught.value._render_traceback_() == [caught.value.sentence]


@pytest.mark.parametrize("runs", [5, 0.5, True, None, {"runs": 1}, ["runs/smoke", 5]], ids=repr)
def test_runs_that_name_no_folder_are_one_sentence(runs):
    with pytest.raises(Stop, match=re.escape(f"runs = {runs!r} is not a folder")) as caught:
        Book("compare", runs)
    assert caught.value._render_traceback_() == [caught.value.sentence]


# --- Colab ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pasted",
    [
        "https://github.com/some/zero-study",
        "https://github.com/some/zero-study/blob/main/notebooks/by_hand.ipynb",
        "https://colab.research.google.com/github/some/zero-study/blob/main/notebooks/by_hand.ipynb",
    ],
)
def test_the_notebook_by_hand_needs_an_address_alone(pasted, execute, monkeypatch, tmp_path):
    """On a phone: no study, no checkout, and the address of a page in the browser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "study"]:
        monkeypatch.setitem(sys.modules, name, None)
    lines = []

    def shell(line: str) -> None:
        lines.append(line)
        if line.startswith("git clone"):
            shutil.copytree(ROOT / "examples/zero_by_hand", tmp_path / "zero-study/examples/zero_by_hand")

    with pytest.raises(AssertionError, match="Paste the address of this page"):
        execute("by_hand", shell)
    with pytest.raises(AssertionError, match="nowhere could not be cloned"):
        execute("by_hand", lambda _: None, source="nowhere")
    execute("by_hand", shell, source=pasted)
    assert lines.pop(0) == "git clone --quiet --depth 1 https://github.com/some/zero-study zero-study"
    folder = "zero-study/examples/zero_by_hand"
    two_ranks = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    *_, difference, edited = lines
    copy = difference.removeprefix(f"diff {folder}/stage2.py ").removesuffix("/stage2.py")
    assert edited == f"{two_ranks} {copy}/stage2.py --micro-batches 4"
    programs = [sys.executable, *[two_ranks] * 4]
    for name, program, shown, run in zip(BY_HAND, programs, lines[:-2:2], lines[1:-2:2], strict=True):
        assert f"{folder}/{name}.py" in shown, "the code comes before its run"
        assert run == f"{program} {folder}/{name}.py"


def test_the_notebook_by_hand_shows_the_code_that_it_runs():
    """The first three files whole, of the others what changes: a kept output is of the file as it is now."""
    kept = {cell["id"]: cell.get("outputs") for cell in NOTEBOOKS["by_hand"]}
    files = {name: (BY_HAND_FOLDER / f"{name}.py").read_text().splitlines() for name in BY_HAND}
    shown = {name: "".join(kept[f"by_hand-{name}-code"][0]["data"]["text/plain"]).splitlines() for name in BY_HAND}
    for name in BY_HAND[:3]:
        assert shown[name] == files[name]
    for before, name in itertools.pairwise(BY_HAND[2:]):
        gone, new = (Counter(files[one]) - Counter(files[other]) for one, other in ((before, name), (name, before)))
        signs = {sign: Counter(line[1:] for line in shown[name] if line[0] == sign) for sign in "-+"}
        assert gone <= signs["-"]
        assert new <= signs["+"]
        assert signs["+"] <= Counter(files[name])
        assert signs["-"] <= Counter(files[before])


def test_colab_keeps_the_runtime_s_own_packages(execute, monkeypatch, tmp_path):
    """pip is held to the versions that are there, and what it replaced all the same ends the notebook."""
    lines = []
    versions = {"torch": "2.99", "ipykernel": "6.1"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in versions or None)
    monkeypatch.setattr("importlib.metadata.version", versions.get)

    def pip(line: str) -> int:
        lines.append(line)
        versions.update(torch="3.0", study="1")
        return 0

    with pytest.raises(AssertionError, match=r"pip replaced \{'torch': '2.99'\}"):
        execute("colab", pip, source="https://example.org/some")
    assert "--constraint kept.txt" in lines[0]
    assert (tmp_path / "kept.txt").read_text() == "torch==2.99\nipykernel==6.1\n"


def test_colab_clones_no_release_file_and_runs_no_file_that_is_not_there(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (cell,) = (text for text in sources("colab") if "one_process.py" in text)
    lines: list[str] = []
    space = {"Path": pathlib.Path, "sys": sys, "shell": lines.append}
    exec(cell, space | {"source": "https://example.org/zero_study.whl"})
    assert capsys.readouterr().out.startswith("A release file has no examples")
    assert lines == []
    with pytest.raises(AssertionError, match="'nowhere' could not be cloned"):
        exec(cell, space | {"source": "nowhere"})
    assert lines == ["git clone --quiet --depth 1 nowhere zero-study"]


def test_the_predictions_that_colab_names_are_of_its_one_gpu(monkeypatch, capsys):
    """Without --gpus a rank is one of eight, and without --host-memory a node has more than this runtime."""
    text = " ".join("".join(cell["source"]) for cell in NOTEBOOKS["colab"] if cell["cell_type"] == "markdown")
    (runtime,) = re.findall(r"has ([\d.]+) GB of host memory, and offloading takes nearly all of it", text)
    predicted = {}
    for command in re.findall(r"`study ((?:estimate|advise|oom|virtual) [^`]+)`", text):
        assert " --gpus 1 --gpu T4" in command
        assert in_this_process(monkeypatch, f"{command} --json") in (0, None)
        predicted[command.split()[0]] = json.loads(capsys.readouterr().out)
        assert not command.startswith("advise") or f" --host-memory {runtime}GB" in command
    assert predicted.keys() == {"estimate", "advise"}
    assert predicted["estimate"]["ranks"] == 1
    of_node = predicted["estimate"]["host_bytes_of_node"] + HOST_PROCESS_BYTES
    assert 0.9 < of_node / (float(runtime) * 1e9) < 1


@pytest.mark.usefixtures("forked_cells")
def test_colab_on_a_cpu(execute, tmp_path, monkeypatch):
    """The same notebook, with a small model: compiled what is needed, three launches, figures, verdicts.

    Its sweep runs in this process.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which a command changes
    printed: list[str] = []

    def shell(line: str) -> int | None:
        words = shlex.split(line.removesuffix(" | cat"))
        if "torch.distributed.run" in words:
            path = ROOT / words[-1]
            as_main = f"runpy.run_path({str(path)!r}, None, '__main__')"
            code = f"import runpy, sys\nsys.path.insert(0, {str(path.parent)!r})\n{as_main}"
            launched = ranks_of(code, tmp_path, ranks=int(words[words.index("--nproc-per-node") + 1]))
            printed.append(launched.output)
            return launched.code
        if "sweep" not in words:
            ended = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
            printed.append(ended.stdout)
            return ended.returncode
        return in_this_process(monkeypatch, " ".join(words[words.index("sweep") :]))

    text, names = execute("colab", shell, scale="tiny", runs=str(tmp_path / "runs"))
    assert ["OneProcess, 1 rank: " in each for each in printed] == [False, True, False]
    assert "Stage2, 2 ranks: " in printed[-1]
    # Two cores teach nothing about GPUs.
    for words in ("**3 runs**, each a recorded training. 3 ended as planned.", "S002-13", "no run here is of a GPU"):
        assert words in text, words
    assert text.count("'image/png': 'iVBORw0KGgo") == 2, "a PNG of each figure"
    assert names == ["losses-1", "parity", "memory-1", "peaks", "seconds", "claims"]


PAPERS = {"P1": ["states", "volumes"], "P2": ["states"], "P3": ["states"], "P4": ["volumes"], "P5": ["volumes"]}


@pytest.mark.parametrize("document", [2, *PAPERS])
def test_each_document_of_the_ledger_is_shown_alone(document, execute, tmp_path):
    """`-p document P1` was refused. papermill gives 002 as 2."""
    text, names = execute("replicate", runs=str(tmp_path), document=document)
    name = documents.named(document)
    central = {claim.id for claim in texts.claims() if claim.central and claim.document == name}
    assert central <= {*re.findall(r"<td>([SP]\d+-\d+)</td>", text)}
    if name in PAPERS:
        assert names == ["papers-central", *(f"papers-{each}" for each in PAPERS[name])]
        assert {id.partition("-")[0] for id in re.findall(r"<td>([SP]\d+-\d+)</td>", text)} == {name}
    else:
        assert {f"{name[1:]}-central"} == {each for each in names if "central" in each}


@pytest.mark.parametrize("text", texts.texts(), ids=lambda text: text.document)
def test_a_document_is_named_as_by_study_claims(text):
    for typed in (text.document, text.document.lower(), text.document.removeprefix("S")):
        assert documents.named(typed) == text.document
    assert {*PAPERS} == {each.document for each in texts.texts() if each.document.startswith("P")}


@pytest.mark.parametrize("document", ["P6", "S4", 9, "zero"])
def test_an_unknown_document_is_told_which_exist(document):
    with pytest.raises(Stop) as stop:
        documents.named(document)
    assert all(text.document in stop.value.remedy for text in texts.texts())


def test_the_papers_numbers_stand_beside_those_of_the_ledger(execute, tmp_path):
    """Only articles had a section. Each piece of evidence is a row, and is computed when the notebook runs."""
    text, names = execute("replicate", runs=str(tmp_path))
    assert names[:3] == ["papers-central", "papers-states", "papers-volumes"]
    rows = re.split(r"<tr[^>]*>", text.replace("\\n", ""))
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    shown = [(row[0], *row[-2:]) for row in rows if len(row) == 6 and row[0].startswith("P")]
    assert {"P1-03", "P1-19", "P4-04", "P4-01", "P5-03"} <= {claim for claim, _, _ in shown}
    assert {("P5-01", "1.25 to 1.49", "1.251 to 1.491"), ("P1-03", "31.4 GB", "31.41 GB")} <= {*shown}
