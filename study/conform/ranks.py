"""Runs properties on gloo ranks: one process imports the libraries once, and forks the ranks of each property."""

import contextlib
import datetime
import functools
import gc
import math
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
from multiprocessing.context import ForkProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # no thread may exist when a process is forked
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch._dynamo  # each rank would import it with its first optimizer
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.checkpoint.api import CheckpointException

from study.conform import checks, models
from study.conform.cases import Case, ShardedTraining, Unequal
from study.conform.suite import LIBRARIES, NEEDED, Adapter, Property, PropertyAnswer, redirect_output
from study.core.machine import free_port

GRACE_S = 2  # for the other ranks, once one has failed: the first that fails is the cause
SAID_WHY = 77  # exit code of a rank that has put its outcome into the queue; any other one is a crash
FORK = multiprocessing.get_context("fork")
CRASHES = (AttributeError, TypeError, KeyError, IndexError, NameError, ZeroDivisionError, CheckpointException)


class PropertyOutcome(NamedTuple):
    """What came of a property on one rank, as in `Answer`; first the time at which it failed."""

    time_s: float
    answer: str
    words: str = ""
    kind: str = ""


HOLDS = PropertyOutcome(math.inf, "holds")


def answer(adapter: Adapter, each: Property, limit_s: float) -> PropertyAnswer:
    """Hold an adapter to a property."""
    module = _imported(adapter.path)  # here, and not in each rank
    if each.needs and not hasattr(module, each.needs):
        outcome = PropertyOutcome(0, "not applicable", f"the adapter has no {each.needs}")
    elif not adapter.ranks_for(each):
        words = f"ranks of the property: {each.ranks[-1]}; of the adapter: {adapter.ranks}"
        outcome = PropertyOutcome(0, "not applicable", words)
    else:
        outcome = _held(adapter, each, limit_s)
    versions = {name: getattr(sys.modules.get(name), "__version__", "").partition("+")[0] for name in LIBRARIES}
    if adapter.package == "deepspeed":
        versions["accelerate"] = ""  # some releases of DeepSpeed import it, and train without it
    _, *said = outcome
    return PropertyAnswer(adapter.name, each.name, *versions.values(), *said)


@functools.cache
def _imported(path: Path) -> SimpleNamespace:
    try:
        module = SimpleNamespace(**runpy.run_path(str(path)))
    except Exception as error:
        raise ImportError(f"{path} cannot be imported ({type(error).__name__}: {error})") from None
    if missing := [each for each in NEEDED if not hasattr(module, each)]:
        raise ImportError(f"{path} does not define {', '.join(missing)}")
    gc.freeze()  # no collection in a rank copies what was imported
    return module


def _held(adapter: Adapter, each: Property, limit_s: float) -> PropertyOutcome:
    """Run each launch of a property, all in one new folder, until one does not hold."""
    with tempfile.TemporaryDirectory(prefix="conform-") as folder:
        for size in adapter.ranks_for(each):
            outcome = _launched(adapter, each, size, Path(folder), limit_s)
            if outcome != HOLDS:
                return outcome
    return HOLDS


def _launched(adapter: Adapter, each: Property, size: int, folder: Path, limit_s: float) -> PropertyOutcome:
    """Fork the ranks of one launch, wait for them, and return what came of the one that failed first."""
    failures = FORK.SimpleQueue()
    env = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [FORK.Process(target=_rank, args=(adapter, each, failures, limit_s, env, str(i))) for i in range(size)]
    with contextlib.chdir(folder):  # checkpoints are relative to it, and so is a rank's log
        for rank in ranks:
            rank.start()
    _wait(ranks, limit_s)
    codes = [rank.exitcode for rank in ranks]  # None: it still runs
    outcomes = [HOLDS]
    # Only if no rank failed: the others of one that did wait for it, and hang as well.
    if None in codes and not any(codes):
        outcomes = [PropertyOutcome(0, "fails", f"hangs: not done after {limit_s} s", "hangs")]
    for index, code in enumerate(codes):
        ranks[index].kill()
        ranks[index].join()
        if code not in (None, 0, SAID_WHY):
            # A crash has no exception to put into the queue. Its time is 0: it comes before what others say.
            last = Path(folder, f"{index}.log").read_text(errors="replace").splitlines()[-1:]
            words = f"a rank ended with exit code {code}: {_one_line(' '.join(last))}"
            outcomes.append(PropertyOutcome(0, "fails", words, str(code)))
    while not failures.empty():
        outcomes.append(failures.get())
    return min(outcomes)


def _wait(ranks: list[ForkProcess], limit_s: float) -> None:
    """Wait until all ranks have ended, but no longer than the limit; less long once one has failed."""
    until = time.monotonic() + limit_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        if any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.01)


def _rank(adapter: Adapter, each: Property, failures: SimpleQueue, limit_s: float, env: dict, rank: str) -> None:
    """Run the check on this rank, and say why it fails."""
    os.environ.update(env, RANK=rank, LOCAL_RANK=rank)
    redirect_output(Path(f"{rank}.log"))
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * limit_s))
        build = functools.partial(ShardedTraining, _imported(adapter.path))
        case = Case(getattr(models, each.model), settings=adapter.settings, **each.case)
        getattr(checks, each.check)(build, case)
        dist.barrier()  # a rank that ends early breaks the connections of those that are not done
    except BaseException as error:  # CheckpointException is no Exception
        traceback.print_exc()
        failures.put(outcome_of(error, str(adapter.path)))
        os._exit(SAID_WHY)
    os._exit(0)  # gloo's threads may abort an ordinary exit


def outcome_of(error: BaseException, adapter_file: str) -> PropertyOutcome:
    """Return the outcome that an exception means.

    NotImplementedError from the adapter's own file: not applicable. A `raise` with a message in a Python file of the
    library: refused, in its words. So is an `assert` with a message in build, save or load; later it guards the
    library's own state. Anything else is a crash, and the property fails. So is a checkpoint that cannot be loaded.
    """
    now_s = time.time()  # of all ranks: the earliest failure is the cause
    if isinstance(error, Unequal):
        return PropertyOutcome(now_s, "fails", str(error), "differs")
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    kind = f"{type(error).__name__} in {Path(last.filename).name}, {last.lineno}"
    cause = error
    if isinstance(error, CheckpointException):  # it holds the exceptions of ranks; the first one says enough
        cause, _ = next(iter(error.failures.values()))
    words = _one_line(str(cause))
    if isinstance(cause, NotImplementedError) and last.filename == adapter_file:
        return PropertyOutcome(now_s, "not applicable", words, kind)
    stated = words and not isinstance(error, CRASHES) and _is_stated(frames, adapter_file)
    # Compiled code of pydantic raises a ValidationError.
    answer = "refused" if stated or type(cause).__name__ == "ValidationError" else "fails"
    return PropertyOutcome(now_s, answer, f"{type(cause).__name__}: {words}", kind)


def _is_stated(frames: traceback.StackSummary, adapter_file: str) -> bool:
    """Whether the last line of a traceback is a statement by which a library refuses."""
    calls = {frame.name for frame in frames if frame.filename == adapter_file}
    statement = "raise|assert" if calls & {"build", "save", "load"} else "raise"
    return bool(re.search(rf"(^|: )({statement})\b", str(frames[-1].line)))  # perhaps on the line of its condition


def _one_line(text: str) -> str:
    """Return the beginning of a text, without colours of a terminal."""
    return " ".join(re.sub(r"\x1b\[\d*m", "", text).split())[:300]
