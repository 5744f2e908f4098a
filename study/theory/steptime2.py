"""Seconds of an optimizer step, replayed on a timeline: the work of each block at the pace of a machine."""

import functools
from dataclasses import dataclass

from study.machine.gpus import GPUS
from study.theory import deepspeed_memory, estimate, papers
from study.theory.architecture import trained
from study.theory.deepspeed_memory import Engine
from study.theory.pace import Links, Pace, pace, spread, work_s
from study.theory.replay import Span, busy_s, length_s, replay
from study.theory.schedule import UPDATE_BYTES, Host, Schedule, Sharing, adam_on_host_s
from study.theory.setup import Setup
from study.theory.work import blocks

MOST_PASSES = 3  # that are replayed: further ones take as long as the one in the middle


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a training and what joins them. None: as such machines are mostly built."""

    gpu: str
    gpus_per_node: int = 8
    link: str | None = None  # between GPUs of a node
    network: str | None = None  # between nodes
    disk_bytes_per_s: float | None = None  # of a node

    def links(self, ranks: int) -> Links:
        gpu = GPUS[self.gpu]
        return Links(ranks, self.gpus_per_node, self.link or gpu.peer_link, self.network or gpu.network)


@dataclass(frozen=True)
class StepTime:
    """A predicted step: seconds, an interval that holds 80 % of measurements, and how it came about."""

    seconds: float
    low_s: float
    high_s: float
    parts: dict[str, float]  # busy seconds by resource; they overlap
    timeline: tuple[Span, ...]  # of at most MOST_PASSES passes


def step_time(setup: Setup, machine: Machine, constants: Pace | None = None) -> StepTime:
    """The prediction for a setup on a machine."""
    replayed = [_replayed(setup, machine, passes, constants or pace()) for passes in _passes(setup)]
    (spans, parts), more = replayed[-1], setup.accumulation - _passes(setup)[-1]
    seconds = length_s(spans)
    if more:
        (before, parts_before) = replayed[0]
        seconds += more * (seconds - length_s(before))
        parts = {name: parts[name] + more * (parts[name] - parts_before[name]) for name in parts}
    margin = spread()
    low_s, high_s = seconds * (1 - margin.low), seconds * (1 + margin.high)
    return StepTime(seconds, low_s, high_s, {name: part for name, part in parts.items() if part}, tuple(spans))


def _passes(setup: Setup) -> tuple[int, ...]:
    if setup.accumulation <= MOST_PASSES:
        return (setup.accumulation,)
    return MOST_PASSES - 1, MOST_PASSES


def _replayed(setup: Setup, machine: Machine, passes: int, constants: Pace) -> tuple[list[Span], dict[str, float]]:
    """Spans of a step of so many passes, and the busy seconds of each resource."""
    of_blocks, links, whole = blocks(setup), machine.links(setup.ranks), setup.precision == "fp32"
    cost = functools.cache(lambda work: work_s(work, machine.gpu, whole, constants))
    seconds = {block.name: (cost(block.forward), cost(block.backward)) for block in of_blocks}
    sharing = Sharing.of(setup)
    schedule = Schedule(
        setup, links, constants, seconds, of_blocks, sharing, _host(setup, machine, sharing, constants)
    )
    last = None
    for number in range(passes):
        last = schedule.microbatch(number == passes - 1, last)
    schedule.update()
    spans = replay(schedule.tasks)
    parts = busy_s(spans)
    update_s = sum(span.task.seconds for span in spans if span.task.name == "update" and span.task.stream == "compute")
    del parts["compute"]
    for name in ("products", "attention", "moving"):
        parts[name] = passes * sum(getattr(each, name) for pair in seconds.values() for each in pair)
    return spans, parts | {"update": update_s}


def _host(setup: Setup, machine: Machine, sharing: Sharing, constants: Pace) -> Host:
    engine, gpu = Engine(setup), GPUS[machine.gpu]
    fsdp = getattr(setup, "fsdp", None)
    owned = trained(setup.model) / (setup.ranks if engine.stage or fsdp else 1)
    away = engine.optimizer_home != "none"
    update_s = UPDATE_BYTES[setup.precision] * owned / (gpu.memory_bytes_per_s * constants.moving_share)
    local, disk_s = min(setup.ranks, machine.gpus_per_node), 0.0
    if away:
        update_s = adam_on_host_s(owned * local)
    if engine.optimizer_home == "nvme" and machine.disk_bytes_per_s:
        moved = estimate.disk_bytes(engine)
        disk_s = local * (moved["read_per_step"] + moved["written_per_step"]) / machine.disk_bytes_per_s
    return Host(
        on_host=away,
        weights_on_host=engine.weights_home != "none",
        owned=owned,
        update_s=update_s,
        element_bytes=setup.weight_bytes,
        bytes_per_s=papers.LINKS[gpu.host_link].bytes_per_s * constants.host_link_share,
        ranks=setup.ranks if engine.stage else 1,
        disk_s=disk_s,
    )
