"""Cuts the tape of a pass into sections: what one layer does in one phase, and what comes around the layers.

Layers that do the same have equal sections, because a section counts layers from its own, and a tensor among those that
the section of its maker makes.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from torch import nn

from study.predict.trace.committed import MANY_LAYERS, MIDDLE, joined, longer
from study.predict.trace.recorder import Recorder, in_backward, tensors_in
from study.predict.trace.tape import Tape


class MarkingRecorder(Recorder):
    """Marks on the tape, with ("layer", phase, stack, layer), where each layer of a stack begins in each phase.

    A mark without a stack: its layers are done.
    """

    def follow(self, model: nn.Module) -> None:
        super().follow(model)
        stacks: list[str] = []
        for name, layers in model.named_modules():
            # A list inside a layer, such as its experts, is no stack.
            is_inside = any(name.startswith(f"{stack}.") for stack in stacks)
            if isinstance(layers, nn.ModuleList) and len(layers) > 1 and not is_inside:
                stacks.append(name)
                self._mark(layers, name)

    def _mark(self, layers: nn.ModuleList, stack: str) -> None:
        def forward(*layer) -> None:
            if not in_backward():  # where a layer runs again
                self.tape.append(("layer", "forward", *layer))

        def backward(values, *layer) -> None:
            with_gradient = [tensor for tensor in tensors_in(values) if tensor.requires_grad]
            if with_gradient and not in_backward():
                with_gradient[0].register_hook(lambda _: self.tape.append(("layer", "backward", *layer)))

        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, place=number: forward(stack, place))
            layer.register_forward_hook(lambda *values, place=number: backward(values[-1], stack, place))
        # The layers are done: after the last one in the forward pass, after the first one in the backward pass.
        first, *_, last = layers
        last.register_forward_hook(lambda *_: forward(None, 0))
        first.register_forward_pre_hook(lambda _, *values: backward(values, None, 0), with_kwargs=True)


class Place(NamedTuple):
    """Where on a tape an entry is. Around the layers, the stack and the layer are those before it."""

    phase: str
    stack: str
    layer: int


class TapeSection(NamedTuple):
    """Consecutive entries. Sections that are around the layers, and make tensors, have names of their own."""

    name: str  # with {} for the number of its layer
    layer: int
    entries: list[tuple]


AROUND = "around"


def cut(tape: Tape) -> list[TapeSection]:
    """Return the sections of a tape with marks."""
    sections: list[TapeSection] = []
    origins: list[tuple[TapeSection, int]] = []  # of each tensor: the section that makes it, and its number there
    for place, placed in groupby(_placed(tape), key=itemgetter(0)):
        name = f"{place.phase} {place.stack}.{{}}"
        if place.phase == AROUND:
            name = f"{AROUND} {len(sections)}"
        section = TapeSection(name, place.layer, [])
        made = 0
        for _, (kind, what, *rest) in placed:
            if kind == "made":
                origins.append((section, made))
                made += 1
            elif kind == "event":
                what, distance = _seen_from(place, what)
                rest = [distance, *rest]
            elif kind in ("freed", "gradient"):
                maker, nth = origins[what]
                # What is around the layers is known by its name alone.
                distance = 0 if maker.name.startswith(AROUND) else maker.layer - place.layer
                what, rest = maker.name, [distance, nth]
            section.entries.append((kind, what, *rest))
        if made and any(other.name == name and other.layer == section.layer for other in sections):
            raise ValueError(f"{name.format(section.layer)} comes twice")
        sections.append(section)
    return sections


def repeats(sections: list[TapeSection]) -> bool:
    """Return whether the layer in the middle does the same as the next one."""
    third, fourth = ([each[::2] for each in sections if each.layer == layer] for layer in (MIDDLE, MIDDLE + 1))
    return third == fourth


def lengthened(sections: list[TapeSection], layers: int) -> Tape:
    """Return the tape of a model with more layers: they repeat the one in the middle."""
    plan = [(section.name, section.layer, number) for number, section in enumerate(sections)]
    entries = {number: section.entries for number, section in enumerate(sections)}
    return joined(longer(plan, layers - MANY_LAYERS), entries)


def _placed(tape: Tape) -> Iterator[tuple[Place, tuple]]:
    """Yield each entry after its place. What is freed around the layers is placed by the layer that made it."""
    place = following = Place(AROUND, "", 0)
    makers: list[Place] = []
    for entry in tape:
        kind, what, *rest = entry
        if kind == "layer":
            stack, layer = rest
            following = Place(what, stack, layer) if stack else following._replace(phase=AROUND)
            continue
        if kind != "freed":  # a layer's inputs are freed after it has returned
            place = following
        if kind == "made":
            makers.append(place)
        if kind == "freed" and place.phase == AROUND and makers[what].phase != AROUND:
            yield makers[what]._replace(phase="after"), entry
        else:
            yield place, entry


def _seen_from(place: Place, event: str) -> tuple[str, int]:
    """Return the name of an event, and how many layers away from a place its tensor is."""
    named = re.fullmatch(rf"(\w+ {re.escape(place.stack)}\.)(\d+)(\..*)", event)
    if named is None:
        return event, 0
    return f"{named[1]}{{}}{named[3]}", int(named[2]) - place.layer
