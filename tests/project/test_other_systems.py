"""The light install without what Windows and macOS lack: simulated here, and not run there.

Libraries are imported before, as they have builds of their own for each system.
"""

from tests.conftest import python

TAKEN_AWAY = """
import contextlib, io, os, platform, signal, sys, warnings
import numpy, psutil, pydantic, tyro, yaml
platform.uname()
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "O_DIRECT", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_NOFOLLOW", "getuid", "killpg",
             "getpgid", "setsid", "fork", "preadv", "pwrite", "register_at_fork"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM"):
    delattr(signal, name)
warnings.filterwarnings("error", category=EncodingWarning, module="study")
from study.cli import main
for words in sys.stdin.read().splitlines():
    sys.argv = ["study", *words.split()]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(code, len(out.getvalue()) > 20, words)
"""
ASKED = {
    "stack deepspeed==0.17.6 --stage 2 --passes 4": 1,
    "diagnose failed (exitcode: -4) local_rank: 0": None,
    "oom torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.79 GiB.": None,
    "explain second_bucket": None,
    "estimate --model llama3-8b --arm zero2 --gpus 8": None,
    "advise --model gpt2 --gpus 2 --gpu T4": None,
    "arms": None,
    "claims S000-20": None,
    "sweep smoke --dry-run": None,
}


def test_commands_of_the_light_install_answer_without_what_other_systems_lack():
    """Each file is read as UTF-8, which is not the default of Windows: Python's own warning of that is an error."""
    done = python("-X", "warn_default_encoding", "-c", TAKEN_AWAY, input="\n".join(ASKED))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{code} True {words}" for words, code in ASKED.items()]
