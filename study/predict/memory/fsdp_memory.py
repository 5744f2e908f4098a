"""Bytes that a rank holds at each moment of a step under PyTorch's FSDP.

The code follows FSDP2 of torch 2.13 (`torch/distributed/fsdp/_fully_shard`). The weights of a unit are gathered and
reduced together. By default each layer is a unit, and the rest is the root, which stays whole from its forward pass to
the end of its backward pass. FSDP1 gathers into the weights directly and holds as many bytes: the weights of two units
instead of a buffer and the weights made from it. Each pass reduces its gradients.

Accelerate 1.15 (`utils/fsdp_utils.py`, fsdp2_prepare_model) makes more units. It reduces gradients only in the last
pass of a step; until then they are kept whole (`no_sync`).
"""

import re
from collections import Counter
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
# Accelerate's own units besides the layers, by the names that transformers gives to their tensors: the embeddings, the
# output matrix, and the last norm.
TOKENS = re.compile(r"(word_embeddings|wte|embed_in|embed_tokens|tok_embeddings|shared|patch_embeddings\.projection)\.")
ENDS = re.compile(
    r"^(lm_head|embed_out|proj_out)\.|^(?!encoder|decoder)\w+\.(ln_f|final_layer_norm|norm|layernorm|final_norm)\."
)


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
        # --- the units
        tied = self.by_accelerate and reads_out_by_embeddings(setup.model)
        self.first = TAIL if tied else EMBEDDINGS  # the unit of the embeddings, if they are in one
        units: dict[str, list[Tensor]] = {ROOT: [], self.first: []}
        self.unit_of: dict[str, str] = {}  # by the name of a tensor
        for tensor in setup.tensors:
            unit = self.unit_of[tensor.name] = self._unit(tensor)
            units.setdefault(unit, []).append(tensor)
        self.units = {unit: tensors for unit, tensors in units.items() if tensors or unit == ROOT}
        self.stay = ({ROOT, TAIL} if self.releases else set(self.units)) & self.units.keys()
        self.late = {ROOT, self.first} & self.units.keys()
        self.trained = {unit: [each for each in tensors if each.trains] for unit, tensors in self.units.items()}
        # --- their sizes: gathered weights, and whole gradients; the buffer that is reduced has as many bytes
        self.whole = {unit: self._bytes(tensors) for unit, tensors in self.units.items()}
        self.gradient = {unit: self._bytes(tensors) for unit, tensors in self.trained.items()}
        # A rank's elements of a unit's gradient, and those of all: its part of each tensor, rounded up.
        self.trained_part = {unit: sum(map(self.elements, tensors)) for unit, tensors in self.trained.items()}
        self.part = sum(self.trained_part.values())
        self.gradients_bytes = self.part * setup.stored_bytes  # of the gradients, as the optimizer takes them
        # The tensors as the optimizer has them.
        self.pieces = [replace(each, shape=self.shape(each)) for each in setup.tensors if each.trains]
        # --- what stays from step to step, and what is on the host, if there is a GPU
        # FSDP1 keeps the gradients until the next forward pass begins.
        self.after_step = {} if self.by_accelerate else {"gradients": self.gradients_bytes}
        self.on_host = ["weights", "master", "moments"] if setup.fsdp_offload else []
        self.beside_on_host_bytes = self.gradients_bytes

    def _unit(self, tensor: Tensor) -> str:
        if tensor.block.startswith("layer"):
            return tensor.block
        if self.by_accelerate and ENDS.search(tensor.name):
            return TAIL
        return self.first if self.by_accelerate and TOKENS.search(tensor.name) else ROOT

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a rank's part. FSDP2 divides by rows and pads the last ones; FSDP1 divides anywhere."""
        if self.by_accelerate:
            return (ceil(tensor.shape[0] / self.ranks), *tensor.shape[1:])
        return (ceil(tensor.elements / self.ranks),)

    def elements(self, tensor: Tensor) -> int:
        return prod(self.shape(tensor))

    def _bytes(self, tensors: list[Tensor]) -> int:
        """Bytes of whole tensors, with the rows that FSDP2 pads."""
        elements = sum(tensor.elements for tensor in tensors)
        if self.by_accelerate:
            elements = sum(map(self.elements, tensors)) * self.ranks
        return elements * self.setup.weight_bytes

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
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        if self.setup.ranks == 1:
            return {}
        passes = self.setup.accumulation
        once = sum(self.whole[unit] for unit in self.stay)
        gathered = (2 * sum(self.whole.values()) - once) * passes  # the others again in the backward pass
        reduced = sum(self.gradient.values())
        if not self.keeps_whole_gradients:
            reduced *= passes
        moved = {"reduce_scatter": reduced, "all_gather": gathered}
        if self.setup.ranks > self.setup.sharing_ranks:  # between the groups
            moved = {"all_reduce": reduced // self.ranks} | moved
        return moved


def moments(sharding: Sharding, profile: Profile) -> Iterator[tuple[str, dict]]:
    """The moments of a step's last pass and of its update, each with what is held besides the states."""
    setup = sharding.setup
    state = Pass(sharding)
    yield from (("backward", now) for now in state.forward(profile))
    yield from (("backward", now) for now in state.backward(profile))
    if setup.fsdp_offload and setup.on_gpu:
        return  # the update is the host's
    made_bytes = setup.made_bytes(sharding.pieces)
    if setup.keeps_master:  # the gradients in fp32 as well
        made_bytes += 4 * sharding.part
    yield "update", {"gradients": sharding.gradients_bytes, "temporaries": made_bytes}


class Pass:
    """A forward and a backward pass: the units that are whole, and the bytes of gradients."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.setup = sharding.setup
        self.alive = set(sharding.stay)
        self.reducing = 0  # the unit reduced last; it stays until the next unit's gradients are complete
        # Gradients of earlier passes are whole, or a rank's parts.
        self.gradients: Counter[str] = Counter()
        self.parts = 0
        if sharding.keeps_whole_gradients:
            self.gradients.update(sharding.gradient)
        elif self.setup.accumulation > 1:
            self.parts = sharding.gradients_bytes

    def forward(self, profile: Profile) -> Iterator[dict]:
        """Weights are the root's, those not released, and those of a unit with the buffer it was copied from.

        That buffer stays until the next unit is copied, or until the root's forward pass ends. The loss comes after
        that.
        """
        sharding = self.sharding
        whole = sharding.whole[ROOT]
        states = {"gradients": self.parts + self.gradients.total()}
        at_use = {
            unit: [profile.at_use[each.name] for each in tensors if each.name in profile.at_use] or [0]
            for unit, tensors in sharding.units.items()
        }
        before = ROOT
        for unit in [*sharding.units][1:]:  # the root is the first
            running = whole + sharding.buffer(unit) + sharding.whole[unit]
            # While a unit is copied, a variable of wait_for_unshard still holds the buffer of the unit before.
            copying = running + sharding.buffer(before)
            yield states | {"activations": min(at_use[unit]), "gathered_weights": copying}
            kept = min(at_use[unit]) if unit in sharding.late else max(at_use[unit])
            yield states | {"activations": kept, "gathered_weights": running}
            if unit in sharding.stay:
                whole += sharding.whole[unit]
            before = unit
        yield states | {"activations": max(at_use[ROOT]), "gathered_weights": whole + sharding.buffer(before)}
        kept, in_use = profile.most
        yield states | {"activations": kept, "temporaries": in_use, "gathered_weights": whole}

    def backward(self, profile: Profile) -> Iterator[dict]:
        """Follow the gradients. A unit's are reduced when the last of them is complete; those of late units at the end.

        The buffer that they are reduced from stays until the next unit is reduced (FSDPParamGroup.post_backward).
        """
        sharding = self.sharding
        usage = profile.most
        begins = True  # until the first gradient the loss holds the most, and nothing is gathered yet
        for unit, same_unit in groupby(profile.gradients, lambda each: sharding.unit_of[each.tensor.name]):
            gradients = [*same_unit]
            ahead = self.ahead(unit)
            if unit not in self.alive:
                if begins:  # a frozen head: its part of the loss is freed before the layer's begins
                    usage = gradients[0].complete
                    gradients[0] = gradients[0]._replace(most=usage)
                self.alive.add(unit)
                if sharding.by_accelerate:  # copied out of the buffer that it was gathered into
                    yield self.moment(usage, 0, sharding.buffer(unit))
            for tensor, most, complete in gradients:
                size = tensor.elements * self.setup.weight_bytes
                yield self.moment(most, size, 0 if begins and unit == TAIL else ahead)
                usage = complete
                begins = False
                if sharding.keeps_whole_gradients:  # it is added to that of earlier passes
                    yield self.moment(usage, size, ahead)
                else:
                    self.gradients[unit] += size
                    yield self.moment(usage, 0, ahead)
            if unit not in sharding.late:
                yield from self.reduced(unit, usage, ahead)
        if not sharding.by_accelerate:
            self.alive.clear()
        for late in [ROOT, *(sharding.late - {ROOT})]:
            yield from self.reduced(late, usage, 0)

    def ahead(self, unit: str) -> int:
        """Bytes of the unit before this one, which is gathered while this one's backward pass runs."""
        order = [*self.sharding.units]
        before = order[order.index(unit) - 1]
        return 0 if unit in self.sharding.late or before in self.sharding.stay else self.sharding.buffer(before)

    def reduced(self, unit: str, usage: Held, ahead: int) -> Iterator[dict]:
        """The moments when a unit is done: its gradients move into a buffer, from which they are reduced."""
        sharding, setup = self.sharding, self.setup
        self.alive.discard(unit)
        self.reducing = 0
        yield self.moment(usage, sharding.gradient[unit], ahead)
        self.reducing = sharding.gradient[unit]
        del self.gradients[unit]
        part = sharding.trained_part[unit] * setup.stored_bytes
        arrived = part
        if setup.reduced_bytes != setup.stored_bytes:  # as the collective delivers it, and as it is kept
            arrived += sharding.trained_part[unit] * setup.reduced_bytes
        if sharding.by_accelerate and sharding.trained[unit]:  # the last, kept by a loop's variable (foreach_reduce)
            arrived += sharding.trained[unit][-1].elements * setup.weight_bytes
        yield self.moment(usage, arrived, ahead)
        if setup.accumulation == 1 or sharding.keeps_whole_gradients:
            self.parts += part

    def moment(self, usage: Held, extra: int, ahead: int) -> dict:
        weights = sum(self.sharding.whole[unit] for unit in self.alive) + ahead
        gradients = self.gradients.total()
        if not (self.setup.fsdp_offload and self.setup.on_gpu):  # else a rank's parts are on the host
            gradients += self.parts
        states = {"activations": usage.kept, "gathered_weights": weights, "buckets": self.reducing}
        return states | {"gradients": gradients, "temporaries": usage.in_use + extra}
