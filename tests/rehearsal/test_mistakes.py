"""Mistakes that end a rented hour are named in the first lines of the answer: as the script's own end, or a finding.

Each script of mistakes/ has one. Its first lines have options, and what the answer says with them.
"""

import itertools
import linecache
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch._utils import ExceptionWrapper
from torch.optim import lr_scheduler

from study.cli import rehearsed
from study.cli.rehearsed import failed
from study.records.schema import Record
from study.rehearsal import run
from study.rehearsal.mistakes import length_of, note_modes
from study.rehearsal.request import Failure, Request
from study.rehearsal.user_code import Script
from study.report import rehearsals
from study.watch.about import judge
from tests.conftest import ROOT, table
from tests.rehearsal.test_rehearsal import study_virtual

SCRIPTS = sorted(Path(__file__).with_name("mistakes").glob("*.py"))
FIRST_LINES = 6
# Each takes a worker 18 s while all six work, and continuous integration has ten minutes: these are slow tests.
SLOW = {
    "batch_contradicts",
    "clipping_in_the_loop",
    "no_is_trainable",
    "optimizer_before_adapters",
    "tied_head_fsdp2",
    "token_beyond_the_vocabulary",
}
SLOW_OPTIONS = re.compile(r"zero\d|fsdp1_|fsdp2_")  # of one mistake with several frameworks


def cases():
    for script in SCRIPTS:
        for line in itertools.takewhile(lambda line: line.startswith("# "), script.read_text().splitlines()):
            options, _, expected = line.removeprefix("# ").rpartition(" :: ")
            is_slow = script.stem in SLOW or SLOW_OPTIONS.search(options)
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(script, options.split(), expected, id=f"{script.stem} {options}".strip(), marks=marks)


@pytest.mark.parametrize(("script", "options", "expected"), cases())
def test_a_mistake_is_named_in_the_first_lines(script, options, expected):
    done = study_virtual(script, *options)
    words = " ".join(" ".join(done.stdout.splitlines()[:FIRST_LINES]).split())
    assert re.search(expected, words), words + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


OWN = {
    "None.named_parameters()": True,
    'raise AttributeError("as a library says it")': False,
    'raise RuntimeError("as DDP says it")': False,
    "1 / 0": False,  # what the script gave may be wrong
    "__import__('torch').nn.Linear(1, 1).no_such_name": True,  # torch's `__getattr__` raises it, and this line asks
    "__import__('os').environ['NO_SUCH_NAME']": True,
    "try:\n    None.x\nexcept AttributeError as error:\n    raise ValueError('as a library says it') from error": True,
    "(lambda *args, **kwargs: getattr(*args, **kwargs))(None, 'x')": False,  # the script gave them
}


@pytest.mark.parametrize(("line", "is_own"), OWN.items())
@pytest.mark.parametrize("folder", [Path(rehearsed.__file__).parent, Path("/somebodys")])
def test_what_a_rehearsal_itself_breaks_is_not_said_of_the_users_gpus(line, is_own, folder, tmp_path):
    file = str(folder / "patches.py")
    linecache.cache[file] = (len(line), None, line.splitlines(keepends=True), file)
    with pytest.raises(Exception) as caught:
        exec(compile(line, file, "exec"), {})
    failure = run.failed(caught.value, Script(tmp_path / "train.py", {}))
    request = Request(script="train.py", words=[], ranks=4, ranks_per_machine=8, steps=2)
    is_said = "as it would on 4 GPUs" in rehearsals.ending(failure, request)
    assert is_said != (is_own and folder != Path("/somebodys"))
    assert run.failed(caught.value, Script(folder / "train.py", {})).kind == "script"  # whose the line is


ROWS = "class Rows:\n    def __getitem__(self, row):\n        return {}['no_such_column']\nrows = Rows()\n"


def test_what_a_line_of_the_script_cannot_look_up_is_its_own_whoever_asks(tmp_path):
    rows: dict = {}
    exec(compile(ROWS, str(tmp_path / "train.py"), "exec"), rows)
    asks = compile("rows[0]", str(Path(rehearsed.__file__).with_name("lengths.py")), "exec")
    with pytest.raises(KeyError) as caught:
        exec(asks, rows)
    failure = run.failed(caught.value, Script(tmp_path / "train.py", {}))
    assert (failure.kind, failure.where) == ("script", "train.py:3")


@pytest.mark.parametrize(("line", "said"), [("{}['y']", "KeyError: 'y'"), ("assert 0", "AssertionError")])
def test_a_mistake_of_a_loaders_worker_is_told_by_its_own_line(line, said, tmp_path):
    """Its process sends a text with a traceback."""
    path = tmp_path / "data.py"
    path.write_text(f"import torch\n{line}\n")
    try:
        exec(compile(path.read_text(), str(path), "exec"), {})
    except (KeyError, AssertionError):
        sent = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises((KeyError, AssertionError)) as caught:
        sent.reraise()
    failure = run.failed(caught.value, Script(tmp_path / "train.py", {}))
    assert (failure.kind, failure.message, failure.where, failure.code) == ("script", said, "data.py:2", line)


@pytest.mark.parametrize(("kind", "names"), [("script", True), ("value", False)])
def test_an_error_of_a_library_that_a_table_knows_has_its_cause_and_its_remedy(kind, names, capsys):
    known = table("configs/pasted/examples.toml")["fsdp2-embeddings-twice"]["text"]
    request = Request(script="train.py", words=[], ranks=4, ranks_per_machine=8, steps=2)
    failed(Failure(kind, known.strip().splitlines()[-1], "train.py:9", "prepare()", known), request)
    said = " ".join(capsys.readouterr().out.split())
    assert ("[fsdp2-embeddings-twice] What to do: name the layers alone" in said) == names


def test_that_no_fault_applies_is_said_of_the_releases_that_ran(monkeypatch, capsys):
    """Whose training machine has others may have one: the sentence says of which it is."""
    record = next((ROOT / "reports/cpu-2core/runs/smoke").glob("*/record.json"))
    monkeypatch.setattr(rehearsed, "which_apply", lambda stack: [])
    assert rehearsed.show_known(record.parent, {"torch": "2.13.0+cpu", "peft": "0.21.2"}) == []
    said = " ".join(capsys.readouterr().out.split())
    assert "to the releases that ran here, torch 2.13.0, PEFT 0.21.2. If" in said
    assert said.endswith("`study stack requirements.txt`.")


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize(("trains", "dropout"), [(True, 0.1), (False, 0.1), (False, 0.0)])
def test_a_model_in_evaluation_mode_recomputes_nothing_and_has_no_dropout(trains, dropout, recomputes):
    """`from_pretrained` leaves it so. What the step held decides each sentence, and not what was asked for."""
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **drops)
    )
    if recomputes:
        model.gradient_checkpointing_enable()
    record = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00")
    record.observed.checkpointing = recomputes
    note_modes(record, model.train(trains))
    assert rehearsals.training(record.observed) == ["activations are recomputed"] * (recomputes and trains)
    told = {each.id for each in judge(record)[0]}
    assert ("checkpointing_off" in told) == (recomputes and not trains)
    assert ("layers_in_evaluation" in told) == (dropout > 0 and not trains)


@pytest.mark.parametrize(
    ("schedule", "length"),
    [
        (lr_scheduler.LinearLR, None),
        (lr_scheduler.ConstantLR, None),
        (lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 9), 9),
        (lr_scheduler.PolynomialLR, 5),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9), 9),
    ],
)
def test_a_warmup_is_no_schedule_that_ends(schedule, length):
    assert length_of(schedule(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))) == length
