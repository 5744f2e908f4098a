"""Rehearsals without their imports: a process that has imported PyTorch, data sets and the study, and forks each.

A rehearsal of a tiny script is almost all imports. What a patch waits for (Accelerate, models and trainers of
transformers, PEFT, TRL, DeepSpeed) is imported by the forked process, as by a fresh one. `test_launchers.py` has fresh
processes. All workers of a session share this process, as they share forkserver.py.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# No thread may be forked. PyTorch and the hub's library read their variables once: a rehearsal turns compiling off, and
# a name that the hub lacks is asked for 50 s.
ALONE = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


def study(*words: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run `study` with these words in a folder, and return what it printed and how it ended."""
    from tests.conftest import fork_server  # not where the process is: it needs nothing of pytest

    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        request = {"words": list(map(str, words)), "out": out.name, "err": err.name, "environment": dict(os.environ)}
        request["folder"] = str(folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(600)  # longer than a rehearsal may take
            server.connect(fork_server("tests/rehearsal/warm.py"))
            server.send(json.dumps(request).encode())
            code = int(server.recv(100))
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


def main(descriptor: int, session: int, data_sets: str) -> None:
    os.environ |= ALONE | {"HF_DATASETS_CACHE": data_sets}
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    import datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.elastic.agent.server.api
    import torch.distributed.fsdp  # noqa: F401
    import transformers

    # Its utils keep what each of its files has, which takes a second to read. A script imports the rest, or does not.
    models = Path(transformers.__file__).parent / "models/__init__.py"
    transformers.utils.import_utils.define_import_structure(str(models))  # as transformers.models asks for them
    del transformers, sys.modules["transformers"]
    for name in ("jinja2.sandbox", "PIL.Image", "psutil", "regex", "tokenizers"):  # which it imports with any model
        importlib.import_module(name)

    # What each answer reads and imports.
    import rich.table  # noqa: F401
    import typeguard  # noqa: F401

    from study.cli import commands, rehearsal  # noqa: F401
    from study.configs.pasted import tracebacks
    from study.core import machine
    from study.known import faults
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
    faults.table()
    tracebacks.messages()
    gc.freeze()  # a rehearsal looks at all objects
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(1)
    while machine.is_alive(session):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection, commands.main)
            connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    Path("/proc/self/fd/2").readlink().unlink(missing_ok=True)


def answer(connection: socket.socket, command) -> None:
    """Run a request's command in a process of its own, send how it ended, and end."""
    request = json.loads(connection.recv(2**20))
    sys.argv = ["study", *request["words"]]
    os.chdir(request["folder"])
    pid = forked(command, request["environment"], request["out"], request["err"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(code).encode())
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data_sets:  # those of tests are not kept among the user's
        main(*map(int, sys.argv[1:]), data_sets)
