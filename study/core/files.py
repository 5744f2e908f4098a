"""Reads and writes files that may come from a stranger: regular, of limited size, never through a link.

If a file cannot be read, there is an OSError whose `strerror` says why. Content that is not valid is
a ValueError.
"""

import contextlib
import errno
import functools
import json
import os
import re
import reprlib
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from study.core.errors import LONGEST_NAME, Stop, nearest

# NONBLOCK: a pipe is opened and refused without waiting. NOCTTY: no terminal becomes the controlling one. Windows has
# none of these.
NONBLOCK, NOCTTY, CLOEXEC, NOFOLLOW = (
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_NOFOLLOW")
)
READ = os.O_RDONLY | NONBLOCK | NOCTTY | CLOEXEC
LONGEST_REASON = 200
LONGEST_NAME_BYTES = 200  # file systems take 255, and the report adds a suffix


def safe_name(name) -> str:
    """Return the name itself, if it is a valid file name and cannot lead out of its folder."""
    # What is not printable includes line breaks, NUL, and characters that turn the direction of a text.
    valid = isinstance(name, str) and name.isprintable() and name not in ("", ".", "..") and not {*"/\\"} & {*name}
    if not (valid and len(name.encode(errors="replace")) <= LONGEST_NAME_BYTES):
        remedy = f"give a name of at most {LONGEST_NAME_BYTES} bytes without slashes and control characters"
        raise Stop(f"{name!r:.80} cannot be the name of a file", remedy)
    return name


def safe_join(root: Path, *names: str) -> Path:
    """Return the path of these names below a folder. Each must be a safe name, so the path cannot leave the folder."""
    return root.joinpath(*map(safe_name, names))


def read(path: Path, most_bytes: int, flags: int = READ) -> bytes:
    """Return the content of a file that the user named, or of a model's, where the Hub's cache has links."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())  # of what is open: the name may lead elsewhere by now
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file", str(path))
            if status.st_size > most_bytes:
                raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
            return file.read(status.st_size)  # read(n) reserves n bytes, also of a small file
    except ValueError:  # a NUL, or half of a character
        raise OSError(errno.EINVAL, "it is not a valid path", repr(path)) from None


def read_below(root: Path, name: str, most_bytes: int) -> bytes:
    """Return the content of a file in a folder that may be a stranger's. Links are not followed."""
    return read(safe_join(root, name), most_bytes, READ | NOFOLLOW)


def write_below(root: Path, name: str, content: bytes, to_disk: bool = True) -> None:
    """Replace a file in a folder in one step, also if it is a link. `to_disk` waits until the content is on disk."""
    path = safe_join(root, name)
    root.mkdir(parents=True, exist_ok=True)
    # Beside it, because a rename is one step only within a file system. x: a name that is taken is not written to.
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:  # a full disk, or Ctrl-C
        partial.unlink(missing_ok=True)


def is_file(word: str) -> bool:
    """Whether a word names a file. A text in quotes may be longer than a name can be, where pathlib raises."""
    return os.path.isfile(word)  # noqa: PTH113


def text_of(content: bytes, errors="replace") -> str:
    """Return the text of a file: UTF-8, or UTF-16 as PowerShell's > writes it, with a mark of byte order."""
    return content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors)


def why(error: BaseException) -> str:
    """Return why something could not be read, as part of a sentence. It is short, whatever the error contains."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:LONGEST_REASON]


# --- Reads JSON, TOML and YAML as plain values. Every fault of a text is a ValueError, and so is a key given twice

MAX_DEPTH = 30  # of nested lists and tables: configs of DeepSpeed have 5
MAX_VALUES = 2_000_000  # of one text: a dump of 2000 collectives has 60,000, a record has three a step
MAX_BITS = 1000  # of a whole number: Python does not print one of 4300 digits
# What PyYAML raises, also for a tag whose value does not fit.
ODD = (yaml.YAMLError, AttributeError, KeyError, IndexError, TypeError, OverflowError)


def from_json(content: str | bytes) -> Any:
    """Read standard JSON, without NaN and infinity."""
    parse = functools.partial(json.loads, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
    return _parsed_text(parse, content)


def from_toml(content: str | bytes) -> dict:
    return _parsed_text(tomllib.loads, content)


def from_yaml(content: str | bytes) -> Any:
    return _parsed_text(functools.partial(yaml.load, Loader=_Loader), content)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)  # before `<<` merges others into it, which may have its keys
        _each_once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return node


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a mapping. Raise ValueError for a key that is given twice, of which a parser takes the last.

    DeepSpeed refuses such a config (runtime/config_utils.py:205).
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is given twice")
    return values


def _parsed_text(parse: Callable[[str], Any], content: str | bytes) -> Any:
    text = content if isinstance(content, str) else text_of(content, "strict")
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ODD as error:
        raise ValueError(getattr(error, "problem", None) or why(error)) from None
    _refuse_excess(value)
    return value


def _refuse_excess(value: Any) -> None:
    """Raise ValueError for a value that is nested too deeply, or has too many parts, or a number that is too long.

    It goes level by level, and counts before it descends: a few of YAML's aliases stand for gigabytes, or lead back to
    themselves.
    """
    level = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, int) and each.bit_length() > MAX_BITS for each in level):
            raise ValueError(f"it has a number of more than {MAX_BITS} bits")
        level = [each for each in level if isinstance(each, (dict, list, tuple, set))]
        count += sum(map(len, level))
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        level = [inner for each in level for inner in ([*each, *each.values()] if isinstance(each, dict) else each)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def beside(module: str, name: str) -> dict:
    """Return the content of a file of ours: beside(__file__, "tasks.toml")."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


# --- Turns pydantic's errors into one sentence: where the mistake is, what was expected, and what came

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 80
PLAINER = beside(__file__, "plainer.toml")


def sentence(error: ValidationError, known: Iterable[str] = (), name=".".join) -> str:
    """Return the first mistake as a sentence. `known`: possible field names; `name` turns a location into text."""
    first = error.errors(include_url=False)[0]  # without pydantic's page about the kind of mistake
    # Parts such as literal['auto'] and constrained-int are pydantic's ways through a union, and no names of ours.
    where = name([str(part) for part in first["loc"] if not str(part).endswith((")", "]", "-int"))])
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        problem = "is missing"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # the second is of dataclasses
        problem = "is not known"
        if known:
            problem += f"; {nearest(str(first['loc'][-1]), known)}"
    elif first["type"] != "value_error":
        for words, plainer in PLAINER.items():
            problem = re.sub(words, plainer, problem)
        problem = f"{problem} (got {SHOWN.repr(first.get('input'))})"
    return f"{where[-LONGEST_NAME:]} {problem}".strip()


# --- Reads a file into a type. Every fault of a file is one sentence: which file, what is wrong, and what to do

T = TypeVar("T")
PARSERS = {".json": from_json, ".toml": from_toml}  # of other suffixes: from_yaml


def load(
    path: Path,
    model: type[T],
    *,
    what: str,
    remedy: str,
    most_bytes: int,
    links: bool = False,
    missing: str = "",
    known: Iterable[str] = (),
) -> T:
    """Return the content of a JSON, TOML or YAML file as a type. Raise Stop if it cannot be read, or is not valid.

    `what` names the content: "a record". `missing` is what to do if there is no such file, and `known` are the keys
    that one which is not known may mean. Links are followed only if the user named the file, and never where it may be
    a stranger's.
    """
    parse = PARSERS.get(path.suffix, from_yaml)
    content = None
    try:
        content = parse(read(path, most_bytes, READ if links else READ | NOFOLLOW))
        return TypeAdapter(model).validate_python(content)
    except ValidationError as error:
        where = functools.partial(_with_ids, content)
        raise Stop(f"{path} is not {what}: {sentence(error, known, where)}", remedy) from None
    except (OSError, ValueError) as error:
        if missing and isinstance(error, FileNotFoundError):
            remedy = missing
        raise Stop(f"{str(path)!r:.300} cannot be read ({why(error)})", remedy) from None


def _with_ids(content: Any, parts: list[str]) -> str:
    """Return a location with the ids of rows in place of their numbers: fault.my-fault.since, not fault.4.since."""
    names = []
    for part in parts:
        if isinstance(content, list) and part.isdigit():
            content = content[int(part)]
            part = str(content.get("id", part)) if isinstance(content, dict) else part
        else:
            content = content.get(part) if isinstance(content, dict) else None
        names.append(part)
    return ".".join(names)


# --- Writes an output folder as a whole: beside the old one, which it then replaces

MANIFEST = "study-manifest.json"


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. It replaces `out` if the block succeeds; otherwise it is removed."""
    # A manifest in the folder lists every file that was written. What has anything else belongs to somebody else.
    try:
        out = out.resolve()
        refuse_foreign(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, for the rename. What was there before goes into the scratch folder, and is removed with it.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            yield new
            (new / MANIFEST).write_text(json.dumps({"files": sorted(_names(new))}, indent=1) + "\n")
            refuse_foreign(out)  # again: the build took its time
            if out.exists():
                out.rename(Path(scratch, "old"))
            new.rename(out)
    except OSError as error:
        raise Stop(f"{out} cannot be written ({why(error)})", "give another --out") from None


def refuse_foreign(out: Path) -> None:
    """Raise Stop if the folder contains anything that no earlier build has written."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        known = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Stop(f"{out} was not made by this command", "give another --out, or remove it yourself") from None
    if foreign := _names(out).difference(known, [MANIFEST]):
        what = f"{out} holds files that this command did not write ({len(foreign)}, such as {min(foreign)})"
        raise Stop(what, "move them away, or give another --out")


def _names(folder: Path) -> set[str]:
    """Return the files below a folder. A link is one, also if it leads to a folder."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)) for path in paths}


def value_at(content: Any, path: str) -> Any:
    """Return the value at a dotted path of names and places in lists. None if there is none."""
    # The empty path is the content. An older record lacks a newer field, and a run of two ranks has no third.
    for name in filter(None, path.split(".")):
        try:
            if isinstance(content, BaseModel):
                content = dict(content)
            content = content[int(name) if isinstance(content, list) else name]
        except (LookupError, ValueError, TypeError):
            return None
    return content


def flat(content: dict, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path. Lists without sections, and empty sections, are values."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def section_at(config: Any, path: str) -> dict:
    """Return the section at a dotted path. Empty if there is none, or another value."""
    section = value_at(config, path)
    return section if isinstance(section, dict) else {}
