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
from study.configs.sources import Source
from study.core.files import flat


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
        if self.description.changes is None:
            return False
        values = [side.value for side in (self.a, self.b) if side.value not in (None, AUTO, UNKNOWN)]
        if len(values) != 1:
            return len(values) == 2
        unless = self.description.unless
        return unless is not None and not same(values[0], unless)

    @property
    def is_none(self) -> bool:
        """Return whether the two agree. Where one leaves it to DeepSpeed, older releases may differ."""
        return same(self.a.value, self.b.value) and self.a.older == self.b.older


def compare(a: Source, b: Source) -> tuple[list[Difference], list[Difference]]:
    """Return everything in which the two differ: known causes, and all other keys, also as written."""
    first, second = effective_settings(a), effective_settings(b)
    if a.kind == b.kind:  # kinds name the same thing in other words
        first |= _as_written(a)
        second |= _as_written(b)
    for mine, other in ((first, second), (second, first)):
        if "stage" in other and mine.get("engine", UNSET).value in ("DDP", "one process"):
            mine.setdefault("stage", Setting(0))  # as stage 0 it divides nothing
    known = []
    others = []
    for name in dict.fromkeys((*descriptions(), *first, *second)):
        about = descriptions().get(name, Description())
        difference = Difference(name, first.get(name, UNSET), second.get(name, UNSET), about)
        if difference.is_none:
            continue
        if difference.is_known:
            known.append(difference)
        elif not (difference.a.is_default or difference.b.is_default):  # most keys are in one file only
            others.append(difference)
    return known, others


def _as_written(source: Source) -> EffectiveSettings:
    """Return the keys as written that are not compared by our names."""
    rest = _as_written(source.named) if source.named else {}
    compared = _compared(source)
    for path, value in flat(_content(source)).items():
        path = path.removeprefix("observed.deepspeed.")
        is_long = source.record is not None and isinstance(value, list)
        if value is None or path in compared or is_long:
            continue
        name = f"{path} (as written)" if path in descriptions() else path
        rest[name] = Setting(value)
    return rest


def _content(source: Source) -> dict:
    """Return what is written in a file; of a record what was asked for and what was seen."""
    if source.record is None:
        return source.content
    return {name: source.content[name] for name in ("requested", "observed")}


def _compared(source: Source) -> set[str | None]:
    """Return the dotted paths of a file that are compared by our names."""
    settings = effective_settings(source)
    paths: set[str | None] = set()
    for name, each in descriptions().items():
        paths.update(each.keys)
        if name in settings:
            paths.update((each.deepspeed, getattr(each, FIELDS[source.kind])))
    return paths
