"""Bytes that a rank holds at each moment of a step under PyTorch's FSDP.

The code follows FSDP2 of torch 2.13 (`torch/distributed/fsdp/_fully_shard`). The weights of a unit are gathered and
reduced together. By default each layer is a unit, and the rest is the root, which stays whole from its forward pass to
the end of its backward pass. FSDP1 gathers into the weights directly and holds as many bytes: the weights of two units
instead of a buffer and the weights made from it. Each pass reduces its gradients.

Accelerate 1.15 (`utils/fsdp_utils.py`, fsdp2_prepare_model) makes more units. It reduces gradients only in the last
pass of a step; until then they are kept whole (`no_sync`).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import ceil, prod

from study.predict.memory.fetches import reads_out_by_embeddings
from study.predict.setup import Setup
from study.predict.trace.tape import Held, Profile, Tensor

ROOT = "root"
EMBEDDINGS = "embeddings"
TAIL = "tail"
# Accelerate's own units besides the layers, by the names that transformers gives to their tensors.
TOKENS = re.compile(r"(word_embeddings|wte|embed_in|embed_tokens|tok_embeddings|shared|patch_embeddings\.projection)\.")
READS_OUT = re.compile(r"^(lm_head|embed_out|proj_out)\.")
FINAL_NORM = re.compile(r"^(?!encoder|decoder)\w+\.(ln_f|final_layer_norm|norm|layernorm|final_norm)\.")


class Sharding:
    """The units of a model and how their weights are kept. Sizes are in bytes.

    `units` are in the order of the forward pass, the root first. Those in `stay` are whole from the forward pass on.
    Those in `late` are reduced at the end, because their inputs need no gradient.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.by_accelerate = setup.fsdp_by == "accelerate"
        self.ranks = setup.state_ranks  # with HYBRID_SHARD there are several such groups
        self.releases = setup.fsdp == "full_shard"  # a layer's weights after the forward pass
        # A pass begins with the whole gradients of the passes before it.
        self.keeps_whole_gradients = self.by_accelerate and setup.accumulation > 1
        tied = self.by_accelerate and reads_out_by_embeddings(setup.model)
        self.first = TAIL if tied else EMBEDDINGS  # the unit of the embeddings, if they are in one
        self.units = self._units()
        self.stay = ({ROOT, TAIL} if self.releases else set(self.units)) & self.units.keys()
        self.late = {ROOT, self.first} & self.units.keys()
        self.unit_of = {tensor.name: unit for unit, tensors in self.units.items() for tensor in tensors}
        self.trained = {unit: [each for each in tensors if each.trains] for unit, tensors in self.units.items()}
        # Bytes of a unit's gathered weights, and of its whole gradient; the buffer that is reduced has as many.
        self.whole = {unit: self._bytes(tensors) for unit, tensors in self.units.items()}
        self.gradient = {unit: self._bytes(tensors) for unit, tensors in self.trained.items()}
        # A rank's elements of a unit's gradient, and those of all: its part of each tensor, rounded up.
        self.trained_part = {unit: sum(map(self.elements, tensors)) for unit, tensors in self.trained.items()}
        self.part = sum(self.trained_part.values())
        self.gradients_bytes = self.part * setup.stored_bytes  # of the gradients, as the optimizer takes them

    def _units(self) -> dict[str, list[Tensor]]:
        units: dict[str, list[Tensor]] = {ROOT: []}
        if self.by_accelerate:
            units[self.first] = []
        for tensor in self.setup.tensors:
            units.setdefault(self._unit(tensor), []).append(tensor)
        return {unit: tensors for unit, tensors in units.items() if tensors or unit == ROOT}

    def _unit(self, tensor: Tensor) -> str:
        if tensor.block.startswith("layer"):
            return tensor.block
        if not self.by_accelerate:
            return ROOT
        if READS_OUT.search(tensor.name) or FINAL_NORM.search(tensor.name):
            return TAIL
        return self.first if TOKENS.search(tensor.name) else ROOT

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a rank's part. FSDP2 divides by rows and pads the last ones; FSDP1 divides anywhere."""
        if not self.by_accelerate:
            return (ceil(tensor.elements / self.ranks),)
        return (ceil(tensor.shape[0] / self.ranks), *tensor.shape[1:])

    def elements(self, tensor: Tensor) -> int:
        return prod(self.shape(tensor))

    def _bytes(self, tensors: list[Tensor]) -> int:
        """Bytes of whole tensors, with the rows that FSDP2 pads."""
        padded = (self.elements(tensor) * self.ranks if self.by_accelerate else tensor.elements for tensor in tensors)
        return sum(padded) * self.setup.weight_bytes

    @property
    def pieces(self) -> list[Tensor]:
        """The tensors as the optimizer has them."""
        return [replace(each, shape=self.shape(each)) for trained in self.trained.values() for each in trained]

    def buffer(self, unit: str) -> int:
        """Bytes of the buffer that a unit is gathered into, before its tensors are copied out of it."""
        return self.whole[unit] if self.ranks > 1 else 0

    @property
    def standing(self) -> dict[str, int]:
        """Bytes that stay during the whole step."""
        setup = self.setup
        return {
            "weights": setup.scales_bytes + sum(self.elements(each) * setup.kept_bytes(each) for each in setup.tensors),
            "master": setup.state_bytes * self.part if setup.keeps_master else 0,
            "moments": setup.moments_bytes(self.pieces),
        }

    @property
    def after_step(self) -> dict[str, int]:
        """Bytes that stay from step to step. FSDP1 keeps the gradients until the next forward pass begins."""
        return {} if self.by_accelerate else {"gradients": self.gradients_bytes}

    @property
    def on_host(self) -> list[str]:
        """What is on the host, if there is a GPU. The gradients come on top."""
        return ["weights", "master", "moments"] if self.setup.fsdp_offload else []

    @property
    def beside_on_host_bytes(self) -> int:
        return self.gradients_bytes

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        if self.setup.ranks == 1:
            return {}
        passes = self.setup.accumulation
        gathered = sum(self.whole[unit] * (1 if unit in self.stay else 2) for unit in self.units) * passes
        reduced = sum(self.gradient.values()) * (1 if self.keeps_whole_gradients else passes)
        moved = {"reduce_scatter": reduced, "all_gather": gathered}
        if self.setup.ranks > self.setup.sharing_ranks:  # between the groups
            return {"all_reduce": reduced // self.ranks} | moved
        return moved


def moments(sharding: Sharding, profile: Profile) -> Iterator[tuple[str, dict]]:
    """The moments of a step's last pass and of its update, each with what is held besides the states."""
    setup = sharding.setup
    yield from (("backward", now) for now in _forward(sharding, profile))
    yield from (("backward", now) for now in _backward(sharding, profile))
    made_bytes = setup.made_bytes(sharding.pieces)
    if setup.fsdp_offload and setup.on_gpu:
        return  # the update is the host's
    if setup.keeps_master:  # the gradients in fp32 as well
        made_bytes += 4 * sharding.part
    yield "update", {"gradients": sharding.gradients_bytes, "temporaries": made_bytes}


def _forward(sharding: Sharding, profile: Profile) -> Iterator[dict]:
    """The gathered weights are the root's, those not released, and those of a unit with the buffer it was copied from.

    That buffer stays until the next unit is copied, or until the root's forward pass ends. The loss comes after that.
    """
    whole = sharding.whole[ROOT]
    states = {"gradients": Backward(sharding).gradients_bytes}
    before = ROOT
    for unit in [*sharding.units][1:]:  # the root is the first
        at_use = [profile.at_use[tensor.name] for tensor in sharding.units[unit] if tensor.name in profile.at_use]
        running = whole + sharding.buffer(unit) + sharding.whole[unit]
        # While a unit is copied, a variable of wait_for_unshard still holds the buffer of the unit before.
        copying = running + sharding.buffer(before)
        yield states | {"activations": min(at_use, default=0), "gathered_weights": copying}
        kept = (min if unit in sharding.late else max)(at_use, default=0)
        yield states | {"activations": kept, "gathered_weights": running}
        whole = whole + (sharding.whole[unit] if unit in sharding.stay else 0)
        before = unit
    last = max((profile.at_use[t.name] for t in sharding.units[ROOT] if t.name in profile.at_use), default=0)
    yield states | {"activations": last, "gathered_weights": whole + sharding.buffer(before)}
    kept, in_use = profile.most
    yield states | {"activations": kept, "temporaries": in_use, "gathered_weights": whole}


class Backward:
    """The state of a backward pass: the units that are whole, and the bytes of gradients."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.alive = set(sharding.stay)
        whole = sharding.keeps_whole_gradients
        # Those of earlier passes: whole, or a rank's parts.
        self.gradients = {**sharding.gradient} if whole else dict.fromkeys(sharding.units, 0)
        self.parts = 0 if whole or sharding.setup.accumulation == 1 else sharding.gradients_bytes
        self.reducing = 0  # the unit reduced last; it stays until the next unit's gradients are complete

    @property
    def gradients_bytes(self) -> int:
        return self.parts + sum(self.gradients.values())

    def moment(self, usage: Held, extra: int, ahead: int) -> dict:
        sharding = self.sharding
        weights = sum(sharding.whole[unit] for unit in self.alive) + ahead
        on_host = self.parts if sharding.setup.fsdp_offload and sharding.setup.on_gpu else 0
        states = {"activations": usage.kept, "gathered_weights": weights, "buckets": self.reducing}
        return states | {"gradients": self.gradients_bytes - on_host, "temporaries": usage.in_use + extra}

    def ahead(self, unit: str) -> int:
        """Bytes of the unit before this one, which is gathered while this one's backward pass runs."""
        order = [*self.sharding.units]
        before = order[order.index(unit) - 1]
        return 0 if unit in self.sharding.late or before in self.sharding.stay else self.sharding.buffer(before)

    def reduced(self, unit: str, usage: Held, ahead: int) -> Iterator[dict]:
        """The moments when a unit is done: its gradients move into a buffer, from which they are reduced."""
        sharding = self.sharding
        setup = sharding.setup
        self.alive.discard(unit)
        self.reducing = 0
        yield self.moment(usage, sharding.gradient[unit], ahead)
        self.reducing = sharding.gradient[unit]
        self.gradients[unit] = 0
        arrived = sharding.trained_part[unit] * setup.reduced_bytes
        part = sharding.trained_part[unit] * setup.stored_bytes
        if setup.reduced_bytes != setup.stored_bytes:  # as the collective delivers it, and as it is kept
            arrived += part
        if sharding.by_accelerate and sharding.trained[unit]:  # the last, kept by a loop's variable (foreach_reduce)
            arrived += sharding.trained[unit][-1].elements * setup.weight_bytes
        yield self.moment(usage, arrived, ahead)
        if setup.accumulation == 1 or sharding.keeps_whole_gradients:
            self.parts += part


def _backward(sharding: Sharding, profile: Profile) -> Iterator[dict]:
    """Follow the gradients. A unit's gradients are reduced when the last of them is complete; late units at the end.

    The buffer that they are reduced from stays until the next unit is reduced (FSDPParamGroup.post_backward).
    """
    state = Backward(sharding)
    whole = sharding.keeps_whole_gradients
    usage = profile.most
    begins = True  # until the first gradient the loss holds the most, and nothing is gathered yet
    for unit, same_unit in groupby(profile.gradients, lambda each: sharding.unit_of[each.tensor.name]):
        gradients = [*same_unit]
        ahead = state.ahead(unit)
        if unit not in state.alive:
            if begins:  # a frozen head: its part of the loss is freed before the layer's begins
                usage = gradients[0].complete
                gradients[0] = gradients[0]._replace(most=usage)
            state.alive.add(unit)
            if sharding.by_accelerate:  # copied out of the buffer that it was gathered into
                yield state.moment(usage, 0, sharding.buffer(unit))
        for tensor, most, complete in gradients:
            size = tensor.elements * sharding.setup.weight_bytes
            yield state.moment(most, size, 0 if begins and unit == TAIL else ahead)
            if not whole:
                state.gradients[unit] += size
            usage = complete
            yield state.moment(usage, size if whole else 0, ahead)
            begins = False
        if unit not in sharding.late:
            yield from state.reduced(unit, usage, ahead)
    if not sharding.by_accelerate:
        state.alive.clear()
    for late in [ROOT, *(sharding.late - {ROOT})]:
        yield from state.reduced(late, usage, 0)
