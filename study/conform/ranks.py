"""Runs properties on gloo ranks: one process imports the libraries once, and forks the ranks of each property.

It reads a request as a line of JSON, and answers with a line. A property that crashes or hangs ends only its own ranks.
An adapter is code, and is run with the rights of the user.
"""

import ast
import contextlib
import datetime
import functools
import gc
import importlib.util
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
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
from study.conform.cases import Case, Difference, ShardedTraining
from study.conform.suite import LIBRARIES, PROPERTIES
from study.core.linux import free_port

GRACE_S = 2  # for the other ranks, once one has failed
REQUIRED = ("build", "forward_backward", "step", "whole_weights")  # of an adapter
FUNCTIONS = (*REQUIRED, "gradient_norm", "save", "load", "schedule")
EARLY = ("build", "save", "load")
CRASHES = (AttributeError, TypeError, KeyError, IndexError, NameError, ZeroDivisionError, UnboundLocalError)


def serve() -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(_imported(request["adapter"]), request)
        except ImportError as error:
            answer = {"stop": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


@functools.cache
def _imported(path: str) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ImportError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error
    if lacking := [name for name in REQUIRED if not hasattr(module, name)]:
        raise ImportError(f"{path} defines no {', '.join(lacking)}")
    return module


def _answer(module: ModuleType, request: dict) -> dict:
    if "script" in request:
        return _answer_of_script(request)
    if "property" not in request:
        return {name: getattr(sys.modules.get(name), "__version__", None) for name in LIBRARIES}
    lacking = [name for name in PROPERTIES[request["property"]].functions if not hasattr(module, name)]
    if lacking:
        return {"status": "not applicable", "words": f"the adapter has no {lacking[0]}"}
    started = time.monotonic()
    answer = {"status": "holds", "words": ""}
    for number, ranks in enumerate(request["ranks"]):
        answer = _launch(module, request, number, ranks)
        if answer["status"] != "holds":
            break
    return answer | {"seconds": round(time.monotonic() - started, 2)}


def _launch(module: ModuleType, request: dict, number: int, ranks: int) -> dict:
    """Fork the ranks of one launch, and wait for them. One that fails ends the others."""
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    paths = {}
    for rank in range(ranks):
        variables = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        path = Path(request["folder"], f"{number}-{rank}.json")
        paths[_forked(functools.partial(_rank, module, request, number, path), path, variables)] = path
    codes, late = _wait(list(paths), request["limit_s"])
    outcomes = [_outcome(path, codes[process]) for process, path in paths.items()]
    bad = sorted((each for each in outcomes if each["status"] != "holds"), key=lambda each: each["time"])
    if late and (not bad or bad[0]["time"] == float("inf")):
        return {"status": "fails", "words": f"hangs: not done after {request['limit_s']} s", "kind": "hangs"}
    return bad[0] if bad else {"status": "holds", "words": ""}


def _answer_of_script(request: dict) -> dict:
    """Run a script in a fork, and return the last line that it prints as JSON; or why there is none."""
    path = Path(request["folder"], "script.json")
    process = _forked(functools.partial(_run, request["script"], path.parent), path, {})
    codes, late = _wait([process], request["limit_s"])
    lines = _log(path)
    for line in reversed(lines if codes[process] == 0 else []):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return {"found": json.loads(line)["found"]}
    words = [line.strip()[:200] for line in lines if line[:1].isalpha() and codes[process]]
    return {"error": f"it took longer than {request['limit_s']} s" if late else (words or ["it printed no answer"])[-1]}


def _run(script: str, folder: Path) -> int:
    os.chdir(folder)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    return 0


def _forked(function: Callable[[], int], path: Path, variables: dict[str, str]) -> int:
    """Run a function in a fork, which ends with the exit code that it returns, and writes into a log."""
    if process := os.fork():
        return process
    os.setsid()
    os.environ |= variables
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        code = function()
    except BaseException as error:
        code = int(not isinstance(error, SystemExit) or error.code not in (None, 0))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(running: list[int], limit_s: float) -> tuple[dict[int, int], bool]:
    """Return the exit code of each process, and whether they had to be killed at the limit, with what they started."""
    codes: dict[int, int] = {}
    late, until = False, time.monotonic() + limit_s
    while len(codes) < len(running):
        for process in set(running) - set(codes):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
                until = min(until, time.monotonic() + GRACE_S) if codes[process] else until
        if len(codes) < len(running) and time.monotonic() > until:
            late, until = not any(codes.values()), float("inf")
            for process in set(running) - set(codes):
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.005)
    return codes, late


def _log(path: Path) -> list[str]:
    return path.with_suffix(".log").read_text(errors="replace").splitlines()


def _outcome(path: Path, code: int) -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    if code == -signal.SIGKILL:  # by us, after another rank had failed or at the limit
        return {"status": "fails", "words": "", "kind": "killed", "time": float("inf")}
    last = " ".join(" ".join(_log(path)[-1:]).split())[:300]
    return {"status": "fails", "words": f"a rank ended with exit code {code}: {last}", "kind": str(code), "time": 0.0}


def _rank(module: ModuleType, request: dict, number: int, path: Path) -> int:
    """Run the check on this rank, and write the outcome."""
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    adapter = SimpleNamespace(**functions, settings=request["settings"])
    chosen = PROPERTIES[request["property"]]
    outcome: dict[str, object] = {"status": "holds", "words": ""}
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * request["limit_s"]))
        build = functools.partial(ShardedTraining, adapter, path.parent)
        getattr(checks, chosen.check)(build, case_of(chosen.case | request["case"]), number)
        dist.barrier()
    except (Exception, CheckpointException) as error:  # the second is no Exception
        traceback.print_exc()
        status, words = explain(error, str(module.__file__))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {Path(frame.filename).name}, {frame.lineno}"
        outcome = {"status": status, "words": words, "kind": "differs" if isinstance(error, Difference) else kind}
    path.write_text(json.dumps(outcome | {"time": time.time()}))
    return int(outcome["status"] != "holds")


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
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if Path(frame.filename).resolve() == Path(adapter_file).resolve()]
    if isinstance(error, NotImplementedError) and frames[-1] in mine:
        return "not applicable", words
    early = any(frame.name in EARLY for frame in mine)
    kinds = (ast.Raise, ast.Assert) if early else (ast.Raise,)
    on_purpose = raised_by(kinds, frames[-1].filename, frames[-1].lineno or 0)
    on_purpose = on_purpose and bool(words) and not isinstance(error, CRASHES)
    pydantic = type(error).__name__ == "ValidationError"  # compiled code raises it
    return ("refused" if on_purpose or pydantic else "fails"), f"{type(error).__name__}: {words}"


def raised_by(kinds: tuple[type[ast.stmt], ...], file: str, line: int) -> bool:
    """Return whether a line of a Python file is part of such a statement."""
    with contextlib.suppress(OSError, SyntaxError):
        statements = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, kinds)]
        return any(node.lineno <= line <= (node.end_lineno or line) for node in statements)
    return False


if __name__ == "__main__":
    gc.freeze()  # no collection in a rank copies what was imported
    serve()
