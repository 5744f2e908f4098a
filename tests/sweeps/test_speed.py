"""The share of this machine's measured peak that a run reaches."""

import json

import pytest

from study.records.runs import Run, Runs
from study.records.schema import Record

H200 = [{"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}]
FLOPS = {"bf16": {"median": 700e12}, "tf32": {"median": 350e12}, "fp32": {"median": 50e12}}
PEAKS = {"hardware": {"devices": H200}, "flops_per_s": FLOPS}
BF16 = {"precision": "bf16"}


def share(folder, times: dict | None = None, **requested) -> float | None:
    """The share of the measured peak that a run of four steps of half a second reaches, of 35e12 operations each."""
    times = {"step_s": [0.5] * 4, "flops_per_rank_and_step": 35e12} if times is None else times
    record = {"run_id": "run", "started_utc": "2026-01-02", "hardware": {"devices": H200}, "time": times}
    record["requested"] = {"precision": "fp32", "tf32": True} | requested
    (row,) = Runs((Run(folder / "runs" / "p" / "cell.1", Record.model_validate(record)),)).rows()
    return row["of measured"]


SHARES = [(BF16, 0.1), ({}, 0.2), ({"tf32": False}, 1.4)]


@pytest.mark.parametrize(("requested", "expected"), SHARES)
def test_the_share_of_the_measured_peak(requested, expected, tmp_path):
    """70e12 operations per second, as a share of this machine's peak in the same arithmetic."""
    (tmp_path / "peaks.json").write_text(json.dumps(PEAKS))
    assert share(tmp_path, **requested) == pytest.approx(expected)


def test_no_share_without_this_machines_peaks(tmp_path):
    assert share(tmp_path) is None, "nothing was measured"
    (tmp_path / "peaks.json").write_text(json.dumps(PEAKS | {"hardware": {"devices": []}}))
    assert share(tmp_path) is None, "of another machine"
    (tmp_path / "peaks.json").write_text(json.dumps(PEAKS))
    assert share(tmp_path, times={}) is None, "a run without values has no times"
