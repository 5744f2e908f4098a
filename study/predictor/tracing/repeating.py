"""Makes the tape of a whole model from the tape of a model with fewer layers of each kind (`models/stacks.py`).

The marks on a tape cut it into sections: what one layer does in one phase, and what happens around the layers. A layer
that was left out gets the sections of a layer that was followed, with its own names and tensors. That is right only if
layers with the same surroundings do the same. So wherever a layer stands for others, two such layers are followed, and
their sections are compared entry by entry. The section of a layer may free tensors of its layer, of the two layers
beside it, and of what is around the layers. A section around the layers may free tensors of any layer.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from study.predictor.tracing.tape import Tape, in_order

Alike = dict[str, list[list[int]]]  # by the name of a stack, for each of its layers: those followed that do the same

Surroundings = tuple[int | None, int, int | None, bool]


@dataclass(frozen=True)
class Stack:
    """A list of layers, by its name in the model."""

    name: str
    kinds: tuple[int, ...]  # of each layer; equal kinds have the same number
    kept: tuple[int, ...]  # the layers that stand for all, in their order

    def alike(self, layers: int | None = None) -> list[list[int]]:
        """For each layer: the kept layers that have the same surroundings among the kept layers.

        With `layers`, the stack has so many layers of one kind.
        """
        of_kept = surroundings(tuple(self.kinds[place] for place in self.kept))
        same: dict[Surroundings, list[int]] = {}
        for place, key in zip(self.kept, of_kept, strict=True):
            same.setdefault(key, []).append(place)
        kinds = self.kinds if layers is None else (self.kinds[0],) * layers
        return [same[key] for key in surroundings(kinds)]


def surroundings(kinds: tuple[int, ...]) -> list[Surroundings]:
    """Return the surroundings of each layer of a stack."""
    ends = range(max(0, len(kinds) - 2), len(kinds))
    at_an_end = [kind not in kinds[:place] or place in ends for place, kind in enumerate(kinds)]
    return list(zip((None, *kinds[:-1]), kinds, (*kinds[1:], None), at_an_end, strict=True))


class Unlike(Exception):
    """Layers that should be alike are not, so the model has to be followed with all of its layers."""


class Place(NamedTuple):
    """Where a section is: in a phase of a layer; without a stack, around the layers."""

    phase: str
    stack: str | None
    layer: int


class Tensor(NamedTuple):
    """A tensor, relative to the section that uses it."""

    place: Place  # where it is made; if near, `layer` counts the layers from the section to there
    near: bool
    nth: int  # its number among the tensors made there
    allocation: tuple[int, bool]  # its bytes, and whether the backward pass makes it


@dataclass
class Section:
    entries: list[tuple] = field(default_factory=list)
    tensors: list[tuple[int, bool]] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)  # numbers of its tensors that are freed
    freed_around: list[tuple] = field(default_factory=list)  # tensors that other parts of the model free, and where


def repeat(tape: Tape, alike: Alike) -> Tape:
    """The tape of the model with all layers."""
    sections = _sections(tape, alike)
    _compare(sections, alike)
    models = models_of(sections, alike)
    first = {}
    count = 0
    copies = defaultdict(list)
    for place, model in models.items():
        first[place] = count
        count = count + len(sections[model].tensors)
        copies[model].append(place)

    def numbers(place: Place, tensor: Tensor) -> list[int]:
        if not tensor.near:
            return [first[copy] + tensor.nth for copy in copies[tensor.place]]
        where = Place(tensor.place.phase, place.stack, place.layer + tensor.place.layer)
        if where not in models or sections[models[where]].tensors[tensor.nth : tensor.nth + 1] != [tensor.allocation]:
            raise Unlike(f"{place} frees what {where} does not make")
        return [first[where] + tensor.nth]

    def at(place: Place, entry: tuple) -> list[tuple]:
        kind, what, *rest = entry
        if kind in ("freed", "gradient"):
            return [(kind, number) for number in numbers(place, what)]
        if kind == "event" and isinstance(what, tuple):
            return [(kind, f"{what[0]}{place.layer + what[1]}{what[2]}", *rest)]
        return [entry]

    longer = [each for place, model in models.items() for entry in sections[model].entries for each in at(place, entry)]
    freed = sorted(entry[1] for entry in longer if entry[0] == "freed")
    if freed != sorted(first[place] + nth for place, model in models.items() for nth in sections[model].freed):
        raise Unlike("some tensors would be freed twice, or never")
    return in_order(longer)


def _sections(tape: Tape, alike: Alike) -> dict[Place, Section]:
    """The sections of a tape in their order, with tensors and names relative to the section."""
    sections, origins = _cut(tape)
    of_stacks = {stack: followed(groups) for stack, groups in alike.items()}

    def distance(place: Place, layer: int) -> int:
        """Return the number of followed layers from a place to a layer."""
        order = of_stacks[place.stack or ""]
        layers = order.index(layer) - order.index(place.layer)
        if abs(layers) > 1:
            raise Unlike(f"{place} needs layer {layer}")
        return layers

    for place, section in sections.items():
        named = re.compile(rf"(\w+ {re.escape(place.stack)}\.)(\d+)(\..*)") if place.stack else None
        for at, (kind, what, *rest) in enumerate(section.entries):
            if kind in ("freed", "gradient"):
                made_in, number = origins[what]
                near = made_in.stack is not None and made_in.stack == place.stack
                where = made_in._replace(layer=distance(place, made_in.layer)) if near else made_in
                sections[made_in].freed |= {number} if kind == "freed" else set()
                section.entries[at] = (kind, Tensor(where, near, number, sections[made_in].tensors[number]))
                if made_in.stack and not near:
                    sections[made_in].freed_around.append((place, number))
            elif kind == "event" and named and (name := named.fullmatch(what)):
                section.entries[at] = (kind, (name[1], distance(place, int(name[2])), name[3]), *rest)
    return sections


def _cut(tape: Tape) -> tuple[dict[Place, Section], list[tuple[Place, int]]]:
    """The sections of a tape; and for each tensor, the section that makes it and its number there."""
    place = following = Place("around", None, 0)
    sections = {place: Section()}
    origins = []
    around = 0
    for entry in in_order(tape):
        if entry[0] == "layer":
            around += entry[2] is None
            following = Place(*entry[1:]) if entry[2] else Place("around", None, around)
            continue
        if following != place and entry[0] != "freed":  # a layer's inputs are freed after it has returned
            place = following
            if place in sections:
                raise Unlike(f"{place} comes twice")
            sections[place] = Section()
        sections[place].entries.append(entry)
        if entry[0] == "made":
            origins.append((place, len(sections[place].tensors)))
            sections[place].tensors.append(entry[1:])
    return sections, origins


def followed(groups: list[list[int]]) -> list[int]:
    return sorted({layer for group in groups for layer in group})


def _compare(sections: dict[Place, Section], alike: Alike) -> None:
    for stack, groups in alike.items():
        for first, *others in groups:
            for phase in ("forward", "backward"):
                of_first, *of_others = (sections.get(Place(phase, stack, layer)) for layer in (first, *others))
                if of_first is None or any(section != of_first for section in of_others):
                    raise Unlike(f"layers {first} and {others} of {stack} do other things in the {phase} pass")


def models_of(sections: Iterable[Place], alike: Alike) -> dict[Place, Place]:
    """For each section of the whole tape, in order: the followed section that it repeats."""
    models: dict[Place, Place] = {}
    for (phase, stack), places in groupby(sections, key=lambda place: place[:2]):
        if stack is None:
            models |= {place: place for place in places}
            continue
        direction = -1 if phase == "backward" else 1
        if [place.layer for place in places] != followed(alike[stack])[::direction]:
            raise Unlike(f"the layers of {stack} do not run one after the other")
        layers = list(enumerate(alike[stack]))[::direction]
        models |= {Place(phase, stack, layer): Place(phase, stack, like[0]) for layer, like in layers}
    return models
