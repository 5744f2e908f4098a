"""Every step of a watched loop: what is planted is found with its numbers, and the training is not touched."""

import re
from pathlib import Path

import numpy as np
import pytest

from study.cli import diagnosis as command
from study.known import findings
from study.records.schema import Record
from study.records.sections import RankMemory
from study.watch import dynamics, results, trends
from tests.conftest import ranks_of

# Rank 1 is slow in its forward pass, rank 0 waits for its data, tensors are kept since step 40, the time between steps
# grows, and the loss of step 70 is far off.
PLANTED = """
import sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from study.watch.session import watch

folder, watched = Path(sys.argv[1]), sys.argv[2] == "watched"
accelerator = Accelerator(cpu=True)
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
(folder / f"losses-{watched}-{rank}").write_text(" ".join(losses))
"""


def test_what_is_planted_is_found_with_its_numbers_and_losses_are_bit_equal(tmp_path):
    """Two real ranks train without a watch, and with it."""
    for how in ("alone", "watched"):
        launched = ranks_of(PLANTED, tmp_path, str(tmp_path), how)
        assert launched.code == 0, launched.output
    for rank in (0, 1):
        alone, watched = ((tmp_path / f"losses-{how}-{rank}").read_text() for how in (False, True))
        assert alone == watched
        assert len(alone.split()) == 100
    (answer,) = command.diagnose((tmp_path / "run",))
    found = {finding["id"]: finding for finding in answer["findings"]}
    assert found.keys() == {"loader_waits", "outside_steps", "straggler", "memory_creeps", "states_replicated"}
    assert found["straggler"]["sentence"].startswith("Rank 1 is slower than the others")
    assert "`forward`" in found["straggler"]["sentence"]
    creeps = found["memory_creeps"]
    assert creeps["memory_bytes"] == pytest.approx(50 * 2.1e6, rel=0.1)
    a_step = float(re.search(r"grows by ([0-9.]+) MB a step", creeps["sentence"])[1]) * 1e6
    assert a_step == pytest.approx(2.1e6, rel=0.1)
    shares = trends.shares(trends.load(tmp_path / "run")[0])
    assert shares["waiting"] > 0.1, "rank 0 waits for rank 1"
    assert sum(shares.values()) == pytest.approx(1)


def table(steps: int = 100, **columns) -> trends.Table:
    made = np.zeros(steps, trends.FIELDS)
    made["step"] = np.arange(1, steps + 1)
    unknown = dict.fromkeys((*trends.DYNAMICS, "rates"), np.nan)
    values = unknown | {"clean": 1, "loss": 2.0, "forward": 0.01, "backward": 0.02, "memory_bytes": 1e9} | columns
    for name, value in values.items():
        made[name] = value
    return made


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"memory_bytes": 1e9 + 1e8 * (np.arange(100) > 50)},  # once more, and no growth
        {"forward": 0.01 * np.where(np.arange(100) % 10, 1, 5)},  # every tenth step is slow
        {"forward": np.linspace(0.01, 0.03, 100), "backward": 0},  # longer rows
        {"clean": np.arange(100) < 15, "data": 1.0},  # too few steps
    ],
)
def test_what_is_usual_is_no_finding(columns):
    assert trends.findings({0: table(**columns), 1: table(**columns)}) == []


@pytest.mark.parametrize(("alike", "rows"), [(80, [8, 4]), (70, [])])
def test_a_rank_has_the_rows_of_most_steps(alike, rows):
    varied = np.where(np.arange(100) < alike, 0, np.arange(100))
    unread = dict.fromkeys(("components", "traffic", "inputs"))
    rank = results.RankMeasurements(memory=RankMemory(), rate=1e-3, knows_losses=False, **unread)
    record = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00", observed={"ranks": 2})
    results.fill(record, [rank, rank], [table(rows=8 + varied), table(rows=4 + varied)])
    assert record.watched.rows_per_rank == rows


@pytest.mark.parametrize(("waiting", "found"), [(0.03, ["straggler"]), (0.3, [])])
def test_a_slow_rank_counts_by_what_all_lose(waiting, found):
    """Its own work takes a fifth longer: 10 % of a short step, and 2 % of a long one."""
    tables = {0: table(waiting=waiting), 1: table(backward=0.026, waiting=waiting)}
    assert [finding.id for finding in trends.findings(tables)] == found


def test_a_rank_is_slow_only_by_its_own_work():
    slow = table(backward=0.03)
    (finding,) = trends.findings({0: table(waiting=0.01), 1: slow, 2: table(waiting=0.01)})
    assert (finding.id, finding.lost_s) == ("straggler", pytest.approx(0.01))
    assert "Rank 1 is slower than the others in 100% of the steps, most in the phase `backward`" in finding.sentence


def test_a_loss_that_is_no_longer_finite_is_named_before_steps_are_judged():
    (finding,) = trends.findings({0: table(15), 1: table(15, loss=[2.0] * 9 + [np.nan] * 6)})
    assert finding.id == "no_finite_loss"
    assert "After step 9 " in finding.sentence


def test_steps_of_an_older_watch_are_read_without_what_they_lack(tmp_path):
    lines = [",".join(trends.TIMED), "1,1,2,8,2.5,1e9,0,0,0.01,0.02,0,0.001", "2,1,2,8,2.4,1e9,0,0,0.01,0.0"]
    (tmp_path / "steps-rank0.csv").write_text("\n".join(lines))
    (step,) = trends.load(tmp_path)[0]
    assert (step["passes"], step["forward"]) == (2, 0.01)
    assert np.isnan([step["training"], *step["rates"]]).all()


@pytest.mark.parametrize("odd", [{"loss": np.nan}, {"memory_bytes": np.inf}, {"forward": 0, "backward": 0}])
def test_numbers_that_no_step_has_are_no_finding_and_no_warning(odd):
    assert trends.findings({0: table(**odd)}) == []


def test_ranks_with_unequal_passes_are_named():
    falling = np.linspace(3, 2, 100)
    found = dynamics.findings({0: table(passes=4, loss=falling), 1: table(passes=3, loss=falling)})
    assert [each.id for each in found] == ["unequal_passes"]
    assert "rank 1 makes 3" in found[0].sentence


def learning(first: float, last: float, noise: float = 0.02) -> trends.Column:
    return np.linspace(first, last, 100) + noise * np.random.default_rng(0).standard_normal(100)


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([(5, 3), (5, 5), (5, 3.2)], 1),
        ([(5, 3), (5, 5.5), (5, 3)], 1),  # its labels are wrong, and the others teach the contrary
        ([(1, 0.4), (6, 5.9)], 1),  # a model that was trained before
        ([(5, 3), (5, 4), (5, 3)], None),  # harder rows
        ([(5, 3), (5, 3.1), (5, 3)], None),
        ([(5, 4.8), (5, 5), (5, 4.8)], None),  # nobody learns much
        ([(5, 3), (2, 2), (5, 3)], None),  # it has no more to learn
    ],
)
def test_a_rank_that_learns_nothing_while_all_others_learn_is_named(losses, named):
    found = dynamics.findings({rank: table(loss=learning(*each)) for rank, each in enumerate(losses)})
    assert [each.id for each in found] == ["rank_learns_nothing"] * (named is not None)
    assert all(f"rank {named} does not fall" in each.sentence for each in found)


def test_the_leak_of_the_last_quarter_is_told_for_the_rank_that_grows_most():
    """A cache fills in the first half of the run, by 1 MB a step; then 2 MB a step leak."""
    growth = np.where(np.arange(100) < 50, 1e6, 2e6).cumsum()
    tables = {0: table(memory_bytes=1e9 + growth / 4), 3: table(memory_bytes=1e9 + growth)}
    (creeps,) = trends.findings(tables)
    assert (creeps.id, creeps.memory_bytes) == ("memory_creeps", pytest.approx(107e6, rel=0.05))
    assert "rank 3" in creeps.sentence.lower()
    # Medians of quarters of the 90 steps after the warm-up lie 22 steps apart, and a quarter has 22.5.
    assert float(re.search(r"([0-9.]+) MB a step", creeps.sentence)[1]) == pytest.approx(2 * 22 / 22.5, rel=0.01)


@pytest.mark.parametrize(
    ("columns", "share"), [({"data": 0.004, "outside": 0.0, "update": 0.006}, 0.1), ({"data": 0.01}, 0.25)]
)
def test_a_loader_that_waits_is_told_with_its_share(columns, share):
    (waits,) = trends.findings({0: table(**columns)})
    assert (waits.id, waits.lost_s) == ("loader_waits", pytest.approx(columns["data"]))
    assert f"{share:.0%}" in waits.sentence
    shares = trends.shares(table(**columns))
    assert shares["data"] == pytest.approx(share)
    assert shares["forward"] == pytest.approx(shares["backward"] / 2)


@pytest.mark.parametrize(("device", "whose"), [("cpu", "whole host process"), ("cuda", "GPU tensors")])
def test_the_memory_of_a_step_is_said_to_be_of_tensors_or_of_the_process(device, whose):
    record = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00", observed={"device": device})
    record.time.step_s = [0.03]
    (line,) = [line for line in results.summary(record, Path("mine"), {0: table()}) if "MB" in line]
    assert line.endswith(f"loss 2, {whose} 1,000 MB")
    assert "{peak_bytes} of tensors" in findings.texts()["activations_dominate"]["sentence"]
