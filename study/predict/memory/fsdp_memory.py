"""Bytes that a rank holds at each moment of a step under PyTorch's FSDP.

By default each layer is a unit, and the rest is the root, which stays whole from its forward pass to the end of its
backward pass. FSDP1 gathers into the weights directly and holds as many bytes as FSDP2 of torch 2.13: the weights of
two units instead of a buffer and the weights made from it. Each pass reduces its gradients. Accelerate 1.15
(fsdp2_prepare_model) makes more units, and keeps gradients whole until the last pass of a step (`no_sync`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import ceil, prod

from study.predict.memory.fetches import reads_out_by_embeddings
from study.predict.setup import Setup
from study.predict.trace.tape import Held, Profile, Tensor

ROOT = "root"
EMBEDDINGS = "embeddings"
TAIL = "tail"
# Accelerate's own units besides the layers, by names of tensors: embeddings, and the output matrix and last norm.
TOKENS = re.compile(r"(word_embeddings|wte|embed_in|embed_tokens|tok_embeddings|shared|patch_embeddings\.projection)\.")
ENDS = re.compile(
    r"^(lm_head|embed_out|proj_out)\.|^(?!encoder|decoder)\w+\.(ln_f|final_layer_norm|norm|layernorm|final_norm)\."
)


@dataclass(eq=False)
class Unit:
    """Tensors that are gathered together, and whose gradients are reduced together. Sizes are in bytes."""

    tensors: list[Tensor]
    trained: list[Tensor]
    whole: int  # its gathered weights
    gradient: int  # whole; the buffer that is reduced has as many bytes
    part: int  # a rank's elements of the gradient: its part of each tensor, rounded up
    stays: bool  # whole from the forward pass on
    is_late: bool  # reduced at the end, because its inputs need no gradient
    buffer: int  # that it is gathered into, before its tensors are copied out of it
    ahead: int = 0  # the buffer of the unit before this one, which is gathered while this one's backward pass runs


class Sharding:
    """The units of a model in the order of the forward pass, the root first, and what a rank holds of them."""

    swapped_bytes = 0  # FSDP writes to no disk

    def __init__(self, setup: Setup):
        self.setup = setup
        self.by_accelerate = setup.fsdp_by == "accelerate"
        self.ranks = setup.state_ranks  # with HYBRID_SHARD there are several such groups
        # A pass begins with the whole gradients of the passes before it.
        self.keeps_whole_gradients = self.by_accelerate and setup.accumulation > 1
        # Tied: the last norm, the embeddings and the output matrix are one unit, because torch 2.13 refuses a tensor
        # that two units share (fsdp2_prepare_model; _validate_no_duplicate_params).
        tied = self.by_accelerate and reads_out_by_embeddings(setup.model)
        self.first = TAIL if tied else EMBEDDINGS  # the unit of the embeddings, if they are in one
        self.units = self._units()
        self.unit_of = {tensor.name: unit for unit in self.units for tensor in unit.tensors}
        self.late = [unit for unit in self.units if unit.is_late]
        self.part = sum(unit.part for unit in self.units)
        # Reduced gradients are converted to the type of the sharded weights (foreach_reduce, orig_dtype).
        self.gradients_bytes = self.beside_on_host_bytes = self.part * setup.recipe.gradient_bytes
        self.pieces = [replace(each, shape=self.shape(each)) for each in setup.trained]
        # FSDP1 keeps the gradients until the next forward pass begins.
        self.after_step = {} if self.by_accelerate else {"gradients": self.gradients_bytes}
        self.on_host = ["weights", "master", "moments"] if setup.fsdp_offload else []

    def _units(self) -> list[Unit]:
        groups: dict[str, list[Tensor]] = {ROOT: [], self.first: []}
        for tensor in self.setup.tensors:
            groups.setdefault(self._name(tensor), []).append(tensor)
        units = [self._unit(name, tensors) for name, tensors in groups.items() if tensors or name == ROOT]
        for before, unit in pairwise(units):
            # pre_backward gathers a unit, and then already the one before it (_backward_prefetch). One that stayed
            # whole needs no gathering.
            if not (unit.is_late or before.stays):
                unit.ahead = before.buffer
        return units

    def _name(self, tensor: Tensor) -> str:
        if tensor.block.startswith("layer"):
            return tensor.block
        if not self.by_accelerate:
            return ROOT
        if ENDS.search(tensor.name):
            return TAIL
        return self.first if TOKENS.search(tensor.name) else ROOT

    def _unit(self, name: str, tensors: list[Tensor]) -> Unit:
        trained = [each for each in tensors if each.trains]
        whole = self._bytes(tensors)
        # The root is not resharded after its forward pass, since its backward pass would gather it at once: PyTorch's
        # own default (_fsdp_state.py, _lazy_init). Accelerate says the same of the tail. Embeddings get integers, which
        # need no gradient, so no hook of autograd ends their unit: a callback at the end of the backward pass does
        # (_root_post_backward_final_callback). A single rank gathers nothing (wait_for_unshard, world_size 1).
        return Unit(
            tensors=tensors,
            trained=trained,
            whole=whole,
            gradient=self._bytes(trained),
            part=sum(map(self.share, trained)),
            stays=name in (ROOT, TAIL) or self.setup.fsdp == "shard_grad_op",
            is_late=name in (ROOT, self.first),
            buffer=whole if self.ranks > 1 else 0,
        )

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a rank's part. FSDP2 divides by rows and pads the last ones; FSDP1 divides anywhere."""
        rows, *width = tensor.shape if self.by_accelerate else (tensor.elements,)
        return (ceil(rows / self.ranks), *width)

    def share(self, tensor: Tensor) -> int:
        """Return the elements of a rank's part, with the rows that pad it."""
        return prod(self.shape(tensor))

    def _bytes(self, tensors: list[Tensor]) -> int:
        elements = sum(tensor.elements for tensor in tensors)
        if self.by_accelerate:
            # Padded rows are gathered and reduced as well (_get_dim0_padded_size): on 8 ranks a
            # tensor of 2 rows counts as 8.
            elements = sum(map(self.share, tensors)) * self.ranks
        return elements * self.setup.weight_bytes

    @property
    def standing(self) -> dict[str, int]:
        setup = self.setup
        return {
            "weights": setup.scales_bytes + sum(self.share(each) * setup.kept_bytes(each) for each in setup.tensors),
            "master": setup.master_bytes * self.part,
            "moments": setup.moments_bytes(self.pieces),
        }

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        if self.setup.ranks == 1:
            return {}
        passes = self.setup.accumulation
        # Units that do not stay are gathered again in the backward pass.
        gathered = sum(unit.whole * (1 if unit.stays else 2) for unit in self.units) * passes
        reduced = sum(unit.gradient for unit in self.units)
        if not self.keeps_whole_gradients:
            reduced *= passes
        moved = {"reduce_scatter": reduced, "all_gather": gathered}
        # Within a group the gradients are scattered first, so groups exchange only a rank's part.
        if self.setup.ranks > self.setup.sharing_ranks:  # between the groups
            moved = {"all_reduce": reduced // self.ranks} | moved
        return moved


def moments(sharding: Sharding, profile: Profile) -> Iterator[tuple[str, dict]]:
    """Yield the moments of a step's last pass and of its update, each with what is held besides the states."""
    setup = sharding.setup
    state = Pass(sharding)
    for now in (*state.forward(profile), *state.backward(profile)):
        yield "backward", now
    if setup.fsdp_offload and setup.on_gpu:
        return  # the update is the host's
    made_bytes = setup.made_bytes(sharding.pieces)
    if setup.master_bytes:  # the gradients in fp32 as well
        made_bytes += 4 * sharding.part
    yield "update", {"gradients": sharding.gradients_bytes, "temporaries": made_bytes}


class Pass:
    """A forward and a backward pass: the units that are whole, and the bytes of gradients."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.setup = sharding.setup
        self.alive = {unit for unit in sharding.units if unit.stays}
        self.reducing = 0  # the unit reduced last; it stays until the next unit's gradients are complete
        # Gradients of earlier passes are whole, or a rank's parts.
        self.gradients = Counter[Unit]()
        self.parts = 0
        if sharding.keeps_whole_gradients:
            self.gradients.update({unit: unit.gradient for unit in sharding.units})
        elif self.setup.accumulation > 1:
            self.parts = sharding.gradients_bytes

    def forward(self, profile: Profile) -> Iterator[dict]:
        """Follow weights. The buffer that a unit is copied from stays until the next is copied, or the root ends."""
        states = {"gradients": self.parts + self.gradients.total()}
        root, *others = self.sharding.units
        whole = root.whole
        before = root
        for unit in others:
            at_use = _at_use(profile, unit)
            running = whole + unit.buffer + unit.whole
            # While a unit is copied, a variable of wait_for_unshard still holds the buffer of the unit before.
            yield states | {"activations": at_use[0], "gathered_weights": running + before.buffer}
            kept = at_use[0] if unit.is_late else at_use[-1]
            yield states | {"activations": kept, "gathered_weights": running}
            if unit.stays:
                whole += unit.whole
            before = unit
        yield states | {"activations": _at_use(profile, root)[-1], "gathered_weights": whole + before.buffer}
        yield profile.most.beside(states | {"gathered_weights": whole})

    def backward(self, profile: Profile) -> Iterator[dict]:
        """Follow gradients. A unit's are reduced when the last of them is complete, those of late units at the end."""
        sharding = self.sharding
        usage = profile.most
        begins = True  # until the first gradient the loss holds the most, and nothing is gathered yet
        for unit, same_unit in groupby(profile.gradients, lambda each: sharding.unit_of[each.tensor.name]):
            gradients = [*same_unit]
            if unit not in self.alive:
                if begins:  # a frozen head: its part of the loss is freed before the layer's begins
                    usage = gradients[0].complete
                    gradients[0] = gradients[0]._replace(most=usage)
                self.alive.add(unit)
                if sharding.by_accelerate:  # copied out of the buffer that it was gathered into
                    yield self.moment(usage, 0, unit.buffer)
            for tensor, most, usage in gradients:
                size = tensor.elements * self.setup.weight_bytes
                yield self.moment(most, size, 0 if begins and unit.stays else unit.ahead)
                begins = False
                if not sharding.keeps_whole_gradients:  # else it is added to that of earlier passes
                    self.gradients[unit] += size
                    size = 0
                yield self.moment(usage, size, unit.ahead)
            if not unit.is_late:
                yield from self.reduced(unit, usage)
        for unit in sharding.late:
            yield from self.reduced(unit, usage)

    def reduced(self, unit: Unit, usage: Held) -> Iterator[dict]:
        """The moments when a unit is done: its gradients move into a buffer, from which they are reduced."""
        sharding, setup = self.sharding, self.setup
        self.alive.discard(unit)
        if unit.is_late and not sharding.by_accelerate:
            self.alive.clear()
        self.reducing = 0
        # All gradients of a unit are copied into the buffer before the first of them is freed (foreach_reduce).
        yield self.moment(usage, unit.gradient, unit.ahead)
        # The reduce-scatter runs in a stream of its own, so a reference keeps the buffer. One may be kept by default;
        # the next reduction waits and drops it (post_backward, reduce_scatter_max_input_buffers).
        self.reducing = unit.gradient
        del self.gradients[unit]
        part = unit.part * setup.recipe.gradient_bytes
        arrived = part
        if setup.reduced_bytes != setup.recipe.gradient_bytes:  # as the collective delivers it, and as it is kept
            arrived += unit.part * setup.reduced_bytes
        if sharding.by_accelerate and unit.trained:  # the last, kept by a loop's variable (foreach_reduce)
            arrived += unit.trained[-1].elements * setup.weight_bytes
        yield self.moment(usage, arrived, unit.ahead)
        if setup.accumulation == 1 or sharding.keeps_whole_gradients:
            self.parts += part

    def moment(self, usage: Held, extra: int, ahead: int) -> dict:
        weights = sum(unit.whole for unit in self.alive) + ahead
        gradients = self.gradients.total()
        if not (self.setup.fsdp_offload and self.setup.on_gpu):  # else a rank's parts are on the host
            gradients += self.parts
        return usage.beside({"gathered_weights": weights, "buckets": self.reducing, "gradients": gradients}, extra)


def _at_use(profile: Profile, unit: Unit) -> list[float]:
    return sorted(profile.at_use[each.name] for each in unit.tensors if each.name in profile.at_use) or [0]
