"""What is packed for a machine without a network: which wheels, of which folders what, and within which limit."""

import json
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from study.errors import Stop
from study.extras.offline import pack
from study.extras.offline.pack import HAVE, MIB, Pack, applies, check_size, pinned, platforms

# What an index holds, and what each needs in turn.
INDEX = {
    "deepspeed": ["torch>=2", "hjson", "pydantic>=2"],
    "datasets": ["numpy", "dill<1", "pandas", "aiohttp; extra == 'http'"],
    "evaluate": ["datasets>=2", "dill", "old-thing; python_version < '3.10'"],
    "tyro": ["typeguard", "windows-thing; sys_platform == 'win32'"],
    "pydantic": ["pydantic-core"],
}


@pytest.fixture
def index(monkeypatch) -> list[tuple[str, dict]]:
    """A pip that makes wheels from INDEX; what pip was called with."""
    calls = []

    def pip(words: list[str], wanted: list[str], environment: dict | None = None) -> None:
        calls.append((" ".join(words + wanted), environment))
        place = Path(words[words.index("--wheel-dir" if words[0] == "wheel" else "--dest") + 1])
        for need in map(Requirement, wanted):
            lines = "".join(f"Requires-Dist: {line}\n" for line in INDEX.get(need.name, []))
            with zipfile.ZipFile(place / f"{need.name.replace('-', '_')}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{need.name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\n{lines}")

    monkeypatch.setattr(pack, "pip", pip)
    return calls


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """A data set and a model as users have them: a test split, weights, and what the study reads."""
    files = {
        "imdb/train-0.parquet": 3000,
        "imdb/test-0.parquet": 5000,
        "imdb/README.md": 10,
        "bert/config.json": 20,
        "bert/vocab.txt": 200,
        "bert/model.safetensors": 90_000,
    }
    for name, size in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return {"data": (tmp_path / "mine" / "imdb",), "model": (tmp_path / "mine" / "bert",)}


def packed(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in pack.files(out)}


def names(manifest: dict) -> set[str]:
    return {wheel.partition("-")[0] for wheel in manifest["wheels"]}


def test_wheels_of_what_is_lacking_and_of_what_that_needs(tmp_path, index):
    manifest = pack.pack(Pack(out=tmp_path / "pack"))
    needed = "deepspeed datasets evaluate tyro hjson pydantic pydantic_core dill typeguard"
    assert names(manifest) == set(needed.split())
    assert json.loads((tmp_path / "pack" / "pack.json").read_text()) == manifest
    (built,) = [(words, env) for words, env in index if words.startswith("wheel")]
    assert built[1] == {"DS_BUILD_OPS": "0"}
    assert "deepspeed==0.19.8" in built[0], "as constraints.txt pins it"
    assert all("--python-version 3.12" in words for words, _ in index if words.startswith("download"))


def test_a_wheel_with_compiled_code_of_this_machine_is_refused(tmp_path, monkeypatch):
    def compiled(*_) -> None:
        (tmp_path / "deepspeed-1-cp311-cp311-linux_x86_64.whl").write_bytes(b"")

    monkeypatch.setattr(pack, "pip", compiled)
    with pytest.raises(Stop, match="contains compiled code"):
        pack.build(Requirement("deepspeed"), Pack(), tmp_path)


def test_requirements_are_read_for_the_other_machine():
    target = Pack(python="3.12")
    for text in ("a", "a; python_version >= '3.12'", "a; platform_machine == 'x86_64'"):
        assert applies(Requirement(text), target), text
    for text in ("a; python_version < '3.11'", "a; extra == 'dev'", "a; sys_platform == 'win32'"):
        assert not applies(Requirement(text), target), text
    assert pinned(Requirement("tyro>=1,<2"), target) == "tyro==1.0.16"
    assert pinned(Requirement("tyro>=1,<2"), Pack(constraint=None)) == "tyro<2,>=1"
    assert pinned(Requirement("something-new>3"), target) == "something-new>3"
    tags = platforms(Pack(glibc="2.28", machine="aarch64"))
    assert tags[0] == "manylinux_2_28_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(tags)


def test_everything_the_study_needs_is_had_or_packed():
    """A dependency that is added to pyproject.toml is packed, unless someone says that it is there."""
    project = tomllib.loads((pack.ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    lacking = {Requirement(line).name for line in needed} - {*HAVE.split()}
    assert lacking == {"datasets", "deepspeed", "evaluate", "pydantic", "tyro"}


def test_of_folders_what_the_study_reads(tmp_path, folders):
    (tmp_path / "pack").mkdir()
    pack.copy_folders(Pack(out=tmp_path / "pack", **folders))
    kept = "data/imdb/train-0.parquet data/imdb/README.md models/bert/config.json models/bert/vocab.txt"
    assert packed(tmp_path / "pack") == set(kept.split())


def test_a_pack_over_its_limit_says_what_is_large(tmp_path, index, folders):
    with pytest.raises(Stop, match=r"has 0\.0 MiB, more than --limit-mib 0\.001") as caught:
        pack.pack(Pack(out=tmp_path / "pack", limit_mib=0.001, **folders))
    assert "data/imdb/train-0.parquet (0.0 MiB)" in caught.value.remedy
    check_size(1, {"a": MIB})


def test_a_pack_is_replaced_as_a_whole(tmp_path, index, folders):
    pack.pack(Pack(out=tmp_path / "pack", **folders))
    with pytest.raises(Stop, match="limit-mib"):
        pack.pack(Pack(out=tmp_path / "pack", limit_mib=0.0))
    assert "data/imdb/README.md" in packed(tmp_path / "pack"), "what was there stays where a new one cannot be made"
    pack.pack(Pack(out=tmp_path / "pack"))
    assert "data/imdb/README.md" not in packed(tmp_path / "pack")
