"""Findings in the steps of a watched run: waiting for data, slow ranks, memory that creeps.

The watch writes a line for each step into a file for each rank, so this works while a run goes on and after it was
killed. A step's seconds are divided into phases. Time in which a rank waits for others is not its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from study.core import files
from study.core.errors import Stop
from study.known.findings import Finding, finding

FILE = "steps-rank{rank}.csv"
PHASES = ("outside", "data", "forward", "backward", "waiting", "update")  # seconds of a step; waiting: for ranks
OWN = tuple(phase for phase in PHASES if phase != "waiting")
TIMED = ("step", "clean", "passes", "rows", "loss", "memory_bytes", *PHASES)
# What a step did besides; the rules for it are in dynamics.py. training: whether the model was in training mode.
# dropouts_off: layers of dropout that were not. trained: share of parameters with requires_grad. clipped_in: the
# micro-batch after which gradients were clipped first, 0 after the update. norm: of what was clipped. scheduled:
# micro-batches after which a schedule stepped. The last are the rates of the first groups.
DYNAMICS = ("training", "dropouts_off", "trained", "clipped_in", "norm", "scheduled")
GROUPS = 8
COLUMNS = (*TIMED, *DYNAMICS, *(f"rate_{group}" for group in range(GROUPS)))
FIELDS: list[Any] = [(name, "f8") for name in (*TIMED, *DYNAMICS)] + [("rates", "f8", (GROUPS,))]
LARGEST = 1e12  # seconds or steps
MAX_BYTES = 2**26  # some 500,000 steps
MAX_RANKS = 512  # from 0 on
WARM_UP = 10  # steps
FEWEST = 20  # steps that are judged
# Smaller shares get no finding.
WAITING = 0.1
OUTSIDE = 0.15
SLOWER = 0.1
OFTEN = 0.6  # of the steps
# Of a step, which all ranks lose. One of two healthy ranks lost 3 % on two cores with a load of 17 to 26, so less than
# 5 % may be chance.
LOST = 0.05
CREEP = 0.01  # of the memory
CREEP_BYTES = 2**24

Table = NDArray[np.void]  # a row for each step, with COLUMNS as its fields
Column = NDArray[np.float64]


def load(folder: Path) -> dict[int, Table]:
    """Return the steps of each rank that has written some."""
    tables = {}
    for rank in range(MAX_RANKS):
        path = folder / FILE.format(rank=rank)
        if path.is_file() and not path.is_symlink():  # a stranger's folder may have links to other files here
            table = _read(path)
            if len(table):
                tables[rank] = table
    return tables


def _read(path: Path) -> Table:
    try:
        head, *lines = files.read(path, MAX_BYTES).decode(errors="replace").splitlines() or [""]
        missing = len(COLUMNS) - 1 - head.count(",")  # older files have fewer columns
        lines = [line + ",nan" * missing for line in lines]
        whole = [line for line in lines if line.count(",") == len(COLUMNS) - 1]  # the last one may be cut
        table = np.loadtxt(whole, FIELDS, delimiter=",", ndmin=1) if whole else np.empty(0, FIELDS)
    except (OSError, ValueError) as error:
        raise Stop(f"{path} holds no steps ({files.why(error)})", "move it away: no rank wrote it") from None
    # Only counts and losses may be unknown, or infinite.
    known = [(table[name] >= 0) & (table[name] < LARGEST) for name in ("step", *PHASES)]
    return table[np.all(known, axis=0)]


def seconds(table: Table, phases: tuple[str, ...] = PHASES) -> Column:
    """Return the seconds of each step in these phases. Of a stack of tables the sums are for each rank."""
    return np.sum([table[phase] for phase in phases], axis=0)


def stacked(tables: list[Table]) -> Table:
    """Return the steps that all ranks have written: a row for each rank, and a column for each step."""
    fewest = min(map(len, tables))
    return np.stack([table[:fewest] for table in tables])


def shares(table: Table) -> dict[str, float]:
    """Return the share of each phase in the time of all steps."""
    total = float(seconds(table).sum())
    return {phase: float(table[phase].sum()) / total for phase in PHASES}


@np.errstate(all="ignore")  # what a stranger's numbers give is no number, and then no finding
def findings(tables: dict[int, Table]) -> list[Finding]:
    """Return what the steps of all ranks show, after the warm-up and without those that were disturbed."""
    if not tables:
        return []
    steps = stacked(list(tables.values()))
    # Of a run without any finite loss it may be that none was seen.
    seen = []
    finite = np.flatnonzero(np.isfinite(steps["loss"]).all(axis=0))
    if len(finite) and finite[-1] + 1 < steps.shape[1]:
        seen = [finding("no_finite_loss", step=steps["step"][0, finite[-1]])]
    # An instrument or an evaluation on one rank makes the others wait, so a step counts if it is clean on all.
    judged = np.all((steps["clean"] > 0) & (steps["step"] > WARM_UP), axis=0)
    if judged.sum() < FEWEST:
        return seen
    return seen + [each for rule in (_idle, _slow, _creeping) for each in rule(list(tables), steps[:, judged])]


# --- rules, for steps with a row for each rank and a column for each step


def _idle(ranks: list[int], steps: Table) -> Iterator[Finding]:
    """Name a phase in which a rank does nothing for the training, for the rank in which it is longest."""
    step_s = seconds(steps).mean(axis=1)
    for phase, least, id in (("data", WAITING, "loader_waits"), ("outside", OUTSIDE, "outside_steps")):
        spent_s = steps[phase].mean(axis=1)
        row = int(np.argmax(spent_s / step_s))
        share = spent_s[row] / step_s[row]
        if share >= least:
            yield finding(id, share=share, lost_s=float(spent_s[row]), step_s=step_s[row], rank=ranks[row])


def _slow(ranks: list[int], steps: Table) -> Iterator[Finding]:
    """Name a rank whose own work takes longer than the others', and the phase in which it loses most."""
    if len(ranks) == 1:
        return
    # Whole steps are equally long on all ranks, whoever is slow: the others wait for it in DDP's backward pass. Under
    # stage 3 on a GPU ranks wait on the device instead, within gathers, so a slow rank stays unseen there
    # (reports/log.md).
    own_s = seconds(steps, OWN)
    for row, rank in enumerate(ranks):
        # By shares and medians of steps: a few slow ones, such as of a disk, say nothing of a rank.
        others = np.delete(steps, row, axis=0)
        often = float(np.mean(own_s[row] > (1 + SLOWER) * np.median(seconds(others, OWN), axis=0)))
        spent_s = {phase: float(np.median(steps[phase][row]) - np.median(others[phase])) for phase in OWN}
        lost_s = sum(spent_s.values())
        if often >= OFTEN and lost_s >= LOST * np.median(seconds(steps)):
            phase = max(spent_s, key=spent_s.__getitem__)
            yield finding("straggler", rank=rank, often=often, lost_s=lost_s, phase=phase)


def _creeping(ranks: list[int], steps: Table) -> Iterator[Finding]:
    """Name the rank whose memory grows most, if it grows from each quarter of the run to the next."""
    # A leak grows in every quarter. A long row, or a cache that fills, raises one of them.
    quarters = np.array([np.median(part, axis=1) for part in np.array_split(steps["memory_bytes"], 4, axis=1)])
    row = int(np.argmax(quarters[-1] - quarters[0]))
    first, _, before, last = quarters[:, row]
    if np.diff(quarters[:, row]).min() > 0 and last - first >= max(CREEP_BYTES, CREEP * first):
        growth_bytes = 4 * (last - before) / steps.shape[1]  # of the last quarter, after caches have filled
        yield finding("memory_creeps", rank=ranks[row], growth_bytes=growth_bytes, memory_bytes=int(last - first))
