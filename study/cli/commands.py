"""The list of commands, and how a command is started. Its module is imported only then, which keeps `study` fast."""

import atexit
import contextlib
import errno
import gc
import importlib
import io
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator

from study.core.errors import FULL_INSTALL, BadOption, Stop, exit_on_stop, nearest
from study.core.machine import put_programs_on_path, version
from study.core.text import say, say_aside, say_wrapped

# By heading and name: the module with the function of this name, and the line of help. The lines are not taken from the
# docstrings, because that would import every module: `study` alone would take seconds instead of a tenth of one.
GROUPS = {
    "Run the study": {
        "arms": ("study.cli.machine", "list the ways to distribute a training (arms), and which can run here"),
        "doctor": ("study.cli.machine", "what this machine has, what is missing, and what to do"),
        "calibrate": ("study.cli.calibrate", "time a few steps here, so that predictions know this machine"),
        "sweep": ("study.cli.experiments", "run an experiment (a protocol); run it again to continue"),
        "hour": ("study.cli.hour", "spend an hour of a machine with GPUs on what nobody could decide without it"),
        "runs": ("study.cli.results", "list the runs below folders, or keep their records"),
        "compare": ("study.cli.results", "compare time and memory of equal cells, or two runs component by component"),
        "report": ("study.cli.results", "write verdicts, figures and runs as web pages"),
    },
    "Choose and predict": {
        "advise": ("study.cli.advise", "which arm to use on your GPUs, or how many GPUs you need"),
        "estimate": ("study.cli.estimate", "predict memory, traffic and time: does it fit?"),
        "virtual": ("study.cli.virtual", "run rank 0 of N alone: your train.py as it is, or a model"),
        "claims": ("study.cli.claims", "published claims, and whether they hold"),
    },
    "Find what is wrong": {
        "diagnose": ("study.cli.diagnosis", "what a log, an error or any text means; what is wrong in a run"),
        "oom": ("study.cli.oom", "what an error about memory means, and which change would fit"),
        "diff": ("study.cli.differences", "why two configs or runs differ in losses or memory"),
        "stack": ("study.cli.stack", "which known faults of libraries apply to your releases and your config"),
        "explain": ("study.cli.explain", "what is behind a sentence: its rule, what it rests on, its test"),
        "conform": ("study.conform.command", "is a sharded training equal to one process? for any library"),
    },
}
OF_IDS = ("explain", "claims", "stack")  # `diagnose` says it below its answer
SAME = {"--ranks": "--gpus"}  # two names of an option
LISTS = ("--runs", "--only")  # options with one value or several
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def main() -> None:
    """The console script. A user's mistake is one sentence on stderr and exit code 2."""
    # Searching for garbage among many small objects takes a third of the time of `advise`, half of it at the end.
    gc.set_threshold(100_000, 50, 50)
    atexit.register(gc.freeze)
    put_programs_on_path()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 lacks our quotation marks. What cannot be written is known at its line.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    # A Stop may come from any depth: from a misspelt option, a file that is no config, or a launch that failed.
    with exit_on_stop():
        if sys.stdout is None:
            raise Stop("standard output is closed", "leave it open, or send it to a file")
        with naming_the_path():
            start(sys.argv[1:])


@contextlib.contextmanager
def naming_the_path() -> Iterator[None]:
    """Turn an error of the operating system into a sentence about the path that the user gave."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC):  # a closed pipe: as in `study arms | head -3`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes once more when it ends
        elif error.filename is None:
            raise
        else:
            raise Stop(f"{error.filename!r:.300} cannot be used ({error.strerror})", "give another path") from None
        if error.errno == errno.ENOSPC:
            raise Stop(f"the output cannot be written ({error.strerror})", "make room on its disk") from None


def start(words: list[str]) -> None:
    """Call the command that the first word names with the other words."""
    name, *options = words or ["--help"]
    if name in ("-h", "--help", "help"):
        return start([*options, "--help"]) if options else say_wrapped(*help_lines(), indent=" " * 14)
    if name in ("--version", "version"):
        return say_version()
    if name not in COMMANDS:
        raise Stop(f"there is no command {name}", meant_by(name))
    try:
        answer = _answer(name, options)
    except ModuleNotFoundError as error:
        raise without_package(error) from None
    except Stop as stop:
        raise with_who_answers(stop, name, options) from None
    # `study doctor` has to answer before it ends with its exit code, and `study arms` for each arm.
    # Of None nobody knows whether it is fine: the question is not answered.
    rows = answer if isinstance(answer, list) else [answer]
    fine = [row.get("fine", True) for row in rows if isinstance(row, dict)]
    if False in fine or None in fine:
        sys.exit(1 if False in fine else 2)


def say_version() -> None:
    from study.records.store import commit_of_this_tree  # it runs git

    commit, _ = commit_of_this_tree()
    say(f"zero-study {version('zero-study') or '(not installed)'}, commit {commit or 'unknown'}")


def meant_by(name: str) -> str:
    """Return what to do about a first word that is no command."""
    if name.startswith("-"):  # its dashes would make it like any option
        return nearest(name.strip("-"), ["help", "version"], otherwise=f"write {name} after the command")
    return nearest(name, COMMANDS)


def without_package(error: ModuleNotFoundError) -> Exception:
    """Return the sentence for a package that is missing: it may also be an error of this study."""
    package = str(error.name).partition(".")[0]  # the subclass PackageNotFoundError asks for a version
    if package == "study":
        return error
    return Stop(f"this needs {package}, which the light install does not have", FULL_INSTALL)


def with_who_answers(stop: Stop, name: str, options: list[str]) -> Stop:
    """Return a refusal with the command that answers an id, where the one that was typed cannot."""
    if name not in OF_IDS or isinstance(stop, BadOption):
        return stop
    from study.cli.ids import answering  # it reads all that has an id

    remedy = answering([word for word in options if not word.startswith("-")])
    return Stop(stop.what, remedy) if remedy else stop


def _answer(name: str, options: list[str]) -> object:
    """Call a command, which prints its answer in words. With --json, print what it returns instead."""
    import tyro  # takes longer to import than all that this module needs

    from study.core.options import parsed

    say_repeated(options)
    refuse_misread(name, options)
    as_json = "--json" in options
    # Some libraries print while they are imported, too: DeepSpeed its accelerator.
    with contextlib.redirect_stdout(io.StringIO() if as_json else sys.stdout):
        module, function, options = chosen(name, options)
        command = getattr(importlib.import_module(module), function)
        if as_json and command.__annotations__["return"]:  # the others have no such option
            options = [word for word in options if word != "--json"]
        # An option in a dataclass has the name of its field alone: --gpu, and not --place.gpu.
        answer = parsed(command, tyro.conf.OmitArgPrefixes, prog=f"study {name}", args=options)
    say_size_of_gpu(options)
    if as_json:
        say(json.dumps(answer, indent=1, default=str))
    return answer


def chosen(name: str, options: list[str]) -> tuple[str, str, list[str]]:
    """Return the module and the function of a command, and its options in the order that tyro takes."""
    if name == "virtual":
        from study.rehearsal.launchers import script_last  # the browser's Python has no rehearsals

        if (script := script_last(options)) is not None:
            return "study.cli.rehearsal", "rehearse", script
    if name == "stack":
        options = releases_first(options)
    return COMMANDS[name][0], name, options


def refuse_misread(name: str, options: list[str]) -> None:
    """Refuse what tyro would take otherwise than it is meant."""
    # tyro takes a list without a value for an empty one, as if the option were not there.
    for word, following in itertools.pairwise([*options, "--"]):
        if word in LISTS and following.startswith("--"):
            raise Stop(f"{word} must have a value", f"study {name} --help explains the options")
    if name == "sweep" and "--json" in options and "--dry-run" not in options:
        raise Stop("a sweep has no answer as JSON", "give --dry-run as well, or ask `study runs FOLDER --json`")


def say_repeated(options: list[str]) -> None:
    """Say which options are given twice."""
    names = [word.partition("=")[0] for word in options if word.startswith("--")]
    times = Counter(SAME.get(word, word) for word in names)
    for word in sorted(times):
        if times[word] > 1:
            say_aside(f"{word} is given more than once: the last counts")


def say_size_of_gpu(options: list[str]) -> None:
    """Say below an answer which GPU a name was taken as, if it is sold in several sizes and nobody gives one."""
    words = [part for word in itertools.takewhile("--".__ne__, options) for part in word.split("=", 1)]
    if "--gpu" in words and "--gpu-memory" not in words:
        from study.core.gpus import taken

        if said := taken(words[words.index("--gpu") + 1]):
            say_aside(said)


def releases_first(options: list[str]) -> list[str]:
    """Return options with releases and lists in front: tyro takes words before options or behind them, and not both."""
    if not options or options[0].startswith("-"):
        return options
    late: list[str] = []
    others: list[str] = []
    for before, word in itertools.pairwise(["", *options]):
        is_release = "==" in word or os.path.isfile(word)  # noqa: PTH113
        goes_first = is_release and before != "--config" and not word.startswith("-")
        (late if goes_first else others).append(word)
    return [*late, *others]


def help_lines() -> list[str]:
    lines = ["usage: study COMMAND ...", "", "A replication study of DeepSpeed ZeRO that anyone can run."]
    for heading, group in GROUPS.items():
        lines += ["", f"{heading}:", *(f"  {name:<11} {purpose}" for name, (_, purpose) in group.items())]
    return [
        *lines,
        "",
        "`study COMMAND --help` explains a command.",
        "With --json a command that answers gives JSON. Examples:",
        "",
        "  study advise --model gpt2-xl --gpus 8 --gpu H100 --json",
        "  study claims S000-20 --runs runs/smoke",
    ]
