"""The mistakes of one config: what a library ignores in silence, and what it refuses when the training starts."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from study.configs.arguments import of_recipe, refused
from study.configs.settings import AUTO, COUNT, FIELDS, descriptions, zero_section
from study.configs.shown import printable
from study.configs.sources import ACCELERATE, OTHER, TORCHTITAN, TRAINER, Source, read
from study.core.errors import Stop
from study.core.files import flat, section_at, value_at
from study.core.fsdp_keys import of_fsdp1, refused_in_fsdp, version_of, without_its_policy
from study.core.ignored_keys import (
    UnknownKey,
    accelerate_ignores,
    beside_a_json,
    lost_paths,
    promises_ignored,
    stage_meant,
    unknown_keys,
)
from study.core.library_defaults import known_libraries
from study.core.refused_values import refused_values
from study.core.text import comparable, say_aside
from study.known.faults import ANY, Release
from study.known.findings import Finding, finding, in_a_sentence, texts

NEAR = 0.85  # similarity of a misspelled key to the right one, where a program may keep keys of its own
SIMILAR = 0.6  # where it may not
OF_STAGE_3 = "stage3_"
# A training with one of these does not start, or is not the one that its config describes.
UNUSABLE = (
    "kind_unknown",
    "key_mistyped",
    "key_refused",
    "key_ignored",
    "value_refused",
    "auto_not_filled",
    "arguments_contradicted",
    "value_no_count",
)


def recognised(path: Path, ranks: int | None = None) -> Source:
    """Read a config from which a training is to be known, and say what no library takes in it: the rest counts.

    Raise Stop if it is of no known kind.
    """
    source = read(path)
    for mistake in unusable(source, ranks):
        if mistake.id == "kind_unknown":
            raise Stop(f"{path}: {mistake.said}", f"{mistake.remedy}")
        say_aside(f"{path}: {in_a_sentence(mistake)}")
    return source


def unusable(source: Source, ranks: int | None) -> Iterator[Finding]:
    """Yield what no library takes in a config."""
    return (mistake for mistake in mistakes(source, ranks) if mistake.id in UNUSABLE)


def mistakes(source: Source, ranks: int | None = None) -> Iterator[Finding]:
    """Yield what a library ignores or refuses in a config; of a record, the keys that DeepSpeed ignored.

    `ranks` are those that train, if they are known.
    """
    content = source.content
    if source.record is not None:
        yield from _mistyped("deepspeed", source.record.observed.deepspeed or {})
        return
    if source.kind == TORCHTITAN:  # whose keys are not known here
        return
    if source.kind == OTHER:
        yield finding("kind_unknown")
        for library in known_libraries():  # that may have been meant to read it
            yield from _mistyped(library, content)
    else:
        yield from _refused(FIELDS[source.kind], content, ranks)
    if source.kind == ACCELERATE:
        yield from _not_arriving(source)
    yield from _without_effect(content)
    yield from _stage_ignores(content)
    if source.unread:
        yield finding("file_not_read", why=source.unread)
    if source.kind == TRAINER:
        yield from _of_trainer(source)
    if source.named:
        yield from mistakes(source.named, ranks)
    if source.named and source.kind == TRAINER:
        yield from refused(of_recipe(content), source.named.content)


def _not_arriving(source: Source) -> Iterator[Finding]:
    """Yield what `accelerate launch` does not hand on of a yaml, or refuses in it."""
    kind = str(source.content.get("distributed_type") or "NO")
    for engine in ("deepspeed", "fsdp"):
        # `accelerate launch` takes the engine from distributed_type, unless a flag such as --use_deepspeed names
        # one (commands/launch.py:1224).
        if source.content.get(f"{engine}_config") and kind != engine.upper():
            yield finding("section_unused", engine=engine, kind=f"{kind:.40}", needed=engine.upper())
    if kind == "DEEPSPEED":
        yield from _not_arriving_in_deepspeed(section_at(source.content, "deepspeed_config"), source.named)
    if kind == "FSDP":
        yield from _not_arriving_in_fsdp(section_at(source.content, "fsdp_config"))


def _not_arriving_in_deepspeed(section: dict, config: Source | None) -> Iterator[Finding]:
    """Yield what does not arrive of a yaml's section for DeepSpeed. `config` is what it says, or names."""
    for key in lost_paths(section):
        yield finding("nvme_path_lost", key=key)
    if keys := beside_a_json(section):
        release = f"accelerate {known_libraries()['accelerate']['version']}"
        problem = f"{', '.join(keys)} must not stand beside deepspeed_config_file: that file says it"
        yield finding("value_refused", library=release, problem=problem)
    if config:
        for does, do in accelerate_ignores(section, _stage(config.content)):
            yield finding("accelerate_ignores", does=does, do=do)


def _not_arriving_in_fsdp(section: dict) -> Iterator[Finding]:
    """Yield what Accelerate refuses or ignores in a yaml's section for FSDP."""
    release = f"accelerate {known_libraries()['accelerate']['version']}"
    for _, problem in refused_in_fsdp(section):
        yield finding("value_refused", library=release, problem=problem)
    if version_of(section) == "2":
        for key, do in of_fsdp1(section):
            yield finding("key_of_fsdp1", key=key, do=do)
    for does, do in without_its_policy(section):
        yield finding("accelerate_ignores", does=does, do=do)


def _of_trainer(source: Source) -> Iterator[Finding]:
    """Yield what the Trainer refuses, and what should be a number: it reads its arguments without their types."""
    names_deepspeed = source.named or source.unread
    if names_deepspeed and source.content.get("fsdp"):  # trainer.py:473
        library = f"transformers {known_libraries()['trainer']['version']}"
        yield finding("value_refused", library=library, problem="fsdp and deepspeed exclude each other")
    for description in descriptions().values():
        if description.is_count:
            for key in (description.trainer, *description.keys):
                value = source.content.get(key, AUTO)
                if value not in (None, "None", AUTO) and not COUNT.fullmatch(str(value)):
                    yield finding("value_no_count", key=key, value=printable(repr(value)))


def compared_with(mistaken: Sequence[Finding], releases: Mapping[str, Release]) -> Iterator[str]:
    """Yield that what is said of a config's keys is of another release than the one that is used."""
    for library, known in known_libraries().items():
        release = releases.get(library, ANY)
        is_meant = any(library in each.sentence for each in mistaken)
        if is_meant and isinstance(release, Version) and str(release) != known["version"]:
            yield f"The config's keys were compared with {library} {known['version']}: of {release} nobody read them."


def _mistyped(library: str, config: dict) -> Iterator[Finding]:
    """Yield near misspellings of a library's keys, in a file that may have keys of another program."""
    for each in unknown_keys(library, config):
        near = _near(each, NEAR)
        if near and not each.key.endswith(f"_{near}"):  # ms-swift has vit_gradient_checkpointing
            yield _unread_key("key_mistyped" if library == "trainer" else "key_ignored", each, f"write {near}")


def _unread_keys(library: str, config: dict, closed: Sequence[str]) -> Iterator[Finding]:
    """Yield the keys that DeepSpeed or Accelerate does not know, in a file of its own.

    It refuses them in sections that are closed.
    """
    # DeepSpeed refuses unknown keys in its typed sections (runtime/config_utils.py:110), and Accelerate at the upper
    # level of its yaml. DeepSpeed's upper level is read key by key, so a wrong name there is silently the default
    # (runtime/config.py:268): a program may keep keys of its own in it, and so may the config in a record.
    unread = []
    for each in unknown_keys(library, config):
        if each.section in closed:
            near = _near(each, SIMILAR)
            yield _unread_key("key_refused", each, f"write {near}" if near else "remove it")
        elif beside := difflib.get_close_matches(each.key, {*map(str, each.written)} & {*each.known}, cutoff=NEAR):
            do, counts = f"remove it, or move what it says into {beside[0]}", f"{beside[0]}, which is written as well"
            yield finding("key_ignored", library=each.library, key=_name(each), do=do, default=counts)
        elif do := _instead(each):
            yield _unread_key("key_ignored", each, do)
        elif not each.is_note:
            unread.append(_name(each))
    if unread:
        id = "keys_unread_by_accelerate" if library == "accelerate" else "keys_unread_by_deepspeed"
        yield finding(id, library=library, keys=", ".join(unread))


def _unread_key(id: str, each: UnknownKey, do: str) -> Finding:
    default = texts()["key_ignored"]["defaults"].get(do, "its default")
    return finding(id, library=each.library, key=_name(each), do=do, default=default)


def _name(each: UnknownKey) -> str:
    return f"{each.section}.{printable(each.key)}".lstrip(".")


def _near(each: UnknownKey, similarity: float) -> str:
    """Return the key that one is a misspelling of. A key that is written as well is not meant. Empty: none."""
    # DeepSpeed takes max_live_parameters as well (runtime/zero/config.py), and documents stage3_max_live_parameters.
    written = {str(key).removeprefix(OF_STAGE_3) for key in each.written}
    not_written = [key for key in each.known if key.removeprefix(OF_STAGE_3) not in written]
    nearest = difflib.get_close_matches(each.key, each.known, n=1, cutoff=NEAR)
    if nearest and nearest[0] not in not_written:
        return ""
    close = difflib.get_close_matches(each.key, not_written, n=1, cutoff=similarity)
    documented = [name for key in close for name in (f"{OF_STAGE_3}{key}", key) if name in each.known]
    return documented[0] if documented else ""


def _instead(each: UnknownKey) -> str:
    """Return what to do about a key that a library does not read, in a file of its own. Empty: nothing is known."""
    if near := _near(each, NEAR):
        return f"write {near}"
    if each.places:
        return f"write it into {' or '.join(each.places)}"
    is_section = isinstance(each.written[each.key], dict)
    if is_section and not each.section:
        return "write it into the section that has its keys"
    return ""


def _refused(library: str, config: dict, ranks: int | None) -> Iterator[Finding]:
    """Yield the keys and values with which a library does not start."""
    known = known_libraries()[library]
    if known["closed"]:
        yield from _unread_keys(library, config, known["closed"])
    else:
        yield from _mistyped(library, config)
    if library == "deepspeed":
        yield from _left_open(config)
    release = f"{library} {known['version']}"
    for each in refused_values(library, config, ranks):
        id = "key_removed" if each.was_removed else "value_refused"
        yield finding(id, library=release, problem=each.problem)


def _left_open(config: dict) -> Iterator[Finding]:
    """Yield the keys of a DeepSpeed config whose `auto` nothing fills in."""
    filled = texts()["auto_not_filled"]["filled"]
    left = [printable(key) for key, value in flat(config).items() if value == AUTO and key not in filled]
    if left:
        yield finding("auto_not_filled", keys=", ".join(left))


def _without_effect(config: dict) -> Iterator[Finding]:
    """Yield the findings whose `configs` have this one, by patterns of values at paths."""
    config = config | {"zero_optimization": zero_section(config)}
    for id, text in texts().items():
        for each in text.get("configs", ()):
            if all(re.fullmatch(pattern, _text_at(config, path)) for path, pattern in each["when"].items()):
                yield finding(id, **each)


def _text_at(config: dict, path: str) -> str:
    """Return the value at a dotted path, as a text. Of a section its keys."""
    value = value_at(config, path)
    return f"section of {', '.join(value)}" if isinstance(value, dict) else str(comparable(value))


def _stage_ignores(config: dict) -> Iterator[Finding]:
    """Yield what the stage of a DeepSpeed config does otherwise than the config says."""
    stage = _stage(config)
    for does, do in promises_ignored(config | {"zero_optimization": zero_section(config)}, stage):
        yield finding("stage_ignores", stage=stage, does=does, do=do)


def _stage(config: dict) -> int:
    """Return the stage of a DeepSpeed config, as Accelerate and the Trainer fill it in."""
    stage = zero_section(config).get("stage") or 0
    if stage == AUTO:
        return 2
    return stage_meant(stage)
