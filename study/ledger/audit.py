"""Audit of records before they count as evidence: what was measured twice must agree, and nothing may be impossible.

It looks for the faults of published benchmarks: counts of several steps, the first rank alone, half a step read as a
whole one, an empty run counted as a success, another training than the requested one, a run or a seed copied.

A check returns a list of faults, in words; None in it is no fault. Unknown values are no faults.
"""

import functools
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.predictor.architecture import FAMILIES, describe, flops_per_row, parameters
from study.records import metrics, store
from study.records.metrics import ELEMENT_BYTES
from study.records.runs import Run
from study.records.schema import Collective, Record
from study.spec import arms, optimizers
from study.spec.settings import AUTOCAST, HALF_WEIGHTS
from study.spec.shapes import SHAPES, VOCABULARY

Faults = list[str | None]
ROUNDING = 1e-6  # for numbers that differ only in the order of additions
PADDING = 0.05  # stage 3 pads what it gathers, and allocators round sizes up
EXACT, EXACT_ELEMENTS = 0.01, 2000  # parts are padded to equal sizes, by at most 126 elements in any kept record
SMALL_ELEMENTS = 100_000  # a tolerance for small collectives besides weights and gradients
KERNEL, LOG_LINES_BYTES = 0.02, 2**16  # tolerances of the kernel's count, which includes frames and log lines
LINK, HEADERS = 0.02, 0.1  # tolerances of an emulated link: a burst at the start; headers and acknowledgements
CHANCE = (0.75, 1.5)  # first loss over the loss of a guess, with random weights (0.94 to 1.02 in kept records)
MOST_WATTS = 3000  # more than one GPU can draw
MUON_GATHERS = 6  # stage 3: whole gradients and momenta, and both again for each matrix, padded in its round
WALL_SINCE = 3  # the first MEASURE_VERSION with time.window_s
DRAWN = ("random", "in_place")
ADAM = ("AdamW", "MasterAdamW", "DeepSpeedCPUAdam")  # two moments of an element each
GRADIENTS, WEIGHTS = ("all_reduce", "reduce_scatter", "reduce"), ("all_gather", "broadcast")  # collectives of each
PROFILERS = ("wall_clock_breakdown", "flops_profiler", "comms_logger", "memory_breakdown")
NEEDED = {
    "requested": ("model", "data", "precision", "micro_batch", "accumulation", "sequence"),
    "observed": ("ranks", "steps", "parameters", "rows_per_step", "tokens_per_step"),
}


# --- faults in words -----------------------------------------------------------------------------------------------


def wrong(is_wrong: object, words: str) -> str | None:
    return words if is_wrong else None


def equal(what: str, found: object, expected: object) -> str | None:
    return wrong(found != expected, f"{what} is {found!r}, but should be {expected!r}")


def at_most(what: str, found: float | None, limit: float | None, owner: str) -> str | None:
    if found is None or limit is None or found <= limit:
        return None
    return f"{what} is {found:.6g}, more than {owner}, {limit:.6g}"


def at_least(what: str, found: float | None, limit: float | None, owner: str) -> str | None:
    if found is None or limit is None or found >= limit:
        return None
    return f"{what} is {found:.6g}, less than {owner}, {limit:.6g}"


def near(what: str, found: float, expected: float, within: float = ROUNDING) -> str | None:
    return wrong(not same(found, expected, within), f"{what} is {found:.6g}, but should be {expected:.6g}")


def elements(what: str, found: float, expected: float) -> str | None:
    """Return a fault if two numbers of elements are not equal, but for the padding of parts."""
    padded = abs(found - expected) <= EXACT * expected + EXACT_ELEMENTS
    return wrong(not padded, f"{what} is {found:.6g} elements, but should be {expected:.6g}")


def same(a: float, b: float, within: float = ROUNDING) -> bool:
    return math.isclose(a, b, rel_tol=within, abs_tol=0)


# --- one record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The numbers of a finished training that the checks compute with."""

    ranks: int
    writers: int  # ranks that report; of virtual ranks only the first one runs
    steps: int
    passes: int
    micro_batch: int
    sequence: int
    rows: int  # in a step
    parameters: int
    trained: int  # parameters
    stage: int
    sharers: int  # ranks that read the same rows: they share each row or divide the layers
    divided: int  # ranks that divide each layer among themselves
    replicas: int  # groups of ranks that hold the same; hybrid sharding has several
    sharing: int  # ranks in such a group


def size_of(record: Record) -> Size | None:
    """Return the numbers that the checks need; None if one is missing."""
    requested = record.requested
    observed = record.observed
    needed = (observed.ranks, observed.steps, requested.accumulation, requested.micro_batch, requested.sequence)
    ranks, steps, passes, micro_batch, sequence = needed
    rows = observed.rows_per_step
    count = observed.parameters
    if not (ranks and steps and passes and micro_batch and sequence and rows and count):
        return None
    divided = observed.tensor_ranks or 1
    mesh = (observed.fsdp or {}).get("mesh") or [[]]
    replicas, sharing = mesh[0] if len(mesh[0]) == 2 else (1, ranks)
    return Size(
        ranks=ranks,
        writers=1 if record.is_virtual else ranks,
        steps=steps,
        passes=passes,
        micro_batch=micro_batch,
        sequence=sequence,
        rows=rows,
        parameters=count,
        trained=observed.trained_parameters or count,
        stage=observed.stage or 0,
        sharers=(observed.sequence_ranks or 1) * divided,
        divided=divided,
        replicas=replicas,
        sharing=sharing,
    )


def faults(record: Record, reached: float | None = None) -> list[str]:
    """Return why a finished run is not evidence, in words. Empty if it is evidence.

    `reached`: FLOP/s that matrix products were measured to reach on the same device.
    """
    if record.status != "done":
        return []
    found = _wall(record)
    size = size_of(record)
    if record.is_script:
        found += _script(record)
    elif size is None or any(_missing(record)):  # the other checks compute with these values
        found += _missing(record)
    else:
        for check in CHECKS:
            found += check(record, size)
        found += _speed(record, reached)
    return [fault for fault in found if fault]


def _missing(record: Record) -> Faults:
    found: Faults = []
    for part, names in NEEDED.items():
        for name in names:
            value = getattr(getattr(record, part), name)
            known = isinstance(value, str) or (value is not None and value > 0)
            found.append(wrong(not known, f"{part}.{name} is {value} in a finished run"))
    return found


def _wall(record: Record) -> Faults:
    """All timed work lies between the start and the end of the run."""
    wall_s = record.wall_s
    time = record.time
    if wall_s is None:
        return [f"{record.started_utc} to {record.finished_utc} is not a span of time"]
    timed_s = (time.setup_s or 0) + sum(time.step_s or [each.training_s for each in record.observed.runs])
    return [at_most("the time of set-up and steps in s", timed_s, wall_s * 1.01 + 0.1, "that of the run")]


def _script(record: Record) -> Faults:
    """Each training of the published script did something."""
    trainings = record.observed.runs
    found = [wrong(not trainings, "the script is done, but no training is recorded")]
    for number, each in enumerate(trainings, start=1):
        found.append(wrong(not each.steps or not each.losses, f"training {number} took no step, or has no loss"))
        found.append(wrong(not each.training_s or each.peak_bytes == 0, f"training {number} took no time, or memory"))
    return found


def _trained(record: Record, size: Size) -> Faults:
    """A run that did nothing is not a success."""
    losses = record.loss.train
    time = record.time
    evals = record.loss.eval
    found = [
        wrong(record.requested.init != "none" and not time.step_s, "the run is done, but no step was timed"),
        at_most("the number of timed steps", len(time.step_s), size.steps, "that of all steps"),
        at_most(
            "the last evaluated step", max((each.step for each in evals), default=None), size.steps, "the last one"
        ),
        at_most("the accuracy", max((each.accuracy or 0 for each in evals), default=None), 1, "all"),
    ]
    if record.energy.steps is not None and time.step_s:
        found.append(equal("the number of steps of the energy", record.energy.steps, len(time.step_s)))
    for each in evals:
        power = math.exp(min(each.eval_loss, 700))
        found.append(None if each.perplexity is None else near("the perplexity", each.perplexity, power))
    if record.is_virtual:
        return [*found, wrong(losses or evals, "the run is virtual, but has a loss")]
    found.append(equal("the number of losses", len(losses), size.steps))
    found.append(at_least("the smallest loss", min(losses, default=None), 0, "any loss"))
    found.append(wrong(len(losses) > 2 and len(set(losses)) == 1, "the loss is the same at every step"))
    guess = _loss_of_a_guess(record)
    if guess and losses:
        found.append(at_least("the first loss", losses[0], CHANCE[0] * guess, "that of a guess"))
        found.append(at_most("the first loss", losses[0], CHANCE[1] * guess, "that of a guess"))
    return found


def _loss_of_a_guess(record: Record) -> float | None:
    """Return the loss of random weights; None if the weights are not random."""
    requested = record.requested
    choices: int | None = 2
    if requested.task == "wikitext":
        choices = SHAPES.get(requested.model or "", {}).get("vocab_size")
        if choices is None and requested.data == "embedded":
            choices = VOCABULARY
    return math.log(choices) if choices and requested.init in DRAWN else None


def _settings(record: Record, size: Size) -> Faults:
    """The observed training is the requested one, also by DeepSpeed's config, the batch and the command line."""
    requested = record.requested
    observed = record.observed
    precision = requested.precision or ""
    expected = {name: getattr(requested, name) for name in ("accumulation", "checkpointing", "arm", "virtual_ranks")}
    expected["compiled"] = requested.compile
    expected["autocast"] = precision if precision in AUTOCAST else None
    groups = size.ranks // size.sharers
    expected["rows_per_step"] = size.micro_batch * size.passes * groups
    expected["tokens_per_step"] = size.rows * size.sequence
    if observed.ranks_counted is not None:
        expected["ranks_counted"] = size.ranks
    arm = _arm(requested.arm or "")
    if arm:
        expected |= {name: getattr(arm, name) for name in ("stage", "offload_optimizer", "offload_param")}
        if arm.distributed_type == "DEEPSPEED":
            expected["wrapper"] = "DeepSpeedEngine"
    found = [equal(name, getattr(observed, name), value) for name, value in expected.items()]
    weights = "bfloat16" if precision in HALF_WEIGHTS else "float32"
    found.append(equal("the dtype of the weights", observed.dtypes.get("weights"), weights))
    moments = {*optimizers.moments_dtypes(requested.optimizer, precision), None}  # None: on the disk
    found.append(_one_of("the dtype of the moments", observed.dtypes.get("moments"), moments))
    if arm:
        found.append(_one_of("the optimizer", observed.optimizer, optimizers.classes(requested.optimizer, arm)))
        found.append(wrong(arm.fsdp and observed.fsdp is None, "the arm is sharded by FSDP2, but none was observed"))
    file = Path(requested.config_file or "").stem
    found.append(
        wrong(file and requested.arm and file != requested.arm, f"the arm is {requested.arm}, its file {file}")
    )
    return [*found, *_deepspeed(record, size)]


def _one_of(what: str, found: object, expected: Iterable) -> str | None:
    known = sorted(map(str, expected))
    return wrong(str(found) not in known, f"{what} is {found}, but should be {' or '.join(known)}")


@functools.lru_cache
def _arm(name: str) -> arms.Arm | None:
    """Return None if this repository does not have the arm, or no longer has it."""
    path = arms.all_paths().get(name)
    try:
        return arms.read(path) if path else None
    except Stop:
        return None


def _deepspeed(record: Record, size: Size) -> Faults:
    """The config that DeepSpeed resolved agrees with its objects, and no profiler was on."""
    observed = record.observed
    config = observed.deepspeed
    if config is None:
        return [wrong(observed.wrapper == "DeepSpeedEngine", "DeepSpeed's resolved config is not recorded")]
    zero = _section(config.get("zero_optimization"))
    homes = record.memory.components
    found = [
        equal("the stage of the objects", observed.stage, zero.get("stage", 0)),
        equal("the clipping of the objects", observed.clipping, config.get("gradient_clipping", observed.clipping)),
    ]
    for name, home in (("offload_optimizer", homes.optimizer_home), ("offload_param", homes.weights_home)):
        real = getattr(observed, name)
        found.append(equal(f"{name} of the objects", real, _section(zero.get(name)).get("device", "none")))
        found.append(None if home is None else equal(f"the measured home of {name}", home, real))
    counts = {"train_micro_batch_size_per_gpu": size.micro_batch, "gradient_accumulation_steps": size.passes}
    for key, value in counts.items():
        if isinstance(config.get(key), int):
            found.append(equal(f"DeepSpeed's {key}", config[key], value))
    for name in PROFILERS:
        is_on = config.get(name) is True or _section(config.get(name)).get("enabled")
        found.append(wrong(is_on, f"DeepSpeed's {name} was on, which adds synchronisation"))
    return found


def _section(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _memory(record: Record, size: Size) -> Faults:
    """Parts fit into wholes, and no process holds more than its device or host has.

    `device_used` is read at the end, when part of the reserved peak may be free again: those two are not compared.
    """
    devices = record.hardware.devices
    hosts = [record.hardware, *(machine.hardware for machine in record.machines)]
    host = max((each.host_memory_bytes or 0 for each in hosts), default=0) or None
    found: Faults = []
    for number, rank in enumerate(record.memory.per_rank):
        device = devices[number % len(devices)].memory_bytes if devices else None
        about = f"rank {number}: "
        found += [
            at_most(f"{about}peak_allocated", rank.peak_allocated_bytes, rank.peak_reserved_bytes, "peak_reserved"),
            at_most(f"{about}peak_reserved", rank.peak_reserved_bytes, device, "the device has"),
            at_most(f"{about}device_used", rank.device_used_bytes, device, "the device has"),
            at_most(f"{about}host_peak", rank.host_peak_bytes, host, "the host has"),
        ]
    return [*found, *_components(record)]


def _components(record: Record) -> Faults:
    found: Faults = []
    on_cpu = record.observed.device == "cpu" and not record.is_virtual and record.requested.init != "none"
    parts = record.memory.components.per_rank
    for number, part in enumerate(parts):
        tracked = part.tracked_peak_bytes
        about = f"rank {number}: "
        after = sum(part.after_step.values())
        found.append(at_most(f"{about}the sum of components after_step", after, tracked, "the tracked peak"))
        if part.at_peak is not None:
            total = sum(part.at_peak.values())
            found.append(equal(f"{about}the sum of components at_peak", total, tracked))
        if number < len(record.memory.per_rank):
            rank = record.memory.per_rank[number]
            of_process = rank.host_peak_bytes if on_cpu else None
            held = tracked / (1 + PADDING)
            found.append(at_most(f"{about}tracked_peak", held, rank.peak_allocated_bytes, "the allocator's peak"))
            found.append(at_most(f"{about}tracked_peak", held, of_process, "the process's peak"))
    return found


def _all_ranks(record: Record, size: Size) -> Faults:
    """Every rank has reported: the first rank need not hold the most."""
    reported = {
        "memory": len(record.memory.per_rank),
        "traffic": len(record.traffic.per_rank),
        "components": len(record.memory.components.per_rank),
        "held_parameters": len(record.observed.held_parameters_per_rank),
    }
    return [equal(f"the number of ranks with {name}", count, size.writers) for name, count in reported.items() if count]


def _shares(record: Record, size: Size) -> Faults:
    """Each rank holds its share of the parameters, of Adam's two moments and of the master weights."""
    observed = record.observed
    held = observed.held_parameters_per_rank
    found: Faults = []
    if observed.fsdp and held:  # FSDP2 divides by rows, so the last ranks may have fewer
        if len(held) == size.ranks:
            found.append(elements("what all ranks hold", sum(held), size.parameters * size.replicas))
        largest = max(held) + EXACT_ELEMENTS
        found.append(at_least("what the largest rank holds", largest, size.parameters / size.sharing, "its share"))
    for number, count in enumerate(held):
        about = f"rank {number}: the held parameters"
        if size.divided > 1:  # each rank has a part of the layers, and whole norms and embeddings
            found.append(at_least(about, count, size.parameters / size.divided, "the share of its layers"))
            found.append(at_most(about, count, size.parameters - 1, "a part of all"))
        elif not observed.fsdp:
            found.append(elements(about, count, size.parameters / (size.ranks if size.stage == 3 else 1)))
    for number, part in enumerate(record.memory.components.per_rank):
        share = _share_of_states(record, size, number)
        for name, times in (("moments", 2), ("master", 1)):
            size_bytes = (part.at_peak or {}).get(name)  # None: on the disk, or the weights are their own master
            in_fp32 = observed.dtypes.get(name) == "float32" and observed.optimizer in ADAM
            if size_bytes and in_fp32 and share is not None:
                found.append(elements(f"rank {number}: the share of {name}", size_bytes / 4 / times, share))
    return found


def _share_of_states(record: Record, size: Size, rank: int) -> float | None:
    """Return the parameters whose optimizer states a rank holds; None if the record does not say."""
    if record.observed.fsdp and record.observed.held_parameters_per_rank:
        whole = size.trained == size.parameters  # else nobody knows which frozen parameters a rank holds
        return record.observed.held_parameters_per_rank[rank] if whole else None
    if size.divided > 1:
        return _held(record, size, rank) / (size.ranks // size.divided)
    return size.trained / (size.ranks if size.stage else 1)


def _held(record: Record, size: Size, rank: int) -> int:
    """Return the parameters that a rank holds. A virtual run records those of the first rank only."""
    held = record.observed.held_parameters_per_rank
    return held[rank] if rank < len(held) else size.parameters


def _collectives(record: Record, size: Size) -> Faults:
    """The collectives are those of one step of the arm, in the dtypes of its weights and gradients."""
    found: Faults = []
    for number, counts in enumerate(record.traffic.per_rank):
        for kind, moved in counts.items():
            by_dtype = sum(moved.bytes_by_dtype.values())
            found.append(equal(f"rank {number}: {kind} by dtype", by_dtype, moved.bytes))
            found.append(wrong(moved.bytes and not moved.calls, f"rank {number}: {kind} moved bytes without a call"))
        found += _amounts(record, size, number, counts)
        found += _kinds(record, size, number, counts)
    return found


def _amounts(record: Record, size: Size, number: int, counts: dict[str, Collective]) -> Faults:
    """Gradients are reduced, and weights gathered, as often as in a step."""
    reduced, gathered = _times_in_a_step(record, size)
    gradients = _elements(counts, GRADIENTS)
    about = f"rank {number}: what {', '.join(GRADIENTS)} moved"
    if record.observed.tensor_ranks:  # sums of activations, and gathered logits, come on top of what is counted here
        least = reduced * _held(record, size, number)
        return [at_least(about, gradients, least * (1 - PADDING) - SMALL_ELEMENTS, "the gradients of a step")]
    whole = size.parameters
    held = record.observed.held_parameters_per_rank
    if record.observed.fsdp and held:  # it pads each parameter, and the first rank holds a whole part
        whole = held[0] * size.sharing
    most = gathered * whole * (1 + PADDING) + SMALL_ELEMENTS
    weights = f"rank {number}: what {', '.join(WEIGHTS)} moved"
    found = [at_most(weights, _elements(counts, WEIGHTS), most, "the weights of a step")]
    expected = reduced * (whole if size.trained == size.parameters else size.trained)
    if size.ranks > 1 or gradients > expected:
        found.append(elements(about, gradients, expected))
    return found


def _times_in_a_step(record: Record, size: Size) -> tuple[float, int]:
    """Return how often a step reduces each gradient, and gathers each weight."""
    reduced: float = size.passes if size.stage > 1 else 1
    gathered = 1
    if size.stage == 3:  # for each forward and each backward pass, and once after the update
        gathered = 2 * size.passes + 1
    if record.observed.fsdp:  # not after the update; through Accelerate it reduces in the last pass of a step alone
        gathered = 2 * size.passes
    if size.replicas > 1:  # each rank's part, between the groups
        reduced += 1 / size.sharing
    if record.requested.optimizer == "muon" and size.stage == 3:
        gathered += MUON_GATHERS
    return reduced, gathered


def _elements(counts: dict[str, Collective], kinds: Iterable[str]) -> float:
    """Return the elements that collectives of these kinds moved."""
    dtypes = [counts[kind].bytes_by_dtype for kind in kinds if kind in counts]
    return sum(size / ELEMENT_BYTES.get(dtype, 1) for sizes in dtypes for dtype, size in sizes.items())


def _kinds(record: Record, size: Size, number: int, counts: dict[str, Collective]) -> Faults:
    observed = record.observed
    gathered = _elements(counts, WEIGHTS)
    found: Faults = []
    if observed.wrapper == "DistributedDataParallel":
        found.append(at_most(f"rank {number}: what DDP gathers", gathered, size.parameters / 2, "half of the weights"))
    if observed.tensor_ranks:
        return found  # between two ranks nothing but logits is gathered
    scatters = (size.stage == 3 and record.requested.optimizer != "muon") or observed.fsdp  # Muon takes whole gradients
    lacks = scatters and "reduce_scatter" not in counts
    found.append(wrong(lacks, f"rank {number}: stage 3 and FSDP scatter gradients, but no reduce_scatter was seen"))
    if size.stage in (1, 2):
        if size.ranks > 1:
            found.append(elements(f"rank {number}: what stage {size.stage} gathers", gathered, size.trained))
        moved = [counts[kind].bytes_by_dtype for kind in WEIGHTS if kind in counts]
        sizes = [(size_bytes, dtype) for by_dtype in moved for dtype, size_bytes in by_dtype.items()]
        if sizes:
            dtype = max(sizes)[1]
            found.append(equal(f"rank {number}: the dtype that was gathered", dtype, observed.dtypes.get("weights")))
    return found


def _network(record: Record, size: Size) -> Faults:
    """The kernel saw the counted bytes written, and an emulated link carried no more than it can."""
    moved = record.traffic
    sent = metrics.wire_bytes_per_rank(record)
    found: Faults = []
    for number, (counted, written) in enumerate(zip(sent, moved.kernel_bytes_written, strict=False)):
        if counted and written is not None:
            about = f"rank {number}: what the kernel saw written"
            found.append(at_least(about, written, (1 - KERNEL) * counted, "what was counted"))
            found.append(at_most(about, written, (1 + KERNEL) * counted + LOG_LINES_BYTES, "what was counted"))
    seen = record.observed.network
    hosts = record.requested.hosts
    if not hosts:
        return found
    if seen is None or seen.hosts != hosts or len(moved.per_link) != hosts or not moved.link_steps:
        return [*found, f"{hosts} emulated hosts were requested, but the record does not have the links of so many"]
    by_ranks = sum(each for each in sent if each is not None) or None
    room = seen.bandwidth_mbit and (1 + LINK) * seen.bandwidth_mbit * (metrics.timed_s(record) or 0)
    for number, link in enumerate(moved.per_link):
        of_step = link.sent_bytes / moved.link_steps / (1 + HEADERS)
        found.append(at_most(f"link {number}: sent Mbit", link.sent_bytes * 8e-6, room, "its bandwidth allows"))
        found.append(at_most(f"link {number}: bytes a step", of_step, by_ranks, "all ranks sent"))
    return found


def _times(record: Record, size: Size) -> Faults:
    """The steps fill the timed windows. A step's time is its slowest rank's, so their sum may be more."""
    time = record.time
    if not time.step_s:
        return []
    lacks = record.measure_version >= WALL_SINCE and time.window_s is None
    window_s = metrics.timed_s(record) or 0
    steps_s = sum(time.step_s)
    about = "the time of the timed windows in s"
    return [
        wrong(lacks, "the wall time of the timed windows is not recorded"),
        at_most(about, window_s, steps_s * (1 + ROUNDING), "that of their steps"),
        at_least(about, window_s, steps_s / size.writers * (1 - ROUNDING), "that of their steps on each rank"),
    ]


def _model(record: Record, size: Size) -> Faults:
    """Operations and parameters are the model's own. Operations that checkpointing repeats count once."""
    requested = record.requested
    flops = record.time.flops_per_rank_and_step
    shape = SHAPES.get(requested.model or "", {})
    own_vocabulary = requested.data == "embedded" or shape.get("vocab_size") is not None
    adapted = requested.lora_rank or requested.train_only  # adapters come on top; frozen weights need no gradient
    if flops is None or adapted or not own_vocabulary or shape.get("model_type") not in FAMILIES:
        return []  # other families have no formulas
    count, per_row = _shape(requested.model or "", size.sequence)
    expected = per_row * size.micro_batch * size.passes / size.sharers
    about = f"the operations of {requested.model} for a rank and step"
    return [equal(f"the parameters of {requested.model}", size.parameters, count), near(about, flops, expected, 0.01)]


@functools.lru_cache
def _shape(model: str, sequence: int) -> tuple[int, int]:
    architecture = describe(model, vocabulary=VOCABULARY)
    return parameters(architecture), flops_per_row(architecture, sequence)


def _speed(record: Record, reached: float | None) -> Faults:
    """No GPU is faster than it was measured to be, or takes more power."""
    seconds = metrics.timed_s(record)
    most_joules = MOST_WATTS * seconds if seconds else None
    joules = record.energy.joules_per_rank
    flops_per_s = metrics.flops_per_s(record)
    return [
        *[at_most(f"rank {number}: joules", each, most_joules, "a GPU takes") for number, each in enumerate(joules)],
        at_most("FLOP/s of a rank", flops_per_s, metrics.peak_flops_per_s(record), "the peak of the GPU's datasheet"),
        at_most("FLOP/s of a rank", flops_per_s, reached, "a matrix product on this device reaches"),
    ]


CHECKS: tuple[Callable[[Record, Size], Faults], ...] = (
    *(_trained, _settings, _memory, _all_ranks, _shares, _collectives, _network, _times, _model),
)


def steps_file(record: Record, folder: Path) -> list[str]:
    """Return how the `steps.jsonl` beside a record disagrees with it, if there is one."""
    path = folder / "steps.jsonl"
    if record.status != "done" or record.is_virtual or record.is_script or not path.is_file():
        return []
    try:
        losses, evals = _curves(files.read_below(folder, path.name, store.MAX_BYTES))
    except OSError as error:
        return [f"steps.jsonl cannot be read: {files.why(error)}"]
    except (ValueError, TypeError, KeyError):
        return ["steps.jsonl cannot be read"]
    for step, (ours, theirs) in enumerate(itertools.zip_longest(losses, record.loss.train), start=1):
        if ours is None or theirs is None or not same(ours, theirs):
            return [f"steps.jsonl has another loss at step {step}"]
    if evals != [(each.step, each.eval_loss) for each in record.loss.eval]:
        return ["steps.jsonl has other evaluations"]
    return []


def _curves(content: bytes) -> tuple[list[float], list[tuple[int, float]]]:
    """Return the losses and evaluations of the last launch into a folder: it begins again with step 1."""
    losses: list[float] = []
    evals: list[tuple[int, float]] = []
    for line in map(texts.from_json, content.decode().splitlines()):
        if line["step"] == 1 and "loss" in line:
            losses.clear()
            evals.clear()
        if "loss" in line:
            losses.append(line["loss"])
        elif "eval_loss" in line:
            evals.append((line["step"], line["eval_loss"]))
    return losses, evals


# --- records against each other ------------------------------------------------------------------------------------
# If they disagree, the sealed ones are believed. If none or all are sealed, the median is believed.

SAME_WEIGHTS = ("task", "model", "data", "tokenizer", "precision", "init", "seed", "lora_rank", "train_only")
SAME_FIRST_LOSS = (
    *("task", "model", "data", "tokenizer", "precision", "init", "seed", "sequence", "micro_batch"),
    *("accumulation", "ranks", "dropout", "attention", "checkpointing", "compile"),
)
# The largest differences in the kept records are 0.5 % (stage 3 draws the weights in parts), 0, 0, and 85 %.
WITHIN = {"the first loss": 0.05, "what a step moves": 1e-6, "the tracked peak": 0.01, "the median step": 4.0}


def disagreements(runs: Iterable[Run]) -> dict[Run, list[str]]:
    """Return why finished runs that disagree with others are not evidence, in words."""
    compared = [run for run in runs if run.done and not run.record.is_script]
    found: dict[Run, list[str]] = defaultdict(list)
    for check in (_copies, _seeds, _weights, _outliers):
        for run, words in check(compared):
            found[run].append(words)
    return found


def _groups(runs: list[Run], key: Callable[[Run], Hashable | None]) -> list[list[Run]]:
    """Return groups of two or more runs with an equal key. Runs whose key is None are in no group."""
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return [group for value, group in groups.items() if value is not None and len(group) > 1]


def _doubtful(group: list[Run]) -> list[Run]:
    """Return the runs of which one must be wrong: those that are not sealed, or all if none or all are sealed."""
    unsealed = [run for run in group if not run.sealed]
    return unsealed if len(unsealed) < len(group) else group


def _other(run: Run, group: list[Run]) -> str:
    return next(each.name for each in group if each is not run)


def _several(values: list[float]) -> tuple[float, ...] | None:
    return tuple(values) if len(values) > 1 else None


def _drawn_weights(run: Run) -> str | None:
    return run.record.observed.weights_checksum if run.record.requested.init in DRAWN else None


def _copies(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """No two runs take exactly the same times."""
    for group in _groups(runs, lambda run: _several(run.record.time.step_s)):
        for run in _doubtful(group):
            yield run, f"its step times are those of {_other(run, group)}"


def _seeds(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Another seed gives another curve, and other weights if they are drawn."""
    same_losses = _groups(runs, lambda run: _several(run.record.loss.train))
    same_weights = _groups(runs, _drawn_weights)
    for what, groups in (("losses", same_losses), ("initial weights", same_weights)):
        for group in groups:
            for run in _of_other_seeds(group):
                yield run, f"its {what} are those of another seed, in {_other(run, group)}"


def _of_other_seeds(group: list[Run]) -> list[Run]:
    """Return the doubtful runs of a group that must have one seed. Arms of a seed may well have equal losses."""
    seeds = Counter(run.record.requested.seed for run in group).most_common(2)
    if len(seeds) < 2:
        return []
    (most, times), (_, fewer) = seeds
    doubtful = _doubtful(group)
    if len(doubtful) == len(group) and times > fewer:
        return [run for run in group if run.record.requested.seed != most]
    return doubtful


def _weights(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Runs that have to start from the same weights do so, in every arm. This is checked before losses are compared."""

    def key(run: Run) -> tuple | None:
        software = tuple(run.record.software.get(name) for name in ("torch", "transformers"))  # they draw the weights
        return (run.key(only=SAME_WEIGHTS), software) if run.record.observed.weights_checksum else None

    for group in _groups(runs, key):
        sums = {run: run.record.observed.weights_checksum for run in group}
        counts = Counter(sums[run] for run in group if run.sealed) or Counter(sums.values())
        (most, times), *others = counts.most_common(2)
        believed = most if not others or times > others[0][1] else None  # None: a tie
        for run in group:
            other = next((each for each in group if sums[each] != sums[run]), None)
            if sums[run] != believed and other:
                yield run, f"it starts from other weights than {other.name}, which has the same seed"


def _outliers(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """Numbers that have to agree do so: between arms that begin with the same weights and rows, and between repeats."""
    alike = _groups(runs, lambda run: run.key(only=SAME_FIRST_LOSS))
    repeats = _groups(runs, lambda run: (run.key(without=["seed"]), str(run.machine)))
    for group in alike:
        yield from _far("the first loss", {run: run.record.loss.train[0] for run in group if run.record.loss.train})
    for group in repeats:
        yield from _far("what a step moves", {run: sum(run.traffic.values()) for run in group if run.traffic})
        yield from _far("the tracked peak", {run: run.tracked_bytes for run in group if run.tracked_bytes is not None})
        steps = {run: statistics.median(run.record.time.step_s) for run in group if run.record.time.step_s}
        yield from _far("the median step", steps)


def _far(what: str, numbers: dict[Run, float]) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose number is far from the median of those that are believed."""
    if len(numbers) < 2:
        return
    believed = [number for run, number in numbers.items() if run.sealed] or list(numbers.values())
    middle = statistics.median(believed)
    for run, number in numbers.items():
        if max(number, middle) > (1 + WITHIN[what]) * min(number, middle):
            yield run, f"{what} is {number:.4g}, but {middle:.4g} in runs that have to agree"
