"""The list of commands, and how a command is started. Its module is imported only then, which keeps `study` fast.

If a command returns a value, it is printed as JSON. With --json nothing else goes to stdout, where some libraries print
while they are imported.
"""

import atexit
import contextlib
import errno
import gc
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from study.core.errors import Stop, exit_on_stop, nearest
from study.core.machine import version
from study.core.text import say

# By name: the function to call, and the line of help.
COMMANDS = {
    "arms": ("study.cli.machine:arms", "list the ways to distribute a training (arms), and which can run here"),
    "doctor": ("study.cli.machine:doctor", "what this machine has and lacks, and what to do about it"),
    "advise": ("study.cli.advice:advise", "which arm to use on your GPUs, or how many GPUs you need"),
    "estimate": ("study.cli.predictions:estimate", "predict memory, traffic and time: does it fit?"),
    "virtual": ("study.cli.virtual:virtual", "measure memory and traffic of one rank of N, run alone"),
    "sweep": ("study.cli.experiments:sweep", "run an experiment (a protocol); run it again to continue"),
    "runs": ("study.cli.runs:runs", "list the runs below folders, or keep their records"),
    "compare": ("study.cli.runs:compare", "compare time and memory of equal cells, or two runs component by component"),
    "diagnose": ("study.cli.diagnosis:diagnose", "what is wrong or costly in a run, and why it hangs"),
    "oom": ("study.cli.oom:oom", "what an error about memory means, and which change would fit"),
    "diff": ("study.cli.diagnosis:diff", "why two configs or runs differ in losses or memory"),
    "conform": ("study.conform.command:conform", "is a sharded training equal to one process? for any library"),
    "claims": ("study.cli.results:claims", "published claims, and whether they hold"),
    "report": ("study.cli.results:report", "write verdicts, figures and runs as web pages"),
    "export": ("study.report.export:export", "write records and claims as tables"),
}
EXAMPLES = """\
  study advise --model gpt2-xl --gpus 8 --gpu H100
  study sweep smoke --runs runs/smoke
  study claims S000-20 --runs runs/smoke"""


def main() -> None:
    """The console script. A user's mistake is one sentence on stderr and exit code 2."""
    # Searching for garbage among many small objects takes a third of the time of `advise`, half of it at the end.
    gc.set_threshold(100_000, 50, 50)
    atexit.register(gc.freeze)
    # Programs of this Python environment, such as ninja, are found even if nobody has activated it.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 lacks our quotation marks. What cannot be written is known at its line.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    with exit_on_stop():
        if sys.stdout is None:
            raise Stop("standard output is closed", "direct it to a file, or to /dev/null")
        try:
            start(sys.argv[1:])
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC):  # a closed pipe: as in `study arms | head -3`
                raise
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error.errno == errno.ENOSPC:
                raise Stop(f"the output cannot be written ({error.strerror})", "make room on its disk") from None


def start(words: list[str]) -> None:
    """Start the command that the first word names."""
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help"):
        return start([rest[0], "--help"]) if rest and rest[0] in COMMANDS else say(*help_lines())
    if name == "--version":
        from study.records.store import commit_of_this_tree

        commit, dirty = commit_of_this_tree()
        at = f", commit {commit[:12]}{' changed' if dirty else ''}" if commit else ""
        return say(f"zero-study {version('zero-study') or '(not installed)'}{at}")
    if name == "--completion":  # bash, and zsh after bashcompinit: a command first, then files
        return say(f"complete -o default -W '{' '.join(COMMANDS)}' study")
    if name not in COMMANDS:
        raise Stop(f"there is no command {name}", nearest(name, COMMANDS))
    module, _, function = COMMANDS[name][0].partition(":")
    call(module, function, f"study {name}", rest)


def call(module: str, function: str, program: str, words: list[str]) -> None:
    """Call a command with the words of the command line, and print its answer. `program` is its name in messages."""
    from study.core.options import parsed
    from study.core.text import progress_shown

    stdout = contextlib.redirect_stdout(sys.stderr) if "--json" in words else contextlib.nullcontext()
    with stdout, progress_shown(), _every_package():
        command = getattr(importlib.import_module(module), function)
        answer = parsed(command, prog=program, args=words)
    if answer is not None:
        say(json.dumps(answer, indent=1, default=str))
    if isinstance(answer, dict) and answer.get("fine") is False:
        sys.exit(1)


@contextlib.contextmanager
def _every_package() -> Iterator[None]:
    """Raise Stop for a package that only the extras of the install have, such as torch."""
    try:
        yield
    except ModuleNotFoundError as error:  # its subclass PackageNotFoundError asks for a version
        package = str(error.name).partition(".")[0]
        if package == "study":
            raise
        remedy = "pip install './zero-study[train,report]', or make setup in the checkout"
        raise Stop(f"this needs {package}, which the light install does not have", remedy) from None


def help_lines() -> list[str]:
    about = "A replication study of DeepSpeed ZeRO that anyone can run."
    commands = [f"  {name:<11} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    more = "`study COMMAND --help` explains a command. Examples:"
    return ["usage: study COMMAND ...", "", about, "", *commands, "", more, "", EXAMPLES]
