"""Evaluation and saving are rehearsed, ranks that part are found, and the user's files stay as they are."""

import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import study.rehearsal.values
from study.cli.rehearsed import show_ranks
from study.core.errors import Stop
from study.records import store
from study.rehearsal import start
from study.rehearsal.alternatives import refuse_missing
from study.rehearsal.moments import Moments
from study.rehearsal.on_gpu import on_gpu
from study.rehearsal.request import Answer, Moment, Request
from study.rehearsal.start import apart
from study.rehearsal.user_code import Script
from tests.conftest import ROOT
from tests.rehearsal.test_rehearsal import rehearsed, study_virtual

LOOP = """
    import os, shutil
    import torch
    from pathlib import Path
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset
    here = Path(__file__).parent
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 5000))
    rows = lambda n: DataLoader(TensorDataset(torch.randn(n, 64), torch.randint(0, 2, (n,))), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader, val = accelerator.prepare(model, optimizer, rows(64), rows(400))
    for epoch in range(10):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        outputs = []
        with torch.no_grad():
            for x, y in val:
                outputs.append(accelerator.gather_for_metrics(model(x)))
        print(torch.cat(outputs).argmax(-1).float().mean().item())
        model.train()
        with (here / "log.txt").open("a") as log:
            log.write("more")
        assert (here / "log.txt").read_text() == "old" + "more"
        shutil.rmtree(here / "checkpoint-1")
        os.makedirs(here / "checkpoint-2")
        (here / "checkpoint-2" / "state.json").write_text("{}")
        shutil.rmtree(here / "checkpoint-2")
        (here / "new.txt").write_text("new")
"""
SAVES = """
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            torch.save({"model": state, "seed": torch.get_rng_state()}, here / "model.tmp")
            torch.save({}, here / "log.txt")
            os.replace(here / "model.tmp", here / "model.pt")
            saved = torch.load(here / "model.pt", map_location="cuda:0")
            assert saved["model"]["0.weight"].shape == (256, 64) and saved["seed"].any()
"""
SAVES_ALONE = """
        if accelerator.is_main_process:
            torch.save(accelerator.get_state_dict(model), here / "model.pt")
"""


@pytest.fixture
def script(tmp_path):
    def write(*parts: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent("".join(parts)))
        (tmp_path / "log.txt").write_text("old")
        (tmp_path / "checkpoint-1").mkdir()
        return path

    return write


def test_evaluation_and_saving_have_peaks_and_no_file_changes(script):
    path = script(LOOP, SAVES)
    before = {each: each.read_bytes() if each.is_file() else None for each in path.parent.rglob("*")}
    answer = rehearsed(path, "--config_file=accelerate_configs/zero3.yaml", "--evaluate", "--save")
    device = answer["device"]
    of_all_ranks = 2 * 4 * 5000 * 4  # what each batch leaves: outputs of both ranks
    joined = 2  # the outputs, and what torch.cat makes of them
    assert device["whole_evaluation"] - device["evaluation"] == pytest.approx(46 * joined * of_all_ranks, rel=0.01)
    assert device["saving"] > answer["after_step"]["weights"] + 64 * 256 * 4
    assert answer["peak_bytes"] == max(device["whole_evaluation"], device["training"], device["saving"])
    after = {each: each.read_bytes() if each.is_file() else None for each in path.parent.rglob("*")}
    assert {each for each in after if "__pycache__" not in str(each)} == set(before)
    assert all(after[each] == before[each] for each in before)


def test_what_is_cloned_to_be_saved_is_the_hosts(script):
    """With stage 2 Accelerate lets DeepSpeed clone all weights. A rehearsal has one device, a GPU has none of it."""
    answer = rehearsed(script(LOOP, SAVES), "--config_file=accelerate_configs/zero2.yaml", "--save")
    weights = answer["after_step"]["weights"]
    assert 0 <= answer["device"]["saving"] - sum(answer["after_step"].values()) < 0.5 * weights


def test_a_script_that_ends_after_its_steps_has_calls_and_says_why_it_has_no_parts(script, tmp_path):
    """Without another update the parts of the peak are not known. Its steps have called the model all the same."""
    short = LOOP.replace("rows(64)", "rows(16)").replace("range(10)", "range(1)")
    record = tmp_path / "record"
    done = study_virtual(script(short, SAVES), "--save", "--gpu=H100", f"--run-dir={record}")
    words = " ".join(done.stdout.split())
    assert "What the peak consists of was not seen: the script made 2 updates, and another one shows it." in words
    assert Answer.read(record / "answer.json").calls == 1


def test_a_save_that_gathers_on_one_rank_alone_hangs(script):
    done = study_virtual(script(LOOP, SAVES_ALONE), "--config_file=accelerate_configs/zero3.yaml", "--save")
    assert done.returncode == 1, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert words.startswith("It hangs at script.py:35, as it would on 2 GPUs: rank 0 calls allgather"), words
    assert "torch.save(accelerator.get_state_dict(model)" in words
    assert "as rank 0 of 2, then as rank 1, for at most 900 s each ..." in done.stderr


def test_a_rank_that_drops_what_it_gathered_hangs_nobody(script):
    """With FSDP2 rank 0 alone keeps whole weights, and waits for each. Rank 1 gathers as many."""
    options = "--config_file=accelerate_configs/fsdp2.yaml", "--save"
    assert rehearsed(script(LOOP, SAVES), *options)["device"]["saving"]


@pytest.mark.parametrize(
    "batch", ["next(batches)", "next(each for each in batches)", "next(next(batches) for _ in [0])"]
)
def test_a_script_that_asks_for_its_batches_by_next_does_not_end_by_that(script, batch):
    """A rehearsal ends the loader after the counted updates, so that an epoch ends. Here no epoch does."""
    asks = """
    batches = iter(rows(400))
    for step in range(30):
        x, y = BATCH
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    torch.save(accelerator.get_state_dict(model), here / "model.pt")
"""
    path = script(LOOP.partition("    for epoch")[0], asks.replace("BATCH", batch))
    done = study_virtual(path, "--save")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It did not save in its first 3 updates. If it does later, give more --steps." in done.stdout
    assert rehearsed(path, "--save", "--steps=29")["device"]["saving"]


def test_ranks_decide_alike_by_what_they_have_gathered(script):
    """Each has another number. As real ranks they have the same ones once they are gathered."""
    decides = """
        numbers = accelerator.gather(torch.tensor([accelerator.process_index]))
        if numbers[0]:
            accelerator.wait_for_everyone()
"""
    assert rehearsed(script(LOOP, decides), "--evaluate")["moments"]


def test_an_evaluation_within_the_loop_is_met_or_missed_in_a_sentence(script):
    """The script evaluates after so many updates: it is met after five, and not after five hundred."""
    within = """
            if (turns := globals().get("turns", 0) + 1) % EVERY == 0:
                model.eval()
                with torch.no_grad():
                    outputs = [model(x) for x, y in val]
                model.train()
"""
    path = script(LOOP.partition("        model.eval()")[0], within.replace("EVERY", "5"))
    assert rehearsed(path, "--evaluate")["device"]["evaluation"]
    path.write_text(path.read_text().replace("% 5 ", "% 500 "))
    said = " ".join(study_virtual(path, "--evaluate").stdout.split())
    assert re.search("It did not evaluate in its first [0-9]+ updates. If it does later, give more --steps.", said)


# --- without a process


@pytest.mark.parametrize(
    ("code", "torch", "said"),
    [
        (None, True, "train.py did not end in 9 s; the last it printed: it printed nothing"),
        (-11, True, "train.py ended with -11 and no answer"),
        (1, False, "this environment has no PyTorch"),
    ],
)
def test_what_ends_without_an_answer_is_told_apart(code, torch, said, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "run_apart", lambda *_: code)
    if not torch:
        monkeypatch.setattr(start.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Stop, match=re.escape(said)):
        start.run_request(Request("train.py", [], 2, 2, 2), tmp_path, 9)


def test_an_evaluation_is_extrapolated_only_if_each_batch_leaves_more():
    log = [(1, 100), (2, 10), (3, 20), (4, 30), (5, 0)]
    moments = [Moment("evaluation", place, place + 1, loader=1) for place in (1, 2, 3)]
    moments.append(Moment("evaluation", 4, 5, loader=1, batches_left=10))
    device = on_gpu(Answer(log=log, moments=moments), ranks=1, stage=None)
    assert (device.evaluation, device.whole_evaluation, device.training) == (160, 160 + 10 * 30, 100)
    log[2:4] = [(3, 20), (3, 10)]
    assert on_gpu(Answer(log=log, moments=moments), ranks=1, stage=None).whole_evaluation is None


ALL, MORE = [("allreduce", "a.py:1", 9)] * 2, [("allgather", "a.py:7", None)]


class _Loader:
    pass


def test_batches_of_a_model_in_evaluation_mode_that_then_train_are_no_evaluation():
    """As `from_pretrained` leaves a model: of its first micro-batches that is not known before the update."""
    moments = Moments(Request("t.py", [], 1, 8, 2), SimpleNamespace(log=[], total=0, peak=0))  # type: ignore[arg-type]
    trains, evaluates = _Loader(), _Loader()
    for loader, updates in ((trains, True), (evaluates, False)):
        for _ in range(3):
            moments.begin_batch(loader)
            moments.called(trains=False)
        if updates:
            moments.updated()
        moments.begin_batch(loader)
    assert [each.loader for each in moments.done] == [1, 1, 1]


@pytest.mark.parametrize(
    ("first", "second", "cut", "hangs"),
    [
        (ALL, ALL, (True, True), False),
        (ALL + MORE, ALL, (False, False), True),
        (ALL, ALL + MORE, (False, False), True),
        (ALL, ALL + ALL, (True, True), False),  # one has seen all that was asked for earlier
        (ALL + MORE + ALL, ALL + ALL, (True, True), True),
        (ALL, [("allreduce", "a.py:2", 9)] * 2, (True, True), False),  # in the branches of an `if`
        (ALL, [("allreduce", "a.py:1", 8)] * 2, (True, True), False),  # in one line, which all ranks come to
    ],
)
def test_ranks_part_if_one_calls_what_the_other_does_not(first, second, cut, hangs):
    answers = [Answer(collectives=log, is_cut=is_cut) for log, is_cut in zip((first, second), cut, strict=True)]
    found = apart(*answers, Path("a.py"))
    assert (found is not None) == hangs
    if found:
        assert found.where == "a.py:7"
        calls = 0 if MORE[0] in first else 1
        comes = "rank 1 comes to allreduce of 9 elements at a.py:1"
        other = comes if first == ALL + MORE + ALL else "the other rank has ended"
        assert found.message == f"rank {calls} calls allgather there, and {other}"


def test_ranks_part_if_one_sums_what_the_other_does_not():
    """DDP sums as well. What one rank alone sums is paired with the gradients of the others."""
    first, second = (Answer(collectives=calls, is_cut=True) for calls in ([*ALL, ("allreduce", "a.py:7", 2)], ALL * 2))
    found = apart(first, second, Path("a.py"))
    what = "rank 0 calls allreduce of 2 elements there, and rank 1 comes to allreduce of 9 elements at a.py:1"
    assert (found.where, found.message) == ("a.py:7", what)


def test_a_folder_whose_name_begins_alike_is_not_the_scripts():
    script = Script(Path("/a/b/train.py"), {})
    assert script.owns("/a/b/models/own.py")
    assert not script.owns("/a/bc/other.py")


def test_what_is_installed_below_a_script_is_not_the_users():
    """Whoever clones a tool beside his train.py, or installs Python below it, wrote neither."""
    installed = study.rehearsal.values.__file__, os.__file__, torch.__file__
    for file in map(Path, installed):
        for above in file.parents[2:]:
            assert not Script(above / "train.py", {}).owns(str(file))
        assert Script(file.with_name("train.py"), {}).owns(str(file))


@pytest.mark.parametrize(
    ("ranks", "evaluate", "save"), [(8, False, False), (8, True, False), (8, False, True), (1, 0, 0)]
)
def test_whether_rank_1_was_rehearsed_is_said(ranks, evaluate, save, tmp_path, capsys):
    """`it fits` is no answer to whether ranks wait for each other."""
    request = Request("a.py", [], ranks, ranks, 2, evaluate=bool(evaluate), save=save)
    assert not show_ranks(request, Answer(decides={"a.py:7": "if loss.item() < 2:"}), tmp_path)
    decides, _, printed = " ".join(capsys.readouterr().out.split()).partition("--value gives it another. ")
    assert decides.startswith("a.py:7 decides by a number that does not exist here, and is 0: `if loss.item() < 2:`.")
    assert ("wait for ever" in decides) == (ranks > 1)
    assert printed.startswith("Rank 1 was not rehearsed: --evaluate and --save ") == (
        ranks > 1 and not request.compares_ranks
    )
    same = "With the values of this rehearsal ranks 0 and 1 call the same collectives"
    assert printed.startswith(same) == request.compares_ranks


@pytest.mark.parametrize(
    ("second", "loop", "hangs"),
    [
        (4, "train()", True),
        (5, "train()", False),
        (None, "train()", False),
        (4, "with Join([model]):\n    train()", False),
        (4, "with model.join():\n    train()", False),
        (4, "','.join([])\ntrain()", True),
    ],
)
def test_ranks_whose_loaders_have_unequal_batches_may_wait_for_ever(second, loop, hangs, tmp_path, capsys):
    """The few updates of a rehearsal do not come to the end of an epoch."""
    script = tmp_path / "a.py"
    script.write_text(loop)
    record = store.read(next((ROOT / "reports/cpu-2core/runs/smoke").glob("*/record.json")))
    for folder, passes in ((tmp_path, 5), (tmp_path / "rank-1", second)):
        folder.mkdir(exist_ok=True)
        record.watched.passes_in_epoch = passes
        store.write(folder, record)
    assert show_ranks(Request(str(script), [], 8, 8, 2, save=True), Answer(batch_at="a.py:7"), tmp_path) == hangs
    said = " ".join(capsys.readouterr().out.split())
    assert ("At a.py:7 the loader of rank 0 has 5 micro-batches, and that of rank 1 4:" in said) == hangs
    assert ("no hang was found" in said) != hangs


def test_a_config_whose_json_is_elsewhere_is_refused_with_a_remedy(tmp_path):
    """Accelerate takes the name for JSON, and ends with `Expected a string path to an existing deepspeed config`."""
    config = tmp_path / "zero2.yaml"
    config.write_text("{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: elsewhere/zero2.json}}")
    with pytest.raises(Stop, match=r"names 'elsewhere/zero2\.json', which is not here") as stop:
        refuse_missing(config)
    assert stop.value.remedy.startswith("run in the folder from which that path counts")
