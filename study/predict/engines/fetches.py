"""The weights that stage 3 holds whole, and when: DeepSpeed 0.19.8's partitioned_param_coordinator.py."""

import functools
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from study.predict.trace.tape import Tensor
from study.predict.trace.transformer import Transformer

LEAVES = ("mixtral", "qwen2_moe", "qwen3_moe")  # families whose sparse blocks are one module (leaf_module_config.py)


class Whole(NamedTuple):
    """Elements that a rank holds in addition to its own parts."""

    weights: int  # including those that are on their way
    flat: int  # of buffers from which weights were made


class Visit(NamedTuple):
    """The elements that are gathered when a pass reaches a module."""

    before: Whole  # while the module before it runs
    waiting: Whole  # when it has waited for its weights
    running: Whole
    released_elements: int  # elements that have been released until then, even if they are whole again


class Fetches(NamedTuple):
    """Elements of whole weights in stage 3, including the small ones that always stay whole."""

    # By tensor: the visit of its module. Of tied embeddings the last one of the pass, so forward that is the turn.
    forward: dict[str, Visit]
    turn: Visit  # of the last module of the forward pass
    backward: dict[str, Visit]
    fetched: int  # gathered in both passes, without those that always stay whole
    # Of both passes in order: what is made, with its elements, or freed, with 0.
    buffers: tuple[tuple[object, int], ...]


class Limits(NamedTuple):
    """Elements, from the config's section `zero_optimization`."""

    persistent: int  # smaller tensors always stay whole
    prefetch: int
    live: int  # of what is gathered ahead
    reuse: int  # what is used again sooner stays


@functools.cache  # ranks and rows change nothing here
def fetches(model: Transformer, tensors: tuple[Tensor, ...], limits: Limits) -> Fetches:
    """Follow DeepSpeed's coordinator through both passes. `tensors` are the model's as they are kept."""
    forward = _modules(model)
    # No gradient comes through frozen tables, but one through frozen input embeddings (enable_input_require_grads).
    tables = (tensor for tensor in model.tensors[1:] if tensor.block == "embeddings" and len(tensor.shape) == 2)
    without = {tensor.name for tensor in tables if not tensor.trains}
    backward = [names for names in forward[::-1] if not names or not without.issuperset(names)]
    # The very first pass records the order of modules, and fetches nothing ahead (is_complete_trace). All later passes
    # are alike: these are followed here.
    coordinator = Coordinator(tensors, [*forward, *backward], limits)
    visits = [*map(coordinator.visit, range(len(forward)))]
    back = [*map(coordinator.visit, range(len(forward), len(coordinator.order)))]
    back_by_name = _by_name(backward, back)
    return Fetches(_by_name(forward, visits), visits[-1], back_by_name, coordinator.fetched, tuple(coordinator.buffers))


def _by_name(modules: list[list[str]], visits: list[Visit]) -> dict[str, Visit]:
    return {name: visit for names, visit in zip(modules, visits, strict=True) for name in names}


@dataclass(eq=False)
class Flight:
    """Tensors that are gathered together."""

    flat: int  # elements of the buffer. A single tensor is gathered in place
    names: set[str]  # of those that no module has waited for


class Coordinator:
    """Which tensors are whole, and which DeepSpeed's coordinator fetches and releases at each module.

    Each module fetches its own tensors. Then it fetches ahead in the order of use, forward and back, at least as much
    as the prefetch bucket holds, as long as fewer elements are whole than may live. A module releases its tensors,
    unless they are used again within the reuse distance, or their next use was already fetched ahead. If it waits for
    one tensor of a flat buffer, all of its weights are made. The buffer stays until modules have waited for each.
    """

    def __init__(self, tensors: tuple[Tensor, ...], order: list[list[str]], limits: Limits):
        self.limits = limits
        self.order = order
        self.size = {tensor.name: tensor.elements for tensor in tensors}
        self.stay = {name for name, elements in self.size.items() if elements <= limits.persistent}
        self.queue = deque((name, step) for step, names in enumerate(order) for name in names)
        self.uses: dict[str, list[int]] = defaultdict(list)  # the steps in which a tensor is used
        for name, step in self.queue:
            self.uses[name].append(step)
        self.before = [0, *accumulate(map(self._elements, order))]  # elements used before a step
        self.last_fetched = dict.fromkeys(self.size, -1)  # the latest step for which a tensor was fetched
        self.whole = set(self.stay)
        self.always = self.alive = self._elements(self.stay)
        self.fetched = 0
        self.running = Whole(self.always, 0)
        self.flights: dict[str, Flight] = {}  # of tensors that no module has waited for
        self.arrived: list[Flight] = []  # those whose buffers are there, beside the weights made from them
        self.released_once: set[str] = set()
        self.released = 0  # their elements: to sum them at each visit takes long in deep models
        self.buffers: list[tuple[object, int]] = []

    def visit(self, step: int) -> Visit:
        """Fetch a module's tensors, wait for them, fetch ahead, and release what is not needed soon."""
        names = self.order[step]
        # The order is that of _fetch_sub_module_impl: fetch, wait, drop from the queue, fetch ahead. So at the wait the
        # weights that will be fetched ahead are not there yet.
        self._gather([name for name in names if name not in self.whole])  # those that were not fetched ahead
        waiting = Whole(self.alive, self._wait(names))
        # The module's own uses leave the queue.
        unseen = {name for name in names if self.last_fetched[name] < step}
        while unseen:  # until all tensors of the module have been seen in it
            name, self.last_fetched[name] = self.queue.popleft()
            unseen.discard(name)
        # Ahead, in the order of use. What always stays whole takes no room, and the last tensor may exceed it.
        room = min(self.limits.live - (self.alive - self.always), self.limits.prefetch)
        ahead: list[str] = []
        # A tensor that is whole is taken off the queue, too. Its number says that this use has been seen, and _release
        # keeps it.
        while self.queue and room > 0:
            name, self.last_fetched[name] = self.queue.popleft()
            if name not in self.whole and name not in ahead:
                ahead.append(name)
                room -= self.size[name]
        self._gather(ahead)
        before, self.running = self.running, Whole(self.alive, self._flat())
        released = self.released
        self._release(step)
        return Visit(before, waiting, self.running, released)

    def _elements(self, names: Iterable[str]) -> int:
        return sum(self.size[name] for name in names)

    def _flat(self) -> int:
        return sum(flight.flat for flight in self.arrived)

    def _gather(self, names: list[str]) -> None:
        elements = self._elements(names)
        # One tensor: its buffer becomes its data (AllGatherHandle). Several: each weight is a torch.cat of pieces of
        # the buffer (AllGatherCoalescedHandle.wait), so for a while the weights are there twice.
        flight = Flight(elements if len(names) > 1 else 0, {*names})
        if names:
            self.buffers.append((flight if flight.flat else names[0], elements))
        self.flights |= dict.fromkeys(names, flight)
        self.whole |= {*names}
        self.alive += elements
        self.fetched += elements

    def _wait(self, names: list[str]) -> int:
        for name in names:
            flight = self.flights.pop(name, None)
            if flight and flight not in self.arrived:
                self.arrived.append(flight)
                if flight.flat:
                    self.buffers += [(each, self.size[each]) for each in sorted(flight.names)]
        # Counted before any buffer goes: the copies are made while it is still there.
        most = self._flat()
        for flight in self.arrived:
            flight.names -= {*names}
            if flight.flat and not flight.names:
                self.buffers.append((flight, 0))
        self.arrived = [flight for flight in self.arrived if flight.names]
        return most

    def _release(self, step: int) -> None:
        # DeepSpeed has counted this step already when it releases, hence + 1. What was fetched for a later use stays.
        names = {name for name in self.order[step] if self.last_fetched[name] <= step + 1} - self.stay
        for name in names:
            # __params_to_release walks the modules that follow, and adds up their elements before it looks at the next
            # one.
            later = [self.before[use] for use in self.uses[name] if use > step]
            distance = later[0] - self.before[step + 1] if later else inf
            # Whatever may be live: with max_live_parameters 0 and a reuse distance of 1e9 a small Llama on two ranks
            # gathered each weight once, as this says.
            if distance >= self.limits.reuse:
                self.whole.discard(name)
                self.buffers.append((name, 0))
                self.alive -= self.size[name]
                if name not in self.released_once:
                    self.released_once.add(name)
                    self.released += self.size[name]


def _modules(model: Transformer) -> list[list[str]]:
    """The tensors of each module in the order of the forward pass. Empty for a module that only contains modules."""
    leaves = leaf_modules(model)
    modules: dict[str, list[str]] = {"": []}  # the model itself
    for tensor in model.tensors:
        parts = leaves.get(tensor.name, tensor.name.rpartition(".")[0]).split(".")
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), [])
        modules[".".join(parts)].append(tensor.name)
    return [*modules.values(), *([[model.tensors[0].name]] if model.reads_out_by_embeddings else [])]


@functools.cache
def leaf_modules(model: Transformer) -> dict[str, str]:
    """Return the mixture of experts that a tensor belongs to, if stage 3 fetches and reduces it as one module."""
    names = [tensor.name for tensor in model.tensors if model.family in LEAVES]
    mixtures = [name.removesuffix("experts.gate_up_proj") for name in names if name.endswith(".experts.gate_up_proj")]
    return {name: mixture[:-1] for mixture in mixtures for name in names if name.startswith(mixture)}
