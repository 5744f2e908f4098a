"""The answers of the index: each number and mark is what the records and kept predictions say."""

import re

import pytest

from study.core.arms import ROOT
from study.core.text import nats
from study.records import runs as records
from study.report import answers, style
from study.report.topics import memory

KEPT = ROOT / "reports" / "cpu-2core" / "runs"
STAGES = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def kept():
    return records.load([KEPT / "smoke", KEPT / "at_scale"])


@pytest.fixture(scope="module")
def index(kept):
    return {answer.name: answer for answer in answers.answers(kept)}


def test_memory_is_that_of_the_records_with_prediction_and_published_beside_it(index, kept):
    """Recomputed from the records themselves. What offloads is predicted: without a GPU its split is not measured."""
    rows = index["memory"].rows
    totals = rows[rows["model"] == "Llama-3-8B"].groupby(["source", "arm"])["bytes"].sum()
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", style.svg(index["memory"].figure, "memory"))
    shown = index["memory"].table.set_index("arm")["Llama-3-8B"]
    chosen = kept.select(model="llama3-8b", ranks=8, checkpointing=True).done
    held = {run.record.arm: memory.held_bytes(run) for run in chosen if not memory.has_one_memory(run)}
    assert len(chosen) >= 8
    assert totals["measured"].to_dict() == held
    for arm, held_bytes in held.items():
        assert held_bytes == pytest.approx(totals["predicted"][arm], rel=0.024), "as the scoreboard has it"
        assert f"{held_bytes / 1e9:.3g} GB" == shown[arm]
        assert shown[arm] in drawn
    assert [shown[arm] for arm in ("ddp", *STAGES)] == ["161 GB", "44.8 GB", "36.3 GB", "22.1 GB"]
    published = {"zero1": 50.065e9, "zero2": 36.455e9, "zero3": 25.121e9}
    assert totals["published by others"].to_dict() == published, "tohtana/ds_verify_loss"


def test_losses_are_those_of_a_training_that_learns(index):
    rows = index["losses"].rows
    assert 0 < rows["difference"].max() < 1e-5, "nats: the order of additions in fp32"
    assert rows["arm"].nunique() == 12
    table = index["losses"].table
    assert nats(rows["difference"].max()) in set(table["largest_difference"])
    assert (table["last_loss"] < table["first_loss"] - 1).all()
    assert (nats(0.0), nats(3.6e-7), nats(0.012)) == ("0 nats", "4e-7 nats", "0.01 nats")


def test_traffic_and_time_are_multiples_of_ddps(index):
    sent = index["traffic"].table.set_index("arm")
    assert [sent["over DDP"][arm] for arm in STAGES] == pytest.approx([1.5, 1.5, 1.44], abs=0.001)
    assert [sent.iloc[:, -1][arm] for arm in STAGES] == pytest.approx([1.5, 8.5, 11.52], abs=0.001), "with 8 passes"
    assert sent["by the ZeRO paper"].notna().equals(~sent.index.to_series().str.startswith("fsdp2"))
    table = index["time"].table
    one_pass = table[table["setting"] == "1 x 2048 tokens"].set_index("arm")
    assert [one_pass["over DDP"][arm] for arm in (*STAGES, "zero3_cpu")] == [0.91, 0.91, 2.32, 6.93]
    assert one_pass.loc["zero3", ["at least", "at most"]].tolist() == [0.89, 6.04]


def test_over_no_runs_each_says_what_makes_them():
    for answer in answers.answers(records.Runs(())):
        assert answer.figure or answer.command.startswith("study sweep "), answer.name
