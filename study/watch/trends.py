"""Findings in the steps of a watched run: waiting for data, slow ranks, memory that creeps, decay, losses that jump.

The watch writes a line for each step into a file for each rank, so this works while a run goes on and after it was
killed. A step's seconds are divided into phases. Time in which a rank waits for others is not its own.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from study.core import files
from study.core.errors import Stop
from study.watch.findings import Finding, finding

FILE = "steps-rank{rank}.csv"
PHASES = ("outside", "data", "forward", "backward", "waiting", "update")  # seconds of a step, in their order
OWN = tuple(phase for phase in PHASES if phase != "waiting")
COLUMNS = ("step", "end_unix_s", "clean", "passes", "rows", "tokens", "rate", "loss", "memory_bytes", *PHASES)
FIELDS = [(name, "f8") for name in COLUMNS]
NOTHING: "Table" = np.empty(0, FIELDS)
LARGEST = 1e12  # seconds or steps
MAX_BYTES = 64 * 2**20  # some 500,000 steps; the last ones count
MAX_RANKS = 512  # from 0 on
WARM_UP = 10  # steps
FEWEST = 20  # steps that are judged
# Smaller shares get no finding.
WAITING = 0.1
OUTSIDE = 0.15
SLOWER = 0.1
OFTEN = 0.6  # of the steps
DECAY = 0.15
CREEP = 0.01  # of the memory
CREEP_BYTES = 2**24
STEADY = 0.9  # of the variance is the line's
JUMP = 8  # times the usual difference between two losses
JUMP_SHARE = 0.2  # of the loss
WORDS = {"data": "waiting for data", "outside": "between steps", "waiting": "waiting for other ranks"}
WHERE = {
    "data": "waiting for its data", "outside": "between its steps", "forward": "in the forward pass",
    "backward": "in the backward pass", "update": "in the update",
}  # fmt: skip

Table = NDArray[np.void]  # a row for each step, with COLUMNS as its fields
Column = NDArray[np.float64]


def load(folder: Path) -> dict[int, Table]:
    """Return the steps of each rank that has a file."""
    paths = {rank: folder / FILE.format(rank=rank) for rank in range(MAX_RANKS)}
    tables = {rank: _read(path) for rank, path in paths.items() if path.is_file() and not path.is_symlink()}
    return {rank: table for rank, table in tables.items() if len(table)}


def _read(path: Path) -> Table:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_BYTES))
        lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()[1:]  # the names, or half a line
    whole = [line for line in lines if line.count(",") == len(COLUMNS) - 1]
    try:
        table = np.loadtxt(io.StringIO("\n".join(whole)), FIELDS, delimiter=",", ndmin=1) if whole else NOTHING
    except ValueError as error:
        raise Stop(f"{path} holds no steps ({files.why(error)})", "move it away: no rank wrote it") from None
    return possible(table)


def possible(table: Table) -> Table:
    """Return the rows with numbers that a step can have. Only counts and losses may be unknown, or infinite."""
    known = np.all([(table[name] >= 0) & (table[name] < LARGEST) for name in ("step", "end_unix_s", *PHASES)], axis=0)
    return table[known]


def findings(tables: dict[int, Table]) -> list[Finding]:
    """Return what the steps of all ranks show. Empty if there are too few steps."""
    shared = judged(tables)
    if not shared or len(next(iter(shared.values()))) < FEWEST:
        return []
    rules = (_long_phases, _slow_rank, _memory, _decay, _losses)
    with np.errstate(all="ignore"):  # a loss may be infinite
        return [finding(id, **values) for rule in rules for id, values in rule(stacked(shared))]


def judged(tables: dict[int, Table]) -> dict[int, Table]:
    """Return the steps after the warm-up that every rank has, and in which nothing but training happened."""
    steps = [set(table["step"][(table["clean"] > 0) & (table["step"] > WARM_UP)]) for table in tables.values()]
    common = sorted(set.intersection(*steps)) if steps else []
    return {rank: table[np.isin(table["step"], common)] for rank, table in tables.items()}


def seconds(table: Table, phases: tuple[str, ...] = PHASES) -> Column:
    """Return the seconds of each step in these phases."""
    return np.sum([table[phase] for phase in phases], axis=0)


def shares(table: Table) -> dict[str, float]:
    """Return the share of each phase in the time of all steps."""
    total = float(seconds(table).sum()) or 1.0
    return {phase: float(table[phase].sum()) / total for phase in PHASES}


class Steps(NamedTuple):
    """The same steps of all ranks."""

    ranks: list[int]
    table: Table  # a row for each rank, a column for each step


def stacked(tables: dict[int, Table]) -> Steps:
    return Steps([*tables], np.stack([*tables.values()]))


Results = Iterator[tuple[str, dict[str, Any]]]


def _long_phases(steps: Steps) -> Results:
    step_s = seconds(steps.table).mean(axis=1)
    for phase, least, id in (("data", WAITING, "loader_waits"), ("outside", OUTSIDE, "outside_steps")):
        spent_s = steps.table[phase].mean(axis=1)
        row = int(np.argmax(spent_s / step_s))
        if spent_s[row] >= least * step_s[row]:
            spent = {"share": spent_s[row] / step_s[row], "lost_s": float(spent_s[row]), "step_s": step_s[row]}
            yield id, spent | {"rank": steps.ranks[row]}


def _slow_rank(steps: Steps) -> Results:
    """Yield a rank whose own work takes longer than the others', and the phase in which it loses most."""
    if len(steps.ranks) == 1:
        return
    for row, rank in enumerate(steps.ranks):
        others = np.delete(steps.table, row, axis=0)
        own_s = seconds(steps.table[row], OWN)
        usual_s = np.median(seconds(others, OWN), axis=0)
        ratios = own_s / np.maximum(usual_s, 1e-9)
        more = float(np.median(ratios)) - 1
        often = float(np.mean(ratios > 1 + SLOWER / 2))
        if more < SLOWER or often < OFTEN:
            continue
        lost_s = [np.median(steps.table[phase][row]) - np.median(others[phase]) for phase in OWN]
        about = {"slow_s": float(np.median(own_s)), "usual_s": float(np.median(usual_s))}
        where = WHERE[OWN[int(np.argmax(lost_s))]]
        about["lost_s"] = about["slow_s"] - about["usual_s"]
        yield "straggler", about | {"rank": rank, "more": more, "often": often, "where": where}


def _memory(steps: Steps) -> Results:
    """Yield the rank whose memory grows most."""
    rows = zip(steps.ranks, steps.table["step"], steps.table["memory_bytes"], strict=True)
    if creeps := [(creep, rank) for rank, step, memory_bytes in rows if (creep := _creep(step, memory_bytes))]:
        (growth, since, total), rank = max(creeps)
        yield "memory_creeps", {"rank": rank, "growth_bytes": growth, "since": since, "grown_bytes": total}


def _creep(step: Column, memory_bytes: Column) -> tuple[float, int, float] | None:
    """Return the bytes that each step adds, since which step, and all that was added. None without steady growth.

    Growth is steady if a line explains the memory from some step on, and each quarter of it is higher.
    """
    if not np.all((memory_bytes >= 0) & (memory_bytes < LARGEST * 1e6)):
        return None
    starts = range(0, len(step) - FEWEST + 1, max(1, len(step) // 50))
    start = min(starts, key=lambda each: _misfit(step, memory_bytes, each))
    late = memory_bytes[start:]
    line = np.poly1d(np.polyfit(step[start:], late, 1))
    added = line[1] * (step[-1] - step[start])
    is_line = np.var(late - line(step[start:])) <= (1 - STEADY) * np.var(late)
    is_much = added >= max(CREEP_BYTES, CREEP * memory_bytes[start])
    if is_line and is_much and np.diff(_quarters(late)).min() > 0:
        return float(line[1]), int(step[start]), float(added)
    return None


def _misfit(step: Column, memory_bytes: Column, start: int) -> float:
    """Return how far the memory is from constant before a step, and from a line that rises from there."""
    rising = np.maximum(step - step[start], 0)
    line = np.poly1d(np.polyfit(rising, memory_bytes, 1))
    return float(np.sum((memory_bytes - line(rising)) ** 2))


def _quarters(values: Column) -> Column:
    """Return the median of each quarter."""
    return np.array([np.median(part) for part in np.array_split(values, 4)])


def _decay(steps: Steps) -> Results:
    """Yield steps that take longer with each quarter of a run; of a token, if lengths differ."""
    table = steps.table[int(np.argmax(seconds(steps.table).sum(axis=1)))]
    tokens = table["tokens"]
    per = tokens / np.median(tokens) if np.all(tokens > 0) else 1.0
    step_s = _quarters(seconds(table) / per)
    if step_s[3] < (1 + DECAY) * step_s[0] or np.diff(step_s).min() <= 0:
        return
    slower_s = [np.subtract(*_quarters(table[phase])[[3, 0]]) for phase in PHASES]
    where = WHERE.get(PHASES[int(np.argmax(slower_s))], WORDS["waiting"])
    first_s, last_s = float(step_s[0]), float(step_s[3])
    lost = {"more": last_s / first_s - 1, "lost_s": last_s - first_s}
    yield "decay", lost | {"first_s": first_s, "last_s": last_s, "where": where}


def _losses(steps: Steps) -> Results:
    """Yield the first loss that is far above those before it, and when it was back."""
    loss = steps.table["loss"].mean(axis=0)
    for place in range(FEWEST // 2, len(loss)):
        before = loss[max(0, place - FEWEST) : place]
        usual = float(np.median(before))
        noise = float(np.median(np.abs(np.diff(before))))
        if loss[place] - usual > max(JUMP * noise, JUMP_SHARE * abs(usual)):
            low = np.flatnonzero(loss[place:] <= max(before.max(), usual + 2 * noise))
            back = f"it is back after {low[0]} steps" if len(low) else "it does not come back"
            number = int(steps.table["step"][0, place])
            yield "loss_jumps", {"before": usual, "loss": float(loss[place]), "step": number, "back": back}
            return
