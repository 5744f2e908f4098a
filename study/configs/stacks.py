"""The stack that lists of releases, flags and a config describe together."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from study.configs import engines, scripts, sources
from study.configs.code import that_counts
from study.configs.mistakes import recognised
from study.configs.pasted import condense
from study.configs.pasted.config_in_text import configs_with
from study.configs.pasted.matching import flags_of
from study.configs.pasted.read import LONGEST_LINE, Pasted, read
from study.configs.pasted.said import left_open, said
from study.configs.pasted.two_releases import mentioned
from study.configs.settings import UNSET, EffectiveSettings, effective_settings, same
from study.configs.shown import shown
from study.core import files
from study.core.errors import Stop
from study.core.files import value_at
from study.core.ignored_keys import OFFLOADS
from study.core.recipes import AUTOCAST
from study.core.settings import flag
from study.core.text import is_number
from study.known import lists
from study.known.faults import ANY, table
from study.known.stacks import PRECISIONS, WAYS, Flags, Stack

CONFIGS = (".json", ".yaml", ".yml", ".toml")  # of which the whole is a config or a lock
OF_WAYS = {"stage", *WAYS}
NO_LIBRARY = "No library is named: releases are this environment's. Give yours, such as deepspeed==0.19.8."
PAST_ACCELERATE = "The script trains without accelerate: none of its faults is told."
REFUSED = "The Trainer refuses to start with both: {}. Write one, or auto in the config. [config-mismatch]"
ANSWERED = "What the script's own text answers is not asked; options of a launcher are not in it."


def with_config(words: tuple[str, ...], config: Path | None) -> tuple[tuple[str, ...], Path | None]:
    """Return words without configs, and the config that counts. Raise Stop if several may."""
    configs = [*filter(_is_config, words)]
    given = [*map(Path, configs), *([config] if config else [])]
    left = engines.that_may_count(given, engines.texts_of((*words, *given)))
    if len(left) > 1:
        several = " and ".join(map(str, left))
        raise Stop(f"several configs are given: {several:.200}", "give one: that of DeepSpeed decides most")
    return tuple(word for word in words if word not in configs), left[0] if left else None


def _is_config(word: str) -> bool:
    return Path(word).suffix in CONFIGS and lists.is_config(lists.content(word))


def launched_ranks(words: tuple[str, ...], flags: Flags) -> Flags:
    """Return flags with the ranks that a config of the launcher starts, whichever config counts."""
    for word in words:
        if flags.ranks is None and _is_config(word):
            started = value_at(sources.read(Path(word)).content, "num_processes")
            flags = replace(flags, ranks=started if type(started) is int and started > 0 else None)
    return flags


def described(
    words: tuple[str, ...],
    flags: Flags,
    config: Path | None = None,
    told: Collection[str] = (),
    is_compared: bool = False,
) -> tuple[Stack, list[str]]:
    """Return the stack of these lists, flags and config, and notes on how they were read.

    Without words the releases are those of a record, or of this environment. `told`: ids of the findings that
    `engines.contradictions` has. `is_compared`: by them calls, or a command, are compared with the config.
    """
    given, given_words = flags, words
    words, flags, notes, left = _with_texts(words, flags, config)
    settings, key, more = _of_config(config)
    who = WhoSaid(given, given_words)
    precision = flags.precision if "launcher_overruled" in told else None  # the script's counts
    flags, overruled, of_calls = _config_wins(who, flags, settings, key)
    notes += overruled
    notes += () if is_compared else of_calls
    versions = {name: settings.get(f"version of {name}", UNSET).value for name in table().asked}
    words = words or tuple(f"{name} {version}" for name, version in versions.items() if version)
    if given_words and not words:
        notes.append(NO_LIBRARY)
    config_says = {name: None if each.is_open else each.value for name, each in settings.items()}
    if config_says.get("engine") == "FSDP":
        left.pop("stage_by", None)
    elif config_says.get("engine") is not None:
        left = {}
    own = left.setdefault("fsdp_own", config_says.get("the Trainer's fsdp_version"))
    if left.get("stage") == "FSDP":
        config_says |= {"engine": "FSDP", "the Trainer's fsdp": True, "the Trainer's fsdp_version": own}
    used = replace(flags, precision=precision or flags.precision)
    stack = Stack.of(lists.releases(words), used, config_says, key)
    if "stage_by" in left:
        stack = replace(stack, guessed=frozenset({"stage"}))
    notes += left_open({**left, "stage": stack.said.get("stage")})
    if config is None:
        stack = replace(stack, key=_key_in_texts(given_words))
    of_config = lists.content(str(config)) if config else ""
    given_text = "\n".join([*map(that_counts, map(lists.content, given_words)), of_config])
    of_scripts = scripts.among(given_words)
    answered = scripts.shown(of_scripts, of_config, given_text, stack)
    stack = replace(stack, shown={**answered, **stack.shown})
    if answered and of_scripts:
        notes.append(ANSWERED)
    notes += [*more, *lists.notes(words, stack.releases), *_overruled(who, flags, settings)]
    if scripts.goes_past_accelerate(of_scripts, stack):
        stack = replace(stack, releases={name: of for name, of in stack.releases.items() if name != "accelerate"})
        notes.append(PAST_ACCELERATE)
    return stack, [*notes, *_without_effect(who, flags, settings)]


def _of_config(path: Path | None) -> tuple[EffectiveSettings, Callable[[str], Any] | None, list[str]]:
    """Return the settings of a config, what it has at a dotted path (None: another file may have it), and notes."""
    if path is None:
        return {}, None, []
    source = recognised(path)
    settings = effective_settings(source)
    if settings.get("ranks", UNSET).is_open:
        del settings["ranks"]  # auto is no number: 2 are taken, as where nothing says how many
    if source.unread:
        return settings, None, [f"{source.unread}."]
    return settings, partial(value_at, (source.named or source).content | source.content), []


def _with_texts(
    words: tuple[str, ...], flags: Flags, config: Path | None
) -> tuple[tuple[str, ...], Flags, list[str], dict[str, Any]]:
    """Return words and flags with what logs and other texts say of releases and of the training. Given flags win.

    The last is what a text says of the stage, and by which file's name, if no flag does.
    """
    lists_of: list[str] = []
    notes = []
    left: dict[str, Any] = {}
    for word in sorted(words, key=lambda word: not word.endswith(".py")):  # what trains, before what is installed
        if word == "-":
            word = condense.standard_input("stack")
        pasted = _pasted(word)
        if pasted is None or not (pasted.said or Path(word).suffix in sources.SCRIPTS):
            lists_of.append(word)
            continue
        if listed := _list_in(pasted):
            lists_of.append(listed)
        if config:
            pasted.said.pop("stage_by", None)  # the config itself says it
        if pasted.said:
            notes.append(f"Read from the text: {', '.join(pasted.words)}.")
        if OF_WAYS.isdisjoint(flags.given):
            left |= {name: pasted.said[name] for name in ("stage", "stage_by", "fsdp_own") if name in pasted.said}
        flags = _filled(flags, pasted)
        if pasted.is_stage_1_or_2 and OF_WAYS.isdisjoint(flags.given):
            flags = replace(flags, stage=2)
            notes.append("The text names stage_1_and_2.py: taken as stage 2. With stage 1 give --stage 1.")
    return tuple(lists_of), flags, notes, left


def _key_in_texts(words: tuple[str, ...]) -> Callable[[str], Any] | None:
    """Return what the first config in a text has at a dotted path: DeepSpeed's, or that of `accelerate env`."""
    for word in words:
        pasted = _pasted(word)
        if pasted and pasted.config:
            return partial(value_at, pasted.config.content)
        for of_env in configs_with("zero_stage", pasted.text if pasted else ""):
            return partial(value_at, {"deepspeed_config": of_env.content})
    return None


def _pasted(word: str) -> Pasted | None:
    """Return what a text says, or the file that a word names. None: a word, a config or a lock."""
    is_file = files.is_file(word)
    text = condense.content(Path(word)) if is_file else word
    is_word = "\n" not in text.strip() and not (is_file and Path(word).suffix in sources.SCRIPTS)
    if is_word or Path(word).suffix in CONFIGS:
        return None
    return read(text)


def _list_in(pasted: Pasted) -> str:
    """Return the text if it lists releases, or else the packages that it names."""
    if {*lists.listed(pasted.text).values()} - {ANY}:
        return pasted.text
    return "\n".join(sorted(mentioned(pasted.text)))


def _filled(flags: Flags, pasted: Pasted) -> Flags:
    """Return flags with what a text says besides. Given flags win."""
    is_way_given = not OF_WAYS.isdisjoint(flags.given)  # one counts
    of_text = {name: value for name, value in flags_of(pasted).given.items() if not (is_way_given and name in OF_WAYS)}
    return replace(flags, **of_text | flags.given)


@dataclass(frozen=True)
class WhoSaid:
    """Who says a setting: a flag that was given, or a text."""

    flags: Flags
    words: tuple[str, ...]

    def of(self, condition: str, value: Any) -> str:
        """Return a setting as it was said: as its flag, or with the file and line that say it."""
        if condition in self.flags.given:
            return flag(condition) if value is True else f"{flag(condition)} {value}"
        way = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP"}.get(condition)
        name, wanted = ("stage", way) if way else (condition, value)
        as_said = way or f"{condition.replace('passes', 'gradient accumulation')} {value}"
        for word in self.words:
            is_file = files.is_file(word)
            lines = (condense.content(Path(word)) if is_file else word).splitlines()
            for number, line in enumerate(lines, 1):
                if len(line) < LONGEST_LINE and said(line).get(name) == wanted:
                    return f"{as_said} of {Path(word).name}:{number}" if is_file else f"the text's {as_said}"
        return f"the text's {as_said}"


def _config_wins(
    who: WhoSaid, flags: Flags, settings: EffectiveSettings, key: Callable[[str], Any] | None
) -> tuple[Flags, list[str], list[str]]:
    """Return flags without what texts say of settings that a config writes.

    Besides a sentence for each that differs and has no effect. The last are of what calls are asked for as well.
    """
    of_texts = flags.given.keys() - who.flags.given.keys()
    dropped: dict[str, Any] = {}
    if _is_written("stage", settings):
        dropped = dict.fromkeys(of_texts & OF_WAYS)
    overruled, of_calls = [], []
    # transformers/integrations/deepspeed.py (fill_match). It compares a precision that DeepSpeed's config itself has.
    compared = set()
    if flags.trainer not in (None, "own") and settings.get("engine", UNSET).value == "DeepSpeed":
        casts = key and (key("bf16.enabled") or key("fp16.enabled"))
        compared = {"passes", "precision"} if casts else {"passes"}
    for name, condition in table().settings.items():
        if condition not in of_texts or not _is_written(name, settings):
            continue
        dropped[condition] = None
        text_has = getattr(flags, condition)
        cast = f"cast to {AUTOCAST.get(str(text_has))}"  # a text's bf16 may be of weights or of autocast
        if _is_named_so(text_has, settings[name].value) or str(settings[name].value).endswith(cast):
            continue
        written = f"{name} {shown(settings[name], name)}"
        other = who.of(condition, text_has)
        sentence = f"The config's {written} counts, and not {other}."
        if condition in compared:
            sentence = REFUSED.format(f"the config's {written}, and {other}")
        (of_calls if condition in ("passes", "precision") else overruled).append(sentence)
    return replace(flags, **dropped), overruled, of_calls


def _is_written(name: str, settings: EffectiveSettings) -> bool:
    """Whether a config decides a setting. Whoever writes a stage, and no offloading, has none."""
    setting = settings.get(name, UNSET)
    if setting.value is None or setting.is_open:
        return False
    return not setting.is_default or (name in OFFLOADS and _is_written("stage", settings))


def _overruled(who: WhoSaid, flags: Flags, settings: EffectiveSettings) -> Iterator[str]:
    """Yield a sentence for each flag that says otherwise than the config."""
    for name, condition in table().settings.items():
        written, given = settings.get(name, UNSET), flags.given.get(condition)
        if given is None or written.value is None or written.is_open or written.is_default:
            continue
        if not _is_named_so(given, written.value):
            yield f"{who.of(condition, given)} counts, and not the config's {shown(written, name)}."


def _without_effect(who: WhoSaid, flags: Flags, settings: EffectiveSettings) -> Iterator[str]:
    """Yield a sentence for each flag that replaces the config's engine, or that names what the table does not know."""
    known = table().optimizers
    if flags.optimizer is not None and not any(name in flags.optimizer.lower() for name in known):
        what = who.of("optimizer", repr(flags.optimizer))
        yield f"{what:.200} is none of {', '.join(known)}: no fault of these is told."
    engine = settings.get("engine", UNSET).value
    for way in WAYS:
        if getattr(flags, way) and engine == "DeepSpeed":
            yield f"{who.of(way, True)} counts, and not the config's DeepSpeed."
    if flags.stage is not None and engine == "FSDP":
        yield f"{who.of('stage', flags.stage)} counts, and not the config's FSDP."


def _is_named_so(given: Any, value: Any) -> bool:
    """Whether a config says in its words what a flag says: AdamW or adamw_torch, a cast to bfloat16, lora."""
    if same(given, value):
        return True
    written = str(value).lower()
    if isinstance(given, bool):
        return given == (written not in ("false", "none"))
    if given in PRECISIONS.values():
        return PRECISIONS.get(written) == given
    return str(given).lower() in written and not is_number(given)
