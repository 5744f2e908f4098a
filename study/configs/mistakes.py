"""The mistakes of one config: what a library ignores in silence, and what it refuses when the training starts."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import SchemaValidator

from study.configs.settings import AUTO, COUNT, FIELDS, Setting, descriptions, same, zero_section
from study.configs.shown import printable, shown
from study.configs.sources import ACCELERATE, OTHER, TRAINER, Source, flat, read
from study.core.arms import promises_ignored, section_at
from study.core.errors import Stop
from study.core.files import sentence
from study.core.library_defaults import known_libraries, library_defaults
from study.core.text import comparable, say_aside
from study.known.findings import Finding, finding, texts
from study.records.metrics import dig

MOST_UNKNOWN = 200  # keys that are compared with the library's, which takes milliseconds each
NEAR = 0.85  # similarity of a misspelled key to the right one, where a program may keep keys of its own
SIMILAR = 0.6  # where it may not
# A training with one of these does not start, or is not the one that its config describes.
UNUSABLE = ("key_mistyped", "key_refused", "key_ignored", "value_refused", "auto_not_filled", "value_no_count")


def recognised(path: Path) -> Source:
    """Read a config from which a training is to be known, and say what no library takes in it: the rest counts.

    Raise Stop if it is of no known kind.
    """
    source = read(path)
    for mistake in mistakes(source):
        if mistake.id == "kind_unknown":
            raise Stop(f"{path}: {mistake.said}", f"{mistake.remedy}")
        if mistake.id in UNUSABLE:
            say_aside(f"{path}: {mistake.said} What to do: {mistake.remedy}.")
    return source


def mistakes(source: Source) -> Iterator[Finding]:
    """Yield what a library ignores or refuses in a config; of a record, the keys that DeepSpeed ignored."""
    content = source.content
    if source.record is not None:
        yield from _mistyped("deepspeed", source.record.observed.deepspeed or {})
        return
    if source.kind == OTHER:
        yield finding("kind_unknown")
        for library in known_libraries():
            yield from _mistyped(library, content)
    else:
        yield from _refused(FIELDS[source.kind], content)
    if source.kind == ACCELERATE:
        yield from _not_arriving(content)
    yield from _without_effect(content)
    if source.unread:
        yield finding("file_not_read", why=source.unread)
    if source.kind == TRAINER:
        yield from _of_trainer(source)
    if source.named:
        yield from mistakes(source.named)
        if source.kind == TRAINER:
            yield from _contradicted(content, source.named.content)


def _not_arriving(content: dict) -> Iterator[Finding]:
    """Yield what `accelerate launch` does not hand on of a yaml."""
    kind = str(content.get("distributed_type") or "NO")
    for engine in ("deepspeed", "fsdp"):
        # `accelerate launch` takes the engine from distributed_type, unless a flag such as --use_deepspeed names
        # one (commands/launch.py:1224).
        if content.get(f"{engine}_config") and kind != engine.upper():
            yield finding("section_unused", engine=engine, kind=f"{kind:.40}", needed=engine.upper())


def _of_trainer(source: Source) -> Iterator[Finding]:
    """Yield what should be a number and is none: the Trainer reads its arguments without their types."""
    if (source.named or source.unread) and source.content.get("fsdp"):  # trainer.py:473
        library = f"transformers {known_libraries()['trainer']['version']}"
        yield finding("value_refused", library=library, problem="fsdp and deepspeed exclude each other")
    for description in descriptions().values():
        for key in (description.trainer, *description.keys):
            value = source.content.get(key)
            if description.is_count and value not in (None, "None", AUTO) and not COUNT.fullmatch(str(value)):
                yield finding("value_no_count", key=key, value=printable(repr(value)))


def _contradicted(arguments: dict, config: dict) -> Iterator[Finding]:
    """Yield what a DeepSpeed config says otherwise than the Trainer's arguments beside it."""
    for pair in texts()["arguments_contradicted"]["pairs"]:
        values = [dig(arguments, pair["trainer"]), dig(config, pair["deepspeed"])]
        is_said = None not in values and AUTO not in values and not arguments.get(pair.get("unless"))
        if is_said and not same(*values):
            yield finding("arguments_contradicted", values=[shown(Setting(value)) for value in values], **pair)


def _mistyped(library: str, config: dict, closed: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield near misspellings of the library's keys; in sections that are closed, all that it does not know.

    With sections that are closed, the file is DeepSpeed's or Accelerate's own: then also what that library never reads.
    """
    # DeepSpeed refuses unknown keys in its typed sections (runtime/config_utils.py:110), and Accelerate at the upper
    # level of its yaml. DeepSpeed's upper level is read key by key, so a wrong name there is silently the default
    # (runtime/config.py:268): a program may keep keys of its own in it, and so may the config in a record.
    unread = []
    for path, key, value, others in _unknown(library_defaults(library), config):
        name = f"{path}.{printable(key)}".lstrip(".")
        if do := _instead(library, path, key, value, others, closed):
            id = "key_mistyped" if library == "trainer" else "key_ignored"
            if path in closed:
                id = "key_refused"
            default = texts()["key_ignored"]["defaults"].get(do, "its default")
            yield finding(id, library=library, key=name, do=do, default=default)
        elif closed and key[:1].isalpha():  # _comment and // are notes
            unread.append(name)
    if unread:
        id = "keys_unread_by_accelerate" if library == "accelerate" else "keys_unread_by_deepspeed"
        yield finding(id, library=library, keys=", ".join(unread))


def _instead(library: str, path: str, key: str, value: Any, others: set[str], closed: Sequence[str]) -> str:
    """Return what to do about a key that a library does not know. Empty if it may be another program's."""
    # A key that is nearly one which is written as well is no misspelling of it.
    if near := difflib.get_close_matches(key, others, n=1, cutoff=SIMILAR if path in closed else NEAR):
        return f"write {near[0]}"
    if path in closed:
        return "remove it"
    places = [where for where, keys in library_defaults(library).items() if key in keys]
    if closed and places:
        return f"write it into {' or '.join(places)}"
    if closed and isinstance(value, dict) and not path:
        return "write it into the section that has its keys"
    return ""


def _unknown(sections: dict[str, dict], config: dict) -> Iterator[tuple[str, str, Any, set[str]]]:
    """Yield each key that a library does not know: its section, the key, its value, and known keys that it may mean."""
    for path, known in sections.items():
        section = section_at(config, path)
        for key in [key for key in section if key not in known][:MOST_UNKNOWN]:
            yield path, key, section[key], known.keys() - section.keys()


def _refused(library: str, config: dict) -> Iterator[Finding]:
    """Yield the keys and values with which a library does not start."""
    known = known_libraries()[library]
    yield from _mistyped(library, config, known["closed"])
    if library == "deepspeed":
        yield from _left_open(config)
    refused = partial(finding, library=f"{library} {known['version']}")
    values = flat(known["sections"][""] | known["sections"])
    for place, kind, value in _typed(known["types"], config):
        try:
            values[place] = SchemaValidator(kind).validate_python(value)
        except ValidationError as error:
            was_removed = error.errors()[0]["type"] == "removed"  # an older release may take it
            yield refused("key_removed" if was_removed else "value_refused", problem=f"{place} {sentence(error)}")
    problems = [
        f"{json.dumps(together)[1:-1]} exclude each other"
        for together in known["exclusive"]
        if together.items() <= values.items()
    ]
    # DeepSpeed wants train_batch_size = micro-batch x gradient accumulation x ranks.
    rows = values.get("train_batch_size") or 0
    parts = (values.get("train_micro_batch_size_per_gpu") or 1) * (values.get("gradient_accumulation_steps") or 1)
    if rows % parts:
        problems.append(f"no number of ranks gives a train_batch_size of {rows:g}, with {parts:g} sequences on each")
    for problem in problems:
        yield refused("value_refused", problem=problem)


def _left_open(config: dict) -> Iterator[Finding]:
    """Yield the keys of a DeepSpeed config whose `auto` nothing fills in."""
    filled = texts()["auto_not_filled"]["filled"]
    left = [printable(key) for key, value in flat(config).items() if value == AUTO and key not in filled]
    if left:
        yield finding("auto_not_filled", keys=", ".join(left))


def _typed(types: dict[str, dict], config: dict) -> Iterator[tuple[str, Any, Any]]:
    """Yield each value whose type a library knows: its dotted path, the type and the value."""
    for path, of_section in types.items():
        for key, value in section_at(config, path).items():
            if key in of_section and value != AUTO:
                yield f"{path}.{key}".lstrip("."), of_section[key], value


def _without_effect(config: dict) -> Iterator[Finding]:
    """Yield what a stage ignores, and the findings whose `configs` have this one, by patterns of values at paths."""
    zero = zero_section(config)
    config = config | {"zero_optimization": zero}

    def text_at(path: str) -> str:
        value = dig(config, path)
        return f"section of {', '.join(value)}" if isinstance(value, dict) else str(comparable(value))

    for id, text in texts().items():
        for each in text.get("configs", ()):
            if all(re.fullmatch(pattern, text_at(path)) for path, pattern in each["when"].items()):
                yield finding(id, **each)
    stage = 2 if zero.get("stage") == AUTO else zero.get("stage") or 0  # as Accelerate and the Trainer fill it in
    for does, do in promises_ignored(config, stage):
        yield finding("stage_ignores", stage=stage, does=does, do=do)
