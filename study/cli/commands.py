"""The list of commands, and how one is started. A command's module is imported only when it is called: `study` is fast.

Benchmarks, which need torch, and the offline package run as processes of their own. What a command returns is printed
as JSON, and with --json nothing else is on stdout: libraries print there while they are imported.
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

from study.errors import Stop, exit_on_stop
from study.machine.software import version
from study.spec.arms import PACKAGE
from study.spec.validation import nearest
from study.text.tables import say

# Name: the function that is called, or the module that is run as a program; and what it is for.
COMMANDS = {
    "arms": ("study.cli.machine:arms", "the ways to distribute a training, and which of them can run here"),
    "doctor": ("study.cli.machine:doctor", "what this machine has and lacks, and what to do about it"),
    "operators": ("study.cli.machine:operators", "compile DeepSpeed's operators that are missing"),
    "advise": ("study.cli.predictions:advise", "which arm to use on your GPUs and how, or how many are needed"),
    "estimate": ("study.cli.predictions:estimate", "what one rank will hold and move"),
    "timeline": ("study.cli.steps:timeline", "how long a step will take, and what overlaps with what"),
    "virtual": ("study.cli.predictions:virtual", "the same, measured on one rank of N, without the others"),
    "sweep": ("study.cli.experiments:sweep", "run a declared experiment; start it again to go on"),
    "cluster": ("study.cli.cluster:cluster", "emulate a small cluster here, with links of a declared bandwidth"),
    "runs": ("study.cli.experiments:runs", "the runs below a folder, as a table"),
    "compare": ("study.cli.experiments:compare", "time and memory of equal cells, in one folder or in several"),
    "explain": ("study.cli.experiments:explain", "why two runs differ in memory"),
    "diagnose": ("study.cli.diagnosis:diagnose", "what is wrong or costly in a run, and which rank waits for whom"),
    "diff": ("study.cli.differences:diff", "why two configs or runs differ in losses or memory"),
    "claims": ("study.cli.results:claims", "what was published, and whether it holds"),
    "outside": ("study.cli.outside:outside", "what others measured, and how far our predictions are from it"),
    "report": ("study.cli.results:report", "verdicts, figures and runs as pages to open in a browser"),
    "keep": ("study.cli.keep:main", "copy records into a machine's folder below reports/, sealed"),
    "bench": ("study.bench.bench", "this trainer against a bare loop and the Hugging Face Trainer"),
    "peaks": ("study.bench.peaks", "what this machine really gives: matrix products, copies, disk"),
    "scoreboard": ("study.bench.scoreboard:main", "who predicts memory best, against measured peaks"),
    "pack": ("study.offline.pack", "collect what a GPU machine without a network lacks"),
    "offline": ("study.offline.run", "run on such a machine, and bring the results back"),
}
EXAMPLES = """\
  study advise --model gpt2-xl --gpus 8 --gpu H100
  study sweep smoke --runs runs/smoke
  study claims S000-13 --runs runs/smoke"""


def main() -> None:
    """The console script. A user's mistake is one sentence on stderr and exit code 2."""
    # The environment's own programs (ninja, for one) are found whether it was activated or not.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 lacks our quotation marks
    with exit_on_stop():
        try:
            start(sys.argv[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # as in `study arms | head -3`
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def start(words: list[str]) -> None:
    """Start the command that the first word names."""
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help"):
        return start([rest[0], "--help"]) if rest and rest[0] in COMMANDS else say(*help_lines())
    if name == "--version":
        return say(f"zero-study {version('zero-study') or '(not installed)'}")
    if name not in COMMANDS:
        raise Stop(f"there is no command {name}", nearest(name, COMMANDS))
    module, _, function = COMMANDS[name][0].partition(":")
    if not function:
        sys.stdout.flush()
        # The program finds this very package: also in a checkout that is not installed, and (-P) whatever is in the
        # current folder.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
    from study.spec.options import parsed

    alone = contextlib.redirect_stdout(sys.stderr) if "--json" in rest else contextlib.nullcontext()
    with alone:
        command = getattr(importlib.import_module(module), function)
        answer = parsed(command, prog=f"study {name}", args=rest)
    if answer is not None:
        say(json.dumps(answer, indent=1, default=str))
    if isinstance(answer, dict) and answer.get("fine") is False:
        sys.exit(1)


def help_lines() -> list[str]:
    about = "A replication study of DeepSpeed ZeRO that anyone can run."
    commands = [f"  {name:<11} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    more = "`study COMMAND --help` explains a command. Examples:"
    return ["usage: study COMMAND ...", "", about, "", *commands, "", more, "", EXAMPLES]
