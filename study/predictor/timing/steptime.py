"""The seconds of an optimizer step: the work of each block at the pace of a machine, replayed on a timeline."""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import exp, hypot, log

from study.predictor.estimate import operations
from study.predictor.memory.engine import Engine
from study.predictor.setup import OF_4_BITS, Setup
from study.predictor.timing.machine import PCIE_SHARES, Machine
from study.predictor.timing.pace import (
    OF_HOST,
    OfBlocks,
    Pace,
    Seconds,
    attention_s,
    has_measured_ceilings,
    interval_factor,
    pace,
    peak_flops_per_s,
    slow_dequantization,
    total,
    work_s,
)
from study.predictor.timing.replay import Span, busy_s, length_s, replay
from study.predictor.timing.schedule import Schedule
from study.predictor.timing.work import Block, Work, blocks, has_single_kernels

MOST_PASSES = 3  # the most that are replayed: further passes take as long as the middle one
ON_GPU = ("products", "attention", "memory traffic")
PARTS = {"launch": "launching", "communication": "link", "exchange": "link", "host": "update on host"}  # of streams


@dataclass(frozen=True)
class StepTime:
    """A predicted step: its seconds, their interval, and its parts."""

    seconds: float
    least_s: float  # with a fast host, if the host is unknown, and fast PCIe
    most_s: float  # with a slow host, and slow PCIe
    peak_s: float  # no step is faster: its operations at the datasheet's peak, or at a higher one that was measured
    factor: float  # by which the interval exceeds the prediction
    parts: dict[str, float]  # busy seconds by resource; they overlap
    timeline: tuple[Span, ...]  # of at most MOST_PASSES passes

    @property
    def low_s(self) -> float:
        return max(self.peak_s, self.seconds / _joined(self.factor, self.seconds / self.least_s))

    @property
    def high_s(self) -> float:
        return self.seconds * _joined(self.factor, self.most_s / self.seconds)

    @property
    def limit(self) -> str:
        """The resource that is busy for the longest time."""
        busy_s = {"compute": sum(self.parts.get(name, 0.0) for name in ON_GPU)}
        busy_s |= {name: part_s for name, part_s in self.parts.items() if name not in ON_GPU}
        return max(busy_s, key=busy_s.__getitem__)


def _joined(factor: float, other: float) -> float:
    """Return the factor of two independent uncertainties."""
    return exp(hypot(log(factor), log(other)))


def step_time(setup: Setup, machine: Machine, constants: Pace | None = None) -> StepTime:
    """The prediction for a setup on a machine."""
    constants = constants or pace()
    if machine.host_pace is not None:
        constants = replace(constants, host_pace=machine.host_pace)
    seconds, parts, spans = _step(setup, machine, constants)
    unknown = {"host_pace": constants.host_factor} if machine.host_pace is None else {}
    links = machine.links(setup.ranks)
    if links.link in PCIE_SHARES and min(links.ranks, links.gpus_per_node) > 1:
        unknown[PCIE_SHARES[links.link]] = constants.pcie_factor
    least, most = 1.0, 1.0  # over the prediction
    for name, factor in unknown.items():
        values = (getattr(constants, name) / factor, getattr(constants, name) * factor)
        ends = [_step(setup, machine, replace(constants, **{name: value}))[0] for value in values]
        least, most = _joined(least, seconds / min(ends)), _joined(most, max(ends) / seconds)
    parts = {name: part_s for name, part_s in parts.items() if part_s}
    factor = interval_factor(setup.model.parameters, _is_known(setup, machine))
    return StepTime(seconds, seconds / least, seconds * most, _peak_s(setup, machine), factor, parts, tuple(spans))


def _peak_s(setup: Setup, machine: Machine) -> float:
    """Return the seconds of a step's operations at the peak. Products of 8 bits run at twice that of 16 bits.

    Fused attention need not compute what a causal mask hides: half of the scores.
    """
    masked = 0.0
    if setup.model.look.kind == "decoder":
        masked = (
            sum(each.forward.attention_flops + each.backward.attention_flops for each in _blocks(setup, machine)) / 2
        )
    needed_share = 1 - masked / operations(replace(setup, accumulation=1))
    peak = peak_flops_per_s(machine.gpu, not setup.has_half_products, machine.tf32)
    return needed_share * operations(setup) / peak / (2 if machine.casts else 1)


def _is_known(setup: Setup, machine: Machine) -> bool:
    """Return whether the sources that decide the interval have enough trainings of this kind."""
    offloads = setup.fsdp_offload or Engine(setup).optimizer_home != "none"
    is_new = setup.model.is_partly_frozen or machine.casts is not None or setup.library.experts_loop or offloads
    return has_measured_ceilings(machine.gpu) and not is_new


def _step(setup: Setup, machine: Machine, constants: Pace) -> tuple[float, dict[str, float], list[Span]]:
    """Seconds, busy seconds by resource, and the spans of at most MOST_PASSES passes."""
    constants = replace(constants, **{name: constants.host_pace * getattr(constants, name) for name in OF_HOST})
    passes = min(setup.accumulation, MOST_PASSES)
    spans, parts = _replayed(setup, machine, passes, constants)
    seconds = length_s(spans)
    if more := setup.accumulation - passes:
        shorter, fewer = _replayed(setup, machine, passes - 1, constants)
        seconds += more * (seconds - length_s(shorter))
        parts = {name: part_s + more * (part_s - fewer[name]) for name, part_s in parts.items()}
    return seconds, parts, spans


def _replayed(setup: Setup, machine: Machine, passes: int, constants: Pace) -> tuple[list[Span], dict[str, float]]:
    """Return the spans of a step with `passes` passes, and the busy seconds of each resource."""
    work = _blocks(setup, machine)
    seconds = _seconds(work, setup, machine, constants)
    spans = replay(Schedule(setup, machine, constants, seconds, work).step(passes))
    parts: dict[str, float] = defaultdict(float)
    for stream, stream_s in busy_s(spans).items():
        parts[PARTS.get(stream, stream)] += stream_s
    del parts["compute"]
    of_passes = [each for pair in seconds.values() for each in pair]
    parts |= {name: passes * busy for name, busy in total(of_passes).items() if name in ON_GPU}
    updates = (span.task for span in spans if span.task.name == "update" and span.task.stream == "compute")
    return spans, parts | {"update": sum(task.seconds for task in updates)}


def _blocks(setup: Setup, machine: Machine) -> tuple[Block, ...]:
    """Return the work of the model's blocks. A compiler that fuses kernels also fuses the casts of autocast."""
    fuses_casts = machine.fused_kernels and has_single_kernels(setup.model) and setup.precision != "fp32"
    return blocks(replace(setup, precision="bf16_cast") if fuses_casts else setup)


def _seconds(work: tuple[Block, ...], setup: Setup, machine: Machine, constants: Pace) -> OfBlocks:
    """Return the seconds of the forward and the backward pass of each block. Many blocks share their work."""
    single = has_single_kernels(setup.model)
    attention = attention_s(machine.attention_kernel, machine.gpu) if setup.model.look.kind == "decoder" else 1.0
    odd = setup.model.dimensions.get("vocab_size", 0) % 2 and setup.precision != "fp32"
    head_share = constants.odd_share if odd and not setup.library.one_row_as_two else 1  # Megatron fills the vocabulary
    known: dict[int, Seconds] = {}

    def cost(block: Block, one_pass: Work) -> Seconds:
        if id(one_pass) not in known:
            several = not single if block.is_layer else setup.loss != "whole"  # whole: the loss has kernels of its own
            fused = machine.fused_kernels and several
            casts = machine.casts if block.is_layer else None
            more = (casts, setup.tokens, machine.tf32, setup.library.fused_adapters)
            kernels = _by_bitsandbytes(one_pass, setup, machine.gpu)
            seconds = work_s(kernels, machine.gpu, setup.precision == "fp32", fused, constants, *more)
            products_s = seconds.products / (1 if block.is_layer else head_share)
            known[id(one_pass)] = replace(seconds, attention=seconds.attention * attention, products=products_s)
        return known[id(one_pass)]

    return {block.name: (cost(block, block.forward), cost(block, block.backward)) for block in work}


def _by_bitsandbytes(work: Work, setup: Setup, gpu: str) -> Work:
    """Return the kernels of a pass by an older release of bitsandbytes."""
    release = setup.library.bitsandbytes
    if setup.quantized not in OF_4_BITS or not release:
        return work
    if release < (0, 48):
        more_bytes = (slow_dequantization(gpu) - 1) * work.lasting_bytes
        work = work.and_then(Work(moved_bytes=more_bytes, lasting_bytes=more_bytes))
    if release < (0, 47):
        work = replace(work, products=tuple(replace(product, element_bytes=None) for product in work.products))
    return work
