"""The output of a watch at its end: why a run failed, and a summary of its record."""

import textwrap
from pathlib import Path

from study.errors import Stop
from study.io.numbers import short, size
from study.measure.hardware import device_is_full, host_is_full, lost_connection
from study.records import metrics
from study.records.metrics import most
from study.records.schema import Record
from study.watcher import diagnosis
from study.watcher.parts import Part

SHOWN = 4  # components, the largest first


def reason(error: BaseException, where: str) -> Stop:
    """Why a user's training ended, as one sentence with a remedy."""
    text = str(error).partition("\n")[0]
    if device_is_full(error):
        remedy = "take fewer rows per pass or activation checkpointing; `study advise` predicts what fits"
        return Stop(f"the device ran out of memory ({text})", remedy, "oom", where)
    if host_is_full(error):
        return Stop(
            f"the host refused more memory ({text})", "take fewer rows per pass or fewer ranks", "host_oom", where
        )
    if lost_connection(error):
        return Stop("another rank died", "look in the launcher's output for which one, and why", "failed", where)
    if isinstance(error, KeyboardInterrupt):
        return Stop("interrupted", "start it again", "interrupted", where)
    return Stop(f"{type(error).__name__}: {text}", "see the traceback of the script", "failed", where)


def divergence(parts: list[Part]) -> Stop | None:
    """The Stop for a run whose loss is no longer finite; None for any other run."""
    steps = [(part.diverged_in, rank) for rank, part in enumerate(parts) if part.diverged_in]
    if not steps:
        return None
    step, rank = min(steps)
    remedy = "look at the rows of that step, give a lower learning rate, or clip gradients"
    return Stop(f"the loss is not finite in step {step}", remedy, "diverged", f"rank {rank}, step {step}")


def summary(record: Record, folder: Path) -> list[str]:
    """A summary of a record, in lines of at most 100 columns."""
    seen = record.observed
    ranks = f"{seen.ranks} {'rank' if seen.ranks == 1 else 'ranks'}"
    lines = [f"study.watch: {seen.arm or seen.wrapper} on {ranks} ({seen.device}), {seen.steps or 0} steps"]
    if record.error:
        lines += textwrap.wrap(
            f"{record.status}: {record.error.message}", 98, initial_indent="  ", subsequent_indent="    "
        )
    if step_s := metrics.median_step_s(record):
        speed = metrics.tokens_per_s(record)
        rate = f", {short(speed)} tokens/s" if speed else ""
        lines.append(f"  {short(step_s)} s per step (median){rate}")
    if (peak_bytes := most(rank.tracked_peak_bytes for rank in record.memory.components.per_rank)) is not None:
        fullest = max(record.memory.components.per_rank, key=lambda rank: rank.tracked_peak_bytes).at_peak or {}
        largest = sorted(fullest.items(), key=lambda item: -item[1])[:SHOWN]
        detail = ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in largest)
        lines.append(f"  {size(peak_bytes)} of tensors at the peak of a rank" + (f": {detail}" if detail else ""))
    if record.traffic.per_rank:
        kinds = [f"{kind} {size(each.bytes)} in {each.calls}" for kind, each in record.traffic.per_rank[0].items()]
        lines.append(f"  collectives of a step: {', '.join(kinds) or 'none'}")
    if not seen.steps and not record.error:
        lines.append("  No update was seen: pass the optimizer whose step the loop calls, and watch the whole loop.")
    elif not record.time.step_s and set(record.watched.not_timed or []) - {1}:
        lines.append("  No step is timed: in each the model also ran outside training, as for an evaluation.")
    if seen.steps and not record.watched.looked_at:
        lines.append("  The loop ended before the instruments looked: give watch a smaller `after`.")
    for finding in diagnosis.diagnose(record):
        text = f"{finding.sentence}." + ("" if finding.remedy is None else f" What to do: {finding.remedy}.")
        lines += textwrap.wrap(text, 98, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
    return [*lines, f"  {folder / 'record.json'}"]
