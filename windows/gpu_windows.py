"""A GPU machine that has no network, and only for some minutes at a time: pack what it lacks, and run protocols there.

    python windows/gpu_windows.py pack --data imdb wikitext-2 --model bert-large-uncased gpt2    # here: gpu-pack/
    python3 windows/gpu_windows.py run smoke predictions --minutes 9 --runs runs/gpu    # there; again in each window

There it needs Python's own library alone, until the wheels of the pack are installed. Two sweeps share the protocols:
one trains while the other starts Python, which is two thirds of a short cell, and waits for the device. What is
compiled is put into the pack, as compiled.tar.gz: bring it back, and the next window does not compile.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from study.sweeps.protocol import Cell  # of the study, which needs the installed pack

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".gpu" / "site"  # the installed pack
COMPILED = ROOT / ".gpu" / "compiled"  # there, by PyTorch, Triton and DeepSpeed
KEPT = "compiled.tar.gz"  # of the pack: the same, for a machine that begins empty
LOCK = ROOT / ".gpu" / "device"  # whose training has the device
# -v: what failed is written at once, and not at an end that a window may not have. pytest-benchmark, which a machine
# like that may have, warns beside workers, and a warning is an error here.
GPU_TESTS = ("tests/training/test_gpu.py", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark")
PACKED_DATA = {"imdb": "imdb", "wikitext": "wikitext-2"}  # the folders of a pack, by task
VOCABULARY = ("*.json", "*.txt", "*.model")  # of a model's folder; weights are left out
# The packages of an image for machine learning; --have names those of another. They include what PyTorch brings.
HAVE = (
    "torch triton numpy scipy pandas pyarrow tokenizers transformers accelerate huggingface-hub safetensors setuptools"
)
TESTING = ("pytest", "pytest-timeout", "pytest-xdist")  # what the GPU tests need besides
LAST_S = 45  # what is reserved for ending what runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=ROOT / "gpu-pack", help="the pack (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="collect wheels, data, vocabularies and the commit")
    packing.add_argument("--python", default="3.12", help="that machine's Python (%(default)s)")
    packing.add_argument("--platform", default="manylinux_2_28_x86_64", help="its newest wheels (%(default)s)")
    packing.add_argument("--have", nargs="*", default=HAVE.split(), help="packages that it has")
    packing.add_argument("--data", nargs="*", type=Path, default=[], help="folders with data sets")
    packing.add_argument("--model", nargs="*", type=Path, default=[], help="folders with vocabularies")
    running = commands.add_parser("run", help="install the pack, and run protocols until the time is up")
    running.add_argument("protocols", nargs="+", help="the most important first")
    running.add_argument("--minutes", type=float, default=9, help="how long all of it may take (%(default)s)")
    running.add_argument("--scale", default="one_gpu", help="of the protocols (%(default)s)")
    running.add_argument("--lanes", type=int, default=2, help="sweeps that share the protocols (%(default)s)")
    running.add_argument("--tests", type=int, default=0, help="run the GPU tests first, so many at once (none)")
    running.add_argument("--runs", type=Path, default=Path("runs/gpu"), help="the folder for the runs (%(default)s)")
    sweeping = commands.add_parser("lane", help="run a protocol with the pack's data, as `run` does in each lane")
    sweeping.add_argument("protocol")
    sweeping.add_argument("--scale", default="one_gpu", help="of the protocol (%(default)s)")
    sweeping.add_argument("--runs", type=Path, default=Path("runs/gpu"), help="the folder for the runs (%(default)s)")
    sweeping.add_argument("--only", nargs="*", default=[], help="as of study sweep, and so are those that follow")
    sweeping.add_argument("--repeat", type=int, default=1)
    sweeping.add_argument("--minutes", type=float)
    sweeping.add_argument("--nvme-dir", type=Path)
    sweeping.add_argument("--lane", type=int, nargs=2, default=[1, 1])
    options = parser.parse_args()
    if options.command == "pack":
        pack(options)
    elif options.command == "lane":
        sweep(options)
    else:
        sys.exit(run(options))


# --- here -----------------------------------------------------------------------------------------------------------


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
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    manifest = {
        "python": options.python,
        "deepspeed": version("deepspeed"),
        "commit": commit,
    }  # what was predicted before the machine was used
    (options.pack / "pack.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in options.pack.rglob("*") if path.is_file())
    say(f"{options.pack}: {len(list(wheels.iterdir()))} wheels, {size / 2**20:.1f} MiB in all")


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


# --- there ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run the tests and the protocols in this window. Return 0, or 3 if something is left for the next one."""
    ends = time.monotonic() + 60 * options.minutes - LAST_S
    operators = COMPILED / f"deepspeed-{install(options.pack)}-torch-{version('torch')}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operators))
    if (options.pack / KEPT).exists() and not COMPILED.exists():
        shutil.unpack_archive(options.pack / KEPT, COMPILED)
    # Arms that need what fails are unavailable.
    complete = call(["-m", "study.cli", "doctor", "--fix"], ends) is not None
    if options.tests:
        complete = call(["-m", "pytest", *GPU_TESTS, "-n", str(options.tests)], ends) == 0 and complete
    with ThreadPoolExecutor(options.lanes) as pool:
        lanes = pool.map(lambda number: lane(options, number, ends), range(1, options.lanes + 1))
        complete = all([*lanes, complete])
    if COMPILED.exists():
        with tarfile.open(options.pack / KEPT, "w:gz") as archive:
            archive.add(COMPILED, ".")
    say("everything is done" if complete else "not everything is done; run the same command in the next window")
    return 0 if complete else 3


def lane(options: argparse.Namespace, number: int, ends: float) -> bool:
    """Sweep this lane's cells of all protocols. Return whether none is left."""
    complete = True
    for name in options.protocols:
        words = [__file__, "--pack", str(options.pack.resolve()), "lane", name, "--scale", options.scale]
        words += ["--runs", str(options.runs.resolve() / Path(name).stem)]
        words += ["--nvme-dir", str(ROOT / ".gpu" / f"nvme-{number}"), "--lane", str(number), str(options.lanes)]
        left_s = max(0.0, ends - time.monotonic())
        words += ["--minutes", f"{left_s / 60:.2f}"]
        code = call(words, ends + LAST_S / 2, STUDY_DEVICE_LOCK=str(LOCK))
        complete = code not in (3, None) and complete
    return complete


def sweep(options: argparse.Namespace) -> None:
    """Run the cells of a protocol, with the pack's data. The wheels of the pack are installed."""
    from study.cli import experiments
    from study.core.errors import exit_on_stop
    from study.core.machine import put_programs_on_path
    from study.sweeps import protocol
    from study.sweeps.sweep import chosen, plan

    put_programs_on_path()
    with exit_on_stop():
        cells = chosen(protocol.cells(protocol.read(options.protocol), options.scale), tuple(options.only))
        # Relative to the folder in which launches run, so that a cell has the same name on another machine.
        folder = Path(os.path.relpath(options.pack, ROOT))
        lane = tuple(options.lane)
        turns = plan([packed(cell, folder) for cell in cells], options.repeat, lane)
        experiments.run(turns, options.runs, 3600, options.minutes, options.nvme_dir, lane)


def packed(cell: "Cell", folder: Path) -> "Cell":
    """Return a cell with data and vocabulary from a pack, if it asks for the hub's."""
    from study.core.files import safe_join
    from study.core.shapes import SHAPES

    if cell.settings.get("data") != "hub":
        return cell
    model = str(cell.value("model"))
    data = safe_join(folder, "data", PACKED_DATA[cell.value("task")])
    # A shape of ours has the vocabulary of the model on the hub whose shape it is.
    tokenizer = safe_join(folder, "models", Path(SHAPES.get(model, {}).get("hub") or model).name)
    return replace(cell, settings=cell.settings | {"data": str(data), "tokenizer": str(tokenizer)})


def install(folder: Path) -> str:
    """Install the wheels into a folder of the study, once for each pack. Return DeepSpeed's version."""
    if not (folder / "pack.json").exists():
        sys.exit(
            f"{folder} is not a complete pack. What to do: run make gpu where there is a network, and copy it here."
        )
    text = (folder / "pack.json").read_text()
    manifest = json.loads(text)
    here = ".".join(platform.python_version_tuple()[:2])
    if manifest["python"] != here:
        sys.exit(f"the pack is for Python {manifest['python']}, and this is {here}. What to do: make it with --python.")
    if not (SITE / "pack.json").exists() or (SITE / "pack.json").read_text() != text:
        shutil.rmtree(SITE, ignore_errors=True)
        SITE.mkdir(parents=True)
        if wheels := [str(path) for path in (folder / "wheels").glob("*.whl")]:
            pip("install", "--no-index", "--no-deps", "--target", str(SITE), *wheels)
        (SITE / "pack.json").write_text(text)
    return manifest["deepspeed"]


def call(words: list[str], ends: float, **more: str) -> int | None:
    """Run Python with these words, and the pack before the machine's packages. None if its time was up."""
    path = os.pathsep.join([str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(COMPILED / "triton")} | os.environ
    say(f"--- {' '.join(words)}")
    child = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env | more | {"PYTHONPATH": path})
    try:
        return child.wait(max(1.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.terminate()  # a sweep then ends its launch
        child.wait()
        return None


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
