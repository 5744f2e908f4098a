"""One table of GPUs for all who ask, and the GPUs of a machine as a launch would see them."""

import re
from types import SimpleNamespace
from unittest import mock

import pynvml
import pytest

from study.core import gpus
from study.core.errors import Stop
from study.core.gpus import GPUS, LINKS
from tests.conftest import table

NAMES = table("core/names.toml")


def test_a_gpu_is_what_its_name_says():
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS), "no two have one name"
    for name, gpu in GPUS.items():
        assert {gpu.host_link, gpu.peer_link, gpu.network} <= set(LINKS)
        assert gpu.has_bf16 == ("tf32" in gpu.peaks), "both came with Ampere"
        assert gpu.flops_per_s(False) == gpu.peaks.get("bf16", gpu.peaks["fp16"])
        assert gpu.flops_per_s(False) > gpu.flops_per_s(True) >= gpu.flops_per_s(True, tf32=False) == gpu.peaks["fp32"]
        for printed in re.findall(r"-(\d+)GB$", name):
            assert gpu.memory_bytes == pytest.approx(int(printed) * 2**30, rel=0.01)


def test_a_gpu_is_named_as_people_do():
    said = NAMES["gpu"] | {name: name for name in GPUS} | {gpu.name: name for name, gpu in GPUS.items()}
    assert {text: gpus.gpu_named(text) for text in said} == said
    assert {text: gpus.taken(text) for text in NAMES["gpu_taken"]} == NAMES["gpu_taken"]
    for text, near in NAMES["no_gpu"].items():
        with pytest.raises(Stop, match="is not a known GPU") as stop:
            gpus.gpu_named(text)
        assert near in stop.value.remedy


PEAKS = """
NVIDIA H200 | bf16 | tf32 | 989.4e12
NVIDIA H200 | fp32 |      | 66.9e12
Tesla T4    | fp32 | tf32 | 8.1e12
NVIDIA H900 | bf16 | tf32 | None
            | fp32 | tf32 | None
"""


@pytest.mark.parametrize("case", PEAKS.strip("\n").splitlines())
def test_what_a_run_is_measured_against(case):
    """A T4 has no TF32."""
    name, precision, tf32, peak = (cell.strip() for cell in case.split("|"))
    assert gpus.peak_flops(name or None, precision, bool(tf32)) == (None if peak == "None" else float(peak))


# --- those of this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch):
    """A function that puts a driver with so many GPUs in NVML's place; or one that fails."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(gpus: int, error: Exception | None = None) -> None:
        monkeypatch.setattr(pynvml, "nvmlInit", mock.Mock(side_effect=error))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: gpus)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", int)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", "GPU {}".format)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda card: SimpleNamespace(total=(1 + card) * 10**10))

    return put


def test_the_gpus_of_a_machine(driver, monkeypatch):
    driver(3)
    assert gpus.gpus_here() == [("GPU 0", 10**10), ("GPU 1", 2 * 10**10), ("GPU 2", 3 * 10**10)]
    for chosen, number in {"1,2": 2, "GPU-8932f937": 1, "-1": 0, "": 0}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpus.num_gpus() == number


@pytest.mark.parametrize("error", [None, pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)])
def test_a_machine_without_gpus(driver, error):
    driver(0, error)
    assert gpus.gpus_here() == []


def test_a_driver_that_fails_is_a_stop(driver):
    driver(9, pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with pytest.raises(Stop, match="NVML: Driver"):
        gpus.gpus_here()
    assert gpus.num_gpus() == 0
