"""Faults in texts for people that a program makes easily: 1 runs, 1 times, names of our code, cells glued together."""

import re
from collections.abc import Iterator

from study.ledger import checks
from study.ledger.arguments import argument_model
from study.records import metrics

# Before a number that counts nothing, as in "stage 1 holds", and after one, as in "at least 1 is".
NUMBERED = "stage rank training step pass pages page table figure version document part and or than over from to by in"
VERBS = "is as has was does holds takes needs keeps gathers reduces partitions saves sends leaves shards matches gives"
COUNTED = re.compile(r"(\S+) 1 (times|[a-z]+[a-rt-z]s)\b")
# Keys of libraries that are also names of ours, or words that a document leaves open by this name.
THEIRS = {"pin_memory", "all_gather", "reduce_scatter", "all_reduce"}
FUNCTIONS = [function for kind in checks.KINDS.values() for function in kind.functions.values()]
ARGUMENTS = {name for function in FUNCTIONS for name in argument_model(function).model_fields}
OURS = {name for name in ARGUMENTS | metrics.QUANTITIES.keys() | checks.KINDS.keys() if "_" in name} - THEIRS
CODE = re.compile(rf"(?<![\w./`-])(?:{'|'.join(sorted(OURS))}|(?:observed|memory|component)\.\w[\w.]*)(?![\w/`-])")
# A unit that a number follows at once, or the end of a heading at which the next begins: 76GB76GB, MemoryModel.
GLUED = re.compile(r"\d(?:GB|%|params)\S*\d|[a-z](?:Memory|Model Cap|Effective|Relative|Optimal|Steps/)|\D\d,\d{6}")


def miscounted(text: str) -> Iterator[str]:
    """Yield what counts one of something as several."""
    for before, things in COUNTED.findall(text):
        is_part = before.endswith((",", "/"))  # of a list, or of a quotient
        if not is_part and before.lower().strip("(“,;:") not in NUMBERED.split() and things not in VERBS.split():
            yield f"{before} 1 {things}"


def names_of_code(text: str) -> list[str]:
    """Return the names of our arguments, quantities and fields in a text."""
    return CODE.findall(text)
