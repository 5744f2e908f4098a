"""Memory of families that the scoreboard does not have, on virtual ranks, and their predictions."""

import json

import pytest
import yaml

from study.predict.architecture import named
from study.report import of_record
from tests.conftest import ROOT, launch
from tests.predict.families import SMALL, config_of

CELLS = [pytest.param(cell, marks=[pytest.mark.slow] * cell.pop("slow", 0)) for cell in SMALL["cells"]]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["config"]["model_type"])
def test_memory_of_a_family_is_predicted(tmp_path, cache, monkeypatch, cell):
    (tmp_path / "config.json").write_text(json.dumps(cell["config"]))
    words = f"--model {tmp_path} --init none --steps 2 --warmup-steps 1 {cell['flags']}"
    run = launch(cell["arm"], tmp_path / "run", *words.split(), cache=cache)
    assert run.code == 0, run.output
    monkeypatch.setattr(of_record, "architecture", lambda _: named(str(tmp_path)))  # a record keeps no config
    measured = run.record.memory.components.per_rank[0].tracked_peak_bytes
    assert of_record.predicted(run.record).peak_bytes == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize(("bucket_elements", "passes"), [(2**18, "1"), (2**21, "3")])
def test_stage_1_without_overlap_comm_reduces_after_the_pass(tmp_path, cache, monkeypatch, bucket_elements, passes):
    """DeepSpeed's default. All gradients are there at once, beside the buckets, and some are larger than a bucket."""
    config = config_of("llama", hidden_size=256, intermediate_size=1024)
    zero = {"stage": 1, "reduce_bucket_size": bucket_elements, "overlap_comm": False}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arm = yaml.safe_load((ROOT / "accelerate_configs/zero1.yaml").read_text())
    arm["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero.json")
    for name, content in {
        "config.json": config,
        "zero.json": sizes | {"zero_optimization": zero},
        "arm.yaml": arm,
    }.items():
        (tmp_path / name).write_text(json.dumps(content))  # JSON is YAML, too
    flags = f"--model {tmp_path} --init none --steps 2 --warmup-steps 1 --virtual-ranks 4 --micro-batch 1 --sequence 8"
    run = launch(tmp_path / "arm.yaml", tmp_path / "run", *flags.split(), "--accumulation", passes, cache=cache)
    assert run.code == 0, run.output
    monkeypatch.setattr(of_record, "architecture", lambda _: named(str(tmp_path)))
    measured = run.record.memory.components.per_rank[0].tracked_peak_bytes
    assert of_record.predicted(run.record).peak_bytes == pytest.approx(measured, rel=0.001)
