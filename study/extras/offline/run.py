"""Runs the study on a GPU machine without a network: install the pack, run profiles for some minutes, pack the results.

python3 -m study.extras.offline run smoke guelph --minutes 9 --out out --reports reports/h200  # there; repeat it
python3 -m study.extras.offline unpack out --reports reports/h200   # here

Until the pack is installed there is only Python's own library, so this module and `parcel` import nothing else.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from study.errors import Stop, exit_on_stop
from study.extras.offline.parcel import pack_back, take_up, unpack
from study.io.files import safe_join

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / ".gpu"  # what stays there: the installed pack, caches, results
SITE = WORK / "site"
RESULTS = WORK / "results"
STUDY = (sys.executable, "-m", "study.cli")
NEEDED = """
torch transformers accelerate deepspeed datasets evaluate tyro yaml psutil pynvml pydantic rich scipy
"""
LAST_S = 45  # reserved for ending what runs, and for packing
# What must be left to start a bench's repeat, one that compiles, a profiled run, a set of tests: budgets, not measured.
BENCH_S = 150
COMPILED_S = 240
KERNELS_S = 60
TESTS_S = 120


def sweep(protocol: str, *more: str) -> tuple[str, ...]:
    return ("sweep", protocol, *more)


def bench(model: str, sequence: int, micro_batch: int, *more: str, repeats: int = 3) -> tuple[str, ...]:
    task = "imdb" if model.startswith("bert") else "wikitext"
    shape = ("--task", task, "--model", model, "--sequence", str(sequence), "--micro-batch", str(micro_batch))
    return ("bench", *shape, "--precision", "bf16", "--steps", "30", "--repeats", str(repeats), *more)


def kernels(*bench: str) -> tuple[str, ...]:
    """The forty longest kernels in a step of the hand-written loop, from a run that is not timed."""
    words = list(bench[1:])
    del words[words.index("--repeats") : words.index("--repeats") + 2]
    return ("kernels", *words, "--data", "embedded", "--init", "random")


SHAPES = (
    ("gpt2-xl", 1024, 8),
    ("llama3.2-1b", 1024, 8),
    ("bert-large", 512, 32),
    ("gpt2-medium", 1024, 16),
    ("bert-large", 128, 64),
    ("gpt2-large", 1024, 8),
)
TESTS = {  # name: pytest's -k for tests/test_gpu.py. Each set ends within a window
    "instruments": "components or cap or peaks or clock or energy or wait or full",
    "arms": "every_arm or bytes or offloading",
    "precision": "sixteen or virtual or values",
}
# The steps of each profile, the most important first.
PROFILES: dict[str, list[tuple[str, ...]]] = {
    "first": [  # does each arm run, and one cell of each result: there may be only one window
        sweep("smoke"),
        ("tests", "instruments"),
        sweep("predictions", "--only", "part=families", "model=llama3.2-1b"),
        sweep("h100", "--only", "part=stages", "checkpointing=True"),
        sweep("as_printed", "--only", "seed=42"),
        sweep("offload", "--only", "part=host-against-disk", "model=gpt2-large"),
        sweep("offload", "--only", "part=one-device"),
        sweep("guelph", "--only", "part=loss", "micro_batch=8"),
        bench(*SHAPES[0]),
        sweep("cuda_only", "--only", "part=variants"),
    ],
    "smoke": [sweep("smoke")],
    "tests": [("tests", name) for name in TESTS],
    "predictions": [sweep("predictions")],
    "guelph": [
        sweep("guelph", "--only", "part=loss"),
        sweep("guelph", "--only", "part=*ladder", "--repeat", "3"),
        sweep("guelph", "--only", "part=seeds"),
    ],
    "as_printed": [sweep("as_printed")],
    "offload": [sweep("offload", "--only", "part=host-against-disk", "--repeat", "3"), sweep("offload")],
    "h100": [sweep("h100")],
    "cuda_only": [sweep("cuda_only")],
    "speed": [
        step
        for shape in SHAPES
        for step in (bench(*shape), bench(*shape, "--compile", repeats=2), kernels(*bench(*shape)))
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="study offline", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="install, run profiles until the time is up, pack the results")
    running.add_argument("profiles", nargs="*", metavar="PROFILE", help=f"in this order: {', '.join(PROFILES)}")
    running.add_argument("--minutes", type=float, default=9, help="how long all of it may take (%(default)s)")
    running.add_argument("--scale", choices=("one_gpu", "tiny"), default="one_gpu", help="tiny: without a GPU")
    running.add_argument("--pack", type=Path, default=ROOT / "gpu-pack", help="what `study pack` wrote (%(default)s)")
    running.add_argument("--out", type=Path, default=Path("out"), help="where the results go (%(default)s)")
    bringing = commands.add_parser("unpack", help="unpack the results into the reports")
    bringing.add_argument("out", type=Path, help="the folder with the parts")
    for command in (running, bringing):
        command.add_argument("--reports", type=Path, required=True, help="this machine's folder, as in reports/h200")
    options = parser.parse_args()
    with exit_on_stop():
        if options.command == "run":
            sys.exit(run(options))
        say(f"{unpack(options.out, options.reports)} records are new in {options.reports}")


def run(options: argparse.Namespace) -> int:
    """Everything that is done there. Returns 0, or 3 when something is left for the next window."""
    ends = time.monotonic() + 60 * options.minutes - LAST_S
    if unknown := set(options.profiles) - PROFILES.keys():
        raise Stop(f"there is no profile {', '.join(sorted(unknown))}", f"choose from {', '.join(PROFILES)}")
    install(options.pack)
    brought = take_up(options.reports, RESULTS)
    for number in (signal.SIGTERM, signal.SIGHUP):  # results are packed all the same
        signal.signal(number, signal.default_int_handler)
    complete = True
    try:
        steps = [step for name in options.profiles for step in PROFILES[name]]
        peaks = RESULTS / "peaks.json"
        if not peaks.exists() or any(map(needs_operators, steps)):
            complete = compile_operators(ends)
        if complete and not peaks.exists():
            complete = call([*STUDY, "peaks", "--json", str(peaks)], ends) == 0
        for step in steps:
            complete = carry_out(step, options.scale, ends, options.pack) and complete
    except KeyboardInterrupt:
        complete = False
        say("interrupted; the results so far are packed")
    finally:
        summarise()
        parts = pack_back(RESULTS, options.out, brought)
        say(f"{len(parts)} parts in {options.out}; study offline unpack adds them to the reports")
    say("everything is done" if complete else "not everything is done; run the same command in the next window")
    return 0 if complete else 3


def compile_operators(ends: float) -> bool:
    """Compile DeepSpeed's operators, in parallel. If one fails, only the arms that need it are unavailable."""
    return call([*STUDY, "operators"], ends) is not None


def needs_operators(step: tuple[str, ...]) -> bool:
    """Return whether an arm of a step offloads: on a GPU the others need none of DeepSpeed's operators."""
    return step[0] == "tests" or (step[0] == "sweep" and step[1] != "h100")


def carry_out(step: tuple[str, ...], scale: str, ends: float, pack: Path) -> bool:
    """Run one step of a profile. Whether nothing of it is left to do."""
    kind, *words = step
    left_s = ends - time.monotonic()
    if kind == "sweep":
        runs = RESULTS / "runs" / words[0]
        options = ["--scale", scale, "--runs", str(runs), "--nvme-dir", str(WORK / "nvme")]
        options += ["--pack", str(pack.resolve()), "--minutes", f"{max(0, left_s) / 60:.2f}"]
        return call([*STUDY, "sweep", *words, *options], ends + LAST_S / 2) not in (3, None)
    if kind == "tests":
        return run_tests(words[0], ends)
    flags = dict(zip(words[::2], words[1::2], strict=False))
    name = f"{flags['--model']}-{flags['--sequence']}"
    name += ("-compiled" if "--compile" in words else "") + ("-kernels" if kind == "kernels" else "")
    target = RESULTS / "speed" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return True
    needed_s = COMPILED_S if "--compile" in words else BENCH_S
    if kind == "kernels":
        needed_s = KERNELS_S
    if left_s < needed_s:
        say(f"{name}: not started, because only {max(0, left_s):.0f} s are left")
        return False
    if kind == "kernels":
        files = ["--out", str(WORK / "rival.json"), "--kernels", str(target)]
        return call([sys.executable, str(ROOT / "study" / "bench" / "rivals.py"), "bare", *words, *files], ends) == 0
    files = ["--peaks", str(RESULTS / "peaks.json"), "--json", str(target)]
    return call([*STUDY, "bench", *words, *files], ends) == 0


def run_tests(name: str, ends: float) -> bool:
    """Run a set of the GPU tests once. Their output is kept, whether they passed or not."""
    target = RESULTS / f"tests-{name}.txt"
    part = WORK / f"tests-{name}.part"
    if target.exists():
        return True
    if ends - time.monotonic() < TESTS_S:
        say(f"tests of {name}: left for the next window")
        return False
    # That machine may have other packages, with warnings of their own.
    words = ["-v", "-m", "gpu", "-k", TESTS[name], "-W", "default", "tests/test_gpu.py"]
    with part.open("w") as output:
        code = call([sys.executable, "-m", "pytest", *words], ends, output)
    say(f"tests of {name}: exit code {code}\n" + "".join(part.read_text().splitlines(True)[-30:]))
    if code not in (0, 1):  # it was ended, or pytest itself failed
        return False
    shutil.move(part, target)
    return True


def call(words: list[str], ends: float, output=None) -> int | None:
    """Run a program with the pack in its path. Its exit code; None if the time was up and it was ended."""
    say(f"--- python3 {' '.join(words[1:])}")
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(words, cwd=ROOT, env=environment(), start_new_session=True, **streams)
    try:
        in_time = ended(child, max(1, ends - time.monotonic()))
        if not in_time:
            say("the time is up")
    finally:
        if not ended(child, 0):
            child.terminate()  # a sweep then ends its launch
            ended(child, LAST_S / 3)
        os.killpg(child.pid, signal.SIGKILL)  # and the programs that it left, such as compilers
        code = child.wait()
    return code if in_time else None


def ended(child: subprocess.Popen, seconds: float) -> bool:
    """Wait for a child to end without reaping it, so that no other process can get its id."""
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


# --- install -------------------------------------------------------------------------------------------------------


def install(pack: Path) -> None:
    """Unpack the wheels into a folder of the study, once for each pack."""
    try:
        text = (pack / "pack.json").read_text()
        manifest = json.loads(text)
        wheels = [str(safe_join(pack, "wheels", name)) for name in manifest["wheels"]]
    except (OSError, ValueError, KeyError, TypeError):
        remedy = "run make gpu where there is a network, and copy it here"
        raise Stop(f"{pack} is not a complete pack", remedy) from None
    system = f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine()
    if (target := (manifest["python"], manifest["machine"])) != system:
        what = "the pack is for Python {} on {}, but this is Python {} on {}".format(*target, *system)
        raise Stop(what, "make another, with --python and --machine")
    if not ((SITE / "pack.json").exists() and (SITE / "pack.json").read_text() == text):
        shutil.rmtree(SITE, ignore_errors=True)
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(SITE)]
        if subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=False).returncode != 0:
            raise Stop("pip could not install the pack", "read its message above")
        link_libcuda()
        (SITE / "pack.json").write_text(text)
    check = f"import importlib\nfor name in {NEEDED.split()}: importlib.import_module(name)"
    words = [sys.executable, "-c", check]
    child = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    if child.returncode != 0:
        remedy = "remove the missing package from --have, and make the pack again"
        raise Stop(f"the installed pack does not work here ({child.stderr.splitlines()[-1]})", remedy)


def link_libcuda() -> None:
    """Make an empty libcuda for the linker: DeepSpeed's disk operator links to it, and calls nothing in it.

    The real one comes with the driver, where linkers do not look, and a toolkit often lacks its stub.
    """
    (SITE / "lib").mkdir(exist_ok=True)
    if compiler := shutil.which("cc"):
        words = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(SITE / "lib" / "libcuda.so"), "-x", "c", os.devnull]
        subprocess.run([compiler, *words], check=False)


def cuda_home() -> str:
    """The folder of the CUDA toolkit. PyTorch would use the nvcc in the path, which may be only a link."""
    nvcc = shutil.which("nvcc")
    known = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).resolve().parents[1])]
    return next((home for home in known if home and Path(home, "bin", "nvcc").exists()), "/usr/local/cuda")


def environment() -> dict[str, str]:
    """This process's environment, with the pack before the machine's packages, and with the study's own caches."""
    first = {
        "PATH": [Path(sys.executable).parent],  # where ninja is
        "PYTHONPATH": [ROOT, SITE],
        "LIBRARY_PATH": [SITE / "lib"],
    }
    joined = {}
    for name, paths in first.items():
        joined[name] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])
    defaults = {"XDG_CACHE_HOME": str(WORK / "cache"), "HF_HUB_OFFLINE": "1"}
    return defaults | os.environ | joined | {"CUDA_HOME": cuda_home()}


def summarise() -> None:
    """Print the table of runs, and write it to a file that goes back."""
    if list(RESULTS.glob("runs/**/record.json")):
        words = [*STUDY, "runs", str(RESULTS / "runs")]
        child = subprocess.run(words, cwd=ROOT, env=environment(), text=True, capture_output=True, check=False)
        (RESULTS / "summary.txt").write_text(child.stdout + child.stderr)
        say(child.stdout + child.stderr)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
