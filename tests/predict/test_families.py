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


IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
NARROW = {"reduce_bucket_size": 2**18}


@pytest.mark.parametrize(
    ("zero", "more", "flags"),
    [
        # DeepSpeed's default. All gradients are there at once, beside the buckets, and some are larger than a bucket.
        ({"stage": 1, "overlap_comm": False} | NARROW, {}, "--accumulation 1"),
        ({"stage": 1, "overlap_comm": False, "reduce_bucket_size": 2**21}, {}, "--accumulation 3"),
        # Gradients that are kept in fp32.
        ({"stage": 2} | NARROW, IN_FP32, "--precision bf16_cast --accumulation 1"),
        ({"stage": 2} | NARROW, IN_FP32, "--precision bf16_cast --accumulation 3"),
        ({"stage": 3} | NARROW, IN_FP32, "--precision bf16_cast --accumulation 3"),
    ],
)
def test_what_a_config_of_deepspeed_changes(tmp_path, cache, monkeypatch, zero, more, flags):
    config = config_of("llama", hidden_size=256, intermediate_size=1024)
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arm = yaml.safe_load((ROOT / "accelerate_configs/zero1.yaml").read_text())
    arm["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero.json")
    for name, content in {
        "config.json": config,
        "zero.json": sizes | {"zero_optimization": zero} | more,
        "arm.yaml": arm,
    }.items():
        (tmp_path / name).write_text(json.dumps(content))  # JSON is YAML, too
    small = f"--model {tmp_path} --init none --steps 2 --warmup-steps 1 --virtual-ranks 4 --micro-batch 1 --sequence 8"
    run = launch(tmp_path / "arm.yaml", tmp_path / "run", *small.split(), *flags.split(), cache=cache)
    assert run.code == 0, run.output
    monkeypatch.setattr(of_record, "architecture", lambda _: named(str(tmp_path)))
    measured = run.record.memory.components.per_rank[0].tracked_peak_bytes
    assert of_record.predicted(run.record).peak_bytes == pytest.approx(measured, rel=0.001)
