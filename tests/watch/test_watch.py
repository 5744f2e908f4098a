"""`study.watch`: somebody else's loop leaves a record of what it really is, and stays as it is."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.configs.asked import intended_settings
from study.core.errors import Stop
from study.records import store
from study.watch import WatchCallback, watch
from study.watch.about import about
from tests.conftest import forked, table

LOOKED_AT = [6, 7, 8]
SLOW = pytest.mark.slow


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that launches a script under an arm or a yaml and gives its record."""

    def launched(script: str, arm: str | Path, *flags: str):
        if arm in ("single", "ddp") and script != "examples/accelerate_loop.py":  # that one asks for the CPU itself
            monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        config = str(arm) if isinstance(arm, Path) else f"accelerate_configs/{arm}.yaml"
        launch = forked(tmp_path, config=config, script=script, flags=[f"--run_dir={tmp_path / 'mine'}", *flags])
        assert launch.code == 0, launch.output
        return store.load(tmp_path / "mine")

    return launched


def plain_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=100, **sizes))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(folder: Path | None, steps=14, each=lambda step, model: None, infinite: int = 0) -> list[float]:
    """The losses of the passes, of which a step has two. The loss of one step may be infinite."""
    model, optimizer = plain_model()
    losses = []
    with watch(model=model, optimizer=optimizer, run_dir=folder) if folder else contextlib.nullcontext():
        for step in range(1, steps + 1):
            each(step, model)
            for _ in range(2):
                ids = torch.randint(0, 100, (4, 8))
                loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss / (0 if step == infinite else 2)
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_watched_loop_has_the_same_losses_and_leaves_its_record(tmp_path):
    active = []
    original = torch.Tensor.backward

    def each(step, model):
        assert torch.Tensor.backward is not original
        if _get_current_dispatch_mode_stack():
            active.append(step)

    losses = train(tmp_path / "mine", each=each)
    assert torch.Tensor.backward is original
    assert losses == train(None)
    record = store.load(tmp_path / "mine")
    assert record.loss.train == pytest.approx([sum(losses[i : i + 2]) for i in range(0, 28, 2)], rel=1e-6)
    seen = record.observed
    assert (seen.accumulation, seen.clipping, seen.rows_per_step) == (2, 0.5, 8)
    assert record.watched.looked_at == active == LOOKED_AT
    assert len(record.time.step_s) == 5
    check(record, "single")
    assert seen.dtypes == {"weights": "float32", "gradients": None, "master": None, "moments": "float32"}
    train(tmp_path / "mine", steps=2)
    assert store.load(tmp_path / "mine-2").observed.steps == 2


MISTAKES = (
    "study.measure.memory.ComponentLook.step_ended",
    "study.watch.loop.digest",
    "study.watch.loop.division_of",
    "study.watch.steps.StepLog.mark",
    "study.watch.steps.StepLog.add",
    "study.watch.results.summary",
)


@pytest.mark.parametrize("mistaken", MISTAKES)
def test_a_mistake_of_the_watch_ends_the_watch_and_not_the_training(mistaken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mistaken, lambda *_: 1 / 0)
    assert train(tmp_path / "mine") == train(None)
    assert capsys.readouterr().err.count("study.watch has stopped") == 1
    assert not _get_current_dispatch_mode_stack()
    if mistaken != MISTAKES[-1]:  # this one leaves a complete record
        assert "ZeroDivisionError" in store.load(tmp_path / "mine").error.message


def test_a_loss_that_is_not_finite_is_a_diverged_run(tmp_path):
    losses = train(tmp_path / "mine", steps=7, infinite=5)
    record = store.load(tmp_path / "mine")
    assert (record.status, record.observed.steps) == ("diverged", 7)
    assert record.error.where == "step 5"
    assert record.loss.train == pytest.approx([sum(losses[i : i + 2]) for i in range(0, 8, 2)], rel=1e-6)


def test_what_cannot_be_watched_is_said(tmp_path, capsys):
    with pytest.raises(Stop, match="needs the optimizer"):
        watch(model=torch.nn.Linear(1, 1))
    train(tmp_path / "mine", steps=0)
    assert "No update was seen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("the data has a hole"), "failed", "ValueError: the data has a hole"),
        (KeyboardInterrupt(), "killed", "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory.\nMore"), "oom", "the memory was full (CUDA out of memory.)"),
        (MemoryError(), "oom", "the memory was full ()"),
        (RuntimeError("Connection closed by peer"), "failed", "another rank died"),
    ],
)
def test_a_run_that_ends_badly_says_so(tmp_path, error, status, message):
    def each(step, model):
        if step == 12:
            raise error

    with pytest.raises(type(error)):
        train(tmp_path / "mine", each=each)
    record = store.load(tmp_path / "mine")
    assert (record.status, record.error.message, record.error.where) == (status, message, "rank 0, step 12")
    assert record.memory.components.per_rank  # of the looks, which were over by then


def test_an_evaluation_is_not_timed_and_a_look_at_it_is_repeated(tmp_path):
    def each(step, model):
        if step in (7, 13):
            with torch.no_grad():
                model.eval()(input_ids=torch.ones(1, 2, dtype=torch.int64))
            model.train()

    train(tmp_path / "mine", steps=16, each=each)
    record = store.load(tmp_path / "mine")
    assert record.watched.looked_at == [6, 7, 8, 9, 10]
    assert len(record.time.step_s) == 4, "of 12, 14, 15 and 16: not the step after a look, nor that with an evaluation"


# What a step moves, in bytes of all weights: all_reduce, all_gather, reduce_scatter.
MOVED = {"single": (0, 0, 0), "ddp": (1, 0, 0), "zero2": (1, 1, 0), "zero3": (0, 1, 1)}
MOVED["fsdp2"] = (0, 2, 1)  # it gathers again in the backward pass


def check(record, arm: str, rel: float = 0.02) -> None:
    """The record is that of its arm: what each rank holds, and what the first one moves."""
    seen = record.observed
    stage = {"zero2": 2, "zero3": 3}.get(arm)
    assert (record.status, record.arm, seen.stage, seen.ranks) == ("done", arm, stage, 1 if arm == "single" else 2)
    assert len(record.memory.components.per_rank) == seen.ranks
    for rank in record.memory.components.per_rank:
        assert sum(rank.at_peak.values()) == rank.tracked_peak_bytes
        states = rank.at_peak["moments"] * {"single": 1, "ddp": 1}.get(arm, 2)
        assert states == pytest.approx(8 * seen.parameters, rel=0.01)
        assert ("master" in rank.at_peak) == (stage is not None)
    moved = {kind: each.bytes for kind, each in record.traffic.per_rank[0].items()}
    for kind, part in zip(("all_reduce", "all_gather", "reduce_scatter"), MOVED[arm], strict=True):
        assert moved.get(kind, 0) == pytest.approx(part * 4 * seen.parameters, rel, 100)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3", pytest.param("zero2", marks=SLOW)])
def test_two_ranks_without_accelerate(start, tmp_path, kind):
    losses = []
    for run_dir in (tmp_path / "mine", ""):
        flags = (f"--kind={kind}", f"--losses={tmp_path / 'losses'}", f"--run_dir={run_dir}")
        record = start("tests/watch/bare_loop.py", "ddp", *flags)
        losses.append((tmp_path / "losses").read_text().split())
    assert losses[0] == losses[1]
    assert record.loss.train[0] != float.fromhex(losses[0][0])  # the mean over both ranks
    check(record, kind, rel=0.05)  # FSDP pads
    if kind.startswith("zero"):  # only the script asks for DeepSpeed
        assert record.promised.stage == int(kind[-1])


BERT = "BertForSequenceClassification"
MODELS = {"accelerate_loop": BERT, "trainer_glue": BERT, "trl_sft": "LlamaForCausalLM"}


@pytest.mark.parametrize("arm", ["zero3", *(pytest.param(arm, marks=SLOW) for arm in ("single", "ddp", "zero2"))])
@pytest.mark.parametrize("script", ["accelerate_loop", *(pytest.param(each, marks=SLOW) for each in [*MODELS][1:])])
def test_an_example_in_each_arm_has_a_record_that_is_true_to_its_arm(start, script, arm):
    record = start(f"examples/{script}.py", arm)
    check(record, arm)
    assert (record.watched.model, record.watched.looked_at) == (MODELS[script], LOOKED_AT)
    assert len(record.loss.train) == record.observed.steps == 16
    if script == "accelerate_loop":
        assert record.promised.source == (f"{arm}.json" if "zero" in arm else f"{arm}.yaml")


@pytest.mark.slow  # of the example, and not of the study
def test_the_loop_continues_from_the_state_that_all_ranks_have_saved(start, tmp_path):
    """The schedule has ended, so the second run updates by nothing, if it has what the first one saved."""
    weights = []
    for steps in (6, 2):
        start("examples/accelerate_loop.py", "zero3", f"--state={tmp_path / 'state'}", f"--steps={steps}")
        parts = sorted((tmp_path / "state").rglob("*zero_pp_rank_*_optim_states.pt"))
        assert len(parts) == 2, "a part of each rank"
        saved = [torch.load(part, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0] for part in parts]
        weights.append(torch.cat(saved))
        shutil.rmtree(tmp_path / "mine")
    assert torch.equal(*weights)


LAUNCHED = table("configs/config_cases.toml")["launched"]


@pytest.mark.parametrize("case", LAUNCHED)
def test_what_a_script_asks_for(case, monkeypatch):
    launched = {f"ACCELERATE_{name}": value for name, value in case["environment"].items()}
    monkeypatch.setattr(os, "environ", launched | {"WORLD_SIZE": "2"})
    wanted = intended_settings(case.get("config")).model_dump(exclude_none=True, exclude={"source"})
    assert wanted == case["wanted"] | {"ranks": 2}


def trainer(folder: Path, *callbacks) -> transformers.Trainer:
    rows = [{"input_ids": torch.arange(8), "labels": torch.tensor(row % 2)} for row in range(32)]
    arguments = transformers.TrainingArguments(output_dir=str(folder), max_steps=12, use_cpu=True, save_strategy="no")
    return transformers.Trainer(plain_model()[0], arguments, train_dataset=rows, callbacks=list(callbacks))


def test_the_callback_changes_no_weight(tmp_path):
    weights = []
    for callbacks in ([WatchCallback(tmp_path / "mine")], []):
        trained = trainer(tmp_path / "out", *callbacks)  # it seeds
        trained.train()
        weights.append(torch.nn.utils.parameters_to_vector(trained.model.parameters()))
    assert torch.equal(*weights)
    record = store.load(tmp_path / "mine")
    assert (record.status, record.observed.steps, record.watched.looked_at) == ("done", 12, LOOKED_AT)
    assert record.observed.clipping == record.promised.clipping == 1.0


def test_a_trainer_that_ends_early_says_so(tmp_path, monkeypatch):
    callback = WatchCallback(tmp_path / "mine")
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer(tmp_path / "out", callback).train()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    callback._end_at_exit()  # what Python calls when it ends
    record = store.load(tmp_path / "mine")
    assert (record.status, record.error.message) == ("failed", "ZeroDivisionError: division by zero")
    assert record.promised.source == "TrainingArguments"


@pytest.mark.parametrize("way", ["views", "copies", "forgotten"])
def test_an_optimizer_of_parts_of_the_weights_trains_the_model(tmp_path, way):
    """As the stages by hand do it: a part of each weight is another tensor, or a copy that is written back."""
    model = torch.nn.Linear(4, 4, bias=False)
    half = model.weight.detach().view(-1)[:8]
    part = torch.nn.Parameter(half if way == "views" else half.clone())
    optimizer = torch.optim.SGD([part], lr=0.1)
    with watch(model=model, optimizer=optimizer, run_dir=tmp_path / "mine"):
        for _ in range(14):
            model(torch.randn(2, 4)).pow(2).mean().backward()
            part.grad = model.weight.grad.view(-1)[:8].clone()
            optimizer.step()
            model.zero_grad()
            if way == "copies":
                model.weight.data.view(-1)[:8].copy_(part.data)
    found = [each.id for each in about(tmp_path / "mine").findings]
    assert ("optimizer_of_other_tensors" in found) == (way == "forgotten")
