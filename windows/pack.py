"""Packs what a GPU machine without a network lacks, into gpu-pack/, which `examples/eight.sh` finds there.

    make gpu PACK="--data imdb wikitext-2 --model bert-large-uncased gpt2"

The pack has wheels, data, vocabularies, and the commit that was fixed before measuring. A compiled.tar.gz in it stays.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = ("*.json", "*.txt", "*.model")  # of a model's folder; weights are left out
# The packages of an image for machine learning; --have names those of another. They include what PyTorch brings.
HAVE = (
    "torch triton numpy scipy pandas pyarrow tokenizers transformers accelerate huggingface-hub safetensors setuptools"
)
OTHERS = ("0.18.5",)  # releases of DeepSpeed that protocols name
# What the GPU tests and benchmarks/rehearsed.py need besides.
TESTING = ("pytest", "pytest-timeout", "pytest-xdist", "trl", "peft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=ROOT / "gpu-pack", help="the pack (%(default)s)")
    parser.add_argument("--python", default="3.12", help="that machine's Python (%(default)s)")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="its newest wheels (%(default)s)")
    parser.add_argument("--have", nargs="*", default=HAVE.split(), help="packages that it has")
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="folders with data sets")
    parser.add_argument("--model", nargs="*", type=Path, default=[], help="folders with vocabularies")
    pack(parser.parse_args())


def pack(options: argparse.Namespace) -> None:
    """Write the pack anew, but for what was compiled."""
    for path in options.pack.glob("*"):
        if path.is_dir():
            shutil.rmtree(path)
    wheels = options.pack / "wheels"
    wheels.mkdir(parents=True)
    for folder in options.data:  # without the test split, which the study never reads
        shutil.copytree(folder, options.pack / "data" / folder.resolve().name, ignore=shutil.ignore_patterns("test*"))
    for folder in options.model:
        target = options.pack / "models" / folder.resolve().name
        target.mkdir(parents=True)
        for path in (path for pattern in VOCABULARY for path in folder.glob(pattern)):
            shutil.copy2(path, target)
    pins = [pin for pin in needed(set(options.have)) if not pin.startswith("deepspeed==")]
    target = ["--python-version", options.python, "--platform", options.platform, "--platform", "manylinux2014_x86_64"]
    pip("download", "--no-deps", "--only-binary=:all:", *target, "--dest", str(wheels), *pins)
    os.environ["DS_BUILD_OPS"] = "0"  # DeepSpeed has no wheel; its operators are compiled there, on first use
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), f"deepspeed=={version('deepspeed')}")
    for release in OTHERS:
        other = ["--wheel-dir", str(options.pack / "releases"), f"deepspeed=={release}"]
        pip("wheel", "--no-deps", "--no-build-isolation", *other)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    manifest = {
        "python": options.python,
        "deepspeed": version("deepspeed"),
        "commit": commit,
    }  # what was predicted before the machine was used
    (options.pack / "pack.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in options.pack.rglob("*") if path.is_file())
    print(f"{options.pack}: {len(list(wheels.iterdir()))} wheels, {size / 2**20:.1f} MiB in all")


def needed(have: set[str]) -> list[str]:
    """Return the packages of a training and all that they need, in the versions of this environment."""
    import importlib.metadata
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"]["train"], *TESTING]
    seen: set[str] = {canonicalize_name(name) for name in have}
    pins = []
    while waiting:
        need = Requirement(waiting.pop())
        name = canonicalize_name(need.name)
        if name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        pins.append(f"{name}=={version(name)}")
        waiting += importlib.metadata.requires(name) or []
    return sorted(pins)


def version(name: str) -> str:
    """Return the installed version, without the part that names a build, such as +cpu."""
    import importlib.metadata

    return importlib.metadata.version(name).partition("+")[0]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words], check=True)


if __name__ == "__main__":
    main()
