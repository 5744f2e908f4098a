"""What the doctor finds: by taking away from this machine, one at a time, what the arms need."""

import errno
import fcntl
import os
import shutil
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from study.core import arms, doctor, gpus, machine
from study.core.errors import Stop
from study.core.text import size
from tests.core.test_operators import leave_compiled


def arm(name: str) -> arms.Arm:
    return arms.load_arm(name)


def tool(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch(0o755)


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """No operator is compiled, and no tool in the one folder on its PATH."""
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return path


def examine(folder: Path) -> dict[str, doctor.Examined]:
    return {finding.what: finding for finding in doctor.examine(folder)}


@pytest.mark.parametrize("name", ["zero2", "zero3_cpu", "zero3_nvme"])
def test_one_tool_after_the_other(name, bare, tmp_path):
    """Without a GPU every arm with DeepSpeed needs ninja, and a compiler or what it has compiled before."""
    stop = doctor.why_not(arm(name), gpus=0)
    assert (stop.status, "ninja" in stop.what, "pip install ninja" in stop.remedy) == ("unavailable", True, True)
    tool(bare, "ninja")
    stop = doctor.why_not(arm(name), gpus=0)
    assert (stop.status, "C++ compiler" in stop.what, "g++" in stop.remedy) == ("unavailable", True, True)
    leave_compiled()
    assert doctor.why_not(arm(name), gpus=0) is None
    shutil.rmtree(tmp_path / "extensions")
    tool(bare, "c++")
    assert doctor.why_not(arm(name), gpus=0) is None


def test_the_disk_and_the_quantizer_need_the_cuda_toolkit_on_a_gpu(bare, monkeypatch, tmp_path):
    for name in ("ninja", "c++"):
        tool(bare, name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in ("zero3_nvme", "zero3_qwz"):
        assert "CUDA_HOME" in doctor.why_not(arm(name), gpus=1).remedy
    assert doctor.why_not(arm("zero3_cpu"), gpus=1) is None, "Adam in host memory is compiled without CUDA"
    tool(tmp_path / "cuda/bin", "nvcc")
    assert doctor.why_not(arm("zero3_nvme"), gpus=1) is None


def test_this_machine_is_told_as_it_is(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = examine(tmp_path)
    assert findings["cores"].found == str(len(os.sched_getaffinity(0)))
    assert findings["host memory"].found.startswith(size(psutil.virtual_memory().total))
    assert findings["torch"] == doctor.Examined("torch", metadata.version("torch"))
    assert findings["shared memory"].found == "67.1 MB free", "Docker's default is less than DeepSpeed's ranks take"
    assert "--shm-size" in findings["shared memory"].remedy
    assert findings["shared memory"].id == "little_shared_memory"
    assert findings["devices"].fine, "no GPU is no fault"
    assert "CUDA toolkit" not in findings


def test_a_bare_machine_is_told_what_to_get(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "version", lambda package: None)
    findings = examine(tmp_path)
    needs = {
        "C++ compiler": ("g++", "no_compiler"),
        "ninja": ("pip", "no_ninja"),
        "operators": ("study doctor --fix", "operators_not_compiled"),
        "torch": ("make setup", "package_missing"),
    }
    for what, (remedy, id) in needs.items():
        assert remedy in findings[what].remedy
        assert findings[what].id == id
    tool(bare, "ninja")
    tool(bare, "c++")
    leave_compiled()
    two = [gpus.Visible(f"Some GPU {number}", 80 * 10**9) for number in range(2)]
    monkeypatch.setattr(doctor, "gpus_here", lambda: two)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    findings = examine(tmp_path)
    assert findings["C++ compiler"] == doctor.Examined("C++ compiler", str(bare / "c++"))
    assert findings["operators"] == doctor.Examined("operators", "compiled")
    assert findings["devices"].found == "Some GPU 0 (80 GB), Some GPU 1 (80 GB)"
    assert "CUDA_HOME" in findings["CUDA toolkit"].remedy
    assert findings["CUDA toolkit"].id == "no_cuda_toolkit"


def test_a_disk_without_direct_io_is_a_fault(monkeypatch, tmp_path):
    """Its folder is yet to be made: the one above tells what there is."""

    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    finding = examine(tmp_path / "disk/deep")["disk"]
    assert f"in {tmp_path}, which refuses direct I/O (Invalid argument)" in finding.found
    assert "--nvme-dir" in finding.remedy
    assert finding.id == "no_direct_io"
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_cannot_be_asked_are_a_fault(monkeypatch, tmp_path):
    def refuse():
        raise Stop("the driver does not answer", "restart it")

    monkeypatch.setattr(doctor, "gpus_here", refuse)
    devices = examine(tmp_path)["devices"]
    assert (devices.remedy, devices.id) == ("restart it", "devices_unknown")
