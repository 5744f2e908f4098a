"""Findings in the steps of a watched run: waiting for data, slow ranks, memory that creeps, decay, losses that jump.

The watch writes a line for each step into a file for each rank, so this works while a run goes on and after it was
killed. A step's seconds are divided into phases. Time in which a rank waits for others is not its own.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from study.errors import Stop
from study.io import chrome, files
from study.records.hangs import Finding
from study.watcher.findings import finding

FILE = "steps-rank{rank}.csv"
PHASES = ("outside", "data", "forward", "backward", "waiting", "update")  # seconds of a step, in their order
OWN = tuple(phase for phase in PHASES if phase != "waiting")
COLUMNS = ("step", "end_unix_s", "clean", "passes", "rows", "tokens", "rate", "loss", "memory_bytes", *PHASES)
FIELDS = [(name, "f8") for name in COLUMNS]
NOTHING: "Table" = np.empty(0, FIELDS)
LARGEST = 1e12  # seconds or steps
MAX_BYTES = 64 * 2**20  # some 500,000 steps; the last ones count
MAX_RANKS = 512
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
TRACED = 200  # steps in a trace
WORDS = {"data": "waiting for data", "outside": "between steps", "waiting": "waiting for other ranks"}
WHERE = {
    "data": "waiting for its data", "outside": "between its steps", "forward": "in the forward pass",
    "backward": "in the backward pass", "update": "in the update",
}  # fmt: skip

Table = NDArray[np.void]  # a row for each step, with COLUMNS as its fields
Column = NDArray[np.float64]


def load(folder: Path) -> dict[int, Table]:
    """Return the steps of each rank that has a file."""
    names = [(re.fullmatch(r"steps-rank(\d{1,6})\.csv", path.name), path) for path in folder.glob("steps-rank*.csv")]
    found = sorted((int(match[1]), path) for match, path in names if match and not path.is_symlink() and path.is_file())
    found = found[:MAX_RANKS]
    return {rank: table for rank, path in found if len(table := _read(path))}


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
        return [finding(id, **values) for rule in rules for id, values in rule(shared)]


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


Results = Iterator[tuple[str, dict[str, Any]]]


def _long_phases(tables: dict[int, Table]) -> Results:
    for phase, least, id in (("data", WAITING, "loader_waits"), ("outside", OUTSIDE, "outside_steps")):
        share, rank = max((shares(table)[phase], rank) for rank, table in tables.items())
        if share >= least:
            step_s = float(seconds(tables[rank]).mean())
            yield id, {"share": share, "rank": rank, "spent_s": share * step_s, "step_s": step_s}


def _slow_rank(tables: dict[int, Table]) -> Results:
    """Yield a rank whose own work takes longer than the others', and the phase in which it loses most."""
    for rank, table in tables.items():
        others = [other for name, other in tables.items() if name != rank]
        if not others:
            return
        usual = np.median([seconds(other, OWN) for other in others], axis=0)
        ratios = seconds(table, OWN) / np.maximum(usual, 1e-9)
        more = float(np.median(ratios)) - 1
        often = float(np.mean(ratios > 1 + SLOWER / 2))
        if more < SLOWER or often < OFTEN:
            continue
        lost = {phase: np.median(table[phase]) - np.median([other[phase] for other in others]) for phase in OWN}
        phase = max(lost, key=lambda each: lost[each])
        about = {"slow_s": float(np.median(seconds(table, OWN))), "usual_s": float(np.median(usual))}
        yield "straggler", about | {"rank": rank, "more": more, "often": often, "where": WHERE[phase]}


def _memory(tables: dict[int, Table]) -> Results:
    """Yield steady growth: from some step on, a line explains the memory, and each quarter of it is higher."""
    grown = [(_creep(table["step"], table["memory_bytes"]), rank) for rank, table in tables.items()]
    creeping = [(creep, rank) for creep, rank in grown if creep is not None]
    if creeping:
        (growth, since, total), rank = max(creeping)
        yield "memory_creeps", {"rank": rank, "growth_bytes": growth, "since": since, "grown_bytes": total}


def _creep(step: Column, held: Column) -> tuple[float, int, float] | None:
    """Return the bytes that each step adds, since which step, and all that was added. None without steady growth."""
    if not np.all((held >= 0) & (held < LARGEST * 1e6)):
        return None
    starts = range(0, len(step) - FEWEST + 1, max(1, len(step) // 50))
    errors = {start: _misfit(step, held, start) for start in starts}
    start = min(errors, key=lambda each: errors[each])
    late = held[start:]
    slope, _ = np.polyfit(step[start:], late, 1)
    added = slope * (step[-1] - step[start])
    if added < max(CREEP_BYTES, CREEP * held[start]):
        return None
    quarters = np.diff([np.median(part) for part in np.array_split(late, 4)])
    line = np.poly1d(np.polyfit(step[start:], late, 1))(step[start:])
    is_line = np.var(late - line) <= (1 - STEADY) * np.var(late)
    return (float(slope), int(step[start]), float(added)) if is_line and quarters.min() > 0 else None


def _misfit(step: Column, held: Column, start: int) -> float:
    """Return how far the memory is from constant before a step, and from a line that rises from there."""
    rising = np.maximum(step - step[start], 0)
    slope, base = np.polyfit(rising, held, 1)
    return float(np.sum((held - base - slope * rising) ** 2))


def _decay(tables: dict[int, Table]) -> Results:
    """Yield steps that take longer with each quarter of a run; of a token, if lengths differ."""
    table = max(tables.values(), key=lambda each: float(seconds(each).sum()))
    tokens = table["tokens"]
    per = tokens / np.median(tokens) if np.all(tokens > 0) else np.ones(len(table))
    step_s = [float(np.median(part)) for part in np.array_split(seconds(table) / per, 4)]
    if step_s[3] < (1 + DECAY) * step_s[0] or np.diff(step_s).min() <= 0:
        return
    parts = {phase: np.array_split(table[phase], 4) for phase in PHASES}
    phase = max(parts, key=lambda each: np.median(parts[each][3]) - np.median(parts[each][0]))
    where = WHERE.get(phase, "waiting for other ranks")
    more = step_s[3] / step_s[0] - 1
    yield "decay", {"first_s": step_s[0], "last_s": step_s[3], "more": more, "where": where}


def _losses(tables: dict[int, Table]) -> Results:
    """Yield the first loss that is far above those before it, and when it was back."""
    loss = np.mean([table["loss"] for table in tables.values()], axis=0)
    steps = next(iter(tables.values()))["step"]
    for place in range(FEWEST // 2, len(loss)):
        before = loss[max(0, place - FEWEST) : place]
        usual = float(np.median(before))
        noise = float(np.median(np.abs(np.diff(before))))
        if loss[place] - usual > max(JUMP * noise, JUMP_SHARE * abs(usual)):
            low = np.flatnonzero(loss[place:] <= max(before.max(), usual + 2 * noise))
            back = f"it is back after {low[0]} steps" if len(low) else "it does not come back"
            yield "loss_jumps", {"before": usual, "loss": float(loss[place]), "step": int(steps[place]), "back": back}
            return


def in_words(tables: dict[int, Table]) -> str | None:
    """Return what the time of the first rank's steps goes to."""
    steps = judged(tables)
    if not steps or not len(steps[min(steps)]):
        return None
    parts = sorted(shares(steps[min(steps)]).items(), key=lambda part: -part[1])
    return (
        f"of a step: {', '.join(f'{share:.0%} {WORDS.get(phase, phase)}' for phase, share in parts if share >= 0.01)}"
    )


def write_trace(path: Path, tables: dict[int, Table]) -> None:
    """Write the last steps as a trace for Perfetto. Phases that a step has several times are drawn as one."""
    spans, counters = [], []
    for rank, table in tables.items():
        for row in table[-TRACED:]:
            at_s = row["end_unix_s"] - sum(row[phase] for phase in PHASES)
            counters.append((f"rank {rank}", "memory_bytes", row["end_unix_s"], row["memory_bytes"]))
            for phase in PHASES:
                spans.append((f"rank {rank}", phase, f"{phase} of step {row['step']:.0f}", at_s, at_s + row[phase]))
                at_s += row[phase]
    chrome.write(path, spans, counters)
