"""Starts launches quickly: one process imports the libraries once and forks the ranks of each launch from it.

Almost all of a tiny launch is imports. What `accelerate launch` does between its command line and the ranks is done by
Accelerate's own functions here as well: they parse the flags, read the config file and make the ranks' environment.
What torchrun does (a number for each rank, ending all when one fails) is written out. `test_launch.py` holds a forked
launch to a real one. All workers of a session share this process: it accepts connections to the socket that it is
given, each with a request as a line of JSON, and answers with an exit code and how many processes the launch left
running. It ends with the session.
"""

import atexit
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import runpy
import signal
import socket
import socketserver
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# No thread may exist when a process is forked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(ROOT))
ARGUMENTS = sys.argv[1:]
sys.argv = [str(ROOT / "study" / "train.py")]

import deepspeed.runtime.zero.stage3  # noqa: F401  all of these here, once, and not in every rank
import psutil
import torch
import torch._inductor.compile_fx  # of DeepSpeed's engine, where our trainer has not turned that off
import tyro
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

import study.train
import study.watch.callback
from reproductions import as_printed
from study.core import machine
from study.core.doctor import OPERATORS, compiled, why_not_operator
from study.core.settings import Flags
from study.training import loading, main
from study.training.launch import Launch

RANK_S, LAUNCH_S = 400, 480  # then a rank prints where it is and ends; then all of a launch is killed
CORES = len(os.sched_getaffinity(0))
# Also once, and not in every rank: DeepSpeed asks the CPU what it can do for seconds each time. A folder of compiled
# operators that a test names is looked at in the ranks.
loading.load([name for name in OPERATORS if compiled(name) and not why_not_operator(name, 0)], 0, print)
tyro.cli(Flags, args=[])  # imports what it needs for it
get_checkpoint_conversion_mapping("bert")  # the first call compiles a thousand regular expressions


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Handles each request in a process of its own, and ends with the session that it serves."""

    max_children = 100  # the workers of a session are fewer

    def __init__(self, listener: socket.socket, session: int):
        super().__init__(listener.getsockname(), Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.session = listener, psutil.Process(session)

    def service_actions(self) -> None:
        super().service_actions()
        if not self.session.is_running():
            raise SystemExit


class Request(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.server.socket.close()  # or a test could connect to a server that is gone, and wait
        request = json.loads(self.rfile.readline())
        pid = os.fork()
        if pid == 0:
            os.setsid()  # whatever a launch starts can be found by its session
            _end_with(launch, request)
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
        signal.alarm(LAUNCH_S)
        _, status = os.waitpid(pid, 0)
        signal.alarm(0)
        left = [process.pid for process in psutil.process_iter() if _session(process.pid) == pid]
        for process in left:
            os.kill(process, signal.SIGKILL)
        answer = {"code": os.waitstatus_to_exitcode(status), "left": len(left)}
        self.wfile.write((json.dumps(answer) + "\n").encode())


def launch(request: dict) -> int:
    """One launch: like `accelerate launch`, it waits for its ranks and ends them together. Gives the exit code."""
    os.environ.clear()
    os.environ |= request["env"]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if request["config"] is None:  # without a launcher
        return _wait([_fork(request, None, {})])
    words = ["--config_file", request["config"], *request["launcher"], request["script"], *request["flags"]]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []  # as launch_command does
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        env = prepare_deepspeed_cmd_env(args)[1]
    elif args.multi_gpu or args.use_fsdp:
        env = prepare_multi_gpu_env(args)
    else:
        env = prepare_simple_launcher_cmd_env(args)[1]
    os.environ |= {name: value for name, value in env.items() if value is not None}
    explicit = dict(zip(request["launcher"][::2], request["launcher"][1::2], strict=True)).get("--num_processes")
    origin = Launch(os.getpid(), time.time(), request["config"], explicit and int(explicit))
    if not (args.use_deepspeed or args.multi_gpu or args.use_fsdp):
        return _wait([_fork(request, origin, {})])
    ranks = CORES if str(args.num_processes) == "auto" else int(args.num_processes)
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    if ranks > 1:
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", 1)  # as torchrun does
    return _wait([_fork(request, origin, common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)])


def _fork(request: dict, origin: Launch | None, env: dict) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ |= {name: str(value) for name, value in env.items()}
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # PYTHONUNBUFFERED mixes two ranks' words
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", CORES)))
        faulthandler.dump_traceback_later(RANK_S, exit=True)
        sys.argv = [str(ROOT / request["script"]), *request["flags"]]
        if request["script"] == "study/train.py":
            _end_with(main.main, study.train.train, origin)
        if request["script"] != "reproductions/as_printed.py":  # any other program
            machine.launcher_config = lambda: Path(request["config"])
            _end_with(_run, request["script"])
        as_printed.find_launch = lambda: origin
        _end_with(tyro.cli, as_printed.main)
    return pid


def _run(script: str) -> None:
    """A script as Python runs it, with what it does when it ends."""
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except BaseException as error:
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()


def _end_with(function, *arguments) -> None:
    """End this process as Python would: with the function's exit code, or 1 and a traceback."""
    code = 1
    try:
        code = function(*arguments) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(ranks: list[int]) -> int:
    """As under torchrun, one rank that fails ends the others."""
    code = 0
    signal.signal(signal.SIGALRM, lambda *_: _signal(ranks, signal.SIGKILL))
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = 1
            time.sleep(0.1)
            _signal(ranks, signal.SIGTERM)
            signal.alarm(30)  # as torchrun does: a rank that waits for the dead one in C++ handles no signal
    return code


def _signal(ranks: list[int], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _free_port() -> int:
    """Return a port below those that the kernel gives to connections. By process, as another launch looks as well."""
    for port in itertools.count(20_000 + os.getpid() % 12_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


if __name__ == "__main__":
    gc.freeze()  # so that no rank's collections look at all that was imported, and copy it
    os.chdir(ROOT)
    descriptor, session = map(int, ARGUMENTS)
    if psutil.pid_exists(session):  # a short session is over before all that is imported
        Server(socket.socket(fileno=descriptor), session).serve_forever()
