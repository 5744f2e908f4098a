"""On a machine without a network: installing the pack, running profiles, and bringing back the results."""

import argparse
import ast
import ctypes
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_operators import compiler

from study.errors import Stop
from study.extras.offline import parcel
from study.extras.offline import run as offline
from study.extras.offline.run import PROFILES
from study.machine import operators
from study.records import runs
from study.sweeps import protocol, sweep

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    """The work folder of that machine."""
    monkeypatch.setattr(offline, "WORK", tmp_path / "work")
    monkeypatch.setattr(offline, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(offline, "RESULTS", tmp_path / "work" / "results")
    return tmp_path / "work"


@pytest.fixture
def pack(tmp_path, monkeypatch) -> Path:
    """A pack of one wheel, `packed_thing`."""
    folder = tmp_path / "pack"
    (folder / "wheels").mkdir(parents=True)
    info = "packed_thing-1.dist-info"
    with zipfile.ZipFile(folder / "wheels" / "packed_thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("packed_thing.py", "WORTH = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: packed-thing\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(offline, "NEEDED", "json packed_thing")
    write_manifest(folder)
    return folder


def write_manifest(folder: Path, **more) -> None:
    wheels = ["packed_thing-1-py3-none-any.whl"]
    manifest = {"python": HERE, "machine": platform.machine(), "wheels": wheels} | more
    (folder / "pack.json").write_text(json.dumps(manifest))


def options(tmp_path, *profiles: str, minutes: float = 9) -> argparse.Namespace:
    folders = {name: tmp_path / name for name in ("pack", "out", "reports")}
    return argparse.Namespace(profiles=list(profiles), minutes=minutes, scale="tiny", **folders)


def a_run(folder: Path, status: str = "done", lines: int = 3) -> None:
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"status": status}))
    for name in ("steps.jsonl", "log.txt", "output.txt"):
        (folder / name).write_text("".join(f"line {i}\n" for i in range(lines)))


def brought_back(out: Path) -> dict[str, bytes]:
    contents = {}
    for part in sorted(out.glob("records-*.tar.gz")):
        with tarfile.open(part) as archive:
            contents |= {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
    return contents


@pytest.fixture
def there_and_back(tmp_path, work):
    """A function that packs the results of that machine, and unpacks them here. Gives the number of new records."""

    def travel(brought: set[Path] = frozenset()) -> int:
        parcel.pack_back(work / "results", tmp_path / "out", set(brought))
        return parcel.unpack(tmp_path / "out", tmp_path / "reports")

    return travel


# --- profiles ------------------------------------------------------------------------------------------------------


def test_every_profile_is_made_of_steps_there_are():
    for steps in PROFILES.values():
        for kind, *words in steps:
            if kind == "sweep":
                cells = protocol.cells(protocol.read(words[0]), "one_gpu")
                assert sweep.chosen(cells, filters(words)), words
            else:
                assert kind in ("bench", "kernels", "tests")
                for cell in cells:  # otherwise a window would start, at its end, what it cannot finish
                    reserved = cell.reserve_s if isinstance(cell.reserve_s, dict) else {"": cell.reserve_s}
                    assert reserved, cell.name
                    assert all(0 < seconds < 9 * 60 for seconds in reserved.values()), cell.name


def test_the_sets_of_tests_leave_none_out():
    source = (offline.ROOT / "tests" / "test_gpu.py").read_text()
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and "test" in node.name]
    sets = [expression.split(" or ") for expression in offline.TESTS.values()]
    for name in names:
        assert sum(any(word in name for word in words) for words in sets) == 1, name


def filters(words: Sequence[str]) -> tuple[str, ...]:
    """What a sweep's one --only is given: everything up to the next option."""
    assert words.count("--only") <= 1, "a second one would override the first"
    after = words[words.index("--only") + 1 :] if "--only" in words else []
    return tuple(itertools.takewhile(lambda word: not word.startswith("--"), after))


# --- install -------------------------------------------------------------------------------------------------------


def test_the_pack_is_installed_once(pack, work):
    offline.install(pack)
    assert offline.environment()["PYTHONPATH"].split(os.pathsep)[:2] == [str(offline.ROOT), f"{work}/site"]
    words = [sys.executable, "-c", "import packed_thing; print(packed_thing.__file__, packed_thing.WORTH)"]
    child = subprocess.run(words, env=offline.environment(), capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(work / "site" / "packed_thing.py"), "42"]
    (work / "site" / "mark").touch()
    offline.install(pack)
    assert (work / "site" / "mark").exists(), "it is there already"
    write_manifest(pack, packed_utc="later")
    offline.install(pack)
    assert not (work / "site" / "mark").exists(), "another pack replaces it"


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"python": "3.9"}, "is for Python 3.9"),
        ({"machine": "riscv64"}, "on riscv64"),
        ({"wheels": ["gone-1-py3-none-any.whl"]}, "pip could not install"),
    ],
)
def test_a_pack_for_another_machine_is_refused(manifest, words, pack):
    write_manifest(pack, **manifest)
    with pytest.raises(Stop, match=words):
        offline.install(pack)


def test_what_is_missing_is_named(pack, tmp_path, monkeypatch):
    with pytest.raises(Stop, match="is not a complete pack") as caught:
        offline.install(tmp_path)
    assert "make gpu" in caught.value.remedy
    monkeypatch.setattr(offline, "NEEDED", "json no_such_thing_there")
    with pytest.raises(Stop, match="No module named 'no_such_thing_there'") as caught:
        offline.install(pack)
    assert "--have" in caught.value.remedy


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_linker_is_given_a_libcuda(pack, tmp_path, monkeypatch):
    """Empty: what is linked against it does not ask for it when it runs."""
    offline.install(pack)
    (tmp_path / "it.c").write_text("int it(void) { return 42; }")
    words = ["cc", "-shared", "-fPIC", "-Wl,--as-needed", "-o", "it.so", "it.c", "-lcuda"]
    subprocess.run(words, cwd=tmp_path, env=offline.environment(), check=True)
    assert ctypes.CDLL(str(tmp_path / "it.so")).it() == 42


def test_nothing_but_pythons_own_library_is_needed_to_install():
    """An isolated Python, which sees no installed package, gets as far as the pack."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(offline.ROOT)!r})\n"
        "sys.argv[1:] = ['run', 'smoke', '--reports', 'r', '--pack', '/none']\n"
        "runpy.run_module('study.extras.offline', run_name='__main__')"
    )
    child = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert child.stderr.startswith("/none is not a complete pack. What to do: "), child.stderr
    assert child.returncode == 2


# --- a window ------------------------------------------------------------------------------------------------------


def test_a_window_runs_its_profile_and_packs_the_results(tmp_path, pack, work, monkeypatch):
    """Calls are only noted; the second step leaves something, and the exit code says so."""
    called = []

    def call(words: list[str], ends: float, output=None) -> int:
        called.append(" ".join(words[1:]))
        if "sweep" in words:
            a_run(Path(words[words.index("--runs") + 1]) / f"cell-{len(called)}")
        return 3 if "part=*ladder" in words else 0

    monkeypatch.setattr(offline, "call", call)
    assert offline.run(options(tmp_path, "guelph")) == 3
    assert [words.split()[2] for words in called[:2]] == ["operators", "peaks"]
    assert [words.split("--only ")[1].split()[0] for words in called[2:]] == ["part=loss", "part=*ladder", "part=seeds"]
    assert all(f"--runs {work}/results/runs/guelph" in words for words in called[2:])
    minutes = float(called[2].split("--minutes ")[1])
    assert 9 - 2 * offline.LAST_S / 60 < minutes < 9 - offline.LAST_S / 60 + 0.01
    assert len([name for name in brought_back(tmp_path / "out") if name.endswith("record.json")]) == 3


def test_each_set_of_tests_is_run_once(tmp_path, pack, work, monkeypatch):
    """A set that was ended, or where pytest failed, runs again in the next window; one that ended does not."""
    called, ended = [], {"arms": None, "precision": 3}  # 3: an internal error of pytest

    def call(words: list[str], ends: float, output=None) -> int | None:
        if "pytest" not in words:
            return 0
        name = next(name for name, expression in offline.TESTS.items() if expression in words)
        called.append(name)
        output.write(f"{name}: 3 passed\n")
        return ended.get(name, 1)  # 1: a test failed, which is no reason to run it again

    monkeypatch.setattr(offline, "call", call)
    assert offline.run(options(tmp_path, "tests")) == 3
    parcel.unpack(tmp_path / "out", tmp_path / "reports")
    assert (tmp_path / "reports" / "tests-instruments.txt").read_text() == "instruments: 3 passed\n"
    ended.clear()
    assert offline.run(options(tmp_path, "tests")) == 0
    assert called == ["instruments", "arms", "precision", "arms", "precision"]


def test_a_program_that_hangs_is_ended(capsys):
    """And the programs that it started."""
    started = time.monotonic()
    code = "import subprocess, time; subprocess.Popen(['sleep', '61.25']); time.sleep(60)"
    assert offline.call([sys.executable, "-c", code], started + 2) is None
    assert time.monotonic() - started < 15
    assert "the time is up" in capsys.readouterr().out
    assert subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True).stdout == b""


# --- there and back ------------------------------------------------------------------------------------------------


def test_of_a_run_that_is_done_only_the_record_travels(tmp_path, work):
    a_run(work / "results" / "runs" / "p" / "fine.1")
    a_run(work / "results" / "runs" / "p" / "bad.1", "failed", lines=1000)
    parcel.pack_back(work / "results", tmp_path / "out", set())
    contents = brought_back(tmp_path / "out")
    of_bad = {f"runs/p/bad.1/{name}" for name in ("record.json", "log.txt", "output.txt")}
    assert contents.keys() == {"runs/p/fine.1/record.json"} | of_bad
    lines = contents["runs/p/bad.1/output.txt"].decode().splitlines()
    assert (lines[-1], len(lines)) == ("line 999", parcel.LAST_LINES)


def test_parts_are_small_enough_and_whole_together(tmp_path, work, monkeypatch, there_and_back):
    """Twenty incompressible records of 50 kB in parts of about 200 kB, and back again."""
    monkeypatch.setattr(parcel, "PART_BYTES", 200_000)
    for i in range(20):
        folder = work / "results" / "runs" / "p" / f"cell{i:02}.1"
        a_run(folder)
        (folder / "record.json").write_text(json.dumps({"status": "done", "n": os.urandom(37_500).hex()}))
    there_and_back()
    parts = list((tmp_path / "out").iterdir())
    assert len(parts) > 2
    assert all(part.stat().st_size < 300_000 for part in parts)
    for path in (work / "results").rglob("record.json"):
        back = json.loads((tmp_path / "reports" / path.relative_to(work / "results")).read_text())
        assert back == json.loads(path.read_text())


def test_unpacking_keeps_files_unless_they_are_broken(tmp_path, work, there_and_back):
    a_run(work / "results" / "runs" / "p" / "a.1")
    here = tmp_path / "reports" / "runs" / "p" / "a.1" / "record.json"
    here.parent.mkdir(parents=True)
    here.write_text('"mine"')
    assert there_and_back() == 0, "none is new"
    assert here.read_text() == '"mine"'
    here.write_text('{"half')
    assert there_and_back() == 1
    assert json.loads(here.read_text()) == {"status": "done"}
    assert [path.name for path in here.parent.iterdir()] == ["record.json"]
    with pytest.raises(Stop, match="nothing to unpack"):
        parcel.unpack(tmp_path / "none", tmp_path / "reports")


def test_paths_of_that_machine_are_not_unpacked(tmp_path, work, there_and_back):
    run = work / "results" / "runs" / "p" / "a.1"
    a_run(run)
    (run / "record.json").write_text(json.dumps({"status": "failed", "error": "no room in /home/me/data/imdb"}))
    (run / "log.txt").write_text("File /home/me/venv/torch.py, line 3\n")
    there_and_back()
    back = tmp_path / "reports" / "runs" / "p" / "a.1"
    assert json.loads((back / "record.json").read_text())["error"] == "no room in imdb"
    assert (back / "log.txt").read_text() == "File torch.py, line 3\n"


def sealed(out: Path, contents: dict[str, bytes]) -> None:
    """A manifest for a part that the packer would not write."""
    listed = {name: [len(content), hashlib.sha256(content).hexdigest()] for name, content in contents.items()}
    (out / parcel.MANIFEST).write_text(json.dumps({"files": listed}))


def a_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


NAMES = "../escaped.txt runs/p/../../../record.json /tmp/escaped/record.json README.md runs/p/evil.py ./peaks.json"


@pytest.mark.parametrize(
    "member",
    [
        *map(a_member, [*NAMES.split(), f"runs/p/{'n' * 201}/record.json"]),
        a_member("runs/p/record.json", tarfile.SYMTYPE, "/etc/passwd"),
        a_member("runs/p/record.json", tarfile.GNUTYPE_SPARSE),
        a_member("runs", tarfile.DIRTYPE),
    ],
    ids=lambda member: f"{member.name}-{member.type}",
)
def test_a_part_with_anything_else_in_it_is_refused_whole(member, tmp_path):
    """Before anything is written, in one sentence, and whatever else is in it."""
    reports, out = tmp_path / "reports", tmp_path / "out"
    for folder in (reports, out):
        folder.mkdir()
    (reports / "README.md").write_text("mine")
    with tarfile.open(out / "records-1.tar.gz", "w:gz") as archive:
        for header in (a_member("runs/p/good.1/record.json"), member):
            archive.addfile(header, io.BytesIO(b""))
    sealed(out, {"runs/p/good.1/record.json": b""})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Stop, match=r"is not a record|name of a file"):
        parcel.unpack(out, reports)
    assert sorted(tmp_path.rglob("*")) == before
    assert (reports / "README.md").read_text() == "mine"


def test_a_damaged_part_is_refused(tmp_path, work, monkeypatch):
    a_run(work / "results" / "runs" / "p" / "a.1")
    (part,) = parcel.pack_back(work / "results", tmp_path / "out", set())
    whole = part.read_bytes()
    for content in (whole[:-20], b"text"):
        part.write_bytes(content)
        with pytest.raises(Stop, match="incomplete or not an archive"):
            parcel.unpack(tmp_path / "out", tmp_path / "reports")
    part.write_bytes(whole)
    monkeypatch.setattr(parcel, "MIN_RATIO_BYTES", 1000)
    monkeypatch.setattr(parcel, "MAX_RATIO", 1)
    with pytest.raises(Stop, match="unpacks to more than"):
        parcel.unpack(tmp_path / "out", tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


A_RECORD, OTHER_CASE = {"runs/p/a.1/record.json": [2, ""]}, {"runs/p/A.1/record.json": [2, ""]}
A_FOLDER = {"runs/p/record.json": [2, ""], "runs/p/record.json/a/record.json": [2, ""]}


@pytest.mark.parametrize(
    ("listed", "what"),
    [
        (None, "no manifest"),
        ({"runs/p/a.1/record.json": [-1, ""]}, "no manifest"),
        ({}, "not in records-manifest.json"),
        (A_RECORD, "is not as records-manifest.json has it"),
        ({"runs/p/a.1/record.json": [2**40, ""]}, "1048576 MiB"),
        (A_RECORD | OTHER_CASE, "take for the same"),
        (A_FOLDER, "take for the same"),
        ({"../x": [2, ""]}, "is not a record"),
    ],
)
def test_a_part_that_is_not_as_its_manifest_says_is_refused_whole(tmp_path, work, listed, what):
    a_run(work / "results" / "runs" / "p" / "a.1")
    parcel.pack_back(work / "results", tmp_path / "out", set())
    manifest = tmp_path / "out" / parcel.MANIFEST
    manifest.unlink() if listed is None else manifest.write_text(json.dumps({"files": listed}))
    with pytest.raises(Stop, match=what):
        parcel.unpack(tmp_path / "out", tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


@pytest.mark.slow
def test_all_of_it_without_a_gpu(tmp_path, work, monkeypatch):
    """A real pack, installed; three windows of real sweeps at `tiny`, each with the results of the windows before.

    Nothing is compiled: the operators are copies, of which `single` loads none, and the compiler fails at once.
    """
    from study.extras.offline import pack as packing

    packing.pack(packing.Pack(out=tmp_path / "pack", python=HERE, machine=platform.machine()))
    shutil.copytree(operators.folder("."), tmp_path / "extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    compiler(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(PROFILES, "half", [("sweep", "smoke", "--only", "arm=single", "task=imdb")])
    monkeypatch.setitem(PROFILES, "whole", [("sweep", "smoke", "--only", "arm=single")])

    def window(profile: str, minutes: float) -> tuple[int, int]:
        """The exit code, and how many records are new here."""
        shutil.rmtree(work / "results", ignore_errors=True)  # that machine keeps nothing between windows
        code = offline.run(options(tmp_path, profile, minutes=minutes))
        return code, parcel.unpack(tmp_path / "out", tmp_path / "reports")

    assert window("half", 30) == (0, 1)
    assert json.loads((tmp_path / "reports" / "peaks.json").read_text())["flops_per_s"]["fp32"]["median"] > 0
    assert window("whole", 30) == (0, 1), "what is done is not done again"
    assert window("smoke", offline.LAST_S / 60) == (3, 0), "there was no time for anything"
    loaded = runs.load(tmp_path / "reports")
    assert sorted(run.task for run in loaded.done) == ["imdb", "wikitext"]
    assert len(loaded) == 2
