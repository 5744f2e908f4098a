"""Starts launches quickly: one process imports the libraries once and forks the ranks of each launch from it.

Almost all of a tiny launch is imports. What `accelerate launch` does between its command line and the ranks is done by
Accelerate's own functions here as well: they parse the flags, read the config file and make the ranks' environment.
What torchrun does (a number for each rank, ending all when one fails) is written out. `test_machines.py` holds a forked
launch to a real one.

All workers of a session share this process. It accepts connections to the socket that it is given, each with one
request as JSON, and answers with an exit code and how many processes the launch left running. Each request has four
processes in a row: this one, `handle`, `launch` in the place of Accelerate's launcher, and the ranks.
"""

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# No thread may exist when a process is forked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator
sys.path.insert(0, str(ROOT))

import cpuinfo
import deepspeed.module_inject.auto_ep_layer  # what its engine imports when it is made, and Accelerate for Ulysses
import deepspeed.runtime.sequence_parallel.ulysses_sp
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
import study.training.evaluation
import study.watch.callback  # noqa: F401
from study.core import machine, operators
from study.core.operators import OPERATORS, compiled, why_not_operator
from study.core.settings import TrainerFlags

RANK_S = 400  # then a rank prints where it is, and ends
REQUEST_BYTES = 2**20
CORES = len(os.sched_getaffinity(0))


def handle(connection: socket.socket) -> None:
    """Answer one request."""
    request = json.loads(connection.recv(REQUEST_BYTES))
    launcher = os.fork()
    if launcher == 0:
        os.setsid()  # whatever a launch starts can be found by its session
        end_with(launch, **request)
    _, status = os.waitpid(launcher, 0)
    left = 0
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == launcher:
                os.kill(pid, signal.SIGKILL)
                left += 1
    connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status), "left": left}).encode())


def launch(config: str | None, launcher: list[str], script: str, flags: list[str], env: dict, output: str) -> None:
    """Like `accelerate launch`, start the ranks, wait for them, and end them together."""
    os.environ.clear()
    os.environ |= env
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if config is None:  # without a launcher
        return wait([fork(script, flags, {})])
    args, defaults, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", config, *launcher, script, *flags])
    )
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []  # as launch_command does
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        env = prepare_deepspeed_cmd_env(args)[1]
    elif args.multi_gpu or args.use_fsdp:
        env = prepare_multi_gpu_env(args)
    else:
        env = prepare_simple_launcher_cmd_env(args)[1]
    os.environ |= {name: value for name, value in env.items() if value is not None}
    # The ranks would look for the command line of a launcher above them.
    explicit = dict(zip(launcher[::2], launcher[1::2], strict=True)).get("--num_processes")
    above = psutil.Process(), argparse.Namespace(config_file=config, num_processes=explicit)
    machine.find_launcher = lambda: above
    if not (args.use_deepspeed or args.multi_gpu or args.use_fsdp):
        return wait([fork(script, flags, {})])
    ranks = CORES if str(args.num_processes) == "auto" else int(args.num_processes)
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    # A port below those that the kernel gives to connections, and another one for each launch.
    port = 20_000 + os.getpid() % 12_000
    group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return wait([fork(script, flags, group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)])


def fork(script: str, flags: list[str], env: dict) -> int:
    """Start a rank, and return its process id."""
    pid = os.fork()
    if pid == 0:
        os.environ |= {name: str(value) for name, value in env.items()}
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # PYTHONUNBUFFERED mixes two ranks' words
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", CORES)))
        faulthandler.dump_traceback_later(RANK_S, exit=True)
        sys.argv = [str(ROOT / script), *flags]
        end_with(runpy.run_path, sys.argv[0], run_name="__main__")
    return pid


def wait(ranks: list[int]) -> None:
    """As under torchrun, one rank that fails ends the others."""
    code = 0
    while ranks:
        # torchrun looks every 0.1 s. Until then a rank that has ended is a zombie, and the others can see how it ended.
        # On a busy machine they need longer: here they have a second, or until they have ended as well.
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status
        until_s = time.monotonic() + 1
        while status and not code and time.monotonic() < until_s and any(map(machine.is_alive, ranks)):
            time.sleep(0.01)
        os.waitpid(pid, 0)
        ranks.remove(pid)
        if status and not code:
            code = 1
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
            # As torchrun does: a rank that waits for the dead one in C++ handles no signal.
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(rank, signal.SIGKILL) for rank in ranks])
            signal.alarm(30)
    sys.exit(code)


def end_with(function, *arguments, **options) -> None:
    """Call a function and end this process as Python would, without the time that it takes to free all imports."""
    code = 1
    try:
        function(*arguments, **options)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    descriptor, session = map(int, sys.argv[1:])
    os.chdir(ROOT)
    # Also once, and not in every rank: DeepSpeed asks the CPU what it can do for seconds each time, here and where an
    # optimizer is in host memory. The ranks look at a folder of compiled operators that a test names.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    operators.load([name for name in OPERATORS if compiled(name) and not why_not_operator(name, 0)], 0, print)
    tyro.cli(TrainerFlags, args=[])  # imports what it needs for it
    get_checkpoint_conversion_mapping("bert")  # the first call compiles a thousand regular expressions
    gc.freeze()  # so that no rank's collections look at all that was imported, and copy it
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(1)
    while machine.is_alive(session):  # a zombie is not: its parent may read to the end before it waits
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()  # or a test could connect to a server that is gone, and wait
                end_with(handle, connection)
            connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    Path("/proc/self/fd/2").readlink().unlink(missing_ok=True)
