"""Which ways to train work, by what a person says of them: the other one, of which they ask, is told apart by it."""

import re
from collections.abc import Iterator

from study.configs.pasted.two_releases import BROKEN, CLAUSE
from study.configs.pasted.words import meets, sentences

WAYS = {
    "stage 1 or 2": r"\b(?:zero|z|stage)[ _-]*(?:stage[ _-]*)?[12]\b(?![.\d])",
    "stage 3": r"\b(?:zero|z|stage)[ _-]*(?:stage[ _-]*)?3\b(?![.\d])",
    "no sharding": r"\bDDP\b|(?:without|no|\u4e0d\u7528|\u4e0d\u4f7f\u7528) ?(?:deepspeed|fsdp|zero)\b|\bMULTI_GPU\b",
    "one GPU": r"\b(?:single|one|1|a)[ -](?:gpu|card)\b(?!s)|\u5355\u5361|\u5355\u4e2a? ?GPU|\u4e00\u5f20\u5361",
    "one node": r"\b(?:single|one|1|a)[ -](?:node|machine)\b|\u5355\u673a(?!\u591a\u5361)",
}
# "It should work with DDP" and "how to make it work": nobody has seen that it does.
HOPED = re.compile(r"(?i)\b(?:work|should \w+|would \w+|whether)\b|\u53ef\u4ee5\u5417|\u662f\u5426|[?\uff1f]")
LINE = re.compile(r"(?<=[.!?;])\s|[\n\u3002\uff01\uff1b]")
ALSO_BROKEN = ("error", "crash", "not learn/train/save/load/fall", "memory/host full")
LONGEST = 160  # characters of a sentence that speaks of one thing
MOST = 20_000  # characters that are read: what a person compares stands at the beginning


def works(prose: str) -> frozenset[str]:
    """Return the ways of which it is said that they work."""
    return frozenset(way for part in working(prose) for way in ways(part))


def working(prose: str) -> list[str]:
    """Return the sentences, or else their clauses, that say of a way that it works."""
    return [part for part in _parts(prose[:MOST]) if ways(part) and _works(part)]


def _parts(prose: str) -> Iterator[str]:
    """Yield sentences. A long one, or one that tells of a failure as well, is taken apart into its clauses."""
    for line in LINE.split(prose):
        if len(line) > LONGEST or meets((*BROKEN, *ALSO_BROKEN), sentences(line)):
            yield from CLAUSE.split(line)
        else:
            yield line


def ways(part: str) -> set[str]:
    """Return the ways to train that a text names."""
    return {way for way, pattern in WAYS.items() if re.search(pattern, part, re.IGNORECASE | re.ASCII)}


def _works(part: str) -> bool:
    """Whether a part says that something works, and neither hopes nor denies it."""
    said = sentences(part)
    return bool(meets(("works",), said)) and not meets((*BROKEN, *ALSO_BROKEN), said) and not HOPED.search(part)
