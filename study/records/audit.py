"""Audits a record before it counts as evidence: what was measured twice must agree, and nothing may be impossible.

It looks for the faults of published benchmarks: counts of several steps, the first rank alone, half a step read as a
whole one, an empty run counted as a success, another training than the requested one. Each function returns a table:
values with those that they may have, or numbers with their limits. `agreement` compares records with each other.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from study.errors import Stop
from study.records import metrics
from study.records.metrics import ELEMENT_BYTES
from study.records.schema import Collective, Record
from study.spec import arms, optimizers
from study.spec.settings import AUTOCAST, HALF_WEIGHTS

ROUNDING = 1e-6  # for numbers that differ only in the order of additions
PADDING = 0.05  # stage 3 pads what it gathers, and allocators round sizes up
EXACT, EXACT_ELEMENTS = 0.01, 2000  # parts are padded to equal sizes, by at most 126 elements in any kept record
SMALL_ELEMENTS = 100_000  # a tolerance for small collectives besides weights and gradients
KERNEL, LOG_LINES_BYTES = 0.02, 2**16  # tolerances of the kernel's count, which includes frames and log lines
HEADER_BYTES = 2**16  # of a saved file
WALL_SINCE = 3  # the first MEASURE_VERSION with time.window_s
ADAM = ("AdamW", "MasterAdamW", "DeepSpeedCPUAdam")  # two moments of an element each
GRADIENTS = ("all_reduce", "reduce_scatter", "reduce")  # collectives of them
PROFILERS = ("wall_clock_breakdown", "flops_profiler", "comms_logger", "memory_breakdown")
NEEDED = (
    *(f"requested.{name}" for name in ("model", "data", "precision", "micro_batch", "accumulation", "sequence")),
    *(f"observed.{name}" for name in ("ranks", "steps", "parameters", "rows_per_step", "tokens_per_step")),
)
Values = dict[str, tuple[object, Iterable]]  # what was found, and what it may be
Limits = list[tuple[str, float | None, float | None, float | None]]  # what was found, its least and its most


def faults(record: Record, reached: float | None = None) -> list[str]:
    """Return why a finished run is not evidence, in words. Empty if it is evidence.

    `reached`: FLOP/s that matrix products were measured to reach on the same device.
    """
    if record.status != "done":
        return []
    if record.wall_s is None:
        return [f"{record.started_utc} to {record.finished_utc} is not a span of time"]
    if record.is_script:
        return [*_unlike(_script(record)), *_beyond(_wall(record))]
    if missing := [name for name in NEEDED if not metrics.dig(record, name)]:
        return [f"{name} is {metrics.dig(record, name)} in a finished run" for name in missing]
    values = _trained(record) | _settings(record) | _of_arm(record) | _deepspeed(record) | _all_ranks(record)
    limits = [*_wall(record), *_times(record), *_saved(record), *_kernel(record), *_speed(record, reached)]
    for rank in range(len(record.memory.per_rank)):
        limits += [*_memory(record, rank), *_states(record, rank)]
    for rank, counts in enumerate(record.traffic.per_rank):
        limits += _traffic(record, rank, counts)
    return [*_unlike(values), *_beyond(limits)]


@dataclass(frozen=True)
class Sizes:
    """The numbers that most rules compute with, none of them unknown."""

    ranks: int
    stage: int
    passes: int
    parameters: int
    trained: int  # parameters


def _sizes(record: Record) -> Sizes:
    seen = record.observed
    parameters = seen.parameters or 0
    return Sizes(
        ranks=seen.ranks or 1,
        stage=seen.stage or 0,
        passes=record.requested.accumulation or 1,
        parameters=parameters,
        trained=seen.trained_parameters or parameters,
    )


def _unlike(values: Values) -> Iterator[str]:
    for what, (value, allowed) in values.items():
        expected = list(allowed)
        if value not in expected:
            yield f"{what} is {value!r}, but should be {' or '.join(sorted(map(repr, expected)))}"


def _beyond(limits: Limits) -> Iterator[str]:
    """Yield the numbers beyond their limits. What is unknown is no fault."""
    for what, value, least, most in limits:
        if value is not None and most is not None and value > most:
            yield f"{what} is {value:.6g}, and should be at most {most:.6g}"
        if value is not None and least is not None and value < least:
            yield f"{what} is {value:.6g}, and should be at least {least:.6g}"


def _elements(what: str, value: float, expected: float) -> tuple[str, float, float, float]:
    """Return the limits of a number of elements: parts are padded."""
    room = EXACT * expected + EXACT_ELEMENTS
    return f"{what} in elements", value, expected - room, expected + room


# --- the training --------------------------------------------------------------------------------------------------


def _script(record: Record) -> Values:
    """DeepSpeed is started in each training that its engine trained, and in no other."""
    return {
        f"training {number}: the calls of deepspeed.initialize": (
            each.deepspeed_initialize_calls,
            (None, int(each.trained_by == "DeepSpeedEngine")),
        )
        for number, each in enumerate(record.observed.runs, start=1)
        if each.trained_by
    }


def _trained(record: Record) -> Values:
    """A run that did nothing is not a success. A virtual run has no loss."""
    losses = record.loss.train
    timed = len(record.time.step_s)
    lacks_wall = record.measure_version >= WALL_SINCE and record.time.window_s is None
    return {
        "whether steps were timed": (timed > 0 or record.requested.init == "none", (True,)),
        "the number of losses": (len(losses), (0 if record.is_virtual else record.observed.steps,)),
        "whether the loss is the same at every step": (len(losses) > 2 and len({*losses}) == 1, (False,)),
        "whether the wall time of the timed windows is recorded": (not (timed and lacks_wall), (True,)),
    }


def _settings(record: Record) -> Values:
    """The observed training is the requested one."""
    requested, observed = record.requested, record.observed
    precision = requested.precision or ""
    sizes = _sizes(record)
    readers = sizes.ranks // ((observed.sequence_ranks or 1) * (observed.tensor_ranks or 1))
    rows = (requested.micro_batch or 0) * sizes.passes * readers
    weights = "bfloat16" if precision in HALF_WEIGHTS else "float32"
    moments = (*optimizers.moments_dtypes(requested.optimizer, precision), None)  # None: on the disk
    same = ("accumulation", "checkpointing", "arm", "virtual_ranks")
    return {name: (getattr(observed, name), (getattr(requested, name),)) for name in same} | {
        "compiled": (observed.compiled, (requested.compile,)),
        "autocast": (observed.autocast, (precision if precision in AUTOCAST else None,)),
        "rows_per_step": (observed.rows_per_step, (rows,)),
        "tokens_per_step": (observed.tokens_per_step, ((observed.rows_per_step or 0) * (requested.sequence or 0),)),
        "ranks_counted": (observed.ranks_counted, (None, observed.ranks)),
        "the file of the arm": (Path(requested.config_file or "").stem, ("", requested.arm)),
        "the dtype of the weights": (observed.dtypes.get("weights"), (weights,)),
        "the dtype of the moments": (observed.dtypes.get("moments"), moments),
    }


def _of_arm(record: Record) -> Values:
    """The observed training is that of the arm's file. Nothing is known of another repository's arms."""
    observed = record.observed
    arm = _arm(record.requested.arm or "")
    if arm is None:
        return {}
    same = ("stage", "offload_optimizer", "offload_param")
    engine = "DeepSpeedEngine" if arm.distributed_type == "DEEPSPEED" else observed.wrapper
    return {name: (getattr(observed, name), (getattr(arm, name),)) for name in same} | {
        "wrapper": (observed.wrapper, (engine,)),
        "the optimizer": (observed.optimizer, optimizers.classes(record.requested.optimizer, arm)),
        "whether FSDP2 was observed": (observed.fsdp is not None, (bool(arm.fsdp),)),
    }


@functools.lru_cache
def _arm(name: str) -> arms.Arm | None:
    path = arms.all_paths().get(name)
    try:
        return arms.read(path) if path else None
    except Stop:
        return None


def _deepspeed(record: Record) -> Values:
    """The config that DeepSpeed resolved agrees with its objects, and no profiler was on."""
    has_config = record.observed.deepspeed is not None or record.observed.wrapper != "DeepSpeedEngine"
    config = _section(record.observed.deepspeed)
    stage = _section(config.get("zero_optimization")).get("stage", record.observed.stage)
    passes = config.get("gradient_accumulation_steps")
    is_on = {name: _section(config.get(name)).get("enabled", config.get(name)) for name in PROFILERS}
    return {
        **{f"DeepSpeed's {name}, which adds synchronisation,": (each, (None, False)) for name, each in is_on.items()},
        "whether DeepSpeed's resolved config is recorded": (has_config, (True,)),
        "the stage of the objects": (record.observed.stage, (stage,)),
        "DeepSpeed's gradient_accumulation_steps": (passes, (record.requested.accumulation, None, "auto")),
    }


def _section(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _all_ranks(record: Record) -> Values:
    """Every rank has reported: the first rank need not hold the most. Of virtual ranks only the first one runs."""
    reported: dict[str, list] = {
        "memory": record.memory.per_rank,
        "traffic": record.traffic.per_rank,
        "components": record.memory.components.per_rank,
        "held_parameters": record.observed.held_parameters_per_rank,
    }
    allowed = (0, 1 if record.is_virtual else record.observed.ranks)
    return {f"the number of ranks with {name}": (len(ranks), allowed) for name, ranks in reported.items()}


# --- memory and files ----------------------------------------------------------------------------------------------


def _memory(record: Record, rank: int) -> Limits:
    """The parts of memory fit into their wholes. `impossible` has compared wholes with the device and the host."""
    whole = record.memory.per_rank[rank]
    allocated = whole.peak_allocated_bytes
    limits: Limits = [(f"rank {rank}: peak_allocated", allocated, None, whole.peak_reserved_bytes or 0)]
    with_values = record.observed.device == "cpu" and not record.is_virtual and record.requested.init != "none"
    room = whole.host_peak_bytes if with_values else allocated
    for part in record.memory.components.per_rank[rank : rank + 1]:
        tracked = part.tracked_peak_bytes
        at_peak = tracked if part.at_peak is None else sum(part.at_peak.values())
        after = sum(part.after_step.values())
        limits += [(f"rank {rank}: the sum of components at_peak", at_peak, tracked, tracked)]
        limits += [(f"rank {rank}: the sum of components after_step", after, None, tracked)]
        limits += [(f"rank {rank}: tracked_peak", tracked / (1 + PADDING), None, room)]
    return limits


def _states(record: Record, rank: int) -> Limits:
    """Each rank holds its share of the parameters, and of the states. What is on the disk is absent.

    Gradients are compared after a step only: at the peak there may be more copies.
    """
    observed = record.observed
    limits = _held_parameters(record, rank)
    for part in record.memory.components.per_rank[rank : rank + 1]:
        for name, share in _shares(record, rank).items():
            each = ELEMENT_BYTES.get(observed.dtypes.get(name) or "", 0)
            moments = {"the end": part.after_step} | ({} if name == "gradients" else {"the peak": part.at_peak or {}})
            for moment, sizes in moments.items():
                if each and sizes.get(name):
                    limits += [_elements(f"rank {rank}: the {name} at {moment} of a step", sizes[name] / each, share)]
    return limits


def _held_parameters(record: Record, rank: int) -> Limits:
    """Each rank holds its share of the parameters. FSDP2 divides by rows, so that the last ranks may have fewer."""
    observed = record.observed
    sizes, rank_size = _sizes(record), _rank_size(record, rank)
    about = f"rank {rank}: the held parameters"
    if observed.tensor_ranks:  # a part of the layers, and whole norms and embeddings
        return [(about, rank_size, sizes.parameters / observed.tensor_ranks, sizes.parameters - 1)]
    if observed.fsdp or not observed.held_parameters_per_rank:
        return []
    return [_elements(about, rank_size, sizes.parameters / (sizes.ranks if sizes.stage == 3 else 1))]


def _shares(record: Record, rank: int) -> dict[str, float]:
    """Return the elements of each kind of state that a rank holds, as far as the record says."""
    observed = record.observed
    sizes, rank_size = _sizes(record), _rank_size(record, rank)
    is_whole = sizes.trained == sizes.parameters  # else nobody knows which frozen parameters a rank holds
    shares: dict[str, float] = {}
    if not observed.second_partition_parameters:  # hpZ holds some of them twice
        shares["weights"] = rank_size
    if is_whole and observed.offload_optimizer == "none":
        shares["gradients"] = rank_size
    share = sizes.trained / (sizes.ranks if sizes.stage else 1)
    if observed.tensor_ranks:
        share = rank_size / (sizes.ranks // observed.tensor_ranks)
    if observed.fsdp and observed.held_parameters_per_rank:
        share = rank_size
    if observed.optimizer in ADAM and (is_whole or not observed.fsdp):
        shares |= {"master": share, "moments": 2 * share}
    return shares


def _rank_size(record: Record, rank: int) -> int:
    """Return the parameters that a rank holds. A virtual run records those of the first rank only."""
    per_rank = record.observed.held_parameters_per_rank
    return per_rank[rank] if rank < len(per_rank) else _sizes(record).parameters


def _saved(record: Record) -> Limits:
    """Saved files hold each trained weight once."""
    saved = record.observed.saved
    if saved is None:
        return []
    sizes = [ELEMENT_BYTES.get(dtype, 8) for dtype in saved.dtypes] or [1, 8]
    most = saved.parameters * max(sizes) * (1 + EXACT) + HEADER_BYTES
    return [
        ("the number of saved weights", saved.parameters, _sizes(record).trained, None),
        ("the bytes of the saved weights", saved.bytes, saved.parameters * min(sizes), most),
    ]


# --- bytes that were moved -----------------------------------------------------------------------------------------


def _traffic(record: Record, rank: int, counts: dict[str, Collective]) -> Limits:
    """Calls move bytes. Gradients are reduced as often as in a step; FSDP2 pads each of them."""
    observed, sizes = record.observed, _sizes(record)
    limits: Limits = []
    for kind, moved in counts.items():
        limits += [(f"rank {rank}: {kind} by dtype", sum(moved.bytes_by_dtype.values()), moved.bytes, moved.bytes)]
        limits += [(f"rank {rank}: the calls of {kind}", moved.calls, int(moved.bytes > 0), moved.bytes)]
    gradients = _moved(counts, GRADIENTS)
    reduced = sizes.passes if sizes.stage > 1 else 1
    about = f"rank {rank}: what {', '.join(GRADIENTS)} moved"
    if observed.tensor_ranks:  # sums of activations come on top
        return [*limits, (about, gradients, reduced * _rank_size(record, rank) * (1 - PADDING) - SMALL_ELEMENTS, None)]
    if observed.fsdp:
        return limits
    expected = reduced * sizes.trained
    if sizes.ranks > 1 or gradients > expected:
        limits += [_elements(about, gradients, expected)]
    return limits


def _moved(counts: dict[str, Collective], kinds: Iterable[str]) -> float:
    """Return the elements that collectives of these kinds moved."""
    sizes = [counts[kind].bytes_by_dtype.items() for kind in kinds if kind in counts]
    return sum(size / ELEMENT_BYTES.get(dtype, 1) for dtype, size in itertools.chain.from_iterable(sizes))


def _kernel(record: Record) -> Limits:
    """The kernel saw the counted bytes written."""
    written = record.traffic.kernel_bytes_written
    return [
        ("what the kernel saw written", seen, (1 - KERNEL) * sent, (1 + KERNEL) * sent + LOG_LINES_BYTES)
        for sent, seen in zip(metrics.wire_bytes_per_rank(record), written, strict=False)
        if sent
    ]


# --- times ---------------------------------------------------------------------------------------------------------


def _wall(record: Record) -> Limits:
    """All timed work lies between the start and the end of the run."""
    timed_s = (record.time.setup_s or 0) + sum(record.time.step_s or [each.training_s for each in record.observed.runs])
    return [("the time of set-up and steps in s", timed_s, None, (record.wall_s or 0) * 1.01 + 0.1)]


def _times(record: Record) -> Limits:
    """The steps fill the timed windows. A step's time is its slowest rank's, so their sum may be more."""
    steps_s = sum(record.time.step_s)
    least_s = steps_s / (1 if record.is_virtual else _sizes(record).ranks)
    window_s = metrics.timed_s(record) if steps_s else None
    about = "the time of the timed windows in s"
    return [
        ("the number of timed steps", len(record.time.step_s), None, record.observed.steps),
        (about, window_s, least_s * (1 - ROUNDING), steps_s * (1 + ROUNDING)),
    ]


def _speed(record: Record, reached: float | None) -> Limits:
    """No GPU is faster than its datasheet says, and than it was measured to be."""
    limits = (metrics.peak_flops_per_s(record), reached)
    return [("FLOP/s of a rank", metrics.flops_per_s(record), None, most) for most in limits]
