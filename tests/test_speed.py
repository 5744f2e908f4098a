"""Speed: measured peaks, and the share of them that a run reaches."""

import json

import peaks as measured
import pytest

from study.records.runs import Run, Runs
from study.records.schema import Record

H200 = [{"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}]
FLOPS = {"bf16": {"median": 700e12}, "tf32": {"median": 350e12}, "fp32": {"median": 50e12}}
PEAKS = {"hardware": {"devices": H200}, "flops_per_s": FLOPS}
BF16 = {"precision": "bf16"}
KNOWN = {"flops_per_rank_and_step": 35e12, "peak_flops_per_s": None, "requested": BF16}  # of one of our own runs


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


def test_peaks_are_measured_and_kept(tmp_path, monkeypatch):
    """On this machine, small: every rate is above 0, and between its lowest and its highest."""
    words = ["--size", "256", "--copy-mib", "4", "--adam-parameters", "100000", "--disk-mib", "4", "--tries", "3"]
    out = tmp_path / "new" / "peaks.json"
    words += ["--disk", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["peaks", *words])
    measured.main()
    peaks = json.loads(out.read_text())
    rates = [*peaks["flops_per_s"].values(), *peaks["copy_bytes_per_s"].values()]
    assert len(rates) >= 3
    assert all(0 < rate["low"] <= rate["median"] <= rate["high"] for rate in rates)
    assert peaks["hardware"]["cores"] >= 1
    assert peaks["software"]["torch"]
    assert peaks["disk_bytes_per_s"] is None or peaks["disk_bytes_per_s"]["written"] > 0
