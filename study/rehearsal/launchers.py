"""Programs that start a script, such as `accelerate launch`: rehearsed is what they would start, on how many ranks.

Needs no torch.
"""

import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from study.core.errors import Stop


@dataclass(frozen=True)
class Group:
    """Ranks of a group. None: nobody says it."""

    ranks: int | None = None
    per_machine: int | None = None

    @classmethod
    def of(cls, ranks: int | None, per_machine: int | None, machines: int | None) -> "Group":
        if ranks is None and per_machine is not None:
            ranks = per_machine * (machines or 1)
        if per_machine is None and ranks is not None and machines is not None:
            per_machine = max(1, ranks // machines)
        return cls(ranks, per_machine)


class Counting(NamedTuple):
    """The options by which a launcher is told how many processes it starts. A dash in a name is an underscore here."""

    ranks: tuple[str, ...] = ()
    per_machine: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


COUNTING = {
    "accelerate": Counting(ranks=("num_processes",), machines=("num_machines",)),
    "torchrun": Counting(per_machine=("nproc_per_node",), machines=("nnodes",)),
    "deepspeed": Counting(per_machine=("num_gpus",), machines=("num_nodes",)),
    "srun": Counting(ranks=("ntasks", "n"), per_machine=("ntasks_per_node",), machines=("nodes", "N")),
    "mpirun": Counting(ranks=("np", "n")),
}
LAUNCHERS = tuple(COUNTING)
STARTERS = {*LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner"}


@dataclass(frozen=True)
class StartedScript:
    """A script as a launcher would start it."""

    script: str
    words: list[str]
    own: list[str]  # Accelerate's own words, without its config
    config_file: str | None
    group: Group = field(default_factory=Group)


@dataclass(frozen=True)
class Option:
    """An option of a launcher."""

    words: list[str]  # it and its value

    @property
    def name(self) -> str:
        """As Accelerate has it: without dashes."""
        return self.words[0].partition("=")[0].lstrip("-").replace("-", "_")

    @property
    def value(self) -> str:
        return self.words[0].partition("=")[2] or next(iter(self.words[1:]), "")


def options_of(words: list[str]) -> list[Option]:
    """Return the options among a launcher's words. What follows one and is none is its value."""
    options: list[Option] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append(Option([word]))
        else:
            options[-1].words.append(word)
    return options


def count_of(options: list[Option], names: tuple[str, ...]) -> int | None:
    """Return the number of the last option with one of these names. None: there is none, or a word such as `auto`."""
    values = [option.value for option in options if option.name in names]
    return count_in(values[-1].rpartition(":")[2]) if values else None  # torchrun takes 1:4, the fewest and the most


def group_of(program: str, options: list[Option]) -> Group:
    """Return what a launcher's options say. DeepSpeed's `--include a:0,1@b:2,3` names each GPU, or machines alone."""
    included = [option.value for option in options if program == "deepspeed" and option.name in ("include", "i")]
    if not included:
        return Group.of(*(count_of(options, names) for names in COUNTING[program]))
    machines = included[-1].split("@")
    gpus = [len(machine.rpartition(":")[2].split(",")) for machine in machines if ":" in machine]
    return Group(sum(gpus), max(gpus)) if len(gpus) == len(machines) else Group()


def group_of_config(config: dict[str, Any]) -> Group:
    """Return what Accelerate's YAML says."""
    ranks, machines = (count_in(str(config.get(key))) for key in ("num_processes", "num_machines"))
    return Group.of(ranks, None, machines)


def count_in(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def launched(program: str, words: list[str]) -> StartedScript:
    """Return what a launcher with these words would start."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    flag = next((place for place, word in enumerate(words[:place]) if word in ("-m", "--module")), None)
    if flag is not None:
        place = flag + 1
    if place is None or place >= len(words):
        remedy = "name the script itself, as in `study virtual train.py`"
        raise Stop(f"no script of {program} is seen in its words ({' '.join(words)!r:.80})", remedy)
    inner = next((place for place, word in enumerate(words[:place]) if word in LAUNCHERS), None)
    if inner is not None:  # such as `srun torchrun`
        return launched(words[inner], words[inner + 1 :])
    refuse_ours(program, words[:place])
    options = options_of([word for word in words[:place] if word not in ("launch", "-m", "--module")])
    configs = [option.value for option in options if option.name == "config_file"]
    others = [word for option in options if option.name != "config_file" for word in option.words]
    script_words = words[place + 1 :]
    if program == "deepspeed":
        script_words = ["--local_rank=0", *script_words]  # which it gives each rank
    return StartedScript(
        words[place],
        script_words,
        own=others if program == "accelerate" else [],
        config_file=configs[-1] if configs else None,
        group=group_of(program, options),
    )


def refuse_ours(program: str, words: list[str]) -> None:
    """Raise Stop if an option of `study virtual` stands among the words of a launcher."""
    for word in words:
        if word.partition("=")[0] in OURS:
            what = f"{word} is an option of study virtual, and no option of {program}"
            raise Stop(what, f"write it before {program}: `study virtual {word} ... {program} ...`")


def misplaced(words: list[str], code: str) -> list[str]:
    """Return the options of `study virtual` among a script's words that its code has neither as options nor fields."""
    names = [word.partition("=")[0] for word in words]
    own = r"(--|^\s*|\.){}\b"
    return [
        name for name in names if name in OURS and not re.search(own.format(name[2:].replace("-", "[-_]")), code, re.M)
    ]


# --- the words of `study virtual`

OURS = (
    *("--ranks", "--gpu", "--gpus-per-node", "--try", "--steps", "--tokens", "--evaluate", "--save", "--real"),
    *("--run-dir", "--json"),
)
SWITCHES = ("--json", "--evaluate", "--save", "--real")  # of `study virtual SCRIPT`, which take no value


def script_last(options: list[str]) -> list[str] | None:
    """Return options with somebody's script and its own words, which follow `--`, at their end. None without one."""
    end = options.index("--") if "--" in options else len(options)
    own, words = options[:end], options[end + 1 :]
    script = place_of_script(own)
    if script is None:
        return None
    if own[script] in LAUNCHERS:  # whose words follow as they are
        return [*own[:script], "--", *options[script:]]
    return [*own[:script], *own[script + 1 :], "--", own[script], *words]


def place_of_script(own: list[str]) -> int | None:
    """Return where a script stands. A program or a module, such as `axolotl.cli.train`, is one as the first word."""
    if own and not own[0].startswith("-"):
        return 0
    for place, (before, word) in enumerate(itertools.pairwise(own), 1):
        takes_value = before.startswith("--") and "=" not in before and before not in SWITCHES
        if (word.endswith(".py") or word in LAUNCHERS) and not takes_value:
            return place
    return None


def refuse_others(event: str, arguments: tuple) -> None:
    """As an audit hook: raise Stop if a script is about to start another training, which nobody would count."""
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        return
    given = arguments[1]
    words = given.split() if isinstance(given, str) else [os.fsdecode(word) for word in given]
    starts_script = "python" in Path(words[0]).name and any(
        word.endswith(".py") and "site-packages" not in word for word in words[1:]
    )
    if starts_script or STARTERS & {Path(word).name for word in words[:4]}:
        raise Stop(
            f"here it starts another program, which is not followed: `{' '.join(words):.200}`",
            "rehearse what it starts, as in `study virtual torchrun train.py` or `study virtual train.py`",
        )
