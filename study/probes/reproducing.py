"""Answers trials as `worker` does, and reproductions as well, with one import of the libraries.

python -m study.probes.reproducing < trials.json

Each reproduction runs in a fork of this process, in a folder of its own.
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from study.probes import worker
from study.probes.answers import REPRODUCTION, last_answer, scripts
from study.records.privacy import redact

ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # a fork may have no threads
LIMIT_S = 20  # of processor time, for each process of a reproduction
PATIENCE = 6  # a busy machine takes so many times longer


def main() -> None:
    """Answer every trial. What the libraries print goes to stderr."""
    os.environ |= ALONE
    trials = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        with contextlib.suppress(Exception):  # then each reproduction says why
            import accelerate  # noqa: F401
            import deepspeed  # noqa: F401
            import torch._dynamo  # noqa: F401  each fork would import it with its first optimizer
        answers = [answer(trial) for trial in trials]
    sys.stdout.write(json.dumps(answers) + "\n")


def answer(trial: dict) -> dict:
    return reproduced(trial["name"]) if trial["what"] == REPRODUCTION else worker.answer(trial)


def reproduced(name: str) -> dict:
    """Return the answer of a reproduction: the last line that is JSON, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if process == 0:
            _run(scripts()[name], folder)
        code = _wait(process)
        printed, errors = (Path(folder, each).read_text(errors="replace") for each in ("stdout", "stderr"))
    printed_answer = last_answer(printed) if code == 0 else None
    if printed_answer:
        return {"found": printed_answer.found, "told": printed_answer.told}
    return {"error": _reason(code, errors)}


def _reason(code: int, errors: str) -> str:
    """Return why a script gave no answer, from its exit code and what it wrote to stderr."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it took longer than {LIMIT_S} s"
    lines = [line.strip() for line in errors.splitlines() if line[:1].isalpha()]
    return redact(lines[-1])[:200] if lines and code else "it printed no answer"


def _run(script: Path, folder: str) -> None:
    """Run a script as the main program of this process, and end the process."""
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [str(script)]
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
    code = 0
    with (
        os.fdopen(1, "w") as printed,
        os.fdopen(2, "w") as errors,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException as error:
            traceback.print_exc()
            code = 0 if isinstance(error, SystemExit) and not error.code else 1
    os._exit(code)


def _wait(process: int) -> int:
    """Return the exit code of a process, and end what it started."""
    until = time.monotonic() + PATIENCE * LIMIT_S
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    main()
