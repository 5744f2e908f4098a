"""Speed: measured peaks, the share of them that a run reaches, and the bench."""

import json

import bench
import peaks as measured
import pytest
from bench import Bench
from conftest import ROOT

from study.core.errors import Stop
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


def test_speeds_by_hand(tmp_path):
    """8 rows of 128 tokens in half a second, and in a quarter."""
    peaks = tmp_path / "peaks.json"
    peaks.write_text(json.dumps(PEAKS))
    runs = {name: [{"median_step_s": s} | KNOWN] for name, s in (("ours", 0.5), ("bare", 0.25), ("hf", 1.0))}
    speed = bench.speeds(Bench(peaks=peaks), runs)
    assert {name: row["tokens/s"] for name, row in speed.items()} == {"ours": 2048, "bare": 4096, "hf": 1024}
    assert speed["ours"]["of measured"] == pytest.approx(0.1)
    assert speed["ours"]["MFU"] is None, "the datasheet of this device is not known"
    assert bench.speeds(Bench(), runs)["ours"]["of measured"] is None


def test_a_bench_compares_and_keeps_every_number(tmp_path, monkeypatch, capsys):
    """Three repeats of three processes; ours takes twice the time of the others. The second is interrupted at first."""
    called = []

    def measure(settings, name, out) -> dict:
        called.append(name)
        if len(called) == 6:
            raise KeyboardInterrupt
        step_s = 0.2 if name == "ours" else 0.1
        return KNOWN | {"median_step_s": step_s, "fastest_tenth_step_s": step_s, "losses_first_last": [1.0, 0.5]}

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.run(Bench(repeats=3, json=tmp_path / "b.json"))
    bench.run(Bench(repeats=3, json=tmp_path / "b.json"))
    second = ["bare", "hf", "ours"]
    assert called == ["ours", "bare", "hf", *second, *second, "hf", "ours", "bare"], "repeats are never mixed"
    assert not (tmp_path / "b.part").exists()
    result = json.loads((tmp_path / "b.json").read_text())
    assert [len(runs) for runs in result["runs"].values()] == [3, 3, 3]
    assert {name: ratio["ratio"] for name, ratio in result["ratios"].items()} == {"ours/bare": 2.0, "ours/hf": 2.0}
    assert "ours/bare  2.000  (95 %: 2.000 to 2.000) of the median step" in capsys.readouterr().out
    with pytest.raises(Stop, match="does not exist"):
        bench.run(Bench(peaks=ROOT / "none.json"))


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
