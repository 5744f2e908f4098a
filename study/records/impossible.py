"""Names what no finished training can have measured. Records with such values are set aside wherever runs are read.

The schema refuses what no record may hold, such as negative bytes. Here are values that are wrong only in a run that is
done, so that a run which fails can still be written and read.
"""

from collections.abc import Iterator

from study.records.schema import RankMemory, Record

MOST_LOSS = 1e6  # a diverged training may pass it, but that is not done
# What a process holds is in its device, or in its host.
ON_DEVICE = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
ON_HOST = ("host_peak_bytes", "host_resident_bytes", "host_pinned_peak_bytes")


def impossible(record: Record) -> list[str]:
    """Return each impossible value of a finished run, in words."""
    if record.status != "done":
        return []
    return [*_losses(record), *_memory(record), *_trainings(record)]


def _losses(record: Record) -> Iterator[str]:
    """Yield the curves with a loss that no training has. A user's own script may have any."""
    if record.is_watched:
        return
    curves = {f"training {number}": each.losses for number, each in enumerate(record.observed.runs, start=1)}
    curves["the training"] = record.loss.train
    curves["an evaluation"] = [each.eval_loss for each in record.loss.eval]
    for name, losses in curves.items():
        for loss in {min(losses, default=1), max(losses, default=1)}:
            if not 0 < loss < MOST_LOSS:
                yield f"the loss of {name} is {loss:g}, but should be above 0 and below {MOST_LOSS:g}"
    for each in record.loss.eval:
        if not 0 <= (each.accuracy or 0) <= 1:
            yield f"the accuracy is {each.accuracy:g}, but should be between 0 and 1"


def _memory(record: Record) -> Iterator[str]:
    """Yield what is larger than the device or the host that it is in."""
    devices = [device.memory_bytes for device in record.hardware.devices]
    hosts = [record.hardware, *(machine.hardware for machine in record.machines)]
    host_bytes = max(host.host_memory_bytes or 0 for host in hosts)
    for number, rank in enumerate(record.memory.per_rank):
        device_bytes = devices[number % len(devices)] if devices else 0
        yield from _larger(rank, number, ON_DEVICE, device_bytes, "device")
        yield from _larger(rank, number, ON_HOST, host_bytes, "host")


def _larger(rank: RankMemory, number: int, names: tuple[str, ...], limit: int, owner: str) -> Iterator[str]:
    """Yield the values that are larger than a limit, if it is known."""
    for name in names:
        if limit and (getattr(rank, name) or 0) > limit:
            yield f"rank {number}: {name} is more than its {owner} has ({limit} bytes)"


def _trainings(record: Record) -> Iterator[str]:
    """Yield the trainings of the published script that did nothing."""
    if record.is_script and not record.observed.runs:
        yield "the script is done, but no training is recorded"
    for number, each in enumerate(record.observed.runs, start=1):
        if min(each.steps, len(each.losses), each.training_s) <= 0 or each.peak_bytes == 0:
            yield f"training {number} took no step, no time or no memory, or has no loss"
