"""Compiled operators: where they are kept, who compiles them, and that nobody waits for a process that has died."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from study.core import arms, machine, operators
from study.core.errors import Stop
from study.core.operators import OPERATORS
from tests.conftest import ROOT, python, ranks_of

PATHS = arms.all_paths()
# Another process: it takes the guard, PyTorch's lock or both, writes "ready", and sleeps.
HOLDER = """
import os, sys, time
from study.core import operators
place = operators.operator_folder("cpu_adam")
place.mkdir(parents=True, exist_ok=True)
if "guard" in sys.argv[1]:
    context = operators._guarded("cpu_adam", print)
    context.__enter__()
if "lock" in sys.argv[1]:
    held = os.open(place / "lock", os.O_CREAT | os.O_EXCL)  # as PyTorch's FileBaton does
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
if "lock" in sys.argv[1]:
    os.remove(place / "lock")
"""


@pytest.fixture
def extensions(monkeypatch, tmp_path) -> Path:
    """An empty folder for compiled operators."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


def hold(what: str, seconds: float = 60) -> subprocess.Popen:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, what, str(seconds)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"ready\n"
    return holder


def leave_compiled(*names: str) -> None:
    """What compiling an operator leaves, as far as it is looked at."""
    for name in names or OPERATORS:
        place = operators.operator_folder(name)
        place.mkdir(parents=True)
        (place / f"{name}.so").write_bytes(b"\x7fELF")


def compiler(folder: Path, instead: str, otherwise: str = f'exec {shutil.which("c++")} "$@"') -> str:
    """A C++ compiler that does something else instead of compiling, and answers as the real one does otherwise."""
    path = folder / "c++"
    path.write_text(f'#!/bin/sh\n[ "$1" = -MMD ] || {{ {otherwise}; }}\n{instead}\n')
    path.chmod(0o755)
    return str(path)


# --- nobody waits for the dead --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["guard", "guard and lock"])
def test_what_a_killed_process_leaves_holds_up_nobody(extensions, what):
    """PyTorch's lock is the file of its FileBaton. It is seconds old here: its age says nothing."""
    holder = hold(what)
    with holder.stdout:
        holder.kill()
        holder.wait()
    lock = operators.operator_folder("cpu_adam") / "lock"
    assert lock.exists() == ("lock" in what), "the premise: it is left behind"
    messages, started = [], time.monotonic()
    with operators._guarded("cpu_adam", messages.append):
        assert time.monotonic() - started < 2
        assert not lock.exists()
    assert messages == []


def test_a_living_process_is_waited_for_with_a_message(extensions):
    holder = hold("guard and lock", seconds=0.5)
    messages = []
    with holder.stdout, operators._guarded("cpu_adam", messages.append):
        assert holder.wait(timeout=5) == 0, "it found its lock where it had put it"
    assert messages == ["waiting for another process that compiles DeepSpeed's cpu_adam operator: some minutes, once"]


# --- what is compiled is loaded, what is missing is compiled --------------------------------------------------------


def test_what_is_compiled_is_not_compiled_again(tmp_path):
    """The real operator, in a copy, with a lock that somebody has left: it is loaded, and stays as it is."""
    source = operators.operator_folder("deepspeed_shm_comm")
    if not operators.compiled("deepspeed_shm_comm"):
        pytest.fail("run `make setup` first: it compiles the operators")
    copy = tmp_path / "extensions" / source.name
    shutil.copytree(source, copy)
    (copy / "lock").touch()
    before = {path.name: path.stat().st_mtime_ns for path in copy.glob("*.*o")}
    compiler(tmp_path, 'echo "it compiles"\nexit 1')
    env = {"TORCH_EXTENSIONS_DIR": str(copy.parent), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = python("-m", "study.core.operators", source.name, env=os.environ | env)
    assert "compil" not in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert before == {path.name: path.stat().st_mtime_ns for path in copy.glob("*.*o")}
    assert f"{source.name}.so" in before


def test_a_compiler_that_fails_is_told_in_its_own_words_and_had_less_to_compile(extensions, tmp_path):
    """Without a GPU: one file, no symbols of debuggers, and of PyTorch's headers those that operators use."""
    calls = tmp_path / "calls"
    cxx = compiler(tmp_path, f'echo "$@" >> {calls}\necho "adam.cpp:1: error: out of patience"\nexit 1')
    done = python("-m", "study.core.operators", "cpu_adam", env=os.environ | {"CXX": cxx})
    assert done.returncode == 2, done.stdout
    assert "adam.cpp:1: error: out of patience" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    log = extensions / "cpu_adam/compiler.log"
    assert str(log) in done.stderr
    assert "FAILED" in log.read_text()
    compilations = [line.split() for line in calls.read_text().splitlines() if " -c " in line and "cpu_adam" in line]
    ((*arguments,),) = compilations
    assert arguments.index(f"-I{operators.HEADERS}") < arguments.index("-isystem")
    assert arguments.index("-g0") > arguments.index("-g")
    assert (operators.HEADERS / "torch/extension.h").exists()


def test_it_compiles_for_the_device_that_is_here_and_not_for_what_an_image_names(monkeypatch):
    """DeepSpeed's builder reads the 0a of 9.0a as a number."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    class Builder(CUDAOpBuilder):
        sources = absolute_name = None
        jit_mode = True

        def load(self, verbose: bool) -> None:
            self.compute_capability_args()  # as jit_load does, before it compiles

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a;8.0")
    builder = Builder("pin_memory")
    builder.jit_mode = True
    with pytest.raises(ValueError, match="0a"):
        builder.load(verbose=False)
    operators._compile("pin_memory", builder, gpus=1)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0+PTX"


# --- libaio ---------------------------------------------------------------------------------------------------------


def test_async_io_is_compiled_with_our_libaio_alone():
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    builder = AsyncIOBuilder()
    operators._bring_libaio(builder)
    assert Path(builder.sources()[-1]).read_text().count("io_submit") > 0
    assert builder.include_paths()[0] == str(operators.LIBAIO)
    assert builder.extra_ldflags() == ["-fopenmp"]
    assert builder.is_compatible(verbose=False)


# --- make setup -----------------------------------------------------------------------------------------------------


def test_set_up_compiles_what_is_missing_and_can_be_compiled(extensions, monkeypatch, capfd):
    """For some arms only what these need: in Colab minutes count. It needs no torch: every `make` calls it."""
    monkeypatch.setattr(operators, "compile_all", sorted)
    monkeypatch.setattr(operators, "num_gpus", lambda: 0)
    assert operators.compile_missing(("single", "fsdp2_cpu")) == []
    assert operators.compile_missing(("zero2_cpu", "zero3_cpu")) == ["cpu_adam", "deepspeed_shm_comm"]
    leave_compiled("cpu_adam", "deepspeed_shm_comm", "pin_memory")
    assert operators.compile_missing() == ["async_io"]
    monkeypatch.setattr(operators, "compiler", lambda: None)
    assert operators.compile_missing() == []
    assert "apt-get install g++" in capfd.readouterr().out
    code = "import sys; from study.core import operators; operators.missing(0); print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


# --- where they are kept --------------------------------------------------------------------------------------------


def test_they_are_kept_in_the_environment_they_are_compiled_for(monkeypatch):
    """And what is started from there looks for them in the same place."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    code = "import study, subprocess; subprocess.run(['printenv', 'TORCH_EXTENSIONS_DIR'])"
    assert Path(python("-c", code).stdout.strip()).is_relative_to(Path(sys.prefix) / "torch_extensions")
    env = os.environ | {"TORCH_EXTENSIONS_DIR": "/mine"}
    assert python("-c", code, env=env).stdout == "/mine\n", "a user's choice is kept"


def test_an_upgrade_has_a_folder_of_its_own(monkeypatch):
    before = machine.operators_folder()
    monkeypatch.setattr(machine, "version", {"torch": "99.0"}.get)
    assert machine.operators_folder() != before


def test_a_folder_that_cannot_be_written_asks_for_another(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(Stop, match="cannot be written") as stop, operators._guarded("cpu_adam", print):
        pass
    assert "TORCH_EXTENSIONS_DIR" in stop.value.remedy


def test_it_looks_where_pytorch_puts_them(extensions, tmp_path):
    code = "from torch.utils import cpp_extension; print(cpp_extension._get_build_directory('cpu_adam', False))"
    folder = ranks_of(code, tmp_path, ranks=1).output.splitlines()[-1]
    assert Path(folder) == operators.operator_folder("cpu_adam")
