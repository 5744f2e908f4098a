"""Name the cause of a hang by the functions in which the ranks are. The causes are in hangs.toml, the surest first."""

import re

from study.records.collectives import RankLog
from study.records.hangs import Finding, hangs
from study.watch.findings import OF_HANGS, finding, texts

ENDED = re.compile("ended with (?!KeyboardInterrupt)")  # Ctrl-C ends what already hangs


def causes(logs: list[RankLog]) -> list[Finding]:
    """Return the cause that fits first, of ranks that wait for each other. Empty if none does."""
    stacks = {log.rank: "\n".join(log.calls) for log in logs if log.calls}
    if len(stacks) < 2 or not hangs(logs):
        return []
    has_ended = any(ENDED.match(log.place or "") for log in logs)
    for id, cause in texts(OF_HANGS).items():
        ranks = [rank for rank, stack in stacks.items() if re.search(cause.get("one", ""), stack)]
        others = [rank for rank in stacks if rank not in ranks]
        is_one = "one" not in cause or bool(ranks and others)
        is_both = all(re.search(cause.get("both", ""), stack) for stack in stacks.values())
        if is_one and is_both and cause.get("ended", has_ended) == has_ended:
            return [finding(id, ranks=_listed(ranks), others=_listed(others))]
    return []


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
