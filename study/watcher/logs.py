"""Findings in logs of Slurm, torchrun and NCCL's watchdog."""

import re
from collections.abc import Iterator
from pathlib import Path

from study.errors import Stop
from study.records.collectives import Collective, RankLog
from study.records.hangs import Finding, hangs
from study.watcher.findings import KNOWN, Evidence, finding

LONGEST = 200  # characters of a line that is shown
LINES = {
    "killed_for_memory": r"oom[-_]kill|Out of memory: Killed|OUT_OF_MEMORY|OOM Killed|Signal 9 \(SIGKILL\)",
    "out_of_memory": r"(?:CUDA|HIP) out of memory|OutOfMemoryError",
    "time_limit": r"DUE TO TIME LIMIT|JOB \d{1,12} [^\n]{0,80}?TIMEOUT\b",
    "preempted": r"DUE TO PREEMPTION|NODE_?FAIL|DUE TO NODE FAILURE",
}
# torch.distributed.elastic's report: the first failure is its root cause.
ROOT = re.compile(r"Root Cause.{0,400}?rank\s*:\s*(\d+).{0,200}?exitcode\s*:\s*(-?\d+)", re.DOTALL)
# ProcessGroupNCCL.cpp
WATCHDOG = re.compile(
    r"\[Rank (\d{1,6})\][^\n]{0,120}Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,12}), "
    r"OpType=(\w{1,40}), NumelIn=(\d{1,18})[^\n]{0,80}?Timeout\(ms\)=(\d{1,12})"
)


def look(text: str, path: Path) -> Evidence:
    """Return what a log says about the end of a job. Raise Stop if it says nothing that is known."""
    findings = [*_root(text), *_waits(text)]
    for id, pattern in LINES.items():
        if match := re.search(pattern, text):
            begin = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            line = " ".join(text[begin : end if end >= 0 else None][: 4 * LONGEST].split())[:LONGEST]
            findings.append(finding(id, line=line))
    if not findings:
        raise Stop(f"{path} says nothing about the end of a job that is known", KNOWN)
    return Evidence("a log", findings)


def _root(text: str) -> Iterator[Finding]:
    if match := ROOT.search(text):
        cause = re.search(r"traceback\s*:\s*([^\n]{1,200})", text[match.start() : match.end() + 600])
        line = " ".join(cause[1].split()) if cause else "it wrote no traceback"
        yield finding("first_failure", rank=match[1], code=match[2], line=line)


def _waits(text: str) -> Iterator[Finding]:
    """Yield in which collectives the ranks waited, and which ranks took different branches."""
    waits = {int(match[1]): match for match in WATCHDOG.finditer(text)}
    if not waits:
        return
    logs = [
        RankLog(
            rank=rank,
            ranks=0,  # ranks that did not wait wrote no line
            written_unix_s=0,
            still_s=int(match[5]) / 1e3,
            recorded=True,
            recent=[_collective(match)],
        )
        for rank, match in waits.items()
    ]
    places = {match.group(2, 3) for match in waits.values()}
    rank, first = min(waits.items(), key=lambda each: int(each[1][2]))
    about = {"kind": first[3].lower(), "index": first[2], "waited_s": int(first[5]) / 1e3}
    yield from (hangs(logs) if len(places) > 1 else []) or [finding("collective_timeout", rank=rank, **about)]


def _collective(match: re.Match[str]) -> Collective:
    return Collective(group="0", index=int(match[2]), kind=match[3].lower(), elements=int(match[4]), ended=False)
