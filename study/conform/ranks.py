"""Runs properties on gloo ranks: one process imports the libraries once, and forks the ranks of each property.

It reads a request as a line of JSON, and answers with a line. A property that crashes or hangs ends only its own ranks.
An adapter is code, and is run with the rights of the user.
"""

import ast
import contextlib
import datetime
import gc
import importlib.util
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # no thread may exist when a process is forked
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch._dynamo  # each rank would import it with its first optimizer
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch.distributed.checkpoint.api import CheckpointException

from study.conform import checks, models
from study.conform.cases import Case, Difference
from study.conform.output import LIBRARIES
from study.conform.properties import Property, read
from study.machine.linux import free_port

BY_NAME = {each.name: each for each in read()}
GRACE_S = 2  # for the other ranks, once one has failed
FUNCTIONS = ("build", "forward_backward", "step", "whole_weights", "gradient_norm", "save", "load", "schedule")
EARLY = ("build", "save", "load")
CRASHES = (AttributeError, TypeError, KeyError, IndexError, NameError, ZeroDivisionError, UnboundLocalError)


def serve() -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    modules: dict[str, ModuleType | dict] = {}
    for line in sys.stdin:
        request = json.loads(line)
        path = request["adapter"]
        if path not in modules:
            modules[path] = _imported(path)
        module = modules[path]
        if isinstance(module, dict):
            answer = module
        elif "property" in request:
            answer = _answer(module, request)
        else:
            answer = {name: getattr(sys.modules.get(name), "__version__", None) for name in LIBRARIES}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _imported(path: str) -> ModuleType | dict:
    """Import an adapter; if that fails, return the answer to every request."""
    try:
        spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        return {"stop": f"{path} cannot be imported ({type(error).__name__}: {error})"}


def _answer(module: ModuleType, request: dict) -> dict:
    chosen = BY_NAME[request["property"]]
    lacking = [name for name in needed(chosen) if not hasattr(module, name)]
    if lacking:
        return {"status": "not applicable", "words": f"the adapter has no {lacking[0]}"}
    started = time.monotonic()
    answer = {"status": "holds", "words": ""}
    for number, ranks in enumerate(request["ranks"]):
        answer = _launch(module, request, number, ranks)
        if answer["status"] != "holds":
            break
    return answer | {"seconds": round(time.monotonic() - started, 2)}


def needed(chosen: Property) -> tuple[str, ...]:
    """Return the functions of an adapter that a property calls. Every adapter may lack gradient_norm."""
    checkpoints = ("save", "load") if chosen.check.startswith("checkpoint") else ()
    return FUNCTIONS[:4] + checkpoints + (("schedule",) if chosen.setting("schedule") not in ("", "falling") else ())


def _launch(module: ModuleType, request: dict, number: int, ranks: int) -> dict:
    """Fork the ranks of one launch, and wait for them. One that fails ends the others."""
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            _rank(module, request, number, folder)
        running[pid] = rank
    ended, late = _wait(running, time.monotonic() + request["limit_s"])
    outcomes = [_outcome(folder / f"{number}-{rank}.json", code) for rank, code in sorted(ended.items())]
    bad = sorted((each for each in outcomes if each["status"] != "holds"), key=lambda each: each["time"])
    if late:
        first = bad[0]["words"] if bad and bad[0]["time"] < float("inf") else ""
        kind = bad[0]["kind"] if first else "hangs"
        return {"status": "fails", "words": first or f"hangs: not done after {request['limit_s']} s", "kind": kind}
    return bad[0] if bad else {"status": "holds", "words": ""}


def _wait(running: dict[int, int], until: float) -> tuple[dict[int, int], bool]:
    """Return the exit code of each rank, and whether they had to be killed at the limit."""
    ended: dict[int, int] = {}
    late, killed = False, False
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ended[running.pop(pid)] = code
                until = min(until, time.monotonic() + GRACE_S) if code else until
        if running and not killed and time.monotonic() > until:
            late, killed = not any(ended.values()), True
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return ended, late


def _outcome(path: Path, code: int) -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    if code == -signal.SIGKILL:  # by us, after another rank had failed or at the limit
        return {"status": "fails", "words": "", "kind": "killed", "time": float("inf")}
    lines = path.with_suffix(".log").read_text(errors="replace").splitlines() or [""]
    last = " ".join(lines[-1].split())[:300]
    return {"status": "fails", "words": f"a rank ended with exit code {code}: {last}", "kind": str(code), "time": 0.0}


def _rank(module: ModuleType, request: dict, number: int, folder: Path) -> None:
    """Run the check on this rank, write the outcome, and end this process."""
    path = folder / f"{number}-{os.environ['RANK']}.json"
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    adapter = SimpleNamespace(**functions, settings=request["settings"])
    chosen = BY_NAME[request["property"]]
    outcome: dict[str, object] = {"status": "holds", "words": ""}
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * request["limit_s"]))
        getattr(checks, chosen.check)(adapter, case_of(chosen.case | request["case"]), folder, number)
        dist.barrier()
    except (Exception, CheckpointException) as error:  # the second is no Exception
        traceback.print_exc()
        outcome = dict(zip(("status", "words"), explain(error, str(module.__file__)), strict=True))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        differs = isinstance(error, Difference)
        outcome["kind"] = (
            "differs" if differs else f"{type(error).__name__} in {Path(frame.filename).name}, {frame.lineno}"
        )
    path.write_text(json.dumps(outcome | {"time": time.time()}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(outcome["status"] != "holds"))


def case_of(fields: dict) -> Case:
    """Return a case. A model is given by its name."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Case(**values | {"model": getattr(models, fields.get("model", "Plain"))})


def explain(error: BaseException, adapter_file: str) -> tuple[str, str]:
    """Return the status that an exception means, and its words.

    NotImplementedError from the adapter's own file: not applicable. A `raise` with a message in a Python file of the
    library: refused, in its words. So is an `assert` with a message in build, save or load; later it guards the
    library's own state. Anything else is a crash, and the property fails. So is a checkpoint that cannot be loaded.
    """
    if isinstance(error, CheckpointException):
        cause = next(each for each, _ in error.failures.values())
        return "fails", f"{type(cause).__name__}: {cause}"[:300]
    words = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())[:300]
    if isinstance(error, Difference):
        return "fails", words
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError) and Path(last.filename).resolve() == Path(adapter_file).resolve():
        return "not applicable", words
    frames = traceback.extract_tb(error.__traceback__)
    early = any(frame.name in EARLY and frame.filename == adapter_file for frame in frames)
    kinds = (ast.Raise, ast.Assert) if early else ast.Raise
    deliberate = words and not isinstance(error, CRASHES) and raised_by(kinds, last.filename, last.lineno or 0)
    deliberate = deliberate or type(error).__name__ == "ValidationError"  # pydantic's, which compiled code raises
    return ("refused" if deliberate else "fails"), f"{type(error).__name__}: {words}"


def raised_by(kinds: type[ast.stmt] | tuple[type[ast.stmt], ...], file: str, line: int) -> bool:
    """Return whether a line of a Python file is part of such a statement."""
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or line):
                return True
    return False


if __name__ == "__main__":
    gc.freeze()  # no collection in a rank copies what was imported
    serve()
