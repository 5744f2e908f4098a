"""Starts a small sweep, lets one fault strike it, and asserts the same four things each time.

1. The try that was struck has the right status and sentence, or the sweep stopped in one sentence: never a traceback.
2. Nothing of the user's was touched.
3. No process and no lock is left.
4. The same command completes the work afterwards.

The sweep is `study sweep`, the launcher Accelerate's and torchrun's own, the ranks the study's trainer. All are forked
from one process that has imported everything, where a user's would be started: almost all of a tiny launch is imports.

    python tests/fault_runner.py                      # the whole table
    python tests/fault_runner.py "hang: " "SIGKILL"   # the faults with these names, or with these words in their names
"""

import argparse
import contextlib
import ctypes
import fcntl
import filecmp
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__" and "torch" not in sys.modules:  # as tests/forkserver.py does before it imports
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import accelerate.commands.launch as accelerate_launch
import psutil
import torch
import torch.distributed.run
from faults import FAULTS, MOMENTS, STRIKES, Fault, Place
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

import study.train
from study.cli import commands, experiments, progress  # noqa: F401  imported here once
from study.machine import launcher
from study.records import store
from study.sweeps import launches
from study.sweeps import protocol as protocols
from study.training import main

PROTOCOL = """about = "a cell or two for a fault"
document = "none"
replicates = "nothing"
[[part]]
name = "p"
arm = "{arm}"
ranks = {ranks}
data = "embedded"
init = "random"
seed = {seeds}
{settings}
[part.tiny]
"""
SMALL = {"sequence": 16, "train_rows": 64, "eval_rows": 16, "micro_batch": 4, "steps": 4, "warmup_steps": 1}
SMALL |= {"log_every": 2, "instruments": False, "threads": 1}
PR_SET_CHILD_SUBREAPER = 36
OPEN_AT_START = set()  # descriptors that a forked process keeps, as what it imports has them
ENV = {}
CONTROL = next(fault for fault in FAULTS if fault.kind == "control")


# --- forked in place of started ------------------------------------------------------------------------------------


def forked(run: Callable[[list[str]], None]) -> type[subprocess.Popen]:
    """A Popen whose process is forked and calls `run` with its words, as a program that had been started would."""

    class Forked(subprocess.Popen):
        def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
            *_, read_in, _, _, write_out, _, write_err = more[3:9]
            session = more[-2]
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                streams = (read_in, write_out, write_err)
                _end_with(_begin, run, list(map(str, args)), preexec_fn, cwd, env, session, streams)
            self._child_created = True
            self._close_pipe_fds(*more[3:9])

    return Forked


def _begin(run, words: list[str], preexec_fn, cwd, env, session: bool, streams: tuple[int, int, int]) -> None:
    """What exec and Popen do for a process: its own session, streams, environment, signals and open files."""
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        if stream not in (-1, number):
            os.dup2(stream, number)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if int(name) > 2 and int(name) not in OPEN_AT_START and not os.get_inheritable(int(name)):
                os.close(int(name))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    if preexec_fn:
        preexec_fn()
    if cwd:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    torch.set_num_threads(1)
    run(words)


def launcher_main(words: list[str]) -> None:
    """`python -m accelerate.commands.launch`, but for the processes that it starts."""
    SubprocessHandler._popen = lambda self, args, env: forked(rank_main)(args, env=env, start_new_session=True)
    accelerate_launch.subprocess = _like_subprocess(rank_main)
    os.environ["FAULT_LAUNCHER"] = " ".join(words[3:7])
    sys.argv = ["accelerate-launch", *words[3:]]
    accelerate_launch.main()


def rank_main(words: list[str]) -> None:
    """`python -u study/train.py`, with the fault in it."""
    place = next(at for at, word in enumerate(words) if word.endswith("train.py"))
    sys.argv = [*words[place:], "--cache-dir", str(Path(os.environ["XDG_CACHE_HOME"]) / "zero-study")]
    above = psutil.Process(os.getppid())
    options, _ = launcher.OPTIONS.parse_known_args(os.environ["FAULT_LAUNCHER"].split())
    launcher.find = lambda: (above, options)
    _plant(Path(words[words.index("--run-dir") + 1]))
    main.main(study.train.train)


def _end_with(function, *arguments) -> None:
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):  # Python ends so as well
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _like_subprocess(run) -> types.SimpleNamespace:
    names = ("TimeoutExpired", "CalledProcessError", "DEVNULL", "PIPE", "STDOUT")
    return types.SimpleNamespace(Popen=forked(run), **{name: getattr(subprocess, name) for name in names})


# --- the fault -----------------------------------------------------------------------------------------------------


def _plant(folder: Path) -> None:
    """In a rank: have the fault of this round strike at its moment, if it is this rank's."""
    about = json.loads(os.environ.get("FAULT", "null"))
    if not about or not folder.name.endswith(f"{about['turn']}.1") or int(os.environ.get("RANK", 0)) != about["rank"]:
        return
    place = Place(Path(about["runs"]), about["turn"], about["sweep"], os.getppid())

    def strike() -> None:
        (place.runs.parent / "struck").touch()
        STRIKES[about["how"]](place)

    if MOMENTS[about["when"]] is None:
        time.sleep(0.5)  # imports take seconds: the launcher is not still about to fork the other ranks
        strike()
        return
    module, name, *skipped = MOMENTS[about["when"]]
    *above, last = name.split(".")
    owner = functools.reduce(getattr, above, importlib.import_module(module))
    original, calls = getattr(owner, last), itertools.count()

    def struck(*words, **named):
        if next(calls) == (skipped[0] if skipped else 0):
            strike()
        return original(*words, **named)

    setattr(owner, last, struck)


def _sweep_main(words: list[str], fault: Fault | None, place: Place, cache: Path) -> None:
    """`study sweep`, in a forked process."""
    os.environ.clear()
    os.environ.update(ENV | {"XDG_CACHE_HOME": str(cache)})
    if fault is not None:
        about = {"rank": fault.rank, "when": fault.when, "how": fault.how, "sweep": os.getpid()}
        os.environ["FAULT"] = json.dumps(about | {"runs": str(place.runs), "turn": place.turn})
    launches.subprocess = _like_subprocess(launcher_main)
    sys.argv = ["study", *words]
    commands.main()


# --- a round -------------------------------------------------------------------------------------------------------


def play(fault: Fault, base: Path, cache: Path) -> None:
    """One round: a sweep that is struck, and the same command again."""
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in (SMALL | fault.settings).items())
    ranks, seeds = 1 if fault.arm == "single" else 2, list(range(1, fault.cells + 1))
    protocol = PROTOCOL.format(arm=fault.arm, ranks=ranks, seeds=seeds if fault.cells > 1 else 1, settings=settings)
    (base / "faulty.toml").write_text(protocol)
    cell = protocols.cells(protocols.read(str(base / "faulty.toml")), "tiny")[0]
    place = Place(base / "runs", f"{cell.name}-r1")
    place.runs.mkdir()
    if "tmpfs" in fault.how:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place.runs)], check=True)
    for name in ("notes.txt", "mine.1/record.json", "mine.1/thesis.txt", f"{place.turn}.bak/thesis.txt"):
        (place.runs / name).parent.mkdir(exist_ok=True)
        (place.runs / name).write_text(f"a user's own {name}\n")
    (place.runs / "link").symlink_to("notes.txt")
    own = Path(shutil.copytree(place.runs, base / "copy", symlinks=True))
    words = ["sweep", str(base / "faulty.toml"), "--runs", str(place.runs), "--timeout-s", str(fault.timeout_s)]
    try:
        code, output = _sweep(base / "printed.txt", words, fault, place, cache)
        _assert_no_process(fault)
        assert (base / "struck").exists(), "the fault did not strike"
        _assert_struck(fault, place, code, output)
        _restore(place)
        (base / "faulty.toml").write_text(protocol)
        _assert_untouched(own, place)
        if (place.runs / ".sweep").is_file():
            with (place.runs / ".sweep").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the folder is still locked
        done = {path: path.read_bytes() for path in place.runs.glob("*/record.json") if _status(path.parent) == "done"}
        code, output = _sweep(base / "printed.txt", words, None, place, cache)
        _assert_complete(fault, place, code, output, done)
        _assert_no_process(fault)
        _assert_untouched(own, place)
    finally:
        subprocess.run(["umount", "-l", str(place.runs)], check=False, capture_output=True)


def _sweep(printed: Path, words: list[str], fault: Fault | None, place: Place, cache: Path) -> tuple[int, str]:
    """Run the command in a process of its own, and wait for its end. Gives its exit code and what it printed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        _end_with(_sweep_main, words, fault, place, cache)
    until = time.monotonic() + 150
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), printed.read_text(errors="replace")
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os.waitpid(pid, 0)
    raise AssertionError(f"the sweep did not end in 150 s: {printed.read_text(errors='replace')[-2000:]}")


def _restore(place: Place) -> None:
    """Put right what a user would before giving the same command again."""
    moved = place.runs.with_name("moved")
    if moved.exists():
        assert not place.runs.exists(), "a folder of runs was made anew where it had been moved away"
        moved.rename(place.runs)
    (place.runs / "users-own-large-file").unlink(missing_ok=True)
    for group in Path("/sys/fs/cgroup/memory").glob("zero-study-*"):
        with contextlib.suppress(OSError):
            group.rmdir()


# --- the four things -----------------------------------------------------------------------------------------------


EXIT_CODES = {None: 2, "done": 0, "oom": 0, "host_oom": 0, "diverged": 0, "unavailable": 0, "interrupted": 3}


def _status(folder: Path) -> str | None:
    try:
        return store.load(folder).status
    except Exception:
        return None


def _assert_struck(fault: Fault, place: Place, code: int, output: str) -> None:
    assert "Traceback" not in output, f"a traceback of the sweep: {output[-3000:]}"
    if fault.status is not None:
        _assert_record(fault, place)
    else:
        assert fault.words in " ".join(output.split()), f"{fault.words!r} is not in {output!r}"
    wanted = fault.code if fault.code is not None else EXIT_CODES.get(fault.status, 1)
    assert code == wanted, f"exit code {code}, not {wanted}: {output[-1500:]}"
    if fault.status is None and code == 2:
        assert output.count("What to do:") == 1, f"not one sentence: {output[-1500:]}"


def _assert_record(fault: Fault, place: Place) -> None:
    record = store.load(place.folder)
    error = record.error
    message = error.message if error else ""
    assert record.status == fault.status, f"status {record.status}, not {fault.status}: {error}"
    assert fault.words in message, f"{fault.words!r} is not in {message!r}"
    assert fault.where is None or error.where == fault.where, f"where: {error.where}, not {fault.where}: {message}"
    assert "Traceback" not in message, f"no sentence: {message}"
    assert not error or error.what_to_do, f"no remedy: {message}"
    if fault.how == "it sleeps" and fault.when == "timed window":  # the launch printed where each of its ranks stood
        printed = (place.folder / "output.txt").read_text(errors="replace")
        assert len(re.findall(r'train\.py", line \d+ in train\b', printed)) == 2, printed[-3000:]
    assert not list(place.runs.glob("nvme/*")), "files are left on the disk"


def _assert_untouched(own: Path, place: Place) -> None:
    for path in own.rglob("*"):
        now = place.runs / path.relative_to(own)
        if path.is_symlink():
            assert now.is_symlink(), f"{now} was a link"
        elif path.is_file():
            same = now.is_file() and filecmp.cmp(path, now, shallow=False)
            assert same, f"{now} of the user's is changed or gone"
    for thesis in place.runs.glob(f"{place.turn}.*/thesis.txt"):
        assert "a user's" in thesis.read_text(), f"{thesis} is changed"


def _assert_no_process(fault: Fault) -> None:
    """All that was started is gone; what is orphaned becomes this process's child."""
    patience_s = 45 if "the launcher and both" in fault.how or "Ctrl-C twice" in fault.how else 8
    until, left = time.monotonic() + patience_s, []
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [each for each in psutil.Process().children(recursive=True) if not _is_tracker(each)]
        if not left:
            return
        time.sleep(0.05)
    about = [str(each) for each in left]
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    raise AssertionError(f"processes are left: {about}")


def _is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is a tracker of Python's, which ends with this process, or has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return True


def _assert_complete(fault: Fault, place: Place, code: int, output: str, done: dict[Path, bytes]) -> None:
    assert code == 0, f"the same command ends with {code}: {output[-2000:]}"
    assert "Traceback" not in output, output[-2000:]
    if fault.cells > 1:
        assert output.count("  done") == fault.cells, f"not all cells are done: {output}"
    else:
        statuses = {_status(folder) for folder in place.runs.glob(f"{place.turn}.[0-9]*")}
        assert {"done", "oom"} & statuses, f"nothing is done: {statuses}: {output[-1500:]}"
    for path, content in done.items():
        assert path.read_bytes() == content, f"{path} was done, and was written again"
    assert not list(place.runs.glob("*/*.part*")), "half-written files are left behind"


# --- many rounds ---------------------------------------------------------------------------------------------------


def play_one(fault: Fault, base: Path) -> bool:
    """Play a round, print how it went, and return whether all held."""
    folder = Path(tempfile.mkdtemp(prefix="round-", dir=base))
    started, problem = time.monotonic(), ""
    try:
        play(fault, folder, base / "cache")
        shutil.rmtree(folder, ignore_errors=True)
    except Exception:
        problem = f"\n    BROKEN: {traceback.format_exc()}    {folder}"
        with contextlib.suppress(AssertionError):
            _assert_no_process(fault)
    print(f"{time.monotonic() - started:5.1f} s  {fault.name}{problem}", flush=True)  # noqa: T201
    return not problem


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of faults, or words in them; default: all")
    parser.add_argument("--jobs", type=int, default=3, help="rounds at a time")
    parser.add_argument("--base", type=Path, help="where the rounds work")
    options = parser.parse_args()
    exact = {fault.name for fault in FAULTS} & set(options.names)
    words = [name for name in options.names if name not in exact] if options.names else [""]
    faults = [fault for fault in FAULTS if fault.name in exact or any(word in fault.name for word in words)]
    base = options.base or Path(tempfile.mkdtemp(prefix="faults-"))
    (base / "cache").mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become this process's children
    OPEN_AT_START.update(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    ENV.update({name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        ENV.pop(name, None)
    held = play_one(CONTROL, base)  # it fills the cache as well: there must be something to break
    for job in range(options.jobs):  # most of a hang is waiting
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
            sys.exit(not all([play_one(fault, base) for fault in faults[job :: options.jobs]]))
    held &= not any([os.wait()[1] for _ in range(options.jobs)])
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    command_line()
