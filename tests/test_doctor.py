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
import pynvml
import pytest
from conftest import ROOT
from test_operators import leave_compiled

from study.io.numbers import size
from study.machine import disk, doctor, gpus, operators, software
from study.machine.operators import OPERATORS
from study.spec import arms

SPEED_BYTES = 4 * disk.REQUEST_BYTES
BIN = Path(sys.executable).parent  # where ninja is, whether or not the environment is active


def arm(name: str) -> arms.Arm:
    return arms.read(arms.all_paths()[name])


def tool(folder: Path, name: str, says: str = "tool 1.2.3") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
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


@pytest.mark.parametrize("name", arms.NAMES)
def test_every_arm_can_run_here(name, monkeypatch):
    """On the machine as it is: nothing that runs may be refused."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    assert doctor.why_not(arm(name), gpus=0) is None


def test_what_needs_no_operator_needs_no_tool(bare):
    assert doctor.why_not(arm("single"), gpus=0) is None
    assert doctor.why_not(arm("ddp"), gpus=0) is None
    assert doctor.why_not(arm("zero3"), gpus=1) is None, "with a GPU the collectives are NCCL's"


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


def test_a_compiler_is_the_one_that_is_named(bare, monkeypatch):
    tool(bare, "g++")
    assert operators.compiler() is None, "PyTorch calls c++"
    monkeypatch.setenv("CXX", "g++ -m64")
    assert operators.compiler() == str(bare / "g++")


def test_an_arm_for_more_gpus_than_there_are():
    eight = replace(arm("ddp"), num_processes=8)
    stop = doctor.why_not(eight, gpus=2)
    assert (stop.status, "8 processes" in stop.what) == ("unavailable", True)
    assert "--num_processes 2" in stop.remedy
    assert doctor.why_not(eight, gpus=8) is None
    assert doctor.why_not(eight, gpus=0) is None, "ranks on the CPU are as many as one likes"


def test_the_disk_needs_the_cuda_toolkit_on_a_gpu(bare, monkeypatch, tmp_path):
    tool(bare, "ninja")
    tool(bare, "c++")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert "CUDA_HOME" in doctor.why_not(arm("zero3_nvme"), gpus=1).remedy
    assert doctor.why_not(arm("zero3_cpu"), gpus=1) is None, "Adam in host memory is compiled without CUDA"
    tool(tmp_path / "cuda" / "bin", "nvcc")
    assert doctor.why_not(arm("zero3_nvme"), gpus=1) is None
    monkeypatch.delenv("CUDA_HOME")
    tool(bare, "nvcc")
    assert operators.nvcc() == str(bare / "nvcc")


# --- examine --------------------------------------------------------------------------------------------------------


def test_this_machine_is_told_as_it_is(examine):
    findings = examine()
    assert all(finding.found for finding in findings.values())
    assert findings["Python"].found == ".".join(map(str, sys.version_info[:3]))
    assert findings["cores"].found == str(len(os.sched_getaffinity(0)))
    assert findings["host memory"].found.startswith(size(psutil.virtual_memory().total))
    assert findings["torch"].found.startswith(metadata.version("torch"))


def test_a_bare_machine_is_told_what_to_get(bare, examine):
    findings = examine()
    for what, remedy in {"C++ compiler": "g++", "ninja": "pip", "operators": "study operators"}.items():
        assert remedy in findings[what].remedy
    tool(bare, "ninja", "1.13.0.git")
    tool(bare, "c++", "c++ (Some 12.2.0-14) 12.2.0")
    leave_compiled()
    findings = examine()
    assert findings["C++ compiler"].found == f"{bare / 'c++'} 12.2.0"
    assert findings["ninja"].found == f"{bare / 'ninja'} 1.13.0"
    assert findings["operators"] == doctor.Finding("operators", "compiled")


def test_little_shared_memory_is_a_fault(monkeypatch, tmp_path, examine):
    """What Docker gives unless told otherwise is less than one rank of DeepSpeed's takes."""
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = examine()["shared memory"]
    assert finding.found == "67.1 MB free"
    assert "--shm-size" in finding.remedy


def test_no_gpu_is_no_fault(monkeypatch, examine):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = examine()
    assert findings["devices"].fine
    assert "gloo" in findings["devices"].found
    assert "CUDA toolkit" not in findings


def test_gpus_are_told_and_want_the_toolkit(bare, monkeypatch, tmp_path, examine):
    two = [gpus.Visible(f"Some GPU {number}", 80 * 10**9, 8) for number in range(2)]
    monkeypatch.setattr(doctor, "gpus_here", lambda: two)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    findings = examine()
    assert findings["devices"].found == "Some GPU 0 (80 GB), Some GPU 1 (80 GB)"
    assert "CUDA_HOME" in findings["CUDA toolkit"].remedy
    assert OPERATORS["deepspeed_shm_comm"].purpose not in findings["operators"].found


def test_a_driver_that_does_not_answer_is_no_absence(monkeypatch, examine):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    finding = examine()["devices"]
    assert (finding.fine, finding.found.startswith("unknown")) == (False, True)


# --- the disk -------------------------------------------------------------------------------------------------------


def test_the_speed_is_measured_past_the_cache_and_leaves_nothing(tmp_path, monkeypatch):
    """Every request is seen on its way: on a file that takes direct I/O, all bytes written and then read back."""
    seen, written = [], []
    pwrite, preadv = os.pwrite, os.preadv

    def watched_write(file, request, start):
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        assert list(tmp_path.iterdir()) == [], "not even while it runs: it may be killed"
        written.append(bytes(request))
        return pwrite(file, request, start)

    def watched_read(file, requests, start):
        count = preadv(file, requests, start)
        seen.append(bytes(requests[0]))
        return count

    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(os, "preadv", watched_read)
    try:
        speeds = disk.direct_speed(tmp_path, SPEED_BYTES)
    except OSError as error:
        pytest.skip(f"the folder of the tests refuses direct I/O: {error}")
    assert min(speeds) > 0
    assert sum(map(len, written)) == SPEED_BYTES
    assert seen == written
    assert len(set(written[0])) == 256, "zeros would flatter some disks"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["pwrite", "fsync", "preadv", "fcntl"])
def test_a_speed_that_cannot_be_measured_leaves_nothing(fails, monkeypatch, tmp_path, examine):
    """A full disk; and a file system without direct I/O, where the kernel refuses the flag."""
    code = errno.EINVAL if fails == "fcntl" else errno.ENOSPC

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl if fails == "fcntl" else os, fails, refuse)
    finding = examine()["disk"]
    assert os.strerror(code) in finding.found
    assert "refuses direct I/O" in finding.found
    assert "--nvme-dir" in finding.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc", "/proc/zero-study/below"])
def test_a_folder_that_holds_no_files(folder, examine):
    finding = examine(Path(folder))["disk"]
    assert ("in /proc" in finding.found, "--nvme-dir" in finding.remedy) == (True, True)


def test_a_folder_that_is_yet_to_be_made(tmp_path, examine):
    """It is not made: the one above tells what there is."""
    assert f" in {tmp_path}" in examine(tmp_path / "disk" / "deep")["disk"].found
    assert list(tmp_path.iterdir()) == []


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path):
    """A function that compares what is installed with these pins, and gives what differs."""

    def run(pins: dict[str, str]) -> dict[str, doctor.Finding]:
        path = tmp_path / "constraints.txt"
        path.write_text("# how it was made\n" + "".join(f"{name}=={version}\n" for name, version in pins.items()))
        return {finding.what: finding for finding in doctor.packages(path) if not finding.fine}

    return run


def test_what_agrees_and_what_differs(packages):
    installed = {name: metadata.version(name).partition("+")[0] for name in software.PACKAGES}
    assert packages(installed) == {}
    (numpy,) = packages(installed | {"numpy": "0.0.1"}).values()
    assert (metadata.version("numpy") in numpy.found, "0.0.1" in numpy.found) == (True, True)
    assert numpy.remedy == "pip install -c constraints.txt numpy"


def test_a_local_build_is_its_version(packages, monkeypatch):
    monkeypatch.setattr(software, "versions", lambda: dict.fromkeys(software.PACKAGES, "2.13.0+cpu"))
    pins = dict.fromkeys(software.PACKAGES, "2.13.0") | {"torch": "2.13.00"}
    assert packages(pins)["torch"].found == "2.13.0+cpu, and constraints.txt has 2.13.00"
    assert packages(pins).keys() == {"torch"}


def test_a_missing_package_and_a_missing_file(tmp_path, monkeypatch):
    for finding in doctor.packages(ROOT / "constraints.txt"):
        assert "has none" not in finding.found, "the repository's file pins each of the packages"
    versions = software.versions()
    monkeypatch.setattr(software, "versions", lambda: versions | {"deepspeed": None})
    (missing,) = [each for each in doctor.packages(ROOT / "constraints.txt") if each.what == "deepspeed"]
    assert "not installed" in missing.found
    assert missing.remedy == "pip install -c constraints.txt deepspeed"
    monkeypatch.setattr(software, "versions", lambda: versions)
    first, *others = doctor.packages(tmp_path / "constraints.txt")
    assert (first.fine, "no constraints.txt" in first.found) == (False, True)
    assert [finding.what for finding in others] == list(software.PACKAGES)
    assert all(finding.fine for finding in others), "there is nothing they differ from"
