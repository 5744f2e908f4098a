"""Makes the tape of a whole model from the tape of a model with fewer layers of each kind (`shorten` in tracing.py).

The marks on a tape cut it into sections: what one layer does in one phase, and what happens around the layers. A layer
that was left out gets the sections of a layer that was followed, with its own names and tensors. That is right only if
layers with the same surroundings do the same. So wherever a layer stands for others, two such layers are followed, and
their sections are compared entry by entry. The section of a layer may free tensors of its layer, of the two layers
beside it, and of what is around the layers. A section around the layers may free tensors of any layer.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any, NamedTuple

from study.predict.trace.tape import Tape, in_order


class Stack(NamedTuple):
    """A list of layers, by its name in the model."""

    name: str
    kinds: tuple[int, ...]  # of each layer; equal kinds have the same number
    kept: tuple[int, ...]  # the layers that stand for all, in their order

    def alike(self) -> list[list[int]]:
        """Return for each layer the kept layers that have the same surroundings among the kept layers."""
        same = defaultdict[tuple, list[int]](list)
        for place, key in zip(self.kept, surroundings([self.kinds[place] for place in self.kept]), strict=True):
            same[key].append(place)
        return [same[key] for key in surroundings(self.kinds)]


def surroundings(kinds: Sequence[int]) -> list[tuple]:
    """Return the kinds beside each layer of a stack, its own, and whether it is the first of a kind or at the end."""
    at_an_end = [kind not in kinds[:place] or place + 2 >= len(kinds) for place, kind in enumerate(kinds)]
    return list(zip((None, *kinds[:-1]), kinds, (*kinds[1:], None), at_an_end, strict=True))


class Followed(NamedTuple):
    """A pass as its layers were followed: the others repeat them."""

    tapes: list[Tape]  # of each row count
    stacks: list[Stack]  # those of which only some layers are on the tapes


class Unlike(Exception):
    """Layers that should be alike are not, so the model has to be followed with all of its layers."""


class Place(NamedTuple):
    """Where a section is: in a phase of a layer; without a stack, around the layers."""

    phase: str
    stack: str | None
    layer: int


class TensorRef(NamedTuple):
    """A tensor, as seen from the section that uses it."""

    origin: int  # the section that makes it: a number in Section.origins
    nth: int  # its number among the tensors made there


class Name(NamedTuple):
    """The name of an event, relative to the layer in whose section it is."""

    text: str
    distance: int  # in layers


@dataclass
class Section:
    """What a pass does in one phase of a layer, or between two marks around the layers."""

    entries: list[tuple] = field(default_factory=list)
    made: int = 0  # tensors
    # Where what it frees is made, and whether that is near: then `layer` counts the layers from here to there.
    origins: dict[tuple[Place, bool], int] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)  # the numbers of those of its tensors that the pass frees


class Sections:
    """The sections of a tape, with tensors and names relative to the section, and where the whole tape repeats them."""

    def __init__(self, tape: Tape, stacks: list[Stack]):
        self.stacks = {stack.name: stack for stack in stacks}
        self.followed, self._origins = _cut(tape)
        # Relative entries, so that those of alike layers can be compared, and used in other places.
        for place, section in self.followed.items():
            section.entries = [self._relative(place, *entry) for entry in section.entries]
        self.models = self._models()
        self.first: dict[Place, int] = {}  # the number of the first tensor of each section of the whole tape
        self.copies = defaultdict[Place, list[Place]](list)  # where the tape repeats each, if it does
        count = 0
        for place, model in self.models.items():
            self.copies[model].append(place)
            self.first[place] = count
            count += self.followed[model].made
        for stack in stacks:
            self._compare(stack)

    def _models(self) -> dict[Place, Place]:
        """Return for each section of the whole tape, in order, the followed section that it repeats."""
        models: dict[Place, Place] = {}
        for (phase, stack), places in groupby(self.followed, key=lambda place: place[:2]):
            if stack is None:
                models |= {place: place for place in places}
                continue
            # The backward pass begins with the last layer.
            direction = 1 if phase == "forward" else -1
            if tuple(place.layer for place in places) != self.stacks[stack].kept[::direction]:
                raise Unlike(f"the layers of {stack} do not run one after the other")
            layers = list(enumerate(self.stacks[stack].alike()))[::direction]
            models |= {Place(phase, stack, layer): Place(phase, stack, like[0]) for layer, like in layers}
        return models

    def _compare(self, stack: Stack) -> None:
        for phase, alike in product(("forward", "backward"), stack.alike()):
            first, *others = [self.followed.get(Place(phase, stack.name, layer)) for layer in alike]
            if first is None or any(other != first for other in others):
                raise Unlike(f"layers {alike} of {stack.name} do different things in the {phase} pass")

    def _relative(self, place: Place, kind: str, what: Any, *rest) -> tuple:
        if kind in ("freed", "gradient"):
            where, nth = self._origins[what]
            if kind == "freed":
                self.followed[where].freed.add(nth)
            near = bool(place.stack) and where.stack == place.stack
            if near:
                where = where._replace(layer=self._distance(place, where.layer))
            origins = self.followed[place].origins
            what = TensorRef(origins.setdefault((where, near), len(origins)), nth)
        elif kind == "event" and (named := re.fullmatch(rf"(\w+ {re.escape(place.stack or '')}\.)(\d+)(\..*)", what)):
            what = Name(named[1] + "{}" + named[3], self._distance(place, int(named[2])))
        return kind, what, *rest

    def _distance(self, place: Place, layer: int) -> int:
        order = self.stacks[place.stack or ""].kept
        layers = order.index(layer) - order.index(place.layer)
        if abs(layers) > 1:
            raise Unlike(f"{place} needs layer {layer}")
        return layers

    def first_at(self, place: Place, where: Place, near: bool) -> list[int]:
        """Return the number of the first tensor of each section that an origin names, seen from a place."""
        copies = self.copies[where]  # made around the layers, or in layers of another stack
        if near:
            copies = [where._replace(layer=place.layer + where.layer)]
        if not self.first.keys() >= {*copies}:
            raise Unlike(f"{place} frees what {copies} do not make")
        return [self.first[copy] for copy in copies]


def _cut(tape: Tape) -> tuple[dict[Place, Section], list[tuple[Place, int]]]:
    """Return the sections of a tape; and for each tensor, the section that makes it and its number there."""
    place = following = Place("around", None, 0)
    sections = {place: Section()}
    origins = []
    for entry in tape:
        if entry[0] == "layer":
            following = Place(*entry[1:])
            if following.stack is None:  # the layers are done
                following = Place("around", None, len(sections))
            continue
        if following != place and entry[0] != "freed":  # a layer's inputs are freed after it has returned
            place = following
            if place in sections:
                raise Unlike(f"{place} comes twice")
            sections[place] = Section()
        section = sections[place]
        section.entries.append(entry)
        if entry[0] == "made":
            origins.append((place, section.made))
            section.made += 1
    return sections, origins


def repeat(tape: Tape, stacks: list[Stack]) -> Tape:
    """Return the tape of the whole model."""
    sections = Sections(tape, stacks)
    # The tensors that have to be freed are those of each section's model, whatever frees them.
    freed: list[int] = []
    longer: Tape = []
    for place, model in sections.models.items():
        section = sections.followed[model]
        freed += [sections.first[place] + nth for nth in section.freed]
        first = [sections.first_at(place, *origin) for origin in section.origins]
        for entry in section.entries:
            kind, what, *rest = entry
            if isinstance(what, TensorRef):  # several tensors, if all layers make them
                longer += [(kind, number + what.nth) for number in first[what.origin]]
            elif isinstance(what, Name):
                longer.append((kind, what.text.format(place.layer + what.distance), *rest))
            else:
                longer.append(entry)
    if sorted(entry[1] for entry in longer if entry[0] == "freed") != sorted(freed):
        raise Unlike("some tensors would be freed twice, or never")
    return in_order(longer)
