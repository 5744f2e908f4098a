"""Bytes that a rank holds at each moment of a step under PyTorch's FSDP.

By default each layer is a unit, and the rest is the root, which stays whole from its forward pass to the end of its
backward pass. FSDP1 gathers into the weights directly and holds as many bytes as FSDP2 of torch 2.13: the weights of
two units instead of a buffer and the weights made from it. Each pass reduces its gradients. Accelerate 1.15
(fsdp2_prepare_model) makes more units, and keeps gradients whole until the last pass of a step (`no_sync`).
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from math import ceil, prod

from study.predict.engines.base import Blocks, Engine, Sent, elements_of
from study.predict.placement import Fsdp
from study.predict.trace.tape import Held, Profile, Tensor
from study.predict.training import Training

ROOT = "root"
EMBEDDINGS = "embeddings"
TAIL = "tail"
# Accelerate's own units besides the layers, by names of tensors: embeddings, and the output matrix and last norm.
TOKENS = re.compile(r"(word_embeddings|wte|embed_in|embed_tokens|tok_embeddings|shared|patch_embeddings\.projection)\.")
ENDS = re.compile(
    r"^(lm_head|embed_out|proj_out)\.|^(?!encoder|decoder)\w+\.(ln_f|final_layer_norm|norm|layernorm|final_norm)\."
)

# They scale or cap their logits, so two copies are there before the root ends. Granite was held to a virtual rank; of
# the others this was read in transformers 5.23.
SCALED_LOGITS = ("cohere", "cohere2", "gemma2", "granite", "granitemoe")


@dataclass(eq=False)
class Unit:
    """Tensors that are gathered, and whose gradients are reduced, together. Sizes are in bytes, but for `part`."""

    tensors: list[Tensor]
    trained: list[Tensor]
    whole: int  # its gathered weights
    gradient: int  # whole; the buffer that is reduced has as many bytes
    part: int  # a rank's elements of the gradient: its part of each tensor, rounded up
    stays: bool  # whole from the forward pass on
    is_late: bool  # reduced at the end, because its inputs need no gradient
    buffer: int  # that it is gathered into, before its tensors are copied out of it
    ahead: int = 0  # the buffer of the unit before this one, which is gathered while this one's backward pass runs


class FullySharded(Engine):
    """The units of a model in the order of the forward pass, the root first, and what a rank holds of them."""

    python = "fsdp"

    def __init__(self, training: Training, fsdp: Fsdp):
        super().__init__(training)
        self.fsdp = fsdp
        # Whether a rank's parts of gradients stay on the device, and the update is done there.
        self.updates_here = not (self.fsdp.offloads and self.placement.on_gpu)
        # A pass begins with the whole gradients of the passes before it.
        self.keeps_whole_gradients = self.reduces_once and self.passes > 1
        self.units = self._units()
        self.unit_of = {tensor.name: unit for unit in self.units for tensor in unit.tensors}
        self.late = [unit for unit in self.units if unit.is_late]
        self.part = sum(unit.part for unit in self.units)
        # Reduced gradients are converted to the type of the sharded weights (foreach_reduce, orig_dtype).
        self.gradients_bytes = self.part * self.recipe.gradient_bytes
        self.master_bytes = self.part * self.recipe.master_bytes
        self.pieces = [replace(tensor, shape=self.shape(tensor)) for tensor in self.tensors]
        if self.fsdp.offloads:
            self.on_host = ["weights", "master", "moments"]

    @property
    def reduces_once(self) -> bool:
        return self.fsdp.by_accelerate and not self.fsdp.sync_each_batch

    @functools.cached_property
    def first(self) -> str:
        """The unit of the embeddings, if they are in one."""
        # Tied: the last norm, the embeddings and the output matrix are one unit, because torch 2.13 refuses a tensor
        # that two units share (fsdp2_prepare_model; _validate_no_duplicate_params).
        tied = self.fsdp.by_accelerate and self.training.model.reads_out_by_embeddings
        return TAIL if tied else EMBEDDINGS

    def _units(self) -> list[Unit]:
        groups: dict[str, list[Tensor]] = {ROOT: [], self.first: []}
        for tensor in self.training.tensors:
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
        if not self.fsdp.by_accelerate:
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
            stays=name in (ROOT, TAIL) or not self.fsdp.reshards,
            is_late=name in (ROOT, self.first),
            buffer=whole if self.ranks > 1 else 0,
        )

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a rank's part. FSDP2 divides by rows and pads the last ones; FSDP1 divides anywhere."""
        rows, *width = tensor.shape if self.fsdp.by_accelerate else (tensor.elements,)
        return (ceil(rows / self.ranks), *width)

    def share(self, tensor: Tensor) -> int:
        """Return the elements of a rank's part, with the rows that pad it."""
        return prod(self.shape(tensor))

    def _bytes(self, tensors: list[Tensor]) -> int:
        elements = elements_of(tensors)
        if self.fsdp.by_accelerate:
            # Padded rows are gathered and reduced as well (_get_dim0_padded_size): on 8 ranks a
            # tensor of 2 rows counts as 8.
            elements = sum(map(self.share, tensors)) * self.ranks
        return elements * self.weight_bytes

    @property
    def handled(self) -> dict[str, float]:
        # A unit that stays whole is only reduced in the backward pass: 0.5 to 0.7 of the Python there on two CPU cores
        # (host_hooks.py, up to commit fdb9a1e5), and half is taken. Both passes are then 0.75 of the Python; 0.71
        # beside one H200.
        # Where a layer is computed again, hooks return at once (_fsdp_state.py, _pre_forward; FSDP1's, too).
        again = sum(len(unit.tensors) for unit in self.units if not unit.stays)
        return {"forward": len(self.training.tensors), "backward": (again + len(self.tensors)) / 2}

    @property
    def beside_on_host(self) -> dict[str, int]:
        return {"gradients": self.gradients_bytes}

    @property
    def after_step(self) -> dict[str, int]:
        # FSDP1 keeps the gradients until the next forward pass begins.
        return {} if self.fsdp.by_accelerate else {"gradients": self.gradients_bytes}

    def blocks(self, states: dict[str, int], moments: list[int]) -> Blocks:
        layers = [unit for unit in self.units if not unit.is_late]
        # Whole gradients are those of the root, of the layer that runs, and of the one that is reduced.
        in_pass = [unit.gradient for unit in self.late]
        gradients = [unit.gradient for unit in layers]
        in_pass += gradients if self.keeps_whole_gradients else 2 * [max(gradients)]
        # Whole weights are those of the root, of the running layer, of the next one, and of one that may still be read.
        streams = []
        for unit in self.units:
            if unit.stays:
                streams.append(unit.whole)
            elif unit.is_late:
                streams += 2 * [unit.whole]
            # Parts of gradients stay until the next forward pass (FSDP1, Accelerate's default), in another stream.
            if not self.fsdp.offloads:
                streams.append(unit.part * self.recipe.gradient_bytes)
        if self.fsdp.reshards:
            streams += 3 * [max(unit.whole for unit in layers if not unit.stays)]
        here = {role: size for role, size in states.items() if role != "gradients"}
        return self.blocks_of_tensors(here)._replace(in_pass=in_pass, in_other_streams=streams)

    def kept_inputs(self, unit: Unit, profile: Profile) -> float:
        """What stays of a layer whose backward pass has ended, until all have: with FSDP1 its input, and its gradient.

        FSDP1 asks when the inputs of a frozen unit have their gradients, and forgets the question at the end
        (_register_post_backward_reshard_only_hook). Reentrant recomputation makes these inputs leaves, which keep
        both. A layer is a frozen unit where transformers' Trainer gives PEFT's adapters units of their own. Seen with
        torch 2.13 and PEFT 0.21 on a CPU; 58 published peaks that were up to 29 % low are within 7 %.
        """
        model, loop = self.training.model, self.training.loop
        layers = [each for each in self.units if each.tensors and self.training.computes_again(each.tensors[0].block)]
        if not (loop.reentrant and model.is_partly_frozen and unit in layers) or self.fsdp.by_accelerate:
            return 0
        starts = [_at_use(profile, each)[0] for each in layers[:2]]
        return 2 * (starts[-1] - starts[0])

    def sent(self) -> Iterator[Sent]:
        reductions = 1 if self.reduces_once else self.passes
        reduced_bytes = reductions * sum(unit.gradient for unit in self.units)
        whole_bytes = self.passes * sum(unit.whole for unit in self.units)
        # Units that do not stay are gathered again in the backward pass.
        again_bytes = self.passes * sum(unit.whole for unit in self.units if not unit.stays)
        if self.placement.ranks > 1:
            yield Sent("backward", "reduce_scatter", reduced_bytes, self.ranks)
            yield Sent("forward", "all_gather", whole_bytes, self.ranks)
            yield Sent("backward", "all_gather", again_bytes, self.ranks)
        # Within a group the gradients are scattered first, so groups exchange only a rank's part.
        if self.placement.ranks > self.ranks:  # between the groups
            groups = self.placement.ranks // self.ranks
            yield Sent("backward", "all_reduce", reduced_bytes // self.ranks, groups, self.ranks)
        if self.fsdp.offloads:
            yield Sent("forward", "host", whole_bytes / self.ranks)
            yield Sent("backward", "host", again_bytes / self.ranks)
        yield from self.sent_to_host(reductions)

    def in_pass(self, profile: Profile) -> Iterator[dict]:
        passes = Passes(self)
        return chain(passes.forward(profile), passes.backward(profile))

    def in_update(self) -> list[dict]:
        made_bytes = self.made_bytes
        if self.master_bytes:  # the gradients in fp32 as well
            made_bytes += 4 * self.part
        return [{"gradients": self.gradients_bytes, "temporaries": made_bytes}]


class Passes:
    """A forward and a backward pass: the units that are whole, and the bytes of gradients."""

    def __init__(self, engine: FullySharded):
        self.engine = engine
        self.alive = {unit for unit in engine.units if unit.stays}
        self.reducing = 0  # the unit reduced last; it stays until the next unit's gradients are complete
        self.inputs = 0.0  # of layers whose backward pass has ended
        # Gradients of earlier passes are whole, or a rank's parts.
        self.gradients = Counter[Unit]()
        self.parts = 0
        if engine.keeps_whole_gradients:
            self.gradients.update({unit: unit.gradient for unit in engine.units})
        elif engine.passes > 1:
            self.parts = engine.gradients_bytes

    def forward(self, profile: Profile) -> Iterator[dict]:
        """Follow weights. The buffer that a unit is copied from stays until the next is copied, or the root ends."""
        states = {"gradients": self.parts + self.gradients.total()}
        root, *others = self.engine.units
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
        ends = max(profile.at_use.values())
        training = self.engine.training
        if training.model.family in SCALED_LOGITS:
            ends += 2 * training.tokens * (training.model.look.vocabulary or 0) * training.recipe.product_bytes
        yield states | {"activations": ends, "gathered_weights": whole + before.buffer}
        yield profile.most.beside(states | {"gathered_weights": whole})

    def backward(self, profile: Profile) -> Iterator[dict]:
        """Follow gradients. A unit's are reduced when the last of them is complete, those of late units at the end."""
        engine = self.engine
        usage = profile.most
        begins = True  # until the first gradient the loss holds the most, and nothing is gathered yet
        for unit, same_unit in groupby(profile.gradients, lambda each: engine.unit_of[each.tensor.name]):
            gradients = [*same_unit]
            if unit not in self.alive:
                if begins:  # a frozen head: its part of the loss is freed before the layer's begins
                    usage = gradients[0].complete
                    gradients[0] = gradients[0]._replace(most=usage)
                self.alive.add(unit)
                if engine.fsdp.by_accelerate:  # copied out of the buffer that it was gathered into
                    yield self.instant(usage, 0, unit.buffer)
            for tensor, most, usage in gradients:
                size = tensor.elements * engine.weight_bytes
                if begins and unit.stays:
                    yield self.instant(most, size, 0)
                    most = profile.at_first_gradient  # the unit before is gathered when the loss has its gradient
                yield self.instant(most, size, unit.ahead)
                begins = False
                if not engine.keeps_whole_gradients:  # else it is added to that of earlier passes
                    self.gradients[unit] += size
                    size = 0
                yield self.instant(usage, size, unit.ahead)
            if not unit.is_late:
                yield from self.reduced(unit, usage)
                self.inputs += engine.kept_inputs(unit, profile)
        for unit in engine.late:
            yield from self.reduced(unit, usage)

    def reduced(self, unit: Unit, usage: Held) -> Iterator[dict]:
        """The instants when a unit is done: its gradients move into a buffer, from which they are reduced."""
        engine = self.engine
        self.alive.discard(unit)
        if unit.is_late and not engine.fsdp.by_accelerate:
            self.alive.clear()
        self.reducing = 0
        # All gradients of a unit are copied into the buffer before the first of them is freed (foreach_reduce).
        yield self.instant(usage, unit.gradient, unit.ahead)
        # The reduce-scatter runs in a stream of its own, so a reference keeps the buffer. One may be kept by default;
        # the next reduction waits and drops it (post_backward, reduce_scatter_max_input_buffers).
        self.reducing = unit.gradient
        del self.gradients[unit]
        part = unit.part * engine.recipe.gradient_bytes
        arrived = part
        if engine.reduced_bytes != engine.recipe.gradient_bytes:  # as the collective delivers it, and as it is kept
            arrived += unit.part * engine.reduced_bytes
        if engine.fsdp.by_accelerate and unit.trained:  # the last, kept by a loop's variable (foreach_reduce)
            arrived += unit.trained[-1].elements * engine.weight_bytes
        yield self.instant(usage, arrived, unit.ahead)
        if engine.passes == 1 or engine.keeps_whole_gradients:
            self.parts += part

    def instant(self, usage: Held, extra: int, ahead: int) -> dict:
        usage = usage._replace(kept=usage.kept + self.inputs)
        weights = sum(unit.whole for unit in self.alive) + ahead
        gradients = self.gradients.total()
        if self.engine.updates_here:  # else a rank's parts are on the host
            gradients += self.parts
        return usage.beside({"gathered_weights": weights, "buckets": self.reducing, "gradients": gradients}, extra)


def _at_use(profile: Profile, unit: Unit) -> list[float]:
    return sorted(profile.at_use[each.name] for each in unit.tensors if each.name in profile.at_use) or [0]
