"""The results of a watched loop: the measurements of its ranks, the sections of the record, and the printed summary."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from study.core import arms
from study.core.errors import Stop
from study.core.text import wrapped
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records.collectives import MISMATCH
from study.records.metrics import all_known
from study.records.schema import Record
from study.records.sections import (
    Collective,
    Components,
    Loss,
    Memory,
    Observed,
    RankComponents,
    RankMemory,
    Section,
    Time,
    Traffic,
)
from study.watch.between import factor
from study.watch.instruments import AFTER
from study.watch.mistakes import LOST_RANK
from study.watch.steps import in_words
from study.watch.trends import Column, Table, seconds, stacked

STEADY = 0.75  # of the steps


class RankMeasurements(Section):
    """What one rank measured, besides its file of steps."""

    memory: RankMemory
    components: RankComponents | None
    traffic: dict[str, Collective] | None
    inputs: list[str] | None
    gradient: list[list[float]] | None = None  # some numbers of it, after the last backward pass and at the update
    rate: float  # the largest learning rate; 0 if it is in a tensor, which is not read
    knows_losses: bool  # of all steps
    weights_sum: float | None = None  # of this rank's weights that train, at the end


def fill(record: Record, ranks: list[RankMeasurements], tables: list[Table]) -> int | None:
    """Fill in the measured sections of a record, from the ranks that sent theirs, in order.

    Return the first step without a finite loss.
    """
    # --- what the ranks sent: a list has all of them or none, as a position in it is a rank
    seen = record.observed
    record.watched.inputs_per_rank = all_known(rank.inputs for rank in ranks)
    record.watched.largest_rates = [rank.rate for rank in ranks]
    record.watched.weights_sums = all_known(rank.weights_sum for rank in ranks)
    if (gradients := all_known(rank.gradient for rank in ranks)) and len(ranks) > 1:
        record.watched.gradient_factor = factor([before for before, _ in gradients], gradients[0][1])
    components = Components(per_rank=all_known(rank.components for rank in ranks))
    record.memory = Memory(per_rank=[rank.memory for rank in ranks], components=components)
    record.traffic = Traffic(per_rank=all_known(rank.traffic for rank in ranks))
    # --- what they wrote into their files of steps
    seen.steps = 0
    if len(tables) < len(ranks):
        return None
    steps = stacked(tables)
    _fill_steps(record, steps)
    # --- the losses: the mean over ranks, so that of all of them
    if len(ranks) < (seen.ranks or 1) or not all(rank.knows_losses for rank in ranks):
        return None
    finite = np.logical_and.accumulate(np.isfinite(steps["loss"]).all(axis=0))  # up to the first that is not
    record.loss = Loss(train=steps["loss"].mean(axis=0)[finite].tolist())
    bad = steps["step"][0, ~finite]
    return int(bad[0]) if len(bad) else None


def _fill_steps(record: Record, steps: Table) -> None:
    """Fill in what the files of steps show: times, and sizes if all ranks have sent theirs."""
    seen = record.observed
    seen.steps = steps.shape[1]
    seen.accumulation = _usual(steps["passes"][0])
    rates = np.nan_to_num(steps["rates"][0]).max(axis=1)
    seen.learning_rates = rates.tolist() if np.isfinite(steps["rates"][0]).any() else []
    norms = steps["norm"][0]
    if np.isfinite(norms).any():
        record.watched.usual_norm = float(np.median(norms[np.isfinite(norms)]))
    # Steps after the instruments have looked, with nothing but training in them.
    timed = np.all(steps["clean"] > 0, axis=0) & (steps["step"][0] > AFTER)
    if not timed.any():
        return
    step_s = seconds(steps)[:, timed]  # a step takes as long as its slowest rank
    record.time = Time(step_s=step_s.max(axis=0).tolist(), window_s=step_s.sum(axis=1).max())
    if len(steps) == seen.ranks:
        seen.rows_per_step = _usual(steps["rows"].sum(axis=0))
        # Rows of unequal length, or a last batch, may differ now and then: most steps say what a rank has.
        usual = statistics.mode(zip(*steps["rows"].astype(int).tolist(), strict=True))
        if np.mean(usual == steps["rows"].T) >= STEADY:
            record.watched.rows_per_rank = list(usual)


def _usual(values: Column) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if it is unknown."""
    return int(statistics.mode(values.tolist())) or None


def arm_of(seen: Observed) -> str | None:
    """Return the name of the arm that the prepared objects are. None if no arm is, or with groups of ranks."""
    fsdp = seen.fsdp or {"mesh": [], "units_resharded_after_forward": 0}
    # A mesh of two dimensions is HSDP: shards within a group, replicas between groups.
    if seen.second_partition_ranks or seen.sequence_ranks or seen.tensor_ranks or 2 in map(len, fsdp["mesh"]):
        return None
    # In this order, because an engine or an FSDP model may have one rank as well.
    kind = None
    if seen.stage is not None:
        kind = "DEEPSPEED"
    elif seen.fsdp:
        kind = "FSDP"
    elif seen.bucket_bytes:
        kind = "MULTI_GPU"
    elif seen.ranks == 1:
        kind = "NO"
    resharded = fsdp["units_resharded_after_forward"] > 0
    observed = (kind, seen.stage, seen.offload_optimizer, seen.offload_param, resharded)
    for name in arms.NAMES:
        arm = arms.load_arm(name)
        resharded = (arm.fsdp or {}).get("fsdp_reshard_after_forward", False)
        if observed == (arm.distributed_type, arm.stage, arm.offload_optimizer, arm.offload_param, resharded):
            return name
    return None


FEWER_ROWS = "take smaller micro-batches, fewer ranks or activation checkpointing; `study advise` predicts what fits"


def reason(error: BaseException, where: str) -> Stop:
    """Return why a user's training ended, as one sentence with a remedy."""
    text = str(error).partition("\n")[0]  # of a CUDA error only the first line says something
    if device_is_full(error) or host_is_full(error):
        return Stop(f"the memory was full ({text})", FEWER_ROWS, "oom", where)
    if MISMATCH.search(str(error)):
        what = f"the ranks called different collectives ({text})"
        return Stop(what, "look for an `if` on the rank around one", where=where)
    if lost_connection(error):
        return Stop(LOST_RANK, "look in the launcher's output for which one, and why", where=where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "killed", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", where=where)


def summary(record: Record, folder: Path, tables: dict[int, Table]) -> Iterator[str]:
    """Yield what was trained, how it ended, and what a step took."""
    seen = record.observed
    yield f"study.watch: {seen.arm or seen.wrapper} on {seen.ranks} x {seen.device}, steps: {seen.steps or 0}"
    if record.error:
        yield from wrapped(f"{record.status}: {record.error.message}", "    ", "  ")
    elif not seen.steps:
        yield "  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop."
    elif not record.watched.looked_at:
        yield f"  The loop ended before the instruments looked, after {AFTER} steps: watch more of them."
    if record.time.step_s:
        yield f"  {in_words(tables[0][tables[0]['clean'] > 0], seen.device)}"
    yield f"  What is wrong or costly: study diagnose {folder}"
