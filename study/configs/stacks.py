"""The stack that lists of releases, flags and a config describe together."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from study.configs.mistakes import recognised
from study.configs.settings import UNSET, EffectiveSettings, effective_settings, same
from study.configs.shown import shown
from study.core.recipes import AUTOCAST
from study.core.settings import flag
from study.core.text import is_number
from study.known import lists
from study.known.faults import table
from study.known.which_apply import WAYS, Flags, Stack
from study.records.metrics import dig


def described(words: tuple[str, ...], flags: Flags, config: Path | None = None) -> tuple[Stack, list[str]]:
    """Return the stack of these lists, flags and config, and notes on how they were read.

    Without words the releases are those of a record, or of this environment.
    """
    notes = []
    said: EffectiveSettings = {}
    key: Callable[[str], Any] | None = None
    if config is not None:
        source = recognised(config)
        said = effective_settings(source)
        if source.unread:
            notes.append(f"{source.unread}.")
        else:
            key = partial(dig, (source.named or source).content | source.content)
        if "ranks" in said and said["ranks"].is_open:
            del said["ranks"]  # auto is no number: 2 are taken, as where nothing says how many
    versions = {name: said[f"version of {name}"].value for name in table().asked if f"version of {name}" in said}
    words = words or tuple(f"{name} {version}" for name, version in versions.items())
    config_says = {name: None if each.is_open else each.value for name, each in said.items()}
    stack = Stack.of(lists.releases(words), flags, config_says, key)
    return stack, [*notes, *lists.notes(words, stack.releases), *_overruled(flags, said)]


def _overruled(flags: Flags, said: EffectiveSettings) -> Iterator[str]:
    """Yield a sentence for each flag that says otherwise than the config, or what the table does not know."""
    for name, condition in table().settings.items():
        given = getattr(flags, condition, None)
        written = said.get(name, UNSET)
        if given is None or written.value is None or written.is_open or written.is_default:
            continue
        if not same(given, written.value) and not _is_named_so(given, str(written.value).lower()):
            yield f"{flag(condition)} {given} counts, and not the config's {shown(written, name)}."
    known = table().optimizers
    if flags.optimizer is not None and not any(name in flags.optimizer.lower() for name in known):
        yield f"--optimizer {flags.optimizer!r:.80} is none of {', '.join(known)}: no fault of these is told."
    engine = said.get("engine", UNSET).value
    for way in WAYS:
        if getattr(flags, way) and engine == "DeepSpeed":
            yield f"{flag(way)} counts, and not the config's DeepSpeed."
    if flags.stage is not None and engine == "FSDP":
        yield f"--stage {flags.stage} counts, and not the config's FSDP."


def _is_named_so(given: Any, written: str) -> bool:
    """Whether a config says in its words what a flag says: AdamW or adamw_torch, a cast to bfloat16, lora."""
    if isinstance(given, bool):
        return given == (written not in ("false", "none"))
    kind, _, how = str(given).partition("_")
    if kind in AUTOCAST:
        return written == f"{how or 'cast'} to {AUTOCAST[kind]}"
    return str(given).lower() in written and not is_number(given)
