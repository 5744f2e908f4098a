"""Arms for NVIDIA GPUs alone: what each says without one, in the library's words; and weights that change unasked."""

import json

import pytest
import torch

from study.core.arms import all_paths
from tests.conftest import ROOT, launch

SHORT = ("--steps", "2", "--warmup-steps", "1", "--sequence", "16", "--eval-rows", "8")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@WITHOUT_CUDA
@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("zero3_superoffload", "SuperOffload only supports NVIDIA CUDA GPUs"),
        ("zero3_deepcompile", "is_deepcompile_active() is False"),
    ],
)
def test_an_arm_without_its_gpu_is_unavailable(arm, said, tmp_path, cache):
    run = launch(f"variants/{arm}", tmp_path / "run", *SHORT, cache=cache, launcher=("--num_processes", "1"))
    assert run.code == 1
    assert run.record.status == "failed"
    assert said in run.record.error.message
    assert "Traceback" not in run.output


@WITHOUT_CUDA
def test_weights_that_preparing_changes_are_noticed(tmp_path, cache):
    """ZenFlow of DeepSpeed 0.19.8 reads matrices back as if it had not flattened them transposed."""
    config = json.loads((ROOT / "accelerate_configs/variants/deepspeed/zero3_zenflow.json").read_text())
    zero = {key: value for key, value in config["zero_optimization"].items() if not key.startswith("stage3")}
    (tmp_path / "zenflow.json").write_text(json.dumps(config | {"zero_optimization": zero | {"stage": 2}}))
    text = all_paths()["zero3_zenflow"].read_text()
    path = tmp_path / "zenflow.yaml"
    path.write_text(
        text.replace("accelerate_configs/variants/deepspeed/zero3_zenflow.json", f"{tmp_path}/zenflow.json")
    )
    run = launch(path, tmp_path / "run", *SHORT, cache=cache, launcher=("--num_processes", "1"))
    assert run.code == 1
    assert "preparing the model changed them" in run.record.error.message
