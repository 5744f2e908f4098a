"""The output of a watch at its end: why a run failed, and a summary of its record."""

import textwrap
from pathlib import Path

from study.errors import Stop
from study.io.numbers import short, size
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records import metrics
from study.records.schema import Record
from study.watcher import diagnosis
from study.watcher.measurements import RankMeasurements

SHOWN = 4  # components, the largest first
COLUMNS = 98


def reason(error: BaseException, where: str) -> Stop:
    """Return why a user's training ended, as one sentence with a remedy."""
    text = str(error).partition("\n")[0]
    if device_is_full(error):
        remedy = "take fewer rows per pass or activation checkpointing; `study advise` predicts what fits"
        return Stop(f"the device ran out of memory ({text})", remedy, "oom", where)
    if host_is_full(error):
        remedy = "take fewer rows per pass or fewer ranks"
        return Stop(f"the host refused more memory ({text})", remedy, "host_oom", where)
    if lost_connection(error):
        return Stop("another rank died", "look in the launcher's output for which one, and why", "failed", where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "interrupted", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", "failed", where)


def divergence(ranks: list[RankMeasurements]) -> Stop | None:
    """Return the Stop for a run whose loss is no longer finite; None for any other run."""
    steps = [(each.diverged_in, rank) for rank, each in enumerate(ranks) if each.diverged_in]
    if not steps:
        return None
    step, rank = min(steps)
    remedy = "look at the rows of that step, give a lower learning rate, or clip gradients"
    return Stop(f"the loss is not finite in step {step}", remedy, "diverged", f"rank {rank}, step {step}")


def summary(record: Record, folder: Path) -> list[str]:
    """Return a summary of a record, in lines of at most 100 columns."""
    seen = record.observed
    ranks = f"{seen.ranks} {'rank' if seen.ranks == 1 else 'ranks'}"
    return [
        f"study.watch: {seen.arm or seen.wrapper} on {ranks} ({seen.device}), {seen.steps or 0} steps",
        *_error(record),
        *_speed(record),
        *_memory(record),
        *_traffic(record),
        *_hints(record),
        *_findings(record),
        f"  {folder / 'record.json'}",
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent="    ", break_long_words=False)


def _error(record: Record) -> list[str]:
    return _wrapped(f"{record.status}: {record.error.message}", "  ") if record.error else []


def _speed(record: Record) -> list[str]:
    step_s = metrics.median_step_s(record)
    speed = metrics.tokens_per_s(record)
    rate = f", {short(speed)} tokens/s" if speed else ""
    return [f"  {short(step_s)} s per step (median){rate}"] if step_s else []


def _memory(record: Record) -> list[str]:
    per_rank = record.memory.components.per_rank
    if not per_rank:
        return []
    fullest = max(per_rank, key=lambda rank: rank.tracked_peak_bytes)
    largest = sorted((fullest.at_peak or {}).items(), key=lambda item: -item[1])[:SHOWN]
    detail = ", ".join(f"{name.replace('_', ' ')} {size(role_bytes)}" for name, role_bytes in largest)
    return [f"  {size(fullest.tracked_peak_bytes)} of tensors at the peak of a rank" + (detail and f": {detail}")]


def _traffic(record: Record) -> list[str]:
    if not record.traffic.per_rank:
        return []
    kinds = [f"{kind} {size(each.bytes)} in {each.calls}" for kind, each in record.traffic.per_rank[0].items()]
    return [f"  collectives of a step: {', '.join(kinds) or 'none'}"]


def _hints(record: Record) -> list[str]:
    """Return what to change in the call of watch if something could not be measured."""
    steps = record.observed.steps
    hints = []
    if not steps and not record.error:
        hints.append("  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop.")
    elif not record.time.step_s and set(record.watched.not_timed) - {1}:
        hints.append("  No step is timed: in each the model also ran outside training, as for an evaluation.")
    if steps and not record.watched.looked_at:
        hints.append("  The loop ended before the instruments looked: give watch a smaller `after`.")
    return hints


def _findings(record: Record) -> list[str]:
    lines = []
    for finding in diagnosis.diagnose(record):
        remedy = f" What to do: {finding.remedy}." if finding.remedy else ""
        lines += _wrapped(f"{finding.sentence}.{remedy}", "  - ")
    return lines
