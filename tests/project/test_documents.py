"""The Markdown files: links, anchors and paths lead somewhere, and commands have the options that are given to them."""

import functools
import importlib.util
import json
import re
import shlex
import shutil
import tomllib

import pytest
from accelerate.commands.launch import launch_command_parser

from study.cli import commands, rehearsal
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.options import parsed
from study.core.settings import TrainerFlags

FILES = sorted(
    path
    for folder in (
        ".",
        "examples",
        "reports",
        "reports/*",
        "reports/answers/claims",
        "reproductions",
        "examples/*",
        "study",
    )
    for path in ROOT.glob(f"{folder}/*.md")
)
PLACE = re.compile(r"`((?:accelerate_configs|examples|notebooks|reports|study|tests)/[\w./-]+)`")
MADE = ("reports/build/", "reports/site", "reports/your-machine/")  # by the reader's own commands
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(path):
    for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", FENCED.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / (name or path.name)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    named = [name for name in PLACE.findall(path.read_text()) if not name.startswith(MADE)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def commands_in(text: str, kind: str) -> set[str]:
    """Return the words of each `study ...` command: in backticks, in a block of a document, or a text of a TOML."""
    found = re.findall(r"`study ([a-z]+\b[^`]*)`", text)
    blocks = [*FENCED.findall(text), *re.findall(r"^    .+$", text.replace("\\\n", " "), re.MULTILINE)]
    if kind == ".md":
        found += re.findall(r"^(?:\s*|.*\$ )study ([a-z]+\b[^#\n]*)", "\n".join(blocks), re.MULTILINE)
    if kind == ".toml":
        found += re.findall(r'"study ([a-z]+\b[^"]*)"', text)
    return {" ".join(words.split()) for words in found}


SPOKEN = [path for pattern in ("**/*.toml", "**/*.py") for path in (ROOT / "study").glob(pattern)]
SPOKEN += [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "examples").glob("*.py"), *ROOT.glob(".github/*.md")]


def test_every_command_that_a_text_gives_is_understood(monkeypatch):
    """Those of documents, notebooks, remedies and errors. `{}` is a value that a program fills in."""
    given = {words for path in (*FILES, *SPOKEN) for words in commands_in(path.read_text(), path.suffix)}
    given = {words for words in given if words.split()[0] in commands.COMMANDS}
    assert len(given) > 60
    assert {"oom FILE --model MODEL", "advise --model gemma2-9b --gpu H100"} <= given
    # All are imported before the first is replaced: `explain` takes `claims` from its module, and would keep the other.
    of_modules = {module: importlib.import_module(module) for module, _ in commands.COMMANDS.values()}
    for name in commands.COMMANDS:
        module, _ = commands.COMMANDS[name]
        command = getattr(of_modules[module], name)
        # It has the options of the command, and does nothing.
        monkeypatch.setattr(f"{module}.{name}", functools.wraps(command)(lambda *_, **__: None))
    monkeypatch.setattr(rehearsal, "rehearse", functools.wraps(rehearsal.rehearse)(lambda *_, **__: None))
    refused = {}
    for words in given:
        name, *options = words.partition("|")[0].split()
        try:
            commands.start([name, *options] if options else ["--help"])
        except Stop as stop:
            refused[words] = stop.what
    # A text may name an option alone, without its value and without what the command is about.
    assert [what for what in refused.values() if not re.search(" needs |must have a value", what)] == []


# --- commands of other programs: `make`, `accelerate launch`, papermill, Python and pip

SPOKEN_OF = re.compile(r"accelerate [\w-]+$|pip freeze|.* script\.py$|.*\.\.\.")  # and not meant to be typed
PROGRAMS = ("make", "accelerate", "papermill", "python", "torchrun", "sbatch", "pip")
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def other_commands(text: str) -> set[str]:
    """Return the commands of these programs in blocks and in backticks."""
    text = text.replace("\\\n", " ")
    lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
    lines += [*re.findall(r"^    (.+)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    parts = [part.strip().removeprefix("$ ") for line in lines for part in line.partition("  #")[0].split(" && ")]
    return {" ".join(part.split()) for part in parts if part.partition(" ")[0] in PROGRAMS and " " in part}


def refuse_made_up(command: str) -> None:
    """Fail if a command names a file, a target, a variable, an option or a parameter that is not there."""
    program, *words = shlex.split(command)
    if program == "make":
        for word in words:
            name, is_variable, _ = word.partition("=")
            assert f"$({name})" in MAKEFILE if is_variable else re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), word
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", command)
        assert {extra for several in extras for extra in several.split(",")} <= {*EXTRAS}
    elif program == "papermill":
        notebook, _, *pairs = words
        cells = json.loads((ROOT / notebook).read_text())["cells"]
        (source,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        assert all(
            re.search(rf"^{name} = ", source, re.MULTILINE) for _, name, _ in zip(*[iter(pairs)] * 3, strict=True)
        )
    elif program == "accelerate":
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        launched = launch_command_parser().parse_args(words[1 : script + 1])
        assert (ROOT / launched.config_file).is_file()
        if words[script] == "study/train.py":
            parsed(TrainerFlags, prog="train.py", args=words[script + 1 :])
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1])
    else:  # python, torchrun and sbatch start a file
        started = next(word for word in words if word.endswith((".py", ".sh")))
        assert (ROOT / started).is_file()


def test_every_command_of_another_program_is_understood():
    given = {command for path in FILES for command in other_commands(path.read_text())}
    given = {command for command in given if not SPOKEN_OF.match(command)}
    assert {command.partition(" ")[0] for command in given} == {*PROGRAMS}
    assert len(given) > 35
    for command in given:
        try:
            refuse_made_up(command)
        except (AssertionError, Stop, OSError, ValueError, SystemExit, StopIteration, IndexError) as error:
            pytest.fail(f"{command}: {error!r}")


@pytest.mark.parametrize("path", ["notebooks/stages.ipynb", "examples/README.md", "examples/zero_by_hand/README.md"])
def test_zero_by_hand_is_as_short_as_is_said(path):
    (number, most) = re.search(r"(\w+) files of at most (\d+) lines", (ROOT / path).read_text()).groups()
    folder = ROOT / "examples/zero_by_hand"
    named = {*re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(), re.MULTILINE)}
    assert number == ["no", "one", "two", "three", "four", "five", "six"][len(named)]
    longest = max(len((folder / name).read_text().splitlines()) for name in named)
    assert longest <= int(most) < longest + 10


GUIDE = " ".join((ROOT / "GUIDE.md").read_text().split())


def test_the_arms_start_from_a_copy_of_their_folder(tmp_path):
    """The guide says so: a yaml names its json by a path from the folder that one is in."""
    assert "cp -r accelerate_configs ~/mine" in GUIDE
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    named = []
    for path in (tmp_path / "accelerate_configs").rglob("*.yaml"):
        named += re.findall(r"^  deepspeed_config_file: (.+)$", path.read_text(), re.MULTILINE)
    assert len(named) > 10
    assert [name for name in named if not (tmp_path / name).is_file()] == []


def test_the_guide_names_the_page_of_pasted_texts_by_its_title():
    (title,) = re.findall(r'^ +"paste": "(.+?)"', (ROOT / "study/report/site.py").read_text(), re.MULTILINE)
    assert f'builds a report whose page "{title}" reads what you paste' in GUIDE


def test_the_guide_answers_its_example_of_advice_as_the_command_does(capsys):
    """And it is no artefact: DDP does not fit, and with equal precision the answer is the same."""
    (command,) = {each for each in commands_in((ROOT / "GUIDE.md").read_text(), ".md") if "--params 7e9" in each}
    (quoted,) = re.findall(r'The first answers "(.+?)"', GUIDE)
    for precision in ([], ["--precision", "bf16_cast"]):
        commands.start([*shlex.split(command), *precision])
        said = capsys.readouterr().out
        assert quoted in " ".join(said.split())
        assert re.search(r"^ddp +no ", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("arm", "begins", "fits"),
    [("zero1", "a peak of", "does not fit"), ("zero2", "With stage 2 it predicts", "fits only just")],
)
def test_the_notebook_answers_its_question_of_memory_as_the_command_does(arm, begins, fits, capsys):
    cells = json.loads((ROOT / "notebooks/stages.ipynb").read_text())["cells"]
    text = " ".join(" ".join("".join(cell["source"]) for cell in cells).split())
    (command,) = re.findall(r"`study (estimate --params .+?)`", text)
    commands.start(shlex.split(command.replace("zero1", arm)))
    said = " ".join(capsys.readouterr().out.split())
    (peak, verdict) = re.findall(rf"{begins} ([\d.]+) GB.*?, which (.+?)\.", text)[0]
    assert f" needs {peak} GB " in said
    assert f"It {fits} on" in said
    assert verdict == fits
    (activations,) = re.findall(r"([\d.]+) GB are activations", text)
    assert ("gradients none yet" in said and f"activations {activations} GB" in said) == (arm == "zero2")


@pytest.mark.parametrize(("size", "begins"), [("7.83 GiB", "Perhaps: "), ("3.91 GiB", "Likely: ")])
def test_the_guide_answers_its_examples_of_logits_as_the_command_does(size, begins, capsys):
    (command,) = {each for each in commands_in((ROOT / "GUIDE.md").read_text(), ".md") if size in each}
    commands.start(shlex.split(command))
    said = " ".join(capsys.readouterr().out.split())
    (quoted,) = re.findall(rf'"({begins}{size} .+?)"', GUIDE)
    assert said.startswith(quoted)
    assert "oom-embeddings" not in said
    mildest = "--chunked-loss, as by Liger (67.5 GiB, only just)*; --micro-batch 4 and twice the accumulation ("
    assert (mildest in said) == (size == "7.83 GiB")


def test_the_guide_begins_with_a_table_of_its_sections_by_question():
    text = (ROOT / "GUIDE.md").read_text()
    linked = re.findall(r"\]\(#([^)]+)\)", text.partition("\n## ")[0])
    assert sorted(linked) == sorted(anchors(text) - {"guide"})
