"""How many ranks a launcher would start, on how many machines: by its words, or Accelerate's YAML. Needs no torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Counting:
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


def group_of_words(program: str, words: Sequence[str]) -> Group:
    """Return what the words of a launcher say, without those of the script."""
    options = COUNTING[program]
    return Group.of(*(number_of(words, names) for names in (options.ranks, options.per_machine, options.machines)))


def number_of(words: Sequence[str], names: tuple[str, ...]) -> int | None:
    """Return the number of the last option with one of these names. None: there is none, or a word such as `auto`."""
    found = None
    for word, following in itertools.pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if not option.startswith("-") or option.lstrip("-").replace("-", "_") not in names:
            continue
        most = (value or following).rpartition(":")[2]  # torchrun takes 1:4, the fewest and the most
        found = count_in(most)
    return found


def group_of_config(config: dict[str, Any]) -> Group:
    """Return what Accelerate's YAML says."""
    ranks, machines = (count_in(str(config.get(key))) for key in ("num_processes", "num_machines"))
    return Group.of(ranks, None, machines)


def count_in(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None
