"""The stack that lists of releases, flags and a config describe together."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from study.configs.mistakes import recognised
from study.configs.pasted import condense
from study.configs.pasted.matching import flags_of
from study.configs.pasted.read import Pasted, read
from study.configs.pasted.two_releases import mentioned
from study.configs.settings import UNSET, EffectiveSettings, effective_settings, same
from study.configs.shown import shown
from study.core.recipes import AUTOCAST
from study.core.settings import flag
from study.core.text import is_number
from study.known import lists
from study.known.faults import ANY, table
from study.known.which_apply import WAYS, Flags, Stack
from study.records.metrics import dig

CONFIGS = (".json", ".yaml", ".yml", ".toml")  # of which the whole is a config or a lock
LONGEST_PATH = 200  # characters: an error in quotes may be longer than a name can be


def described(words: tuple[str, ...], flags: Flags, config: Path | None = None) -> tuple[Stack, list[str]]:
    """Return the stack of these lists, flags and config, and notes on how they were read.

    Without words the releases are those of a record, or of this environment.
    """
    words, flags, notes = _with_texts(words, flags)
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


def _with_texts(words: tuple[str, ...], flags: Flags) -> tuple[tuple[str, ...], Flags, list[str]]:
    """Return words and flags with what logs and other texts say of releases and of the training. Given flags win."""
    lists_of: list[str] = []
    notes = []
    for word in words:
        if word == "-":
            word = condense.standard_input("stack")
        text = condense.content(Path(word)) if is_text(word) else word
        pasted = read(text) if "\n" in text.strip() and Path(word[:LONGEST_PATH]).suffix not in CONFIGS else None
        if pasted is None or not pasted.said:
            lists_of.append(word)
            continue
        is_listed = {*lists.listed(text).values()} - {ANY}
        lists_of.append(text if is_listed else "\n".join(mentioned(text)) or word)
        notes.append(f"Read from the text: {', '.join(pasted.words)}.")
        flags = filled(flags, pasted)
    return tuple(lists_of), flags, notes


def filled(flags: Flags, pasted: Pasted) -> Flags:
    """Return flags with what a text says besides. Given flags win."""
    given = {name for name, value in vars(flags).items() if value is not None}
    ways = {"stage", *WAYS}
    taken = given | (ways if given & ways else set())
    said = vars(flags_of(pasted))
    return replace(flags, **{name: value for name, value in said.items() if value is not None and name not in taken})


def is_text(word: str) -> bool:
    """Whether a word is a file that may be a log."""
    return len(word) < LONGEST_PATH and Path(word).is_file()


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
