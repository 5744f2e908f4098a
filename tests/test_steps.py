"""Every step of a watched loop: what is planted is found with its numbers, and the training is not touched."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ranks_of

from study.cli import diagnosis as command
from study.report.topics import killed
from study.watch import live, training, trends
from study.watch.loop import Loop
from study.watch.steps import StepLog

KINDS = ("tensorboard", "wandb")
# Rank 1 is slow in its forward pass, rank 0 waits for its data, tensors are kept since step 40, the time between steps
# grows, and the loss of step 70 is far off.
PLANTED = """
import sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from study.watch.training import watch

folder, watched = Path(sys.argv[1]), sys.argv[2] == "watched"
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
accelerator.init_trackers("logs")
rank = accelerator.process_index

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 2 * 100
    def __getitem__(self, row):
        time.sleep(0.001 if watched else 0)
        return torch.full((16,), row % 7 / 7)

class Slow(torch.nn.Linear):
    def forward(self, rows):
        time.sleep(0.03 if rank and watched else 0)
        return super().forward(rows)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), Slow(16, 16), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Rows(), 8))
losses, kept = [], []
with watch(accelerator, model, optimizer, run_dir=folder / "run") if watched else torch.enable_grad():
    for step, rows in enumerate(loader, 1):
        loss = model(rows).pow(2).mean() * (50 if step == 70 else 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if step >= 40:
            kept.append(torch.ones(525_000))
        time.sleep(step * 0.0003 if watched else 0)
accelerator.end_training()
(folder / f"losses-{watched}-{rank}").write_text(" ".join(losses))
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The folder of a watched run on two real ranks, after the same training without a watch."""
    folder = tmp_path_factory.mktemp("steps")
    for how in ("alone", "watched"):
        launched = ranks_of(PLANTED, folder, str(folder), how)
        assert launched.code == 0, launched.output
    return folder, launched.output


def test_losses_are_bit_equal_with_and_without_the_watch(planted):
    for rank in (0, 1):
        texts = [(planted[0] / f"losses-{watched}-{rank}").read_text() for watched in (True, False)]
        assert texts[0] == texts[1]
        assert len(texts[0].split()) == 100


def test_what_is_planted_is_found_with_its_numbers(planted):
    folder, output = planted
    tables = trends.load(folder / "run")
    found = {finding.id: finding for finding in trends.findings(tables)}
    assert found.keys() == {"loader_waits", "outside_steps", "straggler", "memory_creeps", "decay", "loss_jumps"}
    assert found["straggler"].sentence.startswith("Rank 1 is ")
    assert "of the steps, in the forward pass" in found["straggler"].sentence
    (creep,) = trends._memory(trends.stacked(tables))
    assert creep[1]["growth_bytes"] == pytest.approx(2.1e6, rel=0.1)
    assert creep[1]["since"] == pytest.approx(40, abs=5)
    assert "in step 70; it is back after 1 steps" in found["loss_jumps"].sentence
    assert "between its steps" in found["decay"].sentence
    shares = trends.shares(tables[0])
    assert shares["waiting"] > 0.1, "rank 0 waits for rank 1"
    assert found["straggler"].sentence.split(":")[0] in " ".join(output.split()), "the summary has it"
    (answer,) = command.diagnose((folder / "run",), as_json=True)
    assert found.keys() <= {finding["id"] for finding in answer["findings"]}


def test_the_watch_leaves_a_summary_a_trace_and_values_in_the_tracker(planted):
    folder = planted[0]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 100
    assert len(summary["findings"]) == 6
    trace = json.loads((folder / "run" / "trace.json").read_text())
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"} >= {"rank 0", "rank 1"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * 100 * len(trends.PHASES)
    assert min(event["ts"] for event in spans) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.rglob("events.out.tfevents*")).parent))
    events.Reload()
    assert {"watch/step_s", "watch/data_share"} <= set(events.Tags()["scalars"])


def table(steps: int = 100, **columns) -> trends.Table:
    made = np.zeros(steps, trends.FIELDS)
    made["step"] = np.arange(1, steps + 1)
    values = {"clean": 1, "loss": 2.0, "forward": 0.01, "backward": 0.02, "memory_bytes": 1e9, "tokens": 64} | columns
    for name, value in values.items():
        made[name] = value
    return made


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"memory_bytes": 1e9 + 1e8 * (np.arange(100) > 50)},  # once more, and no growth
        {"forward": 0.01 * np.where(np.arange(100) % 10, 1, 5)},  # every tenth step is slow
        {"forward": np.linspace(0.01, 0.03, 100), "backward": 0, "tokens": np.linspace(64, 192, 100)},  # longer rows
        {"loss": 2 + 0.3 * np.random.default_rng(0).standard_normal(100)},
        {"clean": np.arange(100) < 15, "data": 1.0},  # too few steps
    ],
)
def test_what_is_usual_is_no_finding(columns):
    assert trends.findings({0: table(**columns), 1: table(**columns)}) == []


def test_a_rank_is_slow_only_by_its_own_work():
    slow = table(backward=0.03)
    (finding,) = trends.findings({0: table(waiting=0.01), 1: slow, 2: table(waiting=0.01)})
    assert finding.sentence.startswith(
        "Rank 1 is 33% slower than the others in 100% of the steps, in the backward pass"
    )


def test_the_live_values():
    assert live.values(table())["watch/backward_share"] == pytest.approx(2 / 3)


def test_the_live_line_is_shown_in_a_terminal_and_trackers_get_values(monkeypatch):
    logged = []
    trackers = [
        SimpleNamespace(name=name, log=lambda *values, **more: logged.append((values[0], more))) for name in KINDS
    ]
    shown = live.Live(SimpleNamespace(recent=lambda steps: table()[-steps:]), SimpleNamespace(trackers=trackers), True)
    lines = []
    line = SimpleNamespace(start=lambda: None, stop=lambda: None, update=lambda text, refresh: lines.append(text))
    monkeypatch.setattr(shown, "_shows", True)
    monkeypatch.setattr(shown, "_line", line)
    shown._next_s = 0
    shown.step_ended()
    shown.step_ended()  # less than a second later
    shown.close()
    (text,) = lines
    assert text.startswith("step 100, 0.03 s")
    assert [more for _, more in logged] == [{"step": 100}, {"commit": False}], "W&B's own step must not move"


@pytest.mark.parametrize("hook", [StepLog.mark, Loop._add_loss, Loop._end_pass, Loop._forward, Loop._end_step])
def test_a_mistake_in_any_hook_ends_the_watch_and_not_the_training(hook, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"{hook.__module__}.{hook.__qualname__}", lambda *_: 1 / 0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), 2)
    with training.watch(model=model, optimizer=optimizer, run_dir=tmp_path / "run"):
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
    assert "your training goes on" in capsys.readouterr().err
    assert "ZeroDivisionError" in json.loads((tmp_path / "run" / "record.json").read_text())["error"]["message"]


def test_a_pause_leaves_no_hook_and_no_step(tmp_path, capsys):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with training.watch(model=model, optimizer=optimizer, run_dir=tmp_path, live=False) as watched:
        step()
        with watched.paused():
            assert not model._forward_pre_hooks
            step()
        step()
    assert len(trends.load(tmp_path)[0]) == 2


def test_a_watch_costs_less_than_1_percent_of_long_steps():
    kept = json.loads(killed.WATCH_COST.read_text())
    assert kept["step_cpu_s"]["median"] >= 0.03
    assert kept["added_cpu_share"]["high"] < 0.01
    assert f"{kept['added_cpu_share']['high']:.2%}" in killed.watch_cost()
