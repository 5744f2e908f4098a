"""What a rank holds at each moment of a step under PyTorch's FSDP, a unit being a layer of the model.

Followed is FSDP2 of torch 2.13 (`torch/distributed/fsdp/_fully_shard`): what is not in a layer is the root unit, which
stays whole from its forward pass to the end of its backward pass. FSDP1 gathers into the weights directly, and keeps as
many bytes: instead of a buffer and the weights made from it there are the weights of two units.

Each pass reduces its gradients. Accelerate's default for accumulation (`no_sync`) would keep whole gradients instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from study.theory.architecture import tensors
from study.theory.profile import Held, Profile, Tensor
from study.theory.setup import Setup

ROOT = "root"


@dataclass(frozen=True)
class Sharding:
    """The units of a model and how their weights are kept. Sizes are in bytes."""

    setup: Setup
    units: dict[str, list[Tensor]] = field(init=False)  # in the order of the forward pass; the root is first

    def __post_init__(self):
        units: dict[str, list[Tensor]] = {ROOT: []}
        for tensor in tensors(self.setup.model):
            units.setdefault(unit_of(tensor), []).append(tensor)
        object.__setattr__(self, "units", units)

    @property
    def ranks(self) -> int:
        """That share weights; with HYBRID_SHARD there are several such groups."""
        return self.setup.sharing_ranks

    @property
    def releases(self) -> bool:
        """Whether a layer's weights are given back after the forward pass."""
        return self.setup.fsdp == "full_shard"

    def whole(self, unit: str) -> int:
        """Bytes of a unit's gathered weights."""
        return sum(tensor.elements for tensor in self.units[unit]) * self.setup.weight_bytes

    def buffer(self, unit: str) -> int:
        """Bytes of the buffer that a unit is gathered into before its tensors are copied out of it."""
        return self.whole(unit) if self.ranks > 1 else 0

    def gradient(self, unit: str) -> int:
        """Bytes of a unit's whole gradient, and of the buffer from which it is reduced."""
        return sum(tensor.elements for tensor in self.units[unit] if tensor.trains) * self.setup.weight_bytes

    def part(self, trains: bool | None = None) -> int:
        """Elements that a rank keeps: of each tensor a part, rounded up."""
        chosen = [t for unit in self.units.values() for t in unit if trains is None or t.trains == trains]
        return sum(ceil(tensor.elements / self.ranks) for tensor in chosen)

    def gradient_part(self, unit: str) -> int:
        """Bytes of the part of a unit's gradient that a rank keeps."""
        elements = sum(ceil(tensor.elements / self.ranks) for tensor in self.units[unit] if tensor.trains)
        return elements * self.setup.stored_bytes


def unit_of(tensor: Tensor) -> str:
    return tensor.block if tensor.block.startswith("layer") else ROOT


def standing(sharding: Sharding) -> dict[str, int]:
    """What stays during the whole step."""
    setup, trains = sharding.setup, sharding.part(trains=True)
    master = setup.state_bytes * trains if setup.precision == "bf16_cast" else 0
    return {
        "weights": trains * setup.stored_bytes + sharding.part(trains=False) * setup.frozen_bytes,
        "master": master,
        "moments": 2 * setup.state_bytes * trains,
    }


def after_step(sharding: Sharding) -> dict[str, int]:
    """FSDP1, which Accelerate takes by default, keeps the gradients until the next forward pass begins."""
    return {"gradients": sharding.part(trains=True) * sharding.setup.stored_bytes}


def moments(sharding: Sharding, profile: Profile) -> Iterator[tuple[str, dict]]:
    """The moments of the last pass of a step and of its update, each with what is held besides the states."""
    yield from (("backward", now) for now in _forward(sharding, profile))
    yield from (("backward", now) for now in _backward(sharding, profile))
    yield "update", _update(sharding)


def _update(sharding: Sharding) -> dict[str, int]:
    setup, trains = sharding.setup, sharding.part(trains=True)
    copies = setup.state_bytes * trains * (setup.optimizer == "foreach")
    master = 4 * trains if setup.precision == "bf16_cast" else 0  # the gradients in fp32 as well
    return after_step(sharding) | {"temporaries": copies + master}


def _earlier(sharding: Sharding) -> int:
    """Bytes of the gradients of earlier passes of the step."""
    return after_step(sharding)["gradients"] if sharding.setup.accumulation > 1 else 0


def _forward(sharding: Sharding, profile: Profile) -> Iterator[dict]:
    """Gathered are the root, what was not given back, and a unit with the buffer that it was copied from.

    That buffer stays until the next unit is copied, or the root's forward pass ends. The loss is computed after it.
    """
    whole, states = sharding.whole(ROOT), {"gradients": _earlier(sharding)}
    before, layers = ROOT, [unit for unit in sharding.units if unit != ROOT]
    for unit in layers:
        names = [tensor.name for tensor in sharding.units[unit] if tensor.name in profile.at_use]
        kept = max((profile.at_use[name] for name in names), default=0)
        gathering = whole + sharding.buffer(before) + sharding.buffer(unit)
        running = whole + sharding.buffer(unit) + sharding.whole(unit)
        yield states | {"activations": kept, "gathered_weights": max(gathering, running)}
        whole, before = whole + (0 if sharding.releases else sharding.whole(unit)), unit
    last = max((profile.at_use[t.name] for t in sharding.units[ROOT] if t.name in profile.at_use), default=0)
    yield states | {"activations": last, "gathered_weights": whole + sharding.buffer(before)}
    kept, in_use = profile.most
    yield states | {"activations": kept, "temporaries": in_use, "gathered_weights": whole}


def _backward(sharding: Sharding, profile: Profile) -> Iterator[dict]:
    """Follow the gradients. A unit's are reduced when the last of them is complete, and the root's at the end.

    What they are reduced from stays until the next unit's are reduced (FSDPParamGroup.post_backward).
    """
    layers = [unit for unit in sharding.units if unit != ROOT]
    waiting = 0 if sharding.releases else sum(map(sharding.whole, layers))  # whole since the forward pass
    parts, root, reducing = _earlier(sharding), 0, 0
    accumulates = sharding.setup.accumulation > 1
    unit, ready = ROOT, 0
    followed = [*profile.gradients, None]

    def moment(held: Held, extra: int, prefetched: int) -> dict:
        weights = sharding.whole(ROOT) + prefetched
        weights += waiting if not sharding.releases else sharding.whole(unit) if unit != ROOT else 0
        states = {"activations": held.kept, "gathered_weights": weights, "gradients": parts + root + ready}
        return states | {"buckets": reducing, "temporaries": held.in_use + extra}

    held = profile.most
    for gradient in followed:
        next_unit = unit_of(gradient.tensor) if gradient else None
        if unit != ROOT and next_unit != unit:  # the unit is done: its gradients move into a buffer
            waiting -= 0 if sharding.releases else sharding.whole(unit)
            ahead = _ahead(sharding, layers, unit)
            done, reducing = unit, 0
            unit = ROOT
            yield moment(held, sharding.gradient(done), ahead)
            reducing, ready = sharding.gradient(done), 0
            yield moment(held, _reduced(sharding, done), ahead)
            parts += 0 if accumulates else sharding.gradient_part(done)
        if gradient is None:
            break
        size = gradient.tensor.elements * sharding.setup.weight_bytes
        unit = next_unit
        ahead = _ahead(sharding, layers, unit) if unit != ROOT else 0
        yield moment(gradient.most, size, ahead)
        if unit == ROOT:
            root += size
        else:
            ready += size
        held = gradient.complete
        yield moment(held, 0, ahead)
    reducing = 0
    yield moment(held, sharding.gradient(ROOT), 0) | {"gathered_weights": 0}
    root, reducing = 0, sharding.gradient(ROOT)
    yield moment(held, _reduced(sharding, ROOT), 0) | {"gathered_weights": 0}


def _ahead(sharding: Sharding, layers: list[str], unit: str) -> int:
    """Bytes of the unit that is gathered while this one's backward pass runs: the one before it."""
    place = layers.index(unit)
    return sharding.buffer(layers[place - 1]) if place and sharding.releases else 0


def _reduced(sharding: Sharding, unit: str) -> int:
    """Bytes of a unit's part as it comes from the collective, and as it is kept if that is another type."""
    part = sharding.gradient_part(unit)
    setup = sharding.setup
    arrived = part * setup.weight_bytes // setup.stored_bytes
    return arrived + (part if setup.weight_bytes != setup.stored_bytes else 0)


def traffic(sharding: Sharding) -> dict[str, int]:
    """Bytes by collective of an optimizer step, counted as records do: the whole tensor of each."""
    if sharding.setup.ranks == 1:
        return {}
    root, layers = sharding.whole(ROOT), sum(sharding.whole(unit) for unit in sharding.units if unit != ROOT)
    steps = sharding.setup.accumulation
    reduced = sum(sharding.gradient(unit) for unit in sharding.units)
    between = {"all_reduce": reduced // sharding.ranks * steps} if sharding.setup.ranks > sharding.ranks else {}
    return between | {
        "reduce_scatter": reduced * steps,
        "all_gather": (root + layers * (2 if sharding.releases else 1)) * steps,
    }
