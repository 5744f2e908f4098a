"""Collects in one folder what a GPU machine without a network lacks: `make gpu`, or study pack.

study pack --data path/to/imdb path/to/wikitext-2 --model path/to/bert-large-uncased path/to/gpt2

Copy the folder into the repository on that machine; `python3 -m study.extras.offline run smoke` installs it and runs.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from study.errors import Stop, exit_on_stop
from study.io.tables import say
from study.machine import output, software
from study.records.store import now_utc
from study.spec.options import parsed

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
BUILT_HERE = {"deepspeed": {"DS_BUILD_OPS": "0"}}  # it has no wheel; its operators are compiled there, on first use
VOCABULARY = ("*.json", "*.txt", "*.model")  # of a model's folder; weights are left out
UNUSED_SPLIT = "test"  # prefix of files of a split that the study never reads
# The packages of one container image for machine learning; --have names those of another.
HAVE = """
accelerate aiohttp aiosignal anyio attrs certifi charset-normalizer click einops filelock frozenlist fsspec h11 hf-xet
httpcore httpx huggingface-hub idna jinja2 markdown-it-py markupsafe mdurl mpmath msgpack multidict networkx ninja numpy
nvidia-ml-py packaging pandas propcache psutil py-cpuinfo pyarrow pygments pytest pytest-timeout python-dateutil pyyaml
regex requests rich safetensors scipy setuptools shellingham six sympy tokenizers torch tqdm transformers triton typer
typing-extensions urllib3 wheel xxhash yarl
"""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Collect wheels, data and vocabularies for a machine without a network."""

    out: Path = Path("gpu-pack")
    """The folder to write. A pack that is there is replaced."""
    python: str = "3.12"
    """That machine's Python."""
    machine: str = "x86_64"
    """The output of `uname -m` there."""
    glibc: str = "2.35"
    """Its C library (see `ldd --version`), or an older one."""
    have: tuple[str, ...] = tuple(HAVE.split())
    """Packages that it has already."""
    constraint: Path | None = ROOT / "constraints.txt"
    """Pinned versions."""
    data: tuple[Path, ...] = ()
    """Folders with data sets. Test splits, which the study does not read, are left out."""
    model: tuple[Path, ...] = ()
    """Folders with the config.json and the vocabulary of a model. Weights are left out."""
    limit_mib: float = 60
    """The largest total size."""


def main() -> None:
    with exit_on_stop():
        options = parsed(Pack, prog="study pack", description=__doc__.partition("\n")[0])
        pack(options)


def pack(options: Pack) -> dict:
    """Write the folder, and say what is in it. An older pack is replaced when the new one is complete."""
    with output.replaced(options.out) as folder:
        manifest = fill(replace(options, out=folder))
    contents = f"{len(manifest['wheels'])} wheels, {len(options.data)} data sets, {len(options.model)} vocabularies"
    say(f"{options.out}: {contents}, {manifest['bytes'] / MIB:.1f} MiB in all")
    return manifest


def fill(options: Pack) -> dict:
    copy_folders(options)
    wheels = fetch_wheels(options)
    sizes = {str(path.relative_to(options.out)): path.stat().st_size for path in files(options.out)}
    check_size(options.limit_mib, sizes)
    manifest = {
        "packed_utc": now_utc(),
        "python": options.python,
        "machine": options.machine,
        "wheels": wheels,
        "bytes": sum(sizes.values()),
        "files": sizes,
    }
    (options.out / "pack.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def files(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("*") if path.is_file() and path.name != output.MANIFEST)


def check_size(limit_mib: float, sizes: dict[str, int]) -> None:
    total = sum(sizes.values()) / MIB
    if total > limit_mib:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
        names = ", ".join(f"{name} ({sizes[name] / MIB:.1f} MiB)" for name in largest)
        raise Stop(
            f"the pack has {total:.1f} MiB, more than --limit-mib {limit_mib:g}",
            f"give less --data, name more packages in --have, or raise the limit; the largest files are {names}",
        )


def copy_folders(options: Pack) -> None:
    """Copy what the study reads of each folder, under the folder's own name."""
    for kind, folders in (("data", options.data), ("models", options.model)):
        for folder in folders:
            if not folder.is_dir():
                raise Stop(f"{folder} is not a folder", "give a folder that contains a data set or a vocabulary")
            patterns = ("*",) if kind == "data" else VOCABULARY
            paths = [path for pattern in patterns for path in sorted(folder.rglob(pattern)) if path.is_file()]
            if kind == "data":
                paths = [path for path in paths if not path.name.startswith(UNUSED_SPLIT)]
            if not paths:
                raise Stop(f"{folder} contains nothing that the study reads", "give another folder")
            for path in paths:
                target = options.out / kind / folder.resolve().name / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


# --- wheels --------------------------------------------------------------------------------------------------------


def fetch_wheels(options: Pack) -> list[str]:
    """A wheel of every package that the study needs and that machine lacks, and of their own requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = {canonicalize_name(name) for name in options.have}
    requirements = [*map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["train"]])]
    folder = options.out / "wheels"
    folder.mkdir()
    while requirements:
        level = {canonicalize_name(need.name): need for need in requirements if applies(need, options)}
        level = {name: need for name, need in level.items() if name not in done}
        done |= level.keys()
        before = set(folder.glob("*.whl"))
        download([need for name, need in level.items() if name not in BUILT_HERE], options, folder)
        for name in level.keys() & BUILT_HERE.keys():
            build(level[name], options, folder)
        requirements = [need for wheel in sorted(set(folder.glob("*.whl")) - before) for need in needs(wheel)]
    return sorted(path.name for path in folder.glob("*.whl"))


def applies(need: Requirement, options: Pack) -> bool:
    """Return whether a requirement holds on that machine, where no extras are installed."""
    python = {"python_version": options.python, "python_full_version": f"{options.python}.0"}
    target = python | {"sys_platform": "linux", "platform_machine": options.machine, "extra": ""}
    return need.marker is None or need.marker.evaluate(target)


def needs(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines]


def pinned(need: Requirement, options: Pack) -> str:
    """A requirement for pip: the version that `constraint` pins, or else the range."""
    pins = software.pins(options.constraint) if options.constraint else {}
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    pin = pins.get(canonicalize_name(need.name))
    return f"{need.name}=={pin}" if pin else f"{need.name}{need.specifier}"


def platforms(options: Pack) -> list[str]:
    """Every platform tag whose wheels run there. pip compares tags literally, without "or older"."""
    newest = int(options.glibc.partition(".")[2])
    old = ["manylinux2014", "manylinux2010", "manylinux1"]
    return [f"{tag}_{options.machine}" for tag in [*(f"manylinux_2_{n}" for n in range(newest, 4, -1)), *old]]


def download(level: list[Requirement], options: Pack, folder: Path) -> None:
    if level:
        words = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
        words += ["--python-version", options.python, "--dest", str(folder)]
        words += [word for tag in platforms(options) for word in ("--platform", tag)]
        pip(words, [pinned(need, options) for need in level])


def build(need: Requirement, options: Pack, folder: Path) -> None:
    """Build a wheel from source. Only a pure Python wheel runs on another machine."""
    before = set(folder.glob("*.whl"))
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder)]
    pip(words, [pinned(need, options)], BUILT_HERE[canonicalize_name(need.name)])
    (wheel,) = set(folder.glob("*.whl")) - before
    if not wheel.name.endswith("-py3-none-any.whl"):
        raise Stop(f"{wheel.name} contains compiled code, which runs only here", "unset every DS_BUILD_ variable")


def pip(words: list[str], requirements: list[str], environment: dict | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, *requirements]
    env = os.environ | (environment or {})
    pipe = subprocess.PIPE
    child = subprocess.run(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False)
    if child.returncode != 0:
        lines = child.stdout.splitlines()
        errors = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-3:])
        raise Stop(f"pip {words[0]} failed ({errors})", "fix that, or name the package in --have")


if __name__ == "__main__":
    main()
