"""One table of GPUs for all who ask, and the GPUs of a machine as a launch would see them."""

import contextlib
import ctypes

import pynvml
import pytest

from study.core import gpus
from study.core.errors import Stop
from study.core.gpus import GPUS, LINKS


def test_a_gpu_is_what_its_name_says():
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS), "no two have one name"
    for name, gpu in GPUS.items():
        assert {gpu.host_link, gpu.peer_link, gpu.network} <= set(LINKS)
        assert gpu.has_bf16 == ("tf32" in gpu.peaks), "both came with Ampere"
        assert gpu.flops_per_s(False) == gpu.peaks.get("bf16", gpu.peaks["fp16"])
        assert gpu.flops_per_s(False) > gpu.flops_per_s(True) >= gpu.flops_per_s(True, tf32=False) == gpu.peaks["fp32"]
        printed = name.rpartition("-")[2].removesuffix("GB")
        if printed.isdigit():
            assert gpu.memory_bytes == pytest.approx(int(printed) * 2**30, rel=0.01)


def test_a_gpu_is_named_as_people_do():
    said = {"H100": "H100-80GB", "H100 PCIe": "H100-PCIe", "a100 40": "A100-40GB", "h100sxm": "H100-80GB"}
    said |= {"A10": "A10", "4090": "RTX4090", "nvidia rtx 3090": "RTX3090", "a10g": "A10G", "h20": "H20"}
    said |= {name: name for name in GPUS} | {gpu.name: name for name, gpu in GPUS.items()}
    assert {text: gpus.gpu_named(text) for text in said} == said
    for text, near in (("H900", "'H100'"), ("A11G", "'A10"), ("nvidia", "H100"), ("", "choose one of")):
        with pytest.raises(Stop, match="is not a known GPU") as stop:
            gpus.gpu_named(text)
        assert near in stop.value.remedy


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("NVIDIA H200", "bf16", True, 989.4e12),
        ("NVIDIA H200", "fp32", False, 66.9e12),
        ("Tesla T4", "fp32", True, 8.1e12),  # and no TF32
        ("NVIDIA H900", "bf16", True, None),
        (None, "fp32", True, None),
    ],
)
def test_what_a_run_is_measured_against(name, precision, tf32, peak):
    assert gpus.peak_flops(name, precision, tf32) == peak


# --- those of this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch):
    """CUDA and NVML are made to answer as with four GPUs, the last a part of one; CUDA counts them backwards."""
    names = {"GPU-00": 0, "GPU-11": 1, "GPU-22": 2, "MIG-33": 3}

    def by_uuid(name: str) -> int:
        if name not in names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return names[name]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_cuda_uuids", lambda: ["33", "22", "11", "00"])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda gpu: f"GPU {gpu}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: type("Memory", (), {"total": gpu * 10**9}))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda gpu: (9 if gpu == 3 else 7, 0))


def test_they_are_in_cudas_order(four, monkeypatch):
    """And what precision a launch takes depends on the first that it sees."""
    assert gpus.gpus_here() == [(f"GPU {gpu}", gpu * 10**9, 9 if gpu == 3 else 7) for gpu in (3, 2, 1, 0)]
    assert gpus.num_gpus() == 4
    for uuids, precision in ((["33", "22"], "bf16"), (["22"], "fp16"), ([], "fp32")):
        monkeypatch.setattr(gpus, "_cuda_uuids", lambda uuids=uuids: uuids)
        assert gpus.half_precision() == precision


def test_cuda_is_asked_for_uuids(monkeypatch):
    """A driver with two GPUs, with none, and with an error. Where all GPUs are hidden, nobody is asked."""

    class Driver:
        def __init__(self, code: int = 0):
            self.cuInit = lambda _: code

        def cuDeviceGetCount(self, count) -> int:
            count._obj.value = 2
            return 0

        def cuDeviceGet(self, device, number: int) -> int:
            device._obj.value = number
            return 0

        def cuDeviceGetUuid_v2(self, raw, device) -> int:
            raw[15] = 0xA0 + device.value
            return 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert gpus._cuda_uuids() == [f"00000000-0000-0000-0000-0000000000{end}" for end in ("a0", "a1")]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(gpus.CUDA_ERROR_NO_DEVICE))
    assert gpus.gpus_here() == []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert gpus.gpus_here() == [], "a file that stands in for the driver while something is linked"
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(999))
    with pytest.raises(Stop, match="error 999"):
        gpus.gpus_here()
    assert gpus.num_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus.gpus_here() == []


@pytest.mark.parametrize(
    ("code", "broken"), [(pynvml.NVML_ERROR_DRIVER_NOT_LOADED, True), (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False)]
)
def test_a_broken_driver_is_a_stop_and_no_driver_is_no_gpu(four, monkeypatch, code, broken):
    def fail():
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(Stop, match="NVML") if broken else contextlib.nullcontext():
        assert gpus.gpus_here() == []
    assert gpus.num_gpus() == 0
