"""Compare two configs or runs: known causes of different losses or memory first, then the other keys."""

from dataclasses import dataclass

from study.configs.settings import (
    AUTO,
    FIELDS,
    UNKNOWN,
    UNSET,
    Description,
    EffectiveSettings,
    Setting,
    descriptions,
    effective_settings,
    same,
)
from study.configs.sources import Source, flat


@dataclass(frozen=True)
class Difference:
    """A setting in which the two differ."""

    name: str
    a: Setting
    b: Setting
    description: Description

    @property
    def is_known(self) -> bool:
        """Return whether it explains something. A setting that only one side has counts by its `unless`."""
        unless = self.description.unless
        values = [side.value for side in (self.a, self.b) if side.value not in (None, AUTO, UNKNOWN)]
        if self.description.changes is None or not values:
            return False
        return len(values) == 2 or (unless is not None and not same(values[0], unless))


def compare(a: Source, b: Source) -> tuple[list[Difference], list[Difference]]:
    """Return everything in which the two differ: known causes, and all other keys, also as written."""
    # Keys as written are compared within one kind of file only, because kinds name the same thing in other words.
    first, second = (effective_settings(side) | (_raw(side) if a.kind == b.kind else {}) for side in (a, b))
    known = []
    others = []
    for name in dict.fromkeys((*descriptions(), *first, *second)):
        about = descriptions().get(name, Description())
        difference = Difference(name, first.get(name, UNSET), second.get(name, UNSET), about)
        if same(difference.a.value, difference.b.value) and difference.a.older == difference.b.older:
            continue  # where one side leaves it to DeepSpeed, older releases may differ
        if difference.is_known:
            known.append(difference)
        elif not (difference.a.is_default or difference.b.is_default):  # most keys are in one file only
            others.append(difference)
    return known, others


def _raw(source: Source) -> EffectiveSettings:
    """Return the keys as written that are not compared by our names."""
    settings = effective_settings(source)
    covered: set[str | None] = set()
    for name, each in descriptions().items():
        covered.update(each.keys)
        if name in settings:
            covered.update((each.deepspeed, getattr(each, FIELDS[source.kind])))
    content = source.content
    if source.record is not None:
        content = {name: content[name] for name in ("requested", "observed")}
    rest = _raw(source.named) if source.named else {}
    for path, value in flat(content).items():
        path = path.removeprefix("observed.deepspeed.")
        if value is not None and path not in covered and not (source.record and type(value) is list):  # long ones
            rest[f"{path} (as written)" if path in descriptions() else path] = Setting(value)
    return rest
