"""One table of GPUs for all who ask, and the GPUs of a machine as a launch would see them."""

import pynvml
import pytest

from study import gpus, theory
from study.gpus import GPUS
from study.record import Stop


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_what_its_name_says(name):
    gpu = GPUS[name]
    assert gpu.host_link in theory.LINKS
    assert gpu.has_bf16 == ("tf32" in gpu.peaks), "both came with Ampere"
    assert gpu.half_flops_per_s == gpu.peaks.get("bf16", gpu.peaks["fp16"])
    assert gpu.half_flops_per_s > gpu.single_flops_per_s >= gpu.peaks["fp32"]
    printed = name.rpartition("-")[2].removesuffix("GB")
    if printed.isdigit():
        assert gpu.memory_bytes == pytest.approx(int(printed) * 2**30, rel=0.01)


def test_no_two_have_one_name():
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS)


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("NVIDIA H200", "bf16", True, 989.4e12),
        ("NVIDIA H200", "fp32", True, 494.7e12),
        ("NVIDIA H200", "fp32", False, 66.9e12),
        ("Tesla T4", "bf16_cast", True, None),  # it has no bf16
        ("Tesla T4", "fp32", True, 8.1e12),  # and no TF32
        ("NVIDIA H800", "bf16", True, None),
        (None, "fp32", True, None),
    ],
)
def test_what_a_run_is_measured_against(name, precision, tf32, peak):
    assert gpus.peak_flops(name, precision, tf32) == peak


# --- those of this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch):
    """NVML is made to answer as with four GPUs, the last of them with a UUID."""

    def by_index(index: int) -> int:
        if not 0 <= index < 4:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", by_index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-3f": 3}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda gpu: f"GPU {gpu}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: type("Memory", (), {"total": gpu * 10**9}))


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-3f, 1", [3, 1]), ("", []), ("-1", []), ("1,-1,2", [1]), ("1,7", [1]),
     ("none", [])],
)  # fmt: skip
def test_those_that_a_launch_would_see(visible, seen, four, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.gpus_here() == [(f"GPU {gpu}", gpu * 10**9) for gpu in seen]
    assert gpus.num_gpus() == len(seen)


def test_no_driver_is_no_gpu_and_a_broken_one_is_a_stop(monkeypatch):
    def fail():
        raise pynvml.NVMLError(code)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert gpus.gpus_here() == []
    code = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(Stop, match="NVML"):
        gpus.gpus_here()
    assert gpus.num_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.gpus_here() == [], "nobody is asked"
