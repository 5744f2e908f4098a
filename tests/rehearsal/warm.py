"""Rehearsals without their imports: a process that has imported PyTorch, data sets and the study, and forks each.

A rehearsal of a tiny script is almost all imports. What a patch waits for (Accelerate, transformers, PEFT, TRL,
DeepSpeed) is imported by the forked process, as by a fresh one. `test_launchers.py` has fresh processes.
"""

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def server() -> subprocess.Popen:
    """This worker's process. It ends with the worker, whose end of the pipe is closed then."""
    alone = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # no thread may be forked
    alone["TORCHDYNAMO_DISABLE"] = "1"  # which a rehearsal sets, and PyTorch reads once
    alone["HF_HUB_OFFLINE"] = "1"  # the hub's library reads it once; a name that it lacks is asked for 50 s
    words = [sys.executable, "-m", "tests.rehearsal.warm"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(words, cwd=ROOT, env=os.environ | alone, text=True, **pipes)


def study(*words: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run `study` with these words in a folder, and return what it printed and how it ended."""
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        request = {"words": list(map(str, words)), "out": out.name, "err": err.name, "environment": dict(os.environ)}
        request["folder"] = str(folder)
        process = server()
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def forked(function, environment: dict[str, str], out: str, err: str) -> int:
    """Call a function in a forked process, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.clear()
    os.environ |= environment
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_APPEND), 2)
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    import datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    from study.cli import commands, rehearsal  # noqa: F401
    from study.rehearsal import run, start

    def apart(folder: Path, log: Path, environment: dict[str, str], timeout_s: int) -> int | None:
        pid = forked(functools.partial(run.main, folder.resolve()), environment, str(log), str(log))
        ends = time.monotonic() + timeout_s
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    start.run_apart = apart
    gc.freeze()  # a rehearsal looks at all objects
    for line in sys.stdin:
        request = json.loads(line)
        sys.argv = ["study", *request["words"]]
        os.chdir(request["folder"])
        pid = forked(commands.main, request["environment"], request["out"], request["err"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(f"{code}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
