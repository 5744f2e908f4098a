"""The plan of an hour: cells in the order of what they decide, what fits, what stands in, side by side, and its end."""

import csv
import io
import subprocess
import sys
from dataclasses import replace

import pytest

from study.cli import experiments
from study.cli.experiments import PlanFlags, RunFlags, sweep
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.ledger import texts
from study.report import plan
from study.sweeps import protocol
from tests.conftest import ROOT

EIGHT = protocol.read("eight")
H100 = GPUS["H100-80GB"]
REGISTERED = ROOT / "reports/eight/registered.csv"


def planned(name: str, minutes: float | None = None, **flags) -> list[dict]:
    """What `study sweep NAME --plan` returns."""
    return sweep(name, running=RunFlags(minutes=minutes), planning=PlanFlags(plan=True, **flags))


def cells() -> list[protocol.Cell]:
    return protocol.cells(EIGHT, "paper")


def test_each_claim_that_a_cell_names_exists_and_is_open():
    """One that is decided meanwhile has to go from here, and the hour may decide something else."""
    open_ids = {claim.id for claim in texts.claims() if claim.verdict == "cannot be decided here"}
    named = {claim for cell in cells() for claim in [*cell.decides, *cell.narrows]}
    named |= {claim for script in EIGHT["script"] for claim in script.get("decides", [])}
    assert named - open_ids == set()


def test_an_hour_on_eight_h100_decides_at_least_eight_claims(capsys):
    rows = planned("eight", gpu="H100", minutes=55)
    said = " ".join(capsys.readouterr().out.split())
    decided = said.partition("Decided: ")[2].partition(".")[0].split(", ")
    assert len(decided) >= 8
    assert {"S003-10", "P4-16", "P2-08"} <= {*decided}
    assert "Left: neox-20b, zero2: 92.5 GB are predicted, which do not fit on H100-80GB." in said
    assert rows[0]["part"] == "gpt2-xl-one-pass"
    ends = [float(row["done after"].removesuffix(" min")) for row in rows if row["done after"] != "after the end"]
    assert max(ends) <= 55


def test_a_cell_that_just_fills_its_card_is_tight_in_the_table_and_in_the_count(capsys):
    rows = planned("eight", gpu="H100")
    tight = [row for row in rows if "tight" in (row["nvidia-smi"] or "")]
    assert [(row["part"], row["tensors"], row["nvidia-smi"]) for row in tight] == [
        ("neox-20b-in-bf16", "61.7 GB", "85.5 GB (tight)")
    ]
    assert "42 of 43 cells end without a limit of minutes, 1 of them tight, predicted" in capsys.readouterr().out


def test_a_shorter_hour_has_the_first_cells_and_decides_less(capsys):
    planned = plan.plan(cells(), H100, 8)
    inside = [each for each in planned if not each.left and each.ends_s <= 10 * 60]
    assert [each.cell.name for each in inside] == [each.cell.name for each in planned][: len(inside)]
    decided, narrowed = plan.claims(planned, inside)
    assert decided == ["S003-10"]
    assert "S000-26" in narrowed, "its first cell is there"
    assert "The end comes before gemma-with-every-stage" in " ".join(plan.in_words(planned, 10))


def test_what_does_not_fit_is_left_and_another_part_stands_in():
    planned = {(each.cell.part, each.cell.arm): each for each in plan.plan(cells(), H100, 8)}
    assert "do not fit" in planned["neox-20b", "zero2"].left
    assert not planned["neox-20b-in-bf16", "zero2"].left
    large = {(each.cell.part, each.cell.arm): each for each in plan.plan(cells(), GPUS["B200"], 8)}
    assert not large["neox-20b", "zero2"].left
    assert large["neox-20b-in-bf16", "zero2"].left == "it stands in for neox-20b, which fits"
    assert "S001-07" in plan.claims([*large.values()], [each for each in large.values() if not each.left])[0]
    small_host = {each.cell.part: each for each in plan.plan(cells(), H100, 8, host_bytes=200e9)}
    assert "of host memory are predicted" in small_host["offload-alone"].left


def test_cells_for_one_gpu_share_the_time():
    alone = [each for each in cells() if each.ranks == 1]
    one, many = plan.plan(alone, H100, 1, 1e12), plan.plan(alone, H100, 8)
    assert max(each.ends_s for each in one) == pytest.approx(sum(each.seconds for each in one))
    assert max(each.ends_s for each in many) == max(each.seconds for each in many)
    assert plan.lanes(many, 8, host_bytes=600e9) == 2, "two of 280 GB"


def test_arms_that_nothing_predicts_have_a_place_and_seconds():
    (cell,) = [each for each in cells() if each.arm == "zero3_qwz"]
    (planned,) = plan.plan([cell], H100, 8)
    assert planned.predicted is None
    assert planned.seconds == plan.START_S + plan.UNKNOWN_S
    assert plan.plan([replace(cell, reserve_s=500)], H100, 8)[0].seconds == 500


def test_a_plan_needs_a_gpu_and_a_number():
    with pytest.raises(Stop, match="--plan needs the kind of GPU"):
        planned("eight")
    with pytest.raises(Stop, match="--gpus must be from 1 to"):
        planned("eight", gpu="H100", gpus=0)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", protocol.names())
def test_a_plan_without_a_scale_is_of_one_that_the_protocol_has(name, gpus, monkeypatch):
    """That of the GPUs, if it has it. What is planned of the cells is not asked here."""
    monkeypatch.setattr(experiments, "show_plan", lambda cells, *_: [cell.scale for cell in cells])
    (scale,) = {*planned(name, gpu="H100", gpus=gpus)}
    wanted = "paper" if gpus > 1 else "one_gpu"
    known = protocol.scales(protocol.read(name))
    assert scale == (wanted if wanted in known else known[0])


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the commit is asked")
@pytest.mark.parametrize(
    ("folder", "commit"),
    [("h200", "579c3b24"), ("h200-2", "dfb6b367"), ("h200-3", "3e5f3d55"), ("h100", "f926602a")],
)
def test_what_was_predicted_of_a_machine_is_what_that_commit_predicts(folder, commit):
    """The commands that the README of each set prints, with the code of today's script."""
    readme = (ROOT / "reports" / folder / "README.md").read_text()
    assert f"windows/predicted.py reports/{folder} {commit}" in readme
    asked = [sys.executable, "windows/predicted.py", f"reports/{folder}", commit]
    again = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == (ROOT / "reports" / folder / "predicted.csv").read_text(), again.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the commit is asked")
def test_what_was_registered_is_what_that_commit_predicts():
    """Predictions stand before any measurement: the file names a commit of this history, whose own code gives it."""
    with REGISTERED.open() as file:
        rows = list(csv.DictReader(file))
    (commit,) = {row["commit"] for row in rows}
    words = ["git", "-c", "safe.directory=*", "merge-base", "--is-ancestor", commit, "HEAD"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    asked = [sys.executable, "windows/predicted.py", "registered", "eight", commit, H100.kind]
    again = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert [*csv.DictReader(io.StringIO(again.stdout))] == [row for row in rows if row["gpu"] == H100.kind], (
        again.stderr
    )
    unpredicted = {cell.name for cell in cells() if plan.predicted(cell, H100, 8) is None}
    assert {row["cell"] for row in rows} >= {cell.name for cell in cells()} - unpredicted
