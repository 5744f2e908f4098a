"""What the doctor finds: by taking away from this machine, one at a time, what the arms need."""

import errno
import fcntl
import os
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from test_operators import leave_compiled

from study.core import arms, doctor, gpus, machine
from study.core.doctor import OPERATORS
from study.core.text import size

SPEED_BYTES = 4 * machine.REQUEST_BYTES


def arm(name: str) -> arms.Arm:
    return arms.read(arms.all_paths()[name])


def tool(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.touch()
    path.chmod(0o755)
    return path


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


@pytest.fixture
def examine(tmp_path):
    """A function that examines this machine, and gives what was found by name."""

    def run(folder: Path = tmp_path) -> dict[str, doctor.Finding]:
        findings = doctor.examine(folder, SPEED_BYTES)
        assert len({finding.what for finding in findings}) == len(findings)
        return {finding.what: finding for finding in findings}

    return run


# --- why_not --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in arms.NAMES if name.startswith("zero")])
def test_one_tool_after_the_other(name, bare, tmp_path):
    """Without a GPU every arm with DeepSpeed needs ninja, and a compiler or what it has compiled before."""
    stop = doctor.why_not(arm(name), gpus=0)
    assert (stop.status, "ninja" in stop.what, "pip install ninja" in stop.remedy) == ("unavailable", True, True)
    tool(bare, "ninja")
    stop = doctor.why_not(arm(name), gpus=0)
    assert (stop.status, "C++ compiler" in stop.what, "g++" in stop.remedy) == ("unavailable", True, True)
    assert OPERATORS["deepspeed_shm_comm"].purpose in stop.what
    leave_compiled()
    stop = doctor.why_not(arm(name), gpus=0)
    assert (stop is None) == (name != "zero3_nvme"), "the disk operator asks for a compiler though it is compiled"
    shutil.rmtree(tmp_path / "extensions")
    tool(bare, "c++")
    assert doctor.why_not(arm(name), gpus=0) is None


def test_the_disk_and_the_quantizer_need_the_cuda_toolkit_on_a_gpu(bare, monkeypatch, tmp_path):
    tool(bare, "ninja")
    tool(bare, "c++")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in ("zero3_nvme", "zero3_qwz"):
        assert "CUDA_HOME" in doctor.why_not(arm(name), gpus=1).remedy
    assert doctor.why_not(arm("zero3_cpu"), gpus=1) is None, "Adam in host memory is compiled without CUDA"
    tool(tmp_path / "cuda" / "bin", "nvcc")
    assert doctor.why_not(arm("zero3_nvme"), gpus=1) is None
    monkeypatch.delenv("CUDA_HOME")
    tool(bare, "nvcc")
    assert doctor.nvcc() == str(bare / "nvcc")


def test_an_arm_for_more_gpus_than_there_are():
    eight = replace(arm("ddp"), num_processes=8)
    stop = doctor.why_not(eight, gpus=2)
    assert (stop.status, "8 processes" in stop.what) == ("unavailable", True)
    assert doctor.why_not(eight, gpus=8) is None
    assert doctor.why_not(eight, gpus=0) is None, "ranks on the CPU are as many as one likes"


# --- examine --------------------------------------------------------------------------------------------------------


def test_this_machine_is_told_as_it_is(examine, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = examine()
    assert findings["Python"].found == ".".join(map(str, sys.version_info[:3]))
    assert findings["cores"].found == str(len(os.sched_getaffinity(0)))
    assert findings["host memory"].found.startswith(size(psutil.virtual_memory().total))
    assert findings["torch"].found.startswith(metadata.version("torch"))
    assert findings["shared memory"].found == "67.1 MB free", "Docker's default is less than DeepSpeed's ranks take"
    assert "--shm-size" in findings["shared memory"].remedy
    assert findings["devices"].fine, "no GPU is no fault"
    assert "CUDA toolkit" not in findings


def test_a_bare_machine_is_told_what_to_get(bare, examine, monkeypatch, tmp_path):
    findings = examine()
    for what, remedy in {"C++ compiler": "g++", "ninja": "pip", "operators": "study doctor --fix"}.items():
        assert remedy in findings[what].remedy
    tool(bare, "ninja")
    tool(bare, "c++")
    leave_compiled()
    two = [gpus.Visible(f"Some GPU {number}", 80 * 10**9) for number in range(2)]
    monkeypatch.setattr(doctor, "gpus_here", lambda: two)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    findings = examine()
    assert findings["C++ compiler"].found == str(bare / "c++")
    assert findings["operators"] == doctor.Finding("operators", "compiled")
    assert findings["devices"].found == "Some GPU 0 (80 GB), Some GPU 1 (80 GB)"
    assert "CUDA_HOME" in findings["CUDA toolkit"].remedy


def test_a_disk_without_direct_io_is_a_fault(monkeypatch, tmp_path, examine):
    """Its folder is yet to be made: the one above tells what there is."""

    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    finding = examine(tmp_path / "disk" / "deep")["disk"]
    assert f"in {tmp_path}, which refuses direct I/O (Invalid argument)" in finding.found
    assert "--nvme-dir" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_all_bytes_are_written_past_the_cache_and_read_back(tmp_path, monkeypatch):
    written, read = [], []

    def watched_write(file, request, start):
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        assert list(tmp_path.iterdir()) == [], "not even while it runs: it may be killed"
        written.append(bytes(request))
        return len(request)

    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read.append(at) or len(into[0]))
    assert min(machine.disk_speed(tmp_path, SPEED_BYTES)) > 0
    assert read == [number * machine.REQUEST_BYTES for number in range(4)]
    assert (sum(map(len, written)), len(set(written[0]))) == (SPEED_BYTES, 256), "zeros would flatter some disks"


def test_packages_are_compared_with_the_pins(tmp_path, monkeypatch):
    versions = dict.fromkeys(machine.PACKAGES, "2.13.0+cpu") | {"deepspeed": None}
    monkeypatch.setattr(machine, "version", versions.get)
    path = tmp_path / "constraints.txt"
    assert all(each.fine for each in doctor.packages(path)), "in a wheel there is nothing to compare with"
    path.write_text("# how it was made\n" + "".join(f"{name}=={'2.13.0'}\n" for name in machine.PACKAGES))
    path.write_text(path.read_text().replace("numpy==2.13.0", "numpy==2.13.00"))
    differ = {each.what: each for each in doctor.packages(path) if not each.fine}
    assert differ.keys() == {"numpy", "deepspeed"}, "a local build is its version"
    assert differ["numpy"].found == "2.13.0+cpu, and constraints.txt has 2.13.00"
    assert differ["deepspeed"].found == "not installed, and constraints.txt has 2.13.0"
    assert differ["numpy"].remedy == "pip install -c constraints.txt numpy"
    constraints = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in constraints for name in machine.PACKAGES)
