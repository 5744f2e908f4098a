"""Audit of a record before it counts as evidence: numbers that can be computed in two ways must agree.

The faults are those of published benchmarks: a total divided by the mean step, ranks averaged instead of added, a peak
of sparse operations, half a step read as a whole step, counts of several steps, an empty run counted as a success.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from study.errors import Stop
from study.inputs import files, texts
from study.machine.gpus import GPUS, peak_flops
from study.records import store
from study.records.metrics import ELEMENT_BYTES, gloo_wire_bytes
from study.records.schema import Observed, Record, Time
from study.spec import arms, optimizers
from study.spec.settings import AUTOCAST, HALF_WEIGHTS
from study.spec.shapes import SHAPES, VOCABULARY
from study.theory.architecture import FAMILIES, describe, flops_per_row, parameters

ROUNDING = 1e-6  # of numbers that differ only in the order of adding
PADDING = 0.05  # of what stage 3 gathers and of what an allocator rounds up
SMALL_ELEMENTS = 100_000
EXACT, EXACT_ELEMENTS = 0.01, 2000  # parts are padded to equal sizes, by at most 126 elements in any kept record
KERNEL, LOG_LINES_BYTES = 0.02, 2**16  # of what the kernel counts: frames and log lines on top
LINK, HEADERS = 0.02, 0.1  # of an emulated link: a burst at the start; packets' headers and acknowledgements
CHANCE = (0.75, 1.5)  # of the loss of a guess: where a model with random weights begins (0.94 to 1.02 in kept records)
DRAWN = ("random", "in_place")
CORE_FLOPS_PER_S = {"fp32": 5e11, None: 1e13}  # of a CPU's core: twice what AVX-512 can do, and what AMX can
MOST_WATTS = 3000  # of one GPU
DATASHEET = 0.1  # of a GPU's memory: what its driver keeps
WALL_SINCE = 3  # the first MEASURE_VERSION with time.window_s
PROFILERS = ("wall_clock_breakdown", "flops_profiler", "comms_logger", "memory_breakdown")
NEEDED = {
    "requested": ("model", "data", "precision", "micro_batch", "accumulation", "sequence"),
    "observed": ("ranks", "steps", "parameters", "rows_per_step", "tokens_per_step"),
}
MEASURED = {"loss": True, "time": True, "memory": True, "traffic": True, "energy": True, "observed": {"runs"}}
NESTED_MEMORY = (("peak_allocated", "peak_reserved"), ("peak_reserved", "the device"), ("device_used", "the device"))
ADAM = ("AdamW", "MasterAdamW", "DeepSpeedCPUAdam")  # two moments of an element each
MUON_GATHERS = 6  # stage 3: whole gradients and momenta, and both again for each matrix, padded in its round
GRADIENTS, WEIGHTS = ("all_reduce", "reduce_scatter", "reduce"), ("all_gather", "broadcast")  # what they move


def faults(record: Record, reached: float | None = None) -> list[str]:
    """Why a finished run is not evidence, in words; empty if it is.

    `reached`: FLOP/s that matrix products were measured to reach on the same device.
    """
    if record.status != "done":
        return []
    if record.is_script:
        checks = (_impossible, _script, _wall)
    elif any(_lacks(record)):  # the other checks compute with what is needed
        checks = (_lacks, _impossible)
    else:
        checks = (_impossible, _did_something, _promises, _batch, _rates, _operations, _wall, _memory, _ranks, _counts)
        checks = (*checks, _curve, _engine, _states, _collectives, _device, _command)
        checks = (*checks, _kernel, _links, functools.partial(_utilization, reached=reached))
    return [fault for check in checks for fault in check(record)]


def same(a: float, b: float, within: float = ROUNDING) -> bool:
    return math.isclose(a, b, rel_tol=within, abs_tol=0)


def timed_s(time: Time) -> float:
    """The seconds that rates refer to. Before version 3 they are the sum of each step's slowest rank."""
    return sum(time.step_s) if time.window_s is None else time.window_s


def _lacks(record: Record) -> Iterator[str]:
    for part, names in NEEDED.items():
        for name in names:
            value = getattr(getattr(record, part), name)
            if value is None or (not isinstance(value, str) and not value > 0):
                yield f"{part}.{name} is {value} in a finished run"


def _impossible(record: Record) -> Iterator[str]:
    """No measured number is negative. The first that is stands for all. The schema refuses infinity and NaN."""
    numbers = _numbers(record.model_dump(include=MEASURED))
    yield from itertools.islice((f"{path} is {n}" for path, n in numbers if n < 0), 1)


def _numbers(value, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(part, f"{path}.{name}" if path else name)
    elif isinstance(value, (int, float)):
        yield path, value


def _did_something(record: Record) -> Iterator[str]:
    """A run that did nothing is not a success."""
    steps, losses = record.observed.steps, record.loss.train
    if record.requested.init != "none" and not record.time.step_s:
        yield "the run is done, but no step was timed"
    if 0 in record.time.step_s:
        yield "a step took no time"
    if record.is_virtual:
        if losses or record.loss.final_eval:
            yield "the run is virtual, but has a loss"
    elif not losses:
        yield "the run is done, but has no loss"
    elif len(losses) != steps:
        yield f"{steps} steps have {len(losses)} losses"
    elif len(losses) > 2 and len(set(losses)) == 1:
        yield "the loss is the same at every step"


def _promises(record: Record) -> Iterator[str]:
    """What was observed is what was requested."""
    requested, observed, dtypes = record.requested, record.observed, record.observed.dtypes
    expected = {name: getattr(requested, name) for name in ("accumulation", "checkpointing", "arm", "virtual_ranks")}
    expected["compiled"] = requested.compile
    expected["autocast"] = requested.precision if requested.precision in AUTOCAST else None
    if arm := _arm(requested.arm):
        expected |= {name: getattr(arm, name) for name in ("stage", "offload_optimizer", "offload_param")}
        if arm.distributed_type == "DEEPSPEED":
            expected["wrapper"] = "DeepSpeedEngine"
        if arm.fsdp and observed.fsdp is None:
            yield "the arm is sharded by FSDP2, and nothing of it was observed"
    for name, value in expected.items():
        if (real := getattr(observed, name)) != value:
            yield f"{name}: requested {value!r}, observed {real!r}"
    weights = "bfloat16" if requested.precision in HALF_WEIGHTS else "float32"
    if dtypes.get("weights") != weights:
        yield f"weights: {requested.precision} means {weights}, observed {dtypes.get('weights')}"
    promised = optimizers.moments_dtypes(requested.optimizer, requested.precision)
    if dtypes.get("moments") not in {*promised, None}:  # None: on the disk
        yield f"the optimizer's moments are {dtypes['moments']}; every arm must have {' or '.join(sorted(promised))}"
    if arm and observed.optimizer not in (classes := optimizers.classes(requested.optimizer, arm)):
        yield f"the optimizer is {observed.optimizer}, but {' or '.join(sorted(classes))} was requested"
    if observed.ranks_counted not in (None, observed.ranks):
        yield f"{observed.ranks} ranks, but {observed.ranks_counted} took part in a collective"
    for name in PROFILERS:
        section = (observed.deepspeed or {}).get(name)
        if section is True or (isinstance(section, dict) and section.get("enabled")):
            yield f"DeepSpeed's {name} was on, which adds synchronisation"


@functools.lru_cache
def _arm(name: str | None) -> arms.Arm | None:
    """None for an arm that is not, or no longer, in this repository."""
    path = arms.all_paths().get(name)
    try:
        return arms.read(path) if path else None
    except Stop:
        return None


def row_ranks(observed: Observed) -> int:
    """Ranks that read the same rows: that share them, or divide layers."""
    return (observed.sequence_ranks or 1) * (observed.tensor_ranks or 1)


def _batch(record: Record) -> Iterator[str]:
    """Ranks and accumulation are in the batch, once."""
    requested, observed, engine = record.requested, record.observed, record.observed.deepspeed or {}
    micro_batch, passes = requested.micro_batch, requested.accumulation
    groups = observed.ranks // row_ranks(observed)
    rows = micro_batch * passes * groups
    if observed.rows_per_step != rows:
        product = f"{micro_batch} rows x {passes} passes x {groups} ranks are {rows}"
        yield f"{observed.rows_per_step} rows a step, but {product}"
    if observed.tokens_per_step != observed.rows_per_step * requested.sequence:
        yield f"{observed.tokens_per_step} tokens a step are not {observed.rows_per_step} rows of {requested.sequence}"
    for key, value in (("train_micro_batch_size_per_gpu", micro_batch), ("gradient_accumulation_steps", passes)):
        if isinstance(engine.get(key), int) and engine[key] != value:
            yield f"DeepSpeed's {key} is {engine[key]}, but {value} was requested"


def _rates(record: Record) -> Iterator[str]:
    """Rates times seconds are the work done, and the median step is the median of the steps."""
    time, observed, step_s = record.time, record.observed, record.time.step_s
    if not step_s:
        return
    window_s, total_s = timed_s(time), sum(step_s)
    if record.measure_version >= WALL_SINCE and time.window_s is None:
        yield "the wall time of the timed windows is not recorded"
    # A step's time is its slowest rank's. Their sum is the wall time if the same rank is always the slowest, else more.
    ranks = 1 if record.is_virtual else observed.ranks
    if not total_s / ranks * (1 - ROUNDING) <= window_s <= total_s * (1 + ROUNDING):
        yield f"the timed windows took {window_s:.4g} s, but their steps {total_s:.4g}"
    if time.median_step_s is None or not same(time.median_step_s, statistics.median(step_s)):
        yield f"the median step is {statistics.median(step_s):.4g} s, but the record says {time.median_step_s}"
    if len(step_s) > observed.steps:
        yield f"{len(step_s)} steps are timed of {observed.steps}"
    for rate, amount in (("tokens_per_s", observed.tokens_per_step), ("samples_per_s", observed.rows_per_step)):
        speed, done = getattr(time, rate), amount * len(step_s)
        if speed is None:
            continue
        if record.is_virtual:
            yield f"the run is virtual and sent nothing, but has {rate}"
        elif not same(speed * window_s, done):
            yield f"{rate} x seconds are {speed * window_s:.6g}, but {done} were done"


def _utilization(record: Record, reached: float | None) -> Iterator[str]:
    """The peak is the device's, MFU follows from operations and seconds, and both are below what can be reached."""
    time, requested, devices = record.time, record.requested, record.hardware.devices
    name = devices[0].name if devices else None
    peak = peak_flops(name, requested.precision, requested.tf32 is not False)
    if time.peak_flops_per_s != peak:
        yield f"the datasheet's dense peak of {name or 'no GPU'} is {peak}, but the record has {time.peak_flops_per_s}"
    if time.mfu is None:
        return
    if not 0 < time.mfu < 1:
        yield f"{time.mfu:.3g} of the peak is not possible"
    if not (time.flops_per_rank_and_step and time.peak_flops_per_s and timed_s(time) > 0):
        yield "mfu follows from nothing in the record"
        return
    flops_per_s = time.flops_per_rank_and_step * len(time.step_s) / timed_s(time)
    if not same(time.mfu, share := flops_per_s / time.peak_flops_per_s):
        yield f"mfu is {time.mfu:.4g}, but operations over seconds and peak are {share:.4g}"
    if reached and flops_per_s > reached:
        yield f"{flops_per_s / 1e12:.4g} TFLOP/s, but a matrix product on this device reaches {reached / 1e12:.4g}"


def _operations(record: Record) -> Iterator[str]:
    """Operations and parameters are the model's own: what checkpointing repeats is useful work only once."""
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


def _wall(record: Record) -> Iterator[str]:
    """What was timed took place between the start and the end."""
    wall_s, time = record.wall_s, record.time
    if wall_s is None:
        yield f"{record.started_utc} to {record.finished_utc} is not a span of time"
        return
    timed = (time.setup_s or 0) + sum(time.step_s or time.training_s)
    if timed > wall_s * 1.01 + 0.1:
        yield f"set-up and steps took {timed:.4g} s of a run of {wall_s:.4g} s"


def _memory(record: Record) -> Iterator[str]:
    """Components fit into the peak, allocated memory into reserved memory, and that into the device.

    `device_used` is read at the end, when part of the reserved peak may be free again: those two are not compared.
    """
    devices, parts = record.hardware.devices, record.memory.components.per_rank
    for number, rank in enumerate(record.memory.per_rank):
        sizes = {name: getattr(rank, f"{name}_bytes") for name in ("peak_allocated", "peak_reserved", "device_used")}
        sizes["the device"] = devices[number % len(devices)].memory_bytes if devices else None
        yield from (f"rank {number}: {name} is 0; unknown would be None" for name, size in sizes.items() if size == 0)
        for less, more in NESTED_MEMORY:
            if None not in (sizes[less], sizes[more]) and sizes[less] > sizes[more]:
                yield f"rank {number}: {less} is {sizes[less]}, more than {more}, {sizes[more]}"
    for number, part in enumerate(parts):
        for when in ("at_peak", "after_step"):
            total, peak = sum((getattr(part, when) or {}).values()), part.tracked_peak_bytes
            if total > peak or (when == "at_peak" and part.at_peak is not None and total != peak):
                yield f"rank {number}: components {when} are {total}, but {peak} were tracked at the peak"
    for number, (part, rank) in enumerate(zip(parts, record.memory.per_rank, strict=False)):
        allocated = rank.peak_allocated_bytes
        if allocated and part.tracked_peak_bytes > (1 + PADDING) * allocated:
            yield f"rank {number}: {part.tracked_peak_bytes} were tracked, above the allocator's peak of {allocated}"
    yield from _host_memory(record)


def _host_memory(record: Record) -> Iterator[str]:
    """No process holds more than the host has, and on a CPU no less than its tensors."""
    hosts = [record.hardware, *(machine.hardware for machine in record.machines)]
    host = max((each.host_memory_bytes or 0 for each in hosts), default=0)
    real = not record.is_virtual and record.requested.init != "none"
    parts = record.memory.components.per_rank
    for number, rank in enumerate(record.memory.per_rank):
        peak = rank.host_peak_bytes
        if peak and host and peak > host:
            yield f"rank {number}: host_peak is {peak}, more than the host's {host}"
        tracked = parts[number].tracked_peak_bytes if real and number < len(parts) else 0
        if peak and record.observed.device == "cpu" and tracked > (1 + PADDING) * peak:
            yield f"rank {number}: {tracked} were tracked, above the process's peak of {peak}"


def _ranks(record: Record) -> Iterator[str]:
    """Every rank has reported: the first alone need not be the one that holds most."""
    ranks = 1 if record.is_virtual else record.observed.ranks
    reported = {
        "memory": record.memory.per_rank,
        "traffic": record.traffic.per_rank,
        "components": record.memory.components.per_rank,
        "held_parameters": record.observed.held_parameters_per_rank,
    }
    for name, values in reported.items():
        if values and len(values) != ranks:
            yield f"{name}: {len(values)} of {ranks} ranks have reported"


def _counts(record: Record) -> Iterator[str]:
    """Bytes are those of a single step, in which gradients are reduced and weights gathered only so often."""
    passes, stage, count = record.requested.accumulation, record.observed.stage or 0, _whole(record)
    # Stage 3 gathers for each forward and each backward pass, and once after the update. FSDP2 does so without that
    # once; through Accelerate it reduces in the last pass of a step alone.
    reduced, gathered = passes if stage > 1 else 1, 2 * passes + 1 if stage == 3 else 1
    gathered = 2 * passes if record.observed.fsdp else gathered
    replicas, sharing = _groups(record)
    reduced += 1 / sharing if replicas > 1 else 0  # each rank's part, between the groups
    if record.requested.optimizer == "muon" and stage == 3:
        gathered += MUON_GATHERS
    trained = record.observed.trained_parameters
    trained = count if trained in (None, record.observed.parameters) else trained  # of FSDP2's as collectives move them
    for number, collectives in enumerate(record.traffic.per_rank):
        elements = {}
        for kind, moved in collectives.items():
            elements[kind] = sum(size / ELEMENT_BYTES.get(dtype, 1) for dtype, size in moved.bytes_by_dtype.items())
            if moved.bytes != (total := sum(moved.bytes_by_dtype.values())):
                yield f"rank {number}: {kind} moved {moved.bytes} bytes, but {total} by dtype"
        if (
            record.observed.tensor_ranks
        ):  # sums of activations, and gathered logits, come on top of what is counted here
            least = reduced * _held(record, number)
            if sum(elements.get(kind, 0) for kind in GRADIENTS) < least * (1 - PADDING) - SMALL_ELEMENTS:
                yield f"rank {number}: fewer than the {least:.0f} elements of its gradients were reduced"
            continue
        total = sum(elements.get(kind, 0) for kind in WEIGHTS)
        if total > gathered * count * (1 + PADDING) + SMALL_ELEMENTS:
            words = f"{total / count:.3g} elements a parameter, more often than in a step"
            yield f"rank {number}: {', '.join(WEIGHTS)} moved {words}"
        total = sum(elements.get(kind, 0) for kind in GRADIENTS)
        expected = reduced * trained
        if not _about(total, expected) and (record.observed.ranks > 1 or total > expected):
            words = f"{total / trained:.3g} elements a parameter, {'more' if total > expected else 'less'} often"
            yield f"rank {number}: {', '.join(GRADIENTS)} moved {words} than in a step"
    steps, timed = record.energy.steps, len(record.time.step_s)
    if steps is not None and timed and steps != timed:
        yield f"energy is of {steps} steps, but {timed} were timed"


def _whole(record: Record) -> int:
    """Elements of all parameters as collectives move them: FSDP2 pads the first dimension of each to a multiple of the
    ranks that share it, and the first rank holds a whole part."""
    held, observed = record.observed.held_parameters_per_rank, record.observed
    return held[0] * _groups(record)[1] if observed.fsdp and held else observed.parameters


def _held(record: Record, number: int) -> int:
    """Parameters that a rank holds, where layers are divided; of a virtual run the first rank's."""
    held = record.observed.held_parameters_per_rank
    return held[number] if number < len(held) else record.observed.parameters


def _groups(record: Record) -> tuple[int, int]:
    """Groups of ranks that hold the same, and the ranks of each: more than one group only under hybrid sharding."""
    mesh = (record.observed.fsdp or {}).get("mesh") or [[]]
    return tuple(mesh[0]) if len(mesh[0]) == 2 else (1, record.observed.ranks)


def _kernel(record: Record) -> Iterator[str]:
    """The kernel saw at least what was counted written, and not much more."""
    traffic = record.traffic
    for number, (counts, counted) in enumerate(zip(traffic.per_rank, traffic.gloo_wire_bytes, strict=False)):
        expected = gloo_wire_bytes(counts, record.observed.ranks)
        if counted is None and record.observed.backend != "gloo":
            continue
        if expected is not None and (counted is None or not same(counted, expected)):
            yield f"rank {number}: gloo writes {expected:.6g} bytes for these collectives, not {counted}"
    pairs = zip(traffic.kernel_bytes_written, traffic.gloo_wire_bytes, strict=False)
    for number, (written, counted) in enumerate(pairs):
        if written is None or not counted:
            continue
        if not (1 - KERNEL) * counted <= written <= (1 + KERNEL) * counted + LOG_LINES_BYTES:
            yield f"rank {number}: {counted:.4g} bytes were counted, but the kernel saw {written:.4g} written"


def _links(record: Record) -> Iterator[str]:
    """An emulated link carried no more than its bandwidth allows, and not much more than its ranks sent."""
    seen, moved, hosts = record.observed.network, record.traffic, record.requested.hosts
    if hosts and (seen is None or seen.hosts != hosts or len(moved.per_link) != hosts or not moved.link_steps):
        yield f"{hosts} emulated hosts were asked for, and the record does not have the links of so many"
        return
    ranks_sent = [counted for counted in moved.gloo_wire_bytes if counted is not None]
    for number, link in enumerate(moved.per_link):
        carried_mbit = link.sent_bytes * 8e-6
        if seen and seen.bandwidth_mbit and carried_mbit > (1 + LINK) * seen.bandwidth_mbit * timed_s(record.time):
            took_s = timed_s(record.time)
            yield f"link {number}: {carried_mbit:.4g} Mbit in {took_s:.4g} s, but it has {seen.bandwidth_mbit} Mbit/s"
        if ranks_sent and link.sent_bytes / moved.link_steps > (1 + HEADERS) * sum(ranks_sent):
            yield f"link {number}: {link.sent_bytes / moved.link_steps:.4g} bytes a step are more than all ranks sent"


def _about(elements: float, expected: float) -> bool:
    return abs(elements - expected) <= EXACT * expected + EXACT_ELEMENTS


def _curve(record: Record) -> Iterator[str]:
    """The last values of a curve are the final ones, and its first is that of a guess where weights were drawn."""
    loss, requested = record.loss, record.requested
    if record.is_virtual:
        return
    if loss.train and loss.final_train != loss.train[-1]:
        yield f"the last loss is {loss.train[-1]}, but the final one {loss.final_train}"
    if loss.final_eval != (loss.eval[-1] if loss.eval else None):
        yield "the last evaluation is not the final one"
    for each in loss.eval:
        if each.step > record.observed.steps:
            yield f"an evaluation after step {each.step} of {record.observed.steps}"
        if each.accuracy is not None and each.accuracy > 1:
            yield f"the accuracy is {each.accuracy}"
        if each.perplexity is not None and (not _is_exp(each.perplexity, each.eval_loss)):
            yield f"the perplexity is {each.perplexity}, but the loss {each.eval_loss}"
    vocabulary = SHAPES.get(requested.model, {}).get("vocab_size")
    vocabulary = vocabulary or (VOCABULARY if requested.data == "embedded" else None)
    choices = {"imdb": 2, "wikitext": vocabulary}.get(requested.task)
    if loss.train and choices and requested.init in DRAWN:
        share = loss.train[0] / math.log(choices)
        if not CHANCE[0] <= share <= CHANCE[1]:
            yield f"the first loss is {loss.train[0]:.4g}, {share:.3g} times that of a guess"


def _is_exp(power: float, exponent: float) -> bool:
    return exponent < 700 and same(power, math.exp(exponent))


def _engine(record: Record) -> Iterator[str]:
    """What DeepSpeed resolved is what its objects say."""
    observed, engine = record.observed, record.observed.deepspeed
    if engine is None:
        if observed.wrapper == "DeepSpeedEngine":
            yield "DeepSpeed's resolved config is not recorded"
        return
    zero = engine.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    resolved = {"stage": zero.get("stage", 0), "clipping": engine.get("gradient_clipping", observed.clipping)}
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        resolved[name] = section.get("device", "none") if isinstance(section, dict) else "none"
    for name, value in resolved.items():
        if (real := getattr(observed, name)) != value:
            yield f"{name}: DeepSpeed resolved {value!r}, observed {real!r}"
    homes = record.memory.components
    for home, name in (("optimizer_home", "offload_optimizer"), ("weights_home", "offload_param")):
        if (where := getattr(homes, home)) not in (None, getattr(observed, name)):
            yield f"{home} is {where!r}, but {name} {getattr(observed, name)!r}"


def _states(record: Record) -> Iterator[str]:
    """Each rank holds its share of the parameters, and Adam's two moments of its share of the states."""
    observed, count = record.observed, record.observed.parameters
    trained = observed.trained_parameters or count
    ranks_held = observed.held_parameters_per_rank
    if observed.fsdp:  # by rows, of which the last ranks may have fewer
        replicas, sharing = _groups(record)
        if len(ranks_held) == observed.ranks and not _about(sum(ranks_held), count * replicas):
            yield f"the ranks hold {sum(ranks_held)} parameters together, but there are {count * replicas}"
        if ranks_held and not count / sharing <= max(ranks_held) + EXACT_ELEMENTS:
            yield f"no rank holds its share of {count / sharing:.0f} parameters"
    share = count / observed.ranks if observed.stage == 3 else count
    divided = observed.tensor_ranks or 1
    for number, held in enumerate(ranks_held):
        if divided > 1:  # of layers a part, norms and embeddings whole
            if not count / divided <= held < count:
                words = f"not between {count / divided:.0f} and {count}"
                yield f"rank {number}: {held} parameters are held, {words}"
        elif not observed.fsdp and not _about(held, share):
            yield f"rank {number}: {held} parameters are held, but its share is {share:.0f}"
    for number, part in enumerate(record.memory.components.per_rank):
        share = trained / (observed.ranks if observed.stage else 1)
        if divided > 1:
            share = _held(record, number) / (observed.ranks // divided)
        if observed.fsdp and ranks_held:
            share = ranks_held[number] if trained == count else math.nan  # which of them train is not recorded
        for name, times in (("moments", 2), ("master", 1)):
            size_bytes = (part.at_peak or {}).get(name)  # None: on the disk, or the weights are their own master
            if not size_bytes or observed.dtypes.get(name) != "float32" or observed.optimizer not in ADAM:
                continue
            if not math.isnan(share) and not _about(size_bytes / 4 / times, share):
                yield f"rank {number}: {name} are {size_bytes} bytes, but its share is {4 * share * times:.0f}"


def _collectives(record: Record) -> Iterator[str]:
    """The collectives are those of the stage, in the dtypes of what they move."""
    observed, stage, count = record.observed, record.observed.stage, record.observed.parameters
    for number, seen in enumerate(record.traffic.per_rank):
        weights = {kind: seen[kind] for kind in WEIGHTS if kind in seen}
        moved = [(size, dtype) for each in weights.values() for dtype, size in each.bytes_by_dtype.items()]
        elements = sum(size / ELEMENT_BYTES.get(dtype, 1) for size, dtype in moved)
        if empty := [kind for kind, each in seen.items() if each.bytes and not each.calls]:
            yield f"rank {number}: {empty[0]} moved bytes without a call"
        if observed.wrapper == "DistributedDataParallel" and elements > count / 2:
            yield f"rank {number}: DDP gathers no weights, but {elements:.0f} elements were gathered"
        trained = observed.trained_parameters or count
        if observed.tensor_ranks:
            continue  # between two ranks nothing but logits is gathered
        if stage in (1, 2) and observed.ranks > 1 and not _about(elements, trained):
            yield f"rank {number}: stage {stage} gathers {trained} elements after a step, not {elements:.0f}"
        scatters = (stage == 3 and record.requested.optimizer != "muon") or observed.fsdp  # Muon takes whole gradients
        if scatters and "reduce_scatter" not in seen:
            yield f"rank {number}: stage 3 and FSDP scatter gradients, but no reduce_scatter was seen"
        if stage in (1, 2) and moved and max(moved)[1] != observed.dtypes.get("weights"):
            yield f"rank {number}: the weights are {observed.dtypes.get('weights')}, but {max(moved)[1]} was gathered"


def _device(record: Record) -> Iterator[str]:
    """A GPU is one that exists, and left the traces that each run on it leaves; a CPU is not faster than CPUs are."""
    observed, hardware, time = record.observed, record.hardware, record.time
    if observed.device == "cuda":
        if not hardware.devices:
            yield "the run was on a GPU, but no GPU is recorded"
        if any(rank.peak_allocated_bytes is None for rank in record.memory.per_rank) or not record.memory.per_rank:
            yield "the run was on a GPU, but its allocator has no peak"
        if observed.ranks > 1 and not record.is_virtual and observed.backend != "nccl":
            yield f"the run was on {observed.ranks} GPUs, but its backend is {observed.backend}"
    elif any(rank.peak_allocated_bytes is not None for rank in record.memory.per_rank):
        yield f"the run was on {observed.device}, but a GPU's allocator has a peak"
    elif hardware.cores and time.flops_per_rank_and_step and time.step_s and sum(time.step_s) > 0:
        ranks = 1 if record.is_virtual else observed.ranks
        cores = sum(machine.hardware.cores or hardware.cores for machine in record.machines) or hardware.cores
        speed = time.flops_per_rank_and_step * ranks * len(time.step_s) / sum(time.step_s) / cores
        if speed > CORE_FLOPS_PER_S.get(record.requested.precision, CORE_FLOPS_PER_S[None]):
            yield f"{speed / 1e9:.4g} GFLOP/s on each core are more than a core can do"
    sizes = {gpu.name: gpu.memory_bytes for gpu in GPUS.values()}
    for device in hardware.devices[:1]:
        known = sizes.get(device.name)
        if known and not same(device.memory_bytes, known, DATASHEET):
            yield f"{device.name} has {known} bytes, but the record says {device.memory_bytes}"
    for number, joules in enumerate(record.energy.joules_per_rank):
        if joules and timed_s(time) > 0 and joules > MOST_WATTS * timed_s(time):
            yield f"rank {number}: {joules:.4g} J in {timed_s(time):.4g} s are more than a GPU can take"


def _command(record: Record) -> Iterator[str]:
    """What was requested is what the command said."""
    requested = record.requested
    for flag, text in dict(itertools.pairwise(record.argv)).items():  # of a flag given twice, the last counts
        value = getattr(requested, flag[2:].replace("-", "_"), None) if flag.startswith("--") else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                agrees = same(float(text), value) or float(text) == value
            except ValueError:
                agrees = True  # a word that stands for a number
        else:
            agrees = flag not in ("--model", "--precision", "--task") or value == text
        if not agrees:
            yield f"the command says {flag} {text}, but {value!r} is recorded"
    if requested.config_file and requested.arm and Path(requested.config_file).stem != requested.arm:
        yield f"the arm is {requested.arm}, but its file {Path(requested.config_file).name}"


def beside(record: Record, folder: Path) -> list[str]:
    """How `steps.jsonl`, where it lies beside a record, disagrees with it."""
    path = folder / "steps.jsonl"
    if record.status != "done" or record.is_virtual or record.is_script or not path.is_file():
        return []
    losses, evals = [], []
    try:
        content = files.read_below(folder, path.name, store.MAX_BYTES)
        for line in map(texts.from_json, content.decode().splitlines()):
            if line["step"] == 1 and "loss" in line:
                losses, evals = [], []  # what was above is of an earlier launch into this folder
            if "loss" in line:
                losses.append(line["loss"])
            elif "eval_loss" in line:
                evals.append((line["step"], line["eval_loss"]))
    except OSError as error:
        return [f"steps.jsonl cannot be read: {files.why(error)}"]
    except (ValueError, TypeError, KeyError):
        return ["steps.jsonl cannot be read"]
    pairs = itertools.zip_longest(losses, record.loss.train)
    if wrong := [step for step, pair in enumerate(pairs, start=1) if None in pair or not same(*pair)]:
        return [f"steps.jsonl has another loss at step {wrong[0]}"]
    if evals != [(each.step, each.eval_loss) for each in record.loss.eval]:
        return ["steps.jsonl has other evaluations"]
    return []


def _script(record: Record) -> Iterator[str]:
    """Each training of the published script did something."""
    if not record.observed.runs:
        yield "the script is done, but no training is recorded"
    if record.time.training_s != [training.training_s for training in record.observed.runs]:
        yield "the times of its trainings are not those that they say"
    for number, training in enumerate(record.observed.runs, start=1):
        if not training.steps or not training.losses:
            yield f"training {number} is done, but took no step or has no loss"
        if not training.training_s or training.peak_bytes == 0:
            yield f"training {number} took no time, or no memory"
