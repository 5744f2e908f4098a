"""How the tests start the real thing: the ranks of `accelerate launch`, forked. test_machines.py has a real launch."""

import fcntl
import functools
import gc
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tyro
from tyro._parsers import ParserSpecification

from study.core import machine
from study.core.gpus import num_gpus
from study.records import store
from study.records.schema import Record
from study.sweeps import launches
from tests import cases

gc.disable()  # until all is imported: half of a worker's start was looking for garbage

# Python keeps 512 patterns, and a table of messages has more: the next text would compile them anew.
re._MAXCACHE = 10_000  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[1]
machine.put_programs_on_path()  # ninja, if nobody has activated the environment
# Threads that wait for work sleep. Otherwise they spin, and where cores are shared a pass of a small model takes up to
# sixteen times the processor time. It holds for processes that are started from here as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# pytest-xdist sets it in its workers, and readline, which pytest imports, where Python does not see it but hands it to
# processes: lines would be so wide.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C; in the background it starts ignored
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # those of other packages take a second of each worker's start
# jsonschema does without this grammar of addresses, for checks of formats that nothing here asks for: another second.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


def read_once(command, **about) -> ParserSpecification:
    """Return what tyro reads of a command. Thousands of tests call one, and half of `study stack` was this reading."""
    if about["default_instance"] is not tyro.MISSING_NONPROP or about["parent_classes"] or about["intern_prefix"]:
        return read(command, **about)  # a part of a command
    if command not in READ:
        READ[command] = read(command, **about)
    return READ[command]


READ: dict = {}
read = ParserSpecification.from_callable_or_type
ParserSpecification.from_callable_or_type = staticmethod(read_once)  # type: ignore[method-assign, assignment]


# One worker takes a whole file, since the tests of a file share fixtures. Some files share the report's pages and all
# predictions that claims rest on (a process makes them once).
# APART share only trained runs, which the workers share too (`trained`), and take longest.
SHARING = dict.fromkeys(("test_browser", "test_report", "test_notebooks"), "pages")
SHARING |= dict.fromkeys(("test_conform", "test_zero_by_hand"), "conform")  # the process `ranks`
APART = ("test_failures", "test_sweep", "test_virtual", "test_train", "test_parity", "test_rehearsal")
# Seconds of each group of tests, or of a test that is apart, in a run of all: `pytest --refresh-seconds` writes them.
# Workers take the longest first. By itself xdist begins with the groups of most tests, and one worker had the last two
# and a half minutes of a run for itself.
SECONDS = ROOT / "tests/seconds.json"

# How the runs are trained that many tests look at: long enough for the arms to drift apart, if they did.
STEPS, SEQUENCE = 9, 32
TRAINED = ("--steps", str(STEPS), "--epochs", "2", "--sequence", str(SEQUENCE), "--eval-rows", "48")
# A BERT whose vocabulary is no larger than that of the generated rows. The default one has six times as many weights,
# all of them words: half of what a short launch computes, sends and saves.
MICRO = ("--model", str(ROOT / "tests/training/micro"), "--lr", "0.001")
RANKS = {"single": 1, "hsdp": 4}  # of an arm; of the others two
DECODERS_ALONE = ("zero3_ulysses", "zero1_tp", "zero2_tp")  # arms that cannot train a BERT: test_dimensions.py has them


# What a step frees is kept for the next one, and not given back to the kernel and zeroed anew: an eighth of a launch.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


def pytest_addoption(parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write tests/golden/ anew; read the diff in review")
    parser.addoption("--refresh-seconds", action="store_true", help="write tests/seconds.json anew, from a run of all")


def pytest_plugin_registered(plugin) -> None:
    """Let a worker send one report of a test that passes, and not five messages: half a millisecond of each test."""
    if type(plugin).__name__ != "WorkerInteractor" or plugin.config.getoption("--refresh-seconds"):
        return  # which counts fixtures as well
    send = plugin.sendevent

    def send_what_is_shown(name: str, **about) -> None:
        data = about.get("data", {})
        is_around_a_test = name == "testreport" and data["when"] != "call" and data["outcome"] == "passed"
        if name not in ("logstart", "logfinish") and not is_around_a_test:
            send(name, **about)

    plugin.sendevent = send_what_is_shown


def pytest_configure(config) -> None:
    cases.asked["-k"] = config.option.keyword


@pytest.fixture
def golden(request):
    """Compare a text with the file of this name in tests/golden/, or write the file with --refresh-golden.

    Words that people read are compared here, one file for each command or page. Other tests assert numbers and ids.
    """

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests/golden" / name
        text = "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"
        if request.config.getoption("--refresh-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run pytest --refresh-golden, and read what it wrote"
        assert text == path.read_text(), f"{path.name} differs: pytest --refresh-golden, then read the diff"

    return compare


@pytest.hookimpl(tryfirst=True)  # before the plugin that looks for these marks
def pytest_collection_modifyitems(config, items) -> None:
    seconds = json.loads(SECONDS.read_text())
    seconds_of = {}
    for item in items:
        group = item.nodeid
        if item.path.stem not in APART:
            group = SHARING.get(item.path.stem, f"{item.path.parent.name}/{item.path.stem}")
            item.add_marker(pytest.mark.xdist_group(group))
        seconds_of[item] = seconds.get(group, 0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=seconds_of.__getitem__, reverse=True)  # what is equal keeps its order


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session) -> None:
    """Write the seconds of each group, in the process that hears of all tests: not in a worker."""
    if not session.config.getoption("--refresh-seconds") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    seconds: dict[str, float] = {}
    for reports in session.config.pluginmanager.get_plugin("terminalreporter").stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                name, _, group = report.nodeid.rpartition("@")
                group = report.nodeid if not name or "]" in group else group
                seconds[group] = seconds.get(group, 0) + report.duration
    long = {group: round(each) for group, each in sorted(seconds.items()) if each >= 1}
    SECONDS.write_text(json.dumps(long, indent=1) + "\n")


def pytest_collection_finish() -> None:
    gc.enable()
    if "PYTEST_XDIST_WORKER" in os.environ:
        fork_server()  # it imports while the first tests run


def pytest_unconfigure() -> None:
    gc.freeze()  # pytest looks for garbage five times at its end


@dataclass
class Launched:
    """One launch: what it printed, how it ended, and the folder it left."""

    folder: Path
    code: int
    output: str
    seconds: float

    @property
    def record(self) -> Record:
        return store.load(self.folder)

    @property
    def steps(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]


def environment_of_the_server() -> dict[str, str]:
    """Ours, and without a GPU DeepSpeed is told so before it is imported. Where there is one, it has to find it."""
    environment = MALLOC | os.environ
    if not num_gpus():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


@functools.cache
def fork_server(script: str = "tests/forkserver.py") -> str:
    """The address of a process that forks what it has imported, see these scripts. The first worker starts it."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"zero-study-{Path(script).stem}-{session}"
    address = f"\0{name}"  # not a file: gone when nobody has it open
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:  # another worker has started it
            time.sleep(0.2)  # it listens soon after it has bound
            return address
        listener.listen()
        listener.set_inheritable(True)
        words = [sys.executable, str(ROOT / script), str(listener.fileno()), str(session)]
        # None of ours: who reads what this session prints would wait for the server. At its end that removes the file.
        errors = Path(tempfile.gettempdir(), f"{name}.txt")
        streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        streams.append((os.POSIX_SPAWN_OPEN, 2, str(errors), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        os.posix_spawn(sys.executable, words, environment_of_the_server(), file_actions=streams)
    return address


def forked(folder: Path, *, config: str | None, script: str, flags: Sequence[str], launcher: tuple = ()) -> Launched:
    """Train, or run another script, in ranks that are forked: nothing is imported anew."""
    started = time.monotonic()
    request = {"config": config, "script": script, "flags": flags, "launcher": launcher, "env": dict(os.environ)}
    with (
        tempfile.NamedTemporaryFile(suffix=".txt") as output,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        server.settimeout(600)  # longer than a launch may take
        server.connect(fork_server())
        server.send(json.dumps(request | {"output": output.name}).encode())
        answer = json.loads(server.recv(1000))
        text = Path(output.name).read_text(errors="replace")
    assert answer["left"] == 0, f"{answer['left']} processes were left running: {text}"
    return Launched(folder, answer["code"], text, time.monotonic() - started)


def launch(
    config: str | Path,
    folder: Path,
    *flags: str,
    cache: Path,
    launcher: tuple = (),
    script: str = "study/train.py",
) -> Launched:
    """Train an arm, by its name or by the path of a yaml, and wait for the end."""
    path = str(config) if isinstance(config, Path) else f"accelerate_configs/{config}.yaml"
    flags = tuple(map(str, ("--run-dir", folder, "--cache-dir", cache, *flags)))
    return forked(folder, config=path, launcher=launcher, script=script, flags=flags)


def ranks_of(code: str, folder: Path, *words: str, ranks: int = 2) -> Launched:
    """Run code in several ranks, started and ended together as by torchrun, but forked: nothing is imported anew."""
    (folder / "rank.py").write_text(textwrap.dedent(code))
    config, launcher = "accelerate_configs/ddp.yaml", ("--num_processes", str(ranks))
    return forked(folder, config=config, launcher=launcher, script=str(folder / "rank.py"), flags=words)


def python(*words: str | Path, **options) -> subprocess.CompletedProcess:
    """Run Python in a process of its own, by itself at the root of the repository, and keep what it prints."""
    ours = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600, "check": False}
    return subprocess.run([sys.executable, *words], **ours | options)


def table(path: str) -> dict:
    """Cases that stand in a TOML file below tests/."""
    return tomllib.loads((ROOT / "tests" / path).read_text())


def traceback_of_ours(output: str) -> bool:
    """Whether a traceback goes through the study's code. After a failure the launcher always adds one of its own."""
    return f'File "{ROOT}/study/' in output


def left_running(folder: Path) -> list[list[str]]:
    """Command lines of processes that still work on a run folder."""
    lines = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            lines.append(words)
    return lines


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Garbage is collected among what a module's tests make, and not among all that is imported, a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder of this session, the same one for each of its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cache(shared) -> Path:
    """One cache for all launches of a session, empty at its start, and then shared as one user's runs share it."""
    (shared / "cache").mkdir(exist_ok=True)
    return shared / "cache"


def forget_traces(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No trace is known: neither in this process nor in the cache."""
    from study.core.settings import CACHE
    from study.predict import training
    from study.predict.trace import transformer

    patch.setenv(CACHE, str(folder))
    for module, name in ((training, "traced"), (transformer, "_followed")):
        patch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))


@pytest.fixture
def without_traces(monkeypatch, tmp_path_factory):
    """With the patches of the test itself: undone before them, this cache would be that of all tests that follow."""
    forget_traces(monkeypatch, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def module_without_traces(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        forget_traces(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="session")
def trained(shared, cache):
    """A function that trains an arm with some flags once per session, and hands out the same run when asked again.

    It gets as many `ranks` as the arm takes by itself, or more.
    """

    def train(arm: str, *flags: str, ranks: int | None = None) -> Launched:
        ranks = ranks or RANKS.get(arm, 2)
        key = hashlib.sha256(repr((flags, ranks)).encode()).hexdigest()[:12]
        kept = shared / f"trained-{arm.replace('/', '-')}-{key}"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
            if not kept.exists():
                folder = Path(tempfile.mkdtemp(dir=shared))
                launcher = ("--num_processes", str(ranks)) if ranks > 2 else ()
                run = launch(arm, folder / arm.replace("/", "-"), *flags, cache=cache, launcher=launcher)
                assert run.code == 0, run.output
                kept.write_bytes(pickle.dumps(run))
        return pickle.loads(kept.read_bytes())

    return train


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 32 MiB, which can really be full. Root can mount one, and who may become root without a password."""
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [*root, "mount", "-t", "tmpfs", "-o", "size=32m,mode=777", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield folder
    subprocess.run([*root, "umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def forked_cells(monkeypatch, cache):
    """Cells of a sweep have forked launches: a fresh one is almost all imports."""

    def run(cell, folder: Path, *_) -> Record:
        monkeypatch.setenv(store.CELL, cell.declared.model_dump_json())
        ranks = ("--num_processes", str(cell.ranks)) if cell.ranks else ()
        launched = launch(cell.arm, folder.resolve(), *launches.options(cell.settings), cache=cache, launcher=ranks)
        assert launched.code == 0, launched.output
        return launched.record

    monkeypatch.setattr(launches, "run", run)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """The process that forks the ranks of conformance's properties."""
    from study.conform import suite

    with suite.Ranks(tmp_path_factory.mktemp("ranks") / "log.txt") as process:
        yield process


# --- what the report and the notebooks are tested with -------------------------------------------------------------


@pytest.fixture(scope="session")
def real_runs(trained, tmp_path_factory) -> Path:
    """Four real runs, the same that `test_train` looks at, and beside them what else a folder may hold."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    for arm in ("single", "ddp", "zero2", "zero3_cpu"):
        shutil.copytree(trained(arm, *TRAINED).folder, folder / f"real-{arm}")
    return folder


@pytest.fixture(scope="session")
def site(real_runs, tmp_path_factory):
    """The report over the real runs, a run that ended badly, and a virtual one."""
    from study.report import site as report
    from tests.shaped import failed, finished, put

    put(real_runs, finished("shaped-virtual", "zero2", 64, virtual=True), failed("shaped-oom", arm="zero3"))
    out = tmp_path_factory.mktemp("site") / "build"
    assert report.build([real_runs], out) == []
    return out
