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


class Driver:
    """CUDA's driver with so many GPUs."""

    def __init__(self, gpus: int, code: int = 0):
        self.gpus = gpus
        self.code = code

    def cuInit(self, _) -> int:
        return self.code

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name, length: int, device) -> int:
        name.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, total_bytes, device) -> int:
        total_bytes._obj.value = (1 + device.value) * 10**10
        return 0


@pytest.fixture
def driver(monkeypatch):
    """A function that puts a driver in the place of CUDA's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    return lambda cuda: monkeypatch.setattr(ctypes, "CDLL", lambda _: cuda)


def test_the_gpus_of_a_machine(driver, monkeypatch):
    driver(Driver(2))
    assert gpus.gpus_here() == [("GPU 0", 10**10), ("GPU 1", 2 * 10**10)]
    assert gpus.num_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus.gpus_here() == [], "nobody is asked"


def test_a_machine_without_gpus_and_a_driver_that_fails(driver):
    for none in (Driver(9, code=gpus.CUDA_ERROR_NO_DEVICE), object()):  # the second: a stub to link with
        driver(none)
        assert gpus.gpus_here() == []
    driver(Driver(9, code=999))
    with pytest.raises(Stop, match="error 999"):
        gpus.gpus_here()
    assert gpus.num_gpus() == 0


@pytest.mark.parametrize(
    ("code", "broken"), [(pynvml.NVML_ERROR_DRIVER_NOT_LOADED, True), (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False)]
)
def test_a_broken_driver_is_a_stop_and_no_driver_is_no_gpu(driver, monkeypatch, code, broken):
    def fail():
        raise pynvml.NVMLError(code)

    driver(Driver(9))
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(Stop, match="NVML") if broken else contextlib.nullcontext():
        assert gpus.gpus_here() == []
    assert gpus.num_gpus() == 0
