"""Names what no finished training can have measured. Records with such values are set aside wherever runs are read.

The schema refuses what no record may hold, such as negative bytes. Here are values that are wrong only in a run that is
done, so that a run which fails can still be written and read.
"""

from collections.abc import Iterator

from study.records.schema import Record

MOST_LOSS = 1e6  # a diverged training may pass it, but that is not done
# Their reasons: what a process holds is in its device or host.
ON_DEVICE = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
ON_HOST = ("host_peak_bytes", "host_resident_bytes", "host_pinned_peak_bytes")


def impossible(record: Record) -> list[str]:
    """Return each impossible value of a finished run, in words. A user's own script may have any loss."""
    if record.status != "done":
        return []
    losses = () if record.is_watched else _losses(record)
    return [*losses, *_memory(record), *_trainings(record)]


def _losses(record: Record) -> Iterator[str]:
    curves = {f"training {number}": each.losses for number, each in enumerate(record.observed.runs, start=1)}
    curves |= {"the training": record.loss.train, "an evaluation": [each.eval_loss for each in record.loss.eval]}
    for name, losses in curves.items():
        if wrong := [loss for loss in losses if not 0 < loss < MOST_LOSS]:
            yield f"the loss of {name} is {wrong[0]:g}, but should be above 0 and below {MOST_LOSS:g}"
    for each in record.loss.eval:
        if each.accuracy is not None and not 0 <= each.accuracy <= 1:
            yield f"the accuracy is {each.accuracy:g}, but should be between 0 and 1"


def _memory(record: Record) -> Iterator[str]:
    devices = record.hardware.devices
    hosts = [record.hardware, *(machine.hardware for machine in record.machines)]
    host_bytes = max(each.host_memory_bytes or 0 for each in hosts) or None
    for number, rank in enumerate(record.memory.per_rank):
        device_bytes = devices[number % len(devices)].memory_bytes if devices else None
        limits = {name: (device_bytes, "device") for name in ON_DEVICE} | {
            name: (host_bytes, "host") for name in ON_HOST
        }
        for name, (limit, owner) in limits.items():
            size = getattr(rank, name)
            if size is not None and limit is not None and size > limit:
                yield f"rank {number}: {name} is more than its {owner} has ({limit} bytes)"


def _trainings(record: Record) -> Iterator[str]:
    """Yield the trainings of the published script that did nothing."""
    if record.is_script and not record.observed.runs:
        yield "the script is done, but no training is recorded"
    for number, each in enumerate(record.observed.runs, start=1):
        if each.steps < 1 or not each.losses or each.training_s <= 0 or each.peak_bytes == 0:
            yield f"training {number} took no step, no time or no memory, or has no loss"
