"""Audits a record before it counts as evidence: what was measured twice must agree, and nothing may be impossible.

It looks for the faults of published benchmarks: counts of several steps, the first rank alone, half a step read as a
whole one, an empty run counted as a success, another training than the requested one. `agreement` compares records.
"""

import functools
import itertools
import math
from collections.abc import Iterable
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
LINK, HEADERS = 0.02, 0.1  # tolerances of an emulated link: a burst at the start; headers and acknowledgements
KERNEL, LOG_LINES_BYTES = 0.02, 2**16  # tolerances of the kernel's count, which includes frames and log lines
FILES, HEADER_BYTES = 1.2, 2**16  # of checkpoints and saved weights: stage 3 pads, and each file has a header
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


class Audit(list[str]):
    """The faults of a finished run, in words, and the numbers that the checks compute with.

    A method adds a fault if its values do not agree; an unknown value is no fault.
    """

    def __init__(self, record: Record) -> None:
        """Take the numbers of a record that lacks none of those in NEEDED."""
        observed = record.observed
        mesh = (observed.fsdp or {}).get("mesh") or [[]]
        self.ranks = observed.ranks or 1
        self.writers = 1 if record.is_virtual else self.ranks  # that report; of virtual ranks only the first one runs
        self.steps = observed.steps or 0
        self.passes = record.requested.accumulation or 1
        self.parameters = observed.parameters or 0
        self.trained = observed.trained_parameters or self.parameters
        self.stage = observed.stage or 0
        self.divided = observed.tensor_ranks or 1  # ranks that divide each layer among themselves
        self.sharers = (observed.sequence_ranks or 1) * self.divided  # ranks that read the same rows
        # Groups of ranks that hold the same, of which hybrid sharding has several; and the ranks in such a group.
        shape: list[int] = mesh[0] if len(mesh[0]) == 2 else [1, self.ranks]
        self.replicas, self.sharing = shape

    def refuse(self, is_wrong: object, words: str) -> None:
        if is_wrong:
            self.append(words)

    def equal(self, what: str, found: object, expected: object) -> None:
        self.refuse(found != expected, f"{what} is {found!r}, but should be {expected!r}")

    def one_of(self, what: str, found: object, expected: Iterable) -> None:
        known = sorted(map(str, expected))
        self.refuse(str(found) not in known, f"{what} is {found}, but should be {' or '.join(known)}")

    def at_most(self, what: str, found: float | None, limit: float | None, owner: str) -> None:
        if found is not None and limit is not None and found > limit:
            self.append(f"{what} is {found:.6g}, more than {owner}, {limit:.6g}")

    def at_least(self, what: str, found: float | None, limit: float | None, owner: str) -> None:
        if found is not None and limit is not None and found < limit:
            self.append(f"{what} is {found:.6g}, less than {owner}, {limit:.6g}")

    def elements(self, what: str, found: float, expected: float) -> None:
        """Compare numbers of elements; parts are padded."""
        unlike = abs(found - expected) > EXACT * expected + EXACT_ELEMENTS
        self.refuse(unlike, f"{what} is {found:.6g} elements, but should be {expected:.6g}")


def faults(record: Record, reached: float | None = None) -> list[str]:
    """Return why a finished run is not evidence, in words. Empty if it is evidence.

    `reached`: FLOP/s that matrix products were measured to reach on the same device.
    """
    found = Audit(record)
    if record.status != "done":
        return found
    _wall(record, found)
    if record.is_script:
        _script(record, found)
        return found
    if missing := _missing(record):
        return found + missing
    for check in CHECKS:
        check(record, found)
    _speed(record, reached, found)
    return found


def _missing(record: Record) -> list[str]:
    """Return which of the values that all checks compute with are missing."""
    values = {f"{part}.{name}": getattr(getattr(record, part), name) for part in NEEDED for name in NEEDED[part]}
    unknown = {name: value for name, value in values.items() if not isinstance(value, str) and not (value or 0) > 0}
    return [f"{name} is {value} in a finished run" for name, value in unknown.items()]


def _wall(record: Record, found: Audit) -> None:
    """All timed work lies between the start and the end of the run."""
    if record.wall_s is None:
        found.append(f"{record.started_utc} to {record.finished_utc} is not a span of time")
        return
    trainings_s = [each.training_s for each in record.observed.runs]
    timed_s = (record.time.setup_s or 0) + sum(record.time.step_s or trainings_s)
    found.at_most("the time of set-up and steps in s", timed_s, record.wall_s * 1.01 + 0.1, "that of the run")


def _script(record: Record, found: Audit) -> None:
    """DeepSpeed is started in each training that its engine trained, and in no other."""
    for number, each in enumerate(record.observed.runs, start=1):
        if each.deepspeed_initialize_calls is not None and each.trained_by:
            calls = int(each.trained_by == "DeepSpeedEngine")
            found.equal(f"training {number}: the calls of deepspeed.initialize", each.deepspeed_initialize_calls, calls)


def _trained(record: Record, found: Audit) -> None:
    """A run that did nothing is not a success."""
    losses = record.loss.train
    steps = len(record.time.step_s)
    found.refuse(record.requested.init != "none" and not steps, "the run is done, but no step was timed")
    found.at_most("the number of timed steps", steps, found.steps, "that of all steps")
    for each in record.loss.eval:
        found.at_most("the last evaluated step", each.step, found.steps, "the last one")
        power = math.exp(each.eval_loss) if each.perplexity else 0
        unlike = each.perplexity and not math.isclose(each.perplexity, power, rel_tol=ROUNDING)
        found.refuse(unlike, f"the perplexity is {each.perplexity}, but should be {power:.6g}")
    if record.energy.steps is not None and steps:
        found.equal("the number of steps of the energy", record.energy.steps, steps)
    if record.is_virtual:
        found.refuse(losses or record.loss.eval, "the run is virtual, but has a loss")
        return
    found.equal("the number of losses", len(losses), found.steps)
    found.refuse(len(losses) > 2 and len(set(losses)) == 1, "the loss is the same at every step")


def _settings(record: Record, found: Audit) -> None:
    """The observed training is the requested one, also by the arm, the batch and the command line."""
    requested = record.requested
    observed = record.observed
    precision = requested.precision or ""
    expected = {name: getattr(requested, name) for name in ("accumulation", "checkpointing", "arm", "virtual_ranks")}
    expected["compiled"] = requested.compile
    expected["autocast"] = precision if precision in AUTOCAST else None
    expected["rows_per_step"] = (requested.micro_batch or 0) * found.passes * (found.ranks // found.sharers)
    expected["tokens_per_step"] = (observed.rows_per_step or 0) * (requested.sequence or 0)
    if observed.ranks_counted is not None:
        expected["ranks_counted"] = found.ranks
    arm = _arm(requested.arm or "")
    if arm:
        expected |= {name: getattr(arm, name) for name in ("stage", "offload_optimizer", "offload_param")}
        if arm.distributed_type == "DEEPSPEED":
            expected["wrapper"] = "DeepSpeedEngine"
        found.one_of("the optimizer", observed.optimizer, optimizers.classes(requested.optimizer, arm))
        found.refuse(arm.fsdp and observed.fsdp is None, "the arm is sharded by FSDP2, but none was observed")
    for name, value in expected.items():
        found.equal(name, getattr(observed, name), value)
    weights = "bfloat16" if precision in HALF_WEIGHTS else "float32"
    found.equal("the dtype of the weights", observed.dtypes.get("weights"), weights)
    moments = {*optimizers.moments_dtypes(requested.optimizer, precision), None}  # None: on the disk
    found.one_of("the dtype of the moments", observed.dtypes.get("moments"), moments)
    file = Path(requested.config_file or "").stem
    found.refuse(file and requested.arm and file != requested.arm, f"the arm is {requested.arm}, its file {file}")


@functools.lru_cache
def _arm(name: str) -> arms.Arm | None:
    """Return None if this repository does not have the arm, or no longer has it."""
    path = arms.all_paths().get(name)
    try:
        return arms.read(path) if path else None
    except Stop:
        return None


def _deepspeed(record: Record, found: Audit) -> None:
    """The config that DeepSpeed resolved agrees with its objects, and no profiler was on."""
    observed = record.observed
    config = observed.deepspeed
    if config is None:
        found.refuse(observed.wrapper == "DeepSpeedEngine", "DeepSpeed's resolved config is not recorded")
        return
    zero = _section(config.get("zero_optimization"))
    homes = record.memory.components
    found.equal("the stage of the objects", observed.stage, zero.get("stage", 0))
    found.equal("the clipping of the objects", observed.clipping, config.get("gradient_clipping", observed.clipping))
    for name, home in (("offload_optimizer", homes.optimizer_home), ("offload_param", homes.weights_home)):
        real = getattr(observed, name)
        found.equal(f"{name} of the objects", real, _section(zero.get(name)).get("device", "none"))
        found.equal(f"the measured home of {name}", real if home is None else home, real)
    micro_batch = record.requested.micro_batch
    counts = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": found.passes}
    for key, value in counts.items():
        if isinstance(config.get(key), int):
            found.equal(f"DeepSpeed's {key}", config[key], value)
    for name in PROFILERS:
        is_on = config.get(name) is True or _section(config.get(name)).get("enabled")
        found.refuse(is_on, f"DeepSpeed's {name} was on, which adds synchronisation")


def _section(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _memory(record: Record, found: Audit) -> None:
    """A GPU left its traces. `impossible` has compared what a process holds with its device and host.

    `device_used` is read at the end, when part of the reserved peak may be free again: those two are not compared.
    """
    on_gpu = record.observed.device == "cuda"
    found.refuse(on_gpu and not record.hardware.devices, "the run was on a GPU, but no GPU is recorded")
    for number, rank in enumerate(record.memory.per_rank):
        allocated = rank.peak_allocated_bytes
        found.equal(f"rank {number}: whether a GPU's allocator has a peak", allocated is not None, on_gpu)
        found.refuse(on_gpu and rank.peak_reserved_bytes is None, f"rank {number}: peak_reserved is not recorded")
        found.at_most(f"rank {number}: peak_allocated", allocated, rank.peak_reserved_bytes, "peak_reserved")


def _components(record: Record, found: Audit) -> None:
    """The parts of a rank's memory fit into its whole, and that into what the allocator or the kernel saw."""
    on_cpu = record.observed.device == "cpu" and not record.is_virtual and record.requested.init != "none"
    for number, part in enumerate(record.memory.components.per_rank):
        tracked = part.tracked_peak_bytes
        after = sum(part.after_step.values())
        found.at_most(f"rank {number}: the sum of components after_step", after, tracked, "the tracked peak")
        at_peak = {"all": tracked} if part.at_peak is None else part.at_peak
        found.equal(f"rank {number}: the sum of components at_peak", sum(at_peak.values()), tracked)
        for rank in record.memory.per_rank[number : number + 1]:
            least = tracked / (1 + PADDING)
            found.at_most(f"rank {number}: tracked_peak", least, rank.peak_allocated_bytes, "the allocator's peak")
            of_process = rank.host_peak_bytes if on_cpu else None
            found.at_most(f"rank {number}: tracked_peak", least, of_process, "the process's peak")


def _all_ranks(record: Record, found: Audit) -> None:
    """Every rank has reported: the first rank need not hold the most."""
    reported: dict[str, list] = {
        "memory": record.memory.per_rank,
        "traffic": record.traffic.per_rank,
        "components": record.memory.components.per_rank,
        "held_parameters": record.observed.held_parameters_per_rank,
    }
    for name, ranks in reported.items():
        found.equal(f"the number of ranks with {name}", len(ranks) or found.writers, found.writers)


def _shares(record: Record, found: Audit) -> None:
    """Each rank holds its share of the parameters."""
    held = record.observed.held_parameters_per_rank
    if record.observed.fsdp and held:  # FSDP2 divides by rows, so the last ranks may have fewer
        if len(held) == found.ranks:
            found.elements("what all ranks hold", sum(held), found.parameters * found.replicas)
        largest = max(held) + EXACT_ELEMENTS
        found.at_least("what the largest rank holds", largest, found.parameters / found.sharing, "its share")
    for number, count in enumerate(held):
        about = f"rank {number}: the held parameters"
        if found.divided > 1:  # each rank has a part of the layers, and whole norms and embeddings
            found.at_least(about, count, found.parameters / found.divided, "the share of its layers")
            found.at_most(about, count, found.parameters - 1, "a part of all")
        elif not record.observed.fsdp:
            found.elements(about, count, found.parameters / (found.ranks if found.stage == 3 else 1))


def _states(record: Record, found: Audit) -> None:
    """At the peak and after a step, each rank holds its share of the weights, the master weights and the moments.

    Gradients are compared after a step only: at the peak there may be more copies. What is on the disk is absent.
    """
    observed = record.observed
    whole = found.trained == found.parameters and observed.offload_optimizer == "none"
    for number, part in enumerate(record.memory.components.per_rank):
        held = _held(record, found, number)
        share = _share_of_states(record, found, number) if observed.optimizer in ADAM else None
        elements = {"moments": share and 2 * share, "master": share}
        elements["weights"] = None if observed.second_partition_parameters else held  # hpZ holds some of them twice
        after = elements | {"gradients": held if whole else None}
        at_peak, at_end = part.at_peak or {}, part.after_step
        for moment, expected, sizes in (("the peak", elements, at_peak), ("the end", after, at_end)):
            for name, count in expected.items():
                each = ELEMENT_BYTES.get(observed.dtypes.get(name) or "")
                if sizes.get(name) and each and count is not None:
                    found.elements(f"rank {number}: the {name} at {moment} of a step", sizes[name] / each, count)


def _saved(record: Record, found: Audit) -> None:
    """Saved files hold each weight once. Those of a checkpoint also hold Adam's moments, and the kernel saw them."""
    if saved := record.observed.saved:
        sizes = [ELEMENT_BYTES.get(dtype, 8) for dtype in saved.dtypes] or [1, 8]
        least, most = saved.parameters * min(sizes), saved.parameters * max(sizes) * (1 + EXACT) + HEADER_BYTES
        found.at_least("the number of saved weights", saved.parameters, found.trained, "those that were trained")
        found.at_most("the number of saved weights", saved.parameters, 2 * found.parameters, "all, and tied ones again")
        found.at_most("the bytes of the saved weights", saved.bytes, most, "their elements")
        found.at_least("the bytes of the saved weights", saved.bytes, least, "their elements")
    has_moments = record.observed.optimizer in ADAM and record.observed.dtypes.get("moments") == "float32"
    for each in record.checkpoints.saved:
        written = sum(filter(None, each.written_bytes_per_rank))
        found.at_most("the bytes of a checkpoint", each.bytes - HEADER_BYTES, written or None, "the kernel saw written")
        found.at_least("the bytes of a checkpoint", each.bytes * FILES, written, "the kernel saw written")
        moments_bytes = 8 * found.trained if has_moments else None
        found.at_least("the bytes of a checkpoint", each.bytes, moments_bytes, "those of the moments")


def _share_of_states(record: Record, found: Audit, rank: int) -> float | None:
    """Return the parameters whose optimizer states a rank holds; None if the record does not say."""
    if record.observed.fsdp and record.observed.held_parameters_per_rank:
        whole = found.trained == found.parameters  # else nobody knows which frozen parameters a rank holds
        return record.observed.held_parameters_per_rank[rank] if whole else None
    if found.divided > 1:
        return _held(record, found, rank) / (found.ranks // found.divided)
    return found.trained / (found.ranks if found.stage else 1)


def _held(record: Record, found: Audit, rank: int) -> int:
    """Return the parameters that a rank holds. A virtual run records those of the first rank only."""
    held = record.observed.held_parameters_per_rank
    return held[rank] if rank < len(held) else found.parameters


def _traffic(record: Record, found: Audit) -> None:
    for number, counts in enumerate(record.traffic.per_rank):
        _amounts(record, number, counts, found)


def _amounts(record: Record, number: int, counts: dict[str, Collective], found: Audit) -> None:
    """Gradients are reduced, and weights gathered, as often as in a step."""
    for kind, moved in counts.items():
        found.equal(f"rank {number}: {kind} by dtype", sum(moved.bytes_by_dtype.values()), moved.bytes)
        found.refuse(moved.bytes and not moved.calls, f"rank {number}: {kind} moved bytes without a call")
        found.at_most(f"rank {number}: the calls of {kind}", moved.calls, moved.bytes, "the bytes that it moved")
    reduced, gathered = _times_in_a_step(record, found)
    gradients = _elements(counts, GRADIENTS)
    about = f"rank {number}: what {', '.join(GRADIENTS)} moved"
    if record.observed.tensor_ranks:  # sums of activations, and gathered logits, come on top of what is counted here
        least = reduced * _held(record, found, number) * (1 - PADDING) - SMALL_ELEMENTS
        found.at_least(about, gradients, least, "the gradients of a step")
        return
    whole = found.parameters
    held = record.observed.held_parameters_per_rank
    if record.observed.fsdp and held:  # it pads each parameter, and the first rank holds a whole part
        whole = held[0] * found.sharing
    most = gathered * whole * (1 + PADDING) + SMALL_ELEMENTS
    weights = f"rank {number}: what {', '.join(WEIGHTS)} moved"
    found.at_most(weights, _elements(counts, WEIGHTS), most, "the weights of a step")
    expected = reduced * (whole if found.trained == found.parameters else found.trained)
    if found.ranks > 1 or gradients > expected:
        found.elements(about, gradients, expected)


def _times_in_a_step(record: Record, found: Audit) -> tuple[float, int]:
    """Return how often a step reduces each gradient, and gathers each weight."""
    reduced: float = found.passes if found.stage > 1 else 1
    gathered = 1
    if found.stage == 3:  # for each forward and each backward pass, and once after the update
        gathered = 2 * found.passes + 1
    if record.observed.fsdp:  # not after the update; through Accelerate it reduces in the last pass of a step alone
        gathered = 2 * found.passes
    if found.replicas > 1:  # each rank's part, between the groups
        reduced += 1 / found.sharing
    if record.requested.optimizer == "muon" and found.stage == 3:
        gathered += MUON_GATHERS
    return reduced, gathered


def _elements(counts: dict[str, Collective], kinds: Iterable[str]) -> float:
    """Return the elements that collectives of these kinds moved."""
    sizes = [counts[kind].bytes_by_dtype.items() for kind in kinds if kind in counts]
    return sum(size / ELEMENT_BYTES.get(dtype, 1) for dtype, size in itertools.chain.from_iterable(sizes))


def _kernel(record: Record, found: Audit) -> None:
    """The kernel saw the counted bytes written."""
    sent = metrics.wire_bytes_per_rank(record)
    for number, (counted, written) in enumerate(zip(sent, record.traffic.kernel_bytes_written, strict=False)):
        if counted:
            about = f"rank {number}: what the kernel saw written"
            found.at_least(about, written, (1 - KERNEL) * counted, "what was counted")
            found.at_most(about, written, (1 + KERNEL) * counted + LOG_LINES_BYTES, "what was counted")


def _links(record: Record, found: Audit) -> None:
    """An emulated link carried no more than it can, and no more than the ranks sent."""
    moved = record.traffic
    seen = record.observed.network
    hosts = record.requested.hosts
    if not hosts:
        return
    if seen is None or seen.hosts != hosts or len(moved.per_link) != hosts or not moved.link_steps:
        found.append(f"{hosts} emulated hosts were requested, but the record does not have the links of so many")
        return
    by_ranks = sum(filter(None, metrics.wire_bytes_per_rank(record))) or None
    room = seen.bandwidth_mbit and (1 + LINK) * seen.bandwidth_mbit * (metrics.timed_s(record) or 0)
    for number, link in enumerate(moved.per_link):
        of_step = link.sent_bytes / moved.link_steps / (1 + HEADERS)
        found.at_most(f"link {number}: sent Mbit", link.sent_bytes * 8e-6, room, "its bandwidth allows")
        found.at_most(f"link {number}: bytes a step", of_step, by_ranks, "all ranks sent")


def _times(record: Record, found: Audit) -> None:
    """The steps fill the timed windows. A step's time is its slowest rank's, so their sum may be more."""
    if not record.time.step_s:
        return
    lacks = record.measure_version >= WALL_SINCE and record.time.window_s is None
    found.refuse(lacks, "the wall time of the timed windows is not recorded")
    window_s = metrics.timed_s(record)
    steps_s = sum(record.time.step_s)
    about = "the time of the timed windows in s"
    found.at_most(about, window_s, steps_s * (1 + ROUNDING), "that of their steps")
    found.at_least(about, window_s, steps_s / found.writers * (1 - ROUNDING), "that of their steps on each rank")


def _speed(record: Record, reached: float | None, found: Audit) -> None:
    """No GPU is faster than it was measured to be, or takes more power."""
    seconds = metrics.timed_s(record)
    for number, joules in enumerate(record.energy.joules_per_rank):
        found.at_most(f"rank {number}: joules", joules, seconds and MOST_WATTS * seconds, "a GPU takes")
    flops_per_s = metrics.flops_per_s(record)
    peak = metrics.peak_flops_per_s(record)
    found.at_most("FLOP/s of a rank", flops_per_s, peak, "the peak of the GPU's datasheet")
    found.at_most("FLOP/s of a rank", flops_per_s, reached, "a matrix product on this device reaches")


CHECKS = (
    *(_trained, _settings, _deepspeed, _memory, _components, _all_ranks, _shares, _states, _saved, _kernel, _links),
    *(_times, _traffic),
)
