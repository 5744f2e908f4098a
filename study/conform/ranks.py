"""Runs properties on gloo ranks: one process imports the libraries once, and forks the ranks of each property.

It reads a request as a line of JSON, and answers with a line. A property that crashes or hangs ends only its own ranks.
An adapter is code, and is run with the rights of the user.
"""

import contextlib
import datetime
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"  # no thread may exist when a process is forked
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch._dynamo  # each rank would import it with its first optimizer
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch.distributed.checkpoint.api import CheckpointException

from study.conform import checks, models, script
from study.conform.cases import Case, Difference, ShardedTraining
from study.conform.suite import PROPERTIES, Adapter, Answer, Property
from study.core.machine import free_port

GRACE_S = 2  # for the other ranks, once one has failed
FORK = multiprocessing.get_context("fork")
CRASHES = (AttributeError, TypeError, KeyError, IndexError, NameError, ZeroDivisionError, CheckpointException)
Outcome = dict[str, str]  # answer, words and kind


def serve() -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = asdict(answer(**json.loads(line)))
        except ImportError as error:
            reply = {"stop": str(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def answer(adapter: dict, name: str, scripts: str | None, limit_s: float) -> Answer:
    """Hold an adapter to a property. A failure is written as a script into the folder `scripts`."""
    way, each = Adapter(**adapter), PROPERTIES[name]
    module = _imported(way.path)
    accelerate = _version("accelerate")
    if way.package == "deepspeed":  # some of its releases import Accelerate, and train without it
        accelerate = ""
    found = Answer(way.name, name, _version("torch"), _version("deepspeed"), accelerate, "not applicable", "", "")
    only = way.settings.get("ranks")
    if lacking := [function for function in each.functions if not hasattr(module, function)]:
        return replace(found, words=f"the adapter has no {lacking[0]}")
    if only and set(each.ranks) not in ({2}, {only}):
        return replace(found, words=f"ranks of the property: {each.ranks[-1]}; of the adapter: {only}")
    if only:
        each = replace(each, ranks=(only,) * len(each.ranks))
    outcome = _held(way, each, limit_s)
    if outcome["kind"] == "hangs":  # or the machine was busy
        outcome = _held(way, each, 3 * limit_s)
    found = replace(found, **outcome)
    if found.answer == "fails" and scripts:
        script.write(Path(scripts), way, each, found)
    return found


def _version(library: str) -> str:
    return getattr(sys.modules.get(library), "__version__", "").partition("+")[0]


@functools.cache
def _imported(path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ImportError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error
    return module


def _held(adapter: Adapter, each: Property, limit_s: float) -> Outcome:
    """Run each launch of a property, in a fresh folder, until one does not hold."""
    with tempfile.TemporaryDirectory(prefix="conform-") as folder:
        for launch in range(len(each.ranks)):
            outcome = _launched(adapter, each, launch, Path(folder), limit_s)
            if outcome["answer"] != "holds":
                break
    return outcome


def _launched(adapter: Adapter, each: Property, launch: int, folder: Path, limit_s: float) -> Outcome:
    """Fork the ranks of one launch, and wait for them. One that fails ends the others."""
    size, port = each.ranks[launch], str(free_port())
    paths = [folder / f"{launch}-{rank}.json" for rank in range(size)]
    given = (adapter, each, launch, port, limit_s)
    ranks = [FORK.Process(target=_rank, args=(*given, str(rank), path)) for rank, path in enumerate(paths)]
    for process in ranks:
        process.start()
    until = time.monotonic() + limit_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < until:
        if any(process.exitcode for process in ranks):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.005)
    late = not any(process.exitcode for process in ranks)
    killed = [process for process in ranks if process.is_alive()]
    for process in killed:
        process.kill()
        process.join()
    if late and killed:
        return {"answer": "fails", "words": f"hangs: not done after {limit_s} s", "kind": "hangs"}
    both = zip(paths, ranks, strict=True)
    outcomes = [_outcome(path, process.exitcode) for path, process in both if process not in killed]
    return min(outcomes, key=lambda each: each[0])[1]


def _outcome(path: Path, code: int | None) -> tuple[float, Outcome]:
    """Return when a rank failed, and the outcome. A crash, which wrote none, comes first; one that holds comes last."""
    with contextlib.suppress(OSError, ValueError):
        time_s, outcome = json.loads(path.read_text())
        return time_s, outcome
    last = path.with_suffix(".log").read_text(errors="replace").splitlines()[-1:]
    words = f"a rank ended with exit code {code}: {' '.join(' '.join(last).split())[:300]}"
    return 0.0, {"answer": "fails", "words": words, "kind": str(code)}


def _rank(adapter: Adapter, each: Property, launch: int, port: str, limit_s: float, rank: str, path: Path) -> None:
    """Run the check on this rank, and write the outcome."""
    size = str(each.ranks[launch])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    build = functools.partial(ShardedTraining, _imported(adapter.path), adapter.settings, path.parent)
    outcome = {"answer": "holds", "words": "", "kind": ""}
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * limit_s))
        getattr(checks, each.check)(build, case_of(each), launch)
        dist.barrier()
    except (Exception, CheckpointException) as error:  # the second is no Exception
        traceback.print_exc()
        outcome = outcome_of(error, str(adapter.path))
    holds = outcome["answer"] == "holds"
    path.write_text(json.dumps([math.inf if holds else time.time(), outcome]))
    os._exit(0 if holds else 1)  # gloo's threads may abort an ordinary exit


def case_of(each: Property) -> Case:
    return Case(**each.case | {"model": getattr(models, each.case.get("model", "Plain"))})


def outcome_of(error: BaseException, adapter_file: str) -> Outcome:
    """Return the outcome that an exception means.

    NotImplementedError from the adapter's own file: not applicable. A `raise` with a message in a Python file of the
    library: refused, in its words. So is an `assert` with a message in build, save or load; later it guards the
    library's own state. Anything else is a crash, and the property fails. So is a checkpoint that cannot be loaded.
    """
    if isinstance(error, Difference):
        return {"answer": "fails", "words": str(error), "kind": "differs"}
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    kind = f"{type(error).__name__} in {Path(last.filename).name}, {last.lineno}"
    crashed = isinstance(error, CRASHES)
    if isinstance(error, CheckpointException):
        error = next(each for each, _ in error.failures.values())
    words = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())[:300]
    if isinstance(error, NotImplementedError) and last.filename == adapter_file:
        return {"answer": "not applicable", "words": words, "kind": kind}
    early = any(frame.filename == adapter_file and frame.name in ("build", "save", "load") for frame in frames)
    statement = ("raise", "assert") if early else ("raise",)
    on_purpose = words and (last.line or "").startswith(statement) and not crashed
    refused = on_purpose or type(error).__name__ == "ValidationError"  # compiled code of pydantic raises it
    return {"answer": "refused" if refused else "fails", "words": f"{type(error).__name__}: {words}", "kind": kind}


if __name__ == "__main__":
    gc.freeze()  # no collection in a rank copies what was imported
    serve()
