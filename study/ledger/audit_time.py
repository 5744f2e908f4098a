"""Audit of a record's times: rates, utilization and energy follow from the steps, and no device is too fast."""

import functools
from collections.abc import Iterator

from study.ledger.audit_settings import row_ranks
from study.ledger.tolerances import ROUNDING, same
from study.machine.gpus import GPUS
from study.predictor.architecture import FAMILIES, describe, flops_per_row, parameters
from study.records import metrics
from study.records.schema import Record
from study.spec.shapes import SHAPES, VOCABULARY

CORE_FLOPS_PER_S = {"fp32": 5e11, None: 1e13}  # more than a CPU core can do: twice AVX-512's speed, and AMX's
MOST_WATTS = 3000  # more than one GPU can draw
DATASHEET = 0.1  # a tolerance for a GPU's memory, of which the driver keeps a part
WALL_SINCE = 3  # the first MEASURE_VERSION with time.window_s


def rates(record: Record) -> Iterator[str]:
    """The timed windows took as long as their steps."""
    time, observed, step_s = record.time, record.observed, record.time.step_s
    if not step_s:
        return
    window_s, total_s = metrics.timed_s(record), sum(step_s)
    if record.measure_version >= WALL_SINCE and time.window_s is None:
        yield "the wall time of the timed windows is not recorded"
    # A step's time is its slowest rank's. Their sum is the wall time if the same rank is always the slowest, else more.
    ranks = 1 if record.is_virtual else observed.ranks
    if not total_s / ranks * (1 - ROUNDING) <= window_s <= total_s * (1 + ROUNDING):
        yield f"the timed windows took {window_s:.4g} s, but their steps {total_s:.4g}"
    if len(step_s) > observed.steps:
        yield f"{len(step_s)} steps are timed of {observed.steps}"


def utilization(record: Record, reached: float | None) -> Iterator[str]:
    """The device can reach the speed."""
    flops_per_s, share = metrics.flops_per_s(record), metrics.mfu(record)
    if share is not None and share >= 1:
        yield f"mfu is {share:.3g}, which is not between 0 and 1"
    if reached and flops_per_s and flops_per_s > reached:
        yield f"{flops_per_s / 1e12:.4g} TFLOP/s, but a matrix product on this device reaches {reached / 1e12:.4g}"


def operations(record: Record) -> Iterator[str]:
    """Operations and parameters are the model's own. Operations that checkpointing repeats count once."""
    requested, flops = record.requested, record.time.flops_per_rank_and_step
    if flops is None or requested.model not in SHAPES or SHAPES[requested.model]["model_type"] not in FAMILIES:
        return  # other families have no formulas
    if requested.data != "embedded" and SHAPES[requested.model].get("vocab_size") is None:
        return  # the vocabulary is that of its data
    if requested.lora_rank or requested.train_only:
        return  # adapters come on top, and nothing is computed for the gradient of a frozen weight
    count, per_row = _shape(requested.model, requested.sequence)
    if record.observed.parameters != count:
        yield f"{requested.model} has {count} parameters, observed {record.observed.parameters}"
    expected = per_row * requested.micro_batch * requested.accumulation / row_ranks(record.observed)
    if not same(flops, expected, 0.01):
        yield f"{flops:.4g} operations a rank and step, but the model's own are {expected:.4g}"


@functools.lru_cache
def _shape(model: str, sequence: int) -> tuple[int, int]:
    architecture = describe(model, vocabulary=VOCABULARY)
    return parameters(architecture), flops_per_row(architecture, sequence)


def wall(record: Record) -> Iterator[str]:
    """All timed work lies between the start and the end of the run."""
    wall_s, time = record.wall_s, record.time
    if wall_s is None:
        yield f"{record.started_utc} to {record.finished_utc} is not a span of time"
        return
    timed = (time.setup_s or 0) + sum(time.step_s or [training.training_s for training in record.observed.runs])
    if timed > wall_s * 1.01 + 0.1:
        yield f"set-up and steps took {timed:.4g} s of a run of {wall_s:.4g} s"


def device(record: Record) -> Iterator[str]:
    """A GPU exists and left the traces that every run on a GPU leaves. A CPU is not faster than CPUs are."""
    observed, hardware, time = record.observed, record.hardware, record.time
    peaks = [rank.peak_allocated_bytes for rank in record.memory.per_rank]
    if observed.device == "cuda":
        if not hardware.devices:
            yield "the run was on a GPU, but no GPU is recorded"
        if None in peaks or not peaks:
            yield "the run was on a GPU, but its allocator has no peak"
        if observed.ranks > 1 and not record.is_virtual and observed.backend != "nccl":
            yield f"the run was on {observed.ranks} GPUs, but its backend is {observed.backend}"
    elif any(peak is not None for peak in peaks):
        yield f"the run was on {observed.device}, but a GPU's allocator has a peak"
    elif hardware.cores and time.flops_per_rank_and_step and time.step_s and sum(time.step_s) > 0:
        ranks = 1 if record.is_virtual else observed.ranks
        cores = sum(machine.hardware.cores or hardware.cores for machine in record.machines) or hardware.cores
        speed = time.flops_per_rank_and_step * ranks * len(time.step_s) / sum(time.step_s) / cores
        if speed > CORE_FLOPS_PER_S.get(record.requested.precision, CORE_FLOPS_PER_S[None]):
            yield f"{speed / 1e9:.4g} GFLOP/s on each core are more than a core can do"
    sizes = {gpu.name: gpu.memory_bytes for gpu in GPUS.values()}
    for gpu in hardware.devices[:1]:
        known = sizes.get(gpu.name)
        if known and not same(gpu.memory_bytes, known, DATASHEET):
            yield f"{gpu.name} has {known} bytes, but the record says {gpu.memory_bytes}"
    seconds = metrics.timed_s(record)
    for number, joules in enumerate(record.energy.joules_per_rank):
        if joules and seconds and joules > MOST_WATTS * seconds:
            yield f"rank {number}: {joules:.4g} J in {seconds:.4g} s are more than a GPU can take"
