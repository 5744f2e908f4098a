"""Name the cause of a hang by the functions in which the ranks are. The causes are in hangs.toml."""

import functools
import re
import tomllib
from pathlib import Path
from typing import TypedDict

from study.records.collectives import RankLog
from study.records.hangs import Finding, hangs

FILE = Path(__file__).with_name("hangs.toml")
ENDED = re.compile("ended with (?!KeyboardInterrupt)")  # Ctrl-C ends what already hangs


class Cause(TypedDict, total=False):
    """A cause, and what has to be true of the functions in which the ranks are. The patterns are searched there."""

    ways: list[str]
    sentence: str
    remedy: str
    evidence: str
    one: str
    both: str
    ended: bool


@functools.cache
def texts() -> dict[str, Cause]:
    """Return the causes by id, the surest first."""
    return tomllib.loads(FILE.read_text())


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    stacks = {log.rank: "\n".join(log.calls) for log in logs if log.calls}
    if len(stacks) < 2 or not hangs(logs):
        return []
    has_ended = any(ENDED.match(log.place or "") for log in logs)
    for id, cause in texts().items():
        ranks = [rank for rank, stack in stacks.items() if re.search(cause.get("one", ""), stack)]
        others = [rank for rank in stacks if rank not in ranks]
        is_one = "one" not in cause or bool(ranks and others)
        is_both = all(re.search(cause.get("both", ""), stack) for stack in stacks.values())
        if is_one and is_both and cause.get("ended", has_ended) == has_ended:
            named = {"ranks": _listed(ranks), "others": _listed(others)}
            return [Finding(cause["sentence"].format(**named), cause["remedy"], cause.get("evidence"), id=id)]
    return []


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
