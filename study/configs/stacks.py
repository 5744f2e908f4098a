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
    if said.get("ranks", UNSET).is_open:
        del said["ranks"]  # auto is no number: 2 are taken, as where nothing says how many
    versions = {name: said.get(f"version of {name}", UNSET).value for name in table().asked}
    words = words or tuple(f"{name} {version}" for name, version in versions.items() if version)
    config_says = {name: None if each.is_open else each.value for name, each in said.items()}
    stack = Stack.of(lists.releases(words), flags, config_says, key)
    return stack, [*notes, *lists.notes(words, stack.releases), *_overruled(flags, said), *_engine(flags, said)]


def _overruled(flags: Flags, said: EffectiveSettings) -> Iterator[str]:
    """Yield a sentence for each flag that says otherwise than the config, or what the table does not know."""
    for name, condition in table().settings.items():
        given, written = getattr(flags, condition, None), said.get(name, UNSET)
        is_written = written.value is not None and not (written.is_open or written.is_default)
        if given is not None and is_written and not _is_named_so(given, written.value):
            yield f"{flag(condition)} {given} counts, and not the config's {shown(written, name)}."
    known = table().optimizers
    if flags.optimizer is not None and not any(name in flags.optimizer.lower() for name in known):
        yield f"--optimizer {flags.optimizer!r:.80} is none of {', '.join(known)}: no fault of these is told."


def _engine(flags: Flags, said: EffectiveSettings) -> Iterator[str]:
    engine = said.get("engine", UNSET).value
    for way in WAYS:
        if getattr(flags, way) and engine == "DeepSpeed":
            yield f"{flag(way)} counts, and not the config's DeepSpeed."
    if flags.stage is not None and engine == "FSDP":
        yield f"--stage {flags.stage} counts, and not the config's FSDP."


def _is_named_so(given: Any, value: Any) -> bool:
    """Whether a config says in its words what a flag says: AdamW or adamw_torch, a cast to bfloat16, lora."""
    if same(given, value):
        return True
    written = str(value).lower()
    if isinstance(given, bool):
        return given == (written not in ("false", "none"))
    kind, _, how = str(given).partition("_")
    if kind in AUTOCAST:
        return written == f"{how or 'cast'} to {AUTOCAST[kind]}"
    return str(given).lower() in written and not is_number(given)
