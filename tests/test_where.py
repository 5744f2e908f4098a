"""Where a step goes that offloads: by hand, on records made up for it."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from study import record, where

RATES = {
    "copy_bytes_per_s": {"host to device": {"median": 50e9}, "device to host": {"median": 25e9}},
    "host_adam_parameters_per_s": {"median": 2e9},
    "disk_bytes_per_s": {"written": 1e9, "read": 4e9},
}


def made(arm: str, step_s: float, stage: int | None = 3, optimizer: str = "none", param: str = "none", **asked) -> dict:
    """A run of a billion parameters in bf16_cast, of two timed steps."""
    moved = (10_000_000_000, 8_000_000_000) if optimizer == "nvme" else (None, None)
    known = {
        "status": "done", "finished_utc": "then", "hardware": {"devices": []}, "software": {"python": "3"},
        "requested": {"arm": arm, "model": "m", "precision": "bf16_cast", "seed": 1, "virtual_ranks": None} | asked,
        "observed": {"parameters": 1e9, "ranks": 1, "stage": stage, "offload_optimizer": optimizer,
                     "offload_param": param},
        "loss": {"a": 1}, "traffic": {"a": 1}, "time": {"step_s": [step_s] * 2, "median_step_s": step_s},
        "memory": {"per_rank": [{"nvme_written_bytes": moved[0], "nvme_read_bytes": moved[1]}]},
    }  # fmt: skip
    return record.new(f"{arm}-{step_s}", []) | known


def test_the_parts_by_hand():
    """2 GB each way at 25 and 50 GB/s; a billion parameters at 2e9/s; 5 GB written and 4 read per step at 1 and 4."""
    runs = [made("zero3", 0.3), made("zero3_cpu", 1.0, 3, "cpu", "cpu"), made("zero3_nvme", 7.0, 3, "nvme", "cpu")]
    on_host, on_disk = where.examine(runs, RATES)
    assert on_host.parts_s == pytest.approx({"device": 0.3, "transfer": 0.12, "adam": 0.5, "disk": None})
    assert on_disk.parts_s["disk"] == pytest.approx(6.0)
    assert on_host.overlapped_s == pytest.approx(0.8)
    assert on_host.one_by_one_s == pytest.approx(0.92)
    assert on_disk.overlapped_s == pytest.approx(6.3)


def test_what_is_not_known_is_none():
    """No run without offloading, no link, no operator: what is left is what is told."""
    lone = made("zero3_nvme", 7.0, 3, "nvme", "cpu")
    lone["memory"]["per_rank"][0]["nvme_read_bytes"] = None
    rates = RATES | {"copy_bytes_per_s": {"within host": {}}}
    (found,) = where.examine([lone, made("zero2", 0.2, 2), made("zero3", 0.3, 3, micro_batch=16)], rates)
    assert found.parts_s == {"device": None, "transfer": None, "adam": 0.5, "disk": None}
    assert where.examine([lone], rates | {"host_adam_parameters_per_s": None}) == []


def test_only_runs_that_offload_and_are_done():
    failed = made("zero3_cpu", 1.0, 3, "cpu", "cpu") | {"status": "failed"}
    virtual = made("zero3_cpu", 1.0, 3, "cpu", "cpu", virtual_ranks=8)
    assert where.examine([failed, virtual, made("zero3", 0.3)], RATES) == []


def test_it_is_told_as_a_table(tmp_path):
    for one in (made("zero3", 0.3), made("zero3_cpu", 1.0, 3, "cpu", "cpu")):
        (tmp_path / one["run_id"]).mkdir()
        record.write(tmp_path / one["run_id"], one)
    (tmp_path / "peaks.json").write_text(json.dumps(RATES))
    words = [sys.executable, "-m", "study.where", tmp_path, "--peaks", tmp_path / "peaks.json"]
    told = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[0].split() == [
        "run", "arm", "model", "s/step", "device", "s", "transfer", "s", "adam", "s", "disk", "s", "all", "overlapped",
        "s", "one", "by", "one", "s",
    ]  # fmt: skip
    assert told.splitlines()[1].split() == ["zero3_cpu-1.0", "zero3_cpu", "m", "1", "0.3", "0.12", "0.5", "-", "0.8",
                                            "0.92"]  # fmt: skip
    words[-1] = tmp_path / "none.json"
    told = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True)
    assert "study.peaks" in told.stderr
    assert "Traceback" not in told.stderr
